//! Once warm, messages and reads allocate nothing: counted over all threads of the process. So there is no harness,
//! whose own thread may get no processor until then.

mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use common::*;
use verbs_sys::AccessFlags;
use wire::{Config, Event, OutgoingMessage, RemoteAddr};

/// The system's allocator, counting.
struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is passed on as it is; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// A request with a body, its reply in the request's own buffer, and a READ; every byte looked at.
fn round_trip(pair: &mut Pair, number: u64, remote: RemoteAddr) {
    let mut request = pair.client.message(512).unwrap();
    let value = Note {
        number,
        text: b"a request",
    };
    request
        .encode_with_body(NOTE, number, &value, 100)
        .unwrap()
        .fill(number as u8);
    pair.client.send(pair.to_server, request).unwrap();

    let Event::Message { conn, message } = spin(&mut pair.server) else {
        panic!()
    };
    expect_note(&message, number, b"a request");
    assert!(message.body().len() == 100 && message.body().iter().all(|&byte| byte == number as u8));
    let mut reply = OutgoingMessage::from(message.into_buffer());
    reply
        .encode(
            NOTE,
            number,
            &Note {
                number,
                text: b"a reply",
            },
        )
        .unwrap();
    pair.server.send(conn, reply).unwrap();

    let Event::Message { message, .. } = spin(&mut pair.client) else {
        panic!()
    };
    expect_note(&message, number, b"a reply");
    let into = message.into_buffer();
    pair.client
        .read_chain(
            pair.to_server,
            into,
            &[(0..64, remote), (64..72, remote)],
            number,
        )
        .unwrap();
    let Event::ReadDone {
        token,
        result: Ok(()),
        buffer,
        ..
    } = spin(&mut pair.client)
    else {
        panic!()
    };
    assert_eq!(token, number);
    assert!(buffer.as_slice()[..72].iter().all(|&byte| byte == 0x3c));
}

fn main() {
    let mut pair = Pair::new(Config::default(), Config::default());
    // It allocates when it waits for another connection, however late that is.
    pair.acceptance.end();
    let mut source = pair.server.pool().take(64).unwrap();
    source.as_mut_slice().fill(0x3c);
    let remote = RemoteAddr {
        addr: source.addr(),
        rkey: source.rkey(),
    };
    for number in 0..1000 {
        round_trip(&mut pair, number, remote);
    }
    let registered =
        [&pair.server, &pair.client].map(|endpoint| endpoint.pool().stats().registrations);
    // The device's own thread looks after the queue pairs some time after memory was taken away.
    let memory = pair.server_domain.context().alloc_memory(64).unwrap();
    let access = AccessFlags::LOCAL_WRITE;
    drop(pair.server_domain.reg_memory(&memory, access).unwrap());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for number in 0..100_000 {
        round_trip(&mut pair, number, remote);
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(allocations, 0, "allocations in 100,000 round trips");
    let registrations =
        [&pair.server, &pair.client].map(|endpoint| endpoint.pool().stats().registrations);
    assert_eq!(registrations, registered, "memory was registered");
}
