//! Frames and archives: what is written comes back, and bytes that were not written are an error.

use proptest::collection::vec;
use proptest::prelude::*;
use rkyv::with::InlineAsBox;
use rkyv::{Archive, Serialize};
use wire::{
    BODY_ALIGN, EncodeError, FIRST_RESERVED_KIND, Frame, FrameError, HEADER_LEN, Header, encode,
    encode_raw, encode_with_body, view,
};

#[derive(Archive, Serialize, Debug, Clone)]
struct Put<'a> {
    #[rkyv(with = InlineAsBox)]
    key: &'a [u8],
    #[rkyv(with = InlineAsBox)]
    value: &'a [u8],
    version: u64,
    mode: Mode,
}

#[derive(Archive, Serialize, Debug, Clone, Copy, PartialEq)]
#[rkyv(compare(PartialEq), derive(Debug))]
enum Mode {
    Always,
    IfVersion(u32),
}

#[derive(Archive, Serialize, Debug)]
struct Nested {
    names: Vec<String>,
    wide: u128,
    maybe: Option<Box<[u16]>>,
}

/// Bytes aligned as a pooled buffer is.
#[repr(align(64))]
struct Slot([u8; 16 << 10]);

fn slot(fill: u8) -> Box<Slot> {
    Box::new(Slot([fill; 16 << 10]))
}

/// Looks at everything a receiver would look at. Nothing here may panic, whatever the bytes.
fn look(bytes: &[u8]) {
    if let Ok(frame) = Frame::parse(bytes) {
        assert!(frame.archive().len() + frame.body().len() + HEADER_LEN <= bytes.len());
        if let Ok(put) = view::<Put>(&frame) {
            assert!(put.key.len() + put.value.len() <= bytes.len());
            let _ = (put.mode == Mode::Always, put.version.to_native());
        }
        if let Ok(nested) = view::<Nested>(&frame) {
            assert!(
                nested.names.iter().map(|name| name.len()).sum::<usize>()
                    <= bytes.len() * bytes.len()
            );
            let _ = nested.maybe.as_ref().map(|numbers| numbers.len());
        }
    }
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Always), any::<u32>().prop_map(Mode::IfVersion)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    #[test]
    fn what_is_written_comes_back(
        key in vec(any::<u8>(), 0..1025), value in vec(any::<u8>(), 0..5000), version: u64, mode in mode(),
        kind in 0..FIRST_RESERVED_KIND, tag: u64, body in vec(any::<u8>(), 0..5000),
    ) {
        let mut slot = slot(0xaa);
        let put = Put { key: &key, value: &value, version, mode };
        let (len, room) = encode_with_body(&mut slot.0, kind, tag, &put, body.len() as u32).unwrap();
        room.copy_from_slice(&body);
        let frame = Frame::parse(&slot.0[..len]).unwrap();
        prop_assert_eq!((frame.header().kind, frame.header().tag, frame.header().credits), (kind, tag, 0));
        prop_assert_eq!(frame.body(), &body[..]);
        prop_assert!(body.is_empty() || (frame.body().as_ptr() as usize).is_multiple_of(BODY_ALIGN));
        let read = view::<Put>(&frame).unwrap();
        prop_assert_eq!(&*read.key, &key[..]);
        prop_assert_eq!(&*read.value, &value[..]);
        prop_assert_eq!(read.version, version);
        prop_assert!(read.mode == mode);
        prop_assert!(slot.0[len..].iter().all(|&byte| byte == 0xaa), "bytes behind the frame were touched");
    }

    #[test]
    fn nested_containers_come_back(names in vec(".{0,40}", 0..40), wide: u128, numbers in vec(any::<u16>(), 0..50)) {
        let mut slot = slot(0);
        let value = Nested { names: names.clone(), wide, maybe: Some(numbers.clone().into()) };
        let len = encode(&mut slot.0, 1, 2, &value).unwrap();
        let frame = Frame::parse(&slot.0[..len]).unwrap();
        let read = view::<Nested>(&frame).unwrap();
        prop_assert!(read.names.iter().map(|name| name.as_str()).eq(names.iter().map(String::as_str)));
        prop_assert_eq!(read.wide, wide);
        prop_assert!(read.maybe.as_ref().unwrap().iter().map(|number| number.to_native()).eq(numbers));
    }

    #[test]
    fn header_comes_back(kind: u16, tag: u64, credits: u16, archive_len: u32, body_len: u32) {
        let header = Header { kind, tag, credits, archive_len, body_len };
        prop_assert_eq!(Header::parse(&header.to_bytes()), Ok(header));
        let Err(FrameError::Length { expected, .. }) = Frame::parse(&header.to_bytes()) else {
            prop_assert_eq!((archive_len, body_len), (0, 0));
            return Ok(());
        };
        prop_assert_eq!(expected, header.frame_len());
    }

    #[test]
    fn noise_never_panics(bytes in vec(any::<u8>(), 0..600)) {
        look(&bytes);
    }

    /// A frame that is right but for some flipped bytes, a cut, or a tail, at any alignment.
    #[test]
    fn damage_never_panics(
        key in vec(any::<u8>(), 0..64), value in vec(any::<u8>(), 0..200), names in vec(".{0,9}", 0..6), plain: bool,
        body_len in 0u32..40, flips in vec((any::<prop::sample::Index>(), 1u8..), 0..6), cut in 0usize..400,
        tail in vec(any::<u8>(), 0..40), shift in 0usize..64,
    ) {
        let mut slot = slot(0);
        let len = if plain {
            let put = Put { key: &key, value: &value, version: 9, mode: Mode::IfVersion(7) };
            encode_with_body(&mut slot.0, 5, 6, &put, body_len).unwrap().0
        } else {
            let nested = Nested { names, wide: 1, maybe: None };
            encode_with_body(&mut slot.0, 5, 6, &nested, body_len).unwrap().0
        };
        for (at, mask) in &flips {
            slot.0[at.index(len)] ^= mask;
        }
        let mut bytes = slot.0[..len].to_vec();
        bytes.truncate(len.saturating_sub(cut).max(1));
        bytes.extend(&tail);
        if flips.is_empty() && bytes.len() != len {
            prop_assert!(Frame::parse(&bytes).is_err(), "a frame of {} bytes was taken for one of {len}", bytes.len());
        }
        let mut moved = Box::new(Slot([0; 16 << 10]));
        moved.0[shift..shift + bytes.len()].copy_from_slice(&bytes);
        look(&moved.0[shift..shift + bytes.len()]);
    }
}

