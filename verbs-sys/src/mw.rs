//! Memory windows.

use std::{ffi::c_int, fmt, io, ptr, ptr::NonNull, sync::Arc};

use crate::{
    AccessFlags, BindError, CreateError, MemoryRegion, ProtectionDomain, QueuePair, SendFlags,
    context::created,
    error::{check, log_destroy},
    ffi::{
        self, ibv_inc_rkey, ibv_mw, ibv_mw_bind, ibv_mw_bind_info, ibv_send_wr,
        ibv_send_wr_bind_mw, ibv_send_wr_extra,
    },
};

/// How a window is bound; ibv_alloc_mw(3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MwType {
    /// By [`MemoryWindow::bind`], which changes its key. Every queue pair of its protection domain
    /// serves it.
    Type1 = ffi::IBV_MW_TYPE_1 as isize,
    /// By a posted request ([`MemoryWindow::bind_request`]), with a key of the caller's choice. The
    /// queue pair of that request alone serves it (type 2B), and its peer can invalidate it.
    Type2 = ffi::IBV_MW_TYPE_2 as isize,
}

/// What a window is to be bound to.
#[derive(Clone, Copy, Debug)]
pub struct BindInfo<'a> {
    /// A region with [`AccessFlags::MW_BIND`] of the window's protection domain.
    pub region: &'a Arc<MemoryRegion>,
    /// First byte, inside the region.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// What peers may do; changes need the region's [`AccessFlags::LOCAL_WRITE`].
    pub access: AccessFlags,
}

impl BindInfo<'_> {
    fn to_raw(self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self.region.as_raw(),
            addr: self.addr,
            length: self.len,
            mw_access_flags: self.access.bits(),
        }
    }
}

/// A memory window: a key for a part of a region that can be given and taken back without
/// registering anything. Dropping it deallocates it, which unbinds it; ibv_dealloc_mw(3).
///
/// It keeps its protection domain alive, and the regions that it may be bound to, which cannot be
/// deregistered as long as it is.
///
/// When the completion of what unbinds or rebinds it is there, or it is deallocated, no access by its
/// old key is under way and none succeeds any more.
pub struct MemoryWindow {
    raw: NonNull<ibv_mw>,
    regions: Vec<Arc<MemoryRegion>>,
    pd: ProtectionDomain,
}

// SAFETY: verbs on one window may be called from any thread.
unsafe impl Send for MemoryWindow {}
// SAFETY: as above; what changes it needs `&mut`.
unsafe impl Sync for MemoryWindow {}

impl MemoryWindow {
    pub(crate) fn new(pd: &ProtectionDomain, kind: MwType) -> Result<Self, CreateError> {
        // SAFETY: the context is open.
        let raw = match unsafe { (*pd.context().as_raw()).ops.alloc_mw } {
            // SAFETY: the protection domain is alive.
            Some(alloc_mw) => created(unsafe { alloc_mw(pd.as_raw(), kind as u32) }, || {
                format!("ibv_alloc_mw({kind:?})")
            })?,
            None => {
                return Err(CreateError::Refused {
                    call: format!("ibv_alloc_mw({kind:?})"),
                    source: io::Error::from_raw_os_error(libc::EOPNOTSUPP),
                });
            }
        };
        Ok(Self {
            raw,
            regions: Vec::new(),
            pd: pd.clone(),
        })
    }

    /// The key to give to peers, good once a bind has completed. A bind that fails leaves it at a
    /// wrong value; [`set_rkey`](Self::set_rkey) puts that right.
    #[must_use]
    pub fn rkey(&self) -> u32 {
        // SAFETY: the window is alive, and the field changes by calls with `&mut self` only.
        unsafe { (*self.raw.as_ptr()).rkey }
    }

    /// The key that comes after the present one; ibv_inc_rkey(3).
    #[must_use]
    pub fn next_rkey(&self) -> u32 {
        ibv_inc_rkey(self.rkey())
    }

