//! What a program is made of, and its text.

use std::fmt;

use verbs_sys::{AccessFlags, MwType, QpType, ffi};

use crate::opcode;

/// Everything about a program is decided before it runs, so it is the same on every device.
pub struct Program {
    pub seed: u64,
    /// Memory of the device's choice, or from the heap.
    pub heap: bool,
    pub regions: Vec<RegionPlan>,
    pub pairs: Vec<PairPlan>,
    pub steps: Vec<Step>,
}

/// A region in which side `a` of every pair has the first half for its own, and side `b` the second:
/// so no request has bytes in common with its target.
#[derive(Clone, Copy)]
pub struct RegionPlan {
    pub foreign: bool,
    pub len: u32,
    pub access: AccessFlags,
}

impl RegionPlan {
    /// Bytes of a half, a multiple of 8.
    pub fn half(&self) -> u32 {
        self.len / 2 / 8 * 8
    }

    /// Where the half of a side begins.
    pub fn start(&self, side: Side) -> u32 {
        match side {
            Side::A => 0,
            Side::B => self.half(),
        }
    }
}

#[derive(Clone, Copy)]
pub struct PairPlan {
    pub qp_type: QpType,
    pub max_wr: u32,
    pub max_sge: u32,
    pub max_inline: u32,
    pub sq_sig_all: bool,
    /// Whether each queue pair has a shared receive queue, which keeps its receives.
    pub shared: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Side {
    A,
    B,
}

impl Side {
    pub fn other(self) -> Self {
        match self {
            Self::A => Self::B,
            Self::B => Self::A,
        }
    }

    pub fn index(self) -> usize {
        self as usize
    }
}

pub struct Step {
    /// What it is an example of: what the table of known differences calls it.
    pub kind: String,
    pub pair: usize,
    pub action: Action,
}

pub enum Action {
    /// Both queue pairs to RESET and up again, connected with each other.
    Connect {
        access: [AccessFlags; 2],
        rnr_retry: u8,
        timeout: u8,
        retry_cnt: u8,
        /// All memory gets new bytes.
        refill: Option<u64>,
    },
    Recv {
        side: Side,
        list: Vec<Recv>,
    },
    /// Posts, and waits for what is certain to come.
    Send {
        side: Side,
        list: Vec<Request>,
        wait: Wait,
    },
    /// Waits for what the steps before have made certain.
    Settle {
        recvs: u32,
    },
    /// Gives the pair a window.
    AllocWindow {
        kind: MwType,
    },
    /// Binds the pair's window, and waits for the completion.
    Bind {
        side: Side,
        bind: Bind,
    },
    DeallocWindow,
    /// A few polls, in which something may come, or not.
    Look,
    /// Writes a word where atomics look.
    Poke {
        region: usize,
        offset: u32,
        word: u64,
    },
    /// A change of attributes, with everything but these.
    Modify {
        side: Side,
        to: Option<ffi::ibv_qp_state>,
        mask: u32,
        spoil: Spoil,
    },
    /// What ibv_query_qp says.
    Query {
        side: Side,
    },
    /// Registers and deregisters a region.
    Register {
        len: u32,
        access: u32,
    },
    /// Receives until the queue is full.
    FillRecv {
        side: Side,
    },
    /// Send requests likewise.
    FillSend {
        side: Side,
    },
}

impl Action {
    /// Whether nothing is under way when it is done, so that memory is certain.
    pub fn is_settled(&self) -> bool {
        match self {
            Self::Send { wait, .. } => matches!(wait, Wait::End { .. }),
            Self::Connect { .. } | Self::Settle { .. } | Self::Bind { .. } => true,
            _ => false,
        }
    }
}

/// What a window is bound to.
#[derive(Clone, Copy)]
pub struct Bind {
    pub id: u64,
    pub place: Place,
    pub access: AccessFlags,
    /// By the key that it has already.
    pub same_key: bool,
}

/// What is waited for after posting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Wait {
    /// Nothing: it stays outstanding.
    No,
    /// The last request's completion and, if any fails, the end of both queue pairs; and so many
    /// receives of an unreliable peer.
    End { recvs: u32 },
    /// A few polls, in which something may come, or not.
    Polls,
}

/// A value that is out of range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Spoil {
    No,
    Port,
    Mtu,
    Timeout,
    AvPort,
    // Those that not every device checks.
    PkeyIndex,
    NoMtu,
    NotGlobal,
    DestQpn,
    RnrTimer,
    RetryCount,
    RnrRetryCount,
    RdAtomic,
    DestRdAtomic,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Key {
    Good,
    /// A bit that makes it another key.
    Flipped,
    /// That of a region that was deregistered.
    Stale,
    /// That of the pair's window.
    Window,
    /// The one that the window had before it was last bound.
    FormerWindow,
}

/// Bytes of a region.
#[derive(Clone, Copy)]
pub struct Place {
    pub region: usize,
    /// Beyond either end if it is to be wrong.
    pub offset: i64,
    pub len: u32,
    pub key: Key,
}

#[derive(Clone)]
pub struct Recv {
    pub id: u64,
    /// Whether the header of a datagram has a place of its own before these.
    pub header: bool,
    pub places: Vec<Place>,
}

#[derive(Clone)]
pub struct Request {
    pub id: u64,
    pub opcode: ffi::ibv_wr_opcode,
    pub flags: u32,
    pub places: Vec<Place>,
    pub target: Option<Place>,
    pub imm: u32,
    pub compare_add: u64,
    pub swap: u64,
    /// A datagram with another queue key than the receiver's.
    pub wrong_qkey: bool,
}

