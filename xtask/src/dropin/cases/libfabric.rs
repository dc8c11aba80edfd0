//! libfabric, whose provider `verbs` connects by the connection manager.

use super::super::case::{ADDRESS, Case, PORT};

const PACKAGE: &str = "libfabric-bin";

/// Ping-pong of every size with checked data: over connections, over datagrams, and over connections that look like
/// datagrams.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (provider, endpoint) in [
        ("verbs", "msg"),
        ("verbs", "dgram"),
        ("verbs;ofi_rxm", "rdm"),
    ] {
        let arguments = ["-p", provider, "-e", endpoint, "-c"];
        let sides: [&[&str]; 2] = [&["-B", PORT], &["-P", PORT, ADDRESS]];
        cases.push(Case::sides(PACKAGE, "fi_pingpong", &arguments, sides));
    }
    cases
}
