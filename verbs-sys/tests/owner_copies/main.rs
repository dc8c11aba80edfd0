//! Two processes of a host that may not use process_vm_readv(2): memory is shared as far as it can be,
//! and the rest its owner copies.

mod node;
mod process;
mod sealed;
mod traffic;

use rustix::process::Signal;
use verbs_sys::WcStatus;

use self::{
    node::{
        Command,
        Memory::{Device, Heap},
        RECEIVES,
        Request::{Add, Read, Send, Write},
        Setup,
    },
    process::{Ended, Process, connect, connect_again, serve_if_asked},
    traffic::Plan,
};

/// Not a test: the other processes of the tests, which start this executable again for them.
#[test]
fn other_process() {
    serve_if_asked();
}

/// The next requests that end, which must have these numbers and statuses.
#[track_caller]
fn expect(end: &mut Process, id: usize, statuses: &[WcStatus]) {
    let count = statuses.len();
    let ended: Vec<(u64, u32)> = end.call(&Command::Wait { id, count });
    let ended: Vec<_> = ended
        .into_iter()
        .map(|(number, status)| (number, WcStatus::from(status)))
        .collect();
    let expected: Vec<_> = (0..).zip(statuses.iter().copied()).collect();
    assert_eq!(ended, expected);
}

#[track_caller]
fn post(end: &mut Process, id: usize, list: &[node::Request]) {
    let list = list.to_vec();
    let () = end.call(&Command::Post { id, list });
}

/// Posts requests that must all succeed.
#[track_caller]
fn transfer(end: &mut Process, id: usize, list: &[node::Request]) {
    post(end, id, list);
    expect(end, id, &vec![WcStatus::Success; list.len()]);
}

/// One request of each kind that needs no memory of the peer but the device's.
const SHARED: [node::Request; 6] = [
    Write(Device),
    Read(Device),
    Add(Device),
    Add(Heap),
    Send(Heap, 2000),
    Send(Device, 10_000),
];

/// Does them, and has the peer take the messages among them.
#[track_caller]
fn share(end: &mut Process, id: usize, peer: &mut Process, at_peer: usize) {
    transfer(end, id, &SHARED);
    let take = Command::Take {
        id: at_peer,
        count: 2,
    };
    let came: Vec<(u32, u32)> = peer.call(&take);
    assert_eq!(came, [(0, 2000), (0, 10_000)]);
}

#[track_caller]
fn receive(end: &mut Process, id: usize, count: u32) {
    let () = end.call(&Command::Receive { id, count });
}

#[track_caller]
fn fill(end: &mut Process, id: usize, memory: node::Memory, byte: u8) {
    let () = end.call(&Command::Fill { id, memory, byte });
}

#[track_caller]
fn look(end: &mut Process, id: usize, memory: node::Memory) -> Option<u8> {
    let len = 64;
    end.call(&Command::Look { id, memory, len })
}

#[test]
fn memory_of_the_device_needs_no_socket() {
    let [mut a, mut b] = [(); 2].map(|()| Process::start(false));
    let made = connect(&mut a, &mut b, Setup::default());
    let [at_a, at_b] = [made[0].id, made[1].id];
    receive(&mut a, at_a, RECEIVES);
    receive(&mut b, at_b, RECEIVES);
    let before = [a.sockets(), b.sockets()];
    for _ in 0..50 {
        share(&mut a, at_a, &mut b, at_b);
        share(&mut b, at_b, &mut a, at_a);
    }
    assert_eq!([a.sockets(), b.sockets()], before);
    assert!(!a.has_streams() && !b.has_streams());
    // The heap of the other takes some, and that shows.
    transfer(&mut a, at_a, &[Write(Heap)]);
    assert!(a.has_streams() && b.has_streams());
    assert!(a.sockets() > before[0] && b.sockets() > before[1]);
    share(&mut a, at_a, &mut b, at_b);
    share(&mut b, at_b, &mut a, at_a);
}

