//! Posting call by call: ibv_wr_post(3).
//!
//! What is built between ibv_wr_start and ibv_wr_complete is a chain of the requests that ibv_post_send
//! takes, and it is posted as such, if all of it can be. Lists and inline data are kept beside it, in memory
//! that is used again for the next.

use core::ffi::{c_int, c_uint, c_void};
use std::cell::UnsafeCell;
use std::ops::Range;
use std::ptr;

use super::Qp;
use crate::ffi::*;
use crate::soft::turn::Turn;

/// The flags of a request that its builder takes over.
const FLAGS: c_uint = IBV_SEND_FENCE | IBV_SEND_SIGNALED | IBV_SEND_SOLICITED;

/// What a thread has while it builds requests.
pub(super) struct Builder {
    turn: Turn,
    /// Guarded by the turn.
    batch: UnsafeCell<Batch>,
}

// SAFETY: the batch is reached by whoever has the turn.
unsafe impl Sync for Builder {}
// SAFETY: the pointers in it are used by whoever has the turn, between start and end of a batch.
unsafe impl Send for Builder {}

/// Requests that are not posted yet.
#[derive(Default)]
struct Batch {
    requests: Vec<Built>,
    sges: Vec<ibv_sge>,
    inline: Vec<u8>,
    /// What is wrong with the first that cannot be posted.
    refused: c_int,
}

struct Built {
    wr: ibv_send_wr,
    data: Data,
}

/// Where a request has its data.
enum Data {
    /// Elements of the batch's list.
    Listed(Range<usize>),
    /// Bytes of its inline data.
    Inline(Range<usize>),
}

impl Builder {
    pub(super) fn new() -> Self {
        Self {
            turn: Turn::default(),
            batch: UnsafeCell::default(),
        }
    }
}

impl Batch {
    fn clear(&mut self) {
        self.requests.clear();
        self.sges.clear();
        self.inline.clear();
        self.refused = 0;
    }

    fn refuse(&mut self, code: c_int) {
        if self.refused == 0 {
            self.refused = code;
        }
    }

    /// The request that was begun last, for its setters.
    fn last(&mut self) -> Option<&mut Built> {
        if self.requests.is_empty() {
            self.refuse(libc::EINVAL);
        }
        self.requests.last_mut()
    }

    /// Gives the last request a list.
    fn set_list(&mut self, list: impl Iterator<Item = ibv_sge>) {
        let start = self.sges.len();
        self.sges.extend(list);
        let data = Data::Listed(start..self.sges.len());
        if let Some(built) = self.last() {
            built.data = data;
            built.wr.send_flags &= !IBV_SEND_INLINE;
        }
    }

    /// Makes the last request one with inline data, from `start` on.
    fn set_inline(&mut self, start: usize) {
        let data = Data::Inline(start..self.inline.len());
        if let Some(built) = self.last() {
            built.data = data;
            built.wr.send_flags |= IBV_SEND_INLINE;
        }
    }

    /// Makes a chain of the requests, now that nothing moves any more.
    fn link(&mut self) -> *mut ibv_send_wr {
        // Elements of inline data come behind all others.
        let inline = self.inline.as_ptr() as u64;
        for built in &self.requests {
            if let Data::Inline(bytes) = &built.data {
                self.sges.push(ibv_sge {
                    addr: inline + bytes.start as u64,
                    length: bytes.len() as u32,
                    lkey: 0,
                });
            }
        }
        let lists = self.sges.as_mut_ptr();
        let inlined = self
            .requests
            .iter()
            .filter(|built| matches!(built.data, Data::Inline(_)));
        let mut next_inline = self.sges.len() - inlined.count();
        for built in &mut self.requests {
            let (at, count) = match &built.data {
                Data::Listed(elements) => (elements.start, elements.len()),
                Data::Inline(_) => {
                    next_inline += 1;
                    (next_inline - 1, 1)
                }
            };
            built.wr.sg_list = lists.wrapping_add(at);
            built.wr.num_sge = c_int::try_from(count).unwrap_or(c_int::MAX);
        }
        let mut next = ptr::null_mut();
        for built in self.requests.iter_mut().rev() {
            built.wr.next = next;
            next = &raw mut built.wr;
        }
        next
    }
}

