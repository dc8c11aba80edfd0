//! Work completions, and the small types that work requests are made of.

use std::fmt;

use crate::ffi::{self, ibv_wc};

/// A scatter/gather element: address, length in bytes and local key.
pub type Sge = ffi::ibv_sge;

/// A place in a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteAddr {
    /// First byte, as the peer counts.
    pub addr: u64,
    /// The peer's key for it.
    pub rkey: u32,
}

bitflags::bitflags! {
    /// How a send request is treated; ibv_post_send(3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub struct SendFlags: u32 {
        /// Start only when earlier READs and atomics are complete. On the software device that is
        /// always so.
        const FENCE = ffi::IBV_SEND_FENCE;
        /// Wake a receiver that waits for solicited events only.
        const SOLICITED = ffi::IBV_SEND_SOLICITED;
    }
}

/// How a work request ended; ibv_poll_cq(3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcStatus {
    /// All went well.
    Success,
    /// A local length is wrong: a receive too short, a message too long.
    LocLenErr,
    /// The local queue pair cannot do this.
    LocQpOpErr,
    /// A local end-to-end context cannot do this.
    LocEecOpErr,
    /// A local key, range or access right is wrong.
    LocProtErr,
    /// The queue pair was in, or went to, the error state before this request was done.
    WrFlushErr,
    /// Binding a memory window failed.
    MwBindErr,
    /// The peer answered what it must not.
    BadRespErr,
    /// A peer's access to local memory failed.
    LocAccessErr,
    /// The peer found the request invalid.
    RemInvReqErr,
    /// The peer refused the key, range or access.
    RemAccessErr,
    /// The peer could not carry it out.
    RemOpErr,
    /// No answer from the peer after all repetitions.
    RetryExcErr,
    /// The peer had no receive posted, after all repetitions.
    RnrRetryExcErr,
    /// Reliable datagram domains differ.
    LocRddViolErr,
    /// The peer found a reliable datagram request invalid.
    RemInvRdReqErr,
    /// The peer gave up.
    RemAbortErr,
    /// Bad number of an end-to-end context.
    InvEecnErr,
    /// Bad state of an end-to-end context.
    InvEecStateErr,
    /// The device is broken.
    FatalErr,
    /// An answer came too late.
    RespTimeoutErr,
    /// Something else.
    GeneralErr,
    /// Tag matching failed.
    TmErr,
    /// A tag-matching rendezvous is incomplete.
    TmRndvIncomplete,
    /// A number that this list does not have.
    Other(u32),
}

impl From<ffi::ibv_wc_status> for WcStatus {
    #[inline]
    fn from(status: ffi::ibv_wc_status) -> Self {
        match status {
            ffi::IBV_WC_SUCCESS => Self::Success,
            ffi::IBV_WC_LOC_LEN_ERR => Self::LocLenErr,
            ffi::IBV_WC_LOC_QP_OP_ERR => Self::LocQpOpErr,
            ffi::IBV_WC_LOC_EEC_OP_ERR => Self::LocEecOpErr,
            ffi::IBV_WC_LOC_PROT_ERR => Self::LocProtErr,
            ffi::IBV_WC_WR_FLUSH_ERR => Self::WrFlushErr,
            ffi::IBV_WC_MW_BIND_ERR => Self::MwBindErr,
            ffi::IBV_WC_BAD_RESP_ERR => Self::BadRespErr,
            ffi::IBV_WC_LOC_ACCESS_ERR => Self::LocAccessErr,
            ffi::IBV_WC_REM_INV_REQ_ERR => Self::RemInvReqErr,
            ffi::IBV_WC_REM_ACCESS_ERR => Self::RemAccessErr,
            ffi::IBV_WC_REM_OP_ERR => Self::RemOpErr,
            ffi::IBV_WC_RETRY_EXC_ERR => Self::RetryExcErr,
            ffi::IBV_WC_RNR_RETRY_EXC_ERR => Self::RnrRetryExcErr,
            ffi::IBV_WC_LOC_RDD_VIOL_ERR => Self::LocRddViolErr,
            ffi::IBV_WC_REM_INV_RD_REQ_ERR => Self::RemInvRdReqErr,
            ffi::IBV_WC_REM_ABORT_ERR => Self::RemAbortErr,
            ffi::IBV_WC_INV_EECN_ERR => Self::InvEecnErr,
            ffi::IBV_WC_INV_EEC_STATE_ERR => Self::InvEecStateErr,
            ffi::IBV_WC_FATAL_ERR => Self::FatalErr,
            ffi::IBV_WC_RESP_TIMEOUT_ERR => Self::RespTimeoutErr,
            ffi::IBV_WC_GENERAL_ERR => Self::GeneralErr,
            ffi::IBV_WC_TM_ERR => Self::TmErr,
            ffi::IBV_WC_TM_RNDV_INCOMPLETE => Self::TmRndvIncomplete,
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for WcStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Success => "success",
            Self::LocLenErr => "local length error",
            Self::LocQpOpErr => "local QP operation error",
            Self::LocEecOpErr => "local EE context operation error",
            Self::LocProtErr => "local protection error",
            Self::WrFlushErr => "work request flushed",
            Self::MwBindErr => "memory window bind error",
            Self::BadRespErr => "bad response",
            Self::LocAccessErr => "local access error",
            Self::RemInvReqErr => "remote invalid request",
            Self::RemAccessErr => "remote access error",
            Self::RemOpErr => "remote operation error",
            Self::RetryExcErr => "transport retry counter exceeded",
            Self::RnrRetryExcErr => "receiver-not-ready retry counter exceeded",
            Self::LocRddViolErr => "local RDD violation",
            Self::RemInvRdReqErr => "remote invalid RD request",
            Self::RemAbortErr => "aborted by the peer",
            Self::InvEecnErr => "invalid EE context number",
            Self::InvEecStateErr => "invalid EE context state",
            Self::FatalErr => "fatal device error",
            Self::RespTimeoutErr => "response timeout",
            Self::GeneralErr => "general error",
            Self::TmErr => "tag matching error",
            Self::TmRndvIncomplete => "tag matching rendezvous incomplete",
            Self::Other(number) => return write!(f, "unknown completion status {number}"),
        })
    }
}

