//! What a run of the suite says, and the document made of several.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

/// How one test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Its path in the suite.
    pub test: String,
    /// Whether it passed.
    pub passed: bool,
    /// Whether all or the rest of it was left out on this device.
    pub left_out: bool,
}

/// One run of the suite.
pub struct Leg {
    /// Its name on the command line.
    pub name: String,
    /// What its tests said.
    pub verdicts: Vec<Verdict>,
}

impl Leg {
    /// The tests that failed.
    pub fn failures(&self) -> impl Iterator<Item = &str> {
        let failed = self.verdicts.iter().filter(|verdict| !verdict.passed);
        failed.map(|verdict| verdict.test.as_str())
    }

    fn left_out(&self) -> usize {
        let out = |verdict: &&Verdict| verdict.passed && verdict.left_out;
        self.verdicts.iter().filter(out).count()
    }

    /// So many of so many.
    pub fn summary(&self) -> String {
        let (all, failed) = (self.verdicts.len(), self.failures().count());
        let left_out = self.left_out();
        let passed = all - failed - left_out;
        format!("{passed} of {all} passed, {left_out} left out at least in part")
    }
}

/// The lines of libtest's output that say how a test ended.
pub fn parse(output: &str) -> Vec<Verdict> {
    let verdict = |line: &str| {
        let line = line.strip_prefix("test ")?;
        let (test, end) = line.split_once(" ... ")?;
        let passed = match end.trim() {
            "ok" => true,
            "FAILED" => false,
            _ => return None,
        };
        Some(Verdict {
            test: test.to_owned(),
            passed,
            left_out: false,
        })
    };
    let mut verdicts: Vec<Verdict> = output.lines().filter_map(verdict).collect();
    // Behind the verdicts, the output of each test under its name.
    let mut left_out = BTreeSet::new();
    let mut current = None;
    for line in output.lines() {
        let title = line.strip_prefix("---- ");
        if let Some(test) = title.and_then(|line| line.strip_suffix(" stdout ----")) {
            current = Some(test);
        } else if line == LEFT_OUT {
            left_out.extend(current);
        }
    }
    for verdict in &mut verdicts {
        verdict.left_out = left_out.contains(verdict.test.as_str());
    }
    verdicts
}

/// What a test says that is left out on a device, or its rest.
const LEFT_OUT: &str = "left out on this device";

/// Where the ends are, in the name of a test.
const PLACES: [&str; 4] = [
    "::one_process_device_memory",
    "::one_process_heap_memory",
    "::two_processes_device_memory",
    "::two_processes_heap_memory",
];

/// The behaviour that a test is about, apart from where its ends are.
fn behaviour(test: &str) -> &str {
    let place = PLACES.iter().find_map(|place| test.strip_suffix(place));
    place.unwrap_or(test)
}

/// What a leg says of a behaviour: the worst of its tests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Cell {
    Holds,
    LeftOut,
    Fails,
}

/// The document.
pub fn render(legs: &[Leg]) -> String {
    let mut text = include_str!("head.md").to_owned();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "\n| leg | tests | passed | left out, at least in part |\n|---|---|---|---|"
    );
    for leg in legs {
        let (all, failed) = (leg.verdicts.len(), leg.failures().count());
        let left_out = leg.left_out();
        let passed = all - failed - left_out;
        let _ = writeln!(text, "| {} | {all} | {passed} | {left_out} |", leg.name);
    }
    text.push('\n');
    text.push_str(include_str!("differences.md"));
    text.push('\n');
    text.push_str(&crate::differential::known::render());
    text.push('\n');
    text.push_str(&crate::dropin::cases::pyverbs::render());
    text.push_str("\n## Every behaviour\n");

    let mut table: BTreeMap<&str, BTreeMap<&str, Vec<Option<Cell>>>> = BTreeMap::new();
    for (column, leg) in legs.iter().enumerate() {
        for verdict in &leg.verdicts {
            let behaviour = behaviour(&verdict.test);
            let (module, name) = behaviour.rsplit_once("::").unwrap_or(("", behaviour));
            if module.is_empty() {
                continue;
            }
            let row = table.entry(module).or_default().entry(name);
            let row = row.or_insert_with(|| vec![None; legs.len()]);
            let cell = match (verdict.passed, verdict.left_out) {
                (false, _) => Cell::Fails,
                (true, true) => Cell::LeftOut,
                (true, false) => Cell::Holds,
            };
            row[column] = row[column].max(Some(cell));
        }
    }
    for (module, rows) in table {
        let names: Vec<&str> = legs.iter().map(|leg| leg.name.as_str()).collect();
        let _ = writeln!(
            text,
            "\n### {}\n",
            module.replace("::", ", ").replace('_', " ")
        );
        let _ = writeln!(text, "| | {} |", names.join(" | "));
        let _ = writeln!(text, "|---|{}", "---|".repeat(legs.len()));
        for (name, cells) in rows {
            let cell = |cell: Option<Cell>| match cell {
                Some(Cell::Holds) => "yes",
                Some(Cell::LeftOut) => "left out",
                Some(Cell::Fails) => "**no**",
                None => "",
            };
            let cells: Vec<&str> = cells.into_iter().map(cell).collect();
            let _ = writeln!(
                text,
                "| {} | {} |",
                name.replace('_', " "),
                cells.join(" | ")
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leg(name: &str, output: &str) -> Leg {
        Leg {
            name: name.into(),
            verdicts: parse(output),
        }
    }

    const OUTPUT: &str = "
running 3 tests
test a::holds::one_process_heap_memory ... ok
test a::holds::two_processes_heap_memory ... FAILED
test a::takes_long has been running for over 60 seconds
test other_process ... ok
test a::is_left_out ... ignored
test a::in_part::one_process_heap_memory ... ok

successes:

---- a::in_part::one_process_heap_memory stdout ----
left out on this device
";

    #[test]
    fn only_ends_of_tests_count() {
        let leg = leg("x", OUTPUT);
        assert_eq!(leg.verdicts.len(), 4);
        assert_eq!(leg.summary(), "2 of 4 passed, 1 left out at least in part");
        let failed: Vec<&str> = leg.failures().collect();
        assert_eq!(failed, ["a::holds::two_processes_heap_memory"]);
    }

    #[test]
    fn a_behaviour_holds_where_all_its_tests_do() {
        let legs = [
            leg(
                "one",
                "test a::b::it_holds::one_process_heap_memory ... ok\n",
            ),
            leg("two", OUTPUT),
        ];
        let text = render(&legs);
        assert!(
            text.contains("| one | 1 | 1 | 0 |\n| two | 4 | 2 | 1 |"),
            "{text}"
        );
        assert!(
            text.contains("### a, b\n\n| | one | two |\n|---|---|---|\n| it holds | yes |  |"),
            "{text}"
        );
        assert!(
            text.contains("### a\n\n| | one | two |\n|---|---|---|\n| holds |  | **no** |\n| in part |  | left out |"),
            "{text}"
        );
        assert!(!text.contains("other process"));
    }
}
