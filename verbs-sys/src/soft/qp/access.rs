//! Checked access to memory: by lkey on our side, by rkey on the peer's, and the copy between them.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::io::Errno;

use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_WRITE, IBV_WC_LOC_PROT_ERR,
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, ibv_sge, ibv_wc_status,
};
use crate::soft::epoch;
use crate::soft::keys::{self, Live};
use crate::soft::layout::{KeyEntry, MAX_KEYS};
use crate::soft::link::{Link, Via};
use crate::soft::segment;

/// Bytes copied between two looks at the epoch: deregistration waits no longer than this takes.
pub(super) const CHUNK: usize = 1 << 20;

/// A checked range of the peer's memory.
#[derive(Clone, Copy, Debug)]
pub(super) enum Place {
    /// Mapped here.
    Here(*mut u8),
    /// In the process's own address space.
    There { pid: i32, addr: u64 },
}

/// Why a range cannot be reached.
#[derive(Clone, Copy, Debug)]
pub(super) enum Trouble {
    Status(ibv_wc_status),
    /// The range lies in an arena that is not mapped yet; map it and try again.
    Unmapped(u32),
    /// The range is its owner's alone to reach.
    OutOfReach,
}

/// The way bytes go, seen from the side that copies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    ToPeer,
    FromPeer,
}

/// Checks a scatter/gather element of this process. A zero-length one needs no key.
#[inline(always)]
pub(super) fn check_local(
    own: &[KeyEntry; MAX_KEYS],
    pd: u32,
    sge: &ibv_sge,
    access: u32,
) -> Result<(), ibv_wc_status> {
    if sge.length == 0 {
        return Ok(());
    }
    let range = keys::lookup(own, sge.lkey).ok_or(IBV_WC_LOC_PROT_ERR)?;
    range.check(
        pd,
        sge.addr,
        sge.length as usize,
        access,
        IBV_WC_LOC_PROT_ERR,
    )?;
    Ok(())
}

/// As [`check_local`], in the general ways: an element whose key is indirect was translated when it was
/// posted, and memory that is missing is fetched.
#[inline(always)]
pub(super) fn check_here(
    own: &[KeyEntry; MAX_KEYS],
    pd: u32,
    sge: &ibv_sge,
    access: u32,
) -> Result<(), ibv_wc_status> {
    if !keys::is_indirect(sge.lkey) {
        return check_local(own, pd, sge, access);
    }
    check_indirect(own, pd, sge, access)
}

#[cold]
fn check_indirect(
    own: &[KeyEntry; MAX_KEYS],
    pd: u32,
    sge: &ibv_sge,
    access: u32,
) -> Result<(), ibv_wc_status> {
    let (addr, len) = (sge.addr, sge.length as usize);
    if len == 0 {
        return Ok(());
    }
    let range = keys::find(own, sge.lkey).ok_or(IBV_WC_LOC_PROT_ERR)?;
    range.check(pd, addr, len, access, IBV_WC_LOC_PROT_ERR)?;
    fetch(range, addr, len, access).ok_or(IBV_WC_LOC_PROT_ERR)
}

