//! Memory of both kinds, seen through raw pointers only: peers write to it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use verbs_sys::{
    AccessFlags, Context, HostMemory, MemoryError, MemoryRegion, ProtectionDomain, copy,
};

use super::command::MemoryKind;

/// A registered piece of memory.
pub struct Memory {
    /// Goes before the bytes do.
    region: Option<MemoryRegion>,
    bytes: Bytes,
}

enum Bytes {
    Device(HostMemory),
    Heap(Heap),
}

impl Memory {
    /// Allocates and registers `len` zeroed bytes.
    pub fn register(
        pd: &ProtectionDomain,
        kind: MemoryKind,
        len: usize,
        access: AccessFlags,
    ) -> Result<Self, MemoryError> {
        let (bytes, region) = match kind {
            MemoryKind::Device => {
                let memory = Self::allocate(pd.context(), len)?;
                let region = pd.reg_memory(&memory, access)?;
                (Bytes::Device(memory), region)
            }
            MemoryKind::Heap => {
                let heap = Heap::new(len);
                // SAFETY: the heap memory outlives the region and is accessed through raw
                // pointers only.
                let region = unsafe { pd.reg_mr(heap.start(), len, access) }?;
                (Bytes::Heap(heap), region)
            }
        };
        Ok(Self {
            region: Some(region),
            bytes,
        })
    }

    fn allocate(context: &Context, len: usize) -> Result<HostMemory, MemoryError> {
        context.alloc_memory(len)
    }

    pub fn region(&self) -> &MemoryRegion {
        self.region.as_ref().expect("the region was deregistered")
    }

    pub fn deregister(&mut self) {
        let region = self.region.take().expect("the region was deregistered");
        region.deregister().expect("deregistering failed");
    }

    /// The error of trying to.
    pub fn try_deregister(&mut self) -> Option<i32> {
        let region = self.region.take().expect("the region was deregistered");
        let error = region.deregister().err()?;
        self.region = Some(error.region);
        error.source.raw_os_error()
    }

    fn start(&self) -> *mut u8 {
        match &self.bytes {
            Bytes::Device(memory) => memory.addr(),
            Bytes::Heap(heap) => heap.start(),
        }
    }

    pub fn len(&self) -> usize {
        match &self.bytes {
            Bytes::Device(memory) => memory.len(),
            Bytes::Heap(heap) => heap.len,
        }
    }

    pub fn store(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len());
        // SAFETY: inside the memory, as just checked; no reference covers it.
        unsafe { copy::write_shared(self.start().add(offset), bytes.as_ptr(), bytes.len()) };
    }

    pub fn load(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len());
        let mut bytes = vec![0; len];
        // SAFETY: inside the memory, as just checked; no reference covers it.
        unsafe { copy::read_shared(bytes.as_mut_ptr(), self.start().add(offset), len) };
        bytes
    }

    pub fn fill(&self, byte: u8) {
        self.store(0, &vec![byte; self.len()]);
    }
}

/// Zeroed heap memory that starts in the middle of a cache line, as heap memory may.
struct Heap {
    base: *mut u8,
    layout: Layout,
    len: usize,
}

/// Distance from the allocation's start.
const OFFSET: usize = 24;

// SAFETY: the memory belongs to this value alone and may be accessed from any thread.
unsafe impl std::marker::Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}

impl Heap {
    fn new(len: usize) -> Self {
        let layout = Layout::from_size_align(OFFSET + len, 64).expect("too much memory");
        // SAFETY: the size is not 0.
        let base = unsafe { alloc_zeroed(layout) };
        if base.is_null() {
            handle_alloc_error(layout);
        }
        Self { base, layout, len }
    }

    fn start(&self) -> *mut u8 {
        // SAFETY: inside the allocation.
        unsafe { self.base.add(OFFSET) }
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout; the region was deregistered before.
        unsafe { dealloc(self.base, self.layout) };
    }
}
