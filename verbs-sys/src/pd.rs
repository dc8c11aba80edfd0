//! Protection domains.

use std::{ffi::c_int, fmt, io, ptr::NonNull, sync::Arc};

use crate::{
    AccessFlags, AddressHandle, Context, CreateError, Gid, HostMemory, MemoryError, MemoryRegion,
    MemoryWindow, MwType, PathOptions, QueuePair, QueuePairInit, SharedReceiveQueue,
    context::created,
    error::{check, log_destroy},
    ffi::ibv_pd,
};

/// A protection domain: regions and queue pairs work together only within one. Cheap to clone.
#[derive(Clone)]
pub struct ProtectionDomain {
    inner: Arc<PdInner>,
}

struct PdInner {
    raw: NonNull<ibv_pd>,
    context: Context,
}

// SAFETY: verbs on one protection domain may be called from any thread at any time.
unsafe impl Send for PdInner {}
// SAFETY: as above.
unsafe impl Sync for PdInner {}

impl Drop for PdInner {
    fn drop(&mut self) {
        // SAFETY: this is the last reference, and every region, window and queue pair held one.
        let code = unsafe { (self.context.provider().dealloc_pd)(self.raw.as_ptr()) };
        log_destroy("ibv_dealloc_pd", check(code));
    }
}

impl ProtectionDomain {
    pub(crate) fn new(context: &Context) -> Result<Self, CreateError> {
        // SAFETY: the context is open.
        let raw = unsafe { (context.provider().alloc_pd)(context.as_raw()) };
        let raw = created(raw, || "ibv_alloc_pd".to_owned())?;
        Ok(Self {
            inner: Arc::new(PdInner {
                raw,
                context: context.clone(),
            }),
        })
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while a handle to it or to one of its children lives.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_pd {
        self.inner.raw.as_ptr()
    }

    /// Registers all of `memory`, which stays allocated while the region lives; ibv_reg_mr(3).
    ///
    /// # Errors
    /// [`MemoryError::Register`], among others for remote write access without local write.
    pub fn reg_memory(
        &self,
        memory: &HostMemory,
        access: AccessFlags,
    ) -> Result<MemoryRegion, MemoryError> {
        // SAFETY: the region keeps the memory alive, and no safe code sees its bytes.
        unsafe { self.register(memory.addr(), memory.len(), access, Some(memory.clone())) }
    }

    /// Registers `len` bytes from `addr`; ibv_reg_mr(3).
    ///
    /// # Safety
    /// The range stays mapped while the region lives, and nobody relies on the value of a byte that
    /// `access` lets the device or a peer write, nor writes one that it lets a peer read, except
    /// by agreement with whoever posts that work.
    ///
    /// # Errors
    /// [`MemoryError::Register`]; a range that is not mapped gives `EFAULT`.
    pub unsafe fn reg_mr(
        &self,
        addr: *mut u8,
        len: usize,
        access: AccessFlags,
    ) -> Result<MemoryRegion, MemoryError> {
        // SAFETY: the caller promises what the region needs.
        unsafe { self.register(addr, len, access, None) }
    }

    /// # Safety
    /// As [`reg_mr`](Self::reg_mr), or `memory` covers the range.
    unsafe fn register(
        &self,
        addr: *mut u8,
        len: usize,
        access: AccessFlags,
        memory: Option<HostMemory>,
    ) -> Result<MemoryRegion, MemoryError> {
        let flags = access.bits() as c_int;
        // SAFETY: the protection domain is alive; the device itself checks the range.
        let raw =
            unsafe { (self.context().provider().reg_mr)(self.as_raw(), addr.cast(), len, flags) };
        match NonNull::new(raw) {
            // SAFETY: just registered, and the range stays valid as the caller promises.
            Some(raw) => Ok(unsafe { MemoryRegion::from_raw(raw, self.clone(), memory) }),
            None => Err(MemoryError::Register {
                addr: addr.addr() as u64,
                len,
                access: access.bits(),
                source: io::Error::last_os_error(),
            }),
        }
    }

    /// Makes a memory window that is not bound yet; ibv_alloc_mw(3).
    ///
    /// # Errors
    /// [`CreateError::Refused`], with `EOPNOTSUPP` by devices that have no such windows;
    /// `device_cap_flags` tells.
    pub fn alloc_mw(&self, kind: MwType) -> Result<MemoryWindow, CreateError> {
        MemoryWindow::new(self, kind)
    }

    /// Makes an address handle for the port with this address, reached along `path`;
    /// ibv_create_ah(3). `lid` is 0 on RoCE.
    ///
    /// # Errors
    /// [`CreateError::Refused`].
    pub fn create_ah(
        &self,
        gid: Gid,
        lid: u16,
        path: &PathOptions,
    ) -> Result<AddressHandle, CreateError> {
        AddressHandle::new(self, gid, lid, path)
    }

    /// Makes a shared receive queue for at least `max_wr` outstanding receives of at least `max_sge`
    /// elements each; ibv_create_srq(3).
    ///
    /// # Errors
    /// [`CreateError::Refused`].
    pub fn create_srq(&self, max_wr: u32, max_sge: u32) -> Result<SharedReceiveQueue, CreateError> {
        SharedReceiveQueue::new(self, max_wr, max_sge)
    }

    /// Makes a queue pair; ibv_create_qp(3).
    ///
    /// # Errors
    /// [`CreateError`]; completion queues and a shared receive queue of another context are refused.
    pub fn create_qp(&self, init: &QueuePairInit<'_>) -> Result<QueuePair, CreateError> {
        QueuePair::new(self, init)
    }
}

impl fmt::Debug for ProtectionDomain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProtectionDomain")
            .field("context", self.context())
            .finish()
    }
}
