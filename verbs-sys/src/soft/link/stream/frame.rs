//! A DDP segment's header with what RDMAP puts into it.

use super::FrameError;
use super::fields::{Fields, Layout};

/// Bytes of a tagged segment's header.
pub(in crate::soft) const TAGGED_LEN: usize = 14;
/// Bytes of an untagged segment's header.
pub(in crate::soft) const UNTAGGED_LEN: usize = 18;

const TAGGED: u8 = 0x80;
const LAST: u8 = 0x40;
const DDP_VERSION: u8 = 1;
const RDMAP_VERSION: u8 = 1;

/// What a message is: RFC 5040 up to 7, RFC 7306 up to 11. The rest is spoken between two devices
/// of ours only, which tell each other so in MPA's private data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(in crate::soft) enum Opcode {
    Write = 0,
    ReadRequest = 1,
    ReadResponse = 2,
    Send = 3,
    SendInvalidate = 4,
    SendSolicited = 5,
    SendSolicitedInvalidate = 6,
    Terminate = 7,
    Immediate = 8,
    ImmediateSolicited = 9,
    AtomicRequest = 10,
    AtomicResponse = 11,
    /// The header's field is the immediate.
    SendImmediate = 12,
    SendSolicitedImmediate = 13,
    /// No payload; the header's field is the number of messages that have been executed.
    Acknowledge = 14,
    /// Where and how long the following WRITE of several segments is, so that nothing of it is
    /// placed if not all of it may be. Without a payload: the header's field is the number of the shared receive queue
    /// that the following requests of XRC are for, up to the next of these.
    Announce = 15,
}

const OPCODES: [Opcode; 16] = [
    Opcode::Write,
    Opcode::ReadRequest,
    Opcode::ReadResponse,
    Opcode::Send,
    Opcode::SendInvalidate,
    Opcode::SendSolicited,
    Opcode::SendSolicitedInvalidate,
    Opcode::Terminate,
    Opcode::Immediate,
    Opcode::ImmediateSolicited,
    Opcode::AtomicRequest,
    Opcode::AtomicResponse,
    Opcode::SendImmediate,
    Opcode::SendSolicitedImmediate,
    Opcode::Acknowledge,
    Opcode::Announce,
];

impl Opcode {
    /// Of the low four bits of RDMAP's control byte, all of whose values have a meaning.
    fn of(control: u8) -> Self {
        OPCODES[usize::from(control & 0x0f)]
    }

    /// The untagged queue that its messages are on; `None`: they are tagged.
    pub(in crate::soft) fn queue(self) -> Option<u32> {
        match self {
            Self::Write | Self::ReadResponse => None,
            Self::Send
            | Self::SendInvalidate
            | Self::SendSolicited
            | Self::SendSolicitedInvalidate
            | Self::SendImmediate
            | Self::SendSolicitedImmediate
            | Self::Immediate
            | Self::ImmediateSolicited => Some(0),
            Self::ReadRequest | Self::AtomicRequest | Self::Announce => Some(1),
            Self::Terminate => Some(2),
            Self::AtomicResponse => Some(3),
            Self::Acknowledge => Some(4),
        }
    }

    /// Whether a message may have more than one segment.
    fn is_segmented(self) -> bool {
        match self {
            Self::Write
            | Self::ReadResponse
            | Self::Send
            | Self::SendInvalidate
            | Self::SendSolicited
            | Self::SendSolicitedInvalidate
            | Self::SendImmediate
            | Self::SendSolicitedImmediate => true,
            Self::ReadRequest
            | Self::Terminate
            | Self::Immediate
            | Self::ImmediateSolicited
            | Self::AtomicRequest
            | Self::AtomicResponse
            | Self::Acknowledge
            | Self::Announce => false,
        }
    }
}

/// A segment's header (RFC 5041, section 4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Header {
    /// The payload goes to `offset` of the buffer that `stag` names.
    Tagged {
        opcode: Opcode,
        /// The message's last segment.
        last: bool,
        stag: u32,
        offset: u64,
    },
    /// The payload goes to `offset` of the message's buffer.
    Untagged {
        opcode: Opcode,
        /// The message's last segment.
        last: bool,
        /// The STag to invalidate, or what the opcode says. Of an immediate, which an application
        /// gives in network order: `u32::from_be(imm_data)`.
        field: u32,
        queue: u32,
        /// The message's number on its queue, from 1 on.
        msn: u32,
        offset: u32,
    },
}

