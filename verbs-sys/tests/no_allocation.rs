//! Posting, polling and completing allocate nothing once the queue pair exists.

mod common;

use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
};

use common::{Pair, Result, bytes, remote};
use verbs_sys::{SendFlags, WcStatus, owned::PreparedRequest};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: everything is left to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's contract is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller's contract is the same.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn nothing_is_allocated_after_the_queue_pair() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(4096, 0)?;
    let mut buffer = pair.region(4096, 0)?;
    let mut receive = pair.region(4096, 0)?;
    let mut counts = [0; 2];
    for count in &mut counts {
        let before = ALLOCATIONS.get();
        for round in 0..100 {
            pair.right.qp.post_recv(receive)?;
            pair.left
                .qp
                .send_inline(b"message", SendFlags::empty(), Some(round))?;
            receive = pair.right.next()?.buffer.ok_or("no buffer")?;
            pair.left.next()?;
            pair.left
                .qp
                .write(buffer, 0..64, remote(&target, 0), None)?;
            buffer = pair.left.next()?.buffer.ok_or("no buffer")?;
            let parts = [(0..64, remote(&target, 0)), (64..128, remote(&target, 64))];
            pair.left.qp.read_chain(buffer, &parts)?;
            buffer = pair.left.next()?.buffer.ok_or("no buffer")?;
        }
        *count = ALLOCATIONS.get() - before;
    }
    // The device may set something up at the first message.
    assert_eq!(counts[1], 0, "first hundred rounds: {}", counts[0]);
    Ok(())
}

/// A million executions of a chain, with fields set between them.
#[test]
fn executing_a_prepared_chain_allocates_nothing() -> Result {
    const EXECUTIONS: u64 = 1_000_000;
    let mut pair = Pair::new()?;
    let target = pair.region(4096, 0)?;
    let buffers = vec![pair.region(4096, 1)?, pair.region(4096, 2)?];
    let requests: Vec<_> = (0..4)
        .map(|at| PreparedRequest::write(at % 2, at * 64..at * 64 + 8, remote(&target, 0), None))
        .collect();
    let chain = pair.left.qp.prepare(buffers, &requests)?;
    let before = ALLOCATIONS.get();
    for round in 0..EXECUTIONS {
        let at = round as usize % 4;
        let mut fields = pair.left.qp.prepared(chain, at).ok_or("no request")?;
        fields.set_remote(remote(&target, round % 512 * 8));
        fields.set_local(at % 2, at..at + 8)?;
        pair.left.qp.execute(chain)?;
        let done = pair.left.next()?;
        assert_eq!(
            (done.token, done.status),
            (chain.token(), WcStatus::Success)
        );
    }
    assert_eq!(ALLOCATIONS.get() - before, 0);
    let words: Vec<u64> = bytes(&target, 0..4096)
        .chunks(8)
        .map(|word| u64::from_ne_bytes(word.try_into().expect("8 bytes")))
        .collect();
    let whole = [0x0101_0101_0101_0101, 0x0202_0202_0202_0202];
    assert!(words.iter().all(|word| whole.contains(word)));
    Ok(())
}
