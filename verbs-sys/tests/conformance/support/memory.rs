//! Memory of both kinds, seen through raw pointers only: peers write to it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use verbs_sys::{
    AccessFlags, Context, HostMemory, MemoryError, MemoryRegion, ProtectionDomain, Rereg, copy,
};

use super::command::MemoryKind;

/// A registered piece of memory.
pub struct Memory {
    /// Goes before the bytes do.
    region: Option<MemoryRegion>,
    bytes: Bytes,
    /// What the region covered before it was changed.
    former: Vec<Bytes>,
}

enum Bytes {
    Device(HostMemory),
    Heap(Heap),
}

impl Bytes {
    fn new(context: &Context, kind: MemoryKind, len: usize) -> Result<Self, MemoryError> {
        Ok(match kind {
            MemoryKind::Device => Self::Device(context.alloc_memory(len)?),
            MemoryKind::Heap => Self::Heap(Heap::new(len)),
        })
    }

    fn start(&self) -> *mut u8 {
        match self {
            Self::Device(memory) => memory.addr(),
            Self::Heap(heap) => heap.start(),
        }
    }
}

impl Memory {
    /// Allocates and registers `len` zeroed bytes.
    pub fn register(
        pd: &ProtectionDomain,
        kind: MemoryKind,
        len: usize,
        access: AccessFlags,
    ) -> Result<Self, MemoryError> {
        let bytes = Bytes::new(pd.context(), kind, len)?;
        let region = match &bytes {
            Bytes::Device(memory) => pd.reg_memory(memory, access)?,
            // SAFETY: the heap memory outlives the region and is accessed through raw pointers only.
            Bytes::Heap(heap) => unsafe { pd.reg_mr(heap.start(), len, access) }?,
        };
        Ok(Self {
            region: Some(region),
            bytes,
            former: Vec::new(),
        })
    }

    /// Changes the region; the error if that fails.
    pub fn rereg(
        &mut self,
        kind: MemoryKind,
        len: Option<usize>,
        pd: Option<&ProtectionDomain>,
        access: Option<AccessFlags>,
    ) -> Result<(), i32> {
        let region = self.region.take().expect("the region was deregistered");
        let context = region.protection_domain().context();
        let new = len.map(|len| Bytes::new(context, kind, len).expect("no memory"));
        let changed = match &new {
            Some(Bytes::Device(memory)) => region.rereg(Rereg {
                memory: Some(memory),
                pd,
                access,
            }),
            Some(Bytes::Heap(heap)) => {
                let range = (heap.start(), heap.len);
                // SAFETY: as in `register`.
                unsafe { region.rereg_mr(Some(range), pd, access) }
            }
            // SAFETY: as in `register`.
            None => unsafe { region.rereg_mr(None, pd, access) },
        };
        match changed {
            Ok(region) => {
                self.region = Some(region);
                self.former
                    .extend(new.map(|new| std::mem::replace(&mut self.bytes, new)));
                Ok(())
            }
            Err(error) => {
                self.region = Some(error.region);
                Err(error.source.raw_os_error().unwrap_or(0))
            }
        }
    }

    /// Bytes that the region covered before it last got others.
    pub fn load_former(&self, offset: usize, len: usize) -> Vec<u8> {
        let former = self.former.last().expect("was never changed");
        let mut bytes = vec![0; len];
        // SAFETY: inside the memory, as far as the test knows; no reference covers it.
        unsafe { copy::read_shared(bytes.as_mut_ptr(), former.start().add(offset), len) };
        bytes
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
        self.bytes.start()
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
