//! The receive ring of a queue pair: messages from its peer, in order.
//!
//! One producer (the peer's requester, under its send lock), one consumer (the responder, under its
//! receive lock). A record is a header and its payload in units of one cache line. The first word of
//! the line *behind* a record is zero before the record's own first word is published, so the
//! consumer finds the ring's end without an index that both would write.
//!
//! A consumer that polls takes the line it polls away from the producer, so the stores of a short
//! record must follow each other closely once the producer has that line. Hence the producer clears
//! lines ahead, after it has published: the next record's other lines are then its own already.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::copy;
use crate::ffi::ibv_sge;
use crate::soft::layout::{QpMailbox, RING_BYTES};

pub(in crate::soft) const UNIT: usize = 64;
/// Units of a ring.
pub(in crate::soft) const UNITS: u32 = (RING_BYTES / UNIT) as u32;
/// Bytes of a record before its payload.
pub(in crate::soft) const HEADER: usize = 32;
/// Units that the producer clears ahead, and so owns when it writes the next record.
pub(in crate::soft) const AHEAD: u32 = 8;
/// The largest payload that travels in the ring; larger ones are fetched by the responder from the
/// requester's memory, which saves the second copy.
pub(in crate::soft) const MAX_INLINE: usize = 2048;

/// What a record asks of the responder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Kind {
    /// Nothing: the rest of the ring up to its end is unused.
    Skip,
    Send,
    WriteImm,
    CompareSwap,
    FetchAdd,
    AtomicWrite,
}

impl Kind {
    /// Whether the payload are the operands of an atomic operation.
    pub(in crate::soft) fn has_operands(self) -> bool {
        matches!(self, Self::CompareSwap | Self::FetchAdd | Self::AtomicWrite)
    }
}

/// Bytes of the operands of an atomic operation: two words.
pub(in crate::soft) const OPERANDS: usize = 16;

/// The payload is a list of the requester's SGEs instead of the bytes.
pub(in crate::soft) const FETCH: u8 = 1;
pub(in crate::soft) const SOLICITED: u8 = 2;
pub(in crate::soft) const WITH_IMM: u8 = 4;
/// The requester wants a completion.
pub(in crate::soft) const SIGNALED: u8 = 8;
/// The record acknowledges messages that went the other way.
pub(in crate::soft) const ACKNOWLEDGES: u8 = 16;
/// `imm` is a key that the message invalidates.
pub(in crate::soft) const WITH_INV: u8 = 32;
/// A bit of the payload is to be changed where it arrives: its sender wants such a fault.
pub(in crate::soft) const CORRUPTED: u8 = 64;

/// A record's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Record {
    pub kind: Kind,
    pub flags: u8,
    /// SGEs in the payload, with [`FETCH`].
    pub num_sge: u8,
    /// The requester's RNR retry count; 7 is without end.
    pub rnr_retry: u8,
    /// Units the record occupies.
    pub units: u16,
    /// The writer's connection: see [`Target`](crate::soft::layout::Target).
    pub generation: u16,
    /// Bytes of the message.
    pub len: u32,
    pub imm: u32,
    pub remote_addr: u64,
    pub rkey: u32,
    /// Messages of the reader that the writer has executed, with [`ACKNOWLEDGES`]. Of XRC: the number of the reader's
    /// shared receive queue.
    pub executed: u32,
}

impl Record {
    pub(in crate::soft) fn encode(&self) -> [u64; 4] {
        let kind = match self.kind {
            Kind::Skip => 1u64,
            Kind::Send => 2,
            Kind::WriteImm => 3,
            Kind::CompareSwap => 4,
            Kind::FetchAdd => 5,
            Kind::AtomicWrite => 6,
        };
        [
            kind | u64::from(self.flags) << 8
                | u64::from(self.num_sge) << 16
                | u64::from(self.rnr_retry) << 24
                | u64::from(self.units) << 32
                | u64::from(self.generation) << 48,
            u64::from(self.len) | u64::from(self.imm) << 32,
            self.remote_addr,
            u64::from(self.rkey) | u64::from(self.executed) << 32,
        ]
    }

