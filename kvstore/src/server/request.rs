//! From a frame to a request that is within the limits: all that is believed of a message is checked here.

use wire::{Frame, view};

use crate::limits::{check_key, check_value};
use crate::protocol::{Delete, Get, Put, PutFrom, Stat, Status, Unpin, kind};

/// What a client asks for. Keys and values are within the limits.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Request<'a> {
    /// Store the value.
    Put { key: &'a [u8], value: &'a [u8] },
    /// Fetch the value from the client and store it.
    PutFrom {
        key: &'a [u8],
        address: u64,
        length: usize,
        rkey: u32,
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
        kind::PUT_FROM => {
            let put = view::<PutFrom<'_>>(frame).map_err(malformed)?;
            Request::PutFrom {
                key: &put.key,
                address: put.address.to_native(),
                length: usize::try_from(put.length.to_native()).map_err(|_| Status::OutOfLimits)?,
                rkey: put.rkey.to_native(),
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
        Request::PutFrom {
            key,
            length,
            address,
            ..
        } => {
            check_key(key).map_err(out_of_limits)?;
            check_value(length).map_err(out_of_limits)?;
            if address.checked_add(length as u64).is_none() {
                return Err(Status::Malformed);
            }
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
        let message = PutFrom {
            key: b"k",
            address: 0x1000,
            length: MAX_VALUE as u64,
            rkey: 7,
        };
        with_frame(kind::PUT_FROM, &message, b"", |request| {
            let want = Request::PutFrom {
                key: b"k",
                address: 0x1000,
                length: MAX_VALUE,
                rkey: 7,
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
        for (address, length, want) in [
            (0, MAX_VALUE as u64 + 1, Status::OutOfLimits),
            (0, u64::MAX, Status::OutOfLimits),
            (u64::MAX, 2, Status::Malformed),
        ] {
            let message = PutFrom {
                key: b"k",
                address,
                length,
                rkey: 7,
            };
            with_frame(kind::PUT_FROM, &message, b"", |request| {
                assert_eq!(request, Err(want));
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
                    | Request::PutFrom { key, .. } => prop_assert!(check_key(key).is_ok()),
                    Request::Unpin { .. } | Request::Stat => {}
                }
            }
        }
    }
}
