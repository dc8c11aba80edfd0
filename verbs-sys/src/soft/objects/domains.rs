//! Protection domains, the parent domains that are made of them, thread domains, and what other contexts
//! of this process import.

use core::ffi::c_int;
use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use rustix::io::Errno;

use super::super::device::{context, is_inherited};
use super::super::process::Process;
use super::pointer;
use crate::ffi::*;

/// What keys and queue pairs have in common that belong together: a number. Several handles may stand
/// for it.
#[derive(Debug)]
pub(in crate::soft) struct Domain {
    process: Weak<Process>,
    id: u32,
    /// What was made in it, by whatever handle.
    users: AtomicU32,
}

impl Drop for Domain {
    fn drop(&mut self) {
        if let Some(process) = self.process.upgrade() {
            process.pd_ids.give(self.id);
        }
    }
}

/// The domains of a process that can be imported, by their numbers. They do not keep the process.
#[derive(Debug, Default)]
pub(in crate::soft) struct Domains {
    by_id: Mutex<HashMap<u32, Weak<Domain>>>,
}

impl Domains {
    fn lock(&self) -> MutexGuard<'_, HashMap<u32, Weak<Domain>>> {
        self.by_id.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Beside [`Pd::children`]: the handle was given up, and its last child frees it.
const ORPHANED: u32 = 1 << 31;

/// A handle to a protection domain. The C structure comes first: its address is the handle.
#[repr(C)]
pub(in crate::soft) struct Pd {
    pub(in crate::soft) pd: ibv_pd,
    /// The number of its domain.
    pub(in crate::soft) id: u32,
    domain: Arc<Domain>,
    /// Regions, windows, queue pairs and shared receive queues made by this handle, and parent domains
    /// of it.
    children: AtomicU32,
    /// Of a parent domain: what it is made of; the second may be null.
    made_of: Option<(*mut ibv_pd, *mut ibv_td)>,
}

impl Pd {
    fn handle(
        context: *mut ibv_context,
        domain: Arc<Domain>,
        made_of: Option<(*mut ibv_pd, *mut ibv_td)>,
    ) -> *mut ibv_pd {
        let id = domain.id;
        let pd = Self {
            pd: ibv_pd {
                context,
                handle: id,
            },
            id,
            domain,
            children: AtomicU32::new(0),
            made_of,
        };
        Box::into_raw(Box::new(pd)).cast()
    }

    /// Something was made in it.
    pub(in crate::soft) fn enter(&self) {
        self.children.fetch_add(1, Ordering::Relaxed);
        self.domain.users.fetch_add(1, Ordering::Relaxed);
    }

    /// Something that was made in it has gone.
    ///
    /// # Safety
    ///
    /// The handle is one of this provider, and not freed: it was entered once more than it was left.
    pub(in crate::soft) unsafe fn leave(handle: *mut ibv_pd) {
        // SAFETY: by the caller's promise.
        let pd = unsafe { &*handle.cast::<Self>() };
        pd.domain.users.fetch_sub(1, Ordering::Release);
        if pd.children.fetch_sub(1, Ordering::AcqRel) == ORPHANED | 1 {
            // SAFETY: it was given up, and nothing refers to it any more.
            drop(unsafe { Box::from_raw(handle.cast::<Self>()) });
        }
    }
}

/// A thread domain. The C structure comes first: its address is the handle.
#[repr(C)]
struct Td {
    td: ibv_td,
    /// Parent domains made of it.
    users: AtomicU32,
}

// Every function below keeps the contract of `Provider` or of `verbs_context`: handles are live
// objects of this provider, other pointers are valid as the man page of the call says.

pub(in crate::soft) unsafe fn alloc_pd(handle: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: see above.
    let context = unsafe { context(handle) };
    pointer(context.process().and_then(|process| {
        let id = process.pd_ids.take().ok_or(Errno::NOMEM)?;
        let domain = Arc::new(Domain {
            process: Arc::downgrade(process),
            id,
            users: AtomicU32::new(0),
        });
        process.domains.lock().insert(id, Arc::downgrade(&domain));
        Ok(Pd::handle(handle, domain, None))
    }))
}

/// Also of a parent domain, whose own is left as it is.
pub(in crate::soft) unsafe fn dealloc_pd(handle: *mut ibv_pd) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    // SAFETY: see above.
    let pd = unsafe { &*handle.cast::<Pd>() };
    let made_of = pd.made_of;
    let users = match made_of {
        Some(_) => &pd.children,
        None => &pd.domain.users,
    };
    if users.load(Ordering::Acquire) != 0 {
        return libc::EBUSY;
    }
    match made_of {
        None => {
            if let Some(process) = pd.domain.process.upgrade() {
                process.domains.lock().remove(&pd.id);
            }
        }
        Some((base, td)) => {
            // SAFETY: a thread domain outlives the parent domains that are made of it.
            if let Some(td) = unsafe { td.cast::<Td>().as_ref() } {
                td.users.fetch_sub(1, Ordering::Release);
            }
            // SAFETY: entered when the parent domain was made.
            unsafe { Pd::leave(base) };
        }
    }
    // SAFETY: see above; nothing refers to it any more.
    drop(unsafe { Box::from_raw(handle.cast::<Pd>()) });
    0
}

