//! Fetching memory that is paged on demand: ibv_advise_mr(3).

use core::ffi::c_int;

use super::super::device::context;
use super::super::{keys, segment};
use super::Pd;
use crate::ffi::*;

/// Makes pages present, unless the kernel shall not be asked for any: then there is nothing to do. It is
/// done when the call returns, whether or not that was asked for.
pub(in crate::soft) unsafe extern "C" fn advise_mr(
    pd: *mut ibv_pd,
    advice: ibv_advise_mr_advice,
    flags: u32,
    list: *mut ibv_sge,
    count: u32,
) -> c_int {
    let (writes, fetches) = match advice {
        IBV_ADVISE_MR_ADVICE_PREFETCH => (false, true),
        IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE => (true, true),
        IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT => (false, false),
        _ => return libc::EOPNOTSUPP,
    };
    if flags & !IBV_ADVISE_MR_FLAG_FLUSH != 0 || (count > 0 && list.is_null()) {
        return libc::EINVAL;
    }
    // SAFETY: a live domain of this provider, and a list of so many elements, by the man page.
    let (pd, list) = unsafe {
        let list = match count {
            0 => &[],
            _ => core::slice::from_raw_parts(list, count as usize),
        };
        (&*pd.cast::<Pd>(), list)
    };
    // SAFETY: a domain's context outlives it.
    let Ok(process) = (unsafe { context(pd.pd.context) }).process() else {
        return libc::ENODEV;
    };
    let keys = &process.info().keys;
    for sge in list {
        let Some(region) = keys::find(keys, sge.lkey) else {
            return libc::EFAULT;
        };
        if !region.is_of(pd.id) {
            return libc::EPERM;
        }
        if !region.is_on_demand() {
            return libc::EINVAL;
        }
        if writes && region.access() & IBV_ACCESS_LOCAL_WRITE == 0 {
            return libc::EPERM;
        }
        let (addr, len) = (region.translate(sge.addr), sge.length as usize);
        if keys::offset_in(region.range(), 0, addr, len, 0).is_none() {
            return libc::EFAULT;
        }
        if fetches && let Err(error) = segment::populate(addr, len, writes) {
            return error.raw_os_error();
        }
    }
    0
}
