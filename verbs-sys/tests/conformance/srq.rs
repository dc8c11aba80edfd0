//! Shared receive queues.

use std::{
    ptr,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
    time::Instant,
};

use libc::{EINVAL, ENOMEM};
use verbs_sys::{
    AccessFlags, CompletionQueue, Context, MemoryRegion, PathOptions, ProtectionDomain, QpState,
    QueuePair, QueuePairInit, SharedReceiveQueue, WcOpcode, WcStatus, WorkCompletion, ffi,
    find_device,
};

use crate::support::{
    Ends, Link, PATIENCE, QpSetup, Queue, Recv, Refused, Request, Srq, assert_refused, pattern,
    say_left_out, scripts,
};

/// A connection whose end `b` takes its receives from a shared queue.
fn shared_link(ends: &mut Ends, srq: Srq) -> Link {
    shared_link_with(ends, srq, QpSetup::default())
}

fn shared_link_with(ends: &mut Ends, srq: Srq, a: QpSetup) -> Link {
    let srq = Some(srq.id);
    let setup = QpSetup {
        srq,
        ..QpSetup::default()
    };
    ends.link_with(a, setup)
}

scripts! {
    /// Receives are taken in the order in which they were posted, by whichever message comes next.
    fn one_queue_serves_several_queue_pairs(ends: &mut Ends) {
        let srq = ends.b.create_srq(16, 2);
        let links = [(); 3].map(|()| shared_link(ends, srq));
        for round in 0..10_usize {
            let order = [0, 2, 1, 1, 0, 2];
            let memory = links[0].b_mem;
            let list: Vec<Recv> = (0..order.len())
                .map(|n| {
                    let at = n * 512;
                    Recv::new(n as u64, &[memory.sge(at, 100), memory.sge(at + 256, 100)])
                })
                .collect();
            ends.b.post_srq(srq, &list);
            for (n, which) in order.into_iter().enumerate() {
                let link = links[which];
                let sent = pattern(round * 10 + n, 150);
                ends.a.store(link.a_mem, 0, &sent);
                ends.a.transfer(link.a, Request::send_imm(&[link.a_mem.sge(0, 150)], n as u32));
                let got = ends.b.expect(link.b, Queue::Recv, n as u64, WcStatus::Success);
                assert_eq!((got.byte_len, got.imm), (150, Some(n as u32)));
                assert_eq!(ends.b.load(memory, n * 512, 100), sent[..100]);
                assert_eq!(ends.b.load(memory, n * 512 + 256, 50), sent[100..]);
            }
        }
    }

    /// Larger messages than travel in one piece.
    fn long_messages_find_shared_receives(ends: &mut Ends) {
        let srq = ends.b.create_srq(4, 1);
        let link = shared_link(ends, srq);
        ends.b.post_srq(srq, &[Recv::new(1, &[link.b_mem.sge(0, link.b_mem.len)])]);
        let sent = pattern(3, link.a_mem.len);
        ends.a.store(link.a_mem, 0, &sent);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, sent.len())]));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(ends.b.load(link.b_mem, 0, sent.len()), sent);
    }

    fn a_write_with_immediate_takes_a_shared_receive(ends: &mut Ends) {
        let srq = ends.b.create_srq(4, 1);
        let link = shared_link(ends, srq);
        ends.b.post_srq(srq, &[Recv::new(5, &[])]);
        ends.a.store_word(link.a_mem, 0, 77);
        let request = Request::write_imm(&[link.a_mem.sge(0, 8)], link.b_mem.at(64), 9);
        ends.a.transfer(link.a, request);
        let got = ends.b.expect(link.b, Queue::Recv, 5, WcStatus::Success);
        assert_eq!(got.opcode(), WcOpcode::RecvRdmaWithImm);
        assert_eq!((got.byte_len, got.imm), (8, Some(9)));
        assert_eq!(ends.b.load_word(link.b_mem, 64), 77);
    }

    /// A queue pair with a shared receive queue has none of its own.
    fn its_queue_pairs_take_no_receives_themselves(ends: &mut Ends) {
        let srq = ends.b.create_srq(4, 1);
        let link = shared_link(ends, srq);
        let refused = ends.b.try_post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 8)])]);
        assert_eq!(refused.expect_err("was not refused").errno, EINVAL);
        if ends.is_software() {
            assert_eq!((link.b.max_recv_wr, link.b.max_recv_sge), (0, 0));
        }
    }

    /// Devices may have more room than they were asked for; the software device has as much.
    fn a_full_queue_refuses(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 2);
        let room = srq.max_wr as usize;
        assert!(room >= 8 && srq.max_sge >= 2);
        let link = shared_link(ends, srq);
        let list: Vec<Recv> = (0..4 * room as u64 + 8).map(|id| Recv::new(id, &[])).collect();
        let Refused { errno, index } = ends.b.try_post_srq(srq, &list).expect_err("no end");
        assert_eq!(errno, ENOMEM);
        match ends.is_software() {
            true => assert_eq!(index, room),
            false => assert!(index >= room),
        }
        for id in 0..index as u64 {
            ends.a.transfer(link.a, Request::send(&[]));
            ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
        }
        ends.b.post_srq(srq, &list[..room]);
    }

    fn a_request_with_too_many_elements_is_refused(ends: &mut Ends) {
        let srq = ends.b.create_srq(4, 1);
        let link = shared_link(ends, srq);
        let element = link.b_mem.sge(0, 8);
        let long = vec![element; srq.max_sge as usize + 1];
        let list = [Recv::new(1, &[element]), Recv::new(2, &long)];
        assert_refused(&ends.b.try_post_srq(srq, &list), EINVAL, 1);
        // What stood before it is posted.
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
    }

    /// Messages of every queue pair wait for a receive, and go on when one is posted.
    fn messages_wait_for_shared_receives(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let links = [(); 3].map(|()| shared_link(ends, srq));
        for (id, link) in (0..).zip(links) {
            ends.a.post_send(link.a, &[Request::send(&[]).id(id)]);
            ends.a.assert_idle(link.a, Queue::Send);
            ends.b.assert_idle(link.b, Queue::Recv);
        }
        ends.b.post_srq(srq, &[Recv::new(1, &[]), Recv::new(2, &[]), Recv::new(3, &[])]);
        let mut got = Vec::new();
        for (id, link) in (0..).zip(links) {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
            got.push(ends.b.wait(link.b, Queue::Recv).wr_id);
        }
        got.sort_unstable();
        assert_eq!(got, [1, 2, 3]);
    }

    /// Both ends may sleep meanwhile.
    fn a_shared_receive_wakes_sender_and_receiver(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let links = [(); 2].map(|()| shared_link(ends, srq));
        for link in links {
            ends.a.arm(link.a, Queue::Send, false);
            ends.a.post_send(link.a, &[Request::send(&[]).id(1)]);
            ends.b.assert_idle(link.b, Queue::Recv);
            ends.b.arm(link.b, Queue::Recv, false);
            ends.b.assert_idle(link.b, Queue::Recv);
        }
        ends.b.post_srq(srq, &[Recv::new(1, &[]), Recv::new(2, &[])]);
        let mut woken = [ends.b.wait_event(), ends.b.wait_event()];
        woken.sort_unstable_by_key(|(num, _)| *num);
        let mut all = links.map(|link| (link.b.num, Queue::Recv));
        all.sort_unstable_by_key(|(num, _)| *num);
        assert_eq!(woken, all);
        ends.a.wait_event();
        ends.a.wait_event();
    }

    fn an_empty_shared_queue_refuses_in_the_end(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let impatient = QpSetup { rnr_retry: 0, ..QpSetup::default() };
        let link = shared_link_with(ends, srq, impatient);
        ends.a.post_send(link.a, &[Request::send(&[]).id(1)]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::RnrRetryExcErr);
        // Others of the queue go on.
        let other = shared_link(ends, srq);
        ends.b.post_srq(srq, &[Recv::new(2, &[])]);
        ends.a.transfer(other.a, Request::send(&[]));
        ends.b.expect(other.b, Queue::Recv, 2, WcStatus::Success);
    }

    /// One event for one request, at the receive that leaves fewer than the limit.
    fn the_limit_makes_one_event(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let link = shared_link(ends, srq);
        for _ in 0..2 {
            let list: Vec<Recv> = (0..4).map(|id| Recv::new(id, &[])).collect();
            ends.b.post_srq(srq, &list);
            assert!(ends.b.modify_srq(srq, 0, 3, ffi::IBV_SRQ_LIMIT));
            assert_eq!(ends.b.srq_limit(srq), 3);
            ends.a.transfer(link.a, Request::send(&[]));
            ends.b.expect(link.b, Queue::Recv, 0, WcStatus::Success);
            ends.b.assert_no_async_event();
            ends.a.transfer(link.a, Request::send(&[]));
            ends.b.expect_srq_event(ffi::IBV_EVENT_SRQ_LIMIT_REACHED, srq);
            if ends.is_software() {
                assert_eq!(ends.b.srq_limit(srq), 0);
            }
            ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
            for id in 2..4 {
                ends.a.transfer(link.a, Request::send(&[]));
                ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            }
            ends.b.assert_no_async_event();
        }
    }

    fn a_change_that_is_refused_changes_nothing(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        assert!(ends.b.modify_srq(srq, 0, 2, ffi::IBV_SRQ_LIMIT));
        let too_many = srq.max_wr * 1024;
        assert!(!ends.b.modify_srq(srq, 0, too_many, ffi::IBV_SRQ_LIMIT));
        assert_eq!(ends.b.srq_limit(srq), 2);
        if ends.is_software() {
            assert!(!ends.b.modify_srq(srq, 0, 4, ffi::IBV_SRQ_LIMIT | 1 << 5));
            assert_eq!(ends.b.srq_limit(srq), 2);
        }
    }

    /// Receives that are posted stay, in their order, and more find room behind them.
    fn a_queue_grows(ends: &mut Ends) {
        if !ends.b.can_resize_srqs() {
            say_left_out();
            return;
        }
        let srq = ends.b.create_srq(4, 2);
        let link = shared_link(ends, srq);
        let first = srq.max_wr as u64;
        let recv = |id| Recv::new(id, &[link.b_mem.sge(id as usize * 64, 8), link.b_mem.sge(32, 8)]);
        let list: Vec<Recv> = (0..first).map(recv).collect();
        ends.b.post_srq(srq, &list);
        let wanted = srq.max_wr + 20;
        assert!(ends.b.modify_srq(srq, wanted, 0, ffi::IBV_SRQ_MAX_WR));
        assert!(ends.b.srq_size(srq) >= wanted);
        let more: Vec<Recv> = (first..first + 20).map(recv).collect();
        ends.b.post_srq(srq, &more);
        for id in 0..first + 20 {
            ends.a.store_word(link.a_mem, 0, id + 1);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]));
            ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            assert_eq!(ends.b.load_word(link.b_mem, id as usize * 64), id + 1);
        }
    }

    fn a_queue_shrinks_to_what_is_posted(ends: &mut Ends) {
        if !ends.b.can_resize_srqs() {
            say_left_out();
            return;
        }
        let srq = ends.b.create_srq(16, 1);
        let link = shared_link(ends, srq);
        let list: Vec<Recv> = (0..6).map(|id| Recv::new(id, &[])).collect();
        ends.b.post_srq(srq, &list);
        let before = ends.b.srq_size(srq);
        // rdma_rxe rounds up to what is enough.
        let too_small: &[u32] = if ends.is_software() { &[0, 5] } else { &[0] };
        for &too_small in too_small {
            assert!(!ends.b.modify_srq(srq, too_small, 0, ffi::IBV_SRQ_MAX_WR));
            assert_eq!(ends.b.srq_size(srq), before);
        }
        assert!(ends.b.modify_srq(srq, 6, 0, ffi::IBV_SRQ_MAX_WR));
        assert!((6..before).contains(&ends.b.srq_size(srq)));
        if ends.is_software() {
            assert_eq!(ends.b.srq_size(srq), 6);
            assert_refused(&ends.b.try_post_srq(srq, &[Recv::new(6, &[])]), ENOMEM, 0);
        }
        for id in 0..6 {
            ends.a.transfer(link.a, Request::send(&[]));
            ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
        }
        ends.b.post_srq(srq, &list);
    }

    /// Size and limit are changed together or not at all. Other devices have other sizes.
    fn size_and_limit_go_together(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let both = ffi::IBV_SRQ_LIMIT | ffi::IBV_SRQ_MAX_WR;
        let srq = ends.b.create_srq(8, 1);
        let link = shared_link(ends, srq);
        for (max_wr, limit) in [(4, 5), (0, 0), (1 << 30, 1)] {
            assert!(!ends.b.modify_srq(srq, max_wr, limit, both));
            assert_eq!((ends.b.srq_size(srq), ends.b.srq_limit(srq)), (8, 0));
        }
        assert!(ends.b.modify_srq(srq, 20, 12, both));
        assert_eq!((ends.b.srq_size(srq), ends.b.srq_limit(srq)), (20, 12));
        // A limit that stays must still fit.
        assert!(!ends.b.modify_srq(srq, 11, 0, ffi::IBV_SRQ_MAX_WR));
        assert!(ends.b.modify_srq(srq, 12, 0, ffi::IBV_SRQ_MAX_WR));
        let list: Vec<Recv> = (0..12).map(|id| Recv::new(id, &[])).collect();
        ends.b.post_srq(srq, &list);
        ends.a.transfer(link.a, Request::send(&[]));
        ends.b.expect_srq_event(ffi::IBV_EVENT_SRQ_LIMIT_REACHED, srq);
    }

    /// A queue pair that fails leaves the shared receives to the others.
    fn a_failed_queue_pair_leaves_the_receives(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let links = [(); 2].map(|()| shared_link(ends, srq));
        ends.b.post_srq(srq, &[Recv::new(1, &[]), Recv::new(2, &[])]);
        ends.a.transfer(links[0].a, Request::send(&[]));
        ends.b.fail(links[0].b);
        if ends.is_software() {
            ends.b.expect_async_event(ffi::IBV_EVENT_QP_LAST_WQE_REACHED, links[0].b);
        }
        ends.b.expect(links[0].b, Queue::Recv, 1, WcStatus::Success);
        ends.b.assert_idle(links[0].b, Queue::Recv);
        ends.a.transfer(links[1].a, Request::send(&[]));
        ends.b.expect(links[1].b, Queue::Recv, 2, WcStatus::Success);
        // It has gone, and takes no more.
        ends.b.destroy(links[0].b);
        ends.b.post_srq(srq, &[Recv::new(3, &[])]);
        ends.a.transfer(links[1].a, Request::send(&[]));
        ends.b.expect(links[1].b, Queue::Recv, 3, WcStatus::Success);
    }

    /// A message too long for the receive that it takes ends both, and their queue pair.
    fn a_shared_receive_may_be_too_short(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let link = shared_link(ends, srq);
        ends.b.post_srq(srq, &[Recv::new(1, &[link.b_mem.sge(0, 8)]), Recv::new(2, &[])]);
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 9)]).id(3)]);
        if ends.leaves_out() {
            // Kernel devices differ in the statuses; see `messages`.
            return;
        }
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::LocLenErr);
        ends.a.expect(link.a, Queue::Send, 3, WcStatus::RemInvReqErr);
        ends.b.await_state(link.b, QpState::Err);
        ends.b.expect_async_event(ffi::IBV_EVENT_QP_LAST_WQE_REACHED, link.b);
        ends.b.assert_no_async_event();
        let other = shared_link(ends, srq);
        ends.a.transfer(other.a, Request::send(&[]));
        ends.b.expect(other.b, Queue::Recv, 2, WcStatus::Success);
    }

    /// A queue pair set up again waits for shared receives as a new one does.
    fn a_queue_pair_can_wait_again_after_a_reset(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let link = shared_link(ends, srq);
        for id in 0..3 {
            ends.a.post_send(link.a, &[Request::send(&[]).id(id)]);
            ends.b.assert_idle(link.b, Queue::Recv);
            ends.a.reset(link.a);
            ends.b.reset(link.b);
            ends.connect_again(link.a, link.b);
            ends.a.post_send(link.a, &[Request::send(&[]).id(id)]);
            ends.b.assert_idle(link.b, Queue::Recv);
            ends.b.post_srq(srq, &[Recv::new(id, &[])]);
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
            ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
        }
    }

    /// Datagrams take shared receives too. One that finds none is lost, and waits for none.
    fn datagrams_take_shared_receives(ends: &mut Ends) {
        let srq = ends.b.create_srq(8, 1);
        let setup = QpSetup { srq: Some(srq.id), ..QpSetup::default() };
        let (link, to) = ends.datagrams_with(setup, 1, 2);
        let behind = ends.datagrams(1, 2);
        for id in 0..20 {
            if ends.is_software() {
                ends.a.transfer(link.a, Request::send(&[]).id(1).to(to));
                ends.let_datagrams_come(behind);
                ends.b.assert_idle(link.b, Queue::Recv);
            }
            ends.b.post_srq(srq, &[Recv::new(id, &[link.b_mem.sge(0, 100)])]);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 60)]).id(2).to(to));
            let got = ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            assert_eq!(got.byte_len, 100);
        }
    }

    /// The same on an unreliable connection.
    fn unreliable_messages_take_shared_receives(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let srq = ends.b.create_srq(8, 1);
        let a = QpSetup { qp_type: ffi::IBV_QPT_UC, ..QpSetup::default() };
        let link = ends.link_with(a, QpSetup { srq: Some(srq.id), ..a });
        for id in 0..20 {
            ends.a.post_send(link.a, &[Request::send(&[]).id(1)]);
            ends.b.assert_idle(link.b, Queue::Recv);
            ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
            ends.b.post_srq(srq, &[Recv::new(id, &[link.b_mem.sge(0, 100)])]);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 60)]).id(2));
            let got = ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            assert_eq!(got.byte_len, 60);
        }
    }

    /// Receives are checked in the domain of their queue. rdma_rxe checks them in that of the queue
    /// pair.
    fn the_queue_has_a_domain_of_its_own(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let srq = ends.b.create_srq(8, 1);
        let setup = QpSetup {
            pd: ends.b.alloc_pd(),
            srq: Some(srq.id),
            ..QpSetup::default()
        };
        let link = ends.link_with(QpSetup::default(), setup);
        let memory = ends.b.register(0, 64, AccessFlags::LOCAL_WRITE);
        ends.b.post_srq(srq, &[Recv::new(1, &[memory.sge(0, 8)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        ends.b.post_srq(srq, &[Recv::new(2, &[link.b_mem.sge(0, 8)])]);
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 8)]).id(3)]);
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::LocProtErr);
    }
}

