//! Peers that go away.

use verbs_sys::{QpState, WcStatus};

use crate::support::{
    ALL_ACCESS, Command, Ends, Link, MemoryKind, Placement, QpSetup, Queue, Recv, Request, scripts,
};

/// A peer that does not answer is given up after some ten milliseconds, or on slow machines a few
/// seconds.
fn hasty() -> QpSetup {
    QpSetup {
        timeout: 10,
        // rdma_rxe takes 7 for ever.
        retry_cnt: 5,
        ..QpSetup::default()
    }
}

/// Each kind of request to a peer that will not answer.
fn requests(link: Link) -> [Request; 4] {
    let here = link.a_mem.sge(0, 8);
    [
        Request::write(&[here], link.b_mem.at(0)),
        Request::read(&[here], link.b_mem.at(0)),
        Request::fetch_add(here, link.b_mem.at(0), 1),
        Request::send(&[here]),
    ]
}

#[track_caller]
fn assert_gives_up(ends: &mut Ends, link: Link, request: Request) {
    ends.a.post_recv(link.a, &[Recv::new(9, &[])]);
    ends.a
        .post_send(link.a, &[request.clone().id(1), request.id(2)]);
    ends.a.expect(link.a, Queue::Send, 1, WcStatus::RetryExcErr);
    ends.a.expect(link.a, Queue::Send, 2, WcStatus::WrFlushErr);
    ends.a.expect(link.a, Queue::Recv, 9, WcStatus::WrFlushErr);
    ends.a.await_state(link.a, QpState::Err);
}

scripts! {
    /// One end leaves a connection late: what it owed there does not reach the peer's next one.
    fn a_late_reset_does_not_touch_the_next_connection(ends: &mut Ends) {
        for one_cq in [true, false] {
            let setup = QpSetup { one_cq, ..QpSetup::default() };
            let link = ends.link_with(setup, setup);
            for id in 0..5 {
                ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, 64)])]);
                ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 64)]).id(id));
                ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            }
            let (at_a, at_b) = (ends.a.endpoint(link.a), ends.b.endpoint(link.b));
            ends.a.reset(link.a);
            ends.a.init(link.a);
            ends.a.to_rtr(link.a, at_b);
            ends.a.to_rts(link.a);
            ends.b.reset(link.b);
            ends.b.init(link.b);
            ends.b.to_rtr(link.b, at_a);
            ends.b.to_rts(link.b);
            ends.b.post_recv(link.b, &[Recv::new(9, &[link.b_mem.sge(0, 64)])]);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 64)]).id(8));
            ends.b.expect(link.b, Queue::Recv, 9, WcStatus::Success);
        }
    }

    /// The device's own threads look at connections while they are made again.
    fn connections_are_made_again_and_again(ends: &mut Ends) {
        let rounds = if ends.is_software() { 150 } else { 10 };
        let link = ends.link();
        for round in 0..rounds {
            ends.b.post_recv(link.b, &[Recv::new(round, &[link.b_mem.sge(0, 64)])]);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 64)]).id(round));
            ends.b.expect(link.b, Queue::Recv, round, WcStatus::Success);
            if round % 2 == 0 {
                ends.a.reset(link.a);
                ends.b.reset(link.b);
            } else {
                ends.b.reset(link.b);
                ends.a.reset(link.a);
            }
            ends.connect_again(link.a, link.b);
        }
    }

    fn a_destroyed_queue_pair_does_not_answer(ends: &mut Ends) {
        for kind in 0..4 {
            let link = ends.link_with(hasty(), QpSetup::default());
            ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 8)])]);
            ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)));
            ends.b.destroy(link.b);
            ends.a.fill(link.a_mem, 0xAA);
            assert_gives_up(ends, link, requests(link)[kind].clone());
            assert_eq!(ends.b.load(link.b_mem, 0, 8), [0; 8]);
            ends.a.assert_filled(link.a_mem, 0xAA);
        }
    }

    /// A queue pair that has left RTR and RTS neither answers nor lets anybody in.
    fn a_queue_pair_in_error_does_not_answer(ends: &mut Ends) {
        for kind in 0..4 {
            let link = ends.link_with(hasty(), QpSetup::default());
            ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 8)])]);
            ends.b.fail(link.b);
            ends.b.expect(link.b, Queue::Recv, 1, WcStatus::WrFlushErr);
            ends.a.fill(link.a_mem, 0xAA);
            assert_gives_up(ends, link, requests(link)[kind].clone());
            assert_eq!(ends.b.load(link.b_mem, 0, 8), [0; 8]);
        }
    }

    fn a_reset_queue_pair_does_not_answer(ends: &mut Ends) {
        for kind in 0..4 {
            let link = ends.link_with(hasty(), QpSetup::default());
            ends.b.reset(link.b);
            ends.a.fill(link.a_mem, 0xAA);
            assert_gives_up(ends, link, requests(link)[kind].clone());
            assert_eq!(ends.b.load(link.b_mem, 0, 8), [0; 8]);
        }
    }

    /// A queue pair that was connected anew to another peer is not the old one's any more. On a
    /// wire nothing but the packet sequence number tells the two apart.
    fn an_old_peer_is_not_answered(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let link = ends.link_with(hasty(), QpSetup::default());
        ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)));
        let other = ends.a.create_qp(QpSetup::default());
        ends.b.reset(link.b);
        ends.connect_again(other, link.b);
        ends.a.fill(link.a_mem, 0xAA);
        assert_gives_up(ends, link, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(8)));
        assert_eq!(ends.b.load(link.b_mem, 0, 16), [0; 16]);
        ends.a.transfer(other, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(8)));
        assert_eq!(ends.b.load(link.b_mem, 8, 8), [0xAA; 8]);
    }

    /// A message that waits for a receive is given up when the peer goes.
    fn a_waiting_sender_learns_that_its_peer_is_gone(ends: &mut Ends) {
        let link = ends.link_with(hasty(), QpSetup::default());
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 8)]).id(1)]);
        ends.a.assert_idle(link.a, Queue::Send);
        ends.b.destroy(link.b);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::RetryExcErr);
        ends.a.await_state(link.a, QpState::Err);
    }
}

