//! What a run of the suite says, and the document made of several.

use std::collections::BTreeMap;
use std::fmt::Write as _;

/// How one test ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// Its path in the suite.
    pub test: String,
    /// Whether it passed.
    pub passed: bool,
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
    pub fn failures(&self) -> impl Iterator<Item = (&str, &Verdict)> {
        let failed = self.verdicts.iter().filter(|verdict| !verdict.passed);
        failed.map(|verdict| (verdict.test.as_str(), verdict))
    }

    /// So many of so many.
    pub fn summary(&self) -> String {
        let (all, failed) = (self.verdicts.len(), self.failures().count());
        format!("{} of {all} passed", all - failed)
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
        })
    };
    output.lines().filter_map(verdict).collect()
}

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

/// The document.
pub fn render(legs: &[Leg]) -> String {
    let mut text = include_str!("head.md").to_owned();
    // Writing to a string does not fail.
    let _ = writeln!(text, "\n| leg | tests | passed |\n|---|---|---|");
    for leg in legs {
        let (all, failed) = (leg.verdicts.len(), leg.failures().count());
        let _ = writeln!(text, "| {} | {all} | {} |", leg.name, all - failed);
    }
    text.push('\n');
    text.push_str(include_str!("differences.md"));
    text.push_str("\n## Every behaviour\n");

    let mut table: BTreeMap<&str, BTreeMap<&str, Vec<Option<bool>>>> = BTreeMap::new();
    for (column, leg) in legs.iter().enumerate() {
        for verdict in &leg.verdicts {
            let behaviour = behaviour(&verdict.test);
            let (module, name) = behaviour.rsplit_once("::").unwrap_or(("", behaviour));
            if module.is_empty() {
                continue;
            }
            let row = table.entry(module).or_default().entry(name);
            let row = row.or_insert_with(|| vec![None; legs.len()]);
            let held = row[column].unwrap_or(true) && verdict.passed;
            row[column] = Some(held);
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
            let cell = |held: Option<bool>| match held {
                Some(true) => "yes",
                Some(false) => "**no**",
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
";

    #[test]
    fn only_ends_of_tests_count() {
        let leg = leg("x", OUTPUT);
        assert_eq!(leg.verdicts.len(), 3);
        assert_eq!(leg.summary(), "2 of 3 passed");
        let failed: Vec<&str> = leg.failures().map(|(test, _)| test).collect();
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
        assert!(text.contains("| one | 1 | 1 |\n| two | 3 | 2 |"), "{text}");
        assert!(
            text.contains("### a, b\n\n| | one | two |\n|---|---|---|\n| it holds | yes |  |"),
            "{text}"
        );
        assert!(
            text.contains("### a\n\n| | one | two |\n|---|---|---|\n| holds |  | **no** |"),
            "{text}"
        );
        assert!(!text.contains("other process"));
    }
}