/// What kind of work completed; ibv_poll_cq(3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WcOpcode {
    /// A SEND.
    Send,
    /// An RDMA WRITE.
    RdmaWrite,
    /// An RDMA READ.
    RdmaRead,
    /// An atomic compare-and-swap.
    CompSwap,
    /// An atomic fetch-and-add.
    FetchAdd,
    /// The binding of a memory window.
    BindMw,
    /// The invalidation of a local key.
    LocalInv,
    /// A receive.
    Recv,
    /// A receive used up by an RDMA WRITE with immediate.
    RecvRdmaWithImm,
    /// A number that this list does not have.
    Other(u32),
}

impl From<ffi::ibv_wc_opcode> for WcOpcode {
    #[inline]
    fn from(opcode: ffi::ibv_wc_opcode) -> Self {
        match opcode {
            ffi::IBV_WC_SEND => Self::Send,
            ffi::IBV_WC_RDMA_WRITE => Self::RdmaWrite,
            ffi::IBV_WC_RDMA_READ => Self::RdmaRead,
            ffi::IBV_WC_COMP_SWAP => Self::CompSwap,
            ffi::IBV_WC_FETCH_ADD => Self::FetchAdd,
            ffi::IBV_WC_BIND_MW => Self::BindMw,
            ffi::IBV_WC_LOCAL_INV => Self::LocalInv,
            ffi::IBV_WC_RECV => Self::Recv,
            ffi::IBV_WC_RECV_RDMA_WITH_IMM => Self::RecvRdmaWithImm,
            other => Self::Other(other),
        }
    }
}

/// A work completion, as [`CompletionQueue::poll`](crate::CompletionQueue::poll) writes it.
///
/// It can neither be copied nor made up, so that
/// [`OwnedQueuePair::complete`](crate::owned::OwnedQueuePair::complete) can rely on it.
#[repr(transparent)]
#[derive(Default)]
pub struct WorkCompletion(ibv_wc);

impl WorkCompletion {
    /// The word of the work request.
    #[must_use]
    #[inline]
    pub fn wr_id(&self) -> u64 {
        self.0.wr_id
    }

    /// How it ended.
    #[must_use]
    #[inline]
    pub fn status(&self) -> WcStatus {
        self.0.status.into()
    }

    /// Whether it ended well.
    #[must_use]
    #[inline]
    pub fn is_ok(&self) -> bool {
        self.0.status == ffi::IBV_WC_SUCCESS
    }

    /// What kind of work it was; valid only after success.
    #[must_use]
    #[inline]
    pub fn opcode(&self) -> WcOpcode {
        self.0.opcode.into()
    }

    /// Bytes transferred; valid only after success of a receive, a READ or an atomic.
    #[must_use]
    #[inline]
    pub fn byte_len(&self) -> u32 {
        self.0.byte_len
    }

    /// The immediate, host byte order, if one came; valid only after success.
    #[must_use]
    #[inline]
    pub fn imm_data(&self) -> Option<u32> {
        (self.0.wc_flags & ffi::IBV_WC_WITH_IMM != 0).then(|| u32::from_be(self.0.imm_data))
    }

    /// The key that the message has invalidated, if any; valid only after success of a receive.
    #[must_use]
    #[inline]
    pub fn invalidated_rkey(&self) -> Option<u32> {
        (self.0.wc_flags & ffi::IBV_WC_WITH_INV != 0).then_some(self.0.imm_data)
    }

    /// Number of the local queue pair.
    #[must_use]
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.0.qp_num
    }

    /// The device's own word on an error.
    #[must_use]
    #[inline]
    pub fn vendor_err(&self) -> u32 {
        self.0.vendor_err
    }

    /// The C structure.
    #[must_use]
    #[inline]
    pub fn as_raw(&self) -> &ibv_wc {
        &self.0
    }

    /// Forgets which request it was of, so that it cannot be used twice. No queue of this crate
    /// uses the word 0.
    #[inline]
    pub(crate) fn consume(&mut self) {
        self.0.wr_id = 0;
    }

    #[cfg(test)]
    pub(crate) fn from_raw(wc: ibv_wc) -> Self {
        Self(wc)
    }
}

impl fmt::Debug for WorkCompletion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkCompletion")
            .field("wr_id", &format_args!("{:#x}", self.wr_id()))
            .field("status", &self.status())
            .field("opcode", &self.opcode())
            .field("byte_len", &self.byte_len())
            .field("imm_data", &self.imm_data())
            .field("qp_num", &self.qp_num())
            .finish()
    }
}
