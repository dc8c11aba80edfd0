//! The examples of rdma-core.

use super::super::case::{Case, Holds};

const PACKAGE: &str = "ibverbs-utils";

/// What devices say of themselves, and ping-pong over every kind of service, polled and asleep (`-e`). Each end checks
/// every byte (`-c`).
pub fn cases() -> Vec<Case> {
    let alone = |program, arguments: &[&str], words| {
        Case::alone(PACKAGE, program, arguments).holds(Holds::Says(words))
    };
    let mut cases = vec![
        alone("ibv_devices", &[], "soft0"),
        alone("ibv_devinfo", &["-v", "-d", "soft0"], "PORT_ACTIVE"),
    ];
    let programs: [(&str, &[&str]); 4] = [
        ("ibv_rc_pingpong", &["-g", "0", "-c"]),
        ("ibv_uc_pingpong", &["-g", "0", "-c"]),
        // Less than a packet, of which the header is a part.
        ("ibv_ud_pingpong", &["-g", "0", "-c", "-s", "1024"]),
        ("ibv_srq_pingpong", &["-g", "0", "-c"]),
    ];
    for (program, arguments) in programs {
        let asleep = [arguments, &["-e"]].concat();
        for arguments in [arguments, &asleep] {
            cases.push(Case::pair(PACKAGE, program, arguments).holds(Holds::Says("usec/iter")));
        }
    }
    // Of XRC; checks no bytes, and `-c` is about clients. Memory on demand is asked for with `-o`.
    let xrc = ["-g", "0", "-n", "1000"];
    let xsrq = |more: &[&str]| {
        let arguments = [&xrc[..], more].concat();
        Case::pair(PACKAGE, "ibv_xsrq_pingpong", &arguments).holds(Holds::Says("success"))
    };
    cases.extend([xsrq(&[]), xsrq(&["-e"]), xsrq(&["-o"])]);
    cases.push(Case::pair(PACKAGE, "ibv_rc_pingpong", &["-g", "0", "-c"]).between_hosts());
    cases.extend([xsrq(&[]).between_hosts(), xsrq(&["-e"]).between_hosts()]);
    cases
}
