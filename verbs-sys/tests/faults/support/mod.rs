//! Two ends in processes of their own, with traffic whose every byte is known.

pub mod memory;
pub mod network;
pub mod node;
pub mod process;
pub mod proxy;
pub mod random;
pub mod record;
pub mod traffic;
pub mod wire;

pub use self::{
    node::{Grant, Made, Setup},
    process::{Host, LinkKind, Process, serve_if_asked},
    random::Random,
    record::Record,
    traffic::{Mix, Report},
};

/// A connected pair of queue pairs.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    /// The index at either end.
    pub ends: [usize; 2],
    pub qp_nums: [u32; 2],
}

/// Connects a new queue pair of one process with a new one of another.
pub fn connect(a: &mut Process, b: &mut Process, setup: Setup) -> Link {
    let made = [a.create(setup), b.create(setup)];
    a.connect(&made[0], &made[1]);
    b.connect(&made[1], &made[0]);
    Link {
        ends: [made[0].id, made[1].id],
        qp_nums: [made[0].qp_num(), made[1].qp_num()],
    }
}

/// Waits for both ends to have no request under way, asserts that nobody has seen anything wrong and that
/// either memory is what the other end has made of it, and returns the reports.
#[track_caller]
pub fn settle(a: &mut Process, b: &mut Process, link: Link) -> [Report; 2] {
    let [at_a, at_b] = link.ends;
    a.outcome(at_a);
    let at_end = [b.outcome(at_b), a.outcome(at_a)];
    let [of_b, of_a] = at_end;
    of_a.assert_right("the first end");
    of_b.assert_right("the second end");
    a.judge(at_a, b.memory(at_b), of_b.received);
    b.judge(at_b, a.memory(at_a), of_a.received);
    [of_a, of_b]
}

/// Has both ends send requests, until they are told to stop or have sent enough.
pub fn start_traffic(
    [a, b]: [&mut Process; 2],
    link: Link,
    random: &mut Random,
    limit: Option<u64>,
) {
    for (end, id) in [(a, link.ends[0]), (b, link.ends[1])] {
        let mix = Mix {
            limit,
            ..Mix::new(random.next(), traffic::SLOT_LEN)
        };
        end.start_traffic(id, mix);
    }
}

/// Sends so many requests both ways on a new connection, and asserts that all succeed.
#[track_caller]
pub fn assert_works(a: &mut Process, b: &mut Process, random: &mut Random, count: u64) -> Link {
    let link = connect(a, b, Setup::patient());
    start_traffic([a, b], link, random, Some(count));
    for report in settle(a, b, link) {
        report.assert_succeeded("a new connection");
    }
    link
}

/// Waits until an end has so many requests behind it.
#[track_caller]
pub fn await_requests(end: &mut Process, id: usize, count: u64) {
    loop {
        let report = end.report(id);
        if report.succeeded >= count {
            return;
        }
        assert_eq!(report.failed, None, "before anything happened: {report:?}");
    }
}
