//! What is measured of the device alone, what it is compared with, and what is wanted.

use serde::{Deserialize, Serialize};

/// Runs of a test of UCX in one round.
pub const UCX_RUNS: usize = 30;

/// A test of one of the two programs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Test {
    /// Of `verbs-sys/examples/perf`, with these arguments.
    Perf(String),
    /// Of `ucx_perftest`: what follows its `-t`.
    Ucx(String),
}

/// One of the figures of a test.
#[derive(Clone, Debug)]
pub struct Figure {
    /// The test.
    pub test: Test,
    /// Its name there.
    pub name: &'static str,
    /// What it is to be multiplied by.
    pub scale: f64,
    /// What it says, for people.
    pub label: String,
}

/// What becomes of the two figures of a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Relation {
    /// Ours : the other, of times.
    Time,
    /// The other : ours, of times: how much faster ours is.
    Speed,
    /// Ours minus the other.
    Above,
    /// Ours.
    Absolute,
}

impl Relation {
    /// Applies it; without another figure only an absolute one has a value.
    pub fn of(self, ours: f64, other: Option<f64>) -> Option<f64> {
        match self {
            Self::Time => other.map(|other| ours / other),
            Self::Speed => other.map(|other| other / ours),
            Self::Above => other.map(|other| ours - other),
            Self::Absolute => Some(ours),
        }
    }
}

/// What a relation's value is wanted to be.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Goal {
    /// No more than this.
    AtMost(f64),
    /// No less than this.
    AtLeast(f64),
}

impl Goal {
    /// Whether `value` meets it; what is no number does not.
    pub fn met(self, value: f64) -> bool {
        match self {
            Self::AtMost(most) => value <= most,
            Self::AtLeast(least) => value >= least,
        }
    }
}

/// A line of the table, before it is measured.
#[derive(Clone, Debug)]
pub struct Comparison {
    /// The unit of the figures.
    pub unit: &'static str,
    /// What is measured.
    pub ours: Figure,
    /// What it is compared with.
    pub other: Option<Figure>,
    /// How.
    pub relation: Relation,
    /// What is wanted, if anything is.
    pub goal: Option<Goal>,
}

/// A figure of `perf` with these arguments.
fn perf(label: impl Into<String>, arguments: impl Into<String>, name: &'static str) -> Figure {
    Figure {
        test: Test::Perf(arguments.into()),
        name,
        scale: 1.0,
        label: label.into(),
    }
}

/// A test of UCX: short runs of about a millisecond.
fn ucx(test: &str, size: usize, operations: u32) -> Figure {
    Figure {
        test: Test::Ucx(format!("{test} -s {size} -n {operations} -w 500")),
        name: "ns",
        scale: 1.0,
        label: format!("{test} of {size} B"),
    }
}

fn line(
    ours: Figure,
    relation: Relation,
    other: impl Into<Option<Figure>>,
    goal: impl Into<Option<Goal>>,
) -> Comparison {
    Comparison {
        unit: "ns",
        ours,
        other: other.into(),
        relation,
        goal: goal.into(),
    }
}

/// All lines, in the order in which their tests are to run: near each other what is compared.
pub fn all() -> Vec<Comparison> {
    [one_sided(), messages(), costs()].concat()
}

/// Bytes that are moved on their own, shared memory and heap.
fn one_sided() -> Vec<Comparison> {
    use Goal::{AtLeast, AtMost};
    use Relation::{Above, Speed, Time};

    let mut lines = Vec::new();
    for (verb, command) in [("WRITE", "write"), ("READ", "read")] {
        for size in [8, 64, 128] {
            let test = format!("{command} --size {size}");
            let ours = || perf(format!("{verb} {size} B"), &*test, "ours_ns");
            let copy = perf("memcpy", &*test, "memcpy_ns");
            lines.push(line(ours(), Above, copy, AtMost(25.0)));
            lines.push(line(
                ours(),
                Time,
                ucx("ucp_get", size, 20_000),
                AtMost(0.7),
            ));
        }
    }
    let of_16 = |name| perf("16 WRITEs of 64 B, each", "chain", name);
    let puts = ucx("ucp_put_bw", 64, 20_000);
    lines.push(line(of_16("ours_ns"), Speed, puts, AtLeast(1.5)));
    for (verb, command) in [("WRITE", "write"), ("READ", "read")] {
        for (size, most) in [(4 << 10, 1.5), (64 << 10, 1.1), (1 << 20, 1.05)] {
            let test = format!("{command} --size {size}");
            let label = format!("{verb} {}", crate::format::bytes(size));
            let copy = perf("memcpy", &*test, "memcpy_ns");
            lines.push(line(
                perf(label, &*test, "ours_ns"),
                Time,
                copy,
                AtMost(most),
            ));
        }
    }
    for (verb, command) in [("WRITE", "write"), ("READ", "read")] {
        let test = format!("{command} --size 4096 --over 1048576");
        let ours = perf(format!("{verb} 4 KiB, through 1 MiB"), &*test, "ours_ns");
        let copy = perf("memcpy", &*test, "memcpy_ns");
        // A bare copy need not fetch the lines that it overwrites.
        lines.push(line(ours, Time, copy, None));
    }
    for size in [4 << 10, 64 << 10] {
        let test = format!("skew --size {size}");
        let label = format!("WRITE {}, unaligned", crate::format::bytes(size));
        let aligned = perf("aligned", &*test, "aligned_ns");
        lines.push(line(
            perf(label, &*test, "ours_ns"),
            Time,
            aligned,
            AtMost(2.2),
        ));
    }
    for size in [4 << 10, 64 << 10, 1 << 20] {
        let test = format!("heap --size {size}");
        let label = format!("WRITE {} to heap", crate::format::bytes(size));
        let bare = perf("process_vm_writev", &*test, "writev_ns");
        lines.push(line(
            perf(label, &*test, "ours_ns"),
            Speed,
            bare,
            AtLeast(0.9),
        ));
    }
    for (length, goal) in [(1, Some(AtMost(2.5))), (16, None)] {
        let test = format!("consumed --length {length}");
        let label = match length {
            1 => "64 B the peer reads at once".to_owned(),
            _ => format!("the same in chains of {length}, each"),
        };
        let copy = perf("memcpy", &*test, "memcpy_ns");
        lines.push(line(perf(label, &*test, "ours_ns"), Time, copy, goal));
    }
    lines
}

