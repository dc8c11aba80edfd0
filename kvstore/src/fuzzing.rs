//! Parsers of bytes that a peer controls, for a fuzzer. No part of the API: it is there only with
//! `--cfg fuzzing`, and in this crate's own tests.

#[path = "../../fuzz/target.rs"]
mod target;

pub use target::Target;

use verbs_sys::RemoteAddr;
use wire::{Encode, Frame, encode_with_body, view};

use crate::block::{self, Checksummed, Expected};
use crate::limits::{MAX_VALUE, check_key, check_value};
use crate::protocol::{
    Commit, Delete, Get, Location, Put, Reply, Reserve, Stat, Statistics, Status, Unpin, Value,
    kind,
};
use crate::segments;
use crate::server::request::{self, Request};

/// All of them.
pub fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "request",
            run: request,
            seeds: requests,
        },
        Target {
            name: "reply",
            run: reply,
            seeds: replies,
        },
        Target {
            name: "block",
            run: block,
            seeds: blocks,
        },
    ]
}

/// As aligned as a pooled buffer.
#[repr(align(64))]
struct Slot([u8; SLOT]);

const SLOT: usize = 8 << 10;

fn with_frame(bytes: &[u8], look: impl FnOnce(&Frame<'_>) -> bool) -> bool {
    let mut slot = Slot([0; SLOT]);
    let Some(place) = slot.0.get_mut(..bytes.len()) else {
        return false;
    };
    place.copy_from_slice(bytes);
    Frame::parse(place).is_ok_and(|frame| look(&frame))
}

fn frame<T: Encode>(kind: u16, message: &T, body: &[u8]) -> Vec<u8> {
    let mut slot = Slot([0; SLOT]);
    let (len, room) =
        encode_with_body(&mut slot.0, kind, 9, message, body.len() as u32).expect("enough room");
    room.copy_from_slice(body);
    slot.0[..len].to_vec()
}

/// What a client asks a server.
fn request(bytes: &[u8]) -> bool {
    with_frame(bytes, |frame| match request::parse(frame) {
        Ok(Request::Put { key, value }) => {
            check_value(value.len()).expect("a value within the limits");
            check_key(key).expect("a key within the limits");
            value.len() <= bytes.len()
        }
        Ok(Request::Commit { key, length, .. }) => {
            check_value(length).expect("a value within the limits");
            check_key(key).expect("a key within the limits");
            true
        }
        Ok(Request::Get { key } | Request::Delete { key }) => {
            check_key(key).expect("a key within the limits");
            true
        }
        Ok(Request::Reserve { length }) => {
            check_value(length).expect("a value within the limits");
            true
        }
        Ok(Request::Unpin { .. } | Request::Stat) => true,
        Err(status) => {
            assert!(matches!(status, Status::Malformed | Status::OutOfLimits));
            false
        }
    })
}

fn requests() -> Vec<Vec<u8>> {
    let commit = Commit {
        key: b"key",
        reservation: 7,
        length: 9,
        again: true,
    };
    vec![
        frame(kind::PUT, &Put { key: b"key" }, b"value"),
        frame(kind::RESERVE, &Reserve { length: 5 }, b""),
        frame(kind::COMMIT, &commit, b""),
        frame(kind::GET, &Get { key: b"key" }, b""),
        frame(kind::DELETE, &Delete { key: b"k" }, b""),
        frame(kind::UNPIN, &Unpin { version: 5 }, b""),
        frame(kind::STAT, &Stat { reserved: 0 }, b""),
    ]
}

/// What a server answers.
fn reply(bytes: &[u8]) -> bool {
    with_frame(bytes, |frame| match frame.header().kind {
        kind::REPLY => view::<Reply>(frame).is_ok_and(|reply| {
            let places = [&reply.location, &reply.reserved].map(Location::from);
            let status = Status::from(reply.status);
            std::hint::black_box((status, reply.cacheable));
            places.iter().for_each(read);
            true
        }),
        kind::VALUE => view::<Value>(frame).is_ok_and(|value| {
            read(&Location::from(&value.location));
            true
        }),
        kind::STATISTICS => view::<Statistics>(frame).is_ok_and(|statistics| {
            std::hint::black_box(Statistics::from(statistics));
            true
        }),
        _ => false,
    })
}

/// What a client would READ of the value at a place.
fn read(place: &Location) {
    let length = place.length as usize;
    if check_value(length).is_err() {
        return;
    }
    let remote = RemoteAddr {
        addr: place.address,
        rkey: place.rkey,
    };
    let ranges = segments::of(0..length, remote).map(|(range, _)| range.len());
    assert_eq!(ranges.sum::<usize>(), length);
}

fn replies() -> Vec<Vec<u8>> {
    let location = Location {
        address: 1,
        version: 2,
        rkey: 3,
        length: 4,
    };
    let reply = Reply {
        location,
        reserved: Location::NONE,
        status: Status::Registration,
        cacheable: true,
    };
    // Made up: there is no memory there.
    let nowhere = Reply {
        location: Location {
            address: u64::MAX,
            length: MAX_VALUE as u32,
            ..location
        },
        ..reply
    };
    vec![
        frame(kind::REPLY, &reply, b""),
        frame(kind::REPLY, &nowhere, b""),
        frame(kind::VALUE, &Value { location }, b"four"),
        frame(kind::STATISTICS, &Statistics::default(), b""),
    ]
}

/// Version and key hash that a reader expects, and the block that it fetched: it believes nothing
/// but what a server has written for these.
fn block(bytes: &[u8]) -> bool {
    let mut words = bytes.chunks_exact(8);
    let mut word = || {
        let word = words.next()?.try_into().ok()?;
        Some(u64::from_le_bytes(word))
    };
    let (Some(version), Some(key_hash)) = (word(), word()) else {
        return false;
    };
    let fetched = &bytes[16..];
    let Some(header) = block::Header::parse(fetched) else {
        assert!(fetched.len() < block::HEADER);
        return false;
    };
    let value = &fetched[block::HEADER..];
    let value = &value[..value.len().min(block::CHECKSUMMED)];
    let expected = Expected {
        version,
        key_hash,
        length: value.len(),
    };
    let matches = expected.matches(&header, Checksummed::of(value));
    let written = block::Header::live(expected, Checksummed::of(value));
    assert_eq!(matches, fetched.starts_with(written.bytes()));
    matches
}

fn blocks() -> Vec<Vec<u8>> {
    let block = |value: &[u8]| {
        let expected = Expected {
            version: 3,
            key_hash: crate::hash::key_hash(b"key"),
            length: value.len(),
        };
        let header = block::Header::live(expected, Checksummed::of(value));
        let mut bytes = expected.version.to_le_bytes().to_vec();
        bytes.extend(expected.key_hash.to_le_bytes());
        bytes.extend(header.bytes());
        bytes.extend(value);
        bytes
    };
    vec![block(b""), block(b"value"), block(&[7; 100])]
}

#[test]
fn parsers_stand_what_is_near_to_good_bytes() {
    target::try_near_the_seeds(&targets());
}
