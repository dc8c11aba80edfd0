//! Memory of the device or of the heap, seen through raw pointers only: peers use it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};

use verbs_sys::{AccessFlags, Context, HostMemory, MemoryRegion, ProtectionDomain, copy};

/// Has a process use the heap.
pub const ON_HEAP: &str = "VERBS_FAULTS_HEAP";

/// Zeroed bytes.
pub struct Memory {
    start: *mut u8,
    len: usize,
    owner: Owner,
}

enum Owner {
    /// Unmaps it when it goes.
    #[expect(dead_code, reason = "it is there to go")]
    Device(HostMemory),
    Heap(Layout),
}

impl Memory {
    pub fn new(context: &Context, len: usize) -> Self {
        if std::env::var_os(ON_HEAP).is_none() {
            let memory = context.alloc_memory(len).expect("no memory");
            return Self {
                start: memory.addr(),
                len,
                owner: Owner::Device(memory),
            };
        }
        let layout = Layout::from_size_align(len, 64).expect("too much memory");
        // SAFETY: nobody asks for no bytes.
        let start = unsafe { alloc_zeroed(layout) };
        if start.is_null() {
            handle_alloc_error(layout);
        }
        Self {
            start,
            len,
            owner: Owner::Heap(layout),
        }
    }

    /// Registers a part.
    ///
    /// # Safety
    /// The memory outlives the region.
    pub unsafe fn register(
        &self,
        pd: &ProtectionDomain,
        offset: usize,
        len: usize,
        access: AccessFlags,
    ) -> MemoryRegion {
        assert!(offset + len <= self.len);
        let start = self.start.wrapping_add(offset);
        // SAFETY: the range lies in the memory, which no reference covers, and which outlives the region
        // by the caller's promise.
        unsafe { pd.reg_mr(start, len, access) }.expect("no region")
    }

    pub fn store(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        let to = self.start.wrapping_add(offset);
        // SAFETY: inside the memory, as just checked; no reference covers it.
        unsafe { copy::write_shared(to, bytes.as_ptr(), bytes.len()) };
    }

    pub fn load(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len);
        let mut bytes = vec![0; len];
        let from = self.start.wrapping_add(offset);
        // SAFETY: inside the memory, as just checked; no reference covers it.
        unsafe { copy::read_shared(bytes.as_mut_ptr(), from, len) };
        bytes
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Owner::Heap(layout) = self.owner {
            // SAFETY: it was allocated so, and what was registered of it is no longer.
            unsafe { dealloc(self.start, layout) };
        }
    }
}
