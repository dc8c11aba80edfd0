//! Completion queues with so many queue pairs that the software device's polls do not visit them all:
//! random traffic with another thread and with another process, and what must not get lost.

mod side;
mod traffic;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use verbs_sys::{WcStatus, ffi};

use crate::side::{Kind, Setup, Side};
use crate::traffic::run;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Tells the other process what it is, and with which setup.
const VARIABLE: &str = "VERBS_CROWD_PEER";

/// One line that names every queue pair.
fn tell(to: &mut impl Write, side: &Side) -> Result {
    let names = side.names()?;
    writeln!(to, "peer {}", names.join(" "))?;
    Ok(to.flush()?)
}

fn hear(from: &mut impl BufRead) -> Result<Vec<String>> {
    // The test harness has something to say, too.
    for line in from.lines() {
        if let Some((_, names)) = line?.split_once("peer ") {
            return Ok(names.split(' ').map(str::to_owned).collect());
        }
    }
    Err("the other process ended".into())
}

struct Peer {
    child: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Peer {
    fn start(setup: Setup, variables: &[(&str, &str)]) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--exact", "other_process", "--nocapture"])
            .env(VARIABLE, setup.to_string())
            .envs(variables.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let orders = child.stdin.take().ok_or("no standard input")?;
        let answers = child.stdout.take().ok_or("no standard output")?;
        Ok(Self {
            child,
            orders,
            answers: BufReader::new(answers),
        })
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It has ended unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test of its own: the other process of those below.
#[test]
fn other_process() {
    let Ok(setup) = std::env::var(VARIABLE) else {
        return;
    };
    let setup: Setup = setup.parse().expect("no setup");
    let serve = || -> Result {
        let mut side = Side::open(setup)?;
        tell(&mut std::io::stdout(), &side)?;
        side.connect(&hear(&mut std::io::stdin().lock())?)?;
        tell(&mut std::io::stdout(), &side)?;
        run(&mut side, 2)?;
        // The other end of the last messages may still want an answer.
        tell(&mut std::io::stdout(), &side)?;
        hear(&mut std::io::stdin().lock())?;
        Ok(())
    };
    serve().expect("the other process failed");
}

fn between_processes(setup: Setup, variables: &[(&str, &str)]) -> Result {
    let mut peer = Peer::start(setup, variables)?;
    let mut side = Side::open(setup)?;
    tell(&mut peer.orders, &side)?;
    side.connect(&hear(&mut peer.answers)?)?;
    hear(&mut peer.answers)?;
    run(&mut side, 1)?;
    hear(&mut peer.answers)?;
    tell(&mut peer.orders, &side)?;
    assert!(peer.child.wait()?.success());
    Ok(())
}

fn between_threads(setup: Setup) -> Result {
    let (mut left, mut right) = (Side::open(setup)?, Side::open(setup)?);
    let (to_left, to_right) = (left.names()?, right.names()?);
    left.connect(&to_right)?;
    right.connect(&to_left)?;
    std::thread::scope(|scope| {
        let other = scope.spawn(|| run(&mut right, 2).map_err(|error| error.to_string()));
        run(&mut left, 1)?;
        other.join().expect("the other side panicked")?;
        Ok(())
    })
}

const POLLING: Setup = Setup {
    sleeps: false,
    has_srq: false,
    one_cq: true,
};

#[test]
fn traffic_with_another_process_is_polled_for() -> Result {
    between_processes(POLLING, &[])
}

#[test]
fn traffic_with_another_process_wakes_sleepers() -> Result {
    let setup = Setup {
        sleeps: true,
        ..POLLING
    };
    between_processes(setup, &[])
}

/// Receives are shared, and completions are counted.
#[test]
fn traffic_with_another_process_takes_shared_receives() -> Result {
    for sleeps in [false, true] {
        let setup = Setup {
            sleeps,
            has_srq: true,
            ..POLLING
        };
        between_processes(setup, &[])?;
    }
    Ok(())
}

#[test]
fn sends_and_receives_complete_on_queues_of_their_own() -> Result {
    for sleeps in [false, true] {
        let setup = Setup {
            sleeps,
            has_srq: false,
            one_cq: false,
        };
        between_processes(setup, &[])?;
    }
    Ok(())
}

/// Messages go through sockets.
#[test]
fn traffic_with_a_strict_process() -> Result {
    for sleeps in [false, true] {
        let setup = Setup { sleeps, ..POLLING };
        between_processes(setup, &[("VERBS_SOFT_STRICT", "1")])?;
    }
    Ok(())
}

#[test]
fn traffic_between_threads() -> Result {
    for has_srq in [false, true] {
        for sleeps in [false, true] {
            let setup = Setup {
                sleeps,
                has_srq,
                ..POLLING
            };
            between_threads(setup)?;
        }
    }
    Ok(())
}

/// Polls until no queue pair is visited unasked, however many polls that takes by then.
fn let_rest(side: &Side) -> Result {
    for _ in 0..200_000 {
        assert_eq!(side.poll(8)?.len(), 0, "nothing was posted");
    }
    Ok(())
}

fn connected_within() -> Result<(Side, Side)> {
    let (mut left, mut right) = (Side::open(POLLING)?, Side::open(POLLING)?);
    let (to_left, to_right) = (left.names()?, right.names()?);
    left.connect(&to_right)?;
    right.connect(&to_left)?;
    Ok((left, right))
}

/// What a program did itself is there with the next poll, however long its queue pair was idle.
#[test]
fn own_requests_complete_with_the_next_poll() -> Result {
    let (left, right) = connected_within()?;
    let remote = right.place();
    for pair in left.of_kind(Kind::Connection) {
        let_rest_shortly(&left)?;
        left.write(pair, 7, remote)?;
        let found = left.poll(8)?;
        assert_eq!(found.len(), 1, "queue pair {pair}");
        assert_eq!(found[0].wr_id(), 7);
        assert!(found[0].is_ok());
    }
    Ok(())
}

fn let_rest_shortly(side: &Side) -> Result {
    for _ in 0..3_000 {
        assert_eq!(side.poll(8)?.len(), 0, "nothing was posted");
    }
    Ok(())
}

/// Receives of an idle queue pair are flushed, by whatever thread, and found at once.
#[test]
fn flushed_requests_are_there_with_the_next_poll() -> Result {
    let (left, _right) = connected_within()?;
    let_rest(&left)?;
    for pair in left.of_kind(Kind::Connection) {
        let count = left.posted();
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| left.fail(pair).map_err(|error| error.to_string()));
            failing.join().expect("it panicked")
        })?;
        let found = left.poll(64)?;
        assert_eq!(found.len(), count, "queue pair {pair}");
        for completion in found {
            assert_eq!(completion.status(), WcStatus::WrFlushErr);
        }
        let_rest_shortly(&left)?;
    }
    Ok(())
}

/// Of many idle queue pairs each completes something, and the queue has no room for all of it.
#[test]
fn a_queue_of_many_overruns() -> Result {
    let (left, right) = connected_within()?;
    let_rest(&left)?;
    let remote = right.place();
    left.resize(16)?;
    let_rest(&left)?;
    let mut posted = 0;
    for pair in left.of_kind(Kind::Connection).into_iter().take(16) {
        left.write(pair, posted, remote)?;
        posted += 1;
    }
    assert_eq!(left.poll(64)?.len(), 16);
    for pair in left.of_kind(Kind::Connection).into_iter().take(17) {
        left.write(pair, posted, remote)?;
        posted += 1;
    }
    assert!(left.poll(64).is_err(), "17 completions fit in 16 entries");
    let event = left.next_async_event()?;
    assert_eq!(event, ffi::IBV_EVENT_CQ_ERR);
    Ok(())
}
