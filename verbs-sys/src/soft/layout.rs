//! What a process shares with its peers: two memory files, laid out here and nowhere else.
//!
//! The *info* file is written by its owner and mapped read-only by peers (the kernel enforces it with
//! `F_SEAL_FUTURE_WRITE`): who the process is, its key table, and for each queue pair its locks and
//! what it accepts. The *mailbox* file is written by peers: receive rings, acknowledgements, and the
//! armed words and calls of completion queues. A peer that writes nonsense into a mailbox can spoil its own
//! connection, nothing else.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::bias::{Epochs, PLACES};
use crate::ffi::{IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE};

/// Identifies an info file; bumped with every change of layout or protocol.
pub(crate) const MAGIC: u64 = u64::from_le_bytes(*b"softrd11");

/// Bits of a queue pair number that index the process's own table.
pub(crate) const QP_INDEX_BITS: u32 = 14;
/// Queue pairs a process can have.
pub(crate) const MAX_QP: usize = 1 << QP_INDEX_BITS;
/// Process slots of a host. Slot 0 is never used: queue pair numbers 0 and 1 are special in IBTA.
pub(crate) const MAX_SLOT: u32 = 1 << (24 - QP_INDEX_BITS);
/// Memory keys a process can have.
pub(crate) const MAX_KEYS: usize = 1 << 17;
/// Completion queues a process can have.
pub(crate) const MAX_CQ: usize = 1 << 14;
/// Shared receive queues a process can have.
pub(crate) const MAX_SRQ: usize = 1 << 14;
/// Live memory arenas a process can have; the table is direct-mapped by arena number.
pub(crate) const MAX_ARENAS: usize = 1 << 12;
/// Protection domains a process can have.
pub(crate) const MAX_PD: usize = 1 << 16;
/// Bytes of a queue pair's receive ring.
pub(crate) const RING_BYTES: usize = 32 << 10;

/// Who a process is.
#[repr(C, align(4096))]
pub(crate) struct Header {
    pub magic: AtomicU64,
    pub pid: AtomicU32,
    pub slot: AtomicU32,
    /// Address, in the owner, of a word that holds [`MAGIC`]: what a peer reads to learn whether
    /// `process_vm_readv` is permitted.
    pub probe: AtomicU64,
    /// Nonzero if the owner runs every copy in its memory itself.
    pub strict: AtomicU32,
    /// Bit 0: requests on the owner's memory, and its own requests, are executed behind a fence only. The rest
    /// counts mappings of its peers' memory that the owner has taken away.
    pub fences: Line<AtomicU32>,
}

/// One memory key. All fields but `live` are written before `live` becomes the key, and change only
/// after every operation that saw it has ended.
#[repr(C, align(64))]
pub(crate) struct KeyEntry {
    /// Low half: the key (lkey and rkey are the same number), or 0. High half: how many keys, or bindings of
    /// one, its slot has had.
    pub live: AtomicU64,
    pub access: AtomicU32,
    /// The protection domain, or what a window has in its place.
    pub pd: AtomicU32,
    /// The arena the range lies in, or 0 for memory that peers cannot map.
    pub arena: AtomicU32,
    pub addr: AtomicU64,
    pub len: AtomicU64,
    /// Offset of `addr` in the arena.
    pub offset: AtomicU64,
    /// The address by which users of an indirect key name `addr`.
    pub iova: AtomicU64,
}

impl KeyEntry {
    /// One that names nothing, but for what `live` says.
    pub(crate) const fn new(live: u64) -> Self {
        Self {
            live: AtomicU64::new(live),
            access: AtomicU32::new(0),
            pd: AtomicU32::new(0),
            arena: AtomicU32::new(0),
            addr: AtomicU64::new(0),
            len: AtomicU64::new(0),
            offset: AtomicU64::new(0),
            iova: AtomicU64::new(0),
        }
    }
}

/// A word alone on its pair of cache lines (the adjacent-line prefetcher fetches pairs).
#[repr(C, align(128))]
pub(crate) struct Line<T>(pub T);

/// A queue pair as its owner publishes it.
#[repr(C)]
pub(crate) struct QpInfo {
    pub sends: Line<Sends>,
    /// Lock and epoch of the responder, which may copy from the peer's memory.
    pub rq_epoch: Line<AtomicU64>,
    pub responder: Line<Responder>,
}

