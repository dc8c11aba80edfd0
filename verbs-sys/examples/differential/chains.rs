//! Chains that are legal and out of the ordinary: states, full queues, late receives.

use verbs_sys::{AccessFlags, QpType, ffi};

use crate::connect::needed;
use crate::generate::{ALL, Generator, REGIONS, SCRATCH};
use crate::opcode::is_answered;
use crate::program::{Action, Request, Side, Spoil, Wait};

const STATES: [ffi::ibv_qp_state; 7] = [
    ffi::IBV_QPS_RESET,
    ffi::IBV_QPS_INIT,
    ffi::IBV_QPS_RTR,
    ffi::IBV_QPS_RTS,
    ffi::IBV_QPS_SQD,
    ffi::IBV_QPS_SQE,
    ffi::IBV_QPS_ERR,
];

const UNCHECKED: [Spoil; 9] = [
    Spoil::PkeyIndex,
    Spoil::NoMtu,
    Spoil::NotGlobal,
    Spoil::DestQpn,
    Spoil::RnrTimer,
    Spoil::RetryCount,
    Spoil::RnrRetryCount,
    Spoil::RdAtomic,
    Spoil::DestRdAtomic,
];

impl Generator {
    /// Registration with any combination of rights.
    pub fn register(&mut self, pair: usize) {
        let access = self.random.below(32);
        let len = 1 + self.random.below(5000);
        self.push(pair, "register", Action::Register { len, access });
    }

    /// A receive queue that is full, and forgotten.
    pub fn fill(&mut self, pair: usize) {
        let side = self.side();
        self.push(pair, "full receive queue", Action::FillRecv { side });
        self.connect(pair, None);
    }

    /// The same of a send queue that has been stopped, so that nothing leaves it.
    pub fn fill_stopped(&mut self, pair: usize) {
        let side = self.side();
        self.push(pair, "stop", modify(side, Some(ffi::IBV_QPS_SQD)));
        self.push(pair, "full send queue", Action::FillSend { side });
        self.connect(pair, None);
    }

    /// Both sides at once. Each has regions of its own, as nothing orders the two.
    pub fn exchange_both_ways(&mut self, pair: usize) {
        let sides = [(Side::A, &[0, 3, 4][..]), (Side::B, &[1, 2, 5, 8][..])];
        let mut lists = Vec::new();
        for (side, regions) in sides {
            self.regions = regions;
            // What the spare ones are in is not known any more.
            if !self.links[pair].spare[side.other().index()].is_empty() {
                self.regions = &REGIONS;
                return self.exchange(pair);
            }
            let (recvs, list, _) = self.batch(pair, side, 4);
            lists.push((side, recvs, list));
        }
        self.regions = &REGIONS;
        for (side, recvs, _) in &mut lists {
            let recvs = std::mem::take(recvs);
            self.push_recv(pair, side.other(), recvs);
        }
        for (side, _, list) in lists {
            let (kind, wait) = match side {
                Side::A => ("one way", Wait::No),
                Side::B => ("both ways", Wait::End { recvs: 0 }),
            };
            self.push(pair, kind, Action::Send { side, list, wait });
        }
    }

    /// Requests that wait because sending has been stopped.
    pub fn pause(&mut self, pair: usize) {
        let side = self.side();
        let (recvs, list, _) = self.batch(pair, side, 4);
        self.push_recv(pair, side.other(), recvs);
        self.push(pair, "stop", modify(side, Some(ffi::IBV_QPS_SQD)));
        let wait = Wait::Polls;
        self.push(pair, "stopped", Action::Send { side, list, wait });
        self.push(pair, "resume", modify(side, Some(ffi::IBV_QPS_RTS)));
        let looks = self.random.percent(20);
        if looks {
            self.push(pair, "resumed alone", Action::Look);
        }
        // `rdma_rxe` goes on when it is next posted to.
        let list = vec![self.kick(pair, side)];
        let wait = Wait::End { recvs: 0 };
        self.push(pair, "resumed", Action::Send { side, list, wait });
        if looks {
            self.connect(pair, None);
        }
    }