/// A process that is killed in the middle of everything.
fn a_killed_process(ends: &mut Ends) {
    let (idle, busy, waiting) = (
        ends.link_with(hasty(), hasty()),
        ends.link_with(hasty(), hasty()),
        ends.link_with(hasty(), hasty()),
    );
    let message = Request::send(&[waiting.a_mem.sge(0, 8)]);
    ends.a
        .post_send(waiting.a, &[message.clone().id(1), message.id(2)]);
    ends.a.transfer(
        busy.a,
        Request::write(&[busy.a_mem.sge(0, 8)], busy.b_mem.at(0)),
    );
    ends.kill_b();
    ends.a
        .expect(waiting.a, Queue::Send, 1, WcStatus::RetryExcErr);
    ends.a
        .expect(waiting.a, Queue::Send, 2, WcStatus::WrFlushErr);
    for link in [busy, idle] {
        let request = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0));
        ends.a.post_send(link.a, &[request.id(3)]);
        ends.a.expect(link.a, Queue::Send, 3, WcStatus::RetryExcErr);
        ends.a.await_state(link.a, QpState::Err);
    }
    // The end that is left works on.
    let (one, other) = (
        ends.a.create_qp(QpSetup::default()),
        ends.a.create_qp(QpSetup::default()),
    );
    ends.a.connect_within(one, other);
    ends.a.transfer(
        one,
        Request::write(&[idle.a_mem.sge(0, 8)], idle.a_mem.at(64)),
    );
}

#[test]
fn a_killed_process_is_noticed_device_memory() {
    let memory = MemoryKind::Device;
    a_killed_process(&mut Ends::open(Placement::TwoProcesses, memory));
}

#[test]
fn a_killed_process_is_noticed_heap_memory() {
    let memory = MemoryKind::Heap;
    a_killed_process(&mut Ends::open(Placement::TwoProcesses, memory));
}

/// A process that is killed in the middle of writing here: its key can be taken away at once.
#[test]
fn a_process_killed_while_it_writes_leaves_no_trace() {
    for (round, memory) in [MemoryKind::Device, MemoryKind::Heap]
        .repeat(4)
        .into_iter()
        .enumerate()
    {
        let mut ends = Ends::open(Placement::TwoProcesses, memory);
        let link = ends.link();
        let target = ends.a.register(0, 4096, ALL_ACCESS);
        ends.tell_b(Command::WriteUntilRefused {
            qp: link.b.id,
            source: link.b_mem.id,
            target: target.at(0),
        });
        let until = 1 + 500 * round as u64;
        while ends.a.load_word(target, 0) < until {
            std::thread::yield_now();
        }
        ends.kill_b();
        ends.a.deregister(target);
        let last = ends.a.load_word(target, 0);
        assert!(last >= until);
        for _ in 0..100 {
            assert_eq!(ends.a.load_word(target, 0), last);
        }
    }
}
