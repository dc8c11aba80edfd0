//! Registering memory: what is refused, and what is not.

use std::{
    ffi::c_void,
    io,
    ptr::{self, NonNull},
};

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, mprotect, munmap};
use verbs_sys::{AccessFlags, MemoryError, ProtectionDomain, find_device};

use crate::support::ALL_ACCESS;

const PAGE: usize = 4096;

fn domain() -> ProtectionDomain {
    let device = find_device(None).expect("no device");
    let context = device.open().expect("the device does not open");
    context.alloc_pd().expect("no protection domain")
}

/// Anonymous pages.
struct Pages(NonNull<c_void>, usize);

impl Pages {
    fn new(count: usize) -> Self {
        let (len, flags) = (count * PAGE, MapFlags::PRIVATE);
        // SAFETY: a new mapping, where the system likes.
        let start = unsafe {
            mmap_anonymous(
                ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                flags,
            )
        };
        let start = NonNull::new(start.expect("no memory")).expect("no memory");
        Self(start, len)
    }

    fn page(&self, index: usize) -> *mut u8 {
        // SAFETY: callers name a page of the mapping, or the end.
        unsafe { self.0.as_ptr().cast::<u8>().add(index * PAGE) }
    }

    fn unmap(&self, index: usize) {
        // SAFETY: nothing uses the page.
        unsafe { munmap(self.page(index).cast(), PAGE) }.expect("cannot unmap");
    }

    fn protect(&self, index: usize) {
        // SAFETY: nothing writes to the page.
        let result = unsafe {
            let flags = rustix::mm::MprotectFlags::READ;
            mprotect(self.page(index).cast(), PAGE, flags)
        };
        result.expect("cannot protect");
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: nothing uses the mapping any more; a hole in it does not matter.
        let _ = unsafe { munmap(self.0.as_ptr(), self.1) };
    }
}

/// The error of registering this range, or `None` if it was registered.
fn register(pd: &ProtectionDomain, addr: *mut u8, len: usize, access: AccessFlags) -> Option<i32> {
    // SAFETY: the range is not used while it is registered, and the region is dropped here.
    match unsafe { pd.reg_mr(addr, len, access) } {
        Ok(_) => None,
        Err(MemoryError::Register { source, .. }) => source.raw_os_error(),
        Err(other) => panic!("another error: {other}"),
    }
}

#[test]
fn memory_that_is_not_there_is_refused() {
    let pd = domain();
    let pages = Pages::new(5);
    pages.unmap(2);
    let fault = Some(libc::EFAULT);
    assert_eq!(register(&pd, pages.page(2), PAGE, ALL_ACCESS), fault);
    assert_eq!(register(&pd, pages.page(0), 5 * PAGE, ALL_ACCESS), fault);
    assert_eq!(register(&pd, pages.page(1), PAGE + 1, ALL_ACCESS), fault);
    // SAFETY: one before a page of the mapping.
    let before = unsafe { pages.page(3).sub(1) };
    assert_eq!(register(&pd, before, 2, ALL_ACCESS), fault);
    assert_eq!(
        register(&pd, pages.page(2), PAGE, AccessFlags::empty()),
        fault
    );
    assert_eq!(register(&pd, pages.page(0), 2 * PAGE, ALL_ACCESS), None);
    assert_eq!(register(&pd, pages.page(3), 2 * PAGE, ALL_ACCESS), None);
}

#[test]
fn addresses_of_nothing_are_refused() {
    let pd = domain();
    for addr in [8, 1 << 46, usize::MAX - 100] {
        let addr = ptr::without_provenance_mut(addr);
        assert!(register(&pd, addr, 64, ALL_ACCESS).is_some());
    }
    // A range that wraps around.
    let pages = Pages::new(1);
    assert!(register(&pd, pages.page(0), usize::MAX, ALL_ACCESS).is_some());
}

#[test]
fn memory_that_cannot_be_written_is_for_reading_alone() {
    let pd = domain();
    let pages = Pages::new(3);
    pages.protect(1);
    for access in [AccessFlags::LOCAL_WRITE, ALL_ACCESS] {
        let refused = register(&pd, pages.page(0), 3 * PAGE, access);
        assert_eq!(refused, Some(libc::EFAULT));
    }
    let reading = AccessFlags::REMOTE_READ;
    assert_eq!(register(&pd, pages.page(0), 3 * PAGE, reading), None);
}

#[test]
fn remote_changes_need_local_write() {
    let pd = domain();
    let pages = Pages::new(1);
    let remote = [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_ATOMIC];
    for access in remote {
        let refused = register(&pd, pages.page(0), PAGE, access);
        assert_eq!(refused, Some(libc::EINVAL), "{access:?}");
        let both = access | AccessFlags::LOCAL_WRITE;
        assert_eq!(register(&pd, pages.page(0), PAGE, both), None);
    }
}

/// A range can be registered twice, in parts, and at any alignment.
#[test]
fn regions_may_overlap() {
    let pd = domain();
    let pages = Pages::new(4);
    let at = |offset| {
        // SAFETY: inside the mapping.
        unsafe { pages.page(0).add(offset) }
    };
    let mut keys = Vec::new();
    let mut regions = Vec::new();
    for (offset, len) in [
        (0, 4 * PAGE),
        (0, 4 * PAGE),
        (1, 1),
        (PAGE - 1, 2),
        (5000, 9000),
    ] {
        // SAFETY: the regions go before the mapping does.
        let region = unsafe { pd.reg_mr(at(offset), len, ALL_ACCESS) }.expect("was refused");
        assert_eq!(region.addr(), at(offset).addr() as u64);
        assert_eq!(region.len(), len);
        assert!(!keys.contains(&region.rkey()), "two regions with one key");
        keys.push(region.rkey());
        regions.push(region);
    }
    for region in regions {
        region.deregister().expect("deregistering failed");
    }
}

#[test]
fn memory_of_the_device_is_zero_and_aligned() {
    let pd = domain();
    for len in [1, 100, PAGE, 3 * PAGE + 1, 5 << 20] {
        let memory = pd.context().alloc_memory(len).expect("no memory");
        assert_eq!(memory.len(), len);
        assert!(memory.addr().addr().is_multiple_of(PAGE));
        let mut bytes = vec![1; len];
        // SAFETY: both are valid for so many bytes.
        unsafe { verbs_sys::copy::read_shared(bytes.as_mut_ptr(), memory.addr(), len) };
        assert!(bytes.iter().all(|byte| *byte == 0));
        let region = pd.reg_memory(&memory, ALL_ACCESS).expect("was refused");
        assert_eq!(
            (region.addr(), region.len()),
            (memory.addr().addr() as u64, len)
        );
    }
    let none = pd
        .context()
        .alloc_memory(0)
        .expect_err("memory of no bytes");
    let MemoryError::Allocate { source, .. } = none else {
        panic!("another error: {none}");
    };
    assert_eq!(source.kind(), io::ErrorKind::InvalidInput);
}
