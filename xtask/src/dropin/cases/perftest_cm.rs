//! perftest, whose two sides connect by the connection manager (`-R`).
//!
//! They make a first connection, over which they agree on the second, and the server begins to listen for that when the
//! client may have asked already.

use super::super::case::{Case, Holds};

const PACKAGE: &str = "perftest";

/// Each operation once, and datagrams; on one host and between two.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (program, more) in [
        ("ib_write_bw", &[][..]),
        ("ib_read_bw", &[]),
        ("ib_send_bw", &["-b"]),
        ("ib_atomic_bw", &[]),
        ("ib_write_lat", &[]),
        ("ib_read_lat", &[]),
        ("ib_send_lat", &["-e"]),
        ("ib_send_bw", &["-c", "UD", "-s", "1024"]),
        ("ib_write_bw", &["-q", "8"]),
    ] {
        let arguments = [&["-d", "soft0", "-R", "-n", "100"], more].concat();
        let case = Case::pair(PACKAGE, program, &arguments).holds(Holds::Says("rdma_cm"));
        cases.extend([case.clone(), case.between_hosts()]);
    }
    cases
}
