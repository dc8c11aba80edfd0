//! Measuring by turns.

use std::time::{Duration, Instant};

use crate::Result;

/// A round shorter than this says more about the clock than about what it times.
const ROUND: Duration = Duration::from_micros(400);
/// Fewer rounds than these are no sample.
const FEWEST: usize = 7;
/// Which of the rounds counts, from the shortest on: what else the machine does only adds, and where others use its
/// processors it may do so to most rounds.
pub const COUNTS: f64 = 0.1;

/// Does a step so many times.
pub type Step<'a> = &'a mut dyn FnMut(u64) -> Result<()>;

/// Nanoseconds of one repetition of each of `steps`: what a tenth of the rounds, which have each in turn, do not exceed.
pub fn alternate<const N: usize>(budget: Duration, steps: [Step<'_>; N]) -> Result<[f64; N]> {
    let mut steps = steps;
    let mut counts = [1; N];
    for (step, count) in steps.iter_mut().zip(&mut counts) {
        // The first steps of all meet cold caches, and memory of the peer that is not mapped yet.
        step(1)?;
        *count = enough(step)?;
    }
    let mut times: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    let started = Instant::now();
    while times[0].len() < FEWEST || started.elapsed() < budget {
        for ((step, count), times) in steps.iter_mut().zip(counts).zip(&mut times) {
            let started = Instant::now();
            step(count)?;
            times.push(started.elapsed().as_nanos() as f64 / count as f64);
        }
    }
    Ok(times.map(|mut times| quantile(&mut times, COUNTS)))
}

/// How many repetitions make a round.
fn enough(step: &mut Step<'_>) -> Result<u64> {
    let mut count = 1;
    loop {
        let started = Instant::now();
        step(count)?;
        if started.elapsed() >= ROUND {
            return Ok(count);
        }
        count *= 2;
    }
}

/// The value that a fraction `at` of all does not exceed. Sorts them.
pub fn quantile(values: &mut [f64], at: f64) -> f64 {
    values.sort_unstable_by(f64::total_cmp);
    let last = values.len().saturating_sub(1);
    let index = (last as f64 * at).round() as usize;
    values.get(index).copied().unwrap_or(f64::NAN)
}
