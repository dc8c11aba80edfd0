//! Chains with one mistake, and what comes of it.

use verbs_sys::{QpType, ffi};

use crate::chains::modify;
use crate::generate::{ALL, Generator, place};
use crate::opcode::{self, is_atomic, right, takes_receive};
use crate::program::{Action, Key, Place, Recv, Request, Side, Wait};

const ONE_SIDED: [ffi::ibv_wr_opcode; 5] = [
    ffi::IBV_WR_RDMA_WRITE,
    ffi::IBV_WR_RDMA_WRITE_WITH_IMM,
    ffi::IBV_WR_RDMA_READ,
    ffi::IBV_WR_ATOMIC_CMP_AND_SWP,
    ffi::IBV_WR_ATOMIC_FETCH_AND_ADD,
];

const ANSWERED: [ffi::ibv_wr_opcode; 3] = [
    ffi::IBV_WR_RDMA_READ,
    ffi::IBV_WR_ATOMIC_CMP_AND_SWP,
    ffi::IBV_WR_ATOMIC_FETCH_AND_ADD,
];

const ATOMICS: [ffi::ibv_wr_opcode; 2] = [
    ffi::IBV_WR_ATOMIC_CMP_AND_SWP,
    ffi::IBV_WR_ATOMIC_FETCH_AND_ADD,
];

const SENT: [ffi::ibv_wr_opcode; 4] = [
    ffi::IBV_WR_RDMA_WRITE,
    ffi::IBV_WR_RDMA_WRITE_WITH_IMM,
    ffi::IBV_WR_SEND,
    ffi::IBV_WR_SEND_WITH_IMM,
];

/// Regions by what is special about them; see `generate`.
const LOCAL: usize = 2;
const READ_ONLY: usize = 3;
const NO_RIGHTS: usize = 6;
const FOREIGN: usize = 7;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Mistake {
    LocalKey,
    StaleLocalKey,
    LocalRange,
    LocalForeign,
    LocalReadOnly,
    RemoteKey,
    StaleRemoteKey,
    RemoteRange,
    RemoteRight,
    RemoteForeign,
    QueuePairRight,
    Misaligned,
    AtomicLength,
    ShortReceive,
    ReceiveKey,
    ReceiveRange,
    ReceiveReadOnly,
    NoReceive,
    TooManyElements,
    InlineTooLong,
    InlineRead,
    LocalInvalidate,
    RemoteInvalidate,
    SilentPeer,
    WrongType,
    LongDatagram,
}

const RELIABLE: [Mistake; 24] = [
    Mistake::LocalKey,
    Mistake::StaleLocalKey,
    Mistake::LocalRange,
    Mistake::LocalForeign,
    Mistake::LocalReadOnly,
    Mistake::RemoteKey,
    Mistake::StaleRemoteKey,
    Mistake::RemoteRange,
    Mistake::RemoteRight,
    Mistake::RemoteForeign,
    Mistake::QueuePairRight,
    Mistake::Misaligned,
    Mistake::AtomicLength,
    Mistake::ShortReceive,
    Mistake::ReceiveKey,
    Mistake::ReceiveRange,
    Mistake::ReceiveReadOnly,
    Mistake::NoReceive,
    Mistake::TooManyElements,
    Mistake::InlineTooLong,
    Mistake::InlineRead,
    Mistake::LocalInvalidate,
    Mistake::RemoteInvalidate,
    Mistake::SilentPeer,
];

/// Those that take no receive.
const WITHOUT_RECEIVES: [Mistake; 7] = [
    Mistake::LocalKey,
    Mistake::LocalRange,
    Mistake::RemoteKey,
    Mistake::RemoteRange,
    Mistake::RemoteRight,
    Mistake::QueuePairRight,
    Mistake::TooManyElements,
];

const UNRELIABLE: [Mistake; 7] = [
    Mistake::LocalKey,
    Mistake::LocalRange,
    Mistake::LocalForeign,
    Mistake::RemoteKey,
    Mistake::TooManyElements,
    Mistake::InlineTooLong,
    Mistake::WrongType,
];

const DATAGRAMS: [Mistake; 8] = [
    Mistake::LocalKey,
    Mistake::LocalRange,
    Mistake::LocalForeign,
    Mistake::ShortReceive,
    Mistake::TooManyElements,
    Mistake::InlineTooLong,
    Mistake::WrongType,
    Mistake::LongDatagram,
];

