//! Parsers of bytes that a peer controls, for a fuzzer. No part of the API: it is there only with
//! `--cfg fuzzing`, and in this crate's own tests.

#[path = "../../fuzz/target.rs"]
mod target;

pub use target::Target;

use std::collections::BTreeMap;

use rkyv::with::InlineAsBox;
use rkyv::{Archive, Serialize};

use crate::greeting::{Greeting, Hello, MAX_FRAME, RejectReason};
use crate::{Frame, HEADER_LEN, Header, encode_with_body, view, view_bytes};

/// All of them.
pub fn targets() -> Vec<Target> {
    vec![
        Target {
            name: "greeting",
            run: greeting,
            seeds: greetings,
        },
        Target {
            name: "message",
            run: message,
            seeds: messages,
        },
        Target {
            name: "archive",
            run: archive,
            seeds: archives,
        },
    ]
}

/// What two sides say over TCP.
fn greeting(bytes: &[u8]) -> bool {
    let missing = Greeting::missing(bytes);
    match Greeting::parse(bytes) {
        Ok(Some((greeting, consumed))) => {
            assert_eq!(missing, Ok(0));
            assert!(consumed <= MAX_FRAME, "a frame of bounded length");
            let shorter = &bytes[..consumed - 1];
            assert_eq!(Greeting::parse(shorter), Ok(None));
            assert!(matches!(Greeting::missing(shorter), Ok(1..)));
            let again = greeting.to_bytes();
            let (again, _) = Greeting::parse(&again)
                .expect("what was written")
                .expect("all of it");
            match (&greeting, &again) {
                // A text grows when it is made printable, and is cut again.
                (Greeting::Reject { reason, text }, Greeting::Reject { reason: r, text: t }) => {
                    assert_eq!(reason, r);
                    assert!(text.starts_with(t.as_str()));
                    assert!(!text.chars().any(char::is_control));
                }
                _ => assert_eq!(greeting, again),
            }
            true
        }
        Ok(None) => {
            let missing = missing.expect("no error");
            assert!(missing > 0 && bytes.len() + missing <= MAX_FRAME);
            false
        }
        Err(error) => {
            assert_eq!(missing, Err(error));
            let mut longer = bytes.to_vec();
            longer.push(0);
            assert!(Greeting::parse(&longer).is_err(), "an error, and then not");
            false
        }
    }
}

fn greetings() -> Vec<Vec<u8>> {
    let hello = Hello {
        qp_num: 1,
        psn: 2,
        gid: [3; 16],
        lid: 4,
        mtu: 5,
        max_rd_atomic: 6,
        max_dest_rd_atomic: 7,
        recv_depth: 8,
        message_size: 4096,
        application: 9,
        application_version: 10,
        software: true,
    };
    let reject = Greeting::Reject {
        reason: RejectReason::Full,
        text: "as many as it takes".into(),
    };
    [
        Greeting::Hello(hello),
        Greeting::Ready,
        reject,
        Greeting::Bye,
    ]
    .map(|greeting| greeting.to_bytes())
    .to_vec()
}

/// One of each thing that is laid out in its own way.
#[derive(Archive, Serialize)]
struct Everything<'a> {
    #[rkyv(with = InlineAsBox)]
    key: &'a [u8],
    names: Vec<String>,
    by_name: BTreeMap<String, u32>,
    choice: Choice,
    wide: u128,
    maybe: Option<Box<[u16]>>,
    pair: (bool, char),
}

#[derive(Archive, Serialize)]
enum Choice {
    Nothing,
    Number(u32),
    Text { text: String },
}

/// As aligned as a pooled buffer.
#[repr(align(64))]
struct Slot([u8; SLOT]);

const SLOT: usize = 8 << 10;

