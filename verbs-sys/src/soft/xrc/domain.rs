//! XRC domains: ibv_open_xrcd(3).

use core::ffi::c_int;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use rustix::io::Errno;

use crate::ffi::*;
use crate::soft::cq::{Cq, Usage};
use crate::soft::device::Context;
use crate::soft::process::Process;
use crate::soft::qp::Qp;

/// What queue pairs and shared receive queues have in common that belong together.
#[derive(Debug)]
pub(in crate::soft) struct Domain {
    process: Arc<Process>,
    /// No protection domain of the process has this number.
    pub id: u32,
    /// Its queue pairs.
    qps: RwLock<Vec<Arc<Qp>>>,
    /// In the place of the completion queues that its queue pairs do not have: nobody polls it.
    pub no_queue: Arc<Cq>,
    /// What it is known by. Open, so that no other file gets its number.
    _file: Option<OwnedFd>,
}

impl Domain {
    fn new(
        context: &Context,
        handle: *mut ibv_context,
        file: Option<OwnedFd>,
    ) -> Result<Arc<Self>, Errno> {
        let process = context.process()?;
        let mut fields = ibv_cq::zeroed();
        (fields.context, fields.cqe) = (handle, 1);
        let no_queue = Cq::new(process, &context.events, fields, None, Usage::default())?;
        let Some(id) = process.pd_ids.take() else {
            let _ = no_queue.retire();
            return Err(Errno::NOMEM);
        };
        Ok(Arc::new(Self {
            process: Arc::clone(process),
            id,
            qps: RwLock::default(),
            no_queue,
            _file: file,
        }))
    }

    pub(in crate::soft) fn add(&self, qp: Arc<Qp>) {
        let mut qps = self.qps.write().unwrap_or_else(PoisonError::into_inner);
        qps.push(qp);
    }

    pub(in crate::soft) fn remove(&self, qpn: u32) {
        let mut qps = self.qps.write().unwrap_or_else(PoisonError::into_inner);
        qps.retain(|qp| qp.qpn != qpn);
    }

    fn each_qp(&self, act: impl Fn(&Qp)) {
        let qps = self.qps.read().unwrap_or_else(PoisonError::into_inner);
        qps.iter().for_each(|qp| act(qp));
    }

    /// Takes what has come for any shared receive queue, in a poll.
    pub(in crate::soft) fn take_in(&self) {
        self.each_qp(Qp::take_in_and_tell);
    }

    /// Waits for other threads that are making completions, until they have told of them.
    pub(in crate::soft) fn let_others_tell(&self) {
        self.each_qp(Qp::let_others_tell);
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        let _ = self.no_queue.retire();
        self.process.pd_ids.give(self.id);
    }
}

/// A handle to a domain. The C structure comes first: its address is the handle.
#[repr(C)]
pub(in crate::soft) struct Handle {
    pub xrcd: ibv_xrcd,
    member: Membership,
}

/// A handle that was used to make something, which knows its domain by this.
#[derive(Clone, Debug)]
pub(in crate::soft) struct Membership {
    pub domain: Arc<Domain>,
    /// What was made by the handle.
    users: Arc<AtomicU32>,
}

impl Membership {
    /// What was made has gone.
    pub(in crate::soft) fn leave(&self) {
        self.users.fetch_sub(1, Ordering::Release);
    }
}

impl Handle {
    /// ibv_open_xrcd(3). A domain that has a file is known by that within this process.
    ///
    /// # Errors
    /// As the kernel's: `EINVAL` without both attributes, or if the domain exists and shall not; `EAGAIN` if it does not
    /// exist and shall not be made; `EBADF`.
    pub(in crate::soft) fn open(
        context: &Context,
        handle: *mut ibv_context,
        attr: &ibv_xrcd_init_attr,
    ) -> Result<Box<Self>, Errno> {
        let wanted = IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS;
        if attr.comp_mask != wanted || attr.oflags & !(libc::O_CREAT | libc::O_EXCL) != 0 {
            return Err(Errno::INVAL);
        }
        let domain = if attr.fd == -1 {
            Domain::new(context, handle, None)?
        } else {
            of_file(context, handle, attr.fd, attr.oflags)?
        };
        Ok(Box::new(Self {
            xrcd: ibv_xrcd { context: handle },
            member: Membership {
                domain,
                users: Arc::default(),
            },
        }))
    }

    /// Something is made by this handle.
    pub(in crate::soft) fn enter(&self) -> Membership {
        self.member.users.fetch_add(1, Ordering::Relaxed);
        self.member.clone()
    }

    pub(in crate::soft) fn is_used(&self) -> bool {
        self.member.users.load(Ordering::Acquire) != 0
    }
}

/// The domain of a file.
fn of_file(
    context: &Context,
    handle: *mut ibv_context,
    fd: c_int,
    oflags: c_int,
) -> Result<Arc<Domain>, Errno> {
    if fd < 0 {
        return Err(Errno::BADF);
    }
    // SAFETY: it is not -1; whether it is open, the kernel says, and it is not closed here.
    let file = unsafe { BorrowedFd::borrow_raw(fd) };
    let file = rustix::io::fcntl_dupfd_cloexec(file, 0)?;
    let stat = rustix::fs::fstat(&file)?;
    let mut domains = context
        .process()?
        .xrc
        .domains
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    domains.retain(|_, domain| domain.strong_count() != 0);
    let place = (stat.st_dev, stat.st_ino);
    match domains.get(&place).and_then(Weak::upgrade) {
        Some(_) if oflags & libc::O_EXCL != 0 => Err(Errno::INVAL),
        Some(domain) => Ok(domain),
        None if oflags & libc::O_CREAT == 0 => Err(Errno::AGAIN),
        None => {
            let domain = Domain::new(context, handle, Some(file))?;
            domains.insert(place, Arc::downgrade(&domain));
            Ok(domain)
        }
    }
}
