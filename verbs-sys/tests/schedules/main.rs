//! Every schedule of the locks that post and poll take, by loom. The locks are the library's own source; what is
//! replaced is below them: atomics, the thread's number, and the fences.
//!
//! `cargo xtask test` builds it with `--cfg loom`; otherwise it is empty.

#![cfg(loom)]

mod asymmetric;
#[path = "../../src/soft/bias.rs"]
mod bias;
#[path = "../../src/soft/biased.rs"]
mod biased;

/// How the library waits for another thread.
mod epoch {
    pub(super) fn relax(_spins: &mut u32) {
        loom::thread::yield_now();
    }
}

use biased::Biased;
use loom::cell::UnsafeCell;
use loom::sync::Arc;

/// A number that loom finds two threads at, if ever two are.
#[derive(Default)]
struct Watched(UnsafeCell<u32>);

fn add(lock: &Biased<Watched>) {
    let mut guard = lock.lock();
    // Through the guard's exclusive reference, so the lock is what keeps others away.
    let watched: &mut Watched = &mut guard;
    // SAFETY: by the lock, which is what is tried here.
    watched.0.with_mut(|number| unsafe { *number += 1 });
}

/// Threads that can have been moved at so many places, which finds more than any number of runs.
fn model(check: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(check);
}

fn sum(lock: &Biased<Watched>) -> u32 {
    let mut guard = lock.lock();
    let watched: &mut Watched = &mut guard;
    // SAFETY: as in `add`.
    watched.0.with(|number| unsafe { *number })
}

/// The lock is biased to one thread, which goes on; another one takes the bias away.
#[test]
fn the_bias_is_taken_away_while_its_owner_goes_on() {
    model(|| {
        let lock = Arc::new(Biased::new(Watched::default()));
        add(&lock);
        add(&lock);
        assert!(lock.try_own().is_some(), "biased to this thread");
        let other = loom::thread::spawn({
            let lock = Arc::clone(&lock);
            move || add(&lock)
        });
        add(&lock);
        add(&lock);
        other.join().unwrap();
        assert_eq!(sum(&lock), 5);
    });
}

/// Both get the bias, one after the other.
#[test]
fn the_bias_wanders() {
    model(|| {
        let lock = Arc::new(Biased::new(Watched::default()));
        let other = loom::thread::spawn({
            let lock = Arc::clone(&lock);
            move || (0..3).for_each(|_| add(&lock))
        });
        (0..3).for_each(|_| add(&lock));
        other.join().unwrap();
        assert_eq!(sum(&lock), 6);
    });
}