/// Whether the owner of a queue pair executes requests: epochs, of which one is odd then.
#[repr(C)]
pub(crate) struct Sends {
    /// The send lock in one.
    pub epoch: AtomicU64,
    /// Of threads that had the lock's bias.
    pub biased: Epochs,
    /// How many of those may ever have been in use.
    pub places: AtomicU32,
}

impl Sends {
    /// The epochs that may be in use, but for that of the lock.
    #[inline(always)]
    pub(crate) fn biased(&self) -> &[AtomicU64] {
        let places = self.places.load(Ordering::Acquire) as usize;
        &self.biased[..places.min(PLACES)]
    }

    /// The epochs that may be in use.
    pub(crate) fn epochs(&self) -> impl Iterator<Item = &AtomicU64> {
        std::iter::once(&self.epoch).chain(self.biased())
    }

    /// For a new queue pair.
    pub(crate) fn reset(&self) {
        for epoch in self.biased.iter().chain([&self.epoch]) {
            epoch.store(0, Ordering::Relaxed);
        }
        self.places.store(0, Ordering::Relaxed);
    }
}

/// What a queue pair accepts.
#[repr(C)]
pub(crate) struct Responder {
    /// A [`Target`].
    pub target: AtomicU64,
    /// The PSN that the peer's first request must carry.
    pub rq_psn: AtomicU32,
    /// Nonzero if one poll sees both queues, so that acknowledgements may come with records.
    pub hears: AtomicU32,
    /// Nonzero in RTR: whoever sends the first request shall give [`NOTICE_FIRST`].
    pub awaits_first: AtomicU32,
    /// Counts the queue pairs that have had this place.
    pub incarnation: AtomicU32,
    /// Nonzero if it can fetch a message from any memory of its peer; otherwise only from what it can
    /// map.
    pub fetches: AtomicU32,
    /// Nonzero while polls do not look at it unasked: one more than the index of the completion queue
    /// whose [`Calls`] shall have its bit set by those who leave something in its mailbox.
    pub resting: AtomicU32,
}

/// What peers write to a queue pair.
#[repr(C, align(128))]
pub(crate) struct QpMailbox {
    /// Low half: messages the peer has executed; high half: ring units it has consumed.
    pub ack: AtomicU64,
    /// 0, or `NAK_VALID | status`: the message after the last acknowledged one failed.
    pub nak: AtomicU64,
    /// The value an atomic found, when the peer executed it.
    pub result: AtomicU64,
    /// `NOTICE_*` bits, set by the peer's requester.
    pub notices: AtomicU32,
    /// Datagrams sent to the queue pair so far, counted by their senders.
    pub datagrams: AtomicU32,
    pub ring: Line<[u8; RING_BYTES]>,
}

/// Set in [`QpMailbox::nak`] when its status is meant.
pub(crate) const NAK_VALID: u64 = 1 << 63;

/// The peer has begun to send, and the queue pair wanted to know.
pub(crate) const NOTICE_FIRST: u32 = 1;
/// A request was refused for its key, range or rights, which breaks this queue pair too.
pub(crate) const NOTICE_ACCESS: u32 = 2;
/// The same for a request that this queue pair does not take at all.
pub(crate) const NOTICE_INVALID: u32 = 4;
/// The peer's requests will come through a socket from now on: there must be a thread for that.
pub(crate) const NOTICE_STREAM: u32 = 8;

/// What peers write to a completion queue.
#[repr(C, align(128))]
pub(crate) struct CqBell {
    /// One of the `ARMED_*` values; whoever takes it to [`ARMED_NOT`] owes one event.
    pub armed: AtomicU32,
    /// Events due, counted up before the channel's eventfd is written.
    pub fired: AtomicU32,
}

/// Which queue pairs of a completion queue wait to be looked at, by their indices. Bits are hints: one
/// too many costs a look, one too few some time.
#[repr(C)]
pub(crate) struct Calls {
    /// A bit for each [`CALLS_IN_GROUP`] queue pairs of which one may have called.
    pub groups: Line<AtomicU64>,
    pub words: [AtomicU64; MAX_QP / 64],
}