impl Generator {
    /// A mistake among good requests; the pair is connected anew afterwards.
    pub fn mistake(&mut self, pair: usize) {
        let qp_type = self.program.pairs[pair].qp_type;
        let reliable = qp_type == QpType::Rc;
        let shared = self.program.pairs[pair].shared;
        let mistake = match qp_type {
            QpType::Rc if shared => self.random.pick(&WITHOUT_RECEIVES),
            QpType::Rc => self.random.pick(&RELIABLE),
            QpType::Uc => self.random.pick(&UNRELIABLE),
            _ => self.random.pick(&DATAGRAMS),
        };
        if mistake == Mistake::SilentPeer && self.random.percent(80) {
            // It takes long.
            return self.exchange(pair);
        }
        let side = self.side();
        let opcode = if shared {
            self.random.pick(&[
                ffi::IBV_WR_RDMA_WRITE,
                ffi::IBV_WR_RDMA_READ,
                ffi::IBV_WR_ATOMIC_FETCH_AND_ADD,
            ])
        } else {
            self.opcode_for(mistake, qp_type)
        };
        self.prepare(pair, side, mistake, opcode);
        let len = 1 + self.length(250);
        let mut request = self.request(pair, side, opcode, len);
        if takes_receive(opcode) {
            let room = request.places.iter().map(|place| place.len).sum();
            let recvs = self.receives(pair, side.other(), mistake, room);
            self.push_recv(pair, side.other(), recvs);
        }
        self.spoil(pair, side, mistake, &mut request);

        // What is in front of a request that fails here may still be under way then.
        let mut list = Vec::new();
        if is_of_target(mistake) && self.random.percent(30) {
            list.push(self.request(pair, side, ffi::IBV_WR_RDMA_WRITE, 8));
        }
        list.push(request);
        // Where not every device finds the mistake, what is behind it would wait for ever.
        let alone = matches!(mistake, Mistake::AtomicLength | Mistake::RemoteInvalidate);
        let behind = if alone || qp_type == QpType::Ud {
            0
        } else {
            self.random.below(3)
        };
        for _ in 0..behind {
            let opcode = self
                .random
                .pick(&[ffi::IBV_WR_RDMA_WRITE, ffi::IBV_WR_SEND]);
            list.push(self.request(pair, side, opcode, 8));
        }
        if let Some(last) = list.last_mut() {
            last.flags |= ffi::IBV_SEND_SIGNALED;
        }
        let name = opcode::name(opcode);
        let kind = format!("{mistake:?} {qp_type:?} {name}");
        let wait = match qp_type {
            // Nothing tells the sender what comes of it.
            QpType::Ud => Wait::Polls,
            _ => Wait::End { recvs: 0 },
        };
        self.push(pair, kind, Action::Send { side, list, wait });
        if reliable && !shared && !alone && !is_of_call(mistake) && self.random.percent(30) {
            self.post_after_error(pair, side);
        }
        let refill = self.random.next();
        self.connect(pair, Some(refill));
    }

    fn opcode_for(&mut self, mistake: Mistake, qp_type: QpType) -> ffi::ibv_wr_opcode {
        match mistake {
            Mistake::LocalReadOnly | Mistake::InlineRead => self.random.pick(&ANSWERED),
            Mistake::Misaligned | Mistake::AtomicLength => self.random.pick(&ATOMICS),
            Mistake::RemoteKey if qp_type == QpType::Uc => ffi::IBV_WR_RDMA_WRITE,
            Mistake::RemoteKey
            | Mistake::StaleRemoteKey
            | Mistake::RemoteRange
            | Mistake::RemoteRight
            | Mistake::RemoteForeign
            | Mistake::QueuePairRight => self.random.pick(&ONE_SIDED),
            Mistake::ShortReceive
            | Mistake::ReceiveKey
            | Mistake::ReceiveRange
            | Mistake::ReceiveReadOnly => self
                .random
                .pick(&[ffi::IBV_WR_SEND, ffi::IBV_WR_SEND_WITH_IMM]),
            Mistake::NoReceive => self.random.pick(&SENT[1..]),
            // `rdma_rxe` may hang where a READ or an atomic is repeated.
            Mistake::SilentPeer => self.random.pick(&SENT),
            Mistake::LocalInvalidate => ffi::IBV_WR_LOCAL_INV,
            Mistake::RemoteInvalidate => ffi::IBV_WR_SEND_WITH_INV,
            Mistake::WrongType if qp_type == QpType::Uc => self.random.pick(&ANSWERED),
            Mistake::WrongType => self.random.pick(&ONE_SIDED),
            _ if qp_type == QpType::Ud => self.random.pick(&SENT[2..]),
            Mistake::InlineTooLong => self.random.pick(&SENT),
            _ if qp_type == QpType::Uc => self.random.pick(&SENT),
            _ => {
                let one_sided = self.random.pick(&ONE_SIDED);
                self.random.pick(&[one_sided, one_sided, ffi::IBV_WR_SEND])
            }
        }
    }

