//! Random requests of a queue pair, what they must have done, and the messages of its peer.

use std::collections::{BTreeMap, VecDeque};

use serde::{Deserialize, Serialize};
use verbs_sys::{QueuePairEndpoint, WcStatus, WorkCompletion, ffi};

use super::{
    node::{GRANTED, Grant, Pair},
    random::{Random, bytes},
};

/// Requests under way.
pub const WINDOW: usize = 8;
/// The longest request.
pub const SLOT_LEN: usize = 200 << 10;
pub const RECEIVES: usize = 8;
/// The longest message.
pub const RECEIVE_LEN: usize = 130 << 10;
/// The counter that additions go to is in front of what is written and read.
const DATA: usize = 64;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Kind {
    Write,
    Read,
    Add,
    Send,
}

/// Which requests.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Mix {
    pub seed: u64,
    /// How many; `None`: until told to stop.
    pub limit: Option<u64>,
    /// The longest.
    pub len: usize,
    /// All are as long as the longest.
    pub exact: bool,
    /// All are of this kind.
    pub only: Option<Kind>,
}

impl Mix {
    /// Of all kinds and lengths, without end.
    pub fn new(seed: u64, len: usize) -> Self {
        Self {
            seed,
            limit: None,
            len,
            exact: false,
            only: None,
        }
    }

    /// So many.
    pub fn of(self, count: u64) -> Self {
        Self {
            limit: Some(count),
            ..self
        }
    }
}

/// What has become of a queue pair's requests, and what came of its peer.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    pub posted: u64,
    pub succeeded: u64,
    pub flushed: u64,
    /// With which status the first ended that did not succeed.
    pub failed: Option<u32>,
    /// No request is under way, and none will be.
    pub is_over: bool,
    /// Messages of the peer.
    pub received: u64,
    pub wrong: Vec<String>,
}

impl Report {
    /// Asserts that everything was as it must be, for successes and failures.
    #[track_caller]
    pub fn assert_right(&self, who: &str) {
        assert!(self.wrong.is_empty(), "{who}: {self:?}");
    }

    #[track_caller]
    pub fn assert_succeeded(&self, who: &str) {
        self.assert_right(who);
        assert_eq!(self.failed.map(WcStatus::from), None, "{who}: {self:?}");
    }

    /// Asserts that the first failure is one of these.
    #[track_caller]
    pub fn assert_failed(&self, who: &str, statuses: &[WcStatus]) {
        self.assert_right(who);
        let status = self.failed.map(WcStatus::from);
        let known = status
            .as_ref()
            .is_some_and(|status| statuses.contains(status));
        assert!(known, "{who}: {status:?} is none of {statuses:?}: {self:?}");
    }

    /// How many requests ended in which way.
    pub fn outcomes(&self) -> BTreeMap<String, u64> {
        let failed = self
            .failed
            .map(|status| (format!("{:?}", WcStatus::from(status)), 1));
        let mut outcomes: BTreeMap<String, u64> = failed.into_iter().collect();
        *outcomes
            .entry(format!("{:?}", WcStatus::WrFlushErr))
            .or_default() += self.flushed;
        outcomes.insert(format!("{:?}", WcStatus::Success), self.succeeded);
        outcomes.retain(|_, count| *count > 0);
        outcomes
    }
}

enum Request {
    Write {
        offset: usize,
        data: Vec<u8>,
    },
    Read {
        offset: usize,
        expected: Vec<u8>,
    },
    /// With what must have been there before.
    Add(u64),
    Send(Vec<u8>),
}

pub struct Traffic {
    qp_num: u32,
    peer: u32,
    grant: Option<Grant>,
    mix: Option<Mix>,
    random: Random,
    under_way: VecDeque<Request>,
    /// What the requests posted so far make of the peer's memory, and what those that succeeded do.
    to_be: Vec<u8>,
    is: Vec<u8>,
    /// Additions and messages, posted and succeeded.
    adds: [u64; 2],
    sends: [u64; 2],
    /// Requests of the present mix.
    of_mix: u64,
    unfinished: Vec<Request>,
    report: Report,
}

impl Traffic {
    pub fn new(qp_num: u32) -> Self {
        Self {
            qp_num,
            peer: 0,
            grant: None,
            mix: None,
            random: Random::new(0),
            under_way: VecDeque::new(),
            to_be: vec![0; GRANTED],
            is: vec![0; GRANTED],
            adds: [0; 2],
            sends: [0; 2],
            of_mix: 0,
            unfinished: Vec::new(),
            report: Report::default(),
        }
    }