fn open() -> (Context, ProtectionDomain) {
    let device = find_device(None).expect("no device");
    let context = device.open().expect("the device does not open");
    let pd = context.alloc_pd().expect("no protection domain");
    (context, pd)
}

/// What the device says it can make, it makes; more it refuses.
#[test]
fn the_device_tells_its_limits() {
    let (context, pd) = open();
    let limits = context.query_device().expect("no attributes");
    assert!(limits.max_srq > 0 && limits.max_srq_wr > 0 && limits.max_srq_sge > 0);
    let (max_wr, max_sge) = (limits.max_srq_wr as u32, limits.max_srq_sge as u32);
    let srq = pd.create_srq(1, max_sge).expect("the largest is refused");
    assert!(srq.max_sge() >= max_sge);
    if context.device().is_software() {
        pd.create_srq(max_wr, 1).expect("the largest is refused");
        assert!(pd.create_srq(0, 1).is_err());
    }
    assert!(pd.create_srq(max_wr + 1, 1).is_err());
    assert!(pd.create_srq(1, max_sge + 1).is_err());
}

/// A connection from a queue pair that sends to one with a shared receive queue.
fn connect(
    context: &Context,
    pd: &ProtectionDomain,
    srq: &SharedReceiveQueue,
    recv_cq: &CompletionQueue,
) -> (QueuePair, CompletionQueue, QueuePair) {
    let (gid_index, _) = context.choose_gid(1).expect("no address");
    let path = PathOptions {
        gid_index,
        min_rnr_timer: 1,
        ..PathOptions::default()
    };
    let send_cq = context.create_cq(16, None).expect("no completion queue");
    let one = QueuePairInit::new(&send_cq, &send_cq);
    let other = QueuePairInit {
        srq: Some(srq),
        ..QueuePairInit::new(recv_cq, recv_cq)
    };
    let (from, to) = (pd.create_qp(&one).unwrap(), pd.create_qp(&other).unwrap());
    let ends = (
        from.endpoint(&path, 1).unwrap(),
        to.endpoint(&path, 2).unwrap(),
    );
    for (qp, local, remote) in [(&from, &ends.0, &ends.1), (&to, &ends.1, &ends.0)] {
        qp.to_init(AccessFlags::empty(), 1).unwrap();
        qp.to_rtr(remote, &path).unwrap();
        qp.to_rts(local.psn, &path).unwrap();
    }
    (from, send_cq, to)
}

