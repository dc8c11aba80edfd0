//! Makes programs: objects, then chains of steps, each of which leaves its pair able to work.

use std::collections::VecDeque;

use verbs_sys::{AccessFlags, QpType, ffi};

use crate::opcode::{is_answered, is_atomic, right, takes_receive};
use crate::program::{
    Action, Key, PairPlan, Place, Program, Recv, RegionPlan, Request, Side, Step, Wait,
};
use crate::random::Random;

/// All that a queue pair can allow its peer.
pub const ALL: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// Bytes of the longest datagram: a packet's.
const DATAGRAM: u32 = 1000;

/// All regions that are good for anything.
pub const REGIONS: [usize; 8] = [0, 1, 2, 3, 4, 5, 6, 8];

/// Words at the front of a half in which most atomics happen.
const WORDS: u32 = 4;

/// The pair whose states alone are played with.
pub const SCRATCH: usize = 4;

/// The pair whose receive queues are shared ones.
const SHARED: usize = 5;

pub struct Generator {
    pub random: Random,
    pub program: Program,
    pub links: Vec<Link>,
    /// The regions that requests may use now.
    pub regions: &'static [usize],
    next_id: u64,
}

/// What is known about a pair between chains.
#[derive(Default)]
pub struct Link {
    pub rnr_retry: u8,
    /// The sizes of the receives that wait at each side, in order.
    pub spare: [VecDeque<u32>; 2],
}

/// Makes the program of a seed, of about so many chains.
pub fn generate(seed: u64, chains: u32) -> Program {
    let mut random = Random::new(seed);
    let heap = random.percent(50);
    let mut region = |least: u32, most: u32, access, foreign| RegionPlan {
        foreign,
        len: least + random.below(most - least),
        access,
    };
    let local = AccessFlags::LOCAL_WRITE;
    let regions = vec![
        region(16_400, 20_000, ALL, false),
        region(600, 5000, ALL, false),
        region(600, 5000, local, false),
        region(600, 5000, AccessFlags::REMOTE_READ, false),
        region(600, 5000, local | AccessFlags::REMOTE_WRITE, false),
        region(200, 700, local | AccessFlags::REMOTE_ATOMIC, false),
        region(600, 2000, AccessFlags::empty(), false),
        region(600, 2000, ALL, true),
        region(600, 2000, ALL | AccessFlags::MW_BIND, false),
    ];
    let last = random.pick(&[QpType::Rc, QpType::Uc, QpType::Ud]);
    let types = [
        QpType::Rc,
        QpType::Rc,
        QpType::Uc,
        QpType::Ud,
        last,
        QpType::Rc,
    ];
    let mut pairs = types.map(|qp_type| PairPlan {
        qp_type,
        shared: false,
        max_wr: random.pick(&[8, 13, 16, 32]),
        max_sge: 2 + random.below(3),
        max_inline: random.pick(&[0, 32, 100]),
        sq_sig_all: random.percent(20),
    });
    pairs[SHARED].shared = true;
    let mut generator = Generator {
        random,
        program: Program {
            seed,
            heap,
            regions,
            pairs: pairs.to_vec(),
            steps: Vec::new(),
        },
        links: Vec::new(),
        regions: &REGIONS,
        next_id: 0,
    };
    for pair in 0..types.len() {
        generator.links.push(Link::default());
        if pair != SCRATCH {
            generator.connect(pair, None);
        }
    }
    for _ in 0..chains {
        generator.chain();
    }
    generator.program
}

