//! Queue pairs.

use std::{
    fmt, io,
    mem::ManuallyDrop,
    ptr::{self, NonNull},
};

use crate::{
    AccessFlags, CompletionQueue, CreateError, Gid, ProtectionDomain, QueuePairError, RawPostError,
    context::created,
    error::{check, log_destroy},
    ffi::{
        self, ibv_mtu, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_qp_state,
        ibv_recv_wr, ibv_send_wr,
    },
};

/// How to make a queue pair. All sizes are the least that are needed; a device may give more.
#[derive(Clone, Debug)]
pub struct QueuePairInit<'a> {
    /// Where completions of sends go.
    pub send_cq: &'a CompletionQueue,
    /// Where completions of receives go.
    pub recv_cq: &'a CompletionQueue,
    /// Outstanding send requests.
    pub max_send_wr: u32,
    /// Outstanding receive requests.
    pub max_recv_wr: u32,
    /// Elements of a send request.
    pub max_send_sge: u32,
    /// Elements of a receive request.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
    /// Whether every send request is signaled.
    pub sq_sig_all: bool,
}

impl<'a> QueuePairInit<'a> {
    /// 16 requests of one element each way, no inline data.
    #[must_use]
    pub fn new(send_cq: &'a CompletionQueue, recv_cq: &'a CompletionQueue) -> Self {
        Self {
            send_cq,
            recv_cq,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
            sq_sig_all: false,
        }
    }
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpState {
    /// Fresh.
    Reset,
    /// Takes receive requests.
    Init,
    /// Receives.
    Rtr,
    /// Receives and sends.
    Rts,
    /// Has stopped sending, in good order.
    Sqd,
    /// Has stopped sending after an error.
    Sqe,
    /// Broken; every request comes back flushed.
    Err,
    /// A number that this list does not have.
    Unknown,
}

impl From<ibv_qp_state> for QpState {
    fn from(state: ibv_qp_state) -> Self {
        match state {
            ffi::IBV_QPS_RESET => Self::Reset,
            ffi::IBV_QPS_INIT => Self::Init,
            ffi::IBV_QPS_RTR => Self::Rtr,
            ffi::IBV_QPS_RTS => Self::Rts,
            ffi::IBV_QPS_SQD => Self::Sqd,
            ffi::IBV_QPS_SQE => Self::Sqe,
            ffi::IBV_QPS_ERR => Self::Err,
            _ => Self::Unknown,
        }
    }
}

bitflags::bitflags! {
    /// Which attributes of an [`ibv_qp_attr`] count; ibv_modify_qp(3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct QpAttrMask: u32 {
        /// `qp_state`.
        const STATE = ffi::IBV_QP_STATE;
        /// `cur_qp_state`.
        const CUR_STATE = ffi::IBV_QP_CUR_STATE;
        /// `en_sqd_async_notify`.
        const EN_SQD_ASYNC_NOTIFY = ffi::IBV_QP_EN_SQD_ASYNC_NOTIFY;
        /// `qp_access_flags`.
        const ACCESS_FLAGS = ffi::IBV_QP_ACCESS_FLAGS;
        /// `pkey_index`.
        const PKEY_INDEX = ffi::IBV_QP_PKEY_INDEX;
        /// `port_num`.
        const PORT = ffi::IBV_QP_PORT;
        /// `qkey`.
        const QKEY = ffi::IBV_QP_QKEY;
        /// `ah_attr`.
        const AV = ffi::IBV_QP_AV;
        /// `path_mtu`.
        const PATH_MTU = ffi::IBV_QP_PATH_MTU;
        /// `timeout`.
        const TIMEOUT = ffi::IBV_QP_TIMEOUT;
        /// `retry_cnt`.
        const RETRY_CNT = ffi::IBV_QP_RETRY_CNT;
        /// `rnr_retry`.
        const RNR_RETRY = ffi::IBV_QP_RNR_RETRY;
        /// `rq_psn`.
        const RQ_PSN = ffi::IBV_QP_RQ_PSN;
        /// `max_rd_atomic`.
        const MAX_QP_RD_ATOMIC = ffi::IBV_QP_MAX_QP_RD_ATOMIC;
        /// `alt_ah_attr` and its companions.
        const ALT_PATH = ffi::IBV_QP_ALT_PATH;
        /// `min_rnr_timer`.
        const MIN_RNR_TIMER = ffi::IBV_QP_MIN_RNR_TIMER;
        /// `sq_psn`.
        const SQ_PSN = ffi::IBV_QP_SQ_PSN;
        /// `max_dest_rd_atomic`.
        const MAX_DEST_RD_ATOMIC = ffi::IBV_QP_MAX_DEST_RD_ATOMIC;
        /// `path_mig_state`.
        const PATH_MIG_STATE = ffi::IBV_QP_PATH_MIG_STATE;
        /// `cap`.
        const CAP = ffi::IBV_QP_CAP;
        /// `dest_qp_num`.
        const DEST_QPN = ffi::IBV_QP_DEST_QPN;
        /// `rate_limit`.
        const RATE_LIMIT = ffi::IBV_QP_RATE_LIMIT;
        const _ = !0;
    }
}

