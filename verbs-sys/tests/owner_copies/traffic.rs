//! Random requests that use memory of both kinds: what each must have done is known.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use verbs_sys::WcStatus;

use crate::node::{Memory, Pair, RECEIVE, Request, poll};

/// Requests under way.
const WINDOW: usize = 12;
/// Bytes of a request at most: longer than what a ring carries, and no longer than a receive.
const MOST: usize = 12 << 10;
/// The peer's memory: a word that says how many marks it has got, a counter, and data behind them.
const MARK: u64 = 0;
const COUNTER: u64 = 8;
const DATA: usize = 64;

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Plan {
    pub seed: u64,
    pub count: u64,
    /// Only so many requests later is the peer's heap used, or a long message sent from ours.
    pub heap_after: u64,
    /// No READs and atomics, and nothing that has to wait for a receive.
    pub unreliable: bool,
}

/// What a request must bring.
enum Expected {
    Nothing,
    Bytes(Memory, usize, Vec<u8>),
}

struct Random(u64);

impl Random {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 20) % end
    }

    fn memory(&mut self) -> Memory {
        [Memory::Device, Memory::Heap][self.below(2) as usize]
    }
}

fn bytes(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64)
        .map(|at| (seed.wrapping_mul(31) + at * 7 + at / 251) as u8)
        .collect()
}

/// A message: its number, whether it is the last, the marks set before it, and bytes that follow from its
/// number.
fn message(number: u64, last: bool, marks: [u64; 2], len: usize) -> Vec<u8> {
    let head = [number, last.into(), marks[0], marks[1]];
    let mut message: Vec<u8> = head.iter().flat_map(|word| word.to_ne_bytes()).collect();
    message.extend(bytes(number, len));
    message
}

struct Traffic<'a> {
    pair: &'a Pair,
    plan: Plan,
    random: Random,
    under_way: VecDeque<(u64, Expected)>,
    posted: u64,
    /// Of each memory of the peer: its data, and how many marks and additions it has been sent.
    data: [Vec<u8>; 2],
    marks: [u64; 2],
    adds: [u64; 2],
    sent: u64,
    received: u64,
    /// Receives that are used up and not yet posted again.
    used: Vec<u64>,
    is_last: bool,
}

/// Sends requests, and takes the peer's messages until its last has come. All receives are posted. Panics at
/// anything wrong.
pub fn run(pair: &Pair, plan: Plan) -> u64 {
    let mut traffic = Traffic {
        pair,
        plan,
        random: Random(plan.seed | 1),
        under_way: VecDeque::new(),
        posted: 0,
        data: [vec![0; MOST], vec![0; MOST]],
        marks: [0; 2],
        adds: [0; 2],
        sent: 0,
        received: 0,
        used: Vec::new(),
        is_last: false,
    };
    while traffic.posted < plan.count || !traffic.under_way.is_empty() || !traffic.is_last {
        if !traffic.step() {
            std::thread::yield_now();
        }
    }
    traffic.posted
}

impl Traffic<'_> {
    fn step(&mut self) -> bool {
        let mut busy = false;
        let next = || poll(&self.pair.send_cq).or_else(|| poll(&self.pair.recv_cq));
        while let Some(done) = next() {
            busy = true;
            if done.wr_id() & RECEIVE != 0 {
                assert_eq!(done.status(), WcStatus::Success);
                let came = self.pair.received(&done);
                self.take(&came);
                self.used.push(done.wr_id() & !RECEIVE);
                continue;
            }
            let (number, expected) = self.under_way.pop_front().expect("a completion too many");
            assert_eq!((done.wr_id(), done.status()), (number, WcStatus::Success));
            if let Expected::Bytes(memory, at, bytes) = expected {
                let found = self.pair.region(memory).load(at, bytes.len());
                assert!(found == bytes, "what request {number} has brought");
            }
        }
        // Messages have to wait for receives now and then.
        if self.random.below(3) == 0 && !self.plan.unreliable {
            for index in self.used.drain(..) {
                self.pair.post_receive(index);
            }
        }
        while self.posted < self.plan.count && self.under_way.len() < WINDOW {
            self.post();
            busy = true;
            if self.random.below(4) == 0 {
                break;
            }
        }
        busy
    }

    fn take(&mut self, came: &[u8]) {
        let word = |at: usize| {
            let bytes = came[at * 8..][..8].try_into().expect("8 bytes");
            u64::from_ne_bytes(bytes)
        };
        let marks = [word(2), word(3)];
        let expected = message(self.received, word(1) != 0, marks, came.len() - 32);
        assert!(came == expected, "message {}", self.received);
        for (memory, mark) in [Memory::Device, Memory::Heap].into_iter().zip(marks) {
            let found = self.pair.region(memory).word(MARK as usize);
            assert!(found >= mark, "a message has overtaken a WRITE");
        }
        self.received += 1;
        self.is_last = word(1) != 0;
    }

    fn post(&mut self) {
        let number = self.posted;
        let local = (1 + number as usize % WINDOW) * (2 * MOST);
        let opened = number >= self.plan.heap_after;
        let target = match self.random.memory() {
            Memory::Heap if opened => Memory::Heap,
            _ => Memory::Device,
        };
        let which = target as usize;
        let from = self.random.memory();
        let mut len = 1 + self.random.below(MOST as u64 / 2) as usize;
        if self.random.below(2) == 0 {
            len = 1 + len % 200;
        }
        let last = number + 1 == self.plan.count;
        let kind = if last { 0 } else { self.random.below(6) };
        let kind = if self.plan.unreliable { kind % 3 } else { kind };
        let mut expected = Expected::Nothing;
        let (request, from, len, at) = match kind {
            0 => {
                // A short one goes with the ring from anywhere.
                let from = if opened || len < 1000 {
                    from
                } else {
                    Memory::Device
                };
                let message = message(self.sent, last, self.marks, len);
                self.sent += 1;
                self.pair.region(from).store(local, &message);
                let len = message.len();
                (Request::Send(from, len as u32), from, len, 0)
            }
            1 => {
                self.marks[which] += 1;
                let mark = self.marks[which].to_ne_bytes();
                self.pair.region(from).store(local, &mark);
                (Request::Write(target), from, 8, MARK)
            }
            2 | 3 => {
                let at = self.random.below((MOST - len) as u64) as usize;
                let data = bytes(number, len);
                self.pair.region(from).store(local, &data);
                self.data[which][at..][..len].copy_from_slice(&data);
                (Request::Write(target), from, len, (DATA + at) as u64)
            }
            4 => {
                let at = self.random.below((MOST - len) as u64) as usize;
                let data = self.data[which][at..][..len].to_vec();
                expected = Expected::Bytes(from, local, data);
                (Request::Read(target), from, len, (DATA + at) as u64)
            }
            _ => {
                let before = self.adds[which].to_ne_bytes().to_vec();
                self.adds[which] += 1;
                expected = Expected::Bytes(from, local, before);
                (Request::Add(target), from, 8, COUNTER)
            }
        };
        self.pair
            .post(number, request, (from, local, len as u32), at);
        self.under_way.push_back((number, expected));
        self.posted += 1;
    }
}