fn example(slot: &mut Slot) -> usize {
    let put = Put {
        key: b"key",
        value: b"value",
        version: 3,
        mode: Mode::Always,
    };
    encode(&mut slot.0, 5, 6, &put).unwrap()
}

#[test]
fn every_prefix_is_an_error() {
    let mut slot = slot(0);
    let len = example(&mut slot);
    for cut in 0..len {
        let error = Frame::parse(&slot.0[..cut]).unwrap_err();
        if cut < HEADER_LEN {
            assert_eq!(error, FrameError::Truncated { len: cut });
        } else {
            assert_eq!(
                error,
                FrameError::Length {
                    len: cut,
                    expected: len as u64
                }
            );
        }
    }
}

#[test]
fn bytes_behind_the_frame_are_an_error() {
    let mut slot = slot(0);
    let len = example(&mut slot);
    for more in [1, 8, 64, 4096] {
        let error = Frame::parse(&slot.0[..len + more]).unwrap_err();
        assert_eq!(
            error,
            FrameError::Length {
                len: len + more,
                expected: len as u64
            }
        );
    }
}

#[test]
fn every_flipped_byte_of_magic_version_and_reserved_is_an_error() {
    let mut slot = slot(0);
    let len = example(&mut slot);
    for at in (0..6).chain(18..24) {
        slot.0[at] ^= 0x10;
        assert!(Frame::parse(&slot.0[..len]).is_err(), "byte {at}");
        slot.0[at] ^= 0x10;
    }
    slot.0[4] = 2;
    assert_eq!(
        Frame::parse(&slot.0[..len]).unwrap_err(),
        FrameError::Version { found: 2 }
    );
    slot.0[..4].copy_from_slice(b"HTTP");
    let error = Frame::parse(&slot.0[..len]).unwrap_err();
    assert_eq!(
        error,
        FrameError::Magic {
            found: u32::from_le_bytes(*b"HTTP")
        }
    );
}

