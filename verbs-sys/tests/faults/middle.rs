//! Bytes that come late, in pieces, changed, or not at all.

use std::sync::{Arc, Mutex};

use crate::support::{
    Host, Link, LinkKind, Mix, Process, Random, Record, Report, Setup, assert_works, connect,
    network,
    proxy::{Fault, Proxy},
    record, settle,
};

/// Two hosts, and what is between them.
struct Bed {
    a: Process,
    b: Process,
    proxy: Proxy,
}

impl Bed {
    fn new(random: &mut Random) -> Self {
        let networks = network::with_middle();
        let start = |at: usize| {
            Process::start(&Host {
                network: networks[at].clone(),
                kind: LinkKind::Tcp,
            })
        };
        let (mut a, mut b) = (start(0), start(3));
        // Any queue pair tells where its process listens.
        let ports = [&mut a, &mut b].map(|process| {
            let made = process.create(Setup::default());
            process.destroy(made.id);
            network::port(made.qp_num())
        });
        let proxy = Proxy::start(&networks, ports, random.next());
        Self { a, b, proxy }
    }

    /// Has so many requests sent both ways on a new connection, and returns what became of them.
    fn traffic(
        &mut self,
        setup: Setup,
        random: &mut Random,
        count: u64,
        len: usize,
    ) -> [Report; 2] {
        let link = connect(&mut self.a, &mut self.b, setup);
        for (end, id) in [(&mut self.a, link.ends[0]), (&mut self.b, link.ends[1])] {
            end.start_traffic(id, Mix::new(random.next(), len).of(count));
        }
        let reports = settle(&mut self.a, &mut self.b, link);
        self.close(link);
        reports
    }

    fn close(&mut self, link: Link) {
        for (end, id) in [(&mut self.a, link.ends[0]), (&mut self.b, link.ends[1])] {
            end.assert_guards(id);
            end.destroy(id);
        }
    }
}

/// Bytes that come in time, and as they were, are enough.
fn nothing_is_lost(scenario: &'static str, fault: Fault, count: u64, len: usize) {
    let mut random = Random::new(record::seed());
    let mut record = Record::new(scenario);
    let mut bed = Bed::new(&mut random);
    bed.proxy.plan(move || [fault; 2]);
    while record.goes_on() {
        for report in bed.traffic(Setup::patient(), &mut random, count, len) {
            report.assert_succeeded(scenario);
            record.add(&report);
        }
    }
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn middle_delays() {
    nothing_is_lost("delayed on the way", Fault::Delay, 60, 150_000);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn middle_passes_on_single_bytes() {
    nothing_is_lost("single bytes on the way", Fault::Split(1), 60, 400);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn middle_passes_on_pieces() {
    nothing_is_lost("pieces on the way", Fault::Split(2000), 60, 150_000);
}

/// One fault, somewhere in one of the connections of a pair of queue pairs: a request did what it says or
/// ends with an error, and none hangs.
fn one_fault(scenario: &'static str, fault: impl Fn(&mut Random) -> Fault) {
    let mut random = Random::new(record::seed());
    let mut record = Record::new(scenario);
    let mut bed = Bed::new(&mut random);
    while record.goes_on() {
        let fault = fault(&mut random);
        // The first or second connection, there or back; later ones are good.
        let mut left = random.below(4);
        let done = Arc::new(Mutex::new(false));
        let at = Arc::clone(&done);
        bed.proxy.plan(move || {
            let mut done = at.lock().expect("poisoned");
            if *done {
                return [Fault::None; 2];
            }
            if left < 2 {
                *done = true;
            }
            let faults = match left {
                0 => [fault, Fault::None],
                1 => [Fault::None, fault],
                _ => [Fault::None; 2],
            };
            left = left.saturating_sub(2);
            faults
        });
        let reports = bed.traffic(Setup::default(), &mut random, 60, 100_000);
        let failed = reports.iter().any(|report| report.failed.is_some());
        record.count(if failed {
            "rounds that fail"
        } else {
            "rounds that do not"
        });
        for report in &reports {
            record.add(report);
        }
    }
    bed.proxy.plan(|| [Fault::None; 2]);
    let link = assert_works(&mut bed.a, &mut bed.b, &mut random, 50);
    bed.close(link);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn middle_changes_a_bit() {
    one_fault("a bit changed on the way", |random| Fault::Flip {
        at: random.len(1 << 20) as u64 - 1,
        bit: random.below(8) as u32,
    });
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn middle_ends_a_connection() {
    one_fault("ended on the way", |random| Fault::Cut {
        at: random.len(1 << 20) as u64 - 1,
    });
}