#[test]
fn operations_on_memory_of_the_device_make_no_system_call() {
    let one_sided = &SHARED[..3];
    let messages = [Send(Heap, 64), Send(Device, 10_000), Write(Device)];
    for (list, ending) in [
        (one_sided, Ended::With(0)),
        (&messages, Ended::With(0)),
        // Otherwise nothing would be shown by the others.
        (&[Write(Heap)], Ended::By(libc::SIGSYS)),
    ] {
        let [mut a, mut b] = [(); 2].map(|()| Process::start(false));
        let made = connect(&mut a, &mut b, Setup::default());
        let [at_a, at_b] = [made[0].id, made[1].id];
        receive(&mut b, at_b, RECEIVES);
        // Maps what there is to map.
        share(&mut a, at_a, &mut b, at_b);
        let list = list.to_vec();
        let sends = list.clone().into_iter();
        let sends = sends.filter(|request| matches!(request, Send(..)));
        a.tell(&Command::Sealed { id: at_a, list });
        let count = sends.count() * sealed::ROUNDS as usize;
        let came: Vec<(u32, u32)> = b.call(&Command::Take { id: at_b, count });
        assert!(came.iter().all(|(status, _)| *status == 0));
        assert_eq!(a.wait(), ending);
    }
}

/// Every byte and the order of requests of both kinds, both ways at once.
fn mixes(can: [bool; 2], unreliable: bool) {
    let [mut a, mut b] = can.map(Process::start);
    for round in 0..16 {
        let setup = Setup {
            unreliable,
            one_cq: round % 8 >= 4,
            timeout: 18,
        };
        let made = connect(&mut a, &mut b, setup);
        receive(&mut a, made[0].id, RECEIVES);
        receive(&mut b, made[1].id, RECEIVES);
        // None goes over, one does, both do; at once, or later.
        let heap_after = [[0, 0], [0, 150], [60, 75], [1, u64::MAX]][round % 4];
        for (end, which) in [(&mut a, 0), (&mut b, 1)] {
            end.tell(&Command::Traffic {
                id: made[which].id,
                plan: Plan {
                    seed: 1 + 2 * round as u64 + which as u64 * 0x1234_5678,
                    count: if unreliable { 60 } else { 600 },
                    heap_after: heap_after[which].min(if unreliable { 30 } else { u64::MAX }),
                    unreliable,
                },
            });
        }
        for (end, which) in [(&mut a, 0), (&mut b, 1)] {
            let posted: u64 = end.hear();
            assert!(posted > 0);
            let () = end.call(&Command::Destroy { id: made[which].id });
        }
    }
}

#[test]
fn both_kinds_keep_their_order_and_content() {
    mixes([false, false], false);
}

/// Each requester goes by what it may do itself, and by what its peer can fetch.
#[test]
fn one_of_two_may_copy() {
    mixes([true, false], false);
    mixes([false, true], false);
}

#[test]
fn unreliable_connections_go_over_too() {
    mixes([false, false], true);
}

/// A message in the ring that has no receive keeps what goes another way behind it.
#[test]
fn a_waiting_message_is_not_overtaken() {
    let [mut a, mut b] = [(); 2].map(|()| Process::start(false));
    for list in [
        [Send(Heap, 8), Write(Heap), Send(Heap, 9)],
        [Send(Heap, 8), Read(Heap), Send(Heap, 9)],
        [Send(Heap, 8), Send(Heap, 9000), Write(Heap)],
    ] {
        let made = connect(&mut a, &mut b, Setup::default());
        let [at_a, at_b] = [made[0].id, made[1].id];
        fill(&mut a, at_a, Heap, 0x55);
        post(&mut a, at_a, &list);
        let is_idle: bool = a.call(&Command::IsIdle { id: at_a });
        assert!(is_idle);
        assert_eq!(look(&mut b, at_b, Heap), Some(0));
        let is_idle: bool = a.call(&Command::IsIdle { id: at_a });
        assert!(is_idle);
        receive(&mut b, at_b, 4);
        expect(&mut a, at_a, &[WcStatus::Success; 3]);
        let take = Command::Take { id: at_b, count: 2 };
        let came: Vec<(u32, u32)> = b.call(&take);
        let sent: Vec<(u32, u32)> = list
            .iter()
            .filter_map(|request| match request {
                Send(_, len) => Some((0, *len)),
                _ => None,
            })
            .collect();
        assert_eq!(came, sent);
        let written = list.iter().any(|request| matches!(request, Write(_)));
        assert_eq!(
            look(&mut b, at_b, Heap),
            Some(if written { 0x55 } else { 0 })
        );
    }
}