impl Header {
    /// Writes the header and returns how many bytes it has.
    pub(in crate::soft) fn encode(&self, into: &mut [u8; UNTAGGED_LEN]) -> usize {
        match *self {
            Self::Tagged {
                opcode,
                last,
                stag,
                offset,
            } => {
                let bytes = Layout::<TAGGED_LEN>::new()
                    .bytes(control(TAGGED, last, opcode))
                    .u32(stag)
                    .u64(offset)
                    .done();
                into[..TAGGED_LEN].copy_from_slice(&bytes);
                TAGGED_LEN
            }
            Self::Untagged {
                opcode,
                last,
                field,
                queue,
                msn,
                offset,
            } => {
                *into = Layout::new()
                    .bytes(control(0, last, opcode))
                    .u32(field)
                    .u32(queue)
                    .u32(msn)
                    .u32(offset)
                    .done();
                UNTAGGED_LEN
            }
        }
    }

    /// Reads a segment: its header, and the payload behind it.
    pub(in crate::soft) fn decode(ulpdu: &[u8]) -> Result<(Self, &[u8]), FrameError> {
        let Some(&[ddp, rdmap]) = ulpdu.first_chunk() else {
            return Err(FrameError::Length {
                part: "a segment's header",
                found: ulpdu.len(),
                expected: TAGGED_LEN,
            });
        };
        version("DDP", ddp & 0x03, DDP_VERSION)?;
        version("RDMAP", rdmap >> 6, RDMAP_VERSION)?;
        let (opcode, last, tagged) = (Opcode::of(rdmap), ddp & LAST != 0, ddp & TAGGED != 0);
        let queue = opcode.queue();
        if queue.is_none() != tagged {
            return Err(FrameError::Form { opcode, tagged });
        }
        let len = if tagged { TAGGED_LEN } else { UNTAGGED_LEN };
        let Some((header, payload)) = ulpdu.split_at_checked(len) else {
            return Err(FrameError::Length {
                part: "a segment's header",
                found: ulpdu.len(),
                expected: len,
            });
        };
        let mut fields = Fields::new(&header[2..]);
        let Some(expected) = queue else {
            let header = Self::Tagged {
                opcode,
                last,
                stag: fields.u32(),
                offset: fields.u64(),
            };
            return Ok((header, payload));
        };
        let (field, found) = (fields.u32(), fields.u32());
        let (msn, offset) = (fields.u32(), fields.u32());
        if found != expected {
            return Err(FrameError::Queue {
                opcode,
                found,
                expected,
            });
        }
        if !opcode.is_segmented() && (!last || offset != 0) {
            return Err(FrameError::Segments {
                opcode,
                offset,
                last,
            });
        }
        if opcode == Opcode::Acknowledge && !payload.is_empty() {
            return Err(FrameError::Length {
                part: "an acknowledgement's payload",
                found: payload.len(),
                expected: 0,
            });
        }
        let header = Self::Untagged {
            opcode,
            last,
            field,
            queue: expected,
            msn,
            offset,
        };
        Ok((header, payload))
    }
}

/// The control bytes of DDP and RDMAP. Bits that are reserved are zero, and not looked at.
fn control(form: u8, last: bool, opcode: Opcode) -> [u8; 2] {
    let last = if last { LAST } else { 0 };
    [form | last | DDP_VERSION, RDMAP_VERSION << 6 | opcode as u8]
}

