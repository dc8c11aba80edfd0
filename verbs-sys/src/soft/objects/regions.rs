//! Memory regions.

use core::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rustix::io::Errno;

use super::super::device::{Context, context, is_inherited};
use super::super::keys::{self, Range};
use super::super::nothing::Nothing;
use super::super::process::Process;
use super::super::segment;
use super::device_memory::Memory;
use super::{Pd, null, pointer, set_errno};
use crate::ffi::*;

/// Access flags that this device knows; hints are accepted and have no effect.
const KNOWN_ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_ZERO_BASED
    | IBV_ACCESS_ON_DEMAND
    | IBV_ACCESS_HUGETLB
    | IBV_ACCESS_RELAXED_ORDERING;

/// A memory region. The C structure comes first: its address is the handle.
#[repr(C)]
struct Mr {
    mr: ibv_mr,
    access: u32,
    iova: u64,
    backing: Backing,
    /// Its key is dead, but perhaps not for everybody who saw it.
    is_leaving: AtomicBool,
}

/// What memory a region is of.
pub(super) enum Backing {
    /// The application's.
    Application,
    Device(Arc<Memory>),
    /// None, or that of a region which another handle is for.
    Elsewhere,
}

/// What a region shall be.
pub(super) struct Wanted {
    pub start: *mut c_void,
    pub len: usize,
    /// The address by which its users name the start.
    pub iova: u64,
    pub access: u32,
}

impl Wanted {
    /// The whole address space, without knowing what is in it.
    fn is_implicit(&self) -> bool {
        self.start.is_null() && self.len == usize::MAX
    }
}

// Every function below keeps the contract of `Provider` or of `ibv_context_ops`: handles are live
// objects of this provider, other pointers are valid as the man page of the call says.

pub(in crate::soft) unsafe fn reg_mr(
    handle: *mut ibv_pd,
    start: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: as here.
    unsafe { reg_mr_iova(handle, start, len, start as u64, access) }
}

/// ibv_reg_mr_iova(3). With `IBV_ACCESS_ZERO_BASED` addresses begin with 0, whatever `iova` is.
pub(crate) unsafe fn reg_mr_iova(
    handle: *mut ibv_pd,
    start: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: see above.
    let pd = unsafe { &*handle.cast::<Pd>() };
    let access = access as u32;
    let is_zero_based = access & IBV_ACCESS_ZERO_BASED != 0;
    let page = rustix::param::page_size() as u64;
    if !is_zero_based && iova % page != start as u64 % page {
        // As the kernel has it, so that what is aligned by the one address is by the other.
        return null(Errno::INVAL);
    }
    let wanted = Wanted {
        start,
        len,
        iova: if is_zero_based { 0 } else { iova },
        access,
    };
    pointer(register(pd, &wanted, Backing::Application))
}

pub(super) fn register(pd: &Pd, wanted: &Wanted, backing: Backing) -> Result<*mut ibv_mr, Errno> {
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    let began = Instant::now();
    let process = context.process()?;
    if process
        .injector
        .get()
        .is_some_and(|faults| faults.fails_registration())
    {
        return Err(Errno::NOMEM);
    }
    let range = prepare(process, pd.id, wanted)?;
    let key = process.keys.publish(&process.info().keys, range)?;
    spend(context, began, wanted);
    if let Backing::Device(memory) = &backing {
        memory.regions.fetch_add(1, Ordering::Relaxed);
    }
    let addr = match backing {
        Backing::Application => wanted.start,
        Backing::Device(_) | Backing::Elsewhere => std::ptr::null_mut(),
    };
    Ok(Mr::handle(pd, (key, addr, wanted.len), wanted, backing))
}

impl Mr {
    fn handle(
        pd: &Pd,
        (key, addr, length): (u32, *mut c_void, usize),
        wanted: &Wanted,
        backing: Backing,
    ) -> *mut ibv_mr {
        pd.enter();
        let mr = ibv_mr {
            context: pd.pd.context,
            pd: (&raw const *pd).cast_mut().cast(),
            addr,
            length,
            handle: keys::slot(key),
            lkey: key,
            rkey: key,
        };
        let region = Self {
            mr,
            access: wanted.access,
            iova: wanted.iova,
            backing,
            is_leaving: AtomicBool::new(false),
        };
        Box::into_raw(Box::new(region)).cast()
    }
}

