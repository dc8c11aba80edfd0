//! Registered memory.

use std::{
    fmt, io, mem,
    ptr::{self, NonNull},
};

use crate::{
    DeregisterError, HostMemory, ProtectionDomain, ReregisterError,
    error::{check, log_destroy},
    ffi::{self, ibv_mr},
};

bitflags::bitflags! {
    /// What may be done to a region or through a queue pair; ibv_reg_mr(3), ibv_modify_qp(3).
    /// Local reading is always allowed.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct AccessFlags: u32 {
        /// Local work may write to it. Needed for remote writes and atomics too.
        const LOCAL_WRITE = ffi::IBV_ACCESS_LOCAL_WRITE;
        /// Peers may WRITE to it.
        const REMOTE_WRITE = ffi::IBV_ACCESS_REMOTE_WRITE;
        /// Peers may READ it.
        const REMOTE_READ = ffi::IBV_ACCESS_REMOTE_READ;
        /// Peers may do atomics on it.
        const REMOTE_ATOMIC = ffi::IBV_ACCESS_REMOTE_ATOMIC;
        /// Memory windows may be bound to it, which let peers read it and, with local write, change
        /// it.
        const MW_BIND = ffi::IBV_ACCESS_MW_BIND;
    }
}

/// What [`MemoryRegion::rereg`] changes of a region. What is `None` stays.
#[derive(Clone, Copy, Debug, Default)]
pub struct Rereg<'a> {
    /// The memory, all of which it covers then.
    pub memory: Option<&'a HostMemory>,
    /// The protection domain.
    pub pd: Option<&'a ProtectionDomain>,
    /// What may be done to it.
    pub access: Option<AccessFlags>,
}

/// A registered memory region. Dropping it deregisters it.
///
/// Deregistration returns only when no peer is in the middle of an access to the region, and no
/// byte of it is touched afterwards.
pub struct MemoryRegion {
    raw: NonNull<ibv_mr>,
    pd: ProtectionDomain,
    memory: Option<HostMemory>,
}

// SAFETY: verbs on one region may be called from any thread; the fields read do not change.
unsafe impl Send for MemoryRegion {}
// SAFETY: as above.
unsafe impl Sync for MemoryRegion {}

impl MemoryRegion {
    /// # Safety
    /// `raw` was registered in `pd` and nobody else will deregister it; `memory` covers its range,
    /// or someone else guarantees that the range stays valid.
    pub(crate) unsafe fn from_raw(
        raw: NonNull<ibv_mr>,
        pd: ProtectionDomain,
        memory: Option<HostMemory>,
    ) -> Self {
        Self { raw, pd, memory }
    }

    /// Address of the first byte.
    #[must_use]
    #[inline]
    pub fn addr(&self) -> u64 {
        self.get().addr.expose_provenance() as u64
    }

    /// Bytes.
    #[must_use]
    #[inline]
    pub fn len(&self) -> usize {
        self.get().length
    }