    /// A connection, and receives at both ends, that the mistake needs.
    fn prepare(&mut self, pair: usize, side: Side, mistake: Mistake, opcode: ffi::ibv_wr_opcode) {
        match mistake {
            Mistake::QueuePairRight => {
                let mut access = [ALL; 2];
                access[side.other().index()] = self.all_but(right(opcode));
                self.connect_with(pair, access, None);
            }
            Mistake::NoReceive => {
                let rnr_retry = self.random.below(3) as u8;
                self.connect_as(pair, [ALL; 2], (rnr_retry, 18, 6), None);
            }
            Mistake::SilentPeer => {
                // About 17 ms, and again.
                self.connect_as(pair, [ALL; 2], (0, 12, 1), None);
                let states = [ffi::IBV_QPS_RESET, ffi::IBV_QPS_ERR];
                let state = self.random.pick(&states);
                self.push(pair, "peer goes", modify(side.other(), Some(state)));
                return;
            }
            // Every receive in front would be taken first. Where a mistake has no consequences, what
            // is behind it must not wait for ever.
            _ => {
                let rnr_retry = self.random.pick(&[0, 1, 3]);
                self.connect_as(pair, [ALL; 2], (rnr_retry, 18, 6), None);
            }
        }
        let here = self.spare(pair, side, 2);
        self.push_recv(pair, side, here);
    }

    fn receives(&mut self, pair: usize, side: Side, mistake: Mistake, room: u32) -> Vec<Recv> {
        if matches!(mistake, Mistake::NoReceive | Mistake::SilentPeer) {
            return Vec::new();
        }
        let mut recv = self.recv(pair, side, room);
        if recv.places.is_empty() {
            recv.places
                .push(place(0, self.program.regions[0].start(side), room));
        }
        match mistake {
            Mistake::ShortReceive => {
                let longest = recv.places.iter_mut().max_by_key(|place| place.len);
                if let Some(place) = longest {
                    let less = 1 + self.random.below(place.len);
                    place.len -= less;
                }
            }
            // An element without bytes has nothing wrong with it.
            Mistake::ReceiveKey => {
                recv.places
                    .iter_mut()
                    .for_each(|place| place.key = Key::Flipped);
            }
            Mistake::ReceiveRange => {
                recv.places = vec![self.outside(LOCAL, room)];
            }
            Mistake::ReceiveReadOnly => {
                let half = self.program.regions[READ_ONLY].half();
                recv.places = vec![place(READ_ONLY, 0, room.min(half))];
            }
            _ => {}
        }
        let mut list = vec![recv];
        if self.random.percent(50) {
            list.push(self.recv(pair, side, 64));
        }
        list
    }

    /// Bytes that are not all in the region.
    fn outside(&mut self, region: usize, len: u32) -> Place {
        let end = i64::from(self.program.regions[region].len);
        let beyond = 1 + self.random.below(len);
        let offset = match self.random.below(3) {
            0 => -i64::from(beyond),
            1 => end + i64::from(self.random.below(10_000)),
            _ => end - i64::from(len) + i64::from(beyond),
        };
        Place {
            region,
            offset,
            len,
            key: Key::Good,
        }
    }