/// Returns when no operation in flight can touch the range any more. `EBUSY`: a window is bound to
/// it, or a stopped peer process is in the middle of an operation that may touch it; in the latter
/// case the key is dead already, and calling again has the rest. `EINVAL`: it was deregistered by a
/// handle that had been imported.
pub(in crate::soft) unsafe fn dereg_mr(handle: *mut ibv_mr) -> c_int {
    // SAFETY: see above.
    let region = unsafe { &*handle.cast::<Mr>() };
    let mr = &region.mr;
    // SAFETY: a region's context outlives it.
    if unsafe { is_inherited(mr.context) } {
        return 0;
    }
    // SAFETY: a region's context outlives it.
    if let Ok(process) = unsafe { context(mr.context) }.process() {
        let keys = &process.info().keys;
        if !region.is_leaving.load(Ordering::Relaxed) {
            if keys::find(keys, mr.lkey).is_none() {
                return libc::EINVAL;
            }
            if let Err(error) = withdraw(process, mr.lkey, region.access) {
                return error.raw_os_error();
            }
            region.is_leaving.store(true, Ordering::Relaxed);
        }
        if let Err(error) = process.quiesce() {
            return error.raw_os_error();
        }
        process.keys.recycle(mr.lkey);
    }
    // SAFETY: see above.
    unsafe { unimport_mr(handle) };
    0
}

/// ibv_alloc_null_mr(3).
pub(in crate::soft) unsafe extern "C" fn alloc_null_mr(pd: *mut ibv_pd) -> *mut ibv_mr {
    // SAFETY: see above.
    let pd = unsafe { &*pd.cast::<Pd>() };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        let nothing = match process.nothing.get() {
            Some(nothing) => nothing,
            None => {
                let made = Nothing::new()?;
                process.nothing.get_or_init(|| made)
            }
        };
        let access = IBV_ACCESS_LOCAL_WRITE;
        let range = Range {
            access: access | keys::IS_NOTHING,
            pd: pd.id,
            arena: 0,
            addr: nothing.start() as u64,
            len: 2 * Nothing::HALF,
            offset: 0,
            iova: Some(0),
        };
        let key = process.keys.publish(&process.info().keys, range)?;
        let wanted = Wanted {
            start: std::ptr::null_mut(),
            len: usize::MAX,
            iova: 0,
            access,
        };
        let named = (key, std::ptr::null_mut(), wanted.len);
        Ok(Mr::handle(pd, named, &wanted, Backing::Elsewhere))
    }))
}

/// ibv_import_mr(3): another handle to a region of this process, of the same domain. Its address is not
/// known.
#[cfg(any(feature = "drop-in", test))]
pub(crate) unsafe fn import_mr(pd: *mut ibv_pd, slot: u32) -> *mut ibv_mr {
    // SAFETY: see above.
    let pd = unsafe { &*pd.cast::<Pd>() };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        let found = keys::in_slot(&process.info().keys, slot);
        let (key, live) = found
            .filter(|(_, live)| live.is_of(pd.id))
            .ok_or(Errno::INVAL)?;
        let wanted = Wanted {
            start: std::ptr::null_mut(),
            len: live.range().1 as usize,
            iova: 0,
            access: live.access(),
        };
        let named = (key, std::ptr::null_mut(), wanted.len);
        Ok(Mr::handle(pd, named, &wanted, Backing::Elsewhere))
    }))
}

/// ibv_unimport_mr(3): gives up the handle.
pub(crate) unsafe fn unimport_mr(handle: *mut ibv_mr) {
    // SAFETY: see above; it is freed once.
    let region = *unsafe { Box::from_raw(handle.cast::<Mr>()) };
    if let Backing::Device(memory) = region.backing {
        if region.is_leaving.into_inner() {
            memory.regions.fetch_sub(1, Ordering::Release);
        } else {
            // The region is still there, and so its memory has to be.
            std::mem::forget(memory);
        }
    }
    // SAFETY: entered when the region was made; a handle's domain outlives it.
    unsafe { Pd::leave(region.mr.pd) };
}

