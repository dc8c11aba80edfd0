//! Memory that a device hands out.

use std::{fmt, io, ptr::NonNull, sync::Arc};

use crate::{
    Context, MemoryError,
    error::{check, log_destroy},
};

/// Page-aligned memory from [`Context::alloc_memory`]. Cheap to clone; it is freed when the last
/// handle and the last region registered in it are gone.
///
/// There is no way to see it as a slice: once registered, a peer may be writing to it. Its owner
/// reads and writes it through the pointer, and decides when that is right.
#[derive(Clone)]
pub struct HostMemory {
    inner: Arc<Allocation>,
}

struct Allocation {
    addr: NonNull<u8>,
    len: usize,
    context: Context,
}

// SAFETY: it is a range of addresses; what happens to the bytes is up to users of the raw pointer.
unsafe impl Send for Allocation {}
// SAFETY: as above.
unsafe impl Sync for Allocation {}

impl Drop for Allocation {
    fn drop(&mut self) {
        let (context, addr) = (self.context.as_raw(), self.addr.as_ptr().cast());
        // SAFETY: the provider gave this range with this length, and every region registered in it
        // through `ProtectionDomain::reg_memory` held a reference.
        let code = unsafe { (self.context.provider().free_memory)(context, addr, self.len) };
        log_destroy("freeing the device's memory", check(code));
    }
}

impl HostMemory {
    pub(crate) fn new(context: &Context, len: usize) -> Result<Self, MemoryError> {
        let failed = |source| MemoryError::Allocate { len, source };
        if len == 0 || len > isize::MAX.cast_unsigned() {
            return Err(failed(io::Error::from_raw_os_error(libc::EINVAL)));
        }
        // SAFETY: the context is open.
        let addr = unsafe { (context.provider().alloc_memory)(context.as_raw(), len) };
        let addr = NonNull::new(addr.cast()).ok_or_else(|| failed(io::Error::last_os_error()))?;
        Ok(Self {
            inner: Arc::new(Allocation {
                addr,
                len,
                context: context.clone(),
            }),
        })
    }

    /// First byte, aligned to a page; valid for [`len`](Self::len) bytes while a handle lives.
    #[must_use]
    pub fn addr(&self) -> *mut u8 {
        self.inner.addr.as_ptr()
    }

    /// Bytes; never 0.
    #[must_use]
    #[allow(clippy::len_without_is_empty)] // It is never empty.
    pub fn len(&self) -> usize {
        self.inner.len
    }

    /// The context it was allocated from.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostMemory")
            .field("addr", &self.addr())
            .field("len", &self.len())
            .finish()
    }
}
