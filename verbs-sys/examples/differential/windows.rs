//! Chains about memory windows.

use verbs_sys::{AccessFlags, MwType, ffi};

use crate::generate::{ALL, Generator, place};
use crate::opcode::{self, is_atomic, right};
use crate::program::{Action, Bind, Key, Place, Request, Side, Wait};

/// The region to which windows can be bound, and one to which they cannot; see `generate`.
const BINDABLE: usize = 8;
const NOT_BINDABLE: usize = 0;
const FOREIGN: usize = 7;

const OPCODES: [ffi::ibv_wr_opcode; 5] = [
    ffi::IBV_WR_RDMA_WRITE,
    ffi::IBV_WR_RDMA_WRITE_WITH_IMM,
    ffi::IBV_WR_RDMA_READ,
    ffi::IBV_WR_ATOMIC_CMP_AND_SWP,
    ffi::IBV_WR_ATOMIC_FETCH_AND_ADD,
];

impl Generator {
    /// A window of one side, used by the other, and closed; in the end something that does not work.
    pub fn open_window(&mut self, pair: usize) {
        let owner = self.side();
        let kind = self.random.pick(&[MwType::Type1, MwType::Type2]);
        self.connect(pair, None);
        self.push(
            pair,
            format!("window {kind:?}"),
            Action::AllocWindow { kind },
        );
        if self.random.percent(25) {
            self.bind_badly(pair, owner, kind);
        } else {
            let range = self.bind(pair, owner);
            for _ in 0..1 + self.random.below(3) {
                self.use_window(pair, owner, range);
            }
            self.misuse_window(pair, owner, kind, range);
        }
        self.push(pair, "no window", Action::DeallocWindow);
        let refill = self.random.next();
        self.connect(pair, Some(refill));
    }

    /// Part of the owner's half, which begins where a word does.
    fn range(&mut self, owner: Side) -> Place {
        let plan = self.program.regions[BINDABLE];
        let len = 64 + self.random.below(plan.half() - 128);
        let words = (plan.half() - len) / 8;
        place(
            BINDABLE,
            plan.start(owner) + 8 * self.random.below(words),
            len,
        )
    }

    fn bind(&mut self, pair: usize, owner: Side) -> Place {
        let range = self.range(owner);
        let access = ALL.difference(AccessFlags::LOCAL_WRITE);
        self.push_bind(pair, owner, "bind", range, access, false);
        range
    }

    fn push_bind(
        &mut self,
        pair: usize,
        side: Side,
        kind: &str,
        place: Place,
        access: AccessFlags,
        same_key: bool,
    ) {
        let bind = Bind {
            id: self.id(),
            place,
            access,
            same_key,
        };
        self.push(pair, kind, Action::Bind { side, bind });
    }

    /// A request of the owner's peer for bytes of the window.
    fn through(
        &mut self,
        pair: usize,
        owner: Side,
        opcode: ffi::ibv_wr_opcode,
        range: Place,
    ) -> Request {
        let len = 1 + self.random.below(range.len.min(500));
        let mut request = self.request(pair, owner.other(), opcode, len);
        let target = if is_atomic(opcode) {
            let words = range.len / 8;
            place(
                BINDABLE,
                range.offset as u32 + 8 * self.random.below(words),
                8,
            )
        } else {
            let offset = self.random.below(range.len - len + 1);
            place(BINDABLE, range.offset as u32 + offset, len)
        };
        request.target = Some(Place {
            key: Key::Window,
            ..target
        });
        request.flags |= ffi::IBV_SEND_SIGNALED;
        request
    }

    fn send_one(&mut self, pair: usize, side: Side, kind: String, request: Request) {
        if request.opcode == ffi::IBV_WR_RDMA_WRITE_WITH_IMM {
            let recv = self.recv(pair, side.other(), 16);
            self.push_recv(pair, side.other(), vec![recv]);
        }
        let list = vec![request];
        let wait = Wait::End { recvs: 0 };
        self.push(pair, kind, Action::Send { side, list, wait });
    }

    fn use_window(&mut self, pair: usize, owner: Side, range: Place) {
        let opcode = self.random.pick(&OPCODES);
        let request = self.through(pair, owner, opcode, range);
        let kind = format!("through window {}", opcode::name(opcode));
        self.send_one(pair, owner.other(), kind, request);
    }