/// Has the kernel make memory present that is paged on demand; `None` where there is none.
fn fetch(range: Live<'_>, addr: u64, len: usize, access: u32) -> Option<()> {
    let writes =
        access & (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
    if range.is_on_demand() {
        segment::populate(addr, len, writes).ok()?;
    }
    Some(())
}

/// Checks a range of this process by key, for the queue pair `qpn` of the domain `pd` whose peer names it,
/// and says where in memory it is.
#[inline(always)]
pub(super) fn check_named(
    own: &[KeyEntry; MAX_KEYS],
    by: (u32, u32),
    key: u32,
    addr: u64,
    len: usize,
    access: u32,
) -> Result<u64, ibv_wc_status> {
    if keys::is_indirect(key) {
        return find_named(own, by, key, addr, len, access);
    }
    let range = keys::lookup(own, key).ok_or(IBV_WC_REM_ACCESS_ERR)?;
    range.check_remote(by, addr, len, access)?;
    Ok(addr)
}

#[cold]
fn find_named(
    own: &[KeyEntry; MAX_KEYS],
    by: (u32, u32),
    key: u32,
    addr: u64,
    len: usize,
    access: u32,
) -> Result<u64, ibv_wc_status> {
    let range = keys::find(own, key).ok_or(IBV_WC_REM_ACCESS_ERR)?;
    let addr = range.translate(addr);
    range.check_remote(by, addr, len, access)?;
    fetch(range, addr, len, access).ok_or(IBV_WC_REM_ACCESS_ERR)?;
    Ok(addr)
}

/// As [`resolve`], in the general ways, for a range that a request names.
#[inline(always)]
pub(super) fn reach(
    link: &Link,
    pd: u32,
    key: u32,
    addr: u64,
    len: usize,
    access: u32,
) -> Result<Place, Trouble> {
    if !keys::is_indirect(key) {
        return resolve(link, pd, key, addr, len, access);
    }
    let addr = keys::translate(link.keys(), key, addr);
    reach_indirect(link, pd, key, addr, len, access)
}

/// As [`resolve`], for an element of the peer's list, which was translated when it was posted.
#[inline(always)]
pub(super) fn reach_listed(
    link: &Link,
    pd: u32,
    sge: &ibv_sge,
    len: usize,
) -> Result<Place, Trouble> {
    if !keys::is_indirect(sge.lkey) {
        return resolve(link, pd, sge.lkey, sge.addr, len, 0);
    }
    reach_indirect(link, pd, sge.lkey, sge.addr, len, 0)
}

#[cold]
fn reach_indirect(
    link: &Link,
    pd: u32,
    key: u32,
    addr: u64,
    len: usize,
    access: u32,
) -> Result<Place, Trouble> {
    let denied = Trouble::Status(IBV_WC_REM_ACCESS_ERR);
    let range = keys::find(link.keys(), key).ok_or(denied)?;
    let offset = range
        .check_remote((pd, link.dest_qpn), addr, len, access)
        .map_err(Trouble::Status)?;
    if let Via::Local = link.via {
        fetch(range, addr, len, access).ok_or(denied)?;
    }
    place_of(link, range, offset, addr, len)
}

/// Checks a range of the peer by key, and finds where it can be reached.
#[inline(always)]
pub(super) fn resolve(
    link: &Link,
    pd: u32,
    key: u32,
    addr: u64,
    len: usize,
    access: u32,
) -> Result<Place, Trouble> {
    let denied = Trouble::Status(IBV_WC_REM_ACCESS_ERR);
    let range = keys::lookup(link.keys(), key).ok_or(denied)?;
    let offset = range
        .check_remote((pd, link.dest_qpn), addr, len, access)
        .map_err(Trouble::Status)?;
    place_of(link, range, offset, addr, len)
}

/// Where a checked range can be reached.
#[inline(always)]
fn place_of(
    link: &Link,
    range: Live<'_>,
    offset: u64,
    addr: u64,
    len: usize,
) -> Result<Place, Trouble> {
    match &link.via {
        Via::Local => Ok(Place::Here(addr as usize as *mut u8)),
        Via::Shm(peer) if range.arena() != 0 => {
            let (arena, offset) = (range.arena(), range.offset().wrapping_add(offset));
            peer.mapped(arena, offset, len)
                .map(Place::Here)
                .ok_or(Trouble::Unmapped(arena))
        }
        Via::Shm(peer) => match peer.pid.filter(|_| peer.cma) {
            Some(pid) => Ok(Place::There {
                pid: pid.as_raw_nonzero().get(),
                addr,
            }),
            None => Err(Trouble::OutOfReach),
        },
        Via::Remote | Via::Nobody => Err(Trouble::Status(IBV_WC_RETRY_EXC_ERR)),
    }
}

/// Walks through the bytes of a scatter/gather list.
#[derive(Clone, Debug)]
pub(super) struct Cursor<I> {
    rest: I,
    current: ibv_sge,
}

impl<I: Iterator<Item = ibv_sge>> Cursor<I> {
    #[inline]
    pub(super) fn new(list: I) -> Self {
        Self {
            rest: list,
            current: ibv_sge {
                addr: 0,
                length: 0,
                lkey: 0,
            },
        }
    }

    /// The next contiguous bytes, at most `most`; `None` at the end.
    #[inline]
    fn next(&mut self, most: usize) -> Option<(*mut u8, usize)> {
        while self.current.length == 0 {
            self.current = self.rest.next()?;
        }
        let len = (self.current.length as usize).min(most);
        let start = self.current.addr as usize as *mut u8;
        self.current.addr = self.current.addr.wrapping_add(len as u64);
        self.current.length -= len as u32;
        Some((start, len))
    }
}

/// Copies `len` bytes between a place and the next bytes of a list. `renew` is called between chunks
/// of a long copy; it starts a new epoch, checks the keys again and says where the place is now.
/// If that has to be mapped again, the copy has to begin again.
///
/// # Safety
///
/// Both sides were checked under the epoch lock that the caller holds: their owners wait for that
/// epoch before they take the memory away.
#[inline]
pub(super) unsafe fn transfer<I: Iterator<Item = ibv_sge>>(
    direction: Direction,
    mut place: Place,
    list: &mut Cursor<I>,
    len: usize,
    mut renew: impl FnMut() -> Result<Place, Trouble>,
) -> Result<(), Trouble> {
    let mut done = 0;
    let mut chunk = CHUNK;
    while done < len {
        if chunk == 0 {
            place = renew()?;
            chunk = CHUNK;
        }
        let Some((local, piece)) = list.next(chunk.min(len - done)) else {
            break;
        };
        match (place, direction) {
            (Place::Here(base), Direction::ToPeer) => {
                // SAFETY: by the caller's promise; `done + piece <= len`.
                unsafe { copy::copy_shared(base.wrapping_add(done), local, piece) }
            }
            (Place::Here(base), Direction::FromPeer) => {
                // SAFETY: as above.
                unsafe { copy::read_shared(local, base.wrapping_add(done), piece) }
            }
            (Place::There { pid, addr }, _) => {
                cross(direction, pid, addr.wrapping_add(done as u64), local, piece)
                    .map_err(Trouble::Status)?;
            }
        }
        done += piece;
        chunk -= piece;
    }
    in_order();
    Ok(())
}

/// What a request costs beside the copy of its bytes, in bytes, roughly.
const OVERHEAD: usize = 4096;

/// Called between requests, when nothing that was checked is used again: lets those pass who wait for the
/// epoch of `word`, once as much was copied in it as they shall wait for. `copied` counts since it began; `len`
/// are the bytes of the last request. The lock is held.
#[inline]
pub(super) fn pass(word: &AtomicU64, copied: &mut usize, len: u64) {
    let len = usize::try_from(len).unwrap_or(usize::MAX);
    *copied = copied.saturating_add(len).saturating_add(OVERHEAD);
    if *copied > CHUNK / 2 {
        *copied = 0;
        epoch::renew(word);
    }
}

/// Keeps the accesses of one request before those of the next, as requests of a queue pair are
/// executed in order. Costs nothing where the processor keeps them so.
#[inline(always)]
pub(super) fn in_order() {
    fence(Ordering::AcqRel);
}

/// Copies between this process and another through the kernel.
pub(super) fn cross(
    direction: Direction,
    pid: i32,
    mut addr: u64,
    mut local: *mut u8,
    mut len: usize,
) -> Result<(), ibv_wc_status> {
    while len > 0 {
        let ours = libc::iovec {
            iov_base: local.cast(),
            iov_len: len,
        };
        let theirs = libc::iovec {
            iov_base: addr as usize as *mut _,
            iov_len: len,
        };
        // SAFETY: the kernel checks both vectors; our side is memory whose key was just checked.
        let moved = unsafe {
            match direction {
                Direction::ToPeer => libc::process_vm_writev(pid, &ours, 1, &theirs, 1, 0),
                Direction::FromPeer => libc::process_vm_readv(pid, &ours, 1, &theirs, 1, 0),
            }
        };
        match usize::try_from(moved) {
            Ok(0) => return Err(IBV_WC_REM_ACCESS_ERR),
            Ok(moved) => {
                addr += moved as u64;
                local = local.wrapping_add(moved);
                len -= moved;
            }
            Err(_) => match std::io::Error::last_os_error()
                .raw_os_error()
                .map(Errno::from_raw_os_error)
            {
                Some(Errno::INTR) => {}
                Some(Errno::SRCH) => return Err(IBV_WC_RETRY_EXC_ERR),
                Some(Errno::PERM) => return Err(IBV_WC_REM_OP_ERR),
                _ => return Err(IBV_WC_REM_ACCESS_ERR),
            },
        }
    }
    Ok(())
}