    pub fn connect(&mut self, grant: Grant, remote: &QueuePairEndpoint) {
        self.grant = Some(grant);
        self.peer = remote.qp_num;
    }

    pub fn start(&mut self, mix: Mix) {
        self.random = Random::new(mix.seed);
        self.of_mix = 0;
        self.mix = Some(mix);
    }

    pub fn stop(&mut self) {
        self.mix = None;
    }

    /// Whether no request is under way, and none will be.
    pub fn is_over(&self) -> bool {
        self.mix.is_none() && self.under_way.is_empty()
    }

    pub fn report(&self) -> Report {
        Report {
            is_over: self.is_over(),
            ..self.report.clone()
        }
    }

    /// Moves everything on; whether anything did.
    pub fn step(&mut self, pair: &Pair) -> bool {
        let mut busy = false;
        let mut done = std::array::from_fn::<_, WINDOW, _>(|_| WorkCompletion::default());
        let count = pair.send_cq.poll(&mut done).expect("cannot poll");
        for completion in &done[..count] {
            self.ended(pair, completion);
            busy = true;
        }
        let count = pair.recv_cq.poll(&mut done).expect("cannot poll");
        for completion in &done[..count] {
            self.received(pair, completion);
            busy = true;
        }
        while self.under_way.len() < WINDOW
            && let Some(mix) = self.mix
        {
            self.post(pair, mix);
            busy = true;
            self.of_mix += 1;
            if mix.limit.is_some_and(|limit| self.of_mix >= limit) {
                self.mix = None;
            }
        }
        busy
    }

    fn post(&mut self, pair: &Pair, mix: Mix) {
        let random = &mut self.random;
        let len = if mix.exact {
            mix.len
        } else {
            random.len(mix.len as u64)
        };
        let offset = DATA + random.below((GRANTED - DATA - len) as u64 + 1) as usize;
        let kinds = [Kind::Write, Kind::Read, Kind::Add, Kind::Send];
        let kind = mix.only.unwrap_or(kinds[random.below(4) as usize]);
        let (request, opcode, len) = match kind {
            Kind::Write => {
                let data = bytes(random.next(), len);
                self.to_be[offset..][..len].copy_from_slice(&data);
                (Request::Write { offset, data }, ffi::IBV_WR_RDMA_WRITE, len)
            }
            Kind::Read => {
                let expected = self.to_be[offset..][..len].to_vec();
                (
                    Request::Read { offset, expected },
                    ffi::IBV_WR_RDMA_READ,
                    len,
                )
            }
            Kind::Add => {
                self.adds[0] += 1;
                (
                    Request::Add(self.adds[0] - 1),
                    ffi::IBV_WR_ATOMIC_FETCH_AND_ADD,
                    8,
                )
            }
            Kind::Send => {
                let message = message(self.qp_num, self.sends[0], len.min(RECEIVE_LEN));
                self.sends[0] += 1;
                let len = message.len();
                (Request::Send(message), ffi::IBV_WR_SEND, len)
            }
        };
        let index = self.report.posted as usize % WINDOW;
        if let Request::Write { data, .. } | Request::Send(data) = &request {
            pair.slots_memory.store(index * SLOT_LEN, data);
        }
        let grant = self.grant.expect("not connected");
        let mut element = ffi::ibv_sge {
            addr: pair.slots.addr() + (index * SLOT_LEN) as u64,
            length: len as u32,
            lkey: pair.slots.lkey(),
        };
        let mut raw = ffi::ibv_send_wr {
            wr_id: self.report.posted,
            sg_list: &mut element,
            num_sge: 1,
            opcode,
            send_flags: ffi::IBV_SEND_SIGNALED,
            ..ffi::ibv_send_wr::zeroed()
        };
        match request {
            Request::Add(_) => {
                raw.wr.atomic = ffi::ibv_send_wr_atomic {
                    remote_addr: grant.addr,
                    compare_add: 1,
                    swap: 0,
                    rkey: grant.rkey,
                };
            }
            _ => {
                raw.wr.rdma = ffi::ibv_send_wr_rdma {
                    remote_addr: grant.addr + offset as u64,
                    rkey: grant.rkey,
                };
            }
        }
        // SAFETY: one valid request, whose element lies in a slot that no request uses and no reference
        // covers.
        let posted = unsafe { pair.qp.post_send(&mut raw) };
        posted.expect("cannot post");
        self.under_way.push_back(request);
        self.report.posted += 1;
    }

