//! Whether the machine runs at its usual pace.
//!
//! A processor that others use as well, as that of a virtual machine, is at times a fraction as fast, for seconds or
//! minutes, and tells nobody. What is measured then must not be compared with what is measured otherwise. So a piece of
//! plain work, always the same, is timed before and after each test.

use std::hint::black_box;
use std::thread;
use std::time::{Duration, Instant};

use crate::machine::{Processors, occupy};

/// Turns of the piece of work: some hundred microseconds.
const TURNS: u64 = 200_000;
/// Pieces of which the middle one counts.
const PIECES: usize = 7;
/// How much longer than the shortest so far the usual time may be, in percent.
const TOLERANCE: u32 = 12;
/// Between two looks at a machine that is slow.
const REST: Duration = Duration::from_millis(50);
/// The longest wait for it at a time.
const WAIT: Duration = Duration::from_secs(5);

/// What is known of the pace so far.
#[derive(Debug)]
pub struct Pace {
    processors: Processors,
    shortest: Duration,
    /// For how long it may yet be waited for.
    patience: Duration,
}

impl Pace {
    /// Looks at the machine for the first time. It is waited for as long as `patience` in all.
    pub fn new(processors: Processors, patience: Duration) -> Self {
        let mut pace = Self {
            processors,
            shortest: Duration::MAX,
            patience,
        };
        if !patience.is_zero() {
            for _ in 0..PIECES {
                pace.is_usual();
            }
        }
        pace
    }

    /// Runs a test when the machine is at its usual pace, and again if it was not at the end, while patience lasts.
    ///
    /// # Errors
    /// The test's.
    pub fn keep<T, E>(&mut self, mut test: impl FnMut() -> Result<T, E>) -> Result<T, E> {
        while !self.patience.is_zero() {
            self.wait();
            let started = Instant::now();
            let result = test()?;
            if self.is_usual() {
                return Ok(result);
            }
            self.patience = self.patience.saturating_sub(started.elapsed());
        }
        test()
    }

    fn wait(&mut self) {
        let most = self.patience.min(WAIT);
        let started = Instant::now();
        while !self.is_usual() && started.elapsed() < most {
            thread::sleep(REST);
        }
        self.patience = self.patience.saturating_sub(started.elapsed());
    }

    /// Whether both processors are at their usual pace now.
    fn is_usual(&mut self) -> bool {
        let Processors { client, server } = self.processors;
        let slower = thread::scope(|scope| {
            let there = scope.spawn(|| on(server));
            let here = scope.spawn(|| on(client));
            there.join().ok().max(here.join().ok())
        });
        slower.is_some_and(|time| self.judge(time))
    }

    fn judge(&mut self, time: Duration) -> bool {
        self.shortest = self.shortest.min(time);
        time <= self.shortest + self.shortest / 100 * TOLERANCE
    }
}

/// The time of a piece of work on a processor.
fn on(processor: usize) -> Duration {
    occupy(Some(processor));
    let mut times = [(); PIECES].map(|()| {
        let started = Instant::now();
        work();
        started.elapsed()
    });
    times.sort_unstable();
    times[PIECES / 2]
}

/// As many instructions at a time as a processor can run: one that it shares is slower even if it has it at all times.
fn work() {
    let mut sums = [1_u64, 2, 3, 4];
    for turn in 0..TURNS {
        for (sum, shift) in sums.iter_mut().zip([1, 3, 5, 7]) {
            *sum = sum.wrapping_add(turn) ^ (*sum << shift);
        }
        black_box(&mut sums);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pace(patience: Duration) -> Pace {
        Pace {
            processors: Processors {
                client: 0,
                server: 0,
            },
            shortest: Duration::MAX,
            patience,
        }
    }

    #[test]
    fn what_is_much_longer_than_the_shortest_is_not_usual() {
        let mut pace = pace(Duration::ZERO);
        let micros = Duration::from_micros;
        assert!(pace.judge(micros(1000)));
        assert!(pace.judge(micros(1120)) && !pace.judge(micros(1121)));
        assert!(pace.judge(micros(500)));
        assert!(!pace.judge(micros(1000)), "there is a shorter one now");
    }

    #[test]
    fn a_machine_that_stays_slow_is_not_waited_for_for_ever() {
        let mut pace = pace(Duration::from_millis(1));
        // Nothing will ever be as short.
        pace.shortest = Duration::ZERO;
        let mut runs = 0;
        let result: Result<u32, ()> = pace.keep(|| {
            runs += 1;
            Ok(runs)
        });
        assert_eq!(result, Ok(runs));
        assert_eq!(pace.patience, Duration::ZERO);
        assert_eq!(pace.keep(|| Err::<(), _>("it failed")), Err("it failed"));
    }
}
