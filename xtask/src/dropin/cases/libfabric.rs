//! libfabric, whose provider `verbs` connects by the connection manager.

use super::super::case::{ADDRESS, Case, PORT};

const PACKAGE: &str = "libfabric-bin";

/// Ping-pong of every size with checked data: over connections, over datagrams, and over connections that look like
/// datagrams.
///
/// Between two hosts over datagrams only: the program cannot be told where its server listens, and libfabric asks for
/// `localhost` then, which is for connections of this host alone, on any device that has the address.
pub fn cases() -> Vec<Case> {
    let pingpong = |provider, endpoint| {
        let arguments = ["-p", provider, "-e", endpoint, "-c"];
        let sides: [&[&str]; 2] = [&["-B", PORT], &["-P", PORT, ADDRESS]];
        Case::sides(PACKAGE, "fi_pingpong", &arguments, sides)
    };
    vec![
        pingpong("verbs", "msg"),
        pingpong("verbs", "dgram"),
        pingpong("verbs", "dgram").between_hosts(),
        pingpong("verbs;ofi_rxm", "rdm"),
    ]
}
