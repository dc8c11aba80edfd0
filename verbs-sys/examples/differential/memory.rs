//! Registered memory, seen through raw pointers only: the device writes to it.

use std::sync::Arc;

use verbs_sys::{AccessFlags, HostMemory, MemoryError, MemoryRegion, ProtectionDomain, copy};

use crate::program::RegionPlan;
use crate::random::Random;

/// A region and its bytes.
pub struct Memory {
    /// Goes before the bytes do.
    pub region: Arc<MemoryRegion>,
    bytes: Bytes,
    len: usize,
    /// What `changed` said last.
    digest: u64,
}

enum Bytes {
    Device(HostMemory),
    Heap(Heap),
}

/// Zeroed words of the heap. The bytes begin three words behind its start, as heap memory seldom
/// begins with a cache line.
struct Heap(*mut [u64]);

const SKIPPED: usize = 3;

impl Heap {
    fn new(len: usize) -> Self {
        let words = vec![0; SKIPPED + len.div_ceil(8)];
        Self(Box::into_raw(words.into_boxed_slice()))
    }
}

impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: it came from a box, and its region was deregistered before.
        drop(unsafe { Box::from_raw(self.0) });
    }
}

impl Bytes {
    fn start(&self) -> *mut u8 {
        match self {
            Self::Device(memory) => memory.addr(),
            Self::Heap(Heap(words)) => words.cast::<u64>().wrapping_add(SKIPPED).cast(),
        }
    }
}

impl Memory {
    pub fn new(
        pd: &ProtectionDomain,
        heap: bool,
        len: usize,
        access: AccessFlags,
    ) -> Result<Self, MemoryError> {
        let bytes = if heap {
            Bytes::Heap(Heap::new(len))
        } else {
            Bytes::Device(pd.context().alloc_memory(len)?)
        };
        // SAFETY: the memory outlives the region, and no reference to its bytes exists.
        let region = unsafe { pd.reg_mr(bytes.start(), len, access) }?;
        Ok(Self {
            region: Arc::new(region),
            bytes,
            len,
            digest: 0,
        })
    }

    pub fn of(pd: &ProtectionDomain, heap: bool, plan: &RegionPlan) -> Result<Self, MemoryError> {
        Self::new(pd, heap, plan.len as usize, plan.access)
    }

    pub fn store(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= self.len);
        let start = self.bytes.start().wrapping_add(offset);
        // SAFETY: inside the memory, as just checked; no reference covers it.
        unsafe { copy::write_shared(start, bytes.as_ptr(), bytes.len()) };
    }

    pub fn refill(&self, random: &mut Random) {
        let words = (0..self.len.div_ceil(8)).flat_map(|_| random.next().to_le_bytes());
        let bytes: Vec<u8> = words.take(self.len).collect();
        self.store(0, &bytes);
    }

    /// The digest of the bytes, if they are others than when this was last asked. `buffer` is only
    /// room for a copy.
    pub fn changed(&mut self, buffer: &mut Vec<u64>) -> Option<u64> {
        buffer.clear();
        buffer.resize(self.len.div_ceil(8), 0);
        let start = self.bytes.start();
        // SAFETY: the buffer has room for as many; no reference covers the memory.
        unsafe { copy::read_shared(buffer.as_mut_ptr().cast(), start, self.len) };
        // FNV-1a by words: what differs by chance differs in it.
        let digest = buffer
            .iter()
            .fold(0xCBF2_9CE4_8422_2325, |digest: u64, word| {
                let mixed = (digest ^ word).wrapping_mul(0x0000_0100_0000_01B3);
                mixed ^ (mixed >> 29)
            });
        let is_new = digest != self.digest;
        self.digest = digest;
        is_new.then_some(digest)
    }
}
