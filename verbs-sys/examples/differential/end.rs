//! One queue pair of a pair: posting to it, and taking its completions.

use std::collections::VecDeque;
use std::io;
use std::time::{Duration, Instant};

use verbs_sys::{
    CompletionQueue, QpState, QpType, QueuePair, SharedReceiveQueue, WcOpcode, WcStatus,
    WorkCompletion, ffi,
};

/// A queue pair with completion queues of its own, and what is outstanding.
pub struct End {
    pub qp: QueuePair,
    pub send_cq: CompletionQueue,
    pub recv_cq: CompletionQueue,
    pub sq_sig_all: bool,
    /// Where its receives come from, if not from a queue of its own.
    pub srq: Option<SharedReceiveQueue>,
    /// Each with whether it is signaled.
    pub sends: VecDeque<(u64, bool)>,
    pub recvs: VecDeque<u64>,
    /// Has failed, so everything outstanding comes back.
    pub broken: bool,
    /// Has stopped sending.
    pub paused: bool,
    /// Successful receives since the last step.
    pub received: u32,
    /// What the last step saw of either queue.
    pub lines: [Vec<String>; 2],
}

/// What a completion says about the peer.
#[derive(PartialEq, Eq)]
pub enum News {
    None,
    PeerIsBroken,
}

impl End {
    pub fn new(
        qp: QueuePair,
        send_cq: CompletionQueue,
        recv_cq: CompletionQueue,
        srq: Option<SharedReceiveQueue>,
        sq_sig_all: bool,
    ) -> Self {
        Self {
            qp,
            send_cq,
            recv_cq,
            sq_sig_all,
            srq,
            sends: VecDeque::new(),
            recvs: VecDeque::new(),
            broken: false,
            paused: false,
            received: 0,
            lines: [Vec::new(), Vec::new()],
        }
    }

    /// Takes what completions there are; `peer` is the number of the other queue pair.
    pub fn reap(&mut self, peer: u32) -> News {
        let mut news = News::None;
        let mut completions: [WorkCompletion; 16] = Default::default();
        loop {
            let count = self.send_cq.poll(&mut completions).unwrap_or(0);
            for completion in &completions[..count] {
                if self.sent(completion) == News::PeerIsBroken {
                    news = News::PeerIsBroken;
                }
            }
            let more = self.recv_cq.poll(&mut completions).unwrap_or(0);
            for completion in &completions[..more] {
                self.received(completion, peer);
            }
            if count + more == 0 {
                return news;
            }
        }
    }

    fn sent(&mut self, completion: &WorkCompletion) -> News {
        let id = completion.wr_id();
        if let Some(at) = self.sends.iter().position(|(known, _)| *known == id) {
            self.sends.drain(..=at);
        }
        let mut line = format!("{id} ");
        if completion.is_ok() {
            line.push_str(&format!("ok {:?}", completion.opcode()));
            if matches!(
                completion.opcode(),
                WcOpcode::RdmaRead | WcOpcode::CompSwap | WcOpcode::FetchAdd
            ) {
                line.push_str(&format!(" {}", completion.byte_len()));
            }
        } else {
            line.push_str(&format!("{:?}", completion.status()));
            self.broken = true;
        }
        self.note(0, line, completion);
        match completion.status() {
            WcStatus::RemAccessErr | WcStatus::RemInvReqErr | WcStatus::RemOpErr => {
                News::PeerIsBroken
            }
            _ => News::None,
        }
    }

    fn received(&mut self, completion: &WorkCompletion, peer: u32) {
        let id = completion.wr_id();
        if let Some(at) = self.recvs.iter().position(|known| *known == id) {
            self.recvs.drain(..=at);
        }
        let mut line = format!("{id} ");
        if completion.is_ok() {
            self.received += 1;
            line.push_str(&format!(
                "ok {:?} {}",
                completion.opcode(),
                completion.byte_len()
            ));
            if let Some(imm) = completion.imm_data() {
                line.push_str(&format!(" imm {imm:#x}"));
            }
            if self.qp.qp_type() == QpType::Ud {
                // Valid for datagrams only.
                let raw = completion.as_raw();
                if raw.wc_flags & ffi::IBV_WC_GRH != 0 {
                    line.push_str(" grh");
                }
                if raw.src_qp != peer {
                    line.push_str(" of a stranger");
                }
            }
        } else {
            line.push_str(&format!("{:?}", completion.status()));
            self.broken = true;
        }
        self.note(1, line, completion);
    }

    fn note(&mut self, queue: usize, mut line: String, completion: &WorkCompletion) {
        if completion.qp_num() != self.qp.qp_num() {
            line.push_str(" of another queue pair");
        }
        self.lines[queue].push(line);
    }