/// The functions that applications call.
pub(in crate::soft) fn offer(fields: &mut ibv_qp_ex) {
    fields.wr_atomic_cmp_swp = Some(wr_atomic_cmp_swp);
    fields.wr_atomic_fetch_add = Some(wr_atomic_fetch_add);
    fields.wr_bind_mw = Some(wr_bind_mw);
    fields.wr_local_inv = Some(wr_local_inv);
    fields.wr_rdma_read = Some(wr_rdma_read);
    fields.wr_rdma_write = Some(wr_rdma_write);
    fields.wr_rdma_write_imm = Some(wr_rdma_write_imm);
    fields.wr_send = Some(wr_send);
    fields.wr_send_imm = Some(wr_send_imm);
    fields.wr_send_inv = Some(wr_send_inv);
    fields.wr_send_tso = Some(wr_send_tso);
    fields.wr_set_ud_addr = Some(wr_set_ud_addr);
    fields.wr_set_xrc_srqn = Some(wr_set_xrc_srqn);
    fields.wr_set_inline_data = Some(wr_set_inline_data);
    fields.wr_set_inline_data_list = Some(wr_set_inline_data_list);
    fields.wr_set_sge = Some(wr_set_sge);
    fields.wr_set_sge_list = Some(wr_set_sge_list);
    fields.wr_start = Some(wr_start);
    fields.wr_complete = Some(wr_complete);
    fields.wr_abort = Some(wr_abort);
    fields.wr_atomic_write = Some(wr_atomic_write);
}

impl Qp {
    /// Whether it is posted to call by call.
    #[cfg(any(feature = "drop-in", test))]
    pub(in crate::soft) fn is_extended(&self) -> bool {
        self.builder.is_some()
    }

    /// Posts a batch: all of it, or nothing.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    unsafe fn post_batch(&self, batch: &mut Batch) -> c_int {
        if batch.refused != 0 || batch.requests.is_empty() {
            return batch.refused;
        }
        let first = batch.link();
        for built in &batch.requests {
            // SAFETY: by the caller's promise.
            if let Err(code) = unsafe { self.request(&built.wr) } {
                return code;
            }
        }
        let count = u32::try_from(batch.requests.len()).unwrap_or(u32::MAX);
        let mut bad = ptr::null_mut();
        // SAFETY: by the caller's promise; the chain was just made, and stays as it is.
        unsafe {
            if count == 1 {
                self.post_send(first, &raw mut bad)
            } else {
                self.post_whole(first, count, &raw mut bad)
            }
        }
    }
}

// Every function below keeps the contract of `ibv_qp_ex`: the handle is a live queue pair that was made
// with `IBV_QP_INIT_ATTR_SEND_OPS_FLAGS`, and the thread is between `wr_start` and `wr_complete` or
// `wr_abort`, but for `wr_start` itself.

/// The queue pair behind a handle.
///
/// # Safety
///
/// The handle is a live queue pair of this provider.
unsafe fn qp<'a>(handle: *mut ibv_qp_ex) -> &'a Qp {
    // SAFETY: the handle is the address of a `Qp` whose first field is the C structure.
    unsafe { &*handle.cast::<Qp>() }
}

/// Does something with what the thread builds.
///
/// # Safety
///
/// See above.
unsafe fn with_batch(handle: *mut ibv_qp_ex, act: impl FnOnce(&Qp, &mut Batch)) {
    // SAFETY: by the caller's promise.
    let qp = unsafe { qp(handle) };
    if let Some(builder) = &qp.builder {
        // SAFETY: this thread has the turn.
        act(qp, unsafe { &mut *builder.batch.get() });
    }
}

/// Begins a request.
///
/// # Safety
///
/// See above.
unsafe fn begin(
    handle: *mut ibv_qp_ex,
    opcode: ibv_wr_opcode,
    fill: impl FnOnce(&mut ibv_send_wr),
) {
    let mut wr = ibv_send_wr::zeroed();
    wr.opcode = opcode;
    // SAFETY: by the caller's promise, the application's fields are this thread's.
    unsafe {
        wr.wr_id = (*handle).wr_id;
        wr.send_flags = (*handle).wr_flags & FLAGS;
    }
    fill(&mut wr);
    // SAFETY: by the caller's promise.
    unsafe {
        with_batch(handle, |qp, batch| {
            if batch.requests.len() < qp.cap().max_send_wr as usize {
                batch.requests.push(Built {
                    wr,
                    data: Data::Listed(0..0),
                });
            } else {
                batch.refuse(libc::ENOMEM);
            }
        });
    }
}

