//! How a stream becomes a connection: MPA's request and reply (RFC 5044, section 7.1, and RFC 6581),
//! with private data by which two devices of ours find the queue pairs they connect.

use super::FrameError;
use super::fields::{Fields, Layout};

/// The largest number of READs and atomics under way that MPA can tell.
pub(in crate::soft) const MAX_DEPTH: u16 = 0x3fff;
/// Of no request or reply are more bytes looked at.
#[cfg(any(test, fuzzing))]
pub(in crate::soft) const MAX_LEN: usize = HEADER + MAX_PRIVATE_DATA;

const KEY: usize = 16;
const HEADER: usize = KEY + 4;
const MAX_PRIVATE_DATA: usize = 512;
/// IRD and ORD, at the beginning of the private data.
const DEPTHS: usize = 4;
/// Magic and version of what is our own behind them.
const OWN: usize = 6;

const REQUEST: Kind = Kind {
    name: "request",
    key: b"MPA ID Req Frame",
};
const REPLY: Kind = Kind {
    name: "reply",
    key: b"MPA ID Rep Frame",
};
const MAGIC: [u8; 4] = *b"vbsS";
/// Bumped with every change of the private data, or of the messages that are ours alone.
const VERSION: u16 = 3;
const REVISION: u16 = 2;

const MARKERS: u16 = 0x8000;
const CRC: u16 = 0x4000;
const REJECTED: u16 = 0x2000;
const ENHANCED: u16 = 0x1000;

/// Beside the RNR retry count.
const XRC: u16 = 8;

/// 24 bits, as a queue pair's number and a PSN have.
const MAX_24: u32 = 0xff_ffff;

struct Kind {
    name: &'static str,
    key: &'static [u8; KEY],
}

/// What the side that connected says first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Hello {
    /// 24 bits, as is `dest_qpn`.
    pub source_qpn: u32,
    pub dest_qpn: u32,
    /// The sender's first PSN, 24 bits.
    pub psn: u32,
    /// Which of the connections of the sender's queue pair.
    pub generation: u32,
    /// How long the sender is going to try, in milliseconds.
    pub patience_ms: u32,
    /// Messages that the sender has had executed another way, before it came here.
    pub executed: u32,
    /// READs and atomics that the sender serves at once; more than [`MAX_DEPTH`] are told as that.
    pub ird: u16,
    /// READs and atomics that the sender will have under way.
    pub ord: u16,
    /// How often the sender repeats a message that finds no receive; 7 is without end.
    pub rnr_retry: u8,
    /// The sender's requests are those of XRC.
    pub xrc: bool,
    /// The sender wants a CRC in every frame. One side's wish is enough.
    pub crc: bool,
}

/// What becomes of a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Outcome {
    Accepted,
    /// The queue pair is not ready; worth another attempt.
    NotYet,
    /// There is no such queue pair, or it is connected with another.
    Gone,
    /// For a reason, as an errno value.
    Refused(u32),
}

/// What the other side replies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Answer {
    pub result: Outcome,
    /// Which of the connections of the sender's queue pair.
    pub generation: u32,
    pub crc: bool,
    /// As in [`Hello`].
    pub ird: u16,
    pub ord: u16,
}