/// Queue pairs whose calls are found by one bit.
pub(crate) const CALLS_IN_GROUP: usize = MAX_QP / 64;

pub(crate) const ARMED_NOT: u32 = 0;
pub(crate) const ARMED_SOLICITED: u32 = 1;
pub(crate) const ARMED_ANY: u32 = 2;

/// The info file.
#[repr(C)]
pub(crate) struct Info {
    pub header: Header,
    /// Live arena numbers, each at its number modulo the table's size.
    pub arenas: [AtomicU32; MAX_ARENAS],
    /// A [`SharedTarget`] for each shared receive queue.
    pub srqs: [AtomicU64; MAX_SRQ],
    pub qps: [QpInfo; MAX_QP],
    pub keys: [KeyEntry; MAX_KEYS],
}

/// The mailbox file.
#[repr(C)]
pub(crate) struct Mailbox {
    pub cqs: [CqBell; MAX_CQ],
    pub calls: [Calls; MAX_CQ],
    pub qps: [QpMailbox; MAX_QP],
}

/// The [`Target::connection`] of no target.
pub(crate) const NO_CONNECTION: u64 = u64::MAX;
/// Another one of no target: the process of the only one is dead.
pub(crate) const LOST: u64 = u64::MAX - 1;

/// Whether a responder takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Readiness {
    /// Not yet in RTR: a requester keeps trying.
    NotYet = 0,
    /// RTR, RTS, SQD or SQE.
    Ready = 1,
    /// ERR, or destroyed: nothing will ever be accepted on this connection.
    Gone = 2,
}

/// Which requests a queue pair sends, and takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Service {
    /// All but those of XRC.
    Plain = 0,
    /// Takes those of XRC; its number of a protection domain is that of an XRC domain.
    XrcTarget = 1,
    /// Sends those of XRC, and takes none.
    XrcInitiator = 2,
}

/// The published word of a responder, taken apart.
///
/// Bits: 0..2 readiness, 2..5 remote access flags, 5..16 generation, 16..40 destination queue pair,
/// 40..56 protection domain, 56..58 service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Target(pub u64);

const GENERATION_BITS: u32 = 11;

/// The bits that say whether a responder is in the connection of a requester: readiness, generation,
/// destination queue pair.
const CONNECTION: u64 = 3 | ((1 << GENERATION_BITS) - 1) << 5 | 0xff_ffff << 16;

impl Target {
    pub(crate) fn new(
        ready: Readiness,
        access: u32,
        generation: u32,
        dest_qpn: u32,
        pd: u32,
    ) -> Self {
        let access = (u64::from(access & IBV_ACCESS_REMOTE_WRITE != 0))
            | (u64::from(access & IBV_ACCESS_REMOTE_READ != 0) << 1)
            | (u64::from(access & IBV_ACCESS_REMOTE_ATOMIC != 0) << 2);
        let generation = u64::from(generation) & ((1 << GENERATION_BITS) - 1);
        Self(
            ready as u64
                | access << 2
                | generation << 5
                | u64::from(dest_qpn & 0xff_ffff) << 16
                | u64::from(pd & 0xffff) << 40,
        )
    }

    /// The same, of a queue pair of this kind.
    pub(crate) fn serving(self, service: Service) -> Self {
        Self(self.0 & !(3 << 56) | (service as u64) << 56)
    }

    pub(crate) fn serves(self, service: Service) -> bool {
        self.0 >> 56 & 3 == service as u64
    }

    pub(crate) fn readiness(self) -> Readiness {
        match self.0 & 3 {
            0 => Readiness::NotYet,
            1 => Readiness::Ready,
            _ => Readiness::Gone,
        }
    }

    /// Whether the queue pair lets peers do what the `IBV_ACCESS_REMOTE_*` bit says.
    pub(crate) fn allows(self, access: u32) -> bool {
        let bit = match access {
            IBV_ACCESS_REMOTE_WRITE => 1 << 2,
            IBV_ACCESS_REMOTE_READ => 1 << 3,
            IBV_ACCESS_REMOTE_ATOMIC => 1 << 4,
            _ => return false,
        };
        self.0 & bit != 0
    }

