//! Runs a program on a device and writes down what happens.

use std::error::Error;
use std::fmt::Write as _;
use std::time::{Duration, Instant};

use verbs_sys::{
    AccessFlags, AddressHandle, Context, Gid, PathOptions, ProtectionDomain, QpAttrMask, QpState,
    QpType, QueuePairError, QueuePairInit, ffi,
};

use crate::connect::{Connection, spoil};
use crate::end::{End, News, errno};
use crate::memory::Memory;
use crate::program::{Action, PairPlan, Program, RegionPlan, Side, Spoil, Step, Wait};
use crate::random::Random;
use crate::window::Window;

/// The objects of a program. Fields in the order in which they go.
pub struct World<'a> {
    pub program: &'a Program,
    pub pairs: Vec<[End; 2]>,
    /// Each pair's window.
    pub windows: Vec<Option<Window>>,
    pub ah: AddressHandle,
    pub memories: Vec<Memory>,
    /// Where the headers of datagrams go: not all of their bytes are defined.
    pub headers: Memory,
    /// The keys of a region that is gone.
    pub stale: (u32, u32),
    pub pds: [ProtectionDomain; 2],
    gid: (u8, Gid),
    /// How often a pair was connected: for sequence numbers that do not come again soon.
    connections: u32,
    buffer: Vec<u64>,
    /// How long to wait for what must come.
    patience: Duration,
}

/// What must come did not come.
struct Stuck;

impl<'a> World<'a> {
    pub fn new(
        context: &Context,
        program: &'a Program,
        patience: Duration,
    ) -> Result<Self, Box<dyn Error>> {
        let pds = [context.alloc_pd()?, context.alloc_pd()?];
        let (gid_index, gid) = context.choose_gid(1)?;
        let path = PathOptions {
            gid_index,
            ..PathOptions::default()
        };
        let of =
            |plan: &RegionPlan| Memory::of(&pds[usize::from(plan.foreign)], program.heap, plan);
        let memories: Result<Vec<Memory>, _> = program.regions.iter().map(of).collect();
        let memories = memories?;
        let gone = Memory::new(&pds[0], program.heap, 64, AccessFlags::LOCAL_WRITE)?;
        let stale = (gone.region.lkey(), gone.region.rkey());
        drop(gone);
        let mut random = Random::new(program.seed);
        memories
            .iter()
            .for_each(|memory| memory.refill(&mut random));
        let pairs: Result<Vec<[End; 2]>, Box<dyn Error>> = program
            .pairs
            .iter()
            .map(|plan| Ok([end(context, &pds[0], plan)?, end(context, &pds[0], plan)?]))
            .collect();
        Ok(Self {
            program,
            windows: program.pairs.iter().map(|_| None).collect(),
            pairs: pairs?,
            ah: pds[0].create_ah(gid, 0, &path)?,
            memories,
            headers: Memory::new(&pds[0], false, 64, AccessFlags::LOCAL_WRITE)?,
            stale,
            gid: (gid_index, gid),
            pds,
            connections: 0,
            buffer: Vec::new(),
            patience,
        })
    }

    /// Runs all steps; the number of the step that hung, if one did.
    pub fn run(&mut self, trace: &mut String) -> Option<usize> {
        let program = self.program;
        // Writing to a string does not fail.
        let _ = writeln!(trace, "program {:016x}", program.seed);
        for (index, step) in program.steps.iter().enumerate() {
            let _ = writeln!(trace, "@{index} {} {}", step.pair, step.kind);
            let done = self.step(step, trace);
            let ends = &mut self.pairs[step.pair];
            for (end, name) in ends.iter_mut().zip(["a", "b"]) {
                for (lines, queue) in end.lines.iter_mut().zip(["s", "r"]) {
                    for line in lines.drain(..) {
                        let _ = writeln!(trace, " {name}{queue} {line}");
                    }
                }
            }
            if ends.iter().any(|end| end.broken) {
                let [a, b] = [ends[0].state(), ends[1].state()];
                let _ = writeln!(trace, " state {a:?} {b:?}");
            }
            if step.action.is_settled() {
                for (region, memory) in self.memories.iter_mut().enumerate() {
                    if let Some(digest) = memory.changed(&mut self.buffer) {
                        let _ = writeln!(trace, " memory {region} {digest:016x}");
                    }
                }
            }
            if done.is_err() {
                let _ = writeln!(trace, " stuck");
                return Some(index);
            }
        }
        None
    }