impl Hello {
    const PRIVATE: usize = DEPTHS + OWN + 26;
    pub(in crate::soft) const LEN: usize = HEADER + Self::PRIVATE;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        begin(&REQUEST, self.crc, false, Self::PRIVATE, self.ird, self.ord)
            .u16(u16::from(self.rnr_retry & 7) | if self.xrc { XRC } else { 0 })
            .u32(self.source_qpn)
            .u32(self.dest_qpn)
            .u32(self.psn)
            .u32(self.generation)
            .u32(self.patience_ms)
            .u32(self.executed)
            .done()
    }

    /// Reads a request, and tells how many bytes it has. `None`: more bytes are needed.
    pub(in crate::soft) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some(mut frame) = Frame::decode(&REQUEST, bytes, Self::PRIVATE)? else {
            return Ok(None);
        };
        if frame.rejected {
            return Err(refused("rejected bit of an MPA request", 1, "0"));
        }
        let fields = &mut frame.own;
        let word = fields.u16();
        let hello = Self {
            source_qpn: of_24_bits("source QPN", fields.u32())?,
            dest_qpn: of_24_bits("destination QPN", fields.u32())?,
            psn: of_24_bits("PSN", fields.u32())?,
            generation: fields.u32(),
            patience_ms: fields.u32(),
            executed: fields.u32(),
            ird: frame.ird,
            ord: frame.ord,
            rnr_retry: (word & 7) as u8,
            xrc: word & XRC != 0,
            crc: frame.crc,
        };
        Ok(Some((hello, Self::LEN)))
    }
}

impl Answer {
    const PRIVATE: usize = DEPTHS + OWN + 10;
    pub(in crate::soft) const LEN: usize = HEADER + Self::PRIVATE;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        let (result, code) = match self.result {
            Outcome::Accepted => (0, 0),
            Outcome::NotYet => (1, 0),
            Outcome::Gone => (2, 0),
            Outcome::Refused(code) => (3, code),
        };
        begin(
            &REPLY,
            self.crc,
            result != 0,
            Self::PRIVATE,
            self.ird,
            self.ord,
        )
        .u16(result)
        .u32(code)
        .u32(self.generation)
        .done()
    }

    /// Reads a reply, and tells how many bytes it has. `None`: more bytes are needed.
    pub(in crate::soft) fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, FrameError> {
        let Some(mut frame) = Frame::decode(&REPLY, bytes, Self::PRIVATE)? else {
            return Ok(None);
        };
        let (result, code) = (frame.own.u16(), frame.own.u32());
        if frame.rejected != (result != 0) {
            let expected = if frame.rejected { "not 0" } else { "0" };
            return Err(refused("result of an MPA reply", result.into(), expected));
        }
        let result = match (result, code) {
            (0, 0) => Outcome::Accepted,
            (1, 0) => Outcome::NotYet,
            (2, 0) => Outcome::Gone,
            (3, code) => Outcome::Refused(code),
            (0..=2, code) => return Err(refused("code of an MPA reply", code.into(), "0")),
            (result, _) => return Err(refused("result of an MPA reply", result.into(), "0 to 3")),
        };
        let answer = Self {
            result,
            generation: frame.own.u32(),
            crc: frame.crc,
            ird: frame.ird,
            ord: frame.ord,
        };
        Ok(Some((answer, Self::LEN)))
    }
}

/// A frame up to what differs between a request and a reply.
fn begin<const N: usize>(
    kind: &Kind,
    crc: bool,
    rejected: bool,
    private: usize,
    ird: u16,
    ord: u16,
) -> Layout<N> {
    let crc = if crc { CRC } else { 0 };
    let rejected = if rejected { REJECTED } else { 0 };
    Layout::new()
        .bytes(*kind.key)
        .u16(crc | rejected | ENHANCED | REVISION)
        .u16(private as u16)
        // The bits above the numbers are zero: no peer-to-peer set-up, which would need a message
        // before the first.
        .u16(ird.min(MAX_DEPTH))
        .u16(ord.min(MAX_DEPTH))
        .bytes(MAGIC)
        .u16(VERSION)
}

struct Frame<'a> {
    crc: bool,
    rejected: bool,
    ird: u16,
    ord: u16,
    /// Our private data, behind its version.
    own: Fields<'a>,
}