    /// `None` for what no requester of ours writes.
    pub(in crate::soft) fn decode(words: [u64; 4], room: u32) -> Option<Self> {
        let [first, second, remote_addr, fourth] = words;
        let record = Self {
            kind: match first & 0xff {
                1 => Kind::Skip,
                2 => Kind::Send,
                3 => Kind::WriteImm,
                4 => Kind::CompareSwap,
                5 => Kind::FetchAdd,
                6 => Kind::AtomicWrite,
                _ => return None,
            },
            flags: (first >> 8) as u8,
            num_sge: (first >> 16) as u8,
            rnr_retry: (first >> 24) as u8 & 7,
            units: (first >> 32) as u16,
            generation: (first >> 48) as u16,
            len: second as u32,
            imm: (second >> 32) as u32,
            remote_addr,
            rkey: fourth as u32,
            executed: (fourth >> 32) as u32,
        };
        let payload = if record.flags & FETCH != 0 {
            usize::from(record.num_sge) * size_of::<ibv_sge>()
        } else if record.kind.has_operands() {
            OPERANDS
        } else if record.kind == Kind::Skip {
            0
        } else {
            record.len as usize
        };
        let bytes = usize::from(record.units) * UNIT;
        let fits = u32::from(record.units) <= room && HEADER + payload <= bytes;
        fits.then_some(record)
    }
}

/// Units a payload needs with its header.
pub(in crate::soft) fn units_for(payload: usize) -> u32 {
    (HEADER + payload).div_ceil(UNIT) as u32
}

/// A ring, seen from either end.
#[derive(Clone, Copy, Debug)]
pub(in crate::soft) struct Ring {
    base: NonNull<u8>,
}

impl Ring {
    pub(in crate::soft) fn of(mailbox: &QpMailbox) -> Self {
        Self {
            base: NonNull::from(&mailbox.ring.0).cast(),
        }
    }

    fn word(&self, position: u32, index: usize) -> &AtomicU64 {
        let offset = (position % UNITS) as usize * UNIT + index * 8;
        // SAFETY: the offset lies in the ring's bytes, at a multiple of eight in an aligned ring, and
        // every access by either side to these words is atomic or opaque to the compiler.
        unsafe { self.base.byte_add(offset).cast().as_ref() }
    }

    /// Where the payload of the record at a position begins.
    pub(in crate::soft) fn payload(&self, position: u32) -> *mut u8 {
        let offset = (position % UNITS) as usize * UNIT + HEADER;
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Empties the ring for a new connection: the first record will be at position 0.
    pub(in crate::soft) fn reset(&self) {
        self.word(0, 0).store(0, Ordering::Release);
    }

    /// Whether something is at a position. Acquires what was published with it.
    #[inline]
    pub(in crate::soft) fn has(&self, position: u32) -> bool {
        self.word(position, 0).load(Ordering::Acquire) != 0
    }

    /// Reads the header at a position where something is; `None` if it is nonsense.
    pub(in crate::soft) fn header(&self, position: u32) -> Option<Record> {
        let mut words = [0; 4];
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.word(position, index).load(Ordering::Relaxed);
        }
        Record::decode(words, UNITS - position % UNITS)
    }

    /// Where a record of so many units can go: its position, and the units it takes from the ring
    /// together with what is skipped at the end. `free` units are unused.
    pub(in crate::soft) fn reserve(
        &self,
        position: u32,
        units: u32,
        free: u32,
    ) -> Option<(u32, u32)> {
        let room = UNITS - position % UNITS;
        let skip = if units > room { room } else { 0 };
        // Behind the record stays room for the mark of the ring's end, and what is cleared ahead.
        (units + skip + AHEAD < free).then_some((position.wrapping_add(skip), units + skip))
    }

    /// Publishes a record whose payload is already in place; `from` is where `reserve` began, and
    /// `cleared` up to where lines have been cleared before. Returns up to where they are now.
    #[inline]
    pub(in crate::soft) fn publish(
        &self,
        from: u32,
        at: u32,
        record: &Record,
        cleared: u32,
    ) -> u32 {
        let end = at.wrapping_add(u32::from(record.units));
        // How many units from `end` on are clear, if any.
        let clear = match cleared.wrapping_sub(end) {
            clear @ 1..=AHEAD => clear,
            _ => {
                self.word(end, 0).store(0, Ordering::Relaxed);
                1
            }
        };
        self.store(from, at, record);
        for unit in clear..=AHEAD {
            self.word(end.wrapping_add(unit), 0)
                .store(0, Ordering::Relaxed);
        }
        end.wrapping_add(AHEAD + 1)
    }

    #[inline]
    fn store(&self, from: u32, at: u32, record: &Record) {
        let words = record.encode();
        for (index, &word) in words.iter().enumerate().skip(1) {
            self.word(at, index).store(word, Ordering::Relaxed);
        }
        if from == at {
            self.word(at, 0).store(words[0], Ordering::Release);
            return;
        }
        self.word(at, 0).store(words[0], Ordering::Relaxed);
        let skip = Record {
            kind: Kind::Skip,
            units: (at.wrapping_sub(from)) as u16,
            ..EMPTY
        };
        let words = skip.encode();
        for (index, &word) in words.iter().enumerate().skip(1) {
            self.word(from, index).store(word, Ordering::Relaxed);
        }
        self.word(from, 0).store(words[0], Ordering::Release);
    }