/// Two processes, the second of which has stopped while the first waits for it to go over; or for a
/// receive, before that.
fn stopped_on_the_way(list: &[node::Request]) -> (Process, Process, [node::Made; 2]) {
    let [mut a, mut b] = [(); 2].map(|()| Process::start(false));
    // The peer's end alone ends the requests.
    let made = connect(&mut a, &mut b, Setup::default());
    let id = made[0].id;
    transfer(&mut a, id, &[Write(Device)]);
    b.stop();
    post(&mut a, id, list);
    if !matches!(list[0], Send(_, 8)) {
        a.await_streams();
    }
    let is_idle: bool = a.call(&Command::IsIdle { id });
    assert!(is_idle);
    (a, b, made)
}

#[test]
fn a_peer_that_dies_on_the_way_ends_what_waits() {
    for list in [
        [Write(Heap), Read(Device), Send(Heap, 8)],
        [Read(Heap), Add(Heap), Write(Heap)],
        [Send(Heap, 9000), Write(Heap), Send(Heap, 8)],
        [Send(Heap, 8), Write(Heap), Send(Heap, 9000)],
    ] {
        let (mut a, mut b, made) = stopped_on_the_way(&list);
        b.kill();
        let [first, rest] = [WcStatus::RetryExcErr, WcStatus::WrFlushErr];
        expect(&mut a, made[0].id, &[first, rest, rest]);
        // The process has lost nothing by it.
        let mut c = Process::start(false);
        let made = connect(&mut a, &mut c, Setup::default());
        transfer(&mut a, made[0].id, &[Write(Device), Write(Heap)]);
    }
}

#[test]
fn a_state_can_be_left_on_the_way() {
    let list = [Write(Heap), Read(Device), Send(Heap, 8)];
    let (mut a, b, made) = stopped_on_the_way(&list);
    let () = a.call(&Command::ToErr { id: made[0].id });
    expect(&mut a, made[0].id, &[WcStatus::WrFlushErr; 3]);
    let () = a.call(&Command::Destroy { id: made[0].id });
    drop(b);
    let (mut a, b, made) = stopped_on_the_way(&list);
    let () = a.call(&Command::Destroy { id: made[0].id });
    drop(b);
    let (mut a, mut b, made) = stopped_on_the_way(&list);
    let () = a.call(&Command::Reset { id: made[0].id });
    b.signal(Signal::CONT);
    for _ in 0..3 {
        let () = a.call(&Command::Reset { id: made[0].id });
        let () = b.call(&Command::Reset { id: made[1].id });
        connect_again(&mut a, &mut b, &made);
        fill(&mut a, made[0].id, Heap, 0x66);
        transfer(
            &mut a,
            made[0].id,
            &[Write(Device), Write(Heap), Read(Heap)],
        );
        assert_eq!(look(&mut b, made[1].id, Heap), Some(0x66));
        transfer(&mut b, made[1].id, &[Read(Heap), Write(Device)]);
    }
}

/// A peer that leaves while it is awaited will never answer, and that is known.
#[test]
fn a_peer_can_leave_its_state_on_the_way() {
    for destroys in [false, true] {
        let list = [Write(Heap), Read(Device), Send(Heap, 8)];
        let (mut a, mut b, made) = stopped_on_the_way(&list);
        let id = made[1].id;
        // It is the first that the process finds when it goes on.
        b.tell(&if destroys {
            Command::Destroy { id }
        } else {
            Command::Reset { id }
        });
        b.signal(Signal::CONT);
        let () = b.hear();
        let ended: Vec<(u64, u32)> = a.call(&Command::Wait {
            id: made[0].id,
            count: 3,
        });
        let statuses = ended.iter().map(|(_, status)| WcStatus::from(*status));
        let mut succeeded = statuses.skip_while(|status| *status == WcStatus::Success);
        // The first may have been executed before.
        assert_eq!(succeeded.next(), Some(WcStatus::RetryExcErr));
        assert!(succeeded.all(|status| status == WcStatus::WrFlushErr));
    }
}

/// Refused requests end as they do elsewhere, and nobody goes over for them.
#[test]
fn keys_are_checked_before() {
    let [mut a, mut b] = [(); 2].map(|()| Process::start(false));
    let mut made: [node::Made; 2] = [&mut a, &mut b].map(|end| {
        let setup = Setup::default();
        end.call(&Command::Create(setup))
    });
    made[1].heap.rkey ^= 0x5a;
    connect_again(&mut a, &mut b, &made);
    post(&mut a, made[0].id, &[Write(Device), Write(Heap)]);
    expect(
        &mut a,
        made[0].id,
        &[WcStatus::Success, WcStatus::RemAccessErr],
    );
    assert!(!a.has_streams() && !b.has_streams());
}