impl<'a> Frame<'a> {
    /// `None` as long as what is there can become a frame. What cannot is refused with its first
    /// wrong field: a stranger is not waited for.
    fn decode(kind: &Kind, bytes: &'a [u8], private: usize) -> Result<Option<Self>, FrameError> {
        let key = &bytes[..bytes.len().min(KEY)];
        if !kind.key.starts_with(key) {
            return Err(FrameError::Key {
                frame: kind.name,
                found: key.to_vec(),
            });
        }
        let Some((header, rest)) = bytes.split_first_chunk::<HEADER>() else {
            return Ok(None);
        };
        let mut fields = Fields::new(&header[KEY..]);
        let (flags, len) = (fields.u16(), usize::from(fields.u16()));
        if flags & 0xff != REVISION {
            return Err(FrameError::Version {
                protocol: "MPA",
                found: flags & 0xff,
                expected: REVISION,
            });
        }
        if flags & MARKERS != 0 {
            return Err(refused("marker bit of an MPA frame", 1, "0"));
        }
        if flags & ENHANCED == 0 {
            return Err(refused("enhanced bit of an MPA frame", 0, "1"));
        }
        if len > MAX_PRIVATE_DATA {
            return Err(refused("private data's length", len as u64, "512 at most"));
        }
        let Some(data) = rest.get(..len) else {
            return Ok(None);
        };
        if len < DEPTHS + OWN {
            return Err(wrong_length(len, private));
        }
        let mut fields = Fields::new(data);
        let (ird, ord) = (depth("IRD", fields.u16())?, depth("ORD", fields.u16())?);
        let magic: [u8; 4] = fields.bytes();
        if magic != MAGIC {
            let value = u32::from_be_bytes(magic).into();
            return Err(refused(
                "private data's magic",
                value,
                "that of this device",
            ));
        }
        let version = fields.u16();
        if version != VERSION {
            return Err(FrameError::Version {
                protocol: "private data",
                found: version,
                expected: VERSION,
            });
        }
        if len != private {
            return Err(wrong_length(len, private));
        }
        Ok(Some(Self {
            crc: flags & CRC != 0,
            rejected: flags & REJECTED != 0,
            ird,
            ord,
            own: fields,
        }))
    }
}

/// A number of READs. Above it are bits that ask for a peer-to-peer set-up.
fn depth(name: &'static str, word: u16) -> Result<u16, FrameError> {
    if word <= MAX_DEPTH {
        return Ok(word);
    }
    Err(refused(
        name,
        word.into(),
        "14 bits, for a client and a server",
    ))
}

fn of_24_bits(name: &'static str, word: u32) -> Result<u32, FrameError> {
    if word <= MAX_24 {
        return Ok(word);
    }
    Err(refused(name, word.into(), "24 bits"))
}

fn refused(field: &'static str, value: u64, expected: &'static str) -> FrameError {
    FrameError::Field {
        field,
        value,
        expected,
    }
}