    /// Writes payload bytes of a record that is not yet published.
    ///
    /// # Safety
    ///
    /// `src` must be readable for `len` bytes, and `offset + len` lie within the reserved units.
    pub(in crate::soft) unsafe fn write(&self, at: u32, offset: usize, src: *const u8, len: usize) {
        // SAFETY: by the caller's promise; `reserve` gave units that do not wrap.
        unsafe { copy::write_shared(self.payload(at).wrapping_add(offset), src, len) };
    }
}

const EMPTY: Record = Record {
    kind: Kind::Skip,
    flags: 0,
    num_sge: 0,
    rnr_retry: 0,
    units: 0,
    generation: 0,
    len: 0,
    imm: 0,
    remote_addr: 0,
    rkey: 0,
    executed: 0,
};

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn headers_round_trip() {
        let record = Record {
            kind: Kind::WriteImm,
            flags: SOLICITED | WITH_IMM,
            num_sge: 0,
            rnr_retry: 7,
            units: 3,
            generation: 0x7ff,
            len: 100,
            imm: 0xdead_beef,
            remote_addr: u64::MAX - 5,
            rkey: 0x1234_5678,
            executed: 0x9abc_def0,
        };
        assert_eq!(Record::decode(record.encode(), UNITS), Some(record));
    }

    /// Memory as a ring has it.
    #[repr(align(128))]
    struct Memory([AtomicU64; RING_BYTES / 8]);

    proptest! {
        /// However long records are, and whatever was in the ring before, a consumer that follows
        /// finds them all and nothing else.
        #[test]
        fn a_consumer_finds_the_records_and_nothing_else(
            lengths in prop::collection::vec(0usize..=MAX_INLINE, 1..400),
            lag in 0usize..20,
        ) {
            let memory = Memory(std::array::from_fn(|_| AtomicU64::new(u64::MAX)));
            let ring = Ring { base: NonNull::from(&memory.0).cast() };
            ring.reset();
            let (mut at, mut cleared, mut consumed) = (0, 0, 0u32);
            let mut waiting = std::collections::VecDeque::new();
            let next = |consumed: &mut u32, want: usize| -> Result<(), TestCaseError> {
                loop {
                    prop_assert!(ring.has(*consumed));
                    let record = ring.header(*consumed).expect("a record");
                    *consumed = consumed.wrapping_add(u32::from(record.units));
                    if record.kind == Kind::Send {
                        prop_assert_eq!(record.len as usize, want);
                        return Ok(());
                    }
                }
            };
            for len in lengths {
                let units = units_for(len);
                let place = loop {
                    let free = UNITS - u32::wrapping_sub(at, consumed);
                    if let Some(place) = ring.reserve(at, units, free) {
                        break place;
                    }
                    let want = waiting.pop_front().expect("an empty ring has room");
                    next(&mut consumed, want)?;
                };
                let bytes = vec![0xff_u8; len];
                // SAFETY: as many bytes as were reserved.
                unsafe { ring.write(place.0, 0, bytes.as_ptr(), len) };
                let record = Record { kind: Kind::Send, units: units as u16, len: len as u32, ..EMPTY };
                cleared = ring.publish(at, place.0, &record, cleared);
                at = at.wrapping_add(place.1);
                waiting.push_back(len);
                while waiting.len() > lag {
                    let want = waiting.pop_front().expect("not empty");
                    next(&mut consumed, want)?;
                }
            }
            for want in waiting {
                next(&mut consumed, want)?;
            }
            prop_assert!(!ring.has(consumed));
            prop_assert_eq!(consumed, at);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = Record {
            kind: Kind::Send,
            units: 2,
            len: 96,
            ..EMPTY
        };
        assert!(Record::decode(good.encode(), 2).is_some());
        assert!(
            Record::decode(good.encode(), 1).is_none(),
            "beyond the ring's end"
        );
        let long = Record { len: 97, ..good };
        assert!(
            Record::decode(long.encode(), UNITS).is_none(),
            "payload beyond its units"
        );
        let fetch = Record {
            flags: FETCH,
            num_sge: 7,
            ..good
        };
        assert!(
            Record::decode(fetch.encode(), UNITS).is_none(),
            "SGEs beyond its units"
        );
        assert!(
            Record::decode([9, 0, 0, 0], UNITS).is_none(),
            "unknown kind"
        );
        assert!(
            Record::decode(EMPTY.encode(), UNITS).is_none(),
            "no units at all"
        );
    }
}
