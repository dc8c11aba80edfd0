//! Memory windows: keys for a part of a region that can be taken back without deregistering it.
//!
//! A window has a slot of the key table for as long as it lives; binding it publishes a range there.
//! Taking a binding back is deregistration's protocol (`epoch.rs`), with one difference. Whoever binds
//! or invalidates executes a request, under an epoch of its own that others may be waiting for. So
//! nothing here waits: the key is cleared, the epochs that are odd at that moment are noted, and the
//! request is tried again until each of them has changed.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::keys::{self, Range};
use super::layout::Sends;
use super::link::{Link, Via};
use super::process::Process;
use super::qp::Qp;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_MW_BIND, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_WRITE,
    IBV_MW_TYPE_1, IBV_MW_TYPE_2, IBV_WC_MW_BIND_ERR, ibv_mw_type,
};

/// The windows of a process.
#[derive(Debug, Default)]
pub(super) struct Windows {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// By slot in the key table.
    windows: HashMap<u32, Window>,
    /// How many windows are bound to a region, by its key.
    bound: HashMap<u32, u32>,
}

#[derive(Debug)]
struct Window {
    kind: ibv_mw_type,
    pd: u32,
    /// The key it has, or had last.
    key: u32,
    binding: Binding,
    /// Being deallocated.
    closing: bool,
}

#[derive(Debug)]
enum Binding {
    Free,
    Bound {
        region: u32,
        /// The queue pair that alone serves it; 0 for type 1.
        qpn: u32,
    },
    /// Taken back, but perhaps not by everybody who saw it.
    Leaving {
        qpn: u32,
        /// `None`: not looked for yet.
        users: Option<Vec<Execution>>,
    },
}

/// The queue pair that binds or invalidates.
pub(super) struct Binder<'a> {
    pub process: &'a Arc<Process>,
    pub qp: &'a Qp,
    pub qpn: u32,
    pub pd: u32,
    /// The lock it executes under.
    pub held: &'a AtomicU64,
}

/// What a window shall be bound to.
#[derive(Clone, Copy, Debug)]
pub(super) struct Wanted {
    /// The key it shall have; its upper bits name the window.
    pub key: u32,
    /// The region's lkey.
    pub region: u32,
    pub addr: u64,
    /// 0 unbinds a window of type 1.
    pub len: u64,
    pub access: u32,
}

/// How far it got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Progress {
    Done,
    /// Somebody may still be using the old key, which is dead already: try again.
    Later,
}

/// The request is wrong; nothing has changed.
#[derive(Debug)]
pub(super) struct Refused;

/// Somebody who was executing requests.
#[derive(Debug)]
pub(super) struct Execution {
    place: Place,
    /// Which of the place's words is odd, and what it is.
    word: usize,
    epoch: u64,
}

/// Where requests are executed.
#[derive(Clone, Debug)]
pub(super) enum Place {
    /// By the requester at the other end of a link.
    Requester(Arc<Link>),
    /// By the responder of our own queue pair with this index.
    Responder(usize),
}

impl Place {
    fn words<'a>(&'a self, process: &'a Process) -> impl Iterator<Item = &'a AtomicU64> {
        let (sends, receives) = match self {
            Self::Requester(link) => (Some(&link.info().sends.0), None),
            Self::Responder(index) => (None, Some(&process.info().qps[*index].rq_epoch.0)),
        };
        sends.into_iter().flat_map(Sends::epochs).chain(receives)
    }
}

impl Execution {
    /// What executes at a place now, but for the caller, who holds `held`. Posts are
    /// [fenced](super::fencing).
    pub(super) fn now<'a>(
        process: &'a Process,
        place: &'a Place,
        held: &'a AtomicU64,
    ) -> impl Iterator<Item = Self> + 'a {
        let words = place.words(process).enumerate();
        words.filter_map(move |(word, odd)| {
            let epoch = odd.load(Ordering::SeqCst);
            let executes = epoch & 1 != 0 && !std::ptr::eq(odd, held);
            executes.then(|| Self {
                place: place.clone(),
                word,
                epoch,
            })
        })
    }

    fn has_ended(&self, process: &Process) -> bool {
        let mut words = self.place.words(process);
        words
            .nth(self.word)
            .is_none_or(|word| word.load(Ordering::Acquire) != self.epoch)
            || matches!(&self.place, Place::Requester(link)
                if matches!(&link.via, Via::Shm(peer) if peer.has_exited()))
    }
}

impl Windows {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// ibv_alloc_mw(3): the window's first key, which names nothing.
    pub(super) fn alloc(
        &self,
        process: &Process,
        pd: u32,
        kind: ibv_mw_type,
    ) -> Result<u32, Errno> {
        if !matches!(kind, IBV_MW_TYPE_1 | IBV_MW_TYPE_2) {
            return Err(Errno::INVAL);
        }
        let key = process.keys.reserve(&process.info().keys)?;
        let window = Window {
            kind,
            pd,
            key,
            binding: Binding::Free,
            closing: false,
        };
        self.lock().windows.insert(key >> 8, window);
        Ok(key)
    }

    /// ibv_dealloc_mw(3): returns when no operation in flight uses the window. No lock is held.
    ///
    /// # Errors
    /// `EBUSY` if a stopped peer may; the window is unbound, and can be deallocated later.
    pub(super) fn dealloc(&self, process: &Process, slot: u32) -> Result<(), Errno> {
        if let Some((window, bound)) = self.lock().find(slot) {
            window.closing = true;
            window.revoke(process, bound);
        }
        process.quiesce()?;
        self.lock().windows.remove(&slot);
        process.keys.recycle(slot << 8);
        Ok(())
    }