    fn kick(&mut self, pair: usize, side: Side) -> Request {
        let mut request = self.request(pair, side, ffi::IBV_WR_RDMA_WRITE, 8);
        request.flags = ffi::IBV_SEND_SIGNALED | ffi::IBV_SEND_FENCE;
        request
    }

    /// Messages that come before their receives.
    pub fn be_patient(&mut self, pair: usize) {
        let side = self.side();
        let (recvs, list, _) = self.batch(pair, side, 4);
        // `rdma_rxe` may hang where a READ or an atomic is repeated.
        let answered = |request: &Request| is_answered(request.opcode);
        let repeats = list.iter().any(answered);
        if self.links[pair].rnr_retry != 7 || recvs.is_empty() || repeats {
            self.push_recv(pair, side.other(), recvs);
            let wait = Wait::End { recvs: 0 };
            self.push(pair, "exchange", Action::Send { side, list, wait });
            return;
        }
        let wait = Wait::No;
        self.push(pair, "early message", Action::Send { side, list, wait });
        self.push_recv(pair, side.other(), recvs);
        self.push(pair, "late receive", Action::Settle { recvs: 0 });
    }

    /// A queue pair that is taken to ERR with work outstanding.
    pub fn fail(&mut self, pair: usize) {
        let side = self.side();
        let here = self.spare(pair, side, 4);
        self.push_recv(pair, side, here);
        let waits = self.links[pair].spare[side.other().index()].is_empty();
        if waits && self.links[pair].rnr_retry == 7 {
            let len = self.length(500);
            let request = self.request(pair, side, ffi::IBV_WR_SEND, len);
            let (_, mut list, _) = self.batch(pair, side, 3);
            list.insert(0, request);
            let wait = Wait::No;
            self.push(pair, "unanswered", Action::Send { side, list, wait });
        }
        self.push(pair, "to error", modify(side, Some(ffi::IBV_QPS_ERR)));
        self.push(pair, "flushed", Action::Settle { recvs: 0 });
        if self.random.percent(50) {
            self.post_after_error(pair, side);
        }
        let refill = self.random.next();
        self.connect(pair, Some(refill));
    }

    pub fn post_after_error(&mut self, pair: usize, side: Side) {
        let (_, list, _) = self.batch(pair, side, 3);
        let wait = Wait::End { recvs: 0 };
        self.push(pair, "send in error", Action::Send { side, list, wait });
        if self.random.percent(30) {
            let list = vec![self.recv(pair, side, 64)];
            self.push(pair, "receive in error", Action::Recv { side, list });
        }
    }

    /// Messages without a connection's guarantee that find no receive, or the wrong queue key; then
    /// some that arrive.
    pub fn lose(&mut self, pair: usize) {
        let side = self.side();
        if !self.links[pair].spare[side.other().index()].is_empty() {
            return self.exchange(pair);
        }
        let count = 1 + self.random.below(3);
        let wrong = self.program.pairs[pair].qp_type == QpType::Ud && self.random.percent(50);
        let mut list: Vec<Request> = Vec::new();
        for _ in 0..count {
            let len = self.length(500);
            let mut request = self.request(pair, side, ffi::IBV_WR_SEND, len);
            request.flags |= ffi::IBV_SEND_SIGNALED;
            request.wrong_qkey = wrong;
            list.push(request);
        }
        if wrong {
            let recv = vec![self.recv(pair, side.other(), 600)];
            self.links[pair].spare[side.other().index()].push_back(600);
            self.push_recv(pair, side.other(), recv);
        }
        let kind = if wrong { "wrong queue key" } else { "lost" };
        let wait = Wait::End { recvs: 0 };
        self.push(pair, kind, Action::Send { side, list, wait });
        let (recvs, list, used) = self.batch(pair, side, 3);
        if !wrong {
            // Only what comes behind in the same queue tells that they are lost.
            self.connect(pair, None);
        }
        self.push_recv(pair, side.other(), recvs);
        let wait = Wait::End { recvs: used };
        self.push(pair, "behind the lost", Action::Send { side, list, wait });
    }