fn version(protocol: &'static str, found: u8, expected: u8) -> Result<(), FrameError> {
    if found == expected {
        return Ok(());
    }
    Err(FrameError::Version {
        protocol,
        found: found.into(),
        expected: expected.into(),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Headers that can be on the wire.
    fn headers() -> impl Strategy<Value = Header> {
        (
            prop::sample::select(&OPCODES[..]),
            any::<(bool, u32, u64, u32, u32)>(),
        )
            .prop_map(|(opcode, (last, word, offset, msn, message_offset))| {
                let single = !opcode.is_segmented();
                let last = last || single;
                match opcode.queue() {
                    None => Header::Tagged {
                        opcode,
                        last,
                        stag: word,
                        offset,
                    },
                    Some(queue) => Header::Untagged {
                        opcode,
                        last,
                        field: word,
                        queue,
                        msn,
                        offset: if single { 0 } else { message_offset },
                    },
                }
            })
    }

    fn bytes(header: &Header) -> Vec<u8> {
        let mut bytes = [0xaa; UNTAGGED_LEN];
        let len = header.encode(&mut bytes);
        bytes[..len].to_vec()
    }

    proptest! {
        #[test]
        fn headers_round_trip(
            header in headers(), payload in prop::collection::vec(any::<u8>(), 0..40),
        ) {
            let mut segment = bytes(&header);
            let takes_payload =
                !matches!(header, Header::Untagged { opcode: Opcode::Acknowledge, .. });
            if takes_payload {
                segment.extend(&payload);
            }
            let rest = if takes_payload { &payload[..] } else { &[] };
            prop_assert_eq!(Header::decode(&segment), Ok((header, rest)));
        }

        #[test]
        fn a_truncated_header_is_refused(header in headers()) {
            let whole = bytes(&header);
            for len in 0..whole.len() {
                let refused = matches!(
                    Header::decode(&whole[..len]),
                    Err(FrameError::Length { found, .. }) if found == len
                );
                prop_assert!(refused, "{} bytes", len);
            }
        }

        /// Whatever is taken for a header means the same when it is written again.
        #[test]
        fn any_bytes_are_a_good_header_or_none(
            segment in prop::collection::vec(any::<u8>(), 0..64), control: [u8; 2], good: bool,
        ) {
            let mut segment = segment;
            if good && segment.len() > 2 {
                segment[0] = control[0] & !3 | DDP_VERSION;
                segment[1] = control[1] & 0x3f | RDMAP_VERSION << 6;
            }
            if let Ok((header, payload)) = Header::decode(&segment) {
                let mut again = bytes(&header);
                again.extend(payload);
                prop_assert_eq!(Header::decode(&again), Ok((header, payload)));
            }
        }
    }

    /// The bytes of two segments, worked out by hand from RFC 5040 and RFC 5041.
    #[test]
    fn segments_look_as_the_standards_draw_them() {
        let write = Header::Tagged {
            opcode: Opcode::Write,
            last: true,
            stag: 0x0102_0304,
            offset: 0x1112_1314_1516_1718,
        };
        assert_eq!(
            bytes(&write),
            [
                0xc1, 0x40, 1, 2, 3, 4, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x18
            ]
        );
        let send = Header::Untagged {
            opcode: Opcode::SendSolicitedInvalidate,
            last: false,
            field: 0x0a0b_0c0d,
            queue: 0,
            msn: 1,
            offset: 0x0203,
        };
        assert_eq!(
            bytes(&send),
            [
                1, 0x46, 0xa, 0xb, 0xc, 0xd, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 2, 3
            ]
        );
    }

    #[test]
    fn opcodes_are_their_numbers() {
        for (number, &opcode) in OPCODES.iter().enumerate() {
            assert_eq!(opcode as usize, number);
        }
    }

    fn untagged(opcode: Opcode, last: bool, queue: u32, offset: u32) -> Header {
        Header::Untagged {
            opcode,
            last,
            field: 0,
            queue,
            msn: 1,
            offset,
        }
    }

    #[test]
    fn what_a_header_cannot_say_is_refused() {
        let good = bytes(&untagged(Opcode::Send, true, 0, 0));
        let with = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            Header::decode(&bytes).map(|(header, _)| header)
        };
        let version = |protocol, found| {
            Err(FrameError::Version {
                protocol,
                found,
                expected: 1,
            })
        };
        assert_eq!(with(0, 0x40), version("DDP", 0));
        assert_eq!(with(0, 0x42), version("DDP", 2));
        assert_eq!(with(1, 0x03), version("RDMAP", 0));
        assert_eq!(with(1, 0xc3), version("RDMAP", 3));
        let opcode = Opcode::Send;
        assert_eq!(
            with(0, 0xc1),
            Err(FrameError::Form {
                opcode,
                tagged: true
            })
        );
        for opcode in [Opcode::Write, Opcode::ReadResponse] {
            let refused = Err(FrameError::Form {
                opcode,
                tagged: false,
            });
            assert_eq!(with(1, 0x40 | opcode as u8), refused);
        }
    }

    #[test]
    fn every_message_has_its_queue() {
        for opcode in OPCODES {
            let Some(expected) = opcode.queue() else {
                continue;
            };
            for found in 0..6 {
                let result = Header::decode(&bytes(&untagged(opcode, true, found, 0))).map(drop);
                let wanted = if found == expected {
                    Ok(())
                } else {
                    Err(FrameError::Queue {
                        opcode,
                        found,
                        expected,
                    })
                };
                assert_eq!(result, wanted);
            }
        }
    }

    #[test]
    fn only_data_has_several_segments() {
        for opcode in OPCODES {
            let Some(queue) = opcode.queue() else {
                continue;
            };
            for (last, offset) in [(false, 0), (true, 1)] {
                let bytes = bytes(&untagged(opcode, last, queue, offset));
                let wanted = if opcode.is_segmented() {
                    Ok(())
                } else {
                    Err(FrameError::Segments {
                        opcode,
                        offset,
                        last,
                    })
                };
                assert_eq!(Header::decode(&bytes).map(drop), wanted);
            }
        }
    }

    #[test]
    fn an_acknowledgement_has_no_payload() {
        let mut bytes = bytes(&untagged(Opcode::Acknowledge, true, 4, 0));
        assert!(Header::decode(&bytes).is_ok());
        bytes.push(0);
        assert!(matches!(
            Header::decode(&bytes),
            Err(FrameError::Length { found: 1, .. })
        ));
    }
}