/// A message with an archive of [`Everything`].
fn message(bytes: &[u8]) -> bool {
    let mut slot = Slot([0; SLOT]);
    let Some(place) = slot.0.get_mut(..bytes.len()) else {
        return false;
    };
    place.copy_from_slice(bytes);
    let header = Header::parse(place);
    let frame = match Frame::parse(place) {
        Ok(frame) => frame,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return false;
        }
    };
    assert_eq!(header.as_ref(), Ok(frame.header()));
    assert_eq!(Header::parse(&frame.header().to_bytes()), header);
    assert_eq!(frame.header().frame_len(), place.len() as u64);
    assert_eq!(frame.archive().len(), frame.header().archive_len as usize);
    assert_eq!(frame.body().len(), frame.header().body_len as usize);
    assert!(HEADER_LEN + frame.archive().len() + frame.body().len() <= place.len());
    view::<Everything<'_>>(&frame).map(look).is_ok()
}

fn messages() -> Vec<Vec<u8>> {
    let message = |value: &Everything<'_>| {
        let mut slot = Slot([0; SLOT]);
        let (len, body) = encode_with_body(&mut slot.0, 7, 9, value, 4).expect("enough room");
        body.copy_from_slice(b"body");
        slot.0[..len].to_vec()
    };
    everything().iter().map(message).collect()
}

/// An archive alone, at an offset that its first byte gives: most are misaligned.
fn archive(bytes: &[u8]) -> bool {
    let Some((&offset, archive)) = bytes.split_first() else {
        return false;
    };
    let offset = usize::from(offset) % 64;
    let mut slot = Slot([0; SLOT]);
    let Some(place) = slot.0.get_mut(offset..offset + archive.len()) else {
        return false;
    };
    place.copy_from_slice(archive);
    let number = view_bytes::<u64>(place).is_ok();
    let everything = view_bytes::<Everything<'_>>(place).map(look).is_ok();
    number || everything
}

fn archives() -> Vec<Vec<u8>> {
    let header_less = |message: Vec<u8>| {
        let frame = Frame::parse(&message).expect("what was written");
        let mut bytes = vec![0];
        bytes.extend(frame.archive());
        bytes
    };
    messages().into_iter().map(header_less).collect()
}

/// Reads every byte of the value.
fn look(value: &ArchivedEverything<'_>) {
    let mut sum: u64 = value.key.iter().map(|&byte| u64::from(byte)).sum();
    for name in value.names.iter() {
        sum += name.chars().count() as u64;
    }
    for (name, number) in value.by_name.iter() {
        sum += name.chars().count() as u64 + u64::from(number.to_native());
    }
    sum += match &value.choice {
        ArchivedChoice::Nothing => 0,
        ArchivedChoice::Number(number) => u64::from(number.to_native()),
        ArchivedChoice::Text { text } => text.chars().count() as u64,
    };
    sum ^= value.wide.to_native() as u64;
    if let Some(numbers) = value.maybe.as_ref() {
        sum ^= numbers
            .iter()
            .map(|number| u64::from(number.to_native()))
            .sum::<u64>();
    }
    sum ^= u64::from(value.pair.0) ^ u64::from(value.pair.1.to_native() as u32);
    std::hint::black_box(sum);
}

fn everything() -> [Everything<'static>; 3] {
    let one = |choice| Everything {
        key: b"key",
        names: vec!["a".into(), "longer than what stands in place".into()],
        by_name: BTreeMap::from([("one".into(), 1), ("two".into(), 2)]),
        choice,
        wide: 5,
        maybe: Some([1, 2, 3].into()),
        pair: (true, 'z'),
    };
    let empty = Everything {
        key: b"",
        names: Vec::new(),
        by_name: BTreeMap::new(),
        choice: Choice::Nothing,
        wide: 0,
        maybe: None,
        pair: (false, '\0'),
    };
    let text = "text of more than eight bytes".into();
    [one(Choice::Number(7)), one(Choice::Text { text }), empty]
}

#[test]
fn parsers_stand_what_is_near_to_good_bytes() {
    target::try_near_the_seeds(&targets());
}
