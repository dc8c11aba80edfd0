//! A source that counts what is registered and fails when told to.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard};

use crate::raw::HeapMemory;
use crate::source::{Registration, Source, SourceError};

/// What the tests see of a [`FakeSource`].
#[derive(Clone, Debug, Default)]
pub(super) struct Fake(Arc<Mutex<Book>>);

#[derive(Debug, Default)]
pub(super) struct Book {
    /// Registered ranges: address to length and lkey.
    pub(super) ranges: BTreeMap<usize, (usize, u32)>,
    /// Registrations ever made.
    pub(super) made: u32,
    /// Longest registration that succeeds.
    pub(super) longest: Option<usize>,
    /// Refuse to deregister.
    pub(super) keep: bool,
}

impl Book {
    /// Bytes registered.
    pub(super) fn bytes(&self) -> usize {
        self.ranges.values().map(|&(len, _)| len).sum()
    }

    #[cfg(not(loom))]
    /// The lkey of the range that holds `len` bytes from `addr`.
    pub(super) fn lkey(&self, addr: usize, len: usize) -> Option<u32> {
        let (&start, &(total, lkey)) = self.ranges.range(..=addr).next_back()?;
        (addr + len <= start + total).then_some(lkey)
    }
}

impl Fake {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn source(&self) -> FakeSource {
        FakeSource(self.clone())
    }

    pub(super) fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap()
    }
}

#[derive(Debug)]
pub(super) struct FakeSource(Fake);

impl Source for FakeSource {
    fn register(&self, len: usize) -> Result<Box<dyn Registration>, SourceError> {
        let mut book = self.0.book();
        if book.longest.is_some_and(|longest| len > longest) {
            return Err("the fake was told to fail".into());
        }
        let memory = HeapMemory::new(len)?;
        memory.settle();
        book.made += 1;
        let lkey = book.made;
        book.ranges
            .insert(memory.addr().as_ptr().addr(), (len, lkey));
        Ok(Box::new(FakeRegistration {
            memory,
            len,
            lkey,
            fake: self.0.clone(),
        }))
    }
}

#[derive(Debug)]
struct FakeRegistration {
    memory: HeapMemory,
    len: usize,
    lkey: u32,
    fake: Fake,
}

impl Registration for FakeRegistration {
    fn addr(&self) -> NonNull<u8> {
        self.memory.addr()
    }

    fn len(&self) -> usize {
        self.len
    }

    fn lkey(&self) -> u32 {
        self.lkey
    }

    fn rkey(&self) -> u32 {
        !self.lkey
    }

    fn deregister(self: Box<Self>) -> Result<(), SourceError> {
        let mut book = self.fake.book();
        book.ranges.remove(&self.memory.addr().as_ptr().addr());
        if book.keep {
            return Err("the fake was told to keep it".into());
        }
        Ok(())
    }
}