fn element(region: &MemoryRegion, offset: u64, length: u32) -> ffi::ibv_sge {
    ffi::ibv_sge {
        addr: region.addr() + offset,
        length,
        lkey: region.lkey(),
    }
}

fn wait(cq: &CompletionQueue) -> WorkCompletion {
    let deadline = Instant::now() + PATIENCE;
    let mut completions = [WorkCompletion::default()];
    while cq.poll(&mut completions).expect("cannot poll") == 0 {
        assert!(Instant::now() < deadline, "no completion came");
        thread::yield_now();
    }
    let [completion] = completions;
    assert_eq!(completion.status(), WcStatus::Success);
    completion
}

/// Several threads send, two take and post again, and one changes the queue's size if the device can:
/// every message arrives once, in the order of its connection, although there are fewer receives than
/// messages under way.
#[test]
fn many_threads_share_a_queue() {
    const SENDERS: usize = 3;
    const MESSAGES: u64 = 2_000;
    const RECEIVES: u64 = 2;
    let (context, pd) = open();
    let memory = context.alloc_memory(4096).expect("no memory");
    let region = pd
        .reg_memory(&memory, AccessFlags::LOCAL_WRITE)
        .expect("no region");
    let srq = pd.create_srq(8, 1).expect("no shared receive queue");
    let post = |id: u64| {
        let mut sge = element(&region, 64 * id, 8);
        let mut request = ffi::ibv_recv_wr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: &mut sge,
            num_sge: 1,
        };
        // SAFETY: a valid list; the memory outlives the queue, and no reference to it exists.
        unsafe { srq.post_recv(&mut request) }.expect("cannot post");
    };
    (0..RECEIVES).for_each(post);
    // Two pollers, each with its own queue pairs.
    let cqs = [(); 2].map(|()| context.create_cq(64, None).expect("no completion queue"));
    let links: Vec<_> = (0..SENDERS)
        .map(|n| connect(&context, &pd, &srq, &cqs[n % 2]))
        .collect();
    let ended = AtomicUsize::new(0);
    let deadline = Instant::now() + PATIENCE;
    thread::scope(|scope| {
        if context.device().is_software() {
            scope.spawn(|| {
                for size in (2..20).cycle() {
                    if ended.load(Ordering::Relaxed) == cqs.len() || Instant::now() > deadline {
                        break;
                    }
                    srq.resize(size).expect("no other size");
                    thread::yield_now();
                }
            });
        }
        for (from, send_cq, _) in &links {
            let (region, memory) = (&region, &memory);
            scope.spawn(move || {
                let offset = 1024 + 64 * u64::from(from.qp_num() % 32);
                for number in 0..MESSAGES {
                    let mut sge = element(region, offset, 8);
                    let mut request = ffi::ibv_send_wr {
                        opcode: ffi::IBV_WR_SEND_WITH_IMM,
                        send_flags: ffi::IBV_SEND_SIGNALED,
                        imm_data: (number as u32).to_be(),
                        sg_list: &mut sge,
                        num_sge: 1,
                        ..ffi::ibv_send_wr::zeroed()
                    };
                    let _alive = memory;
                    // SAFETY: a valid list; the memory outlives the queue pair.
                    unsafe { from.post_send(&mut request) }.expect("cannot post");
                    wait(send_cq);
                }
            });
        }
        for (n, cq) in cqs.iter().enumerate() {
            let (links, post, ended) = (&links, &post, &ended);
            scope.spawn(move || {
                let mine: Vec<u32> = links
                    .iter()
                    .skip(n)
                    .step_by(2)
                    .map(|link| link.2.qp_num())
                    .collect();
                let mut next = vec![0; mine.len()];
                for _ in 0..mine.len() as u64 * MESSAGES {
                    let got = wait(cq);
                    let which = mine.iter().position(|num| *num == got.qp_num());
                    let next = &mut next[which.expect("of another queue pair")];
                    assert_eq!(got.imm_data(), Some(*next));
                    *next += 1;
                    post(got.wr_id());
                }
                ended.fetch_add(1, Ordering::Relaxed);
            });
        }
    });
}
