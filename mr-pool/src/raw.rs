//! The corner with `unsafe` in it: a buffer's bytes, and memory registered from the heap.
//!
//! Everything rests on one promise of the rest of the crate, which is safe code and tested as such
//! (against an oracle, by loom, by stress): **a free block is in exactly one place.** It is either
//! in one free list, or on its way between two in the hands of one thread, or out as one
//! [`Bytes`]; it is never in two, and the region it is part of stays registered and mapped while
//! it is out.

#![allow(unsafe_code)]

use std::alloc::{Layout, alloc, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use verbs_sys::owned::Registered;
use verbs_sys::{AccessFlags, MemoryRegion, ProtectionDomain, Sge, copy};

use crate::buffer::{Buffer, Kind};
use crate::class::ALIGN;
use crate::source::{Registration, Source, SourceError};

/// The bytes of one live buffer: initialized, valid until this value is dropped, and of this value
/// alone, but for what the pool's access flags let peers do.
#[derive(Debug)]
pub(crate) struct Bytes {
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: it is the only way to its bytes, which belong to no thread; see `Bytes`.
unsafe impl Send for Bytes {}
// SAFETY: through `&Bytes` bytes are read, or copied by routines that allow racing accesses; which
// of the two is the kind of the buffer, which changes only by value, when no slice is left.
unsafe impl Sync for Bytes {}

impl Bytes {
    /// The bytes of a block (or dedicated registration) just taken from where it was; the caller
    /// passes on its only claim to it. At least `len` bytes are there.
    pub(crate) fn claim(addr: NonNull<u8>, len: usize) -> Self {
        Self { addr, len }
    }

    /// Address of the first byte.
    #[inline]
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Shows more or less of the same block, whose size `len` must not exceed.
    #[inline]
    pub(crate) fn set_len(&mut self, len: usize) {
        self.len = len;
    }

    /// The bytes, which no peer writes: the pool is private.
    #[inline]
    pub(crate) fn as_slice(&self) -> &[u8] {
        // SAFETY: initialized, valid and this value's alone (`Bytes`); in a private pool neither a
        // peer nor a `&self` method writes them, and local work that does owns the buffer
        // (`Registered`).
        unsafe { std::slice::from_raw_parts(self.addr.as_ptr(), self.len) }
    }

    /// The bytes for writing; as [`as_slice`](Self::as_slice).
    #[inline]
    pub(crate) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, and `&mut self` makes it the only slice.
        unsafe { std::slice::from_raw_parts_mut(self.addr.as_ptr(), self.len) }
    }

    /// Copies out of bytes that peers may be writing. The pool is shared. The caller has checked
    /// that `offset + into.len()` is at most `len`.
    #[inline]
    pub(crate) fn read_shared(&self, offset: usize, into: &mut [u8]) {
        debug_assert!(offset + into.len() <= self.len);
        // SAFETY: the range is inside the buffer as the caller checked; no Rust reference to bytes
        // of a shared pool is ever made; `into` is a live exclusive slice, so they do not overlap.
        unsafe {
            copy::read_shared(
                into.as_mut_ptr(),
                self.addr.as_ptr().add(offset),
                into.len(),
            );
        }
    }

    /// Copies into bytes that peers may be reading and writing; as
    /// [`read_shared`](Self::read_shared).
    #[inline]
    pub(crate) fn write_shared(&self, offset: usize, from: &[u8]) {
        debug_assert!(offset + from.len() <= self.len);
        // SAFETY: as in `read_shared`; `from` is a live shared slice, so nobody writes it.
        unsafe {
            copy::write_shared(self.addr.as_ptr().add(offset), from.as_ptr(), from.len());
        }
    }
}

/// Memory from the heap, registered by itself: what a program does that has no pool.
#[derive(Debug)]
pub(crate) struct HeapSource {
    pub(crate) pd: ProtectionDomain,
    pub(crate) access: AccessFlags,
}

impl Source for HeapSource {
    fn register(&self, len: usize) -> Result<Box<dyn Registration>, SourceError> {
        let memory = HeapMemory::new(len)?;
        // SAFETY: the range stays allocated until after deregistration (`HeapRegistration`), and
        // its bytes are seen only as `Bytes` allows for these access flags.
        let region = unsafe { self.pd.reg_mr(memory.addr.as_ptr(), len, self.access) }?;
        memory.settle();
        Ok(Box::new(HeapRegistration { region, memory }))
    }
}

#[derive(Debug)]
struct HeapRegistration {
    region: MemoryRegion,
    memory: HeapMemory,
}

impl Registration for HeapRegistration {
    fn addr(&self) -> NonNull<u8> {
        self.memory.addr
    }

    fn len(&self) -> usize {
        self.memory.len
    }

    fn lkey(&self) -> u32 {
        self.region.lkey()
    }

    fn rkey(&self) -> u32 {
        self.region.rkey()
    }

    fn deregister(self: Box<Self>) -> Result<(), SourceError> {
        let Self { region, memory } = *self;
        region.deregister().map_err(|error| {
            // The device may still reach it.
            std::mem::forget(memory);
            error.into()
        })
    }
}

/// Whether an empty piece of assembly can stand for a write of every byte.
const ASSEMBLY: bool = cfg!(all(
    any(target_arch = "x86_64", target_arch = "aarch64"),
    not(miri)
));

/// Memory from the global allocator, aligned to a cache line, not cleared: a program without a
/// pool would not pay for that either.
#[derive(Debug)]
pub(crate) struct HeapMemory {
    /// What the allocator gave.
    base: NonNull<u8>,
    layout: Layout,
    /// The first aligned byte in it.
    addr: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns its memory, which belongs to no thread.
unsafe impl Send for HeapMemory {}
// SAFETY: `&HeapMemory` gives an address only.
unsafe impl Sync for HeapMemory {}

impl HeapMemory {
    pub(crate) fn new(len: usize) -> Result<Self, SourceError> {
        // Allocators are quicker at their own alignment than at ours.
        let longer = len
            .checked_add(ALIGN)
            .ok_or("a length that no memory has")?;
        let layout = Layout::from_size_align(longer, align_of::<u128>())?;
        let allocate = if ASSEMBLY { alloc } else { alloc_zeroed };
        // SAFETY: the layout's size is not 0.
        let base = unsafe { allocate(layout) };
        let base = NonNull::new(base).ok_or_else(|| format!("the heap has no {len} bytes"))?;
        let skip = base.align_offset(ALIGN);
        // SAFETY: below `ALIGN`, by which the allocation is longer than `len`.
        let addr = unsafe { base.add(skip) };
        Ok(Self {
            base,
            layout,
            addr,
            len,
        })
    }

    /// Makes the bytes initialized, with the values they have. Call it when the pages are there to
    /// stay (registration has written to each, or the allocator never hands out pages that the
    /// system may still take back), so that those values are settled.
    pub(crate) fn settle(&self) {
        #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), not(miri)))]
        // SAFETY: it executes nothing. To the compiler it may write through its operand, to memory
        // that is this value's; so from here on it must take each byte for written.
        unsafe {
            std::arch::asm!("/* {} */", in(reg) self.addr.as_ptr(), options(nostack, preserves_flags));
        }
    }

    #[cfg(test)]
    pub(crate) fn addr(&self) -> NonNull<u8> {
        self.addr
    }
}

impl Drop for HeapMemory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and nobody uses it any more.
        unsafe { dealloc(self.base.as_ptr(), self.layout) }
    }
}

// SAFETY: a buffer's block stays where it is, registered and allocated, as long as the buffer
// lives, whether it moves or not, and belongs to it alone; its length only changes through `&mut`,
// which nobody has while a queue pair owns it. Its slices borrow the buffer, so none is held then;
// peers' accesses to a shared buffer go through copies that expect them.
unsafe impl<K: Kind> Registered for Buffer<K> {
    #[inline]
    fn sge(&self) -> Sge {
        Sge {
            addr: self.addr(),
            length: u32::try_from(self.len()).unwrap_or(u32::MAX),
            lkey: self.lkey(),
        }
    }
}
