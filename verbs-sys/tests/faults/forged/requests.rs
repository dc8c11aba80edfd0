//! A requester that lies to a responder.

use std::{io::Write, net::Shutdown};

use crate::support::{
    Grant, Setup,
    node::GRANTED,
    wire::{
        self, ACKNOWLEDGE, ANNOUNCE, ATOMIC_REQUEST, ATOMIC_RESPONSE, READ_REQUEST, READ_RESPONSE,
        SEND, SEND_INVALIDATE, Segment, TERMINATE, WRITE,
    },
};

use super::{Bed, begin};

/// What TERMINATE says: layer and kind, and the code.
const DENIED: [u8; 2] = [0x01, 2];
const INVALID: [u8; 2] = [0x02, 6];
const NONSENSE: [u8; 2] = [0x02, 7];
const UNSPECIFIED: [u8; 2] = [0x02, 0xff];

/// Lies with a good first part, which is placed.
const PLACED: [&str; 2] = [
    "a WRITE in parts that was not announced",
    "a message in a WRITE",
];

/// A name, what is sent, and what the device says to it.
type Lie = (&'static str, Vec<Vec<u8>>, [u8; 2]);

fn write(grant: Grant, offset: i64, len: usize) -> Segment {
    let addr = grant.addr.wrapping_add_signed(offset);
    Segment::tagged(WRITE, grant.rkey, addr, &vec![0xee; len])
}

fn send(msn: u32, len: usize) -> Segment {
    Segment::untagged(SEND, msn, &vec![0xee; len])
}

/// `stale` is a key that was good.
fn lies(grant: Grant, stale: u32) -> Vec<Lie> {
    let end = GRANTED as i64;
    let announce = |offset: u64, len| {
        let payload = wire::announcement(grant.rkey, grant.addr + offset, len);
        Segment::untagged(ANNOUNCE, 1, &payload)
    };
    let read = |offset: u64, len| {
        let payload = wire::read_request(1, len, grant.rkey, grant.addr + offset);
        Segment::untagged(READ_REQUEST, 1, &payload)
    };
    let add = |offset: u64| {
        let payload = wire::fetch_add(1, grant.rkey, grant.addr.wrapping_add(offset));
        Segment::untagged(ATOMIC_REQUEST, 1, &payload)
    };
    let unknown = |key| Grant { rkey: key, ..grant };
    let part = |segment: Segment| Segment {
        last: false,
        ..segment
    };
    let at = |segment: Segment, offset| Segment { offset, ..segment };
    let one = |segment: Segment| vec![segment.frame()];
    let many = |segments: &[Segment]| segments.iter().map(Segment::frame).collect();
    let mut spoilt = write(grant, 0, 100).frame();
    spoilt[50] ^= 1;
    vec![
        ("a message left out", one(send(2, 8)), NONSENSE),
        ("message 0", one(send(0, 8)), NONSENSE),
        ("a message twice", many(&[send(1, 8), send(1, 8)]), NONSENSE),
        ("a message's middle", one(at(send(1, 8), 8)), NONSENSE),
        (
            "a gap in a message",
            many(&[part(send(1, 8)), at(send(1, 8), 16)]),
            NONSENSE,
        ),
        (
            "a part twice",
            many(&[part(send(1, 8)), part(send(1, 8))]),
            NONSENSE,
        ),
        (
            "a message too long",
            many(&[
                part(send(1, 60_000)),
                part(at(send(1, 60_000), 60_000)),
                at(send(1, 60_000), 120_000),
            ]),
            INVALID,
        ),
        (
            "a WRITE in a message",
            many(&[part(send(1, 8)), write(grant, 0, 8)]),
            NONSENSE,
        ),
        (
            "a READ in a message",
            many(&[part(send(1, 8)), read(0, 8)]),
            NONSENSE,
        ),
        (
            "an addition in a message",
            many(&[part(send(1, 8)), add(0)]),
            NONSENSE,
        ),
        (
            "an announcement in a message",
            many(&[part(send(1, 8)), announce(0, 8)]),
            NONSENSE,
        ),
        (
            "a message in a WRITE",
            many(&[part(write(grant, 0, 8)), at(send(1, 8), 8)]),
            NONSENSE,
        ),
        (
            "a WRITE across the end",
            one(write(grant, end - 4, 8)),
            DENIED,
        ),
        ("a WRITE behind the end", one(write(grant, end, 1)), DENIED),
        ("a WRITE before the start", one(write(grant, -1, 1)), DENIED),
        ("a WRITE to nowhere", one(write(grant, i64::MAX, 8)), DENIED),
        (
            "a WRITE around the end of all",
            one(at(write(grant, 0, 8), u64::MAX - 3)),
            DENIED,
        ),
        ("a stale key", one(write(unknown(stale), 0, 8)), DENIED),
        (
            "a guessed key",
            one(write(unknown(grant.rkey ^ 0x80), 0, 8)),
            DENIED,
        ),
        ("key 0", one(write(unknown(0), 0, 8)), DENIED),
        (
            "a WRITE in parts that was not announced",
            many(&[part(write(grant, 0, 8)), write(grant, 8, 8)]),
            NONSENSE,
        ),
        (
            "an announcement across the end",
            one(announce(8, GRANTED as u32)),
            DENIED,
        ),
        (
            "more than was announced",
            many(&[announce(0, 100), write(grant, 0, 200)]),
            NONSENSE,
        ),
        (
            "less than was announced",
            many(&[announce(0, 200), write(grant, 0, 100)]),
            NONSENSE,
        ),
        (
            "elsewhere than was announced",
            many(&[announce(0, 200), write(grant, 8, 200)]),
            NONSENSE,
        ),
        (
            "with another key than was announced",
            many(&[announce(0, 200), write(unknown(stale), 0, 200)]),
            NONSENSE,
        ),
        (
            "a READ across the end",
            one(read(8, GRANTED as u32)),
            DENIED,
        ),
        ("a READ of everything", one(read(0, u32::MAX)), DENIED),
        ("an addition to no word", one(add(4)), INVALID),
        (
            "an addition behind the end",
            one(add(GRANTED as u64)),
            DENIED,
        ),
        (
            "an addition to nowhere",
            one(add(0u64.wrapping_sub(8))),
            DENIED,
        ),
        (
            "an answer to no READ",
            one(Segment::tagged(READ_RESPONSE, 1, 0, &[0xee; 8])),
            NONSENSE,
        ),
        (
            "an answer to no addition",
            one(Segment::untagged(
                ATOMIC_RESPONSE,
                1,
                &wire::atomic_response(1, 1),
            )),
            NONSENSE,
        ),
        (
            "an acknowledgement of nothing",
            one(Segment::acknowledge(1)),
            NONSENSE,
        ),
        (
            "a TERMINATE",
            one(Segment::untagged(TERMINATE, 1, &[0x02, 7, 0, 0])),
            NONSENSE,
        ),
        (
            "a key to invalidate that is no window's",
            one(Segment {
                field: grant.rkey,
                ..Segment::untagged(SEND_INVALIDATE, 1, &[0xee; 8])
            }),
            DENIED,
        ),
        (
            "a READ request too short",
            one(Segment::untagged(READ_REQUEST, 1, &[0; 27])),
            NONSENSE,
        ),
        (
            "an addition too long",
            one(Segment::untagged(ATOMIC_REQUEST, 1, &[0; 53])),
            NONSENSE,
        ),
        ("a wrong CRC", vec![spoilt], [0x20, 2]),
        ("an empty segment", vec![wire::frame(&[])], UNSPECIFIED),
        (
            "a segment without a header",
            vec![wire::frame(&[0x41, 0x43, 0])],
            UNSPECIFIED,
        ),
        ("a segment too long", vec![vec![0xff; 4]], UNSPECIFIED),
        (
            "half a header",
            vec![wire::frame(&send(1, 0).ulpdu()[..17])],
            UNSPECIFIED,
        ),
        (
            "DDP of the future",
            one(Segment {
                ddp_version: 2,
                ..send(1, 8)
            }),
            [0x12, 6],
        ),
        (
            "RDMAP of the past",
            one(Segment {
                rdmap_version: 0,
                ..send(1, 8)
            }),
            [0x02, 5],
        ),
        (
            "the wrong queue",
            one(Segment {
                queue: 1,
                ..send(1, 8)
            }),
            [0x12, 1],
        ),
        (
            "a queue that there is not",
            one(Segment {
                queue: u32::MAX,
                ..send(1, 8)
            }),
            [0x12, 1],
        ),
        (
            "a tagged message",
            one(Segment {
                tagged: true,
                ..send(1, 8)
            }),
            UNSPECIFIED,
        ),
        (
            "an untagged WRITE",
            one(Segment {
                tagged: false,
                ..write(grant, 0, 8)
            }),
            UNSPECIFIED,
        ),
        (
            "an acknowledgement with a payload",
            one(Segment {
                payload: vec![1],
                opcode: ACKNOWLEDGE,
                queue: 4,
                ..send(1, 8)
            }),
            UNSPECIFIED,
        ),
        ("a READ in two segments", one(part(read(0, 8))), UNSPECIFIED),
    ]
}

/// Each lie ends its connection, with the error that it is, and does nothing else.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn requests_that_lie() {
    let (mut random, mut record) = begin("requests that lie");
    let mut bed = Bed::new(&mut random);
    while record.goes_on() {
        let former = bed.victim.create(Setup::default());
        bed.victim.destroy(former.id);
        let count = lies(former.grant, former.grant.rkey).len();
        for index in 0..count {
            let lied = bed.connect(Setup::default());
            let grant = lied.made.grant;
            let (name, frames, error) = lies(grant, former.grant.rkey).swap_remove(index);
            let mut stream = bed.dial(&lied);
            // What is honest is done, so it is the lie that is refused.
            let honest = Segment::tagged(WRITE, grant.rkey, grant.addr + 4096, &[0x11; 64]);
            for frame in [honest.frame()].iter().chain(&frames) {
                // The device may have heard enough.
                let _ = stream.write_all(frame);
            }
            // Nothing more comes, so that a lie which is believed shows.
            let _ = stream.shutdown(Shutdown::Write);
            let (opcodes, found) = wire::end(&mut stream);
            assert_eq!(found, Some(error), "{name}: {opcodes:?}");
            assert!(!opcodes.contains(&READ_RESPONSE), "{name} is answered");
            let mut expected = vec![0; GRANTED];
            expected[4096..][..64].fill(0x11);
            if PLACED.contains(&name) {
                expected[..8].fill(0xee);
            }
            let memory = bed.victim.memory(lied.made.id);
            assert!(memory == expected, "{name} changed memory");
            record.count("refused");
            bed.close(&lied);
        }
    }
    bed.finish(&mut record);
}

