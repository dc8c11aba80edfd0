//! The device's parsers of bytes that a peer controls; see [`crate::fuzzing`].

use std::fs::File;

use super::link::rendezvous::{self, Request};
use super::link::ring::{self, Record};
use super::link::stream::frame::{Header, Opcode, UNTAGGED_LEN};
use super::link::stream::payload::{
    Announce, AtomicRequest, AtomicResponse, Immediate, ReadRequest,
};
use super::link::stream::terminate::Terminate;
use super::link::stream::{fpdu, mpa};
use super::qp::datagram;
use crate::fuzzing::Target;

pub(crate) const TARGETS: &[Target] = &[
    Target {
        name: "stream",
        run: stream,
        seeds: streams,
    },
    Target {
        name: "segment",
        run: segment,
        seeds: segments,
    },
    Target {
        name: "mpa",
        run: mpa,
        seeds: mpa_frames,
    },
    Target {
        name: "ring",
        run: ring_record,
        seeds: ring_records,
    },
    Target {
        name: "rendezvous",
        run: rendezvous,
        seeds: rendezvous_datagrams,
    },
    Target {
        name: "datagram",
        run: datagram,
        seeds: datagrams,
    },
];

/// Frames one after the other; the first byte says whether they have a CRC.
fn stream(bytes: &[u8]) -> bool {
    let Some((&first, mut rest)) = bytes.split_first() else {
        return false;
    };
    let crc = first & 1 == 1;
    let mut good = false;
    while let Ok(Some((ulpdu, consumed))) = fpdu::split(rest, crc) {
        assert_eq!(fpdu::expected(rest), Some(consumed));
        assert_eq!(fpdu::fpdu_len(ulpdu.len()), consumed);
        assert_eq!(
            fpdu::split(&rest[..consumed - 1], crc),
            Ok(None),
            "less than a frame"
        );
        let mut again = Vec::new();
        let start = fpdu::begin(&mut again);
        again.extend(ulpdu);
        fpdu::finish(&mut again, start, crc);
        assert_eq!(fpdu::split(&again, crc), Ok(Some((ulpdu, consumed))));
        good |= segment(ulpdu);
        rest = &rest[consumed..];
    }
    good && rest.is_empty()
}

fn streams() -> Vec<Vec<u8>> {
    let stream = |crc: bool| {
        let mut bytes = vec![u8::from(crc)];
        for ulpdu in segments() {
            let start = fpdu::begin(&mut bytes);
            bytes.extend(ulpdu);
            fpdu::finish(&mut bytes, start, crc);
        }
        bytes
    };
    let one = |crc: bool| {
        let mut bytes = vec![u8::from(crc)];
        let start = fpdu::begin(&mut bytes);
        bytes.extend(&segments()[0]);
        fpdu::finish(&mut bytes, start, crc);
        bytes
    };
    vec![one(true), one(false), stream(false)]
}

/// A segment, whose payload is good if its opcode says that it has a layout.
fn segment(ulpdu: &[u8]) -> bool {
    let Ok((header, payload)) = Header::decode(ulpdu) else {
        return false;
    };
    let mut again = [0; UNTAGGED_LEN];
    let len = header.encode(&mut again);
    let mut again = again[..len].to_vec();
    again.extend(payload);
    assert_eq!(Header::decode(&again), Ok((header, payload)));
    let (Header::Tagged { opcode, .. } | Header::Untagged { opcode, .. }) = header;
    match opcode {
        Opcode::ReadRequest => ReadRequest::decode(payload)
            .inspect(|read| assert_eq!(read.encode()[..], *payload))
            .is_ok(),
        Opcode::AtomicRequest => AtomicRequest::decode(payload)
            .inspect(|atomic| {
                let again = atomic.encode();
                assert_eq!(AtomicRequest::decode(&again).as_ref(), Ok(atomic));
            })
            .is_ok(),
        Opcode::AtomicResponse => AtomicResponse::decode(payload)
            .inspect(|answer| assert_eq!(answer.encode()[..], *payload))
            .is_ok(),
        Opcode::Announce => Announce::decode(payload)
            .inspect(|announce| assert_eq!(announce.encode()[..], *payload))
            .is_ok(),
        Opcode::Immediate | Opcode::ImmediateSolicited => Immediate::decode(payload)
            .inspect(|immediate| assert_eq!(immediate.encode()[..], *payload))
            .is_ok(),
        Opcode::Terminate => Terminate::decode(payload)
            .inspect(|terminate| {
                let again = Terminate::of(terminate.status());
                assert_eq!(again.status(), terminate.status());
                assert_eq!(Terminate::decode(&terminate.encode()), Ok(*terminate));
            })
            .is_ok(),
        _ => true,
    }
}

