//! Queue pairs.

mod attr;
mod endpoint;

use std::{
    fmt, io,
    mem::ManuallyDrop,
    ptr::{self, NonNull},
};

pub use self::attr::{PathOptions, QpAttrMask, QpState, QpType, QueuePairInit};
pub use self::endpoint::{ParseEndpointError, QueuePairEndpoint};
use crate::{
    AccessFlags, CompletionQueue, CreateError, ProtectionDomain, QueuePairError, RawPostError,
    SharedReceiveQueue,
    context::created,
    error::{check, log_destroy},
    ffi::{self, ibv_qp, ibv_qp_attr, ibv_qp_cap, ibv_qp_init_attr, ibv_recv_wr, ibv_send_wr},
};

/// A queue pair. Dropping it destroys it; it keeps its completion queues, its shared receive queue and
/// its protection domain alive.
pub struct QueuePair {
    raw: NonNull<ibv_qp>,
    cap: ibv_qp_cap,
    qp_type: QpType,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    srq: Option<SharedReceiveQueue>,
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
        if let Some(srq) = init.srq
            && !srq.protection_domain().context().is_same(pd.context())
        {
            return Err(CreateError::OtherContext {
                call: "ibv_create_qp",
                other: "shared receive queue",
            });
        }
        let mut attr = ibv_qp_init_attr {
            send_cq: init.send_cq.as_raw(),
            recv_cq: init.recv_cq.as_raw(),
            srq: init.srq.map_or(ptr::null_mut(), SharedReceiveQueue::as_raw),
            cap: ibv_qp_cap {
                max_send_wr: init.max_send_wr,
                max_recv_wr: init.max_recv_wr,
                max_send_sge: init.max_send_sge,
                max_recv_sge: init.max_recv_sge,
                max_inline_data: init.max_inline_data,
            },
            qp_type: init.qp_type.into(),
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
            qp_type: init.qp_type,
            send_cq: init.send_cq.clone(),
            recv_cq: init.recv_cq.clone(),
            srq: init.srq.cloned(),
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

    /// The kind of service.
    #[must_use]
    pub fn qp_type(&self) -> QpType {
        self.qp_type
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

    /// The shared receive queue that its receives come from.
    #[must_use]
    pub fn srq(&self) -> Option<&SharedReceiveQueue> {
        self.srq.as_ref()
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
        let attr = ibv_qp_attr {
            qp_state: ffi::IBV_QPS_RTR,
            ah_attr: path.address(remote.gid, remote.lid),
            path_mtu: mtu.min(remote.mtu),
            dest_qp_num: remote.qp_num,
            rq_psn: remote.psn & PSN_MASK,
            max_dest_rd_atomic: at_most(path.max_rd_atomic, device.max_qp_rd_atom),
            min_rnr_timer: path.min_rnr_timer,
            ..ibv_qp_attr::zeroed()
        };
        let mut mask = QpAttrMask::STATE
            | QpAttrMask::AV
            | QpAttrMask::PATH_MTU
            | QpAttrMask::DEST_QPN
            | QpAttrMask::RQ_PSN;
        if self.qp_type == QpType::Rc {
            mask |= QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MIN_RNR_TIMER;
        }
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
        let mut mask = QpAttrMask::STATE | QpAttrMask::SQ_PSN;
        if self.qp_type == QpType::Rc {
            mask |= QpAttrMask::TIMEOUT
                | QpAttrMask::RETRY_CNT
                | QpAttrMask::RNR_RETRY
                | QpAttrMask::MAX_QP_RD_ATOMIC;
        }
        self.modify(&attr, mask)
    }

    /// Moves a datagram queue pair from RESET to RTS: it takes datagrams that carry `qkey`, whose
    /// highest bit is reserved, and its own are numbered from `psn`. Receives can be posted before
    /// only after [`modify`](Self::modify) to INIT alone.
    ///
    /// # Errors
    /// [`QueuePairError::Modify`].
    pub fn start_datagrams(&self, port: u8, qkey: u32, psn: u32) -> Result<(), QueuePairError> {
        let mut attr = ibv_qp_attr {
            qp_state: ffi::IBV_QPS_INIT,
            port_num: port,
            qkey,
            sq_psn: psn & PSN_MASK,
            ..ibv_qp_attr::zeroed()
        };
        let place = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::QKEY;
        self.modify(&attr, QpAttrMask::STATE | place)?;
        attr.qp_state = ffi::IBV_QPS_RTR;
        self.modify(&attr, QpAttrMask::STATE)?;
        attr.qp_state = ffi::IBV_QPS_RTS;
        self.modify(&attr, QpAttrMask::STATE | QpAttrMask::SQ_PSN)
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
    /// Tells the first request that was not posted; with a shared receive queue none is.
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
        unsafe { ptr::drop_in_place(&mut this.srq) };
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
