//! A responder that lies to a requester.

use std::{
    io::Write,
    net::{TcpListener, TcpStream},
};

use verbs_sys::WcStatus;

use crate::support::{
    Mix, Setup,
    node::GRANTED,
    traffic::Kind,
    wire::{self, ATOMIC_RESPONSE, READ_RESPONSE, SEND, Segment, TERMINATE, WRITE},
};

use super::{Bed, Lied, begin};

/// After these the liar closes the connection.
const CLOSED: [&str; 2] = ["half a frame", "no word"];

/// A name, the request that is lied to, the lie, and what the request ends with.
type Lie = (&'static str, Kind, Vec<Vec<u8>>, WcStatus);

/// Bytes of each request.
const LEN: usize = 64;

fn lies() -> Vec<Lie> {
    use Kind::{Add, Read, Send, Write};
    use WcStatus::{RemAccessErr, RemInvReqErr, RemOpErr, RetryExcErr, RnrRetryExcErr};
    let one = |segment: Segment| vec![segment.frame()];
    let count = |count| one(Segment::acknowledge(count));
    let terminate = |bytes: &[u8]| one(Segment::untagged(TERMINATE, 1, bytes));
    // The first request has the number 0.
    let read = |key, offset, len| Segment::tagged(READ_RESPONSE, key, offset, &vec![0xee; len]);
    let add = |id| Segment::untagged(ATOMIC_RESPONSE, 1, &wire::atomic_response(id, 7));
    let part = |segment: Segment| Segment {
        last: false,
        ..segment
    };
    let mut spoilt = Segment::acknowledge(1).frame();
    spoilt[4] ^= 1;
    vec![
        ("a count ahead", Write, count(1000), RemOpErr),
        ("a count far ahead", Send, count(0x7fff_ffff), RemOpErr),
        ("a count behind", Write, count(u32::MAX), RemOpErr),
        ("a count far behind", Send, count(0x8000_0001), RemOpErr),
        (
            "a READ that is counted, not answered",
            Read,
            count(1),
            RemOpErr,
        ),
        (
            "an addition that is counted, not answered",
            Add,
            count(1),
            RemOpErr,
        ),
        (
            "an answer to no READ",
            Write,
            one(read(0, 0, LEN)),
            RemOpErr,
        ),
        ("an answer to no addition", Send, one(add(0)), RemOpErr),
        (
            "the answer of another READ",
            Read,
            one(read(9, 0, LEN)),
            RemOpErr,
        ),
        ("the answer of another addition", Add, one(add(9)), RemOpErr),
        (
            "an answer too long",
            Read,
            one(read(0, 0, LEN + 1)),
            RemOpErr,
        ),
        (
            "an answer far too long",
            Read,
            one(read(0, 0, 60_000)),
            RemOpErr,
        ),
        (
            "an answer too short",
            Read,
            one(read(0, 0, LEN - 1)),
            RemOpErr,
        ),
        (
            "an answer without its beginning",
            Read,
            one(read(0, 8, LEN - 8)),
            RemOpErr,
        ),
        (
            "an answer beyond the end",
            Read,
            one(read(0, LEN as u64, 8)),
            RemOpErr,
        ),
        (
            "an answer to nowhere",
            Read,
            one(read(0, u64::MAX - 3, 8)),
            RemOpErr,
        ),
        (
            "an answer without end",
            Read,
            one(part(read(0, 0, LEN))),
            RemOpErr,
        ),
        (
            "an addition answered as a READ",
            Add,
            one(read(0, 0, 8)),
            RemOpErr,
        ),
        (
            "a READ answered as an addition",
            Read,
            one(add(0)),
            RemOpErr,
        ),
        (
            "half an answer to an addition",
            Add,
            one(Segment::untagged(ATOMIC_RESPONSE, 1, &[0; 6])),
            RemOpErr,
        ),
        (
            "a request",
            Write,
            one(Segment::tagged(WRITE, 1, 0, &[0xee; 8])),
            RemOpErr,
        ),
        (
            "a message",
            Read,
            one(Segment::untagged(SEND, 1, &[0xee; 8])),
            RemOpErr,
        ),
        (
            "a TERMINATE for the key",
            Write,
            terminate(&[0x01, 2, 0, 0]),
            RemAccessErr,
        ),
        (
            "a TERMINATE of DDP",
            Read,
            terminate(&[0x11, 1, 0, 0]),
            RemAccessErr,
        ),
        (
            "a TERMINATE for the request",
            Add,
            terminate(&[0x02, 6, 0, 0]),
            RemInvReqErr,
        ),
        (
            "a TERMINATE for want of a receive",
            Send,
            terminate(&[0x12, 2, 0, 0]),
            RnrRetryExcErr,
        ),
        (
            "a TERMINATE for anything",
            Send,
            terminate(&[0xff, 0xff, 0xff, 0xff]),
            RemOpErr,
        ),
        (
            "a TERMINATE without a reason",
            Write,
            terminate(&[]),
            RemOpErr,
        ),
        ("a wrong CRC", Write, vec![spoilt], RetryExcErr),
        (
            "an empty segment",
            Write,
            vec![wire::frame(&[])],
            RetryExcErr,
        ),
        (
            "half a frame",
            Write,
            vec![Segment::acknowledge(1).frame()[..9].to_vec()],
            RetryExcErr,
        ),
        ("no word", Read, Vec::new(), RetryExcErr),
    ]
}

/// Posts requests of one kind, and takes the connection on which they come.
fn requests(bed: &mut Bed, listener: &TcpListener, kind: Kind) -> (Lied, TcpStream) {
    let lied = bed.connect(Setup::default());
    let mix = Mix {
        only: Some(kind),
        exact: true,
        ..Mix::new(1, LEN).of(4)
    };
    bed.victim.start_traffic(lied.made.id, mix);
    loop {
        let (mut stream, _) = listener.accept().expect("nobody connects");
        // An earlier one may still have tried.
        let other = (lied.liar, lied.made.qp_num());
        let hello = wire::answer(&mut stream, None);
        if (hello.dest_qpn, hello.source_qpn) == other {
            return (lied, stream);
        }
    }
}

/// Each lie ends the request with the right status, and those behind it; nothing else changes.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn answers_that_lie() {
    let (mut random, mut record) = begin("answers that lie");
    let mut bed = Bed::new(&mut random);
    let listener = bed.listen();
    while record.goes_on() {
        for (name, kind, frames, status) in lies() {
            let (lied, mut stream) = requests(&mut bed, &listener, kind);
            assert!(wire::receive(&mut stream).is_some(), "no request");
            for frame in &frames {
                let _ = stream.write_all(frame);
            }
            if CLOSED.contains(&name) {
                drop(stream);
            }
            let report = bed.victim.outcome(lied.made.id);
            report.assert_failed(name, std::slice::from_ref(&status));
            assert_eq!((report.succeeded, report.flushed), (0, 3), "{name}");
            let memory = bed.victim.memory(lied.made.id);
            assert!(memory == [0; GRANTED], "{name} changed memory");
            record.add(&report);
            bed.close(&lied);
        }
    }
    bed.finish(&mut record);
}

/// A peer that does not let anybody in.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn answers_to_no_greeting() {
    let (mut random, mut record) = begin("greetings that are refused");
    let mut bed = Bed::new(&mut random);
    let listener = bed.listen();
    while record.goes_on() {
        // There is none such; and a reason of its own.
        for refusal in [2, 3] {
            let lied = bed.connect(Setup::default());
            bed.victim
                .start_traffic(lied.made.id, Mix::new(1, LEN).of(4));
            let (mut stream, _) = listener.accept().expect("nobody connects");
            wire::answer(&mut stream, Some(refusal));
            let report = bed.victim.outcome(lied.made.id);
            report.assert_failed("a refused greeting", &[WcStatus::RetryExcErr]);
            record.add(&report);
            bed.close(&lied);
        }
    }
    bed.finish(&mut record);
}
