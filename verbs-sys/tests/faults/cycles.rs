//! Peers that come and are killed, again and again: what they leave behind.

use crate::support::{
    Host, LinkKind, Process, Random, Record, Setup, await_requests, connect, record, start_traffic,
};

const CYCLES: u64 = 200;
/// Cycles after which all that is kept for good is there.
const WARM_UP: u64 = 20;
/// What the allocator may do in its own interest.
const MORE_MAPPINGS: usize = 8;
const MORE_KIB: usize = 8 << 10;

fn peers_come_and_go(scenario: &'static str, kind: LinkKind) {
    let hosts = Host::two(kind);
    let mut random = Random::new(record::seed());
    let mut record = Record::new(scenario);
    let mut parent = Process::start(&hosts[0]);
    let descriptors = parent.usage().descriptors;
    let mut before = None;
    let cycles = WARM_UP + record::cycles(CYCLES);
    while record.goes_on_after(cycles) {
        let cycle = record.rounds;
        let mut child = Process::start(&hosts[1]);
        let link = connect(&mut parent, &mut child, Setup::default());
        start_traffic([&mut parent, &mut child], link, &mut random, None);
        await_requests(&mut parent, link.ends[0], random.len(20) as u64);
        child.kill();
        // Every other time without waiting for what becomes of it.
        if cycle.is_multiple_of(2) {
            let report = parent.outcome(link.ends[0]);
            report.assert_right("the parent");
            record.add(&report);
        }
        parent.destroy(link.ends[0]);
        if cycle == WARM_UP {
            // Whatever began with the first peer goes on: a thread, and what it waits with.
            before = Some(parent.await_descriptors(descriptors + 8));
        }
    }
    let before = before.expect("there was a warm-up");
    let after = parent.await_descriptors(before.descriptors);
    let grown = after.mappings > before.mappings + MORE_MAPPINGS
        || after.resident_kib > before.resident_kib + MORE_KIB;
    assert!(!grown, "{before:?} became {after:?}");
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn cycles_with_shared_memory() {
    peers_come_and_go("killed again and again, shared", LinkKind::Shm);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn cycles_where_owners_copy() {
    peers_come_and_go("killed again and again, owners", LinkKind::OwnerCopies);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn cycles_in_strict_mode() {
    peers_come_and_go("killed again and again, strict", LinkKind::Strict);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn cycles_with_another_host() {
    peers_come_and_go("killed again and again, TCP", LinkKind::Tcp);
}