    fn step(&mut self, step: &Step, trace: &mut String) -> Result<(), Stuck> {
        let pair = step.pair;
        match &step.action {
            Action::Connect {
                access,
                rnr_retry,
                timeout,
                retry_cnt,
                refill,
            } => {
                self.connections += 1;
                let of = |side: usize| Connection {
                    gid: self.gid.1,
                    gid_index: self.gid.0,
                    access: access[side],
                    remote: self.pairs[pair][1 - side].qp.qp_num(),
                    psn: self.connections.wrapping_mul(0x1_2345) & 0xff_ffff,
                    rnr_retry: *rnr_retry,
                    timeout: *timeout,
                    retry_cnt: *retry_cnt,
                };
                let connections = [of(0), of(1)];
                let result = connect(&mut self.pairs[pair], &connections);
                write_result(trace, "connect", result);
                if let Some(seed) = refill {
                    let mut random = Random::new(*seed);
                    self.memories
                        .iter()
                        .for_each(|memory| memory.refill(&mut random));
                }
                Ok(())
            }
            Action::Recv { side, list } => {
                self.post_recv(pair, *side, list, trace);
                if self.end(pair, *side).broken {
                    self.polls(pair);
                }
                Ok(())
            }
            Action::Send { side, list, wait } => {
                self.post_send(pair, *side, list, trace);
                match wait {
                    Wait::No => Ok(()),
                    Wait::Polls => {
                        self.polls(pair);
                        Ok(())
                    }
                    Wait::End { recvs } => self.settle(pair, *recvs),
                }
            }
            Action::Settle { recvs } => self.settle(pair, *recvs),
            Action::AllocWindow { kind } => {
                self.alloc_window(pair, *kind, trace);
                Ok(())
            }
            Action::Bind { side, bind } => {
                self.bind(pair, *side, bind, trace);
                self.settle(pair, 0)
            }
            Action::DeallocWindow => {
                self.windows[pair] = None;
                Ok(())
            }
            Action::Look => {
                self.polls(pair);
                Ok(())
            }
            Action::Poke {
                region,
                offset,
                word,
            } => {
                self.memories[*region].store(*offset as usize, &word.to_ne_bytes());
                Ok(())
            }
            Action::Modify {
                side,
                to,
                mask,
                spoil,
            } => {
                self.modify(pair, *side, *to, *mask, *spoil, trace);
                let ends = &self.pairs[pair];
                let [a, b] = [ends[0].state(), ends[1].state()];
                let _ = writeln!(trace, " now {a:?} {b:?}");
                Ok(())
            }
            Action::Query { side } => {
                self.query(pair, *side, trace);
                Ok(())
            }
            Action::Register { len, access } => {
                let access = AccessFlags::from_bits_retain(*access);
                let region = Memory::new(&self.pds[0], self.program.heap, *len as usize, access);
                let text = match region {
                    Ok(_) => "ok".into(),
                    Err(verbs_sys::MemoryError::Register { source, .. }) => errno(&source),
                    Err(error) => error.to_string(),
                };
                let _ = writeln!(trace, " register {text}");
                Ok(())
            }
            Action::FillRecv { side } => {
                let end = self.end(pair, *side);
                let there = end.recvs.len() as u32;
                let post = |end: &mut End| end.post_recv(&mut [ffi::ibv_recv_wr::zeroed()]);
                self.fill(pair, *side, there, post, trace);
                Ok(())
            }
            Action::FillSend { side } => {
                let wr = ffi::ibv_send_wr {
                    opcode: ffi::IBV_WR_SEND,
                    ..ffi::ibv_send_wr::zeroed()
                };
                let post = |end: &mut End| end.post_send(&mut [wr]);
                self.fill(pair, *side, 0, post, trace);
                Ok(())
            }
        }
    }

    pub fn end(&mut self, pair: usize, side: Side) -> &mut End {
        &mut self.pairs[pair][side.index()]
    }

    /// Takes the completions of both queue pairs.
    fn reap(&mut self, pair: usize) {
        let [a, b] = &mut self.pairs[pair];
        if a.reap(b.qp.qp_num()) == News::PeerIsBroken {
            b.broken = true;
        }
        if b.reap(a.qp.qp_num()) == News::PeerIsBroken {
            a.broken = true;
        }
    }

    /// Waits until both queue pairs have ended what they were given, and so many receives came.
    fn settle(&mut self, pair: usize, recvs: u32) -> Result<(), Stuck> {
        let deadline = Instant::now() + self.patience;
        loop {
            for _ in 0..64 {
                self.reap(pair);
                let ends = &self.pairs[pair];
                let came = ends[0].received + ends[1].received >= recvs;
                if came && ends.iter().all(End::has_ended) {
                    // A receive completes before the send that it tells of, but its queue may have
                    // been looked at first.
                    self.reap(pair);
                    self.pairs[pair].iter_mut().for_each(|end| end.received = 0);
                    return Ok(());
                }
                std::thread::yield_now();
            }
            if Instant::now() > deadline {
                return Err(Stuck);
            }
        }
    }

    /// Looks whether something comes.
    fn polls(&mut self, pair: usize) {
        for _ in 0..100 {
            self.reap(pair);
            std::thread::yield_now();
        }
    }

