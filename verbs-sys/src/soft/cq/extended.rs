//! Reading completions field by field: ibv_create_cq_ex(3).
//!
//! Between ibv_start_poll and ibv_end_poll a thread has the queue's turn, and the completion that was taken
//! last is read in place. Completions are taken one by one, by the same way as all others: what is not read
//! stays where it is, for whoever polls next.

use core::ffi::{c_int, c_uint};
use std::cell::UnsafeCell;

use super::Cq;
use crate::ffi::*;
use crate::soft::turn::Turn;

/// What can be read: the fields that any completion has.
pub(in crate::soft) const READABLE: u64 = IBV_WC_STANDARD_FLAGS as u64;

/// What a thread has while it reads.
pub(super) struct Reader {
    turn: Turn,
    /// Threads take turns by their own care.
    is_single_threaded: bool,
    /// The completion that is read. Guarded by the turn.
    current: UnsafeCell<ibv_wc>,
}

// SAFETY: the completion is reached by whoever has the turn.
unsafe impl Sync for Reader {}

impl Reader {
    pub(super) fn new(is_single_threaded: bool) -> Self {
        Self {
            turn: Turn::default(),
            is_single_threaded,
            current: UnsafeCell::new(ibv_wc::zeroed()),
        }
    }

    fn take_turn(&self) {
        if !self.is_single_threaded {
            self.turn.take();
        }
    }

    fn give_turn(&self) {
        if !self.is_single_threaded {
            self.turn.give();
        }
    }
}

/// The functions that applications call.
pub(super) fn offer(fields: &mut ibv_cq_ex) {
    fields.start_poll = Some(start_poll);
    fields.next_poll = Some(next_poll);
    fields.end_poll = Some(end_poll);
    fields.read_opcode = Some(read_opcode);
    fields.read_vendor_err = Some(read_vendor_err);
    fields.read_byte_len = Some(read_byte_len);
    fields.read_imm_data = Some(read_imm_data);
    fields.read_qp_num = Some(read_qp_num);
    fields.read_src_qp = Some(read_src_qp);
    fields.read_wc_flags = Some(read_wc_flags);
    fields.read_slid = Some(read_slid);
    fields.read_sl = Some(read_sl);
    fields.read_dlid_path_bits = Some(read_dlid_path_bits);
}

impl Cq {
    /// Takes a completion to be read: 0, `ENOENT` if there is none, or an error.
    fn read_next(&self, reader: &Reader) -> c_int {
        let current = reader.current.get();
        // SAFETY: this thread has the turn.
        let wc = unsafe { &mut *current };
        if !self.take_one(wc) {
            match self.poll(std::slice::from_mut(wc)) {
                Ok(0) => return libc::ENOENT,
                Ok(_) => {}
                Err(error) => return error.raw_os_error(),
            }
        }
        let fields = self.cq.get();
        // SAFETY: the fields are this thread's, as the completion is.
        unsafe {
            (&raw mut (*fields).status).write(wc.status);
            (&raw mut (*fields).wr_id).write(wc.wr_id);
        }
        0
    }
}

// Every function below keeps the contract of `ibv_cq_ex`: the handle is a live queue that was made by
// ibv_create_cq_ex, and the thread has its turn, but for `start_poll`.

/// The queue behind a handle.
///
/// # Safety
///
/// The handle is a live completion queue of this provider.
unsafe fn cq<'a>(handle: *mut ibv_cq_ex) -> &'a Cq {
    // SAFETY: the handle is the address of a `Cq` whose first field is the C structure.
    unsafe { &*handle.cast::<Cq>() }
}

unsafe extern "C" fn start_poll(handle: *mut ibv_cq_ex, attr: *mut ibv_poll_cq_attr) -> c_int {
    // SAFETY: see above; the attributes are readable by the man page.
    let (cq, attr) = unsafe { (cq(handle), attr.as_ref()) };
    let Some(reader) = cq.reader.as_ref() else {
        return libc::EINVAL;
    };
    if attr.is_some_and(|attr| attr.comp_mask != 0) {
        return libc::EINVAL;
    }
    reader.take_turn();
    let code = cq.read_next(reader);
    if code != 0 {
        // By the man page nobody ends what has not begun.
        reader.give_turn();
    }
    code
}

unsafe extern "C" fn next_poll(handle: *mut ibv_cq_ex) -> c_int {
    // SAFETY: see above.
    let cq = unsafe { cq(handle) };
    cq.reader
        .as_ref()
        .map_or(libc::EINVAL, |reader| cq.read_next(reader))
}

unsafe extern "C" fn end_poll(handle: *mut ibv_cq_ex) {
    // SAFETY: see above.
    if let Some(reader) = &unsafe { cq(handle) }.reader {
        reader.give_turn();
    }
}

/// Functions that give a field of the completion.
macro_rules! read {
    ($($name:ident: $field:ident as $type:ty;)+) => {$(
        unsafe extern "C" fn $name(handle: *mut ibv_cq_ex) -> $type {
            // SAFETY: see above.
            let reader = unsafe { cq(handle) }.reader.as_ref();
            // SAFETY: this thread has the turn.
            reader.map_or(0, |reader| unsafe { (*reader.current.get()).$field }.into())
        }
    )+};
}

read! {
    read_opcode: opcode as ibv_wc_opcode;
    read_vendor_err: vendor_err as u32;
    read_byte_len: byte_len as u32;
    read_imm_data: imm_data as u32;
    read_qp_num: qp_num as u32;
    read_src_qp: src_qp as u32;
    read_wc_flags: wc_flags as c_uint;
    read_slid: slid as u32;
    read_sl: sl as u8;
    read_dlid_path_bits: dlid_path_bits as u8;
}