    /// Whether it has no bytes.
    #[must_use]
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Key for local scatter/gather elements.
    #[must_use]
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.get().lkey
    }

    /// Key to give to peers.
    #[must_use]
    #[inline]
    pub fn rkey(&self) -> u32 {
        self.get().rkey
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.pd
    }

    /// The memory it covers, if it was registered by [`ProtectionDomain::reg_memory`].
    #[must_use]
    pub fn memory(&self) -> Option<&HostMemory> {
        self.memory.as_ref()
    }

    /// The C object, valid while this handle lives.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_mr {
        self.raw.as_ptr()
    }

    /// Deregisters the region; ibv_dereg_mr(3). Dropping does the same but can only log a failure.
    ///
    /// # Errors
    /// Gives the region back: still registered, as while a window is bound to it, or on the software
    /// device with its key dead and `EBUSY`, if a peer's process is stopped in the middle of an access;
    /// calling again has the rest.
    pub fn deregister(self) -> Result<(), DeregisterError> {
        // SAFETY: the region is registered, and on success it is never used again.
        let code = unsafe { (self.pd.context().provider().dereg_mr)(self.raw.as_ptr()) };
        match check(code) {
            Ok(()) => {
                let mut this = mem::ManuallyDrop::new(self);
                let this = &mut *this;
                // SAFETY: `this` is never used again, and its own `drop` does not run; each of the
                // two fields is dropped once.
                unsafe { std::ptr::drop_in_place(&mut this.memory) };
                // SAFETY: as above.
                unsafe { std::ptr::drop_in_place(&mut this.pd) };
                Ok(())
            }
            Err(source) => Err(DeregisterError {
                region: self,
                source,
            }),
        }
    }

    /// Changes the region; ibv_rereg_mr(3). Accesses under way have ended when it returns. The keys
    /// may be others afterwards.
    ///
    /// # Errors
    /// [`ReregisterError`], with the region. Among others, while a window is bound to it, and for a
    /// region of [`ProtectionDomain::reg_mr`] that gets no memory here.
    pub fn rereg(self, change: Rereg<'_>) -> Result<Self, ReregisterError> {
        if change.memory.or(self.memory.as_ref()).is_none() {
            return Err(ReregisterError {
                region: self,
                is_usable: true,
                source: io::ErrorKind::InvalidInput.into(),
            });
        }
        let range = change.memory.map(|memory| (memory.addr(), memory.len()));
        // SAFETY: the region keeps the memory alive, and no safe code sees its bytes.
        unsafe { self.change(range, change) }
    }

    /// The same with a range that the caller answers for, if `range` is given.
    ///
    /// # Safety
    /// As for [`ProtectionDomain::reg_mr`], for the range and the rights that the region then has.
    ///
    /// # Errors
    /// [`ReregisterError`], with the region.
    pub unsafe fn rereg_mr(
        self,
        range: Option<(*mut u8, usize)>,
        pd: Option<&ProtectionDomain>,
        access: Option<AccessFlags>,
    ) -> Result<Self, ReregisterError> {
        let memory = None;
        let change = Rereg { memory, pd, access };
        // SAFETY: by the caller's promise.
        unsafe { self.change(range, change) }
    }

    /// # Safety
    /// As for [`rereg_mr`](Self::rereg_mr), or `change.memory` covers the range.
    unsafe fn change(
        mut self,
        range: Option<(*mut u8, usize)>,
        change: Rereg<'_>,
    ) -> Result<Self, ReregisterError> {
        let context = self.pd.context().clone();
        let pd = change.pd.unwrap_or(&self.pd);
        if !pd.context().is_same(&context) {
            return Err(ReregisterError {
                region: self,
                is_usable: true,
                source: io::ErrorKind::InvalidInput.into(),
            });
        }
        let mut flags = 0;
        for (is_changed, flag) in [
            (range.is_some(), ffi::IBV_REREG_MR_CHANGE_TRANSLATION),
            (change.pd.is_some(), ffi::IBV_REREG_MR_CHANGE_PD),
            (change.access.is_some(), ffi::IBV_REREG_MR_CHANGE_ACCESS),
        ] {
            if is_changed {
                flags |= flag;
            }
        }
        let (addr, len) = range.unwrap_or((ptr::null_mut(), 0));
        let access = change.access.unwrap_or_default().bits();
        // SAFETY: the region and the domain are alive and of one context; the device itself checks
        // the range.
        let code = unsafe {
            (context.provider().rereg_mr)(
                self.raw.as_ptr(),
                flags.cast_signed(),
                pd.as_raw(),
                addr.cast(),
                len,
                access.cast_signed(),
            )
        };
        // Read before anything changes it.
        let source = io::Error::last_os_error();
        match code {
            0 | ffi::IBV_REREG_MR_ERR_DO_FORK_OLD => {
                if code != 0 {
                    tracing::warn!(error = %source, "the old range stays hidden from children");
                }
                if let Some(pd) = change.pd {
                    self.pd = pd.clone();
                }
                if range.is_some() {
                    self.memory = change.memory.cloned();
                }
                Ok(self)
            }
            code => {
                let is_usable = context.device().is_software()
                    || matches!(
                        code,
                        ffi::IBV_REREG_MR_ERR_INPUT | ffi::IBV_REREG_MR_ERR_DONT_FORK_NEW
                    );
                if !is_usable {
                    // Nobody knows which memory the device has now.
                    mem::forget(change.memory.cloned());
                }
                Err(ReregisterError {
                    region: self,
                    is_usable,
                    source,
                })
            }
        }
    }

    #[inline]
    fn get(&self) -> &ibv_mr {
        // SAFETY: the region lives as long as this handle, and the provider does not change it.
        unsafe { self.raw.as_ref() }
    }
}

impl Drop for MemoryRegion {
    fn drop(&mut self) {
        // SAFETY: the region is registered and this is its only owner.
        let code = unsafe { (self.pd.context().provider().dereg_mr)(self.raw.as_ptr()) };
        let result = check(code);
        if result.is_err() {
            // Peers can still reach the memory, so it must never be used for anything else.
            mem::forget(self.memory.take());
        }
        log_destroy("ibv_dereg_mr", result);
    }
}

impl fmt::Debug for MemoryRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryRegion")
            .field("addr", &format_args!("{:#x}", self.addr()))
            .field("len", &self.len())
            .field("lkey", &format_args!("{:#x}", self.lkey()))
            .field("rkey", &format_args!("{:#x}", self.rkey()))
            .finish()
    }
}