    fn misuse_window(&mut self, pair: usize, owner: Side, kind: MwType, range: Place) {
        let opcode = self.random.pick(&OPCODES);
        let mut request = self.through(pair, owner, opcode, range);
        let name = opcode::name(opcode);
        let is_type_2 = kind == MwType::Type2;
        let what = match self.random.below(6) {
            0 => {
                // Within the region, behind the window.
                let target = request.target.as_mut();
                if let Some(target) = target {
                    target.offset = range.offset + i64::from(range.len.next_multiple_of(8));
                    target.len = 8;
                }
                request.places.truncate(1);
                request.places.iter_mut().for_each(|place| place.len = 8);
                "beyond window"
            }
            1 if is_type_2 => {
                self.invalidate(pair, owner, ffi::IBV_WR_LOCAL_INV);
                "invalidated window"
            }
            2 if is_type_2 => {
                let recv = self.recv(pair, owner, 64);
                self.push_recv(pair, owner, vec![recv]);
                self.invalidate(pair, owner.other(), ffi::IBV_WR_SEND_WITH_INV);
                "invalidated window"
            }
            1 => {
                let nothing = place(BINDABLE, 0, 0);
                self.push_bind(pair, owner, "unbind", nothing, AccessFlags::empty(), false);
                "unbound window"
            }
            2 => {
                let again = self.bind(pair, owner);
                self.use_window(pair, owner, again);
                if let Some(target) = &mut request.target {
                    target.key = Key::FormerWindow;
                }
                "former key"
            }
            3 => {
                let access = ALL.difference(AccessFlags::LOCAL_WRITE | right(opcode));
                self.push(pair, "no window", Action::DeallocWindow);
                self.push(pair, "another window", Action::AllocWindow { kind });
                self.push_bind(pair, owner, "bind", range, access, false);
                "window right"
            }
            4 => {
                // As a local key.
                let key = |place: &mut Place| place.key = Key::Window;
                request.places.iter_mut().for_each(key);
                request.flags &= !ffi::IBV_SEND_INLINE;
                if let Some(target) = &mut request.target {
                    target.key = Key::Good;
                }
                "window as lkey"
            }
            _ => {
                self.push(pair, "no window", Action::DeallocWindow);
                "deallocated window"
            }
        };
        self.send_one(pair, owner.other(), format!("{what} {name}"), request);
    }

    fn invalidate(&mut self, pair: usize, side: Side, opcode: ffi::ibv_wr_opcode) {
        let mut request = self.request(pair, side, opcode, 16);
        if opcode == ffi::IBV_WR_LOCAL_INV {
            request.places.clear();
        }
        request.target = Some(Place {
            key: Key::Window,
            ..place(BINDABLE, 0, 0)
        });
        request.flags = ffi::IBV_SEND_SIGNALED;
        let kind = format!("invalidate {}", opcode::name(opcode));
        self.send_one(pair, side, kind, request);
    }

    fn bind_badly(&mut self, pair: usize, owner: Side, kind: MwType) {
        let good = self.range(owner);
        let all = ALL.difference(AccessFlags::LOCAL_WRITE);
        let beyond = Place {
            offset: i64::from(self.program.regions[BINDABLE].len) - 8,
            ..good
        };
        match self.random.below(4) {
            0 => {
                let place = place(NOT_BINDABLE, 0, 64);
                self.push_bind(
                    pair,
                    owner,
                    &format!("bind without right {kind:?}"),
                    place,
                    all,
                    false,
                );
            }
            1 => self.push_bind(
                pair,
                owner,
                &format!("bind beyond region {kind:?}"),
                beyond,
                all,
                false,
            ),
            2 => {
                let place = place(FOREIGN, 0, 64);
                self.push_bind(
                    pair,
                    owner,
                    &format!("bind to foreign region {kind:?}"),
                    place,
                    all,
                    false,
                );
            }
            _ => {
                self.push_bind(pair, owner, "bind", good, all, false);
                let name = format!("bind again {kind:?}");
                self.push_bind(pair, owner, &name, good, all, kind == MwType::Type2);
            }
        }
    }
}
