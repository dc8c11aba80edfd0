//! The bandwidth and latency tests that are run on real devices.

use super::super::case::{Case, Holds};

const PACKAGE: &str = "perftest";

/// All sizes of messages, 2 bytes to 8 MiB, as powers of two.
const ALL: Holds = Holds::Rows(1, 23);
/// Those that a datagram can have.
const OF_A_PACKET: Holds = Holds::Rows(1, 12);

/// Each operation over each kind of service, in both directions, asleep, on many queue pairs, inline, from a shared
/// queue, in lists. Latency is that of a ping-pong, or of one request at a time.
///
/// The latency tests asleep (`-e`) take each event for one completion, with room for one request: an event too many
/// makes them wait for ever. They are long enough for every sender to be interrupted between its message and its ring.
///
/// Both directions, asleep, are tested on one queue pair only: the program polls once for each event, for as many
/// completions as one queue pair has receives, and sleeps over what else has come, on any device.
///
/// Connections by the connection manager are in `perftest_cm`.
pub fn cases() -> Vec<Case> {
    let all = ["ib_write_bw", "ib_read_bw", "ib_send_bw"]
        .into_iter()
        .chain(["ib_write_lat", "ib_read_lat", "ib_send_lat"])
        .map(|program| run(program, "-a -n 100", ALL));
    let datagrams =
        ["ib_send_bw", "ib_send_lat"].map(|program| run(program, "-c UD -a -n 100", OF_A_PACKET));
    let single = [
        ("ib_atomic_bw", "-n 1000", 3),
        ("ib_atomic_bw", "-n 1000 -A CMP_AND_SWAP", 3),
        ("ib_atomic_bw", "-n 1000 -b", 3),
        ("ib_atomic_bw", "-n 1000 -e", 3),
        ("ib_atomic_bw", "-n 100 -q 16", 3),
        ("ib_atomic_bw", "-n 1000 -c XRC", 3),
        ("ib_atomic_lat", "-n 1000", 3),
        ("ib_atomic_lat", "-n 2000 -e", 3),
        ("ib_read_bw", "-n 1000 -b", 16),
        ("ib_read_bw", "-n 1000 -e", 16),
        ("ib_read_bw", "-n 1000 -q 16", 16),
        ("ib_read_lat", "-n 2000 -e", 1),
        ("ib_read_bw", "-n 1000 -c XRC", 16),
        ("ib_send_bw", "-n 1000 -b", 16),
        ("ib_send_bw", "-n 1000 -e", 16),
        ("ib_send_bw", "-n 1000 -b -e", 16),
        ("ib_send_bw", "-n 1000 -e -q 4", 16),
        ("ib_send_bw", "-n 1000 -q 16", 16),
        ("ib_send_bw", "-n 1000 -s 64 -I 64", 6),
        ("ib_send_bw", "-n 1600 -s 4096 -l 16", 12),
        ("ib_send_bw", "-n 1000 -s 4096 --use-srq -q 4", 12),
        ("ib_send_bw", "-n 1000 -c UC", 16),
        ("ib_send_bw", "-n 1000 -c UC -b -e", 16),
        ("ib_send_bw", "-n 5000 -c UD -s 1024", 10),
        ("ib_send_bw", "-n 1000 -c UD -s 1024 -b", 10),
        ("ib_send_bw", "-n 1000 -c UD -s 1024 -e", 10),
        ("ib_send_bw", "-n 1000 -c UD -s 1024 -q 16", 10),
        ("ib_send_lat", "-n 2000 -e", 1),
        ("ib_send_lat", "-n 1000 -s 64 -I 64", 6),
        ("ib_send_lat", "-n 1000 --use-srq", 1),
        ("ib_send_lat", "-n 1000 -c UC", 1),
        ("ib_send_lat", "-n 2000 -c UC -e", 1),
        ("ib_send_lat", "-n 2000 -c UD -e", 1),
        ("ib_send_bw", "-n 1000 -c XRC", 16),
        ("ib_send_bw", "-n 1000 -c XRC -b -e", 16),
        ("ib_send_bw", "-n 1000 -c XRC -q 4", 16),
        ("ib_send_lat", "-n 1000 -c XRC", 1),
        ("ib_send_lat", "-n 2000 -c XRC -e", 1),
        ("ib_write_bw", "-n 1000 -b", 16),
        ("ib_write_bw", "-n 1000 -q 16", 16),
        ("ib_write_bw", "-n 1000 -s 64 -I 64", 6),
        ("ib_write_bw", "-n 1600 -s 4096 -l 16", 12),
        ("ib_write_bw", "-n 1000 -c UC", 16),
        ("ib_write_lat", "-n 1000 -s 64 -I 64", 6),
        ("ib_write_bw", "-n 1000 -c XRC", 16),
        ("ib_write_lat", "-n 1000 -c UC", 1),
    ]
    .map(|(program, arguments, power)| run(program, arguments, Holds::Rows(power, power)));
    let between = [
        ("ib_write_bw", "-n 100", 16),
        ("ib_write_lat", "-n 100", 1),
        ("ib_read_bw", "-n 100", 16),
        ("ib_send_bw", "-n 100 -b", 16),
        ("ib_send_lat", "-n 2000 -e", 1),
        ("ib_atomic_bw", "-n 100", 3),
        ("ib_send_bw", "-n 100 -c XRC -b", 16),
        ("ib_send_lat", "-n 2000 -c XRC -e", 1),
        ("ib_read_bw", "-n 100 -c XRC", 16),
        ("ib_atomic_bw", "-n 100 -c XRC", 3),
    ]
    .map(|(program, arguments, power)| {
        run(program, arguments, Holds::Rows(power, power)).between_hosts()
    });
    all.chain(datagrams).chain(single).chain(between).collect()
}

fn run(program: &'static str, arguments: &str, rows: Holds) -> Case {
    let device = ["-d", "soft0"];
    let arguments: Vec<&str> = device.into_iter().chain(arguments.split(' ')).collect();
    Case::pair(PACKAGE, program, &arguments).holds(rows)
}