impl Generator {
    fn chain(&mut self) {
        let pair = self
            .random
            .pick(&[0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3, SCRATCH, SHARED, SHARED]);
        if pair == SCRATCH {
            return self.play_with_states();
        }
        if pair == SHARED {
            // Receives stay in the queue whatever happens, so that only what takes none, or all of
            // its own, leaves it as it is known.
            return match self.random.below(100) {
                0..=4 => self.connect(pair, None),
                5..=12 => self.pause(pair),
                13..=20 => self.be_patient(pair),
                21..=35 => self.mistake(pair),
                36..=45 => self.exchange_both_ways(pair),
                _ => self.exchange(pair),
            };
        }
        match (self.program.pairs[pair].qp_type, self.random.below(100)) {
            (_, 0..=2) => self.connect(pair, None),
            (_, 3..=4) => {
                let side = self.side();
                self.push(pair, "query", Action::Query { side });
            }
            (_, 5) => self.register(pair),
            (QpType::Rc, 6) => self.fill_stopped(pair),
            (_, 6..=7) => self.fill(pair),
            (QpType::Rc, 8..=10) => self.pause(pair),
            (QpType::Rc, 11..=14) => self.be_patient(pair),
            (QpType::Rc, 15..=17) => self.fail(pair),
            (QpType::Rc, 18..=33) => self.mistake(pair),
            (QpType::Rc, 34..=37) => self.open_window(pair),
            (QpType::Rc, 38..=45) => self.exchange_both_ways(pair),
            (QpType::Uc | QpType::Ud, 8..=20) => self.lose(pair),
            (QpType::Uc | QpType::Ud, 21..=26) => self.mistake(pair),
            _ => self.exchange(pair),
        }
    }

    pub fn push(&mut self, pair: usize, kind: impl Into<String>, action: Action) {
        self.program.steps.push(Step {
            kind: kind.into(),
            pair,
            action,
        });
    }

    pub fn side(&mut self) -> Side {
        self.random.pick(&[Side::A, Side::B])
    }

    pub fn id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    /// Up again with everything allowed.
    pub fn connect(&mut self, pair: usize, refill: Option<u64>) {
        self.connect_with(pair, [ALL; 2], refill);
    }

    pub fn connect_with(&mut self, pair: usize, access: [AccessFlags; 2], refill: Option<u64>) {
        let rnr_retry = self.random.pick(&[0, 1, 3, 7, 7]);
        // The longest wait for an acknowledgement that costs nothing where there is one: about 1 s.
        self.connect_as(pair, access, (rnr_retry, 18, 6), refill);
    }

    pub fn connect_as(
        &mut self,
        pair: usize,
        access: [AccessFlags; 2],
        (rnr_retry, timeout, retry_cnt): (u8, u8, u8),
        refill: Option<u64>,
    ) {
        self.links[pair].rnr_retry = rnr_retry;
        if pair != SHARED {
            self.links[pair].spare = Default::default();
        }
        let connect = Action::Connect {
            access,
            rnr_retry,
            timeout,
            retry_cnt,
            refill,
        };
        self.push(pair, "connect", connect);
    }

    pub fn length(&mut self, most: u32) -> u32 {
        let limit = match self.random.below(100) {
            0..=3 => return 0,
            4..=59 => 64,
            60..=84 => 512,
            85..=96 => 3000,
            _ => 8000,
        };
        self.random.below(limit.min(most) + 1)
    }

    /// Local bytes of a side in all, cut into elements; `written` if the device writes to them.
    pub fn local(&mut self, pair: usize, side: Side, len: u32, written: bool) -> Vec<Place> {
        if len == 0 && self.random.percent(70) {
            return Vec::new();
        }
        // A datagram's header takes one.
        let most = self.program.pairs[pair].max_sge - 1;
        let count = 1 + self.random.below(most);
        let fits = |index: &usize| {
            let plan = &self.program.regions[*index];
            let can = !written || plan.access.contains(AccessFlags::LOCAL_WRITE);
            can && plan.half() > len + 64
        };
        let good: Vec<usize> = self.regions.iter().copied().filter(fits).collect();
        let region = self.random.pick(&good);
        let plan = self.program.regions[region];
        let mut offset = plan.start(side) + self.random.below(plan.half() - len - 63);
        let mut rest = len;
        let mut places = Vec::new();
        for index in 0..count {
            let last = index + 1 == count;
            let piece = if last {
                rest
            } else {
                self.random.below(rest + 1)
            };
            places.push(place(region, offset, piece));
            // A gap, so that neighbours are not contiguous.
            let gap = if last { 0 } else { self.random.below(16) };
            offset += piece + gap;
            rest -= piece;
        }
        if self.random.percent(20) {
            places.reverse();
        }
        places
    }