fn segments() -> Vec<Vec<u8>> {
    let read = ReadRequest {
        sink_stag: 1,
        sink_offset: 2,
        len: 3,
        source_stag: 4,
        source_offset: 5,
    };
    let atomic = |swaps| AtomicRequest {
        swaps,
        request_id: 1,
        stag: 2,
        offset: 8,
        add_or_swap: 3,
        compare: 4,
    };
    let answer = AtomicResponse {
        request_id: 1,
        original: 2,
    };
    let announce = Announce {
        stag: 1,
        offset: 2,
        len: 3,
    };
    let immediate = Immediate { data: 7 };
    let terminate = Terminate {
        layer: 0,
        etype: 1,
        code: 2,
    };
    let payloads: [(Opcode, &[u8]); 12] = [
        (Opcode::Write, b"written"),
        (Opcode::ReadResponse, b"read"),
        (Opcode::Send, b"sent"),
        (Opcode::SendSolicitedInvalidate, b""),
        (Opcode::SendImmediate, b"x"),
        (Opcode::ReadRequest, &read.encode()),
        (Opcode::AtomicRequest, &atomic(true).encode()),
        (Opcode::AtomicRequest, &atomic(false).encode()),
        (Opcode::AtomicResponse, &answer.encode()),
        (Opcode::Announce, &announce.encode()),
        (Opcode::Immediate, &immediate.encode()),
        (Opcode::Terminate, &terminate.encode()),
    ];
    let acknowledge = (Opcode::Acknowledge, &b""[..]);
    let segment = |(opcode, payload): (Opcode, &[u8])| {
        let header = match opcode.queue() {
            None => Header::Tagged {
                opcode,
                last: true,
                stag: 1,
                offset: 2,
            },
            Some(queue) => Header::Untagged {
                opcode,
                last: true,
                field: 1,
                queue,
                msn: 1,
                offset: 0,
            },
        };
        let mut bytes = [0; UNTAGGED_LEN];
        let len = header.encode(&mut bytes);
        [&bytes[..len], payload].concat()
    };
    payloads
        .into_iter()
        .chain([acknowledge])
        .map(segment)
        .collect()
}

/// MPA's request or reply: both are tried.
fn mpa(bytes: &[u8]) -> bool {
    let hello = check(bytes, mpa::Hello::decode, |hello| hello.encode().to_vec());
    let answer = check(bytes, mpa::Answer::decode, |answer| {
        answer.encode().to_vec()
    });
    assert!(!(hello && answer), "a request that is a reply");
    hello || answer
}

/// What holds for a parser that waits for more bytes. Whether there was a whole frame.
fn check<T: PartialEq + std::fmt::Debug, E: PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    decode: impl Fn(&[u8]) -> Result<Option<(T, usize)>, E>,
    encode: impl Fn(&T) -> Vec<u8>,
) -> bool {
    match decode(bytes) {
        Ok(Some((frame, consumed))) => {
            assert_eq!(
                decode(&bytes[..consumed - 1]),
                Ok(None),
                "less than a frame"
            );
            assert_eq!(decode(&encode(&frame)), Ok(Some((frame, consumed))));
            true
        }
        Ok(None) => {
            assert!(bytes.len() < mpa::MAX_LEN, "waits without end");
            false
        }
        Err(error) => {
            let mut longer = bytes.to_vec();
            longer.push(0);
            assert!(decode(&longer).is_err(), "{error:?}, and then not");
            false
        }
    }
}

fn mpa_frames() -> Vec<Vec<u8>> {
    let hello = mpa::Hello {
        source_qpn: 1,
        dest_qpn: 2,
        psn: 3,
        generation: 4,
        patience_ms: 1000,
        executed: 0,
        ird: 16,
        ord: 16,
        rnr_retry: 7,
        xrc: false,
        crc: true,
    };
    let answer = |result| mpa::Answer {
        result,
        generation: 5,
        crc: true,
        ird: 16,
        ord: 16,
    };
    vec![
        hello.encode().to_vec(),
        answer(mpa::Outcome::Accepted).encode().to_vec(),
        answer(mpa::Outcome::NotYet).encode().to_vec(),
        answer(mpa::Outcome::Refused(13)).encode().to_vec(),
    ]
}