/// What one side of a connection tells the other, by any means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairEndpoint {
    /// Number of the queue pair, 24 bits.
    pub qp_num: u32,
    /// First packet sequence number it will send, 24 bits.
    pub psn: u32,
    /// Address of its port.
    pub gid: Gid,
    /// Local identifier of its port, 0 on RoCE.
    pub lid: u16,
    /// Largest packet payload its port takes now, as verbs encode it (1 for 256 to 5 for 4096).
    pub mtu: ibv_mtu,
}

/// The local side of a path: what [`QueuePair::to_rtr`] and [`QueuePair::to_rts`] need beside the
/// peer's endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathOptions {
    /// Local port, counted from 1.
    pub port: u8,
    /// Index of the local address in the port's GID table.
    pub gid_index: u8,
    /// Hops a packet may take.
    pub hop_limit: u8,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// READs and atomics outstanding each way; lowered to the device's limit.
    pub max_rd_atomic: u8,
    /// How long a peer waits when no receive is posted, encoded (12: 0.64 ms).
    pub min_rnr_timer: u8,
    /// Wait for an acknowledgement: 4.096 us times two to this power.
    pub timeout: u8,
    /// Repetitions after a timeout, up to 7.
    pub retry_cnt: u8,
    /// Repetitions when the peer has no receive posted; 7 for ever.
    pub rnr_retry: u8,
}

impl Default for PathOptions {
    /// Port 1, GID index 0, 16 READs, about 67 ms between 7 repetitions, waiting for receives for
    /// ever.
    fn default() -> Self {
        Self {
            port: 1,
            gid_index: 0,
            hop_limit: 64,
            service_level: 0,
            traffic_class: 0,
            max_rd_atomic: 16,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
        }
    }
}

/// A queue pair for a reliable connection. Dropping it destroys it; it keeps its completion queues
/// and its protection domain alive.
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    cap: ibv_qp_cap,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    pd: ProtectionDomain,
}

// SAFETY: verbs on one queue pair may be called from any thread at any time.
unsafe impl Send for QueuePair {}
// SAFETY: as above.
unsafe impl Sync for QueuePair {}

impl Drop for QueuePair {
    fn drop(&mut self) {
        log_destroy("ibv_destroy_qp", self.destroy_raw());
    }
}