    /// Binds a window, after taking back what a window of type 1 was bound to.
    pub(super) fn bind(&self, by: &Binder<'_>, wanted: &Wanted) -> Result<Progress, Refused> {
        let mut state = self.lock();
        let (window, bound) = state.find(wanted.key >> 8).ok_or(Refused)?;
        let is_type_1 = window.kind == IBV_MW_TYPE_1;
        let is_bound = matches!(window.binding, Binding::Bound { .. });
        if window.closing || window.pd != by.pd || (is_bound && !is_type_1) {
            return Err(Refused);
        }
        let range = if wanted.len == 0 && is_type_1 {
            None
        } else {
            Some(wanted.range(by.process, window.pd)?)
        };
        window.revoke(by.process, bound);
        if !window.has_left(by) {
            return Ok(Progress::Later);
        }
        window.key = wanted.key;
        if let Some(range) = range {
            let (pd, qpn) = if is_type_1 {
                (keys::window_in_pd(window.pd), 0)
            } else {
                (keys::window_of_qp(by.qpn), by.qpn)
            };
            let region = wanted.region;
            *bound.entry(region).or_default() += 1;
            window.binding = Binding::Bound { region, qpn };
            let table = &by.process.info().keys;
            by.process
                .keys
                .publish_as(table, wanted.key, Range { pd, ..range });
        }
        Ok(Progress::Done)
    }

    /// Invalidates the key of a window of type 2, which must be bound to the queue pair that does.
    pub(super) fn invalidate(&self, by: &Binder<'_>, key: u32) -> Result<Progress, Refused> {
        let mut state = self.lock();
        let (window, bound) = state.find(key >> 8).ok_or(Refused)?;
        let is_theirs = match window.binding {
            Binding::Bound { qpn, .. } | Binding::Leaving { qpn, .. } => qpn == by.qpn,
            Binding::Free => false,
        };
        if window.closing || window.kind != IBV_MW_TYPE_2 || window.key != key || !is_theirs {
            return Err(Refused);
        }
        window.revoke(by.process, bound);
        Ok(if window.has_left(by) {
            Progress::Done
        } else {
            Progress::Later
        })
    }

    /// Withdraws a region's key, unless a window is bound to it.
    ///
    /// # Errors
    /// `EBUSY` if one is.
    pub(super) fn withdraw_region(&self, process: &Process, key: u32) -> Result<(), Errno> {
        // Nobody binds in between.
        let state = self.lock();
        if state.bound.contains_key(&key) {
            return Err(Errno::BUSY);
        }
        process.keys.revoke(&process.info().keys, key);
        Ok(())
    }

    /// Unbinds what is bound to a queue pair that nobody is connected to any more.
    pub(super) fn release_qp(&self, process: &Process, number: u32) {
        let mut state = self.lock();
        let State { windows, bound } = &mut *state;
        for window in windows.values_mut() {
            let is_theirs = matches!(window.binding,
                Binding::Bound { qpn, .. } | Binding::Leaving { qpn, .. } if qpn == number);
            if is_theirs {
                window.revoke(process, bound);
                window.binding = Binding::Free;
            }
        }
    }
}

impl State {
    fn find(&mut self, slot: u32) -> Option<(&mut Window, &mut HashMap<u32, u32>)> {
        Some((self.windows.get_mut(&slot)?, &mut self.bound))
    }
}

impl Window {
    /// Makes the key dead, if it is not.
    fn revoke(&mut self, process: &Process, bound: &mut HashMap<u32, u32>) {
        let Binding::Bound { region, qpn } = self.binding else {
            return;
        };
        process.keys.revoke(&process.info().keys, self.key);
        if let Some(count) = bound.get_mut(&region) {
            *count -= 1;
            if *count == 0 {
                bound.remove(&region);
            }
        }
        self.binding = Binding::Leaving { qpn, users: None };
    }

    /// Whether everybody who may have seen the last binding has ended what they were at.
    fn has_left(&mut self, by: &Binder<'_>) -> bool {
        if let Binding::Leaving { qpn, users } = &mut self.binding {
            if users.is_none() {
                by.process.fence_posts();
                *users = if *qpn == by.qpn {
                    let mut executions = Vec::new();
                    by.qp.note_window_users(by.held, &mut executions);
                    Some(executions)
                } else {
                    by.process.window_users(by.held)
                };
            }
            let Some(users) = users else { return false };
            users.retain(|user| !user.has_ended(by.process));
            if !users.is_empty() {
                return false;
            }
            self.binding = Binding::Free;
        }
        true
    }
}

impl Wanted {
    /// The range as it will be published, but for whom it serves.
    fn range(&self, process: &Process, pd: u32) -> Result<Range, Refused> {
        let region = keys::lookup(&process.info().keys, self.region).ok_or(Refused)?;
        let changes = self.access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
        let needed = if changes {
            IBV_ACCESS_MW_BIND | IBV_ACCESS_LOCAL_WRITE
        } else {
            IBV_ACCESS_MW_BIND
        };
        let len = usize::try_from(self.len).map_err(|_| Refused)?;
        if len == 0 {
            return Err(Refused);
        }
        let offset = region
            .check(pd, self.addr, len, needed, IBV_WC_MW_BIND_ERR)
            .map_err(|_| Refused)?;
        Ok(Range {
            access: self.access,
            addr: self.addr,
            len: self.len,
            offset: region.offset().wrapping_add(offset),
            arena: region.arena(),
            pd,
            iova: None,
        })
    }
}