    /// Bytes of a side that allow its peer this.
    pub fn remote(&mut self, side: Side, opcode: ffi::ibv_wr_opcode, len: u32) -> Place {
        let right = right(opcode);
        let fits = |index: &usize| {
            let plan = &self.program.regions[*index];
            plan.access.contains(right) && plan.half() > len
        };
        let good: Vec<usize> = self.regions.iter().copied().filter(fits).collect();
        let region = self.random.pick(&good);
        let plan = self.program.regions[region];
        let start = plan.start(side);
        if is_atomic(opcode) {
            let words = if self.random.percent(90) {
                WORDS
            } else {
                plan.half() / 8
            };
            let offset = start + 8 * self.random.below(words);
            return place(region, offset, 8);
        }
        let mut target = place(region, start + self.random.below(plan.half() - len), len);
        if len == 0 && self.random.percent(50) {
            // No byte, no key.
            target.key = Key::Flipped;
        }
        target
    }

    /// A good request of this length, signaled or not.
    pub fn request(
        &mut self,
        pair: usize,
        side: Side,
        opcode: ffi::ibv_wr_opcode,
        len: u32,
    ) -> Request {
        let len = if is_atomic(opcode) { 8 } else { len };
        let answered = is_answered(opcode);
        let mut places = self.local(pair, side, len, answered);
        if is_atomic(opcode) {
            // One element: what happens to several is not written anywhere.
            places = vec![place(places[0].region, places[0].offset as u32, 8)];
        }
        let has_target = answered
            || matches!(
                opcode,
                ffi::IBV_WR_RDMA_WRITE | ffi::IBV_WR_RDMA_WRITE_WITH_IMM
            );
        let target = has_target.then(|| self.remote(side.other(), opcode, len));
        let mut flags = 0;
        for (flag, percent) in [
            (ffi::IBV_SEND_SIGNALED, 60),
            (ffi::IBV_SEND_SOLICITED, 10),
            (ffi::IBV_SEND_FENCE, 5),
        ] {
            if self.random.percent(percent) {
                flags |= flag;
            }
        }
        let fits = len <= self.program.pairs[pair].max_inline;
        if fits && !answered && self.random.percent(25) {
            flags |= ffi::IBV_SEND_INLINE;
        }
        Request {
            id: self.id(),
            opcode,
            flags,
            places,
            target,
            imm: self.random.next() as u32,
            compare_add: u64::from(self.random.below(4)),
            swap: u64::from(self.random.below(4)),
            wrong_qkey: false,
        }
    }

    /// A receive of this many bytes.
    pub fn recv(&mut self, pair: usize, side: Side, len: u32) -> Recv {
        Recv {
            id: self.id(),
            header: self.program.pairs[pair].qp_type == QpType::Ud,
            places: self.local(pair, side, len, true),
        }
    }

    fn opcode(&mut self, qp_type: QpType) -> ffi::ibv_wr_opcode {
        let opcodes: &[ffi::ibv_wr_opcode] = match qp_type {
            QpType::Rc => &[
                ffi::IBV_WR_RDMA_WRITE,
                ffi::IBV_WR_RDMA_WRITE,
                ffi::IBV_WR_RDMA_WRITE,
                ffi::IBV_WR_RDMA_READ,
                ffi::IBV_WR_RDMA_READ,
                ffi::IBV_WR_SEND,
                ffi::IBV_WR_SEND,
                ffi::IBV_WR_SEND_WITH_IMM,
                ffi::IBV_WR_RDMA_WRITE_WITH_IMM,
                ffi::IBV_WR_ATOMIC_CMP_AND_SWP,
                ffi::IBV_WR_ATOMIC_FETCH_AND_ADD,
            ],
            QpType::Uc => &[
                ffi::IBV_WR_RDMA_WRITE,
                ffi::IBV_WR_SEND,
                ffi::IBV_WR_SEND_WITH_IMM,
                ffi::IBV_WR_RDMA_WRITE_WITH_IMM,
            ],
            _ => &[ffi::IBV_WR_SEND, ffi::IBV_WR_SEND_WITH_IMM],
        };
        self.random.pick(opcodes)
    }

