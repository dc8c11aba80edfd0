//! rdma_getaddrinfo(3): names of nodes and services.

use core::ffi::{CStr, c_char, c_int};
use core::ptr;
use std::ffi::CString;
use std::net::SocketAddr;

use libc::{addrinfo, sockaddr, sockaddr_storage, socklen_t};
use verbs_sys::ffi::{IBV_QPT_RC, IBV_QPT_UD};

use crate::abi::*;
use crate::address::{read, source_for, to_c};

/// rdma_getaddrinfo(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: *const rdma_addrinfo,
    result: *mut *mut rdma_addrinfo,
) -> c_int {
    // SAFETY: null, or readable by the caller's promise.
    let hints = unsafe { hints.as_ref() };
    if node.is_null() && service.is_null() && hints.is_none() {
        return libc::EAI_NONAME;
    }
    // SAFETY: by the caller's promise.
    match unsafe { resolve(node, service, hints) } {
        Ok(found) => {
            // SAFETY: a place for the result.
            unsafe { result.write(found) };
            0
        }
        Err(code) => code,
    }
}

unsafe fn resolve(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
) -> Result<*mut rdma_addrinfo, c_int> {
    let flags = hints.map_or(0, |hints| hints.ai_flags);
    let is_passive = flags & RAI_PASSIVE != 0;
    // SAFETY: integers and raw pointers.
    let mut info: rdma_addrinfo = unsafe { zeroed() };
    info.ai_flags = flags;
    let (named, canonical) = if node.is_null() && service.is_null() {
        (None, None)
    } else {
        // SAFETY: by the caller's promise.
        let (address, canonical) = unsafe { look_up(node, service, hints)? };
        (Some(address), canonical)
    };
    let hinted = |start: *mut sockaddr, len: socklen_t| match len {
        0 => None,
        // SAFETY: hints are addresses, or null.
        _ => unsafe { read(start) }.ok(),
    };
    let hinted_source = hints.and_then(|hints| hinted(hints.ai_src_addr, hints.ai_src_len));
    let hinted_destination = hints.and_then(|hints| hinted(hints.ai_dst_addr, hints.ai_dst_len));
    let (source, destination) = if is_passive {
        (named.or(hinted_source), None)
    } else {
        let destination = named.or(hinted_destination);
        let source = hinted_source.or_else(|| source_for(destination?).ok());
        (source, destination)
    };
    let any = destination.or(source).ok_or(libc::EAI_NONAME)?;
    info.ai_family = if any.is_ipv4() {
        libc::AF_INET
    } else {
        libc::AF_INET6
    };
    (info.ai_port_space, info.ai_qp_type) = kind(hints);
    (info.ai_src_addr, info.ai_src_len) = allocate(source);
    (info.ai_dst_addr, info.ai_dst_len) = allocate(destination);
    let canonical = canonical.map_or(ptr::null_mut(), CString::into_raw);
    if is_passive {
        info.ai_src_canonname = canonical;
    } else {
        info.ai_dst_canonname = canonical;
    }
    Ok(Box::into_raw(Box::new(info)))
}

/// Port space and type of queue pair: each follows from the other where one is not given.
fn kind(hints: Option<&rdma_addrinfo>) -> (c_int, c_int) {
    let (mut space, mut qp_type) =
        hints.map_or((0, 0), |hints| (hints.ai_port_space, hints.ai_qp_type));
    let (udp, ud) = (RDMA_PS_UDP as c_int, IBV_QPT_UD as c_int);
    if space == 0 {
        space = if qp_type == ud {
            udp
        } else {
            RDMA_PS_TCP as c_int
        };
    }
    if qp_type == 0 {
        qp_type = if space == udp {
            ud
        } else {
            IBV_QPT_RC as c_int
        };
    }
    (space, qp_type)
}

/// Asks the C library for names: the first address, and the canonical name.
unsafe fn look_up(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&rdma_addrinfo>,
) -> Result<(SocketAddr, Option<CString>), c_int> {
    // SAFETY: integers and raw pointers.
    let mut wanted: addrinfo = unsafe { zeroed() };
    let flags = hints.map_or(0, |hints| hints.ai_flags);
    for (flag, meaning) in [
        (RAI_PASSIVE, libc::AI_PASSIVE),
        (RAI_NUMERICHOST, libc::AI_NUMERICHOST),
    ] {
        if flags & flag != 0 {
            wanted.ai_flags |= meaning;
        }
    }
    wanted.ai_family = match hints {
        Some(hints) if flags & RAI_FAMILY != 0 => hints.ai_family,
        _ => libc::AF_UNSPEC,
    };
    if !matches!(
        wanted.ai_family,
        libc::AF_UNSPEC | libc::AF_INET | libc::AF_INET6
    ) {
        return Err(libc::EAI_FAMILY);
    }
    wanted.ai_socktype = if kind(hints).1 == IBV_QPT_UD as c_int {
        libc::SOCK_DGRAM
    } else {
        libc::SOCK_STREAM
    };
    let mut list: *mut addrinfo = ptr::null_mut();
    // SAFETY: by the caller's promise, and a place for the result.
    match unsafe { libc::getaddrinfo(node, service, &wanted, &mut list) } {
        0 => {}
        code => return Err(code),
    }
    // SAFETY: the list that was just made.
    let found = unsafe { list.as_ref() }
        .ok_or(libc::EAI_NONAME)
        .and_then(|first| {
            // SAFETY: an address of the list.
            let address = unsafe { read(first.ai_addr) }.map_err(|_| libc::EAI_FAMILY)?;
            // SAFETY: null, or a string of the list.
            let name = (!first.ai_canonname.is_null())
                .then(|| unsafe { CStr::from_ptr(first.ai_canonname) }.to_owned());
            Ok((address, name))
        });
    // SAFETY: made above, and freed once.
    unsafe { libc::freeaddrinfo(list) };
    found
}

/// An address that the application may keep.
fn allocate(address: Option<SocketAddr>) -> (*mut sockaddr, socklen_t) {
    match address {
        Some(address) => {
            let (storage, len) = to_c(address);
            (Box::into_raw(Box::new(storage)).cast(), len)
        }
        None => (ptr::null_mut(), 0),
    }
}

/// rdma_freeaddrinfo(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_freeaddrinfo(info: *mut rdma_addrinfo) {
    let mut next = info;
    while !next.is_null() {
        // SAFETY: by the caller's promise it came from rdma_getaddrinfo, which boxed it and what it refers to.
        let info = unsafe { Box::from_raw(next) };
        next = info.ai_next;
        for address in [info.ai_src_addr, info.ai_dst_addr] {
            if !address.is_null() {
                // SAFETY: as above.
                drop(unsafe { Box::from_raw(address.cast::<sockaddr_storage>()) });
            }
        }
        for name in [info.ai_src_canonname, info.ai_dst_canonname] {
            if !name.is_null() {
                // SAFETY: as above.
                drop(unsafe { CString::from_raw(name) });
            }
        }
    }
}