/// Honest frames with random changes and a good CRC: whatever that means, nothing but what is granted
/// changes, and nobody else notices.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn requests_with_random_lies() {
    let (mut random, mut record) = begin("requests with random lies");
    let mut bed = Bed::new(&mut random);
    while record.goes_on() {
        let lied = bed.connect(Setup::default());
        let grant = lied.made.grant;
        let mut stream = bed.dial(&lied);
        let mut msn = [0; 2];
        for _ in 0..random.len(40) {
            let offset = 8 * random.below(1000);
            let addr = grant.addr + offset;
            let len = random.len(2000);
            let mut next = |queue: usize| {
                msn[queue] += 1;
                msn[queue]
            };
            let segment = match random.below(5) {
                0 => Segment::tagged(WRITE, grant.rkey, addr, &vec![0x22; len]),
                1 => Segment::untagged(SEND, next(0), &vec![0x33; len]),
                2 => {
                    let payload = wire::read_request(1, len as u32, grant.rkey, addr);
                    Segment::untagged(READ_REQUEST, next(1), &payload)
                }
                3 => {
                    let payload = wire::fetch_add(1, grant.rkey, addr);
                    Segment::untagged(ATOMIC_REQUEST, next(1), &payload)
                }
                _ => {
                    let payload = wire::announcement(grant.rkey, addr, len as u32);
                    Segment::untagged(ANNOUNCE, next(1), &payload)
                }
            };
            let mut ulpdu = segment.ulpdu();
            if random.below(8) == 0 {
                // In the header, or what is behind it.
                let at = random.below(ulpdu.len().min(48) as u64) as usize;
                ulpdu[at] ^= 1 << random.below(8);
            }
            if stream.write_all(&wire::frame(&ulpdu)).is_err() {
                break;
            }
        }
        let _ = stream.shutdown(Shutdown::Write);
        let (_, error) = wire::end(&mut stream);
        record.count(match error {
            Some([kind, code]) => format!("TERMINATE {kind:02x} {code}"),
            None => "nothing wrong".to_owned(),
        });
        bed.close(&lied);
    }
    bed.finish(&mut record);
}