/// Frames made by hand: each is a message that a hostile or broken peer could send.
#[test]
fn corpus_of_broken_frames() {
    let mut slot = slot(0);
    let len = example(&mut slot);
    let frame = |header: Header, rest: &[u8]| [&header.to_bytes()[..], rest].concat();
    let huge = Header {
        archive_len: u32::MAX,
        body_len: u32::MAX,
        ..Header::default()
    };
    let corpus: [(&str, Vec<u8>); 9] = [
        ("empty", vec![]),
        ("one byte", vec![b'z']),
        ("zeros", vec![0; 64]),
        ("ones", vec![0xff; 64]),
        ("lengths that overflow 32 bits", frame(huge, &[0; 100])),
        (
            "a body that is not there",
            frame(
                Header {
                    body_len: 1,
                    ..Header::default()
                },
                &[],
            ),
        ),
        (
            "an archive that is not there",
            frame(
                Header {
                    archive_len: 1,
                    ..Header::default()
                },
                &[],
            ),
        ),
        (
            "a length without its padding",
            frame(
                Header {
                    archive_len: 1,
                    body_len: 1,
                    ..Header::default()
                },
                &[0; 2],
            ),
        ),
        (
            "two frames in one",
            [&slot.0[..len], &slot.0[..len]].concat(),
        ),
    ];
    for (name, bytes) in corpus {
        assert!(Frame::parse(&bytes).is_err(), "{name}");
    }
    // Right length, wrong contents: the frame stands, the archive does not.
    let archive_len = len - HEADER_LEN;
    for fill in [0x00, 0x7f, 0x80, 0xff] {
        let header = Header {
            archive_len: archive_len as u32,
            ..Header::default()
        };
        let bytes = frame(header, &vec![fill; archive_len]);
        let mut aligned = Box::new(Slot([0; 16 << 10]));
        aligned.0[..bytes.len()].copy_from_slice(&bytes);
        let frame = Frame::parse(&aligned.0[..bytes.len()]).unwrap();
        if fill != 0 {
            assert!(view::<Put>(&frame).is_err(), "fill {fill:#x}");
        }
        look(&aligned.0[..bytes.len()]);
    }
}

#[test]
fn an_archive_out_of_alignment_is_an_error() {
    let mut slot = slot(0);
    let len = example(&mut slot);
    let mut moved = Box::new(Slot([0; 16 << 10]));
    for shift in 1..8 {
        moved.0[shift..shift + len].copy_from_slice(&slot.0[..len]);
        let frame = Frame::parse(&moved.0[shift..shift + len]).unwrap();
        let error = view::<Put>(&frame).err().unwrap();
        assert!(error.cause.as_str().contains("align"), "{}", error.cause);
    }
}

#[test]
fn a_view_names_what_was_expected_and_why_it_is_not() {
    let mut slot = slot(0);
    let (len, _) = encode_raw(&mut slot.0, 9, 0, 0).unwrap();
    let error = view::<Nested>(&Frame::parse(&slot.0[..len]).unwrap())
        .err()
        .unwrap();
    assert_eq!((error.kind, error.len), (9, 0));
    assert!(error.expected.ends_with("Nested"));
    assert!(!error.cause.as_str().is_empty());
}

#[test]
fn what_does_not_fit_is_an_error_at_every_size() {
    let put = Put {
        key: b"key",
        value: &[7; 100],
        version: 3,
        mode: Mode::Always,
    };
    let mut slot = slot(0);
    let needed = encode_with_body(&mut slot.0, 5, 6, &put, 50).unwrap().0;
    for capacity in 0..needed {
        match encode_with_body(&mut slot.0[..capacity], 5, 6, &put, 50).unwrap_err() {
            EncodeError::Archive {
                capacity: named, ..
            }
            | EncodeError::TooLong {
                capacity: named, ..
            } => {
                assert_eq!(named, capacity);
            }
            other => panic!("{other}"),
        }
    }
    assert_eq!(
        encode_with_body(&mut slot.0[..needed], 5, 6, &put, 50)
            .unwrap()
            .0,
        needed
    );
}

#[test]
fn reserved_kinds_are_refused() {
    let mut slot = slot(0);
    for kind in [FIRST_RESERVED_KIND, u16::MAX] {
        assert_eq!(
            encode_raw(&mut slot.0, kind, 0, 0).unwrap_err(),
            EncodeError::ReservedKind { kind }
        );
    }
}

#[test]
fn padding_is_cleared() {
    let mut slot = slot(0xee);
    let put = Put {
        key: b"k",
        value: b"",
        version: 0,
        mode: Mode::Always,
    };
    let (len, body) = encode_with_body(&mut slot.0, 1, 1, &put, 1).unwrap();
    body[0] = 1;
    let header = Header::parse(&slot.0[..len]).unwrap();
    let archive_end = HEADER_LEN + header.archive_len as usize;
    assert!(slot.0[archive_end..len - 1].iter().all(|&byte| byte == 0));
}