    /// Good requests of one side, and the receives that they need and that are not there yet. What
    /// is behind a READ or an atomic waits for it, as it may use the same bytes.
    pub fn batch(&mut self, pair: usize, side: Side, most: u32) -> (Vec<Recv>, Vec<Request>, u32) {
        let plan = self.program.pairs[pair];
        let other = side.other();
        let longest = match plan.qp_type {
            QpType::Ud => DATAGRAM,
            _ if self.regions.len() < REGIONS.len() => 200,
            _ => 8000,
        };
        // More datagrams at once than a receiver takes may be lost.
        let most = if plan.qp_type == QpType::Ud {
            4.min(most)
        } else {
            most
        };
        let count = 1 + self.random.below(most);
        let (mut recvs, mut requests) = (Vec::new(), Vec::new());
        let (mut used, mut fence) = (0, 0);
        for index in 0..count {
            let mut opcode = self.opcode(plan.qp_type);
            let last = index + 1 == count;
            if last && plan.qp_type == QpType::Uc {
                // The receive tells that what was before has arrived.
                opcode = ffi::IBV_WR_SEND;
            }
            let mut len = self.length(longest);
            if takes_receive(opcode) {
                let waiting = self.links[pair].spare[other.index()].pop_front();
                let is_send = opcode != ffi::IBV_WR_RDMA_WRITE_WITH_IMM;
                match waiting {
                    Some(room) if is_send => len = len.min(room),
                    Some(_) => {}
                    None => {
                        let room = if is_send { len } else { 0 } + self.random.below(20);
                        recvs.push(self.recv(pair, other, room));
                    }
                }
                used += 1;
            }
            let mut request = self.request(pair, side, opcode, len);
            if fence != 0 {
                // Inline bytes are taken when it is posted.
                request.flags = request.flags & !ffi::IBV_SEND_INLINE | fence;
            }
            if is_answered(opcode) {
                fence = ffi::IBV_SEND_FENCE;
            }
            if last {
                request.flags |= ffi::IBV_SEND_SIGNALED;
            }
            requests.push(request);
        }
        (recvs, requests, used)
    }

    /// Receives that the coming requests do not need, if there is room.
    pub fn spare(&mut self, pair: usize, side: Side, most: u32) -> Vec<Recv> {
        let count = self.random.below(most + 1);
        let mut list = Vec::new();
        for _ in 0..count {
            if self.links[pair].spare[side.index()].len() as u32 + 1
                < self.program.pairs[pair].max_wr / 4
            {
                let len = self.length(500);
                list.push(self.recv(pair, side, len));
                self.links[pair].spare[side.index()].push_back(len);
            }
        }
        list
    }

    pub fn push_recv(&mut self, pair: usize, side: Side, list: Vec<Recv>) {
        if !list.is_empty() {
            self.push(pair, "receives", Action::Recv { side, list });
        }
    }

    pub fn recvs_to_wait_for(&self, pair: usize, used: u32) -> u32 {
        match self.program.pairs[pair].qp_type {
            QpType::Rc => 0,
            _ => used,
        }
    }

    /// Requests that succeed.
    pub fn exchange(&mut self, pair: usize) {
        let side = self.side();
        if self.random.percent(40) {
            let region = self.random.pick(&[0, 5]);
            let offset =
                self.program.regions[region].start(side.other()) + 8 * self.random.below(WORDS);
            let word = u64::from(self.random.below(4));
            let poke = Action::Poke {
                region,
                offset,
                word,
            };
            self.push(pair, "poke", poke);
        }
        // Half of the receive queue is for those that are posted in advance.
        let most = self.program.pairs[pair].max_wr / 2;
        let (mut recvs, list, used) = self.batch(pair, side, most);
        recvs.extend(self.spare(pair, side.other(), 2));
        self.push_recv(pair, side.other(), recvs);
        let wait = Wait::End {
            recvs: self.recvs_to_wait_for(pair, used),
        };
        self.push(pair, "exchange", Action::Send { side, list, wait });
    }
}

pub fn place(region: usize, offset: u32, len: u32) -> Place {
    Place {
        region,
        offset: offset.into(),
        len,
        key: Key::Good,
    }
}
