//! The GID table, and what programs read of sysfs.

use core::ffi::{CStr, c_char, c_int};

use super::real::theirs;
use crate::ffi::*;
use crate::soft::PROVIDER;

/// `IBV_GID_TYPE_ROCE_V2`.
const ROCE_V2: u32 = 2;
/// What the private call says in its place.
const PRIVATE_ROCE_V2: u32 = 1;

/// A row of the GID table, as `struct ibv_gid_entry`.
#[repr(C)]
pub struct GidEntry {
    gid: ibv_gid,
    gid_index: u32,
    port_num: u32,
    gid_type: u32,
    ndev_ifindex: u32,
}

/// Reads one row.
///
/// # Safety
///
/// The context is open.
unsafe fn row(context: *mut ibv_context, port: u32, index: u32) -> Result<GidEntry, c_int> {
    let mut gid = ibv_gid { raw: [0; 16] };
    let (Ok(port_num), Ok(at)) = (u8::try_from(port), c_int::try_from(index)) else {
        return Err(libc::EINVAL);
    };
    // SAFETY: by the caller's promise, and a place for the result.
    match unsafe { (PROVIDER.query_gid)(context, port_num, at, &raw mut gid) } {
        0 => Ok(GidEntry {
            gid,
            gid_index: index,
            port_num: port,
            gid_type: ROCE_V2,
            ndev_ifindex: 0,
        }),
        code => Err(code),
    }
}

/// ibv_query_gid_ex(3).
///
/// # Safety
///
/// As the man page says; `len` is the size of the entry in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_ex(
    context: *mut ibv_context,
    port: u32,
    index: u32,
    entry: *mut GidEntry,
    flags: u32,
    len: usize,
) -> c_int {
    theirs!(context, _ibv_query_gid_ex(context: *mut ibv_context, port: u32, index: u32, entry: *mut GidEntry, flags: u32, len: usize) -> c_int);
    if flags != 0 || len < size_of::<GidEntry>() {
        return libc::EOPNOTSUPP;
    }
    // SAFETY: by the caller's promise.
    match unsafe { row(context, port, index) } {
        Ok(found) => {
            // SAFETY: a place for the result.
            unsafe { entry.write(found) };
            0
        }
        Err(code) => code,
    }
}

/// ibv_query_gid_table(3).
///
/// # Safety
///
/// As the man page says; `len` is the size of an entry in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _ibv_query_gid_table(
    context: *mut ibv_context,
    entries: *mut GidEntry,
    most: usize,
    flags: u32,
    len: usize,
) -> isize {
    theirs!(context, _ibv_query_gid_table(context: *mut ibv_context, entries: *mut GidEntry, most: usize, flags: u32, len: usize) -> isize);
    if flags != 0 || len != size_of::<GidEntry>() {
        return -(libc::EOPNOTSUPP as isize);
    }
    let mut port = ibv_port_attr::zeroed();
    // SAFETY: by the caller's promise, and a place for the result.
    let code = unsafe { (PROVIDER.query_port)(context, 1, &raw mut port) };
    if code != 0 {
        return -(code as isize);
    }
    if usize::try_from(port.gid_tbl_len).is_ok_and(|rows| rows > most) {
        return -(libc::EINVAL as isize);
    }
    let mut count = 0;
    while count < most {
        // SAFETY: by the caller's promise.
        let Ok(found) = (unsafe { row(context, 1, count as u32) }) else {
            break;
        };
        // SAFETY: there is room for `most`.
        unsafe { entries.add(count).write(found) };
        count += 1;
    }
    count as isize
}

/// Tells the type of a GID to the programs of rdma-core itself.
///
/// # Safety
///
/// The context is open; `gid_type` is a place for the result.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_gid_type(
    context: *mut ibv_context,
    port: u8,
    index: u32,
    gid_type: *mut u32,
) -> c_int {
    theirs!(context, ibv_query_gid_type(context: *mut ibv_context, port: u8, index: u32, gid_type: *mut u32) -> c_int);
    // SAFETY: by the caller's promise.
    match unsafe { row(context, port.into(), index) } {
        Ok(_) => {
            // SAFETY: a place for the result.
            unsafe { gid_type.write(PRIVATE_ROCE_V2) };
            0
        }
        Err(_) => -1,
    }
}

/// Where sysfs is.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Reads a short file of sysfs, without the newline at its end: how many bytes, or -1. The device has none.
///
/// # Safety
///
/// `folder` and `file` are strings, `buffer` has `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_read_sysfs_file(
    folder: *const c_char,
    file: *const c_char,
    buffer: *mut c_char,
    size: usize,
) -> c_int {
    // SAFETY: by the caller's promise.
    let path = unsafe { [CStr::from_ptr(folder), CStr::from_ptr(file)] };
    let [Ok(folder), Ok(file)] = path.map(CStr::to_str) else {
        return -1;
    };
    let Ok(mut text) = std::fs::read(std::path::Path::new(folder).join(file)) else {
        return -1;
    };
    if text.last() == Some(&b'\n') {
        text.pop();
    }
    if text.len() >= size {
        return -1;
    }
    text.push(0);
    // SAFETY: there is room, as was just checked.
    unsafe { core::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast(), text.len()) };
    text.len() as c_int - 1
}
