//! The fast paths of a client take nothing from the heap, and register nothing.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use common::{Server, value};
use kvstore::Wait;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting the allocations of each thread.
struct Counting;

// SAFETY: everything is passed on to the system's allocator; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread at its end has no counter any more.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: by the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, address: *mut u8, layout: Layout) {
        // SAFETY: by the caller's promise.
        unsafe { System.dealloc(address, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn a_steady_client_neither_allocates_nor_registers() {
    let server = Server::start(&["--wait", "poll"]);
    let mut client = server.client_with(|config| config.wait = Wait::Poll);
    let keys: Vec<[u8; 8]> = (0..50u64).map(u64::to_le_bytes).collect();
    for length in [0, 128, 513, 4096, 50_000] {
        let bytes = value(1, length);
        let mut buffer = client.buffer(length).unwrap();
        buffer.copy_from_slice(&bytes);
        let mut counted = (0, 0);
        for round in 0..4 {
            let registered = client.stats().registrations;
            let start = ALLOCATIONS.get();
            for key in &keys {
                client.put(key, &bytes).unwrap();
                client.put_buffer(key, &mut buffer).unwrap();
                let got = client.get(key).unwrap().expect("stored");
                assert!(*got == *bytes);
            }
            let allocated = ALLOCATIONS.get() - start;
            // The first rounds fill the free lists and the table of locations.
            if round > 1 {
                counted.0 += allocated;
                counted.1 += client.stats().registrations - registered;
            }
        }
        assert_eq!(
            counted,
            (0, 0),
            "allocations and registrations at {length} bytes"
        );
    }
    assert_eq!(client.stats().requested_gets, 0, "every get was one-sided");
}