/// Checks what a region shall be, and has its pages.
fn prepare(process: &Process, pd: u32, wanted: &Wanted) -> Result<Range, Errno> {
    let (access, addr, len) = (wanted.access, wanted.start as u64, wanted.len);
    let remote_change = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
    if access & !KNOWN_ACCESS != 0 || (remote_change && access & IBV_ACCESS_LOCAL_WRITE == 0) {
        return Err(Errno::INVAL);
    }
    let on_demand = access & IBV_ACCESS_ON_DEMAND != 0;
    let is_indirect = on_demand || wanted.iova != addr;
    if is_indirect && access & IBV_ACCESS_MW_BIND != 0 {
        // A window's key is its user's to choose, so it cannot say that it is indirect.
        return Err(Errno::OPNOTSUPP);
    }
    if !on_demand {
        segment::populate(addr, len, access & IBV_ACCESS_LOCAL_WRITE != 0)?;
    } else if !wanted.is_implicit() && addr.checked_add(len as u64).is_none() {
        return Err(Errno::FAULT);
    }
    let arena = process.arenas.containing(addr, len);
    Ok(Range {
        access,
        pd,
        arena: arena.as_ref().map_or(0, |arena| arena.id),
        addr,
        len: len as u64,
        offset: arena.map_or(0, |arena| addr - arena.mapping.as_ptr() as u64),
        iova: is_indirect.then_some(wanted.iova),
    })
}

/// Takes as long as the options say that registration takes, where it makes pages present.
fn spend(context: &Context, began: Instant, wanted: &Wanted) {
    let on_demand = wanted.access & IBV_ACCESS_ON_DEMAND != 0;
    if let Some(cost) = context.options.registration_cost.filter(|_| !on_demand) {
        let cost = cost.of(wanted.len);
        while began.elapsed() < cost {
            std::hint::spin_loop();
        }
    }
}

/// ibv_rereg_mr(3): all or nothing. The key stays. Operations in flight have ended when it returns,
/// and the next ones find what is new.
pub(in crate::soft) unsafe fn rereg_mr(
    handle: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    start: *mut c_void,
    len: usize,
    access: c_int,
) -> c_int {
    let flags = flags as u32;
    let known =
        IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    let is_moved = flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0;
    if flags == 0 || flags & !known != 0 || (is_moved && len == 0) {
        set_errno(Errno::INVAL);
        return IBV_REREG_MR_ERR_INPUT;
    }
    // SAFETY: see above; a region that is being changed is not used by other calls.
    let region = unsafe { &mut *handle.cast::<Mr>() };
    let pd = if flags & IBV_REREG_MR_CHANGE_PD != 0 {
        pd
    } else {
        region.mr.pd
    };
    let access = if flags & IBV_REREG_MR_CHANGE_ACCESS != 0 {
        access as u32
    } else {
        region.access
    };
    if !matches!(region.backing, Backing::Application) {
        set_errno(Errno::OPNOTSUPP);
        return IBV_REREG_MR_ERR_INPUT;
    }
    let (start, len, iova) = if is_moved {
        (start, len, start as u64)
    } else {
        (region.mr.addr, region.mr.length, region.iova)
    };
    let wanted = Wanted {
        start,
        len,
        iova,
        access,
    };
    // SAFETY: see above.
    match unsafe { change(region, pd, &wanted) } {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error);
            IBV_REREG_MR_ERR_CMD
        }
    }
}

/// # Safety
///
/// The region and the domain are live objects of this provider.
unsafe fn change(region: &mut Mr, handle: *mut ibv_pd, wanted: &Wanted) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let new = unsafe { handle.cast::<Pd>().as_ref() }.ok_or(Errno::INVAL)?;
    if new.pd.context != region.mr.context {
        return Err(Errno::INVAL);
    }
    // SAFETY: a region's context outlives it.
    let context = unsafe { context(region.mr.context) };
    let process = context.process()?;
    let began = Instant::now();
    let (keys, key) = (&process.info().keys, region.mr.lkey);
    let mut range = prepare(process, new.id, wanted)?;
    if keys::is_indirect(key) {
        range.iova = Some(wanted.iova);
    } else if range.iova.is_some() {
        // Its users have a key that says otherwise.
        return Err(Errno::OPNOTSUPP);
    }
    withdraw(process, key, region.access)?;
    if let Err(error) = process.quiesce() {
        // What is not over may see the old region, so that is what there is.
        process.keys.restore(keys, key);
        return Err(error);
    }
    process.keys.publish_as(keys, key, range);
    new.enter();
    // SAFETY: entered when the region was made; a region's domain outlives it.
    unsafe { Pd::leave(region.mr.pd) };
    region.mr.pd = handle;
    (region.mr.addr, region.mr.length) = (wanted.start, wanted.len);
    (region.access, region.iova) = (wanted.access, wanted.iova);
    spend(context, began, wanted);
    Ok(())
}

/// Makes a region's key dead, unless a window is bound to it.
fn withdraw(process: &Process, key: u32, access: u32) -> Result<(), Errno> {
    if access & IBV_ACCESS_MW_BIND != 0 {
        return process.windows.withdraw_region(process, key);
    }
    process.keys.revoke(&process.info().keys, key);
    Ok(())
}