    /// What stays the same for as long as the responder is in the connection; never
    /// [`NO_CONNECTION`] nor [`LOST`].
    #[inline]
    pub(crate) fn connection(self) -> u64 {
        self.0 & CONNECTION
    }

    pub(crate) fn generation(self) -> u32 {
        (self.0 >> 5) as u32 & ((1 << GENERATION_BITS) - 1)
    }

    pub(crate) fn dest_qpn(self) -> u32 {
        (self.0 >> 16) as u32 & 0xff_ffff
    }

    pub(crate) fn pd(self) -> u32 {
        (self.0 >> 40) as u32 & 0xffff
    }
}

/// The published word of a shared receive queue that requests can name; 0 is none.
///
/// Bits: 0 set, 1..17 XRC domain, 17..33 protection domain, 33..49 one more than the index of its completion
/// queue if somebody may sleep for that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SharedTarget(pub u64);

impl SharedTarget {
    pub(crate) fn new(domain: u32, pd: u32, sleeps_at: Option<u32>) -> Self {
        let cq = sleeps_at.map_or(0, |cq| u64::from(cq & 0x7fff) + 1);
        Self(1 | u64::from(domain & 0xffff) << 1 | u64::from(pd & 0xffff) << 17 | cq << 33)
    }

    /// Whether there is such a queue in this XRC domain.
    pub(crate) fn is_in(self, domain: u32) -> bool {
        self.0 & 1 != 0 && (self.0 >> 1) as u32 & 0xffff == domain
    }

    pub(crate) fn pd(self) -> u32 {
        (self.0 >> 17) as u32 & 0xffff
    }

    pub(crate) fn sleeps_at(self) -> Option<usize> {
        ((self.0 >> 33) as usize & 0xffff).checked_sub(1)
    }
}

/// The queue pair number of an index in a process slot. Shared receive queues that requests can name are
/// numbered in the same way.
pub(crate) fn qpn(slot: u32, index: usize) -> u32 {
    slot << QP_INDEX_BITS | index as u32
}

/// The process slot in a queue pair number.
pub(crate) fn qpn_slot(qpn: u32) -> u32 {
    qpn >> QP_INDEX_BITS & (MAX_SLOT - 1)
}

/// The table index in a queue pair number.
pub(crate) fn qpn_index(qpn: u32) -> usize {
    qpn as usize & (MAX_QP - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_round_trips_its_fields() {
        let target = Target::new(
            Readiness::Ready,
            IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC,
            0x7ff,
            0xab_cdef,
            0xfedc,
        );
        assert_eq!(target.readiness(), Readiness::Ready);
        assert!(target.allows(IBV_ACCESS_REMOTE_READ));
        assert!(target.allows(IBV_ACCESS_REMOTE_ATOMIC));
        assert!(!target.allows(IBV_ACCESS_REMOTE_WRITE));
        assert_eq!(target.generation(), 0x7ff);
        assert_eq!(target.dest_qpn(), 0xab_cdef);
        assert_eq!(target.pd(), 0xfedc);
        assert!(target.serves(Service::Plain));
        for service in [Service::XrcTarget, Service::XrcInitiator, Service::Plain] {
            let target = target.serving(service);
            assert!(target.serves(service));
            assert_eq!(target.serves(Service::Plain), service == Service::Plain);
            assert_eq!((target.pd(), target.dest_qpn()), (0xfedc, 0xab_cdef));
        }
    }

    #[test]
    fn a_shared_target_round_trips_its_fields() {
        for cq in [None, Some(0), Some(MAX_CQ as u32 - 1)] {
            let target = SharedTarget::new(0xfedc, 0xba98, cq);
            assert!(target.is_in(0xfedc) && !target.is_in(0xfedd));
            assert_eq!(target.pd(), 0xba98);
            assert_eq!(target.sleeps_at(), cq.map(|cq| cq as usize));
        }
        assert!(!SharedTarget(0).is_in(0));
    }

    #[test]
    fn queue_pair_numbers_hold_slot_and_index() {
        let n = qpn(MAX_SLOT - 1, MAX_QP - 1);
        assert_eq!(n, 0xff_ffff);
        assert_eq!((qpn_slot(n), qpn_index(n)), (MAX_SLOT - 1, MAX_QP - 1));
    }
}