    /// Notes the key of a bind of type 2 that has completed, or the one from before a bind that has
    /// failed.
    pub fn set_rkey(&mut self, rkey: u32) {
        // SAFETY: the window is alive, and `&mut self` keeps others away from the field.
        unsafe { (*self.raw.as_ptr()).rkey = rkey };
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The C object, valid while this handle lives.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mw {
        self.raw.as_ptr()
    }

    /// Posts a bind of a window of type 1, or with `None` its unbinding; ibv_bind_mw(3). The key
    /// changes at once, and is good when the completion is there. Its opcode is
    /// [`WcOpcode::BindMw`](crate::WcOpcode::BindMw).
    ///
    /// # Safety
    /// A queue pair inside an [`OwnedQueuePair`](crate::owned::OwnedQueuePair) is posted to by that
    /// alone.
    ///
    /// # Errors
    /// [`BindError`]. What is wrong with the range or the rights comes as a completion with
    /// [`WcStatus::MwBindErr`](crate::WcStatus::MwBindErr).
    pub unsafe fn bind(
        &mut self,
        qp: &QueuePair,
        wr_id: u64,
        flags: SendFlags,
        info: Option<BindInfo<'_>>,
    ) -> Result<(), BindError> {
        let context = self.pd.context();
        if !qp.protection_domain().context().is_same(context) {
            return Err(BindError::OtherContext {
                other: "queue pair",
            });
        }
        if let Some(info) = info
            && !info.region.protection_domain().context().is_same(context)
        {
            return Err(BindError::OtherContext { other: "region" });
        }
        let rkey = self.rkey();
        let mut bind = ibv_mw_bind {
            wr_id,
            send_flags: flags.bits() | ffi::IBV_SEND_SIGNALED,
            bind_info: info.map_or_else(|| self.nothing(), BindInfo::to_raw),
        };
        // libibverbs does this check in an inline function.
        // SAFETY: the window is alive.
        let code: c_int = if unsafe { (*self.raw.as_ptr()).type_ } != ffi::IBV_MW_TYPE_1 {
            libc::EINVAL
        } else {
            // SAFETY: the context is open.
            match unsafe { (*context.as_raw()).ops.bind_mw } {
                // SAFETY: all objects are alive and of one context, and `&mut self` keeps others away.
                Some(bind_mw) => unsafe { bind_mw(qp.as_raw(), self.raw.as_ptr(), &mut bind) },
                None => libc::EOPNOTSUPP,
            }
        };
        check(code).map_err(|source| BindError::Refused { rkey, source })?;
        self.regions
            .extend(info.map(|info| Arc::clone(info.region)));
        Ok(())
    }

    /// What unbinds. It names a region all the same if there is one: rdma-core's provider of
    /// `rdma_rxe` looks into it whatever the length.
    fn nothing(&self) -> ibv_mw_bind_info {
        ibv_mw_bind_info {
            mr: self
                .regions
                .last()
                .map_or(ptr::null_mut(), |region| region.as_raw()),
            ..ibv_mw_bind_info::zeroed()
        }
    }

    /// A signaled request that binds a window of type 2 under `rkey`, which differs from
    /// [`rkey`](Self::rkey) in its lowest byte only. It goes to
    /// [`QueuePair::post_send`]; on success [`set_rkey`](Self::set_rkey) is due.
    #[must_use]
    pub fn bind_request(&mut self, wr_id: u64, rkey: u32, info: BindInfo<'_>) -> ibv_send_wr {
        self.regions.push(Arc::clone(info.region));
        let bind_mw = ibv_send_wr_bind_mw {
            mw: self.raw.as_ptr(),
            rkey,
            bind_info: info.to_raw(),
        };
        ibv_send_wr {
            wr_id,
            next: ptr::null_mut(),
            opcode: ffi::IBV_WR_BIND_MW,
            send_flags: ffi::IBV_SEND_SIGNALED,
            extra: ibv_send_wr_extra { bind_mw },
            ..ibv_send_wr::zeroed()
        }
    }

    /// Lets go of the regions of all binds but the last, which must have completed: otherwise a
    /// region may be found bound when it is dropped, and leak.
    pub fn release_former_regions(&mut self) {
        let former = self.regions.len().saturating_sub(1);
        self.regions.drain(..former);
    }

    /// The same for all binds: the window is unbound.
    pub fn release_regions(&mut self) {
        self.regions.clear();
    }
}

impl Drop for MemoryWindow {
    fn drop(&mut self) {
        // SAFETY: the context is open. A device that makes windows can unmake them.
        let code = match unsafe { (*self.pd.context().as_raw()).ops.dealloc_mw } {
            // SAFETY: the window is alive, and never used again.
            Some(dealloc_mw) => unsafe { dealloc_mw(self.raw.as_ptr()) },
            None => libc::EOPNOTSUPP,
        };
        log_destroy("ibv_dealloc_mw", check(code));
    }
}

impl fmt::Debug for MemoryWindow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryWindow")
            .field("rkey", &format_args!("{:#x}", self.rkey()))
            .finish_non_exhaustive()
    }
}