impl QueuePair {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        init: &QueuePairInit<'_>,
    ) -> Result<Self, CreateError> {
        for queue in [init.send_cq, init.recv_cq] {
            if !queue.context().is_same(pd.context()) {
                return Err(CreateError::OtherContext {
                    call: "ibv_create_qp",
                    other: "completion queue",
                });
            }
        }
        let mut attr = ibv_qp_init_attr {
            send_cq: init.send_cq.as_raw(),
            recv_cq: init.recv_cq.as_raw(),
            cap: ibv_qp_cap {
                max_send_wr: init.max_send_wr,
                max_recv_wr: init.max_recv_wr,
                max_send_sge: init.max_send_sge,
                max_recv_sge: init.max_recv_sge,
                max_inline_data: init.max_inline_data,
            },
            qp_type: ffi::IBV_QPT_RC,
            sq_sig_all: init.sq_sig_all.into(),
            ..ibv_qp_init_attr::zeroed()
        };
        // SAFETY: the protection domain and both queues are alive and of one context.
        let raw = unsafe { (pd.context().provider().create_qp)(pd.as_raw(), &mut attr) };
        let raw = created(raw, || {
            format!(
                "ibv_create_qp(max_send_wr {}, max_recv_wr {}, max_send_sge {}, max_recv_sge {}, \
                 max_inline_data {})",
                init.max_send_wr,
                init.max_recv_wr,
                init.max_send_sge,
                init.max_recv_sge,
                init.max_inline_data
            )
        })?;
        Ok(Self {
            raw,
            cap: attr.cap,
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            pd: pd.clone(),
        })
    }

    /// Number of the queue pair, 24 bits.
    #[must_use]
    #[inline]
    pub fn qp_num(&self) -> u32 {
        // SAFETY: the queue pair is alive and its number never changes.
        unsafe { (*self.raw.as_ptr()).qp_num }
    }

    /// The sizes it was given.
    #[must_use]
    pub fn cap(&self) -> ibv_qp_cap {
        self.cap
    }

    /// Where completions of sends go.
    #[must_use]
    pub fn send_cq(&self) -> &CompletionQueue {
        &self.send_cq
    }

    /// Where completions of receives go.
    #[must_use]
    pub fn recv_cq(&self) -> &CompletionQueue {
        &self.recv_cq
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The C object, valid while this handle lives.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_qp {
        self.raw.as_ptr()
    }

    /// Its present state, asked from the device.
    ///
    /// # Errors
    /// [`QueuePairError::Query`].
    pub fn state(&self) -> Result<QpState, QueuePairError> {
        self.query(QpAttrMask::STATE)
            .map(|attr| attr.qp_state.into())
    }

    /// The attributes in `mask`; a device may fill others too. ibv_query_qp(3).
    ///
    /// # Errors
    /// [`QueuePairError::Query`].
    pub fn query(&self, mask: QpAttrMask) -> Result<ibv_qp_attr, QueuePairError> {
        let mut attr = ibv_qp_attr::zeroed();
        let mut init = ibv_qp_init_attr::zeroed();
        let bits = mask.bits().cast_signed();
        // SAFETY: the queue pair is alive and both structures are valid for writing.
        let code = unsafe {
            (self.pd.context().provider().query_qp)(self.as_raw(), &mut attr, bits, &mut init)
        };
        check(code)
            .map(|()| attr)
            .map_err(|source| QueuePairError::Query {
                qp_num: self.qp_num(),
                source,
            })
    }

    /// Changes the attributes in `mask`; ibv_modify_qp(3).
    ///
    /// # Errors
    /// [`QueuePairError::Modify`]; nothing has changed then.
    pub fn modify(&self, attr: &ibv_qp_attr, mask: QpAttrMask) -> Result<(), QueuePairError> {
        let mut attr = *attr;
        let bits = mask.bits().cast_signed();
        // SAFETY: the queue pair is alive and the structure is valid for reading and writing.
        let code =
            unsafe { (self.pd.context().provider().modify_qp)(self.as_raw(), &mut attr, bits) };
        check(code).map_err(|source| {
            let from = self.state().unwrap_or(QpState::Unknown);
            let to = if mask.contains(QpAttrMask::STATE) {
                attr.qp_state.into()
            } else {
                from
            };
            QueuePairError::Modify {
                qp_num: self.qp_num(),
                from,
                to,
                mask,
                source,
            }
        })
    }

    /// Moves from RESET to INIT: receives can be posted, and peers will get `access`.
    ///
    /// # Errors
    /// [`QueuePairError::Modify`].
    pub fn to_init(&self, access: AccessFlags, port: u8) -> Result<(), QueuePairError> {
        let attr = ibv_qp_attr {
            qp_state: ffi::IBV_QPS_INIT,
            pkey_index: 0,
            port_num: port,
            qp_access_flags: access.bits(),
            ..ibv_qp_attr::zeroed()
        };
        let mask = QpAttrMask::STATE
            | QpAttrMask::PKEY_INDEX
            | QpAttrMask::PORT
            | QpAttrMask::ACCESS_FLAGS;
        self.modify(&attr, mask)
    }

    /// What to tell the peer: this queue pair, and the address of the port in `path`. `psn` is the
    /// first packet sequence number that [`to_rts`](Self::to_rts) will be given; its lowest 24 bits
    /// count.
    ///
    /// # Errors
    /// [`QueuePairError::Port`].
    pub fn endpoint(
        &self,
        path: &PathOptions,
        psn: u32,
    ) -> Result<QueuePairEndpoint, QueuePairError> {
        let context = self.pd.context();
        let failed = |source| QueuePairError::Port {
            qp_num: self.qp_num(),
            source,
        };
        let port = context.query_port(path.port).map_err(failed)?;
        let gid = context
            .query_gid(path.port, path.gid_index.into())
            .map_err(failed)?;
        Ok(QueuePairEndpoint {
            qp_num: self.qp_num(),
            psn: psn & PSN_MASK,
            gid,
            lid: port.lid,
            mtu: port.active_mtu,
        })
    }

    /// Moves from INIT to RTR, connected to `remote`. Packets get the smaller of both ports'
    /// payloads.
    ///
    /// # Errors
    /// [`QueuePairError::Modify`] or [`QueuePairError::Port`].
    pub fn to_rtr(
        &self,
        remote: &QueuePairEndpoint,
        path: &PathOptions,
    ) -> Result<(), QueuePairError> {
        let context = self.pd.context();
        let failed = |source| QueuePairError::Port {
            qp_num: self.qp_num(),
            source,
        };
        let mtu = context.query_port(path.port).map_err(failed)?.active_mtu;
        let device = context.query_device().map_err(failed)?;
        let mut attr = ibv_qp_attr {
            qp_state: ffi::IBV_QPS_RTR,
            path_mtu: mtu.min(remote.mtu),
            dest_qp_num: remote.qp_num,
            rq_psn: remote.psn & PSN_MASK,
            max_dest_rd_atomic: at_most(path.max_rd_atomic, device.max_qp_rd_atom),
            min_rnr_timer: path.min_rnr_timer,
            ..ibv_qp_attr::zeroed()
        };
        attr.ah_attr.dlid = remote.lid;
        attr.ah_attr.sl = path.service_level;
        attr.ah_attr.port_num = path.port;
        if !remote.gid.is_zero() {
            attr.ah_attr.is_global = 1;
            attr.ah_attr.grh.dgid = remote.gid.into();
            attr.ah_attr.grh.sgid_index = path.gid_index;
            attr.ah_attr.grh.hop_limit = path.hop_limit;
            attr.ah_attr.grh.traffic_class = path.traffic_class;
        }
        let mask = QpAttrMask::STATE
            | QpAttrMask::AV
            | QpAttrMask::PATH_MTU
            | QpAttrMask::DEST_QPN
            | QpAttrMask::RQ_PSN
            | QpAttrMask::MAX_DEST_RD_ATOMIC
            | QpAttrMask::MIN_RNR_TIMER;
        self.modify(&attr, mask)
    }

    /// Moves from RTR to RTS. `psn` is what the peer was told.
    ///
    /// # Errors
    /// [`QueuePairError::Modify`] or [`QueuePairError::Port`].
    pub fn to_rts(&self, psn: u32, path: &PathOptions) -> Result<(), QueuePairError> {
        let failed = |source| QueuePairError::Port {
            qp_num: self.qp_num(),
            source,
        };
        let device = self.pd.context().query_device().map_err(failed)?;
        let attr = ibv_qp_attr {
            qp_state: ffi::IBV_QPS_RTS,
            sq_psn: psn & PSN_MASK,
            timeout: path.timeout,
            retry_cnt: path.retry_cnt,
            rnr_retry: path.rnr_retry,
            max_rd_atomic: at_most(path.max_rd_atomic, device.max_qp_init_rd_atom),
            ..ibv_qp_attr::zeroed()
        };
        let mask = QpAttrMask::STATE
            | QpAttrMask::SQ_PSN
            | QpAttrMask::TIMEOUT
            | QpAttrMask::RETRY_CNT
            | QpAttrMask::RNR_RETRY
            | QpAttrMask::MAX_QP_RD_ATOMIC;
        self.modify(&attr, mask)
    }

    /// Moves to ERR: every outstanding request comes back flushed.
    ///
    /// # Errors
    /// [`QueuePairError::Modify`].
    pub fn to_err(&self) -> Result<(), QueuePairError> {
        let attr = ibv_qp_attr {
            qp_state: ffi::IBV_QPS_ERR,
            ..ibv_qp_attr::zeroed()
        };
        self.modify(&attr, QpAttrMask::STATE)
    }

    /// Posts a list of send requests; ibv_post_send(3).
    ///
    /// # Safety
    /// `list` is a valid list of requests, and until each has completed or the queue pair is
    /// destroyed the bytes of its elements stay valid and nobody uses them in a way that conflicts
    /// with the request. A queue pair inside an
    /// [`OwnedQueuePair`](crate::owned::OwnedQueuePair) is posted to by that alone.
    ///
    /// # Errors
    /// Tells the first request that was not posted.
    #[inline]
    pub unsafe fn post_send(
        &self,
        list: *mut ibv_send_wr,
    ) -> Result<(), RawPostError<ibv_send_wr>> {
        let mut bad_wr = ptr::null_mut();
        // SAFETY: the queue pair is alive, so its context is; opening made sure that the slot is
        // filled; the caller promises the list.
        let code = unsafe {
            let post_send = (*(*self.raw.as_ptr()).context)
                .ops
                .post_send
                .unwrap_unchecked();
            post_send(self.raw.as_ptr(), list, &mut bad_wr)
        };
        check(code).map_err(|source| RawPostError {
            call: "ibv_post_send",
            bad_wr,
            source,
        })
    }

    /// Posts a list of receive requests; ibv_post_recv(3).
    ///
    /// # Safety
    /// As [`post_send`](Self::post_send).
    ///
    /// # Errors
    /// Tells the first request that was not posted.
    #[inline]
    pub unsafe fn post_recv(
        &self,
        list: *mut ibv_recv_wr,
    ) -> Result<(), RawPostError<ibv_recv_wr>> {
        let mut bad_wr = ptr::null_mut();
        // SAFETY: the queue pair is alive, so its context is; opening made sure that the slot is
        // filled; the caller promises the list.
        let code = unsafe {
            let post_recv = (*(*self.raw.as_ptr()).context)
                .ops
                .post_recv
                .unwrap_unchecked();
            post_recv(self.raw.as_ptr(), list, &mut bad_wr)
        };
        check(code).map_err(|source| RawPostError {
            call: "ibv_post_recv",
            bad_wr,
            source,
        })
    }

    /// Destroys the queue pair; ibv_destroy_qp(3). On success the device touches none of its
    /// requests' memory any more; on failure the object leaks.
    pub(crate) fn destroy(self) -> io::Result<()> {
        let mut this = ManuallyDrop::new(self);
        let result = this.destroy_raw();
        let this = &mut *this;
        // SAFETY: `this` is never used again and its own `drop` does not run; each field is dropped
        // once.
        unsafe { ptr::drop_in_place(&mut this.send_cq) };
        // SAFETY: as above.
        unsafe { ptr::drop_in_place(&mut this.recv_cq) };
        // SAFETY: as above.
        unsafe { ptr::drop_in_place(&mut this.pd) };
        result
    }

    fn destroy_raw(&mut self) -> io::Result<()> {
        // SAFETY: the queue pair is alive, and both callers never use it again.
        check(unsafe { (self.pd.context().provider().destroy_qp)(self.raw.as_ptr()) })
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueuePair")
            .field("qp_num", &format_args!("{:#x}", self.qp_num()))
            .field("cap", &self.cap)
            .finish()
    }
}

/// Packet sequence numbers have 24 bits.
const PSN_MASK: u32 = 0xff_ffff;

/// `wanted`, or the device's limit if that is lower.
fn at_most(wanted: u8, limit: i32) -> u8 {
    wanted.min(u8::try_from(limit).unwrap_or(if limit < 0 { 0 } else { u8::MAX }))
}