/// Up to eight words of native order.
fn words<const N: usize>(bytes: &[u8]) -> Option<([u64; N], &[u8])> {
    let (words, rest) = bytes.split_at_checked(N * 8)?;
    let mut words = words.chunks_exact(8).map(|word| {
        let word = word.try_into();
        u64::from_ne_bytes(word.unwrap_or_default())
    });
    Some((std::array::from_fn(|_| words.next().unwrap_or(0)), rest))
}

fn bytes<const N: usize>(words: [u64; N]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// A record's header, and behind it how many units there are to the ring's end.
fn ring_record(bytes: &[u8]) -> bool {
    let Some((words, rest)) = words::<4>(bytes) else {
        return false;
    };
    let room = rest
        .first_chunk()
        .map_or(0, |room| u16::from_ne_bytes(*room));
    let room = u32::from(room) % (ring::UNITS + 1);
    let Some(record) = Record::decode(words, room) else {
        return false;
    };
    assert!(u32::from(record.units) <= room);
    assert!(record.units > 0, "the consumer goes on");
    assert_eq!(Record::decode(record.encode(), room), Some(record));
    true
}

fn ring_records() -> Vec<Vec<u8>> {
    let record = |kind, flags, units, len| Record {
        kind,
        flags,
        num_sge: 2,
        rnr_retry: 7,
        units,
        generation: 1,
        len,
        imm: 2,
        remote_addr: 3,
        rkey: 4,
        executed: 5,
    };
    let records = [
        record(ring::Kind::Skip, 0, 5, 0),
        record(ring::Kind::Send, ring::WITH_IMM, 2, 96),
        record(ring::Kind::WriteImm, ring::FETCH, 1, 1 << 20),
        record(ring::Kind::CompareSwap, ring::SIGNALED, 1, 8),
        record(ring::Kind::AtomicWrite, 0, 1, 8),
    ];
    let place = |record: Record| {
        let mut bytes = bytes(record.encode());
        bytes.extend(8u16.to_ne_bytes());
        bytes
    };
    records.map(place).to_vec()
}

/// A datagram of the control connection, as a request and as an answer; behind its words, how many
/// descriptors are beside them.
fn rendezvous(bytes: &[u8]) -> bool {
    let Some((words, rest)) = words::<4>(bytes) else {
        return false;
    };
    let request = Request::decode(words).inspect(|request| {
        assert_eq!(Request::decode(request.encode(words[3])), Ok(*request));
    });
    let count = usize::from(rest.first().map_or(0, |count| count % 4));
    let open = || File::open("/dev/null").map(Into::into);
    let Ok(fds) = (0..count).map(|_| open()).collect::<Result<_, _>>() else {
        return false;
    };
    let answer = rendezvous::answered(rendezvous::Datagram { words, fds })
        .and_then(rendezvous::decode_bells)
        .inspect(|bells| {
            let bells = usize::from(bells.send.is_some()) + usize::from(bells.recv.is_some());
            assert!(bells <= count, "a descriptor for each");
        });
    request.is_ok() || answer.is_ok()
}

fn rendezvous_datagrams() -> Vec<Vec<u8>> {
    let requests = [
        Request::Hello { slot: 1 },
        Request::Pair { qpn: 0xff_ffff },
        Request::Arena { id: 3 },
    ];
    let answers = [[0, 1, 2, 0], [0, 0, 7, 0]].map(|words| {
        let mut bytes = bytes(words);
        bytes.push(2);
        bytes
    });
    let requests = requests.map(|request| bytes(request.encode(5)));
    requests.into_iter().chain(answers).collect()
}

/// What travels before a datagram's payload.
fn datagram(bytes: &[u8]) -> bool {
    let Some(header) = datagram::Header::decode(bytes) else {
        return false;
    };
    assert_eq!(datagram::Header::decode(&header.encode()), Some(header));
    true
}

fn datagrams() -> Vec<Vec<u8>> {
    let header = datagram::Header {
        qkey: 1,
        src_qpn: 2,
        flags: 3,
        imm: 4,
        route: super::ah::Route {
            traffic_class: 5,
            hop_limit: 6,
            sgid: [7; 16],
            dgid: [8; 16],
        },
    };
    vec![
        header.encode().to_vec(),
        [&header.encode()[..], b"payload"].concat(),
    ]
}
