//! From a frame to a request that is within the limits: all that is believed of a message is checked here.

use wire::{Frame, view};

use crate::limits::{check_key, check_value};
use crate::protocol::{Commit, Delete, Get, Put, Reserve, Stat, Status, Unpin, kind};

/// What a client asks for. Keys and values are within the limits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Request<'a> {
    /// Store the value.
    Put { key: &'a [u8], value: &'a [u8] },
    /// Answer with a block for the client to write.
    Reserve { length: usize },
    /// Store what the client wrote.
    Commit {
        key: &'a [u8],
        reservation: u64,
        length: usize,
        again: bool,
    },
    /// Answer with the value or its location.
    Get { key: &'a [u8] },
    /// Remove the key.
    Delete { key: &'a [u8] },
    /// Let go of the pinned block, if it has this version.
    Unpin { version: u64 },
    /// Answer with the statistics.
    Stat,
}

/// Takes a frame for a request.
///
/// # Errors
/// The status to answer with; nothing was done.
pub fn parse<'a>(frame: &Frame<'a>) -> Result<Request<'a>, Status> {
    let malformed = |_| Status::Malformed;
    let request = match frame.header().kind {
        kind::PUT => Request::Put {
            key: &view::<Put<'_>>(frame).map_err(malformed)?.key,
            value: frame.body(),
        },
        kind::RESERVE => {
            let length = view::<Reserve>(frame)
                .map_err(malformed)?
                .length
                .to_native();
            Request::Reserve {
                length: usize::try_from(length).map_err(|_| Status::OutOfLimits)?,
            }
        }
        kind::COMMIT => {
            let commit = view::<Commit<'_>>(frame).map_err(malformed)?;
            let length = commit.length.to_native();
            Request::Commit {
                key: &commit.key,
                reservation: commit.reservation.to_native(),
                length: usize::try_from(length).map_err(|_| Status::OutOfLimits)?,
                again: commit.again,
            }
        }
        kind::GET => Request::Get {
            key: &view::<Get<'_>>(frame).map_err(malformed)?.key,
        },
        kind::DELETE => Request::Delete {
            key: &view::<Delete<'_>>(frame).map_err(malformed)?.key,
        },
        kind::UNPIN => Request::Unpin {
            version: view::<Unpin>(frame).map_err(malformed)?.version.to_native(),
        },
        kind::STAT => {
            view::<Stat>(frame).map_err(malformed)?;
            Request::Stat
        }
        _ => return Err(Status::Malformed),
    };
    let out_of_limits = |_| Status::OutOfLimits;
    match request {
        Request::Put { key, value } => {
            check_key(key).map_err(out_of_limits)?;
            check_value(value.len()).map_err(out_of_limits)?;
        }
        Request::Reserve { length } => check_value(length).map_err(out_of_limits)?,
        Request::Commit { key, length, .. } => {
            check_key(key).map_err(out_of_limits)?;
            check_value(length).map_err(out_of_limits)?;
        }
        Request::Get { key } | Request::Delete { key } => {
            check_key(key).map_err(out_of_limits)?;
        }
        Request::Unpin { .. } | Request::Stat => {}
    }
    Ok(request)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use wire::{Encode, encode_with_body};

    use super::*;
    use crate::limits::MAX_VALUE;

    /// Memory as aligned as a pooled buffer.
    #[repr(align(64))]
    struct Slot([u8; 8192]);

    fn with_frame<T: Encode>(
        kind: u16,
        message: &T,
        body: &[u8],
        check: impl FnOnce(Result<Request<'_>, Status>),
    ) {
        let mut slot = Slot([0; 8192]);
        let (length, room) =
            encode_with_body(&mut slot.0, kind, 9, message, body.len() as u32).unwrap();
        room.copy_from_slice(body);
        check(parse(&Frame::parse(&slot.0[..length]).unwrap()));
    }

    #[test]
    fn each_kind_is_understood() {
        with_frame(kind::PUT, &Put { key: b"k" }, b"value", |request| {
            let (key, value) = (&b"k"[..], &b"value"[..]);
            assert_eq!(request, Ok(Request::Put { key, value }));
        });
        let message = Reserve {
            length: MAX_VALUE as u64,
        };
        with_frame(kind::RESERVE, &message, b"", |request| {
            assert_eq!(request, Ok(Request::Reserve { length: MAX_VALUE }));
        });
        let message = Commit {
            key: b"k",
            reservation: 7,
            length: 9,
            again: true,
        };
        with_frame(kind::COMMIT, &message, b"", |request| {
            let want = Request::Commit {
                key: b"k",
                reservation: 7,
                length: 9,
                again: true,
            };
            assert_eq!(request, Ok(want));
        });
        with_frame(kind::GET, &Get { key: b"k" }, b"", |request| {
            assert_eq!(request, Ok(Request::Get { key: b"k" }));
        });
        with_frame(kind::DELETE, &Delete { key: b"k" }, b"", |request| {
            assert_eq!(request, Ok(Request::Delete { key: b"k" }));
        });
        with_frame(kind::UNPIN, &Unpin { version: 5 }, b"", |request| {
            assert_eq!(request, Ok(Request::Unpin { version: 5 }));
        });
        with_frame(kind::STAT, &Stat { reserved: 0 }, b"", |request| {
            assert_eq!(request, Ok(Request::Stat));
        });
    }

    #[test]
    fn limits_hold_whatever_the_client_checks() {
        for key in [&[][..], &[0; 1025]] {
            with_frame(kind::PUT, &Put { key }, b"", |request| {
                assert_eq!(request, Err(Status::OutOfLimits));
            });
            with_frame(kind::GET, &Get { key }, b"", |request| {
                assert_eq!(request, Err(Status::OutOfLimits));
            });
            with_frame(kind::DELETE, &Delete { key }, b"", |request| {
                assert_eq!(request, Err(Status::OutOfLimits));
            });
        }
        for key in [&[][..], &[0; 1025]] {
            let message = Commit {
                key,
                reservation: 1,
                length: 1,
                again: false,
            };
            with_frame(kind::COMMIT, &message, b"", |request| {
                assert_eq!(request, Err(Status::OutOfLimits));
            });
        }
        for length in [MAX_VALUE as u64 + 1, u64::MAX] {
            with_frame(kind::RESERVE, &Reserve { length }, b"", |request| {
                assert_eq!(request, Err(Status::OutOfLimits));
            });
        }
    }

    proptest! {
        #[test]
        fn anything_else_is_malformed_and_never_a_panic(
            kind in 0u16..32,
            archive in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let header = wire::Header { kind, archive_len: archive.len() as u32, ..Default::default() };
            let mut slot = Slot([0; 8192]);
            let length = wire::HEADER_LEN + archive.len();
            slot.0[..wire::HEADER_LEN].copy_from_slice(&header.to_bytes());
            slot.0[wire::HEADER_LEN..length].copy_from_slice(&archive);
            let frame = Frame::parse(&slot.0[..length]).unwrap();
            if let Ok(request) = parse(&frame) {
                match request {
                    Request::Put { key, .. } | Request::Get { key } | Request::Delete { key }
                    | Request::Commit { key, .. } => prop_assert!(check_key(key).is_ok()),
                    Request::Reserve { length } => prop_assert!(check_value(length).is_ok()),
                    Request::Unpin { .. } | Request::Stat => {}
                }
            }
        }
    }
}
