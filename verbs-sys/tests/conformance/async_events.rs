//! Asynchronous events. rdma_rxe raises few of those that the standard asks for, so most of these
//! tests are of the software device alone.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use verbs_sys::{
    AccessFlags, AsyncEventKind, PathOptions, QpAttrMask, QpState, QueuePairInit, WcStatus, ffi,
    find_device,
};

use crate::support::{ALL_ACCESS, QpSetup, Queue, Recv, Request, scripts};

scripts! {
    fn work_that_succeeds_makes_none(ends: &mut Ends) {
        let link = ends.link();
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 8)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]));
        ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        ends.a.assert_no_async_event();
        ends.b.assert_no_async_event();
    }

    /// No completion tells the target of a WRITE or READ that it is broken.
    fn a_refused_access_tells_the_target(ends: &mut Ends) {
        let told = ends.is_software();
        for read in [false, true] {
            let link = ends.link();
            let mut wrong = link.b_mem.at(0);
            wrong.rkey ^= 1 << 8;
            let here = [link.a_mem.sge(0, 8)];
            let request = if read { Request::read(&here, wrong) } else { Request::write(&here, wrong) };
            ends.a.post_send(link.a, &[request.id(1)]);
            ends.a.expect(link.a, Queue::Send, 1, WcStatus::RemAccessErr);
            if told {
                ends.b.expect_async_event(ffi::IBV_EVENT_QP_ACCESS_ERR, link.b);
                ends.b.await_state(link.b, QpState::Err);
                // The requester's completion has told it.
                ends.a.assert_no_async_event();
            }
        }
    }

    fn a_refused_write_with_immediate_tells_the_target(ends: &mut Ends) {
        let link = ends.link();
        let mut wrong = link.b_mem.at(0);
        wrong.rkey ^= 1 << 8;
        ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
        let request = Request::write_imm(&[link.a_mem.sge(0, 8)], wrong, 7);
        ends.a.post_send(link.a, &[request.id(2)]);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::RemAccessErr);
        if ends.is_software() {
            ends.b.expect_async_event(ffi::IBV_EVENT_QP_ACCESS_ERR, link.b);
        }
        ends.b.assert_no_async_event();
    }

    /// What the queue pair does not do at all is another error than a wrong key.
    fn a_request_that_is_not_taken_tells_the_target(ends: &mut Ends) {
        let closed = QpSetup {
            access: ALL_ACCESS.difference(AccessFlags::REMOTE_WRITE).bits(),
            ..QpSetup::default()
        };
        let link = ends.link_with(QpSetup::default(), closed);
        let request = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0));
        ends.a.post_send(link.a, &[request.id(1)]);
        let statuses = [WcStatus::RemInvReqErr, WcStatus::RemAccessErr];
        ends.a.expect_one_of(link.a, Queue::Send, 1, &statuses);
        if ends.is_software() {
            ends.b.expect_async_event(ffi::IBV_EVENT_QP_REQ_ERR, link.b);
            ends.b.assert_no_async_event();
        }
    }

    /// Where a receive ends with the error, there is no event.
    fn a_receive_that_fails_is_told_of_by_its_completion(ends: &mut Ends) {
        let link = ends.link();
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 8)])]);
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 9)]).id(2)]);
        if ends.leaves_out() {
            // Kernel devices differ in the statuses; see `messages`.
            return;
        }
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::LocLenErr);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::RemInvReqErr);
        ends.b.await_state(link.b, QpState::Err);
        ends.b.assert_no_async_event();
    }

    /// A queue pair that cannot send yet hears that its peer already does: then it is connected.
    fn the_first_request_is_told_in_rtr(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        for message in [true, false] {
            let a = ends.a.create_qp(QpSetup::default());
            let b = ends.b.create_qp(QpSetup::default());
            ends.a.init(a);
            ends.b.init(b);
            let (at_a, at_b) = (ends.a.endpoint(a), ends.b.endpoint(b));
            ends.b.to_rtr(b, at_a);
            ends.b.assert_no_async_event();
            ends.a.to_rtr(a, at_b);
            ends.a.to_rts(a);
            ends.b.post_recv(b, &[Recv::new(1, &[]), Recv::new(2, &[])]);
            let here = ends.a.register(0, 64, ALL_ACCESS);
            let there = ends.b.register(0, 64, ALL_ACCESS);
            let request = if message {
                Request::send(&[])
            } else {
                Request::write(&[here.sge(0, 8)], there.at(0))
            };
            ends.a.post_send(a, &[request.id(3)]);
            // Nobody polls until it is told.
            ends.b.expect_async_event(ffi::IBV_EVENT_COMM_EST, b);
            ends.a.expect(a, Queue::Send, 3, WcStatus::Success);
            ends.b.to_rts(b);
            ends.a.transfer(a, Request::send(&[]).id(4));
            ends.b.transfer(b, Request::write(&[there.sge(0, 8)], here.at(0)));
            ends.b.assert_no_async_event();
            ends.a.assert_no_async_event();
        }
    }

    /// An idle queue pair has nothing to end.
    fn an_idle_send_queue_is_drained_at_once(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let link = ends.link();
        ends.a.pause_with_event(link.a);
        ends.a.expect_async_event(ffi::IBV_EVENT_SQ_DRAINED, link.a);
        ends.a.resume(link.a);
        ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)));
        // One event for one request for it.
        ends.a.pause(link.a);
        ends.a.assert_no_async_event();
    }

    /// What was begun goes on in SQD; its end is told, although nobody polls.
    fn a_drained_send_queue_tells(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let link = ends.link();
        ends.a.post_send(link.a, &[Request::send(&[]).id(1)]);
        ends.a.pause_with_event(link.a);
        // Not begun in SQD, and so not waited for.
        ends.a.post_send(link.a, &[Request::send(&[]).id(2)]);
        ends.a.assert_no_async_event();
        ends.b.post_recv(link.b, &[Recv::new(3, &[]), Recv::new(4, &[])]);
        ends.a.expect_async_event(ffi::IBV_EVENT_SQ_DRAINED, link.a);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        ends.a.assert_idle(link.a, Queue::Send);
        ends.a.resume(link.a);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
    }

    /// An event that nobody has taken dies with its queue pair.
    fn undelivered_events_die_with_their_object(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let links = [ends.link(), ends.link()];
        for link in links {
            ends.a.pause_with_event(link.a);
        }
        ends.a.destroy(links[0].a);
        ends.a.expect_async_event(ffi::IBV_EVENT_SQ_DRAINED, links[1].a);
        ends.a.assert_no_async_event();
    }
}