unsafe extern "C" fn wr_start(handle: *mut ibv_qp_ex) {
    // SAFETY: see above.
    if let Some(builder) = &unsafe { qp(handle) }.builder {
        builder.turn.take();
        // SAFETY: this thread has the turn.
        unsafe { (*builder.batch.get()).clear() };
    }
}

unsafe extern "C" fn wr_complete(handle: *mut ibv_qp_ex) -> c_int {
    // SAFETY: see above.
    let qp = unsafe { qp(handle) };
    let Some(builder) = &qp.builder else {
        return libc::EINVAL;
    };
    // SAFETY: this thread has the turn. What the requests name is as the man page says.
    let code = unsafe { qp.post_batch(&mut *builder.batch.get()) };
    builder.turn.give();
    code
}

unsafe extern "C" fn wr_abort(handle: *mut ibv_qp_ex) {
    // SAFETY: see above.
    if let Some(builder) = &unsafe { qp(handle) }.builder {
        builder.turn.give();
    }
}

unsafe extern "C" fn wr_rdma_write(handle: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    let rdma = ibv_send_wr_rdma { remote_addr, rkey };
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_RDMA_WRITE, |wr| wr.wr.rdma = rdma) };
}

unsafe extern "C" fn wr_rdma_write_imm(
    handle: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    imm_data: u32,
) {
    let fill = |wr: &mut ibv_send_wr| {
        wr.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey };
        wr.imm_data = imm_data;
    };
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_RDMA_WRITE_WITH_IMM, fill) };
}

unsafe extern "C" fn wr_rdma_read(handle: *mut ibv_qp_ex, rkey: u32, remote_addr: u64) {
    let rdma = ibv_send_wr_rdma { remote_addr, rkey };
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_RDMA_READ, |wr| wr.wr.rdma = rdma) };
}

unsafe extern "C" fn wr_atomic_cmp_swp(
    handle: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare_add: u64,
    swap: u64,
) {
    let atomic = ibv_send_wr_atomic {
        remote_addr,
        compare_add,
        swap,
        rkey,
    };
    // SAFETY: see above.
    unsafe {
        begin(handle, IBV_WR_ATOMIC_CMP_AND_SWP, |wr| {
            wr.wr.atomic = atomic
        })
    };
}

unsafe extern "C" fn wr_atomic_fetch_add(
    handle: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    compare_add: u64,
) {
    let atomic = ibv_send_wr_atomic {
        remote_addr,
        compare_add,
        swap: 0,
        rkey,
    };
    // SAFETY: see above.
    unsafe {
        begin(handle, IBV_WR_ATOMIC_FETCH_AND_ADD, |wr| {
            wr.wr.atomic = atomic
        })
    };
}

/// Its eight bytes are taken here and now, and are no inline data that the queue pair must have room for.
unsafe extern "C" fn wr_atomic_write(
    handle: *mut ibv_qp_ex,
    rkey: u32,
    remote_addr: u64,
    value: *const c_void,
) {
    let atomic = ibv_send_wr_atomic {
        remote_addr,
        // SAFETY: eight bytes are readable by the man page.
        compare_add: unsafe { value.cast::<u64>().read_unaligned() },
        swap: 0,
        rkey,
    };
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_ATOMIC_WRITE, |wr| wr.wr.atomic = atomic) };
}

unsafe extern "C" fn wr_send(handle: *mut ibv_qp_ex) {
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_SEND, |_| {}) };
}

unsafe extern "C" fn wr_send_imm(handle: *mut ibv_qp_ex, imm_data: u32) {
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_SEND_WITH_IMM, |wr| wr.imm_data = imm_data) };
}

unsafe extern "C" fn wr_send_inv(handle: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_SEND_WITH_INV, |wr| wr.imm_data = rkey) };
}

/// Not supported: the batch will be refused.
unsafe extern "C" fn wr_send_tso(handle: *mut ibv_qp_ex, _: *mut c_void, _: u16, _: u16) {
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_TSO, |_| {}) };
}

unsafe extern "C" fn wr_local_inv(handle: *mut ibv_qp_ex, rkey: u32) {
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_LOCAL_INV, |wr| wr.imm_data = rkey) };
}

