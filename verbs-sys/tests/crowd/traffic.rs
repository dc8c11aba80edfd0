//! Random traffic of one end. Each queue pair sends numbered messages, and checks that those of its
//! peer, and its own completions, come in order, each once.

use std::time::Duration;

use crate::Result;
use crate::side::{DEPTH, Kind, Side, kind_of};

/// Messages of each queue pair.
const MESSAGES: u32 = 60;
/// Longer than anything takes but a wake-up that got lost.
const FOR_EVER: Duration = Duration::from_secs(60);

/// What one queue pair has done.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    sent: u32,
    completed: u32,
    received: u32,
}

impl Progress {
    /// Whether it may send: what its peer has not received may not exceed the receives, and a datagram
    /// is an answer, as it would be lost if there were none.
    fn may_send(&self, kind: Kind) -> bool {
        let under_way = (self.sent - self.completed) as usize;
        self.sent < MESSAGES
            && match kind {
                Kind::Connection => under_way < DEPTH,
                Kind::Datagrams => under_way == 0 && self.sent <= self.received,
            }
    }

    fn is_over(&self) -> bool {
        let counts = [self.sent, self.completed, self.received];
        counts == [MESSAGES; 3]
    }
}

/// A source of numbers (xorshift).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

struct Traffic<'a> {
    side: &'a Side,
    progress: Vec<Progress>,
    random: Random,
}

/// Sends and receives everything.
pub fn run(side: &mut Side, seed: u64) -> Result {
    let mut traffic = Traffic {
        progress: vec![Progress::default(); side.qps.len()],
        side,
        random: Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15)),
    };
    while !traffic.progress.iter().all(Progress::is_over) {
        traffic.send_some()?;
        // Mostly a few polls, and sometimes so many that idle queue pairs come to rest.
        let polls = if traffic.random.below(100) == 0 {
            5_000
        } else {
            traffic.random.below(20)
        };
        for _ in 0..polls {
            traffic.poll()?;
        }
        if side.setup.sleeps {
            traffic.sleep()?;
        }
    }
    Ok(())
}

impl Traffic<'_> {
    fn send_some(&mut self) -> Result {
        for _ in 0..self.random.below(8) {
            let number = self.random.below(self.progress.len());
            let progress = &mut self.progress[number];
            if progress.may_send(kind_of(number)) {
                let (id, imm) = (u64::from(progress.sent), progress.sent);
                progress.sent += 1;
                self.side.send(number, id, imm)?;
            }
        }
        Ok(())
    }

    /// Whether there was anything.
    fn poll(&mut self) -> Result<bool> {
        let room = 1 + self.random.below(16);
        let found = self.side.poll(room)?;
        for completion in &found {
            let number = self.side.number_of(completion.qp_num());
            let progress = &mut self.progress[number];
            assert!(completion.is_ok(), "{number}: {:?}", completion.status());
            if let Some(imm) = completion.imm_data() {
                assert_eq!(imm, progress.received, "received by queue pair {number}");
                progress.received += 1;
                self.side.refill(number, 1)?;
            } else {
                let id = u64::from(progress.completed);
                assert_eq!(completion.wr_id(), id, "sent by queue pair {number}");
                progress.completed += 1;
            }
        }
        Ok(!found.is_empty())
    }

    /// Sleeps until something comes, unless there is something to do.
    fn sleep(&mut self) -> Result {
        self.side.arm()?;
        let mut is_idle = true;
        while self.poll()? {
            is_idle = false;
        }
        let may_send = |number: usize| self.progress[number].may_send(kind_of(number));
        let is_over = self.progress.iter().all(Progress::is_over);
        if is_idle && !is_over && !(0..self.progress.len()).any(may_send) {
            let event = self.side.channel.wait_timeout(FOR_EVER)?;
            assert!(event.is_some(), "nobody woke this side");
        }
        Ok(())
    }
}