    /// Whether what is certain to come has come.
    pub fn has_ended(&self) -> bool {
        if !self.broken {
            return self.paused || self.sends.iter().all(|(_, signaled)| !signaled);
        }
        if !self.sends.is_empty() {
            return false;
        }
        match self.state() {
            QpState::Err => self.recvs.is_empty() || self.srq.is_some(),
            QpState::Sqe => true,
            _ => false,
        }
    }

    pub fn state(&self) -> QpState {
        self.qp.state().unwrap_or(QpState::Unknown)
    }

    /// The same by its number in the verbs ABI.
    pub fn state_number(&self) -> ffi::ibv_qp_state {
        let attr = self.qp.query(verbs_sys::QpAttrMask::STATE);
        attr.map_or(ffi::IBV_QPS_RESET, |attr| attr.qp_state)
    }

    /// Waits until what was under way when it stopped sending has ended: before that a change to RTS may be refused.
    pub fn await_drained(&self, patience: Duration) {
        let deadline = Instant::now() + patience;
        let drains = || {
            let attr = self.qp.query(verbs_sys::QpAttrMask::STATE);
            attr.is_ok_and(|attr| attr.sq_draining != 0)
        };
        while drains() && Instant::now() < deadline {
            std::thread::yield_now();
        }
    }

    /// Forgets everything, as RESET does.
    pub fn forget(&mut self) {
        let mut completions: [WorkCompletion; 16] = Default::default();
        while self
            .send_cq
            .poll(&mut completions)
            .is_ok_and(|count| count > 0)
        {}
        while self
            .recv_cq
            .poll(&mut completions)
            .is_ok_and(|count| count > 0)
        {}
        self.sends.clear();
        self.recvs.clear();
        self.broken = false;
        self.paused = false;
        self.received = 0;
        self.lines = [Vec::new(), Vec::new()];
    }

    /// Posts a list; the error and the index of the first request that was not posted, if it was
    /// named.
    pub fn post_send(&mut self, list: &mut [ffi::ibv_send_wr]) -> Result<(), Refused> {
        let first = list.as_mut_ptr();
        for index in 1..list.len() {
            // SAFETY: inside the list, as is the one before it.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        // SAFETY: a valid list; elements with good keys lie in memory that outlives the queue
        // pair, and of which no reference exists.
        let result = unsafe { self.qp.post_send(first) };
        let result = result.map_err(|error| Refused::new(&error.source, error.bad_wr, first));
        for wr in &list[..posted(&result, list.len())] {
            let signaled = self.sq_sig_all || wr.send_flags & ffi::IBV_SEND_SIGNALED != 0;
            self.sends.push_back((wr.wr_id, signaled));
        }
        result
    }

    /// The same for receives.
    pub fn post_recv(&mut self, list: &mut [ffi::ibv_recv_wr]) -> Result<(), Refused> {
        let first = list.as_mut_ptr();
        for index in 1..list.len() {
            // SAFETY: inside the list, as is the one before it.
            unsafe { (*first.add(index - 1)).next = first.add(index) };
        }
        let result = match &self.srq {
            // SAFETY: as for sends.
            Some(srq) => unsafe { srq.post_recv(first) },
            // SAFETY: as for sends.
            None => unsafe { self.qp.post_recv(first) },
        };
        let result = result.map_err(|error| Refused::new(&error.source, error.bad_wr, first));
        // Of those posted to a broken queue pair it is not certain that they come back.
        if !self.broken {
            let count = posted(&result, list.len());
            self.recvs.extend(list[..count].iter().map(|wr| wr.wr_id));
        }
        result
    }
}

fn posted(result: &Result<(), Refused>, all: usize) -> usize {
    match result {
        Ok(()) => all,
        Err(refused) => refused.index.unwrap_or(0),
    }
}

/// A list was not posted, or in part.
pub struct Refused {
    pub error: String,
    /// `None` if the request was not named.
    pub index: Option<usize>,
}

impl Refused {
    fn new<T>(error: &io::Error, bad_wr: *mut T, first: *mut T) -> Self {
        let index = (bad_wr.addr().wrapping_sub(first.addr())) / size_of::<T>();
        Self {
            error: errno(error),
            index: (!bad_wr.is_null()).then_some(index),
        }
    }
}

/// The name of an error number.
pub fn errno(error: &io::Error) -> String {
    match error.raw_os_error() {
        Some(libc::EINVAL) => "EINVAL".into(),
        Some(libc::ENOMEM) => "ENOMEM".into(),
        Some(libc::EPERM) => "EPERM".into(),
        Some(libc::EFAULT) => "EFAULT".into(),
        Some(libc::EOPNOTSUPP) => "EOPNOTSUPP".into(),
        other => format!("{other:?}"),
    }
}
