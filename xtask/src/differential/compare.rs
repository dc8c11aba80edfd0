//! Two traces of the same programs, step by step.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use super::known::{self, Known};

/// What happened in a step.
#[derive(Debug, PartialEq, Eq)]
struct Step<'a> {
    index: usize,
    pair: &'a str,
    kind: &'a str,
    lines: Vec<&'a str>,
}

impl Step<'_> {
    /// Whether what must come did not come, and the program ended here.
    fn hung(&self) -> bool {
        self.lines.last() == Some(&" stuck")
    }
}

/// A device's account of all programs.
struct Trace<'a> {
    programs: Vec<(&'a str, Vec<Step<'a>>)>,
    end: &'a str,
}

/// Something that differs and is not in the table.
#[derive(Debug)]
pub struct Difference<'a> {
    /// The program's seed.
    pub program: &'a str,
    /// The number of the step.
    pub step: usize,
    /// The pair it is about.
    pub pair: &'a str,
    /// What the software device did, and the other did not.
    pub soft0: Vec<&'a str>,
    /// What the kernel's device did, and the other did not.
    pub rxe0: Vec<&'a str>,
}

/// What a comparison found.
#[derive(Debug, Default)]
pub struct Found<'a> {
    pub programs: usize,
    pub steps: usize,
    /// The last line of the traces: how much was done.
    pub end: &'a str,
    /// How often each row of the table was met.
    pub known: BTreeMap<&'static str, usize>,
    /// Where programs hung on the kernel's device and not on the software device: the seed, and the
    /// step with what it is an example of.
    pub hung: Vec<(&'a str, usize, &'a str)>,
    pub unexplained: Vec<Difference<'a>>,
}

/// Compares two traces.
///
/// After a known difference the two devices are in different states, so that nothing can be compared
/// until a pair is connected anew, which every chain of steps with a mistake ends with.
pub fn compare<'a>(soft0: &'a str, rxe0: &'a str) -> Result<Found<'a>> {
    let (soft0, rxe0) = (parse(soft0)?, parse(rxe0)?);
    let mut found = Found {
        end: rxe0.end,
        ..Found::default()
    };
    ensure!(
        soft0.programs.len() == rxe0.programs.len() && soft0.end == rxe0.end,
        "the devices did not run the same programs: {} and {}",
        soft0.end,
        rxe0.end
    );
    for ((seed, soft0), (other, rxe0)) in soft0.programs.iter().zip(&rxe0.programs) {
        ensure!(
            seed == other,
            "program {seed} on one device, {other} on the other"
        );
        found.programs += 1;
        compare_program(&mut found, seed, soft0, rxe0)?;
    }
    Ok(found)
}

fn compare_program<'a>(
    found: &mut Found<'a>,
    seed: &'a str,
    soft0: &[Step<'a>],
    rxe0: &[Step<'a>],
) -> Result<()> {
    let mut comparable = true;
    for (left, right) in soft0.iter().zip(rxe0) {
        ensure!(
            (left.index, left.kind) == (right.index, right.kind),
            "program {seed} has two texts at step {}",
            left.index
        );
        comparable |= left.kind == "connect" || left.kind == "reset";
        if !comparable {
            continue;
        }
        found.steps += 1;
        if right.hung() && !left.hung() {
            found.hung.push((seed, left.index, left.kind));
            return Ok(());
        }
        if left.lines == right.lines {
            continue;
        }
        let (only_left, only_right) = apart(&left.lines, &right.lines);
        match known::find(left.kind, &only_left, &only_right) {
            Some(Known { what, .. }) => {
                *found.known.entry(what).or_default() += 1;
                comparable = false;
            }
            None => {
                found.unexplained.push(Difference {
                    program: seed,
                    step: left.index,
                    pair: left.pair,
                    soft0: only_left,
                    rxe0: only_right,
                });
                // What follows is a consequence.
                return Ok(());
            }
        }
    }
    Ok(())
}

/// The lines that only one of the two has. If it is but the order that differs, all.
fn apart<'a>(left: &[&'a str], right: &[&'a str]) -> (Vec<&'a str>, Vec<&'a str>) {
    let mut only_right = right.to_vec();
    let mut only_left = Vec::new();
    for line in left {
        match only_right.iter().position(|other| other == line) {
            Some(at) => {
                only_right.remove(at);
            }
            None => only_left.push(*line),
        }
    }
    if only_left.is_empty() && only_right.is_empty() {
        return (left.to_vec(), right.to_vec());
    }
    (only_left, only_right)
}