    fn ended(&mut self, pair: &Pair, completion: &WorkCompletion) {
        let number = self.report.succeeded
            + self.report.flushed
            + u64::from(
                self.report
                    .failed
                    .is_some_and(|status| status != ffi::IBV_WC_WR_FLUSH_ERR),
            );
        if completion.wr_id() != number {
            self.wrong(format!("{completion:?} instead of {number}"));
        }
        let Some(request) = self.under_way.pop_front() else {
            self.wrong(format!("{completion:?} of nothing"));
            return;
        };
        let status = completion.as_raw().status;
        if status != ffi::IBV_WC_SUCCESS {
            self.failed(status);
            self.unfinished.push(request);
            return;
        }
        if self.report.failed.is_some() {
            self.wrong(format!("{completion:?} behind a failure"));
        }
        self.report.succeeded += 1;
        let slot = (number as usize % WINDOW) * SLOT_LEN;
        match request {
            Request::Write { offset, data } => {
                self.is[offset..][..data.len()].copy_from_slice(&data);
            }
            Request::Read { offset, expected } => {
                let read = pair.slots_memory.load(slot, expected.len());
                if read != expected {
                    self.wrong(format!("{} bytes read at {offset}", expected.len()));
                }
            }
            Request::Add(before) => {
                self.adds[1] += 1;
                let read = pair.slots_memory.load(slot, 8);
                if read != before.to_ne_bytes() {
                    self.wrong(format!("{read:?} was there instead of {before}"));
                }
            }
            Request::Send(_) => self.sends[1] += 1,
        }
    }

    fn failed(&mut self, status: u32) {
        self.mix = None;
        if status == ffi::IBV_WC_WR_FLUSH_ERR {
            self.report.flushed += 1;
        } else if self.report.failed.is_some() {
            self.wrong(format!("a second failure: {:?}", WcStatus::from(status)));
        }
        self.report.failed.get_or_insert(status);
    }

    fn received(&mut self, pair: &Pair, completion: &WorkCompletion) {
        match completion.status() {
            WcStatus::Success => {}
            WcStatus::WrFlushErr => return,
            status => {
                self.wrong(format!("a receive ended with {status:?}"));
                return;
            }
        }
        let index = completion.wr_id() as usize;
        let len = completion.byte_len() as usize;
        let came = pair.inbox_memory.load(index * RECEIVE_LEN, len);
        let number = self.report.received;
        if came != message(self.peer, number, came.len()) {
            self.wrong(format!("message {number} of {} bytes", came.len()));
        }
        self.report.received += 1;
        post_receive(pair, index);
    }

    pub fn post_receives(&mut self, pair: &Pair) {
        for index in 0..RECEIVES {
            post_receive(pair, index);
        }
    }

    /// What is wrong with the peer's memory and the number of messages that it got.
    pub fn judge(&self, found: &[u8], received: u64) -> Option<String> {
        if !(self.sends[1]..=self.sends[0]).contains(&received) {
            return Some(format!("{received} messages of {:?}", self.sends));
        }
        let counter = u64::from_ne_bytes(found[..8].try_into().expect("8 bytes"));
        if !(self.adds[1]..=self.adds[0]).contains(&counter) {
            return Some(format!("{counter} additions of {:?}", self.adds));
        }
        let may_be = |at: usize| {
            self.unfinished.iter().any(|request| match request {
                Request::Write { offset, data } => {
                    at.checked_sub(*offset).and_then(|at| data.get(at)) == Some(&found[at])
                }
                _ => false,
            })
        };
        let wrong = |at: &usize| found[*at] != self.is[*at] && !may_be(*at);
        let at = (8..GRANTED).find(wrong)?;
        Some(format!(
            "byte {at} is {:#x} instead of {:#x}",
            found[at], self.is[at]
        ))
    }

    fn wrong(&mut self, what: String) {
        // The first few tell enough.
        if self.report.wrong.len() < 5 {
            self.report.wrong.push(what);
        }
    }
}

/// A message of a queue pair: its number, and bytes that follow from that.
fn message(qp_num: u32, number: u64, len: usize) -> Vec<u8> {
    bytes(u64::from(qp_num) << 32 ^ number, len)
}

fn post_receive(pair: &Pair, index: usize) {
    let mut element = ffi::ibv_sge {
        addr: pair.inbox.addr() + (index * RECEIVE_LEN) as u64,
        length: RECEIVE_LEN as u32,
        lkey: pair.inbox.lkey(),
    };
    let mut raw = ffi::ibv_recv_wr {
        wr_id: index as u64,
        next: std::ptr::null_mut(),
        sg_list: &mut element,
        num_sge: 1,
    };
    // SAFETY: one valid request, whose element no other uses and no reference covers. Posting fails on a
    // queue pair that has failed, where nothing more comes.
    let _ = unsafe { pair.qp.post_recv(&mut raw) };
}
