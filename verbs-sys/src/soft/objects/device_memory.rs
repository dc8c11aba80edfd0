//! Device memory: ibv_alloc_dm(3). The device has none of its own, so it is ordinary memory that peers
//! can map.

use core::ffi::{c_int, c_uint, c_void};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::io::Errno;

use super::super::device::{context, is_inherited};
use super::super::process::Process;
use super::regions::{self, Backing, Wanted};
use super::{Pd, pointer};
use crate::copy;
use crate::ffi::*;

/// Most bytes of a piece of device memory.
pub(in crate::soft) const MAX_DEVICE_MEMORY: usize = 16 << 20;
/// What offsets and lengths of copies are multiples of, as on NICs.
const UNIT: usize = 4;

/// A piece of device memory, freed with its last user.
#[derive(Debug)]
pub(in crate::soft) struct Memory {
    /// `None` in a forked child, where nothing can be registered.
    process: Option<Arc<Process>>,
    handle: u32,
    start: *mut u8,
    len: usize,
    /// Regions in it.
    pub(super) regions: AtomicU32,
}

// SAFETY: the memory is reached through raw pointers, whose users prove their own accesses.
unsafe impl Send for Memory {}
// SAFETY: as for Send.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(process: &Arc<Process>, handle: u32, len: usize) -> Result<Self, Errno> {
        let (process, start) = if process.is_inherited() {
            // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing one.
            let start = unsafe {
                rustix::mm::mmap_anonymous(
                    std::ptr::null_mut(),
                    len,
                    rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE,
                    rustix::mm::MapFlags::PRIVATE,
                )
            }?;
            (None, start.cast())
        } else {
            let start = process.arenas.alloc(process.info(), len)?;
            (Some(Arc::clone(process)), start)
        };
        Ok(Self {
            process,
            handle,
            start,
            len,
            regions: AtomicU32::new(0),
        })
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.regions.load(Ordering::Acquire) != 0
    }

    /// Where a copy of so many bytes at an offset goes.
    fn place(&self, offset: u64, len: usize) -> Option<*mut u8> {
        let offset = usize::try_from(offset).ok()?;
        let fits = offset <= self.len && len <= self.len - offset;
        let is_whole = offset.is_multiple_of(UNIT) && len.is_multiple_of(UNIT);
        (fits && is_whole).then(|| self.start.wrapping_add(offset))
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(process) = &self.process else {
            // SAFETY: mapped by `new`, and nobody knows it any more.
            let _ = unsafe { rustix::mm::munmap(self.start.cast(), self.len) };
            return;
        };
        if process.is_inherited() {
            return;
        }
        if process
            .arenas
            .free(process.info(), self.start as u64)
            .is_ok()
        {
            for peer in process.peers() {
                // So that they unmap it.
                peer.kick();
            }
        }
    }
}

/// The device memory of a process that can be imported. It does not keep the process.
#[derive(Debug, Default)]
pub(in crate::soft) struct Memories {
    last: AtomicU32,
    by_handle: Mutex<HashMap<u32, Weak<Memory>>>,
}