/// What both sides wait for.
fn messages() -> Vec<Comparison> {
    use Goal::AtMost;
    use Relation::Time;

    let put = || perf("WRITE 8 B, half a round trip", "put-latency", "ours_ns");
    let send = || perf("SEND 64 B, round trip", "send --size 64", "ours_ns");
    let round_trip = Figure {
        // It tells half of it.
        scale: 2.0,
        ..ucx("ucp_am_lat", 64, 1000)
    };
    vec![
        line(put(), Time, ucx("ucp_put_lat", 8, 2000), AtMost(1.1)),
        line(
            put(),
            Time,
            perf("bare cache line", "put-latency", "line_ns"),
            None,
        ),
        line(send(), Time, round_trip, AtMost(0.9)),
        line(
            send(),
            Time,
            perf("bare cache line", "send --size 64", "line_ns"),
            AtMost(3.0),
        ),
        line(
            perf("SEND 64 B, both asleep", "send-asleep", "ours_ns"),
            Time,
            perf("bare eventfd", "send-asleep", "eventfd_ns"),
            AtMost(1.4),
        ),
    ]
}

/// Posting, taking regions away, and having many queue pairs.
fn costs() -> Vec<Comparison> {
    use Goal::{AtLeast, AtMost};
    use Relation::{Absolute, Speed, Time};

    let prepared = || perf("16 WRITEs, prepared chain", "prepared", "ours_ns");
    let taken = |label, name| perf(label, "deregister --qps 64", name);
    let many = |label, name| perf(label, "many --qps 1000", name);
    vec![
        line(
            prepared(),
            Speed,
            perf("chain built anew", "prepared", "rebuilt_ns"),
            AtLeast(1.5),
        ),
        line(
            prepared(),
            Speed,
            perf("16 posts", "prepared", "singles_ns"),
            AtLeast(3.0),
        ),
        line(
            taken("deregister, 64 queue pairs idle, p50", "idle_p50_ns"),
            Absolute,
            None,
            AtMost(500.0),
        ),
        line(
            taken("deregister, 64 queue pairs busy, p99", "busy_p99_ns"),
            Absolute,
            None,
            AtMost(20_000.0),
        ),
        Comparison {
            unit: "",
            ..line(
                taken("their rate at 1000 deregistrations/s", "operations_left"),
                Absolute,
                None,
                AtLeast(0.9),
            )
        },
        line(
            many("WRITE 8 B, one of 1000 queue pairs", "of_many_ns"),
            Time,
            many("the only one", "one_ns"),
            AtMost(1.25),
        ),
        Comparison {
            unit: "KiB",
            ours: Figure {
                scale: 1.0 / 1024.0,
                ..many("memory of a queue pair, both sides", "memory_bytes")
            },
            other: None,
            relation: Absolute,
            goal: None,
        },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relations() {
        assert_eq!(Relation::Time.of(30.0, Some(20.0)), Some(1.5));
        assert_eq!(Relation::Speed.of(20.0, Some(30.0)), Some(1.5));
        assert_eq!(Relation::Above.of(30.0, Some(20.0)), Some(10.0));
        assert_eq!(Relation::Absolute.of(30.0, None), Some(30.0));
        for relation in [Relation::Time, Relation::Speed, Relation::Above] {
            assert_eq!(relation.of(30.0, None), None);
        }
    }

    #[test]
    fn goals_are_met_at_their_bound_and_never_by_nothing() {
        assert!(Goal::AtMost(1.5).met(1.5) && !Goal::AtMost(1.5).met(1.51));
        assert!(Goal::AtLeast(0.9).met(0.9) && !Goal::AtLeast(0.9).met(0.89));
        assert!(!Goal::AtMost(1.0).met(f64::NAN) && !Goal::AtLeast(1.0).met(f64::NAN));
    }

    #[test]
    fn every_comparison_has_what_its_relation_needs() {
        for comparison in all() {
            let absolute = comparison.relation == Relation::Absolute;
            assert_eq!(comparison.other.is_none(), absolute, "{comparison:?}");
        }
    }
}
