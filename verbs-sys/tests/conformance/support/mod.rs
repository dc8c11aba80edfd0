//! Two ends, wherever they live, and how a test drives them.

mod command;
mod cq;
mod memory;
mod post;
mod process;
mod side;
mod srq;
mod windows;

use std::{fmt::Debug, ops::Range};

use serde::de::DeserializeOwned;
use serde_json::Value;
use verbs_sys::{AccessFlags, QpState, WcStatus, ffi};

pub use self::{
    command::{
        Address, AsyncEvent, Bytes, Command, Completion, Destination, Element, MemoryKind, Qp,
        QpSetup, Queue, Recv, Refused, Region, Request, Srq, Target,
    },
    process::serve_if_asked,
    side::PATIENCE,
    windows::{BINDABLE, Bind, Window},
};
use self::{process::Process, side::Side};

/// Tells the record of what was tested that a test, or its rest, is left out.
pub fn say_left_out() {
    println!("left out on this device");
}

/// Everything that a region can allow.
pub const ALL_ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_ATOMIC);

/// Where the end `b` lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    OneProcess,
    TwoProcesses,
}

/// Makes four tests of a script.
macro_rules! scripts {
    ($($(#[$doc:meta])* fn $name:ident($ends:ident: &mut Ends) $body:block)+) => {$(
        mod $name {
            use super::*;
            use $crate::support::{MemoryKind::*, Placement::*};

            $(#[$doc])*
            fn script($ends: &mut $crate::support::Ends) $body

            #[test]
            fn one_process_device_memory() {
                script(&mut $crate::support::Ends::open(OneProcess, Device));
            }

            #[test]
            fn one_process_heap_memory() {
                script(&mut $crate::support::Ends::open(OneProcess, Heap));
            }

            #[test]
            fn two_processes_device_memory() {
                script(&mut $crate::support::Ends::open(TwoProcesses, Device));
            }

            #[test]
            fn two_processes_heap_memory() {
                script(&mut $crate::support::Ends::open(TwoProcesses, Heap));
            }
        }
    )+};
}
pub(crate) use scripts;

/// Both ends of a test.
pub struct Ends {
    pub a: End,
    pub b: End,
    memory: MemoryKind,
}

impl Ends {
    pub fn open(placement: Placement, memory: MemoryKind) -> Self {
        let b = match placement {
            Placement::OneProcess => End::Here(Box::new(Side::open(memory))),
            Placement::TwoProcesses => End::There(Process::start(memory)),
        };
        Self {
            a: End::Here(Box::new(Side::open(memory))),
            b,
            memory,
        }
    }

    /// Whether this is the software device, which does everything by the book.
    pub fn is_software(&mut self) -> bool {
        self.a.call(Command::IsSoftware)
    }

    /// Whether a one-sided request of the software device ends after it was posted and not with that: its
    /// owner executes it, on another host or as the options of the device say.
    pub fn answers_come_later(&self) -> bool {
        let other_host = std::env::var_os(process::NETWORK).is_some();
        let options = verbs_sys::soft::Options::from_env();
        let of_owner = !options.cma && self.memory == MemoryKind::Heap;
        matches!(self.b, End::There(_)) && (other_host || options.strict || of_owner)
    }

    /// Whether the rest of a test is left out, being about the software device, or what others do
    /// each in their own way. The output says so, for the record of what was tested.
    pub fn leaves_out(&mut self) -> bool {
        let leaves = !self.is_software();
        if leaves {
            say_left_out();
        }
        leaves
    }

    /// Connects a new queue pair of each end, and registers 64 KiB for everything at each end.
    pub fn link(&mut self) -> Link {
        self.link_with(QpSetup::default(), QpSetup::default())
    }

    /// The same with queue pairs of certain setups.
    pub fn link_with(&mut self, a: QpSetup, b: QpSetup) -> Link {
        let (pd_a, pd_b) = (a.pd, b.pd);
        let (a, b) = self.connect(a, b);
        Link {
            a,
            b,
            a_mem: self.a.register(pd_a, REGION, ALL_ACCESS),
            b_mem: self.b.register(pd_b, REGION, ALL_ACCESS),
        }
    }

    /// Connects a new queue pair of each end.
    pub fn connect(&mut self, a: QpSetup, b: QpSetup) -> (Qp, Qp) {
        let (a, b) = (self.a.create_qp(a), self.b.create_qp(b));
        self.connect_again(a, b);
        (a, b)
    }

    /// Connects two queue pairs that are in RESET.
    pub fn connect_again(&mut self, a: Qp, b: Qp) {
        let () = self.a.call(Command::Init { qp: a.id });
        let () = self.b.call(Command::Init { qp: b.id });
        self.connect_from_init(a, b);
    }

    /// Connects two queue pairs that are in INIT.
    pub fn connect_from_init(&mut self, a: Qp, b: Qp) {
        let (at_a, at_b) = (self.a.endpoint(a), self.b.endpoint(b));
        self.a.to_rtr(a, at_b);
        self.a.to_rts(a);
        self.b.to_rtr(b, at_a);
        self.b.to_rts(b);
    }

    /// Makes a datagram queue pair of each end, with the given queue keys, and registers 64 KiB at
    /// each end; and says how `a` names `b`.
    pub fn datagrams(&mut self, a_qkey: u32, b_qkey: u32) -> (Link, Destination) {
        self.datagrams_with(QpSetup::default(), a_qkey, b_qkey)
    }

    /// The same with a certain setup of the end `b`.
    pub fn datagrams_with(&mut self, b: QpSetup, a_qkey: u32, b_qkey: u32) -> (Link, Destination) {
        let of_datagrams = |setup| QpSetup {
            qp_type: ffi::IBV_QPT_UD,
            ..setup
        };
        let a = self.a.create_qp(of_datagrams(QpSetup::default()));
        let b = self.b.create_qp(of_datagrams(b));
        let () = self.a.call(Command::StartDatagrams {
            qp: a.id,
            qkey: a_qkey,
        });
        let () = self.b.call(Command::StartDatagrams {
            qp: b.id,
            qkey: b_qkey,
        });
        let link = Link {
            a,
            b,
            a_mem: self.a.register(0, REGION, ALL_ACCESS),
            b_mem: self.b.register(0, REGION, ALL_ACCESS),
        };
        let remote = self.b.endpoint(b);
        let to = Destination {
            ah: self.a.call(Command::CreateAh { remote }),
            qp_num: b.num,
            qkey: b_qkey,
        };
        (link, to)
    }

    /// Waits until the datagrams that one end of the software device has sent before have come to the other:
    /// one behind them, between two queue pairs of its own, has.
    pub fn let_datagrams_come(&mut self, behind: (Link, Destination)) {
        let (link, to) = behind;
        self.b
            .post_recv(link.b, &[Recv::new(77, &[link.b_mem.sge(0, 100)])]);
        self.a.transfer(link.a, Request::send(&[]).id(78).to(to));
        self.b.expect(link.b, Queue::Recv, 77, WcStatus::Success);
    }

    /// Has the process of `b` start with something, and does not wait for the answer.
    pub fn tell_b(&mut self, command: Command) {
        match &mut self.b {
            End::Here(_) => panic!("that is this process"),
            End::There(process) => process.tell(&command),
        }
    }

    /// Has the process of `b` give back everything that it has, and end. Nothing can be asked of it any more.
    pub fn end_b(&mut self) {
        match &mut self.b {
            End::Here(_) => panic!("that is this process"),
            End::There(process) => process.end(),
        }
    }

    /// Has the process of `b` killed. Nothing can be asked of it any more.
    pub fn kill_b(&mut self) {
        match &mut self.b {
            End::Here(_) => panic!("that is this process"),
            End::There(process) => process.kill(),
        }
    }
}

/// Bytes of the regions that a link comes with.
pub const REGION: usize = 64 << 10;

/// Two connected queue pairs and a region at each end.
#[derive(Clone, Copy, Debug)]
pub struct Link {
    pub a: Qp,
    pub b: Qp,
    pub a_mem: Region,
    pub b_mem: Region,
}

/// An end, here or in another process.
pub enum End {
    Here(Box<Side>),
    There(Process),
}

impl End {
    /// Has it do something; the command's description names the type of the answer.
    pub fn call<T: DeserializeOwned>(&mut self, command: Command) -> T {
        let name = format!("{command:?}");
        let answer: Value = match self {
            Self::Here(side) => side.execute(command),
            Self::There(process) => process.call(&command),
        };
        serde_json::from_value(answer)
            .unwrap_or_else(|error| panic!("{name}: an answer of another type: {error}"))
    }

    /// Connects two fresh queue pairs of this end to each other.
    pub fn connect_within(&mut self, one: Qp, other: Qp) {
        self.init(one);
        self.init(other);
        let (first, second) = (self.endpoint(one), self.endpoint(other));
        self.to_rtr(one, second);
        self.to_rts(one);
        self.to_rtr(other, first);
        self.to_rts(other);
    }

    pub fn alloc_pd(&mut self) -> usize {
        self.call(Command::AllocPd)
    }

    pub fn register(&mut self, pd: usize, len: usize, access: AccessFlags) -> Region {
        let access = access.bits();
        self.call(Command::Register { pd, len, access })
    }

    pub fn deregister(&mut self, region: Region) {
        self.call(Command::Deregister { region: region.id })
    }

    pub fn store(&mut self, region: Region, offset: usize, bytes: &[u8]) {
        self.call(Command::Store {
            region: region.id,
            offset,
            bytes: Bytes(bytes.to_vec()),
        })
    }

    pub fn fill(&mut self, region: Region, byte: u8) {
        self.call(Command::Fill {
            region: region.id,
            byte,
        })
    }

    pub fn load(&mut self, region: Region, offset: usize, len: usize) -> Vec<u8> {
        let bytes: Bytes = self.call(Command::Load {
            region: region.id,
            offset,
            len,
        });
        bytes.0
    }

    pub fn store_word(&mut self, region: Region, offset: usize, word: u64) {
        self.store(region, offset, &word.to_ne_bytes());
    }

    pub fn load_word(&mut self, region: Region, offset: usize) -> u64 {
        let bytes = self.load(region, offset, 8);
        u64::from_ne_bytes(bytes.try_into().expect("8 bytes"))
    }

    /// Asserts that every byte of the region has this value.
    #[track_caller]
    pub fn assert_filled(&mut self, region: Region, byte: u8) {
        let bytes = self.load(region, 0, region.len);
        let other = bytes.iter().position(|found| *found != byte);
        assert_eq!(other, None, "a byte that must not change has changed");
    }

    /// Asserts that the bytes outside `range` are as they were registered.
    #[track_caller]
    pub fn assert_zero_but(&mut self, region: Region, range: Range<usize>) {
        let bytes = self.load(region, 0, region.len);
        let outside = |(i, byte): (usize, &u8)| !range.contains(&i) && *byte != 0;
        let other = bytes.iter().enumerate().position(outside);
        assert_eq!(other, None, "a byte that must not change has changed");
    }

    pub fn create_qp(&mut self, setup: QpSetup) -> Qp {
        self.call(Command::CreateQp { setup })
    }

    pub fn init(&mut self, qp: Qp) {
        self.call(Command::Init { qp: qp.id })
    }

    pub fn endpoint(&mut self, qp: Qp) -> Address {
        self.call(Command::Endpoint { qp: qp.id })
    }

    #[allow(clippy::wrong_self_convention)] // It is what the transition is called.
    pub fn to_rtr(&mut self, qp: Qp, remote: Address) {
        self.call(Command::ToRtr { qp: qp.id, remote })
    }

    #[allow(clippy::wrong_self_convention)]
    pub fn to_rts(&mut self, qp: Qp) {
        self.call(Command::ToRts { qp: qp.id })
    }

    /// Stops sending.
    pub fn pause(&mut self, qp: Qp) {
        self.call(Command::ToSqd { qp: qp.id })
    }

    /// Stops sending, and wants to hear when what was under way has ended.
    pub fn pause_with_event(&mut self, qp: Qp) {
        self.call(Command::ToSqdWithEvent { qp: qp.id })
    }

    pub fn resume(&mut self, qp: Qp) {
        self.call(Command::Resume { qp: qp.id })
    }

    pub fn fail(&mut self, qp: Qp) {
        self.call(Command::ToErr { qp: qp.id })
    }

    pub fn reset(&mut self, qp: Qp) {
        self.call(Command::ToReset { qp: qp.id })
    }

    pub fn destroy(&mut self, qp: Qp) {
        self.call(Command::DestroyQp { qp: qp.id })
    }

    pub fn state(&mut self, qp: Qp) -> QpState {
        side::state(self.call(Command::State { qp: qp.id }))
    }

    pub fn try_post_send(&mut self, qp: Qp, list: &[Request]) -> Result<(), Refused> {
        self.call(Command::PostSend {
            qp: qp.id,
            list: list.to_vec(),
        })
    }

    #[track_caller]
    pub fn post_send(&mut self, qp: Qp, list: &[Request]) {
        assert_eq!(self.try_post_send(qp, list), Ok(()), "posting {list:?}");
    }

    pub fn try_post_recv(&mut self, qp: Qp, list: &[Recv]) -> Result<(), Refused> {
        self.call(Command::PostRecv {
            qp: qp.id,
            list: list.to_vec(),
        })
    }

    #[track_caller]
    pub fn post_recv(&mut self, qp: Qp, list: &[Recv]) {
        assert_eq!(self.try_post_recv(qp, list), Ok(()), "posting {list:?}");
    }

    pub fn poll(&mut self, qp: Qp, queue: Queue) -> Option<Completion> {
        self.call(Command::Poll { qp: qp.id, queue })
    }

    /// The next completion, which must come.
    pub fn wait(&mut self, qp: Qp, queue: Queue) -> Completion {
        self.call(Command::Wait { qp: qp.id, queue })
    }

    /// The next completion, which must be of this request of this queue pair and have this status.
    #[track_caller]
    pub fn expect(&mut self, qp: Qp, queue: Queue, wr_id: u64, status: WcStatus) -> Completion {
        self.expect_one_of(qp, queue, wr_id, &[status])
    }

    /// The same with a choice of statuses.
    #[track_caller]
    pub fn expect_one_of(
        &mut self,
        qp: Qp,
        queue: Queue,
        wr_id: u64,
        statuses: &[WcStatus],
    ) -> Completion {
        let completion = self.wait(qp, queue);
        let status = completion.status();
        assert!(
            statuses.contains(&status),
            "got {status:?}, not {statuses:?}, of {wr_id}"
        );
        assert_eq!(completion.wr_id, wr_id, "{status:?} of another request");
        assert_eq!(completion.qp_num, qp.num);
        completion
    }

    /// Posts one send request and waits for its success.
    #[track_caller]
    pub fn transfer(&mut self, qp: Qp, request: Request) -> Completion {
        let id = request.wr_id;
        self.post_send(qp, &[request]);
        self.expect(qp, Queue::Send, id, WcStatus::Success)
    }

    /// Asserts that no completion is there, for as long as a few polls take.
    #[track_caller]
    pub fn assert_idle(&mut self, qp: Qp, queue: Queue) {
        for _ in 0..100 {
            assert_eq!(self.poll(qp, queue), None);
        }
    }

    /// Waits until the queue pair is in this state: an end learns of an error by itself.
    #[track_caller]
    pub fn await_state(&mut self, qp: Qp, state: QpState) {
        let deadline = std::time::Instant::now() + PATIENCE;
        while self.state(qp) != state {
            assert!(std::time::Instant::now() < deadline, "never in {state:?}");
            std::thread::yield_now();
        }
    }

    pub fn arm(&mut self, qp: Qp, queue: Queue, solicited_only: bool) {
        self.call(Command::Arm {
            qp: qp.id,
            queue,
            solicited_only,
        })
    }

    /// The event that must come, as the number of its queue pair and the queue.
    #[track_caller]
    pub fn wait_event(&mut self) -> (u32, Queue) {
        let event: Option<(u32, Queue)> = self.call(Command::Event { wait: true });
        event.expect("no event came")
    }

    /// Asserts that the next asynchronous event comes, and is this one of this queue pair.
    #[track_caller]
    pub fn expect_async_event(&mut self, event_type: u32, qp: Qp) {
        let event: Option<AsyncEvent> = self.call(Command::AsyncEvent { wait: true });
        let qp_num = Some(qp.num);
        assert_eq!(
            event,
            Some(AsyncEvent {
                event_type,
                qp_num,
                srq: None,
                cq: None
            })
        );
    }

    #[track_caller]
    pub fn assert_no_async_event(&mut self) {
        let event: Option<AsyncEvent> = self.call(Command::AsyncEvent { wait: false });
        assert_eq!(event, None);
    }

    #[track_caller]
    pub fn assert_no_event(&mut self) {
        let event: Option<(u32, Queue)> = self.call(Command::Event { wait: false });
        assert_eq!(event, None);
    }
}

/// Bytes that differ from their neighbours and from those of other seeds.
pub fn pattern(seed: usize, len: usize) -> Vec<u8> {
    (0..len)
        .map(|i| (i * 31 + i / 256 + seed * 7 + 1) as u8)
        .collect()
}

/// `Err(Refused)` with this error for the request of this index.
#[track_caller]
pub fn assert_refused<T: Debug + PartialEq>(result: &Result<T, Refused>, errno: i32, index: usize) {
    let refused = result.as_ref().expect_err("was not refused");
    assert_eq!(*refused, Refused { errno, index });
}