/// ibv_alloc_parent_domain(3). The device has no buffers that a domain's own allocators could give: they
/// are taken, and not called.
pub(in crate::soft) unsafe extern "C" fn alloc_parent_domain(
    handle: *mut ibv_context,
    attr: *mut ibv_parent_domain_init_attr,
) -> *mut ibv_pd {
    // SAFETY: see above.
    let attr = unsafe { &*attr };
    let known = IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS | IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT;
    // SAFETY: null, or a live domain, by the man page.
    let base = unsafe { attr.pd.cast::<Pd>().as_ref() };
    // SAFETY: null, or a live thread domain, by the man page.
    let td = unsafe { attr.td.cast::<Td>().as_ref() };
    let is_ours = |other: *mut ibv_context| other == handle;
    pointer((|| {
        let base = base.filter(|base| is_ours(base.pd.context));
        let base = base.ok_or(Errno::INVAL)?;
        if attr.comp_mask & !known != 0 || td.is_some_and(|td| !is_ours(td.td.context)) {
            return Err(Errno::INVAL);
        }
        base.enter();
        if let Some(td) = td {
            td.users.fetch_add(1, Ordering::Relaxed);
        }
        let domain = Arc::clone(&base.domain);
        Ok(Pd::handle(handle, domain, Some((attr.pd, attr.td))))
    })())
}

pub(in crate::soft) unsafe extern "C" fn alloc_td(
    handle: *mut ibv_context,
    attr: *mut ibv_td_init_attr,
) -> *mut ibv_td {
    // SAFETY: see above.
    let known = unsafe { (*attr).comp_mask } == 0;
    pointer(known.then_some(()).ok_or(Errno::INVAL).map(|()| {
        let td = Td {
            td: ibv_td { context: handle },
            users: AtomicU32::new(0),
        };
        Box::into_raw(Box::new(td)).cast()
    }))
}

/// Fails with `EBUSY` while a parent domain is made of it.
pub(in crate::soft) unsafe extern "C" fn dealloc_td(handle: *mut ibv_td) -> c_int {
    // SAFETY: see above.
    let td = unsafe { &*handle.cast::<Td>() };
    if td.users.load(Ordering::Acquire) != 0 {
        return libc::EBUSY;
    }
    // SAFETY: see above; nothing refers to it any more.
    drop(unsafe { Box::from_raw(handle.cast::<Td>()) });
    0
}

/// ibv_import_pd(3): another handle to a domain of this process.
#[cfg(any(feature = "drop-in", test))]
pub(crate) unsafe fn import_pd(handle: *mut ibv_context, number: u32) -> *mut ibv_pd {
    // SAFETY: see above.
    let context = unsafe { context(handle) };
    pointer(context.process().and_then(|process| {
        let found = process.domains.lock().get(&number).map(Weak::upgrade);
        let domain = found.flatten().ok_or(Errno::INVAL)?;
        Ok(Pd::handle(handle, domain, None))
    }))
}

/// ibv_unimport_pd(3): gives up the handle. What was made by it stays, and keeps the domain.
#[cfg(any(feature = "drop-in", test))]
pub(crate) unsafe fn unimport_pd(handle: *mut ibv_pd) {
    // SAFETY: see above.
    let pd = unsafe { &*handle.cast::<Pd>() };
    if pd.children.fetch_or(ORPHANED, Ordering::AcqRel) == 0 {
        // SAFETY: see above; nothing refers to it any more.
        drop(unsafe { Box::from_raw(handle.cast::<Pd>()) });
    }
}