    fn spoil(&mut self, pair: usize, side: Side, mistake: Mistake, request: &mut Request) {
        let len = request
            .places
            .iter()
            .map(|place| place.len)
            .sum::<u32>()
            .max(1);
        if is_local(mistake) {
            request.flags &= !ffi::IBV_SEND_INLINE;
            if request.places.is_empty() {
                request.places.push(place(0, 0, len));
            }
        }
        let count = request.places.len() as u32;
        let at = if count == 0 {
            0
        } else {
            self.random.below(count) as usize
        };
        match mistake {
            Mistake::LocalKey | Mistake::StaleLocalKey => {
                let key = if mistake == Mistake::LocalKey {
                    Key::Flipped
                } else {
                    Key::Stale
                };
                request.places.iter_mut().for_each(|place| place.key = key);
            }
            Mistake::LocalRange => request.places = vec![self.outside(1, len)],
            Mistake::LocalForeign => request.places = vec![place(FOREIGN, 8, len.min(500))],
            Mistake::LocalReadOnly => {
                let region = self.random.pick(&[READ_ONLY, NO_RIGHTS]);
                let offset = self.program.regions[region].start(side);
                let half = self.program.regions[region].half();
                request.places = vec![place(region, offset, len.min(half))];
            }
            Mistake::TooManyElements => {
                // A device may give more than was asked for.
                request.places = vec![place(0, 0, 1); 64];
                request.flags &= !ffi::IBV_SEND_INLINE;
            }
            Mistake::InlineTooLong => {
                request.places = vec![place(0, self.program.regions[0].start(side), 4000)];
                request.flags |= ffi::IBV_SEND_INLINE;
            }
            Mistake::LongDatagram => {
                // Longer than any port's packets.
                request.places = vec![place(0, self.program.regions[0].start(side), 4200)];
                request.flags &= !ffi::IBV_SEND_INLINE;
            }
            Mistake::InlineRead => request.flags |= ffi::IBV_SEND_INLINE,
            Mistake::AtomicLength => {
                let len = self.random.pick(&[1, 4, 7, 9, 16]);
                request.places[at].len = len;
            }
            Mistake::LocalInvalidate => {
                request.places.clear();
                request.target = Some(place(self.random.below(3) as usize, 0, 0));
                request.flags &= !ffi::IBV_SEND_INLINE;
            }
            Mistake::RemoteInvalidate => {
                request.target = Some(place(self.random.below(3) as usize, 0, 0));
            }
            _ => {}
        }
        let outside = self.outside(usize::from(pair == 1), len);
        let pick = self.random.below(8);
        let Some(target) = &mut request.target else {
            return;
        };
        match mistake {
            Mistake::RemoteKey => target.key = Key::Flipped,
            Mistake::StaleRemoteKey => target.key = Key::Stale,
            Mistake::RemoteRange => {
                *target = outside;
                if is_atomic(request.opcode) {
                    // Aligned, and farther away.
                    let away = if target.offset < 0 { 0 } else { 7 };
                    target.offset = (target.offset + away).div_euclid(8) * 8;
                }
            }
            Mistake::RemoteRight => target.region = NO_RIGHTS,
            Mistake::RemoteForeign => target.region = FOREIGN,
            Mistake::Misaligned => target.offset += 1 + i64::from(pick % 7),
            _ => {}
        }
        if matches!(mistake, Mistake::RemoteRight | Mistake::RemoteForeign) {
            let half = self.program.regions[target.region].half();
            target.len = target.len.min(half);
            target.offset = i64::from(self.program.regions[target.region].start(side.other()));
        }
    }
}

/// Mistakes in a request's own elements.
fn is_local(mistake: Mistake) -> bool {
    matches!(
        mistake,
        Mistake::LocalKey
            | Mistake::StaleLocalKey
            | Mistake::LocalRange
            | Mistake::LocalForeign
            | Mistake::LocalReadOnly
    )
}

/// Mistakes that the call itself finds.
fn is_of_call(mistake: Mistake) -> bool {
    matches!(
        mistake,
        Mistake::TooManyElements
            | Mistake::InlineTooLong
            | Mistake::InlineRead
            | Mistake::WrongType
            | Mistake::Misaligned
            | Mistake::AtomicLength
    )
}

/// Mistakes that the target finds.
fn is_of_target(mistake: Mistake) -> bool {
    matches!(
        mistake,
        Mistake::RemoteKey
            | Mistake::StaleRemoteKey
            | Mistake::RemoteRange
            | Mistake::RemoteRight
            | Mistake::RemoteForeign
            | Mistake::QueuePairRight
            | Mistake::NoReceive
    )
}
