//! Requests about memory windows: binding one, and invalidating a key.

use std::sync::atomic::Ordering;

use super::super::Qp;
use super::{Request, Step, success};
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, IBV_ACCESS_ZERO_BASED, IBV_MW_TYPE_2, IBV_QPS_ERR, IBV_QPS_RTS,
    IBV_QPS_SQD, IBV_WC_BIND_MW, IBV_WC_LOCAL_INV, IBV_WC_MW_BIND_ERR, IBV_WR_BIND_MW,
    IBV_WR_LOCAL_INV, ibv_mw_bind_info, ibv_send_wr_bind_mw,
};
use crate::soft::mw::{Progress, Refused, Wanted};

/// What a window can allow.
const WINDOW_ACCESS: u32 =
    IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;

/// A validated bind, in the fields of a request that has no other use for them.
#[derive(Clone, Copy, Debug)]
pub(in crate::soft) struct Bind(Wanted);

impl Bind {
    /// A bind of ibv_post_send(3), of a window of type 2.
    ///
    /// # Safety
    ///
    /// The window is live, and the region live or null.
    pub(super) unsafe fn posted(bind: &ibv_send_wr_bind_mw) -> Result<Self, i32> {
        // SAFETY: by the caller's promise.
        let window = unsafe { bind.mw.as_ref() }.ok_or(libc::EINVAL)?;
        let names_it = bind.rkey >> 8 == window.handle;
        if window.type_ != IBV_MW_TYPE_2 || !names_it || bind.bind_info.mr.is_null() {
            return Err(libc::EINVAL);
        }
        // SAFETY: by the caller's promise.
        unsafe { Self::new(bind.rkey, &bind.bind_info) }
    }

    /// # Safety
    ///
    /// The region is live or null.
    pub(in crate::soft) unsafe fn new(key: u32, info: &ibv_mw_bind_info) -> Result<Self, i32> {
        if info.mw_access_flags & IBV_ACCESS_ZERO_BASED != 0 {
            return Err(libc::EOPNOTSUPP);
        }
        // Whoever owns the region may write to it in any case.
        if info.mw_access_flags & !(WINDOW_ACCESS | IBV_ACCESS_LOCAL_WRITE) != 0 {
            return Err(libc::EINVAL);
        }
        // SAFETY: by the caller's promise.
        let region = unsafe { info.mr.as_ref() }.map_or(0, |region| region.lkey);
        Ok(Self(Wanted {
            key,
            region,
            addr: info.addr,
            len: info.length,
            access: info.mw_access_flags & WINDOW_ACCESS,
        }))
    }

    pub(super) fn request(&self, flags: u32) -> Request<'static> {
        Request {
            opcode: IBV_WR_BIND_MW,
            flags,
            imm: self.0.region,
            remote_addr: self.0.addr,
            rkey: self.0.key,
            compare_add: self.0.len,
            swap: self.0.access.into(),
            srqn: 0,
            sges: &[],
        }
    }

    fn of(request: &Request<'_>) -> Self {
        Self(Wanted {
            key: request.rkey,
            region: request.imm,
            addr: request.remote_addr,
            len: request.compare_add,
            access: request.swap as u32,
        })
    }
}

/// Whether a request concerns nobody but this device.
#[inline]
pub(super) fn is_about_window(opcode: u32) -> bool {
    matches!(opcode, IBV_WR_BIND_MW | IBV_WR_LOCAL_INV)
}

impl Qp {
    /// Posts what ibv_bind_mw(3) asks for.
    pub(in crate::soft) fn post_bind(
        &self,
        wr_id: u64,
        flags: u32,
        bind: &Bind,
    ) -> Result<(), i32> {
        let is_open = matches!(self.state(), IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_ERR);
        if !is_open || !self.executes(IBV_WR_BIND_MW) {
            return Err(libc::EINVAL);
        }
        self.lock_sends();
        self.post_burst(|owed, bell| {
            // SAFETY: it has no data.
            unsafe { self.enqueue(wr_id, &bind.request(flags), owed, bell) }
        })
    }

    /// Executes a request about a window, once everything before it has ended: so the key that it
    /// takes back is not in use by this queue pair's own earlier requests either.
    #[cold]
    pub(super) fn manage_window(&self, position: u32, request: &Request<'_>) -> Step {
        if self.sq.done.load(Ordering::Relaxed) != position {
            return Step::Wait;
        }
        let by = self.window_user(self.send_epoch());
        let windows = &self.process.windows;
        let (opcode, result) = if request.opcode == IBV_WR_BIND_MW {
            let Bind(wanted) = Bind::of(request);
            (IBV_WC_BIND_MW, windows.bind(&by, &wanted))
        } else {
            (IBV_WC_LOCAL_INV, windows.invalidate(&by, request.imm))
        };
        match result {
            Ok(Progress::Done) => Step::Done(success(opcode, 0)),
            Ok(Progress::Later) => Step::Wait,
            Err(Refused) => Step::Failed(IBV_WC_MW_BIND_ERR),
        }
    }
}