fn parse(text: &str) -> Result<Trace<'_>> {
    let mut programs: Vec<(&str, Vec<Step<'_>>)> = Vec::new();
    let mut end = None;
    for line in text.lines() {
        if let Some(seed) = line.strip_prefix("program ") {
            programs.push((seed, Vec::new()));
        } else if let Some(step) = line.strip_prefix('@') {
            let mut words = step.splitn(3, ' ');
            let mut word = || words.next().with_context(|| format!("read {line:?}"));
            let step = Step {
                index: word()?.parse().with_context(|| format!("read {line:?}"))?,
                pair: word()?,
                kind: word()?,
                lines: Vec::new(),
            };
            let program = programs.last_mut().context("a step of no program")?;
            program.1.push(step);
        } else if line.starts_with(' ') {
            let program = programs.last_mut().context("a line of no program")?;
            let step = program.1.last_mut().context("a line of no step")?;
            step.lines.push(line);
        } else if line.starts_with("end ") {
            end = Some(line);
        } else {
            bail!("a trace has the line {line:?}");
        }
    }
    Ok(Trace {
        programs,
        end: end.context("a trace has no end")?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(steps: &str) -> String {
        format!("program 1\n{steps}end 1 programs\n")
    }

    #[test]
    fn equal_traces_have_no_differences() {
        let text = trace("@0 0 connect\n@1 0 exchange\n as 1 ok Send\n");
        let found = compare(&text, &text).expect("traces");
        assert_eq!((found.programs, found.steps), (1, 2));
        assert!(found.unexplained.is_empty() && found.known.is_empty());
    }

    #[test]
    fn an_unknown_difference_ends_its_program() {
        let soft0 = trace("@0 0 exchange\n as 1 ok Send\n as 2 ok Send\n@1 0 exchange\n x\n");
        let rxe0 = trace("@0 0 exchange\n as 1 ok Send\n@1 0 exchange\n y\n");
        let found = compare(&soft0, &rxe0).expect("traces");
        let [difference] = found.unexplained.as_slice() else {
            panic!("one difference, not {:?}", found.unexplained);
        };
        assert_eq!(difference.soft0, [" as 2 ok Send"]);
        assert!(difference.rxe0.is_empty());
    }

    #[test]
    fn another_order_is_a_difference() {
        let soft0 = trace("@0 0 exchange\n as 1 ok Send\n as 2 ok Send\n");
        let rxe0 = trace("@0 0 exchange\n as 2 ok Send\n as 1 ok Send\n");
        let found = compare(&soft0, &rxe0).expect("traces");
        assert_eq!(found.unexplained.len(), 1);
    }

    #[test]
    fn behind_a_known_difference_nothing_counts_until_the_next_connection() {
        let steps = |status: &str, other: &str| {
            trace(&format!(
                "@0 0 LocalKey Rc WRITE\n as 1 {status}\n@1 0 exchange\n {other}\n@2 0 connect\n\
                 @3 0 exchange\n {other}\n"
            ))
        };
        let (soft0, rxe0) = (steps("LocProtErr", "x"), steps("LocQpOpErr", "y"));
        let found = compare(&soft0, &rxe0).expect("traces");
        assert_eq!(found.known.values().sum::<usize>(), 1);
        let [difference] = found.unexplained.as_slice() else {
            panic!("one difference, not {:?}", found.unexplained);
        };
        assert_eq!(difference.step, 3);
    }

    #[test]
    fn what_hangs_on_the_kernels_device_is_told_apart() {
        let hangs = trace("@0 0 connect\n@1 0 exchange\n stuck\n");
        let works = trace("@0 0 connect\n@1 0 exchange\n as 1 ok Send\n@2 0 connect\n");
        let found = compare(&works, &hangs).expect("traces");
        assert_eq!(found.hung, [("1", 1, "exchange")]);
        assert!(found.unexplained.is_empty());
        let found = compare(&hangs, &works).expect("traces");
        assert_eq!((found.hung.len(), found.unexplained.len()), (0, 1));
    }

    #[test]
    fn traces_of_different_programs_are_not_compared() {
        assert!(compare(&trace("@0 0 connect\n"), &trace("@0 0 exchange\n")).is_err());
        assert!(compare("program 1\nend 1\n", "program 2\nend 1\n").is_err());
        assert!(compare("program 1\n", "program 1\n").is_err());
    }
}
