//! `cargo xtask faults`: the software device among strangers, liars, the dead and broken cables.

use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde_json::Value;
use xshell::cmd;

use crate::hosts::Hosts;
use crate::workspace::{TestBinary, Workspace};

/// Arguments of `cargo xtask faults`.
#[derive(Args)]
pub struct Faults {
    /// Go on with each scenario for so many minutes [default: a few seconds]
    #[arg(long)]
    minutes: Option<u64>,
    /// What random numbers follow from
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Connect with, and kill, so many processes [default: 200]
    #[arg(long)]
    cycles: Option<u64>,
    /// Run the scenarios with this in their test's name only; can be given several times
    #[arg(long = "only", value_name = "NAME")]
    only: Vec<String>,
}

/// How a scenario went.
struct Verdict {
    test: String,
    passed: bool,
    /// What it told, if it came so far.
    record: Option<Value>,
}

impl Faults {
    /// Runs the scenarios one by one and prints a table; the exit status is 1 if any failed.
    pub fn run(self) -> Result<ExitCode> {
        let workspace = Workspace::locate()?;
        let suite = workspace.build_test("verbs-sys", "faults")?;
        let hosts = Hosts::new(&workspace)?;
        let middle = Hosts::with_middle(&workspace)?;
        let mut verdicts = Vec::new();
        for test in tests(&workspace, &suite)? {
            let wanted = |name: &String| test.contains(name);
            if self.only.is_empty() || self.only.iter().any(wanted) {
                verdicts.push(self.scenario(&workspace, &suite, [&hosts, &middle], test)?);
            }
        }
        if verdicts.is_empty() {
            bail!("there is no such scenario");
        }
        println!(
            "{:<34} {:>7} {:>11}  outcomes",
            "scenario", "rounds", "operations"
        );
        for verdict in &verdicts {
            println!("{}", verdict.row());
        }
        let failed = verdicts.iter().filter(|verdict| !verdict.passed).count();
        println!("{} scenarios, {failed} failed", verdicts.len());
        Ok(ExitCode::from(u8::from(failed > 0)))
    }

    fn scenario(
        &self,
        workspace: &Workspace,
        suite: &TestBinary,
        [hosts, middle]: [&Hosts<'_>; 2],
        test: String,
    ) -> Result<Verdict> {
        let sh = &workspace.shell;
        let executable = &suite.executable;
        let _directory = sh.push_dir(&suite.directory);
        let network = hosts.first();
        let seconds = self.minutes.map(|minutes| (minutes * 60).to_string());
        let cycles = self.cycles.map(|cycles| cycles.to_string());
        // On a host of its own: slots and ports are those of that host.
        let output = cmd!(sh, "ip netns exec {network} {executable} --ignored --exact")
            .args([&test, "--show-output"])
            .env("VERBS_FAULTS_HOSTS", hosts.names().join(","))
            .env("VERBS_FAULTS_MIDDLE", middle.names().join(","))
            .env("VERBS_FAULTS_SEED", self.seed.to_string())
            .envs(seconds.map(|seconds| ("VERBS_FAULTS_SECONDS", seconds)))
            .envs(cycles.map(|cycles| ("VERBS_FAULTS_CYCLES", cycles)))
            .quiet()
            .ignore_status()
            .output()?;
        let text = String::from_utf8_lossy(&output.stdout);
        let record = record(&text)?;
        let passed = output.status.success() && record.is_some();
        if !passed {
            println!("{test} failed:\n{text}");
            eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(Verdict {
            test,
            passed,
            record,
        })
    }
}

impl Verdict {
    fn row(&self) -> String {
        let of = |key: &str| self.record.as_ref().map(|record| &record[key]);
        let name = of("scenario").and_then(Value::as_str).unwrap_or(&self.test);
        let number = |key| of(key).and_then(Value::as_u64).unwrap_or(0);
        let outcomes = of("outcomes").and_then(Value::as_object);
        let outcomes: Vec<String> = outcomes
            .into_iter()
            .flatten()
            .map(|(outcome, count)| format!("{outcome} {count}"))
            .collect();
        let failed = if self.passed { "" } else { "FAILED; " };
        format!(
            "{name:<34} {:>7} {:>11}  {failed}{}",
            number("rounds"),
            number("operations"),
            outcomes.join(", ")
        )
    }
}

/// The scenarios' tests: those that nothing else runs.
fn tests(workspace: &Workspace, suite: &TestBinary) -> Result<Vec<String>> {
    let sh = &workspace.shell;
    let executable = &suite.executable;
    let list = cmd!(sh, "{executable} --ignored --list").quiet().read()?;
    let names = list.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(names.map(str::to_owned).collect())
}

/// What a scenario's output tells about it.
fn record(output: &str) -> Result<Option<Value>> {
    let mut lines = output.lines();
    let line = lines.find_map(|line| line.strip_prefix("record: "));
    line.map(|line| serde_json::from_str(line).context("read a scenario's record"))
        .transpose()
}

#[cfg(test)]
mod tests {
    use super::{Verdict, record};

    #[test]
    fn a_record_is_found_and_shown() {
        let output = "\nrunning 1 test\nrecord: {\"scenario\":\"cut\",\"rounds\":2,\
                      \"operations\":30,\"outcomes\":{\"Success\":29,\"RetryExcErr\":1}}\nok\n";
        let mut verdict = Verdict {
            test: "cut::cut".into(),
            passed: true,
            record: record(output).expect("a good record"),
        };
        let row = verdict.row();
        assert!(row.starts_with("cut ") && row.contains(" 30  "), "{row}");
        assert!(row.contains("RetryExcErr 1, Success 29"), "{row}");
        verdict.passed = false;
        assert!(verdict.row().contains("FAILED"));
        assert!(record("running 1 test\n").expect("no record").is_none());
        assert!(record("record: {").is_err());
    }
}