/// Whoever holds an event may look at its queue pair: its destruction waits.
#[test]
fn destruction_waits_for_the_acknowledgement() {
    let device = find_device(None).expect("no device");
    if !device.is_software() {
        return;
    }
    let context = device.open().expect("the device does not open");
    let pd = context.alloc_pd().expect("no protection domain");
    let cq = context.create_cq(4, None).expect("no completion queue");
    let (gid_index, _) = context.choose_gid(1).expect("no address");
    let path = PathOptions {
        gid_index,
        ..PathOptions::default()
    };
    let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
    let peer = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
    qp.to_init(AccessFlags::empty(), 1).unwrap();
    qp.to_rtr(&peer.endpoint(&path, 1).unwrap(), &path).unwrap();
    qp.to_rts(2, &path).unwrap();
    let attr = ffi::ibv_qp_attr {
        qp_state: ffi::IBV_QPS_SQD,
        en_sqd_async_notify: 1,
        ..ffi::ibv_qp_attr::zeroed()
    };
    let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
    qp.modify(&attr, mask).unwrap();
    let event = context.next_async_event().expect("no event");
    assert_eq!(*event.kind(), AsyncEventKind::SqDrained(qp.qp_num()));
    let (begun, gone) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        scope.spawn(|| {
            begun.store(true, Ordering::Release);
            drop(qp);
            gone.store(true, Ordering::Release);
        });
        while !begun.load(Ordering::Acquire) {
            thread::yield_now();
        }
        // It has as long as this takes to go wrong.
        for _ in 0..1000 {
            assert!(context.try_get_async_event().unwrap().is_none());
            thread::yield_now();
        }
        assert!(!gone.load(Ordering::Acquire));
        drop(event);
    });
    assert!(gone.load(Ordering::Acquire));
}