impl Memories {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Weak<Memory>>> {
        self.by_handle
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// A handle to device memory. The C structure comes first: its address is the handle.
#[repr(C)]
struct Dm {
    dm: ibv_dm,
    memory: Arc<Memory>,
}

impl Dm {
    fn handle(context: *mut ibv_context, memory: Arc<Memory>) -> *mut ibv_dm {
        let dm = ibv_dm {
            context,
            memcpy_to_dm: Some(memcpy_to_dm),
            memcpy_from_dm: Some(memcpy_from_dm),
            comp_mask: IBV_DM_MASK_HANDLE,
            handle: memory.handle,
        };
        Box::into_raw(Box::new(Self { dm, memory })).cast()
    }
}

// Every function below keeps the contract of `verbs_context`: handles are live objects of this
// provider, other pointers are valid as the man page of the call says.

pub(in crate::soft) unsafe extern "C" fn alloc_dm(
    handle: *mut ibv_context,
    attr: *mut ibv_alloc_dm_attr,
) -> *mut ibv_dm {
    // SAFETY: see above.
    let (context, attr) = unsafe { (context(handle), &*attr) };
    pointer(context.process().and_then(|process| {
        // Memory begins with a page.
        let page_bits = rustix::param::page_size().trailing_zeros();
        if attr.comp_mask != 0 || attr.length == 0 || attr.log_align_req > page_bits {
            return Err(Errno::INVAL);
        }
        if attr.length > MAX_DEVICE_MEMORY {
            return Err(Errno::NOMEM);
        }
        let memories = &process.device_memory;
        let number = memories.last.fetch_add(1, Ordering::Relaxed);
        let memory = Arc::new(Memory::new(process, number, attr.length)?);
        memories.lock().insert(number, Arc::downgrade(&memory));
        Ok(Dm::handle(handle, memory))
    }))
}

/// Fails with `EBUSY` while a region is in it.
pub(in crate::soft) unsafe extern "C" fn free_dm(handle: *mut ibv_dm) -> c_int {
    // SAFETY: see above.
    let dm = unsafe { &*handle.cast::<Dm>() };
    if dm.memory.is_in_use() {
        return libc::EBUSY;
    }
    // SAFETY: a piece of device memory's context outlives it.
    if let Ok(process) = unsafe { context(dm.dm.context) }.process() {
        process.device_memory.lock().remove(&dm.memory.handle);
    }
    // SAFETY: see above.
    unsafe { unimport_dm(handle) };
    0
}

/// ibv_import_dm(3): another handle to device memory of this process.
#[cfg(any(feature = "drop-in", test))]
pub(crate) unsafe fn import_dm(handle: *mut ibv_context, number: u32) -> *mut ibv_dm {
    // SAFETY: see above.
    let context = unsafe { context(handle) };
    pointer(context.process().and_then(|process| {
        let found = process.device_memory.lock().get(&number).map(Weak::upgrade);
        Ok(Dm::handle(handle, found.flatten().ok_or(Errno::INVAL)?))
    }))
}

/// ibv_unimport_dm(3): gives up the handle.
pub(crate) unsafe fn unimport_dm(handle: *mut ibv_dm) {
    // SAFETY: see above; it is freed once.
    drop(unsafe { Box::from_raw(handle.cast::<Dm>()) });
}

/// ibv_reg_dm_mr(3): addresses of the region begin with 0.
pub(in crate::soft) unsafe extern "C" fn reg_dm_mr(
    pd: *mut ibv_pd,
    dm: *mut ibv_dm,
    offset: u64,
    len: usize,
    access: c_uint,
) -> *mut ibv_mr {
    // SAFETY: see above.
    let (pd, memory) = unsafe { (&*pd.cast::<Pd>(), &(*dm.cast::<Dm>()).memory) };
    pointer((|| {
        // SAFETY: a domain's context outlives it.
        if access & IBV_ACCESS_ZERO_BASED == 0 || unsafe { is_inherited(pd.pd.context) } {
            return Err(Errno::INVAL);
        }
        let size = memory.len as u64;
        let fits = offset <= size && len as u64 <= size - offset;
        let start = fits.then(|| memory.start.wrapping_add(offset as usize));
        let wanted = Wanted {
            start: start.ok_or(Errno::INVAL)?.cast(),
            len,
            iova: 0,
            access,
        };
        regions::register(pd, &wanted, Backing::Device(Arc::clone(memory)))
    })())
}

unsafe extern "C" fn memcpy_to_dm(
    dm: *mut ibv_dm,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: see above.
    let memory = unsafe { &(*dm.cast::<Dm>()).memory };
    let Some(to) = memory.place(offset, len) else {
        return libc::EINVAL;
    };
    // SAFETY: the range lies in the memory, which peers may be using; the source is readable by the man
    // page.
    unsafe { copy::write_shared(to, from.cast(), len) };
    0
}

unsafe extern "C" fn memcpy_from_dm(
    to: *mut c_void,
    dm: *mut ibv_dm,
    offset: u64,
    len: usize,
) -> c_int {
    // SAFETY: see above.
    let memory = unsafe { &(*dm.cast::<Dm>()).memory };
    let Some(from) = memory.place(offset, len) else {
        return libc::EINVAL;
    };
    // SAFETY: as above; the target is writable by the man page.
    unsafe { copy::read_shared(to.cast(), from, len) };
    0
}
