//! Completion queues: what happens when one is too small, and changing its size.

use std::time::Instant;

use libc::EINVAL;
use verbs_sys::{QpState, WcStatus, ffi, find_device};

use crate::support::{Ends, Link, PATIENCE, QpSetup, Queue, Recv, Request, scripts};

/// Queue pairs with more room than their completion queues.
fn scarce() -> QpSetup {
    QpSetup {
        cqe: 4,
        max_send_wr: 64,
        max_recv_wr: 64,
        ..QpSetup::default()
    }
}

fn small(link: Link) -> Request {
    Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0))
}

/// Lets more requests complete than the queue of `a` has room for, before anybody polls.
fn overrun(ends: &mut Ends, link: Link) {
    let room = ends.a.capacity(link.a, Queue::Send);
    let list: Vec<Request> = (0..=room as u64).map(|id| small(link).id(id)).collect();
    assert!(list.len() <= link.a.max_send_wr);
    ends.a.post_send(link.a, &list);
}

scripts! {
    /// A queue can be smaller than what its queue pair could post: what counts is what waits.
    fn a_small_queue_does_if_it_is_polled(ends: &mut Ends) {
        let link = ends.link_with(scarce(), scarce());
        let room = ends.a.capacity(link.a, Queue::Send) as u64;
        assert!((4..64).contains(&room));
        for round in 0..20 {
            let list: Vec<Request> = (0..room).map(|id| small(link).id(round + id)).collect();
            ends.a.post_send(link.a, &list);
            for id in 0..room {
                ends.a.expect(link.a, Queue::Send, round + id, WcStatus::Success);
            }
            let receives: Vec<Recv> = (0..room).map(|id| Recv::new(id, &[])).collect();
            ends.b.post_recv(link.b, &receives);
            for id in 0..room {
                ends.a.transfer(link.a, Request::send(&[]));
                ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            }
        }
        // Requests without a completion take no room.
        let mut list = vec![small(link).unsignaled(); 40];
        list.push(small(link).id(7));
        ends.a.post_send(link.a, &list);
        ends.a.expect(link.a, Queue::Send, 7, WcStatus::Success);
        ends.a.assert_no_async_event();
        ends.b.assert_no_async_event();
    }

    /// A program that has requests under way at all times, and takes one completion at a time, hears of messages.
    fn completions_of_requests_do_not_keep_those_of_receives(ends: &mut Ends) {
        let setup = QpSetup { one_cq: true, ..QpSetup::default() };
        let link = ends.link_with(setup, QpSetup::default());
        ends.a.post_recv(link.a, &[Recv::new(1, &[])]);
        let list: Vec<Request> = (0..8).map(|_| small(link).id(2)).collect();
        ends.a.post_send(link.a, &list);
        ends.b.transfer(link.b, Request::send(&[]));
        for _ in 0..1000 {
            let completion = ends.a.wait(link.a, Queue::Send);
            assert_eq!(completion.status(), WcStatus::Success);
            if completion.wr_id == 1 {
                return;
            }
            ends.a.post_send(link.a, &list[..1]);
        }
        panic!("a message that nobody hears of");
    }

    /// Nobody polls, and yet the program is told.
    fn an_overrun_is_told(ends: &mut Ends) {
        let link = ends.link_with(scarce(), QpSetup::default());
        overrun(ends, link);
        ends.a.expect_cq_event(ffi::IBV_EVENT_CQ_ERR, link.a, Queue::Send);
    }

    /// rdma_rxe drops the completion and goes on.
    fn an_overrun_breaks_the_queue_and_its_queue_pairs(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        for told_first in [false, true] {
            if !told_first && ends.answers_come_later() {
                continue;
            }
            let link = ends.link_with(scarce(), QpSetup::default());
            overrun(ends, link);
            if told_first {
                ends.a.expect_cq_event(ffi::IBV_EVENT_CQ_ERR, link.a, Queue::Send);
                ends.a.expect_async_event(ffi::IBV_EVENT_QP_FATAL, link.a);
            }
            for _ in 0..3 {
                assert_eq!(ends.a.try_poll(link.a, Queue::Send), None);
            }
            if !told_first {
                ends.a.expect_cq_event(ffi::IBV_EVENT_CQ_ERR, link.a, Queue::Send);
                ends.a.expect_async_event(ffi::IBV_EVENT_QP_FATAL, link.a);
            }
            assert_eq!(ends.a.state(link.a), QpState::Err);
            assert_eq!(ends.a.resize_cq(link.a, Queue::Send, 64), Err(libc::EIO));
            // The other queue works, and tells what is flushed.
            ends.a.post_recv(link.a, &[Recv::new(3, &[])]);
            ends.a.expect(link.a, Queue::Recv, 3, WcStatus::WrFlushErr);
            // The peer finds out, and others go on.
            ends.b.post_send(link.b, &[Request::send(&[]).id(4)]);
            ends.b.expect(link.b, Queue::Send, 4, WcStatus::RetryExcErr);
            ends.a.assert_no_async_event();
            ends.a.destroy(link.a);
        }
        let link = ends.link();
        ends.a.transfer(link.a, small(link));
    }

    /// Messages can overrun the queue of a receiver that does not poll.
    fn messages_overrun_the_receivers_queue(ends: &mut Ends) {
        let link = ends.link_with(QpSetup::default(), scarce());
        let room = ends.b.capacity(link.b, Queue::Recv) as u64;
        let receives: Vec<Recv> = (0..room + 8).map(|id| Recv::new(id, &[])).collect();
        ends.b.post_recv(link.b, &receives);
        for id in 0..room {
            ends.a.transfer(link.a, Request::send(&[]).id(id));
        }
        ends.a.post_send(link.a, &[Request::send(&[]).id(room)]);
        if ends.is_software() {
            // It was taken. rdma_rxe's queue pair fails first, and does not answer.
            ends.a.expect(link.a, Queue::Send, room, WcStatus::Success);
        }
        ends.b.expect_cq_event(ffi::IBV_EVENT_CQ_ERR, link.b, Queue::Recv);
        if ends.is_software() {
            ends.b.expect_async_event(ffi::IBV_EVENT_QP_FATAL, link.b);
            assert_eq!(ends.b.try_poll(link.b, Queue::Recv), None);
        }
    }

    /// A program that sleeps until something completes is woken to find its queue broken.
    fn an_overrun_wakes_who_sleeps(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let link = ends.link_with(scarce(), scarce());
        ends.b.arm(link.b, Queue::Recv, true);
        let receives: Vec<Recv> = (0..8).map(|id| Recv::new(id, &[])).collect();
        ends.b.post_recv(link.b, &receives);
        for _ in 0..5 {
            ends.a.transfer(link.a, Request::send(&[]));
        }
        assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
        assert_eq!(ends.b.try_poll(link.b, Queue::Recv), None);
    }

    /// A queue made larger holds more, and what waited in it stays.
    fn a_queue_grows(ends: &mut Ends) {
        let link = ends.link_with(scarce(), QpSetup::default());
        ends.a.post_send(link.a, &[small(link).id(1), small(link).id(2)]);
        assert_eq!(ends.a.resize_cq(link.a, Queue::Send, 40), Ok(()));
        let room = ends.a.capacity(link.a, Queue::Send);
        assert!(room >= 40);
        let list: Vec<Request> = (3..=40).map(|id| small(link).id(id)).collect();
        ends.a.post_send(link.a, &list);
        for id in 1..=40 {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
        ends.a.assert_no_async_event();
    }

    /// A queue is not made smaller than what waits in it.
    fn a_queue_shrinks_to_what_waits(ends: &mut Ends) {
        let link = ends.link();
        let before = ends.a.capacity(link.a, Queue::Send);
        let list: Vec<Request> = (0..12).map(|id| small(link).id(id)).collect();
        ends.a.post_send(link.a, &list);
        ends.a.expect(link.a, Queue::Send, 0, WcStatus::Success);
        // A message behind them that has arrived: so all of them are done.
        ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
        ends.a.post_send(link.a, &[Request::send(&[]).id(12)]);
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        if ends.is_software() {
            // Others round up to what is enough.
            assert_eq!(ends.a.resize_cq(link.a, Queue::Send, 10), Err(EINVAL));
            assert_eq!(ends.a.capacity(link.a, Queue::Send), before);
        }
        assert_eq!(ends.a.resize_cq(link.a, Queue::Send, 16), Ok(()));
        let room = ends.a.capacity(link.a, Queue::Send);
        assert!((16..before).contains(&room));
        for id in 1..=12 {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
        assert_eq!(ends.a.resize_cq(link.a, Queue::Send, 4), Ok(()));
        if ends.is_software() {
            assert_eq!(ends.a.capacity(link.a, Queue::Send), 4);
        }
        ends.a.assert_no_async_event();
        // The new size is what counts.
        overrun(ends, link);
        ends.a.expect_cq_event(ffi::IBV_EVENT_CQ_ERR, link.a, Queue::Send);
    }

    fn impossible_sizes_are_refused(ends: &mut Ends) {
        let link = ends.link();
        let before = ends.a.capacity(link.a, Queue::Send);
        for cqe in [0, u32::MAX >> 1, u32::MAX] {
            assert_eq!(ends.a.resize_cq(link.a, Queue::Send, cqe), Err(EINVAL));
        }
        assert_eq!(ends.a.capacity(link.a, Queue::Send), before);
        ends.a.transfer(link.a, small(link));
    }
}

/// A queue changes its size while requests complete in it, and none is lost.
#[test]
fn a_queue_is_resized_at_work() {
    const ROUNDS: u64 = 2_000;
    let mut ends = Ends::open(
        crate::support::Placement::OneProcess,
        crate::support::MemoryKind::Device,
    );
    let link = ends.link();
    let deadline = Instant::now() + PATIENCE;
    for round in 0..ROUNDS {
        assert!(Instant::now() < deadline);
        ends.a
            .post_send(link.a, &[small(link).id(round), small(link).id(round + 1)]);
        let cqe = [2, 300, 16, 17][round as usize % 4];
        assert_eq!(ends.a.resize_cq(link.a, Queue::Send, cqe), Ok(()));
        ends.a.expect(link.a, Queue::Send, round, WcStatus::Success);
        ends.a
            .expect(link.a, Queue::Send, round + 1, WcStatus::Success);
    }
    ends.a.assert_no_async_event();
}

/// The largest queue that the device says it can make, it makes; a larger one it refuses.
#[test]
fn the_largest_queue_is_as_the_device_says() {
    let context = find_device(None)
        .expect("no device")
        .open()
        .expect("it does not open");
    let most = context.query_device().expect("no attributes").max_cqe as u32;
    let cq = context.create_cq(1, None).expect("no completion queue");
    if context.device().is_software() {
        cq.resize(most).expect("the largest is refused");
        assert_eq!(cq.capacity(), most as usize);
        assert!(context.create_cq(most, None).is_ok());
    }
    assert!(cq.resize(most + 1).is_err());
    assert!(context.create_cq(most + 1, None).is_err());
}
