//! What both processes have without the device: a piece of plain shared memory, and two eventfds.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags, mmap};

use crate::Result;

/// Bytes of the plain target of copies.
pub const COPIES: usize = 1 << 20;
/// Bytes in front of it: words by which the processes talk, a page.
const WORDS: usize = 4096;
/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Plain memory that both processes map.
pub struct Shared {
    base: NonNull<u8>,
    file: OwnedFd,
}

impl Shared {
    pub fn new() -> Result<Self> {
        // Not closed on exec: the peer inherits it.
        let file = memfd_create("perf", MemfdFlags::empty())?;
        ftruncate(&file, (WORDS + COPIES) as u64)?;
        Self::map(file)
    }

    fn map(file: OwnedFd) -> Result<Self> {
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping of a file that nobody shrinks; it stays until the process ends.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                WORDS + COPIES,
                both,
                MapFlags::SHARED,
                &file,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or("a mapping at address 0")?;
        // Now, and not while something is measured.
        // SAFETY: within the mapping, which nobody refers to yet; the other process's words are 0, too.
        unsafe { base.add(WORDS).write_bytes(0, COPIES) };
        Ok(Self { base, file })
    }

    /// The peer's view of it.
    pub fn inherit(fd: RawFd) -> Result<Self> {
        // SAFETY: inherited under this number, and nothing else in this process has it.
        Self::map(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// The word at the start of this line.
    pub fn word(&self, line: usize) -> &AtomicU64 {
        assert!(line < WORDS / LINE, "line {line} is outside the words");
        // SAFETY: within the mapping, which stays, and aligned to a line; it is used as atomics only.
        unsafe { AtomicU64::from_ptr(self.base.add(line * LINE).as_ptr().cast()) }
    }

    /// The word at the start of this line of the target of copies.
    pub fn copied(&self, line: usize) -> &AtomicU64 {
        assert!(line < COPIES / LINE, "line {line} is outside the copies");
        // SAFETY: as above; what `copies` leads to is written by copies of whole lines, and this word in
        // one piece.
        unsafe { AtomicU64::from_ptr(self.base.add(WORDS + line * LINE).as_ptr().cast()) }
    }

    /// [`COPIES`] bytes to copy to and from.
    pub fn copies(&self) -> *mut u8 {
        // SAFETY: within the mapping.
        unsafe { self.base.add(WORDS) }.as_ptr()
    }
}

/// Waits, burning the processor, until the word is `value`.
pub fn await_word(word: &AtomicU64, value: u64) {
    while word.load(Ordering::Acquire) != value {
        std::hint::spin_loop();
    }
}

/// An eventfd that both processes have.
pub struct Bell(File);

impl Bell {
    pub fn new() -> Result<Self> {
        // Not closed on exec, as above.
        Ok(Self(File::from(eventfd(0, EventfdFlags::empty())?)))
    }

    pub fn inherit(fd: RawFd) -> Self {
        // SAFETY: inherited under this number, and nothing else in this process has it.
        Self(unsafe { File::from_raw_fd(fd) })
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub fn ring(&self) -> Result<()> {
        Ok((&self.0).write_all(&1_u64.to_ne_bytes())?)
    }

    pub fn wait(&self) -> Result<()> {
        Ok((&self.0).read_exact(&mut [0; 8])?)
    }
}