impl Request {
    pub fn is(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

impl Program {
    /// Work requests posted and calls of the control path.
    pub fn operations(&self) -> u64 {
        let setup = self.regions.len() + 2 * self.pairs.len();
        setup as u64 + self.steps.iter().map(Step::operations).sum::<u64>()
    }
}

impl Step {
    fn operations(&self) -> u64 {
        match &self.action {
            Action::Connect { .. } => 8,
            Action::Recv { list, .. } => list.len() as u64,
            Action::Send { list, .. } => list.len() as u64,
            Action::Settle { .. } | Action::Look | Action::Poke { .. } => 0,
            Action::Modify { .. } | Action::Query { .. } => 1,
            Action::AllocWindow { .. } | Action::Bind { .. } | Action::DeallocWindow => 1,
            Action::Register { .. } => 2,
            Action::FillRecv { .. } | Action::FillSend { .. } => 16,
        }
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = if self.heap { "heap" } else { "device" };
        writeln!(f, "program {:016x} memory {memory}", self.seed)?;
        for (index, region) in self.regions.iter().enumerate() {
            let pd = u8::from(region.foreign);
            let (len, access) = (region.len, region.access.bits());
            writeln!(f, "region {index} pd {pd} len {len} access {access:#x}")?;
        }
        for (index, pair) in self.pairs.iter().enumerate() {
            writeln!(
                f,
                "pair {index} {:?} max_wr {} max_sge {} max_inline {} sq_sig_all {} shared {}",
                pair.qp_type,
                pair.max_wr,
                pair.max_sge,
                pair.max_inline,
                pair.sq_sig_all,
                pair.shared
            )?;
        }
        for (index, step) in self.steps.iter().enumerate() {
            writeln!(f, "@{index} {step}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} [{}] ", self.pair, self.kind)?;
        match &self.action {
            Action::Connect {
                access: [a, b],
                rnr_retry,
                timeout,
                retry_cnt,
                refill,
            } => {
                write!(
                    f,
                    "connect access {:#x}/{:#x} rnr_retry {rnr_retry} timeout {timeout} retry_cnt {retry_cnt}",
                    a.bits(),
                    b.bits()
                )?;
                match refill {
                    Some(seed) => write!(f, " refill {seed:x}"),
                    None => Ok(()),
                }
            }
            Action::Recv { side, list } => {
                write!(f, "{side:?} recv")?;
                list.iter().try_for_each(|recv| write!(f, " {recv}"))
            }
            Action::Send { side, list, wait } => {
                write!(f, "{side:?} send")?;
                list.iter()
                    .try_for_each(|request| write!(f, " {request}"))?;
                write!(f, " wait {wait:?}")
            }
            Action::Settle { recvs } => write!(f, "settle recvs {recvs}"),
            Action::AllocWindow { kind } => write!(f, "window {kind:?}"),
            Action::Bind { side, bind } => write!(
                f,
                "{side:?} bind ({} {} access {:#x}{})",
                bind.id,
                bind.place,
                bind.access.bits(),
                if bind.same_key { " same key" } else { "" }
            ),
            Action::DeallocWindow => f.write_str("no window"),
            Action::Look => f.write_str("look"),
            Action::Poke {
                region,
                offset,
                word,
            } => write!(f, "poke r{region}+{offset} = {word}"),
            Action::Modify {
                side,
                to,
                mask,
                spoil,
            } => write!(
                f,
                "{side:?} modify to {to:?} mask {mask:#x} spoil {spoil:?}"
            ),
            Action::Query { side } => write!(f, "{side:?} query"),
            Action::Register { len, access } => write!(f, "register len {len} access {access:#x}"),
            Action::FillRecv { side } => write!(f, "{side:?} fill receive queue"),
            Action::FillSend { side } => write!(f, "{side:?} fill send queue"),
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = match self.key {
            Key::Good => "",
            Key::Flipped => "!",
            Key::Stale => "~",
            Key::Window => "w",
            Key::FormerWindow => "f",
        };
        write!(f, "r{}{key}{:+}:{}", self.region, self.offset, self.len)
    }
}

fn list(f: &mut fmt::Formatter<'_>, places: &[Place]) -> fmt::Result {
    for (index, place) in places.iter().enumerate() {
        write!(f, "{}{place}", if index == 0 { " " } else { "," })?;
    }
    Ok(())
}

impl fmt::Display for Recv {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "({}{}",
            self.id,
            if self.header { " header" } else { "" }
        )?;
        list(f, &self.places)?;
        f.write_str(")")
    }
}

impl fmt::Display for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "({} {}", self.id, opcode::name(self.opcode))?;
        list(f, &self.places)?;
        if let Some(target) = &self.target {
            write!(f, " -> {target}")?;
        }
        match self.opcode {
            ffi::IBV_WR_ATOMIC_CMP_AND_SWP => {
                write!(f, " compare {} swap {}", self.compare_add, self.swap)?;
            }
            ffi::IBV_WR_ATOMIC_FETCH_AND_ADD => write!(f, " add {}", self.compare_add)?,
            ffi::IBV_WR_SEND_WITH_IMM | ffi::IBV_WR_RDMA_WRITE_WITH_IMM => {
                write!(f, " imm {:#x}", self.imm)?;
            }
            _ => {}
        }
        for (flag, name) in [
            (ffi::IBV_SEND_SIGNALED, " signaled"),
            (ffi::IBV_SEND_FENCE, " fence"),
            (ffi::IBV_SEND_SOLICITED, " solicited"),
            (ffi::IBV_SEND_INLINE, " inline"),
        ] {
            if self.is(flag) {
                f.write_str(name)?;
            }
        }
        if self.wrong_qkey {
            f.write_str(" wrong qkey")?;
        }
        f.write_str(")")
    }
}
