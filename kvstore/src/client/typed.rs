//! Serializing a typed value straight into registered memory.

use std::mem::MaybeUninit;

use rkyv::api::low::to_bytes_in_with_alloc;
use rkyv::ser::allocator::SubAllocator;
use rkyv::ser::writer::Buffer;
use wire::{Cause, Encode};

use super::value::ValueBuffer;
use crate::error::OperationError;
use crate::limits::MAX_VALUE;

/// Encodes `value` into a buffer that `take` gives, of its exact length; also returns the length to start with for the
/// next value of the kind.
///
/// How long an archive will be cannot be asked beforehand: it is tried with `guess` bytes, and then with ever more.
pub fn encode<T: Encode>(
    value: &T,
    guess: usize,
    mut take: impl FnMut(usize) -> Result<ValueBuffer, OperationError>,
) -> Result<(ValueBuffer, usize), OperationError> {
    let mut room = guess.clamp(1, MAX_VALUE);
    loop {
        let mut target = take(room)?;
        match encode_into(value, &mut target) {
            Ok(length) => {
                if let Some(buffer) = &mut target.buffer {
                    buffer.truncate(length);
                }
                return Ok((target, room));
            }
            Err(cause) if room == MAX_VALUE => {
                return Err(OperationError::Encode {
                    source: cause.into(),
                });
            }
            Err(_) => room = room.saturating_mul(8).min(MAX_VALUE),
        }
    }
}

fn encode_into<T: Encode>(value: &T, target: &mut [u8]) -> Result<usize, Cause> {
    // Nested containers need scratch space, never more than their archive is long.
    let (mut small, mut large) = ([MaybeUninit::uninit(); 1024], Vec::new());
    let scratch = if target.len() <= small.len() {
        &mut small[..]
    } else {
        large.resize(target.len(), MaybeUninit::uninit());
        &mut large[..]
    };
    Ok(to_bytes_in_with_alloc(value, Buffer::from(target), SubAllocator::new(scratch))?.len())
}
