//! The memory of regions that have none: ibv_alloc_null_mr(3). What is read there is zero, and what is
//! written is gone.

use std::ffi::c_void;
use std::os::fd::AsFd;

use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::segment;

/// Address space of two halves, each as long as an element can be. In the first there are zeros that
/// nobody can write; the other is one small piece of memory again and again.
#[derive(Debug)]
pub(super) struct Nothing {
    start: usize,
}

impl Nothing {
    /// Bytes of a half.
    pub(super) const HALF: u64 = 1 << 32;
    /// Bytes of memory that take what is written.
    const SINK: usize = 16 << 20;

    /// Takes address space, and next to no memory.
    pub(super) fn new() -> Result<Self, Errno> {
        let len = 2 * Self::HALF as usize;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ, flags)
        }?;
        let nothing = Self {
            start: start.addr(),
        };
        let file = segment::create("verbs-soft0-null", Self::SINK)?;
        let (flags, prot) = (
            MapFlags::SHARED | MapFlags::FIXED,
            ProtFlags::READ | ProtFlags::WRITE,
        );
        for at in (Self::HALF as usize..len).step_by(Self::SINK) {
            let place = start.wrapping_byte_add(at);
            // SAFETY: the place lies in the mapping just made, which nobody else knows.
            unsafe { rustix::mm::mmap(place, Self::SINK, prot, flags, file.as_fd(), 0) }?;
        }
        Ok(nothing)
    }

    /// Where it begins.
    pub(super) fn start(&self) -> *mut c_void {
        self.start as *mut c_void
    }
}

impl Drop for Nothing {
    fn drop(&mut self) {
        // SAFETY: mapped by `new`, and nobody uses it any more.
        let _ = unsafe { rustix::mm::munmap(self.start(), 2 * Self::HALF as usize) };
    }
}
