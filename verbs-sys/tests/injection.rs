//! Faults that are asked for by the environment, each in a process of its own: within one, and where owners copy.

mod common;

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, error::Error};

use common::{Pair, Result, Side, bytes, remote};
use verbs_sys::{PathOptions, SendFlags, WcStatus};

/// Whose value is the scenario that the process shall run.
const SCENARIO: &str = "VERBS_TEST_SCENARIO";
const DELAY: Duration = Duration::from_millis(20);

/// Name, faults and what to do among them.
type Scenario = (&'static str, &'static str, fn() -> Result);

const SCENARIOS: [Scenario; 6] = [
    ("corrupt", "corrupt=2", one_bit_changes),
    ("drop", "drop=@2", the_second_is_lost),
    ("rnr", "rnr=@1", no_receive_is_found),
    ("reg_mr", "reg_mr=@3", the_third_registration_fails),
    ("delay", "delay=@1:20000", the_first_comes_late),
    ("unreadable", "drop=often", nothing_goes_wrong),
];

/// What the process of a scenario runs.
#[test]
fn scenario() -> Result {
    let Ok(wanted) = env::var(SCENARIO) else {
        return Ok(());
    };
    let found = SCENARIOS.iter().find(|(name, ..)| *name == wanted);
    found.ok_or("no such scenario")?.2()
}

#[test]
fn faults_happen_when_they_are_asked_for() -> Result {
    for (name, faults, _) in SCENARIOS {
        for strict in ["0", "1"] {
            let output = Command::new(env::current_exe()?)
                .args(["--exact", "scenario", "--nocapture"])
                .env(SCENARIO, name)
                .env("VERBS_DEVICE", "soft0")
                .env("VERBS_SOFT_FAULTS", faults)
                .env("VERBS_SOFT_STRICT", strict)
                .stdin(Stdio::null())
                .output()?;
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "{name}, strict {strict}: {said}");
        }
    }
    Ok(())
}

/// How a side's next request ended.
fn ends(side: &mut Side, expected: WcStatus) -> Result<Vec<u8>> {
    let done = side.next()?;
    assert_eq!(done.status, expected, "{:?}", done.kind);
    let len = done.byte_len as usize;
    Ok(done
        .buffer
        .map_or(Vec::new(), |buffer| bytes(&buffer, 0..len)))
}

fn changed_bits(found: &[u8], sent: u8) -> u32 {
    found.iter().map(|byte| (byte ^ sent).count_ones()).sum()
}

fn one_bit_changes() -> Result {
    let mut pair = Pair::new()?;
    // Short ones, those that a receiver fetches, and those of several frames.
    for len in [1, 100, 5000, 200_000] {
        for expected in [0, 1] {
            let target = pair.region(len, 1)?;
            let source = pair.region(len, 7)?;
            let to = remote(&target, 0);
            pair.left.qp.write(source, 0..len, to, None)?;
            ends(&mut pair.left, WcStatus::Success)?;
            let found = bytes(&target, 0..len);
            assert_eq!(changed_bits(&found, 7), expected, "WRITE of {len} bytes");
        }
        for expected in [0, 1] {
            let source = pair.region(len, 9)?;
            let sink = pair.region(len, 0)?;
            let from = remote(&source, 0);
            pair.left.qp.read(sink, 0..len, from)?;
            let found = ends(&mut pair.left, WcStatus::Success)?;
            assert_eq!(found.len(), len);
            assert_eq!(changed_bits(&found, 9), expected, "READ of {len} bytes");
            assert_eq!(
                bytes(&source, 0..len),
                vec![9; len],
                "the source is as it was"
            );
        }
        for expected in [0, 1] {
            let inbox = pair.region(len, 0)?;
            pair.right.qp.post_recv(inbox)?;
            let message = pair.region(len, 3)?;
            let none = SendFlags::empty();
            pair.left.qp.send(message, 0..len, none, None)?;
            let found = ends(&mut pair.right, WcStatus::Success)?;
            assert_eq!(found.len(), len);
            assert_eq!(changed_bits(&found, 3), expected, "SEND of {len} bytes");
            ends(&mut pair.left, WcStatus::Success)?;
        }
    }
    Ok(())
}

fn the_second_is_lost() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(8, 0)?;
    for value in 1..=3 {
        let source = pair.region(8, value)?;
        pair.left.qp.write(source, 0..8, remote(&target, 0), None)?;
    }
    ends(&mut pair.left, WcStatus::Success)?;
    ends(&mut pair.left, WcStatus::RetryExcErr)?;
    ends(&mut pair.left, WcStatus::WrFlushErr)?;
    assert_eq!(bytes(&target, 0..8), [1; 8]);
    Ok(())
}

fn no_receive_is_found() -> Result {
    let mut pair = Pair::with(PathOptions {
        rnr_retry: 6,
        ..PathOptions::default()
    })?;
    let inbox = pair.region(8, 0)?;
    pair.right.qp.post_recv(inbox)?;
    pair.left
        .qp
        .send_inline(b"lost", SendFlags::empty(), None)?;
    ends(&mut pair.left, WcStatus::RnrRetryExcErr)?;
    assert_eq!(
        pair.right.qp.outstanding_receives(),
        1,
        "the receive waits on"
    );
    Ok(())
}

fn the_third_registration_fails() -> Result {
    let pair = Pair::new()?;
    let regions: [Result<_>; 4] = std::array::from_fn(|_| pair.region(64, 0));
    let worked = regions.each_ref().map(|region| region.is_ok());
    assert_eq!(worked, [true, true, false, true]);
    let error = regions.into_iter().nth(2).and_then(Result::err);
    let mut cause: Option<&(dyn Error + 'static)> = error.as_deref().map(|error| error as _);
    while let Some(error) = cause {
        if let Some(error) = error.downcast_ref::<std::io::Error>() {
            assert_eq!(error.raw_os_error(), Some(libc::ENOMEM));
            return Ok(());
        }
        cause = error.source();
    }
    Err("no error of the system".into())
}

fn the_first_comes_late() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(8, 0)?;
    let began = Instant::now();
    for value in 1..=2 {
        let source = pair.region(8, value)?;
        pair.left.qp.write(source, 0..8, remote(&target, 0), None)?;
    }
    ends(&mut pair.left, WcStatus::Success)?;
    // Not a limit on how long it takes, but what was asked for.
    assert!(began.elapsed() >= DELAY);
    ends(&mut pair.left, WcStatus::Success)?;
    assert_eq!(bytes(&target, 0..8), [2; 8], "in order");
    Ok(())
}

/// A value that cannot be read is ignored, and said in the log.
fn nothing_goes_wrong() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(8, 0)?;
    for _ in 0..10 {
        let source = pair.region(8, 5)?;
        pair.left.qp.write(source, 0..8, remote(&target, 0), None)?;
        ends(&mut pair.left, WcStatus::Success)?;
    }
    Ok(())
}
