//! What Python's unittest says of a run, with `-v`.

use anyhow::{Context, Result, ensure};

/// How a run ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    ran: usize,
    /// The tests that were skipped.
    pub skips: Vec<Skip>,
}

/// A test that was skipped.
#[derive(Debug, PartialEq, Eq)]
pub struct Skip {
    /// Module, class and method.
    pub test: String,
    /// The reason, as the test gave it.
    pub said: String,
}

impl Outcome {
    /// How many passed.
    pub fn passed(&self) -> usize {
        self.ran - self.skips.len()
    }
}

/// Reads it; an error where a test failed, or where the output is not that of a whole run.
pub fn parse(output: &str) -> Result<Outcome> {
    let mut skips = Vec::new();
    let mut current = None;
    let mut ran = None;
    let mut end = None;
    for line in output.lines() {
        current = test(line).or(current);
        if let Some((_, said)) = line.split_once("... skipped ") {
            let test = current.context("a skip of no test")?.to_owned();
            let said = said.trim_matches(['\'', '"']).to_owned();
            skips.push(Skip { test, said });
        }
        if let Some(count) = line.strip_prefix("Ran ") {
            let count = count.split_whitespace().next().unwrap_or_default();
            ran = Some(count.parse().context("how many tests ran")?);
        }
        if line == "OK" || line.starts_with("OK (") || line.starts_with("FAILED (") {
            end = Some(line);
        }
    }
    let (ran, end) = (
        ran.context("it ran no tests")?,
        end.context("it did not end")?,
    );
    ensure!(end.starts_with("OK"), "{end}");
    let told = |what: &str| -> Result<usize> {
        let Some((_, behind)) = end.split_once(what) else {
            return Ok(0);
        };
        let digits = behind.split(|character: char| !character.is_ascii_digit());
        let number = digits.into_iter().next().unwrap_or_default();
        Ok(number.parse()?)
    };
    let (skipped, found) = (told("skipped=")?, skips.len());
    ensure!(
        skipped == found && skipped <= ran,
        "{found} skips are named, but it says {end}"
    );
    Ok(Outcome { ran, skips })
}

/// The test that a line is about: "method (tests.module.Class.method)".
fn test(line: &str) -> Option<&str> {
    let (method, behind) = line.split_once(" (tests.")?;
    let (path, _) = behind.split_once(')')?;
    (!method.contains(' ') && path.ends_with(method)).then_some(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: &str = r#"
test_a (tests.test_x.X.test_a) ... ok
test_b (tests.test_x.X.test_b)
What it does, in words. ... skipped 'no way'
test_c (tests.test_x.X.test_c) ... skipped "it's off"

----------------------------------------------------------------------
Ran 3 tests in 0.250s

OK (skipped=2)
"#;

    #[test]
    fn skips_are_told_by_name() {
        let skip = |test: &str, said: &str| Skip {
            test: test.into(),
            said: said.into(),
        };
        let outcome = parse(OUTPUT).unwrap();
        assert_eq!(outcome.passed(), 1);
        assert_eq!(
            outcome.skips,
            [
                skip("test_x.X.test_b", "no way"),
                skip("test_x.X.test_c", "it's off")
            ]
        );
    }

    #[test]
    fn a_failure_and_half_a_run_are_errors() {
        let failed = OUTPUT.replace("OK (", "FAILED (errors=1, ");
        let error = parse(&failed).unwrap_err().to_string();
        assert_eq!(error, "FAILED (errors=1, skipped=2)");
        assert!(parse(&OUTPUT.replace("OK", "")).is_err());
        assert!(parse(&OUTPUT.replace("Ran", "")).is_err());
        let error = parse(&OUTPUT.replace("skipped=2", "skipped=3")).unwrap_err();
        assert!(error.to_string().starts_with("2 skips"), "{error}");
    }
}
