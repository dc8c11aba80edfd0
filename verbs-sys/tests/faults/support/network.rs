//! The hosts of the tests: network namespaces that `cargo xtask faults` has made.

use std::{env, fs::File, net::Ipv4Addr, os::fd::AsFd, panic, process::Command, thread};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// The first and second host, with a cable between them: names separated by a comma.
const HOSTS: &str = "VERBS_FAULTS_HOSTS";

/// The same, with two more between the hosts: the first host, what it takes for the second, what the second
/// takes for the first, and the second.
const MIDDLE: &str = "VERBS_FAULTS_MIDDLE";

/// Where the hosts are for each other.
pub const ADDRESSES: [Ipv4Addr; 2] = [Ipv4Addr::new(192, 0, 2, 1), Ipv4Addr::new(192, 0, 2, 2)];
/// The device's, where none is given.
const BASE_PORT: u16 = 18_600;

/// The namespaces of two hosts.
pub fn hosts() -> [String; 2] {
    names(HOSTS)
}

/// The namespaces of two hosts and of those between them.
pub fn with_middle() -> [String; 4] {
    names(MIDDLE)
}

fn names<const N: usize>(variable: &str) -> [String; N] {
    let text = env::var(variable).unwrap_or_default();
    let names: Vec<String> = text.split(',').map(str::to_owned).collect();
    names.try_into().unwrap_or_else(|_| {
        panic!("{variable} names no network namespaces; `cargo xtask faults` makes them")
    })
}

/// Where the process of a queue pair listens.
pub fn port(qp_num: u32) -> u16 {
    BASE_PORT + (qp_num >> 14) as u16
}

/// Does something in a network namespace: sockets that are made there, and processes started, belong
/// to it.
pub fn within<T: Send>(network: &str, act: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let inside = scope.spawn(|| {
            let file = File::open(format!("/run/netns/{network}")).expect("no such network");
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .expect("cannot enter a network");
            act()
        });
        inside
            .join()
            .unwrap_or_else(|panic| panic::resume_unwind(panic))
    })
}

/// Plugs or unplugs the cable at a host.
pub fn set_cable(network: &str, up: bool) {
    let state = if up { "up" } else { "down" };
    let status = Command::new("ip")
        .args(["-n", network, "link", "set", "cable", state])
        .status()
        .expect("cannot start ip");
    assert!(status.success(), "cannot set the cable {state}");
}
