//! A cable that is cut, and mended in time or too late.

use std::{thread, time::Duration};

use verbs_sys::WcStatus;

use crate::support::{
    Host, LinkKind, Process, Random, Record, Setup, assert_works, await_requests, connect, network,
    record, settle, start_traffic,
};

fn two() -> [Process; 2] {
    Host::two(LinkKind::Tcp).map(|host| Process::start(&host))
}

/// The cable is mended before anybody gives up: nothing is lost, and nothing is done twice.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn cut_and_mended_in_time() {
    let networks = network::hosts();
    let [mut a, mut b] = two();
    let mut random = Random::new(record::seed());
    let mut record = Record::new("cut, mended in time");
    while record.goes_on() {
        let link = connect(&mut a, &mut b, Setup::patient());
        start_traffic([&mut a, &mut b], link, &mut random, None);
        await_requests(&mut a, link.ends[0], random.len(1000) as u64);
        let at = &networks[random.below(2) as usize];
        let outage = Duration::from_millis(random.len(2000) as u64);
        network::set_cable(at, false);
        // How long it lasts is what is tried.
        thread::sleep(outage);
        network::set_cable(at, true);
        let (at_a, at_b) = (a.report(link.ends[0]), b.report(link.ends[1]));
        await_requests(&mut a, link.ends[0], at_a.succeeded + 20);
        await_requests(&mut b, link.ends[1], at_b.succeeded + 20);
        a.stop_traffic(link.ends[0]);
        b.stop_traffic(link.ends[1]);
        for report in settle(&mut a, &mut b, link) {
            report.assert_succeeded("after the cut");
            record.add(&report);
        }
        a.destroy(link.ends[0]);
        b.destroy(link.ends[1]);
    }
}

/// The cable is mended when all requests have been given up.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn cut_for_too_long() {
    let networks = network::hosts();
    let [mut a, mut b] = two();
    let mut random = Random::new(record::seed());
    let mut record = Record::new("cut for too long");
    while record.goes_on() {
        let link = connect(&mut a, &mut b, Setup::default());
        start_traffic([&mut a, &mut b], link, &mut random, None);
        await_requests(&mut a, link.ends[0], random.len(1000) as u64);
        let at = &networks[random.below(2) as usize];
        network::set_cable(at, false);
        for (end, id) in [(&mut a, link.ends[0]), (&mut b, link.ends[1])] {
            let report = end.outcome(id);
            // The queue pair has one life: what fails first in it ends it both ways.
            report.assert_failed("after the cut", &[WcStatus::RetryExcErr]);
        }
        network::set_cable(at, true);
        for report in settle(&mut a, &mut b, link) {
            record.add(&report);
        }
        let new = assert_works(&mut a, &mut b, &mut random, 50);
        for link in [link, new] {
            a.assert_guards(link.ends[0]);
            b.assert_guards(link.ends[1]);
            a.destroy(link.ends[0]);
            b.destroy(link.ends[1]);
        }
    }
}
