//! Posting what is straight without a fence, by the thread that has the bias of the send lock.
//!
//! What most requests are executed by calls nothing, and is jumped to: it keeps nothing on the stack, whose stores would
//! fill the store buffer while those to the peer's lines wait for them.

use std::hint::black_box;

use super::super::Qp;
use crate::ffi::ibv_send_wr;
use crate::soft::bias::Inside;
use crate::soft::link::Link;

/// Posts a WRITE or a READ without a fence, if it is a straight one that needs no call.
///
/// A C function, which does not unwind, is jumped to from another, and needs no stack of its own if that is all it calls.
///
/// # Safety
///
/// As for `post_send`.
#[inline(never)]
pub(super) unsafe extern "C" fn post_alone<const WRITE: bool>(
    qp: &Qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> i32 {
    if let Some(inside) = qp.enter_sends() {
        let executed = qp
            .unfenced_link()
            // SAFETY: by the caller's promise; the lock is held.
            .and_then(|link| unsafe { qp.execute_alone::<WRITE, true>(wr, link) });
        match executed {
            Some(completed) if completed && qp.send_cq.has_notes() => return tell(qp, inside),
            Some(_) => {
                qp.leave_sends(inside);
                return 0;
            }
            None => qp.leave_sends(inside),
        }
    }
    // SAFETY: by the caller's promise.
    unsafe { post_apart::<WRITE>(qp, wr, bad) }
}

/// Tells of a completion, and leaves; 0, which whoever jumps here shall not know.
#[inline(never)]
extern "C" fn tell(qp: &Qp, inside: Inside) -> i32 {
    qp.send_cq.notify(qp, false);
    qp.leave_sends(inside);
    black_box(0)
}

/// The same for one that something has to be looked up or called for.
///
/// # Safety
///
/// As for `post_send`.
#[inline(never)]
unsafe extern "C" fn post_apart<const WRITE: bool>(
    qp: &Qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> i32 {
    if let Some(inside) = qp.enter_sends() {
        let executed = qp
            .unfenced_link()
            // SAFETY: by the caller's promise; the lock is held.
            .and_then(|link| unsafe { qp.execute_lone::<WRITE>(wr, link) });
        qp.leave_sends(inside);
        if executed.is_some() {
            return 0;
        }
    }
    // SAFETY: by the caller's promise.
    unsafe { qp.post_alone_fenced::<WRITE>(wr, bad) }
}

impl Qp {
    /// Posts a chain, the run at its front without a fence.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(never)]
    pub(super) unsafe fn post_run(
        &self,
        mut wr: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> i32 {
        if let Some(inside) = self.enter_sends() {
            if let Some(link) = self.unfenced_link() {
                // SAFETY: by the caller's promise; the lock is held.
                wr = unsafe { self.execute_front_in_place(wr, link) };
            }
            if wr.is_null() {
                self.leave_sends(inside);
                return 0;
            }
            // Nobody else's requests come between those of a chain.
            self.leave_and_lock_sends(inside);
        } else {
            self.lock_sends();
        }
        // SAFETY: by the caller's promise; the lock is held.
        unsafe { self.post_locked(wr, bad) }
    }

    /// Posts a WRITE or a READ behind a fence.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(never)]
    unsafe fn post_alone_fenced<const WRITE: bool>(
        &self,
        wr: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> i32 {
        self.lock_sends();
        self.renew_known();
        // SAFETY: the lock is held.
        let link = unsafe { self.link() };
        // SAFETY: by the caller's promise.
        let executed = link.and_then(|link| unsafe { self.execute_lone::<WRITE>(wr, link) });
        if executed.is_none() {
            // SAFETY: as above.
            return unsafe { self.post_rest(wr, bad) };
        }
        self.count_post();
        self.unlock_sends();
        0
    }

    /// Executes a WRITE or a READ if it is of the straight kind, and tells of its completion. The send lock is
    /// held, and what is known of keys holds.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    unsafe fn execute_lone<const WRITE: bool>(
        &self,
        wr: *const ibv_send_wr,
        link: &Link,
    ) -> Option<()> {
        // SAFETY: as for this function.
        let completed = unsafe { self.execute_alone::<WRITE, false>(wr, link) }?;
        if completed {
            self.send_cq.notify(self, false);
        }
        Some(())
    }
}