    /// A walk through the states of a queue pair that nobody else uses.
    pub fn play_with_states(&mut self) {
        let side = self.side();
        let qp_type = self.program.pairs[SCRATCH].qp_type;
        self.push(SCRATCH, "reset", modify(side, Some(ffi::IBV_QPS_RESET)));
        if self.random.percent(25) {
            return self.post_early(side);
        }
        // Where it would be if everything were done.
        let mut up = 0;
        for _ in 0..4 + self.random.below(8) {
            let next = [ffi::IBV_QPS_INIT, ffi::IBV_QPS_RTR, ffi::IBV_QPS_RTS];
            let (to, kind) = match self.random.below(10) {
                0..=5 if up < 3 => (Some(next[up]), "step"),
                0..=6 => (None, "change"),
                _ => (Some(self.random.pick(&STATES)), "jump"),
            };
            let mut mask = to.map_or(ffi::IBV_QP_ACCESS_FLAGS, |to| needed(qp_type, to));
            let mut kind = kind.to_owned();
            let mut spoil = Spoil::No;
            match self.random.below(10) {
                0 => {
                    let bits: Vec<u32> = (0..21).map(|bit| 1 << bit).collect();
                    let bits: Vec<u32> = bits.into_iter().filter(|bit| mask & bit != 0).collect();
                    if !bits.is_empty() {
                        mask &= !self.random.pick(&bits);
                        kind.push_str(" with less");
                    }
                }
                1..=2 => {
                    mask |= 2 << self.random.below(20);
                    kind.push_str(" with more");
                }
                3 => {
                    spoil =
                        self.random
                            .pick(&[Spoil::Port, Spoil::Mtu, Spoil::Timeout, Spoil::AvPort]);
                    kind.push_str(" with a wrong value");
                }
                4 if self.random.percent(30) => {
                    spoil = self.random.pick(&UNCHECKED);
                    kind.push_str(" with an unchecked value");
                }
                _ if kind == "step" => up += 1,
                _ => {}
            }
            if to.is_none() && mask & ffi::IBV_QP_AV != 0 {
                kind.push_str(" and of the address");
            }
            let kind = format!("{kind} {qp_type:?}");
            let action = Action::Modify {
                side,
                to,
                mask,
                spoil,
            };
            self.push(SCRATCH, kind, action);
            if UNCHECKED.contains(&spoil) {
                // From here the states may be others.
                self.push(SCRATCH, "reset", modify(side, Some(ffi::IBV_QPS_RESET)));
                return;
            }
        }
        self.push(SCRATCH, "query", Action::Query { side });
    }

    /// Requests in a state that does not take them.
    fn post_early(&mut self, side: Side) {
        let qp_type = self.program.pairs[SCRATCH].qp_type;
        let ups = self.random.below(3) as usize;
        let states = [ffi::IBV_QPS_INIT, ffi::IBV_QPS_RTR];
        for to in states.into_iter().take(ups) {
            let action = Action::Modify {
                side,
                to: Some(to),
                mask: needed(qp_type, to),
                spoil: Spoil::No,
            };
            self.push(SCRATCH, "step", action);
        }
        if self.random.percent(50) {
            let request = self.request(SCRATCH, side, ffi::IBV_WR_SEND, 8);
            let list = vec![request];
            let wait = Wait::Polls;
            self.push(SCRATCH, "early send", Action::Send { side, list, wait });
        } else {
            let list = vec![self.recv(SCRATCH, side, 8)];
            self.push(SCRATCH, "early receive", Action::Recv { side, list });
        }
        self.push(SCRATCH, "reset", modify(side, Some(ffi::IBV_QPS_RESET)));
    }

    /// Rights of which one is missing.
    pub fn all_but(&self, right: AccessFlags) -> AccessFlags {
        ALL.difference(right)
    }
}

pub fn modify(side: Side, to: Option<ffi::ibv_qp_state>) -> Action {
    Action::Modify {
        side,
        to,
        mask: 0,
        spoil: Spoil::No,
    }
}
