//! What a scenario is given and what it tells: how long and with which seed, and a line for the table of
//! `cargo xtask faults`.

use std::{
    collections::BTreeMap,
    env,
    time::{Duration, Instant},
};

use super::traffic::Report;

/// Seconds that a scenario goes on for.
const SECONDS: &str = "VERBS_FAULTS_SECONDS";
const SEED: &str = "VERBS_FAULTS_SEED";
/// Rounds, where a scenario counts them.
const CYCLES: &str = "VERBS_FAULTS_CYCLES";

/// What a scenario has done so far.
pub struct Record {
    scenario: &'static str,
    pub rounds: u64,
    operations: u64,
    outcomes: BTreeMap<String, u64>,
    until: Instant,
}

/// A setting of the environment.
fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is no number: {text}")),
    )
}

pub fn seed() -> u64 {
    number(SEED).unwrap_or(1)
}

pub fn cycles(default: u64) -> u64 {
    number(CYCLES).unwrap_or(default)
}

impl Record {
    pub fn new(scenario: &'static str) -> Self {
        let seconds = number(SECONDS).unwrap_or(3);
        Self {
            scenario,
            rounds: 0,
            operations: 0,
            outcomes: BTreeMap::new(),
            until: Instant::now() + Duration::from_secs(seconds),
        }
    }

    /// Whether to begin one more round; the first always begins.
    pub fn goes_on(&mut self) -> bool {
        self.goes_on_after(1)
    }

    /// The same; so many always begin.
    pub fn goes_on_after(&mut self, rounds: u64) -> bool {
        let more = self.rounds < rounds || Instant::now() < self.until;
        self.rounds += u64::from(more);
        more
    }

    pub fn count(&mut self, outcome: impl Into<String>) {
        *self.outcomes.entry(outcome.into()).or_default() += 1;
    }

    /// Counts the requests of an end.
    pub fn add(&mut self, report: &Report) {
        self.operations += report.posted;
        for (name, count) in report.outcomes() {
            *self.outcomes.entry(name).or_default() += count;
        }
    }
}

impl Drop for Record {
    /// Tells it, whether or not the scenario has failed.
    fn drop(&mut self) {
        let line = serde_json::json!({
            "scenario": self.scenario,
            "rounds": self.rounds,
            "operations": self.operations,
            "outcomes": self.outcomes,
        });
        println!("record: {line}");
    }
}