unsafe extern "C" fn wr_bind_mw(
    handle: *mut ibv_qp_ex,
    mw: *mut ibv_mw,
    rkey: u32,
    info: *const ibv_mw_bind_info,
) {
    // SAFETY: readable by the man page.
    let bind_info = unsafe { *info };
    let bind_mw = ibv_send_wr_bind_mw {
        mw,
        rkey,
        bind_info,
    };
    // SAFETY: see above.
    unsafe { begin(handle, IBV_WR_BIND_MW, |wr| wr.extra.bind_mw = bind_mw) };
}

unsafe extern "C" fn wr_set_ud_addr(
    handle: *mut ibv_qp_ex,
    ah: *mut ibv_ah,
    remote_qpn: u32,
    remote_qkey: u32,
) {
    let ud = ibv_send_wr_ud {
        ah,
        remote_qpn,
        remote_qkey,
    };
    let act = |qp: &Qp, batch: &mut Batch| {
        if qp.qp_type != IBV_QPT_UD {
            batch.refuse(libc::EINVAL);
        } else if let Some(built) = batch.last() {
            built.wr.wr.ud = ud;
        }
    };
    // SAFETY: see above.
    unsafe { with_batch(handle, act) };
}

unsafe extern "C" fn wr_set_xrc_srqn(handle: *mut ibv_qp_ex, remote_srqn: u32) {
    let act = |_: &Qp, batch: &mut Batch| {
        if let Some(built) = batch.last() {
            built.wr.qp_type.xrc = ibv_send_wr_xrc { remote_srqn };
        }
    };
    // SAFETY: see above.
    unsafe { with_batch(handle, act) };
}

unsafe extern "C" fn wr_set_sge(handle: *mut ibv_qp_ex, lkey: u32, addr: u64, length: u32) {
    let sge = ibv_sge { addr, length, lkey };
    // SAFETY: see above.
    unsafe { with_batch(handle, |_, batch| batch.set_list(std::iter::once(sge))) };
}

unsafe extern "C" fn wr_set_sge_list(handle: *mut ibv_qp_ex, count: usize, list: *const ibv_sge) {
    let act = |qp: &Qp, batch: &mut Batch| {
        if count > qp.cap().max_send_sge as usize {
            batch.refuse(libc::EINVAL);
            return;
        }
        // SAFETY: the list has so many elements, by the man page.
        let elements = (0..count).map(|at| unsafe { list.add(at).read() });
        batch.set_list(elements);
    };
    // SAFETY: see above.
    unsafe { with_batch(handle, act) };
}

unsafe extern "C" fn wr_set_inline_data(handle: *mut ibv_qp_ex, addr: *mut c_void, len: usize) {
    // SAFETY: see above; the bytes are readable by the man page.
    unsafe { set_inline(handle, [(addr.cast_const().cast(), len)].into_iter()) };
}

unsafe extern "C" fn wr_set_inline_data_list(
    handle: *mut ibv_qp_ex,
    count: usize,
    list: *const ibv_data_buf,
) {
    let buffers = (0..count).map(|at| {
        // SAFETY: the list has so many elements, by the man page.
        let buffer = unsafe { list.add(at).read() };
        (buffer.addr.cast_const().cast::<u8>(), buffer.length)
    });
    // SAFETY: see above; the bytes are readable by the man page.
    unsafe { set_inline(handle, buffers) };
}

/// Copies inline data of the last request.
///
/// # Safety
///
/// See above; the buffers are readable.
unsafe fn set_inline(handle: *mut ibv_qp_ex, buffers: impl Iterator<Item = (*const u8, usize)>) {
    let act = |qp: &Qp, batch: &mut Batch| {
        let start = batch.inline.len();
        for (from, len) in buffers {
            let most = start + qp.cap().max_inline_data as usize;
            if len > most - batch.inline.len() {
                batch.inline.truncate(start);
                batch.refuse(libc::EINVAL);
                return;
            }
            if len > 0 {
                // SAFETY: readable by the caller's promise.
                let bytes = unsafe { std::slice::from_raw_parts(from, len) };
                batch.inline.extend_from_slice(bytes);
            }
        }
        batch.set_inline(start);
    };
    // SAFETY: by the caller's promise.
    unsafe { with_batch(handle, act) };
}
