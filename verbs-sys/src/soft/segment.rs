//! Memory files: created, sealed, mapped.

use std::ffi::c_void;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::OnceLock;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Mappings of at least this size are aligned to it, so that the kernel can use huge pages.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// A shared mapping of a memory file, unmapped on drop.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain address space; every access to the bytes goes through raw pointers or
// atomics whose users prove their own accesses.
unsafe impl Send for Mapping {}
// SAFETY: as for Send.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a memory file of `len` bytes, of which few pages will be used.
    pub(crate) fn sparse(file: BorrowedFd<'_>, len: usize, writable: bool) -> Result<Self, Errno> {
        Self::new(file, len, writable, 1)
    }

    /// Maps a memory file of `len` bytes, with huge pages where the kernel has them.
    pub(crate) fn dense(file: BorrowedFd<'_>, len: usize) -> Result<Self, Errno> {
        Self::new(
            file,
            len,
            true,
            if len >= HUGE_PAGE { HUGE_PAGE } else { 1 },
        )
    }

    fn new(file: BorrowedFd<'_>, len: usize, writable: bool, align: usize) -> Result<Self, Errno> {
        let mut prot = ProtFlags::READ;
        prot.set(ProtFlags::WRITE, writable);
        let reserved = len.checked_add(align).ok_or(Errno::NOMEM)?;
        if align == 1 {
            // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing one.
            let addr = unsafe {
                rustix::mm::mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, file, 0)
            }?;
            return Ok(Self {
                addr: NonNull::new(addr.cast()).ok_or(Errno::NOMEM)?,
                len,
            });
        }
        // Reserve too much, map the file at the aligned address inside, give back the rest.
        // SAFETY: as above; nothing is accessed.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                reserved,
                ProtFlags::empty(),
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }?;
        let lead = base.addr().next_multiple_of(align) - base.addr();
        let start = base.wrapping_byte_add(lead);
        // SAFETY: `start..start + len` lies inside the reservation just made, which nobody else knows.
        let mapped = unsafe {
            rustix::mm::mmap(
                start,
                len,
                prot,
                MapFlags::SHARED | MapFlags::FIXED,
                file,
                0,
            )
        };
        let page = rustix::param::page_size();
        let len_up = len.next_multiple_of(page);
        let (keep_lead, keep_tail) = match mapped {
            Ok(_) => (lead, lead + len_up),
            Err(_) => (reserved, reserved),
        };
        for (from, to) in [(0, keep_lead), (keep_tail, reserved.next_multiple_of(page))] {
            if to > from {
                // SAFETY: these parts of our own reservation were never handed out.
                let _ = unsafe { rustix::mm::munmap(base.wrapping_byte_add(from), to - from) };
            }
        }
        let addr: NonNull<u8> = NonNull::new(mapped?.cast()).ok_or(Errno::NOMEM)?;
        // SAFETY: the range is our mapping; advice changes no contents. Failure only loses speed.
        let _ = unsafe { rustix::mm::madvise(addr.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(Self { addr, len })
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.addr.as_ptr()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The mapping as a `T`, all of whose fields are atomics or raw bytes.
    ///
    /// # Safety
    ///
    /// `T` must be valid for any bit pattern, hold nothing but atomics and byte arrays reached by raw
    /// pointer, and fit the mapping.
    pub(crate) unsafe fn as_struct<T>(&self) -> &T {
        debug_assert!(size_of::<T>() <= self.len && self.addr.cast::<T>().is_aligned());
        // SAFETY: by the caller's promise; the mapping lives as long as `self`.
        unsafe { self.addr.cast().as_ref() }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range is ours, and `self` was the last to know it.
        let _ = unsafe { rustix::mm::munmap(self.addr.as_ptr().cast(), self.len) };
    }
}

/// A new memory file of `len` bytes that can neither shrink nor grow, so that no peer can be made to
/// fault on it.
pub(crate) fn create(name: &str, len: usize) -> Result<OwnedFd, Errno> {
    let file = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    rustix::fs::ftruncate(&file, len as u64)?;
    rustix::fs::fcntl_add_seals(file.as_fd(), SealFlags::SHRINK | SealFlags::GROW)?;
    Ok(file)
}

/// Forbids new writable mappings of the file; those that exist stay writable.
pub(crate) fn seal_writes(file: BorrowedFd<'_>) -> Result<(), Errno> {
    rustix::fs::fcntl_add_seals(file, SealFlags::FUTURE_WRITE)
}

/// The size of a file received from a peer, if it is sealed against shrinking.
pub(crate) fn sealed_len(file: BorrowedFd<'_>) -> Result<usize, Errno> {
    if !rustix::fs::fcntl_get_seals(file)?.contains(SealFlags::SHRINK) {
        return Err(Errno::PERM);
    }
    usize::try_from(rustix::fs::fstat(file)?.st_size).map_err(|_| Errno::INVAL)
}

/// Makes every page of a range present: as registration with a real device pins them.
/// `EFAULT` where the range is not (writable, if `write`) memory of this process.
pub(crate) fn populate(addr: u64, len: usize, write: bool) -> Result<(), Errno> {
    if len == 0 {
        return Ok(());
    }
    let page = rustix::param::page_size() as u64;
    let start = addr & !(page - 1);
    let end = addr
        .checked_add(len as u64)
        .and_then(|end| end.checked_next_multiple_of(page))
        .ok_or(Errno::FAULT)?;
    let advice = if write {
        Advice::LinuxPopulateWrite
    } else {
        Advice::LinuxPopulateRead
    };
    let range = (start as usize as *mut c_void, (end - start) as usize);
    if !*CAN_POPULATE.get_or_init(probe_populate) {
        return mapped(range.0, range.1);
    }
    loop {
        // SAFETY: population changes no contents, and the kernel checks the range.
        match unsafe { rustix::mm::madvise(range.0, range.1, advice) } {
            Ok(()) => return Ok(()),
            Err(Errno::INTR | Errno::AGAIN) => {}
            // INVAL is what the kernel says of a range without the permission.
            Err(Errno::NOMEM | Errno::FAULT | Errno::INVAL | Errno::ACCESS | Errno::PERM) => {
                return Err(Errno::FAULT);
            }
            Err(other) => return Err(other),
        }
    }
}

static CAN_POPULATE: OnceLock<bool> = OnceLock::new();

/// Whether the kernel knows `MADV_POPULATE_*` (Linux 5.14).
fn probe_populate() -> bool {
    let page = rustix::param::page_size();
    let mut word = 0u64;
    let start = (&raw mut word).map_addr(|addr| addr & !(page - 1));
    // SAFETY: the page holds a live stack variable; population changes no contents.
    unsafe { rustix::mm::madvise(start.cast(), page, Advice::LinuxPopulateRead) }.is_ok()
}

/// What older kernels can tell: that the range is mapped at all.
fn mapped(start: *mut c_void, len: usize) -> Result<(), Errno> {
    let mut residency = vec![0u8; len.div_ceil(rustix::param::page_size())];
    // SAFETY: the vector has a byte for each page of the range, which the kernel checks.
    let result = unsafe { libc::mincore(start, len, residency.as_mut_ptr()) };
    if result == 0 {
        Ok(())
    } else {
        Err(Errno::FAULT)
    }
}