fn wrong_length(found: usize, expected: usize) -> FrameError {
    FrameError::Length {
        part: "MPA's private data",
        found,
        expected,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn hellos() -> impl Strategy<Value = Hello> {
        (
            [0..=MAX_24, 0..=MAX_24, 0..=MAX_24],
            any::<[u32; 3]>(),
            [0..=MAX_DEPTH, 0..=MAX_DEPTH],
            (0u8..8, any::<bool>(), any::<bool>()),
        )
            .prop_map(
                |(
                    [source_qpn, dest_qpn, psn],
                    [generation, patience_ms, executed],
                    [ird, ord],
                    (rnr_retry, xrc, crc),
                )| Hello {
                    source_qpn,
                    dest_qpn,
                    psn,
                    generation,
                    patience_ms,
                    executed,
                    ird,
                    ord,
                    rnr_retry,
                    xrc,
                    crc,
                },
            )
    }

    fn answers() -> impl Strategy<Value = Answer> {
        let results = prop_oneof![
            Just(Outcome::Accepted),
            Just(Outcome::NotYet),
            Just(Outcome::Gone),
            any::<u32>().prop_map(Outcome::Refused),
        ];
        (
            results,
            any::<u32>(),
            any::<bool>(),
            [0..=MAX_DEPTH, 0..=MAX_DEPTH],
        )
            .prop_map(|(result, generation, crc, [ird, ord])| Answer {
                result,
                generation,
                crc,
                ird,
                ord,
            })
    }

    proptest! {
        #[test]
        fn requests_and_replies_round_trip(
            hello in hellos(), answer in answers(),
            behind in prop::collection::vec(any::<u8>(), 0..30),
        ) {
            for (whole, len) in [
                (hello.encode().to_vec(), Hello::LEN), (answer.encode().to_vec(), Answer::LEN),
            ] {
                prop_assert_eq!(whole.len(), len);
                prop_assert!(len <= MAX_LEN);
                let (mut asked, mut answered) = (None, None);
                for end in 0..len {
                    asked = asked.or(Hello::decode(&whole[..end]).ok().flatten());
                    answered = answered.or(Answer::decode(&whole[..end]).ok().flatten());
                }
                prop_assert_eq!((asked, answered), (None, None), "from less than a frame");
            }
            for end in 0..Hello::LEN {
                prop_assert_eq!(Hello::decode(&hello.encode()[..end]), Ok(None));
            }
            for end in 0..Answer::LEN {
                prop_assert_eq!(Answer::decode(&answer.encode()[..end]), Ok(None));
            }
            let mut stream = hello.encode().to_vec();
            stream.extend(&behind);
            prop_assert_eq!(Hello::decode(&stream), Ok(Some((hello, Hello::LEN))));
            let mut stream = answer.encode().to_vec();
            stream.extend(&behind);
            prop_assert_eq!(Answer::decode(&stream), Ok(Some((answer, Answer::LEN))));
        }

        /// Whatever is taken for a frame means the same when it is written again.
        #[test]
        fn a_changed_frame_is_a_good_one_or_none(
            hello in hellos(), answer in answers(), at: prop::sample::Index, byte: u8,
        ) {
            let mut bytes = hello.encode();
            bytes[at.index(Hello::LEN)] = byte;
            if let Ok(Some((hello, len))) = Hello::decode(&bytes) {
                prop_assert_eq!(Hello::decode(&hello.encode()), Ok(Some((hello, len))));
            }
            let mut bytes = answer.encode();
            bytes[at.index(Answer::LEN)] = byte;
            if let Ok(Some((answer, len))) = Answer::decode(&bytes) {
                prop_assert_eq!(Answer::decode(&answer.encode()), Ok(Some((answer, len))));
            }
        }

        #[test]
        fn any_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), HEADER..600)) {
            prop_assert!(Hello::decode(&bytes).is_err());
            prop_assert!(Answer::decode(&bytes).is_err());
        }
    }

    const HELLO: Hello = Hello {
        source_qpn: 0x0001_0203,
        dest_qpn: 0x0004_0506,
        psn: 0x0007_0809,
        generation: 0x1011_1213,
        patience_ms: 0x1415_1617,
        executed: 0x1819_1a1b,
        ird: 16,
        ord: 0x0102,
        rnr_retry: 5,
        xrc: true,
        crc: true,
    };
    const ANSWER: Answer = Answer {
        result: Outcome::Accepted,
        generation: 0x0102_0304,
        crc: false,
        ird: 1,
        ord: 2,
    };

    #[test]
    fn frames_look_as_the_standards_draw_them() {
        let mut wanted = b"MPA ID Req Frame".to_vec();
        wanted.extend([0x50, 2, 0, 36, 0, 16, 1, 2]);
        wanted.extend(b"vbsS");
        wanted.extend([0, 3, 0, 13, 0, 1, 2, 3, 0, 4, 5, 6, 0, 7, 8, 9]);
        wanted.extend(0x10..=0x1b);
        assert_eq!(HELLO.encode()[..], wanted[..]);

        let mut wanted = b"MPA ID Rep Frame".to_vec();
        wanted.extend([0x10, 2, 0, 20, 0, 1, 0, 2]);
        wanted.extend(b"vbsS");
        wanted.extend([0, 3, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4]);
        assert_eq!(ANSWER.encode()[..], wanted[..]);
        let refused = Answer {
            result: Outcome::Refused(13),
            ..ANSWER
        };
        assert_eq!(refused.encode()[16..18], [0x30, 2]);
    }

    /// The error of a request with one byte changed, which must be a field's.
    fn with(at: usize, byte: u8) -> FrameError {
        let mut bytes = HELLO.encode();
        assert_ne!(bytes[at], byte);
        bytes[at] = byte;
        Hello::decode(&bytes).unwrap_err()
    }

    fn reply_with(at: usize, byte: u8) -> FrameError {
        let mut bytes = ANSWER.encode();
        assert_ne!(bytes[at], byte);
        bytes[at] = byte;
        Answer::decode(&bytes).unwrap_err()
    }

    #[test]
    fn what_a_request_cannot_say_is_refused() {
        let field = |error: FrameError| match error {
            FrameError::Field { field, .. } => field,
            other => panic!("{other:?}"),
        };
        assert_eq!(field(with(16, 0xd0)), "marker bit of an MPA frame");
        assert_eq!(field(with(16, 0x40)), "enhanced bit of an MPA frame");
        assert_eq!(field(with(16, 0x70)), "rejected bit of an MPA request");
        assert_eq!(field(with(18, 3)), "private data's length");
        assert_eq!(field(with(20, 0x80)), "IRD");
        assert_eq!(field(with(22, 0x40)), "ORD");
        assert_eq!(field(with(24, b'V')), "private data's magic");
        assert_eq!(field(with(32, 1)), "source QPN");
        assert_eq!(field(with(36, 1)), "destination QPN");
        assert_eq!(field(with(40, 1)), "PSN");
        assert_eq!(
            with(17, 1),
            FrameError::Version {
                protocol: "MPA",
                found: 1,
                expected: 2
            }
        );
        assert_eq!(
            with(29, 9),
            FrameError::Version {
                protocol: "private data",
                found: 9,
                expected: 3
            }
        );
        for len in [0, 9, 35] {
            assert_eq!(with(19, len), wrong_length(len.into(), 36));
        }
    }

    #[test]
    fn what_a_reply_cannot_say_is_refused() {
        let refused = |error: FrameError| match error {
            FrameError::Field { field, value, .. } => (field, value),
            other => panic!("{other:?}"),
        };
        let result = "result of an MPA reply";
        assert_eq!(
            refused(reply_with(16, 0x30)),
            (result, 0),
            "rejected, yet accepted"
        );
        assert_eq!(refused(reply_with(31, 1)), (result, 1), "accepted, yet not");
        assert_eq!(refused(reply_with(35, 5)), ("code of an MPA reply", 5));
        let mut bytes = ANSWER.encode();
        (bytes[16], bytes[31]) = (0x30, 4);
        assert_eq!(refused(Answer::decode(&bytes).unwrap_err()), (result, 4));
    }

    #[test]
    fn a_stranger_is_refused_with_its_first_wrong_byte() {
        let refused = |frame, bytes: &[u8]| {
            let found = bytes.to_vec();
            FrameError::Key { frame, found }
        };
        assert_eq!(Hello::decode(b"G"), Err(refused("request", b"G")));
        assert_eq!(
            Hello::decode(b"MPA ID Rep"),
            Err(refused("request", b"MPA ID Rep"))
        );
        assert_eq!(
            Answer::decode(b"MPA ID Req"),
            Err(refused("reply", b"MPA ID Req"))
        );
        let long = [b'x'; 600];
        assert_eq!(Hello::decode(&long), Err(refused("request", &long[..16])));
    }

    #[test]
    fn depths_are_cut_to_what_can_be_told() {
        let hello = Hello {
            ird: u16::MAX,
            ..HELLO
        };
        let (told, _) = Hello::decode(&hello.encode()).unwrap().unwrap();
        assert_eq!((told.ird, told.ord), (MAX_DEPTH, HELLO.ord));
    }
}
