//! SEND and RECV.

use std::cell::RefCell;
use std::time::Duration;

use verbs_sys::ffi;
use verbs_sys::{PreparedSend, RemoteAddr, WcOpcode};

use crate::endpoint::{Endpoint, Options, Wait, request};
use crate::one_sided::ping_line;
use crate::peer::{Pair, Service, Task};
use crate::rounds::alternate;
use crate::{Figures, Result};

/// Receives that are posted.
const RECEIVES: usize = 8;
/// Bytes of each.
const ROOM: usize = 4096;
/// One SEND of so many is signaled.
const SIGNALED: u64 = 16;

/// A side of the game.
struct Player<'a> {
    here: &'a Endpoint,
    quiet: PreparedSend,
    signaled: PreparedSend,
    received: usize,
    complete: Complete,
}

type Complete = fn(&Endpoint) -> Result<WcOpcode>;

impl<'a> Player<'a> {
    fn new(here: &'a Endpoint, size: usize, complete: Complete) -> Self {
        let none = RemoteAddr { addr: 0, rkey: 0 };
        let send = |signaled| {
            let mut request = request(ffi::IBV_WR_SEND, none);
            request.send_flags = signaled;
            if size <= 64 {
                request.send_flags |= ffi::IBV_SEND_INLINE;
            }
            PreparedSend::new(&[(request, &[here.element(1 << 20, size)])])
        };
        Self {
            here,
            quiet: send(0),
            signaled: send(ffi::IBV_SEND_SIGNALED),
            received: 0,
            complete,
        }
    }

    /// Posts the receives that are to be there at all times.
    fn fill(&self) -> Result<()> {
        (0..RECEIVES).try_for_each(|place| self.here.receive(0, place * ROOM, ROOM))
    }

    /// Sends a message, of which so many will follow. What is not signaled keeps its place in the send queue
    /// until a later one has completed, so the last is.
    #[inline]
    fn send(&mut self, left: u64) -> Result<()> {
        let send = if left.is_multiple_of(SIGNALED) {
            &mut self.signaled
        } else {
            &mut self.quiet
        };
        self.here.post(0, send)
    }

    /// Waits for a message, and posts its receive again.
    #[inline]
    fn receive(&mut self) -> Result<()> {
        while (self.complete)(self.here)? != WcOpcode::Recv {}
        let place = self.received % RECEIVES;
        self.received += 1;
        self.here.receive(0, place * ROOM, ROOM)
    }
}

/// Round trips, both sides polling.
pub fn polling(size: usize, budget: Duration) -> Result<Figures> {
    let mut pair = Pair::start(Options::PLAIN)?;
    pair.wake()?;
    // Its first message finds receives that it posts when it begins.
    let pair = RefCell::new(pair);
    let mut line = 1;
    let mut filled = false;
    let [ours, bare] = alternate(
        budget,
        [
            &mut |count| {
                play(
                    &pair,
                    Task::Echo,
                    size,
                    count,
                    Endpoint::complete,
                    &mut filled,
                )
            },
            &mut |count| {
                ping_line(&mut pair.borrow_mut(), count, line)?;
                line += count;
                Ok(())
            },
        ],
    )?;
    Ok(Figures::from([("ours_ns", ours), ("line_ns", bare)]))
}

/// Round trips, both sides asleep while they wait.
pub fn asleep(size: usize, budget: Duration) -> Result<Figures> {
    let mut pair = Pair::start(Options {
        wait: Wait::Asleep,
        ..Options::PLAIN
    })?;
    pair.wake()?;
    let pair = RefCell::new(pair);
    let mut filled = false;
    let [ours, bare] = alternate(
        budget,
        [
            &mut |count| {
                let complete = Endpoint::complete_asleep;
                play(&pair, Task::EchoAsleep, size, count, complete, &mut filled)
            },
            &mut |count| {
                pair.borrow_mut().ask(Task::Bell, count, 0)?;
                let pair = pair.borrow();
                (0..count).try_for_each(|_| {
                    pair.bells[0].ring()?;
                    pair.bells[1].wait()
                })
            },
        ],
    )?;
    Ok(Figures::from([("ours_ns", ours), ("eventfd_ns", bare)]))
}

fn play(
    pair: &RefCell<Pair>,
    task: Task,
    size: usize,
    count: u64,
    complete: Complete,
    filled: &mut bool,
) -> Result<()> {
    pair.borrow_mut().ask(task, count, size as u64)?;
    let pair = pair.borrow();
    let mut player = Player::new(&pair.here, size, complete);
    if !*filled {
        player.fill()?;
        *filled = true;
    }
    (0..count).rev().try_for_each(|left| {
        player.send(left)?;
        player.receive()
    })
}

/// The peer's part.
pub fn echo(service: &Service, count: u64, size: usize, complete: Complete) -> Result<()> {
    let mut player = Player::new(&service.here, size, complete);
    if !service.filled.replace(true) {
        player.fill()?;
    }
    (0..count).rev().try_for_each(|left| {
        player.receive()?;
        player.send(left)
    })
}
