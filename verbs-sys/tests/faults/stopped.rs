//! A peer that is there, but does nothing.

use rustix::process::Signal;
use verbs_sys::WcStatus;

use crate::support::{
    Host, LinkKind, Process, Random, Record, Setup, assert_works, await_requests, connect, record,
    settle, start_traffic,
};

/// What a requester may keep for a peer that takes nothing, and what comes and goes anyway.
const KEPT_KIB: usize = 8 << 10;

fn a_peer_stops(scenario: &'static str, kind: LinkKind) {
    let [here, there] = Host::two(kind);
    let mut random = Random::new(record::seed());
    let mut record = Record::new(scenario);
    let mut a = Process::start(&here);
    let [mut b, mut c] = [&there, &there].map(Process::start);
    while record.goes_on() {
        let with_b = connect(&mut a, &mut b, Setup::default());
        let with_c = connect(&mut a, &mut c, Setup::patient());
        start_traffic([&mut a, &mut b], with_b, &mut random, None);
        start_traffic([&mut a, &mut c], with_c, &mut random, None);
        await_requests(&mut a, with_b.ends[0], 100 + random.len(500) as u64);
        let before = a.usage().resident_kib;
        b.signal(Signal::STOP);
        let report = a.outcome(with_b.ends[0]);
        report.assert_failed("the one that goes on", &[WcStatus::RetryExcErr]);
        record.add(&report);
        let after = a.usage().resident_kib;
        assert!(after < before + KEPT_KIB, "{before} KiB became {after} KiB");
        let so_far = a.report(with_c.ends[0]).succeeded;
        await_requests(&mut a, with_c.ends[0], so_far + 20);
        b.signal(Signal::CONT);
        // It learns that its peer has given it up.
        let given_up = [WcStatus::RetryExcErr, WcStatus::WrFlushErr];
        b.outcome(with_b.ends[1])
            .assert_failed("the one that was stopped", &given_up);
        settle(&mut a, &mut b, with_b);
        let new = assert_works(&mut a, &mut b, &mut random, 50);
        a.stop_traffic(with_c.ends[0]);
        c.stop_traffic(with_c.ends[1]);
        for report in settle(&mut a, &mut c, with_c) {
            report.assert_succeeded("a connection beside it");
            record.add(&report);
        }
        for link in [with_b, new] {
            a.assert_guards(link.ends[0]);
            a.destroy(link.ends[0]);
            b.destroy(link.ends[1]);
        }
        a.destroy(with_c.ends[0]);
        c.destroy(with_c.ends[1]);
    }
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn stopped_where_owners_copy() {
    a_peer_stops("stopped, owners copy", LinkKind::OwnerCopies);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn stopped_in_strict_mode() {
    a_peer_stops("stopped, strict mode", LinkKind::Strict);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn stopped_on_another_host() {
    a_peer_stops("stopped, TCP", LinkKind::Tcp);
}

/// Shared memory needs nobody at the other end, and a message waits until somebody is there again.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn stopped_while_memory_is_shared() {
    let [here, there] = Host::two(LinkKind::Shm);
    let mut random = Random::new(record::seed());
    let mut record = Record::new("stopped, shared memory");
    let mut a = Process::start(&here);
    let [mut b, mut c] = [&there, &there].map(Process::start);
    while record.goes_on() {
        let with_b = connect(&mut a, &mut b, Setup::default());
        let with_c = connect(&mut a, &mut c, Setup::default());
        start_traffic([&mut a, &mut b], with_b, &mut random, None);
        start_traffic([&mut a, &mut c], with_c, &mut random, None);
        await_requests(&mut a, with_b.ends[0], random.len(500) as u64);
        b.signal(Signal::STOP);
        let so_far = a.report(with_c.ends[0]).succeeded;
        await_requests(&mut a, with_c.ends[0], so_far + 500);
        b.signal(Signal::CONT);
        let so_far = a.report(with_b.ends[0]).succeeded;
        await_requests(&mut a, with_b.ends[0], so_far + 20);
        for (peer, link) in [(&mut b, with_b), (&mut c, with_c)] {
            a.stop_traffic(link.ends[0]);
            peer.stop_traffic(link.ends[1]);
            for report in settle(&mut a, peer, link) {
                report.assert_succeeded("a stopped peer, or one beside it");
                record.add(&report);
            }
            a.assert_guards(link.ends[0]);
            a.destroy(link.ends[0]);
            peer.destroy(link.ends[1]);
        }
    }
}