    fn modify(
        &mut self,
        pair: usize,
        side: Side,
        to: Option<ffi::ibv_qp_state>,
        mask: u32,
        spoiled: Spoil,
        trace: &mut String,
    ) {
        let connection = Connection {
            gid: self.gid.1,
            gid_index: self.gid.0,
            access: AccessFlags::all().difference(AccessFlags::MW_BIND),
            remote: self.end(pair, side.other()).qp.qp_num(),
            psn: 0x123,
            rnr_retry: 1,
            timeout: 18,
            retry_cnt: 6,
        };
        let patience = self.patience;
        let end = self.end(pair, side);
        let mut attr = connection.attr();
        attr.qp_state = to.unwrap_or(ffi::IBV_QPS_RESET);
        attr.cur_qp_state = end.state_number();
        spoil(&mut attr, spoiled);
        let with_state = if to.is_some() { ffi::IBV_QP_STATE } else { 0 };
        let mask = QpAttrMask::from_bits_retain(mask | with_state);
        if end.paused && to == Some(ffi::IBV_QPS_RTS) {
            end.await_drained(patience);
        }
        let result = end.qp.modify(&attr, mask);
        if result.is_ok() {
            match to {
                Some(ffi::IBV_QPS_RESET) => end.forget(),
                Some(ffi::IBV_QPS_ERR) => end.broken = true,
                Some(ffi::IBV_QPS_SQD) => end.paused = true,
                Some(ffi::IBV_QPS_RTS) => end.paused = false,
                _ => {}
            }
        }
        write_result(trace, "modify", result);
    }

    fn query(&mut self, pair: usize, side: Side, trace: &mut String) {
        let peer = self.end(pair, side.other()).qp.qp_num();
        let end = self.end(pair, side);
        let mask = QpAttrMask::from_bits_retain((ffi::IBV_QP_DEST_QPN << 1) - 1);
        let text = match end.qp.query(mask) {
            Ok(attr) => {
                let state = QpState::from(attr.qp_state);
                let mut text = format!("{state:?}");
                if !matches!(state, QpState::Rtr | QpState::Rts | QpState::Sqd) {
                    // Not all attributes have been given.
                    let _ = writeln!(trace, " query {text}");
                    return;
                }
                let _ = write!(text, " port {}", attr.port_num);
                if end.qp.qp_type() != QpType::Ud {
                    let _ = write!(
                        text,
                        " access {:#x} mtu {} peer {}",
                        attr.qp_access_flags & 0xe,
                        attr.path_mtu,
                        attr.dest_qp_num == peer,
                    );
                }
                if end.qp.qp_type() == QpType::Rc && state != QpState::Rtr {
                    let _ = write!(
                        text,
                        " timeout {} retries {} {} rnr {} atomics {} {}",
                        attr.timeout,
                        attr.retry_cnt,
                        attr.rnr_retry,
                        attr.min_rnr_timer,
                        attr.max_rd_atomic,
                        attr.max_dest_rd_atomic,
                    );
                }
                text
            }
            Err(_) => "failed".into(),
        };
        let _ = writeln!(trace, " query {text}");
    }
}

fn end(context: &Context, pd: &ProtectionDomain, plan: &PairPlan) -> Result<End, Box<dyn Error>> {
    let send_cq = context.create_cq(8 * plan.max_wr, None)?;
    let recv_cq = context.create_cq(8 * plan.max_wr, None)?;
    let srq = match plan.shared {
        true => Some(pd.create_srq(plan.max_wr, plan.max_sge)?),
        false => None,
    };
    let init = QueuePairInit {
        srq: srq.as_ref(),
        max_send_wr: plan.max_wr,
        max_recv_wr: plan.max_wr,
        max_send_sge: plan.max_sge,
        max_recv_sge: plan.max_sge,
        max_inline_data: plan.max_inline,
        sq_sig_all: plan.sq_sig_all,
        qp_type: plan.qp_type,
        ..QueuePairInit::new(&send_cq, &recv_cq)
    };
    let qp = pd.create_qp(&init)?;
    Ok(End::new(qp, send_cq, recv_cq, srq, plan.sq_sig_all))
}

/// From any state.
fn connect(ends: &mut [End; 2], connections: &[Connection; 2]) -> Result<(), QueuePairError> {
    // Both are silent before either forgets.
    let reset = ffi::ibv_qp_attr {
        qp_state: ffi::IBV_QPS_RESET,
        ..ffi::ibv_qp_attr::zeroed()
    };
    for end in ends.iter_mut() {
        end.qp.modify(&reset, QpAttrMask::STATE)?;
    }
    for (end, connection) in ends.iter_mut().zip(connections) {
        end.forget();
        connection.up(&end.qp)?;
    }
    Ok(())
}

fn write_result(trace: &mut String, call: &str, result: Result<(), QueuePairError>) {
    let text = match result {
        Ok(()) => return,
        Err(QueuePairError::Modify { source, .. }) => errno(&source),
        Err(other) => other.to_string(),
    };
    let _ = writeln!(trace, " {call} {text}");
}
