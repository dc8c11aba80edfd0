//! The examples of rdma-core's connection manager.

use super::super::case::{ADDRESS, Case, Holds, PORT};

const PACKAGE: &str = "rdmacm-utils";

/// Pings whose data both ends check, many connections at a time, datagram services, and the calls that wait by
/// themselves.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for size in ["64", "4096", "65000"] {
        cases.push(rping(&["-v", "-V", "-C", "10", "-S", size]));
    }
    // Its own queue pair, for which it asks how to bring it to each state.
    cases.push(rping(&["-q", "-v", "-V", "-C", "10"]));
    cases.push(rping(&["-v", "-V", "-C", "10"]).between_hosts());
    cases.push(persistent_rping());
    cases.push(rping_v6());
    for arguments in [
        &["-c", "16", "-C", "50", "-S", "3000"][..],
        &["-P", "ib", "-c", "4"],
        // Each identifier gets a channel of its own before it is connected.
        &["-m", "-c", "8"],
    ] {
        cases.push(ucmatose(arguments));
    }
    cases.push(ucmatose(&["-c", "8", "-C", "20"]).between_hosts());
    for arguments in [&["-c", "8", "-C", "100"][..], &["-P", "ipoib"]] {
        cases.push(udaddy(arguments));
    }
    cases.push(udaddy(&["-c", "8", "-C", "20"]).between_hosts());
    cases.extend(synchronous());
    cases.push(cmtime());
    cases
}

fn rping(arguments: &[&str]) -> Case {
    let server = ["-s", "-a", ADDRESS, "-p", PORT];
    let client = ["-c", "-a", ADDRESS, "-p", PORT];
    Case::sides(PACKAGE, "rping", arguments, [&server, &client])
        .holds(Holds::Says("ping data: rdma-ping-9: "))
}

fn rping_v6() -> Case {
    let (server, client) = (["-s", "-p", PORT], ["-c", "-p", PORT]);
    let arguments = ["-a", "::1", "-v", "-V", "-C", "10"];
    Case::sides(PACKAGE, "rping", &arguments, [&server, &client])
        .holds(Holds::Says("ping data: rdma-ping-9: "))
}

/// With a server that goes on, and has a thread for each client. The client's status tells whether its pings were right.
fn persistent_rping() -> Case {
    let server = ["-P", "-s", "-a", ADDRESS, "-p", PORT];
    let client = ["-c", "-a", ADDRESS, "-p", PORT];
    Case::sides(PACKAGE, "rping", &["-V", "-C", "10"], [&server, &client])
        .named("rping -P -V -C 10")
        .server_stays()
}

fn ucmatose(arguments: &[&str]) -> Case {
    let server = ["-b", ADDRESS, "-p", PORT];
    let client = ["-s", ADDRESS, "-p", PORT];
    Case::sides(PACKAGE, "ucmatose", arguments, [&server, &client])
        .holds(Holds::Says("return status 0"))
}

/// Its port cannot be chosen: several runs at a time take turns.
fn udaddy(arguments: &[&str]) -> Case {
    let sides: [&[&str]; 2] = [&["-b", ADDRESS], &["-s", ADDRESS]];
    Case::sides(PACKAGE, "udaddy", arguments, sides)
        .at_port(7174)
        .holds(Holds::Says("return status 0"))
}

fn synchronous() -> [Case; 3] {
    let sides: [&[&str]; 2] = [&["-p", PORT], &["-s", ADDRESS, "-p", PORT]];
    let simple = Case::sides(PACKAGE, "rdma_server", &[], sides).client_is("rdma_client");
    let shared = Case::sides(PACKAGE, "rdma_xserver", &[], sides).client_is("rdma_xclient");
    [
        simple.clone(),
        simple.between_hosts(),
        // With a shared receive queue.
        shared,
    ]
    .map(|case| case.holds(Holds::Says("end 0")))
}

/// Connections by the hundred, and how long each step of them takes.
fn cmtime() -> Case {
    let sides: [&[&str]; 2] = [&["-b", ADDRESS, "-p", PORT], &["-s", ADDRESS, "-p", PORT]];
    Case::sides(PACKAGE, "cmtime", &["-c", "500"], sides).server_stays()
}
