//! Queues: room, lists, signaling, errors and flushing.

use libc::{EINVAL, ENOMEM};
use verbs_sys::{QpState, WcStatus};

use crate::support::{Link, QpSetup, Queue, Recv, Refused, Request, assert_refused, scripts};

/// A request that is not worth a completion by itself.
fn small(link: Link) -> Request {
    Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0))
}

scripts! {
    fn only_signaled_requests_complete(ends: &mut Ends) {
        let link = ends.link();
        for round in 0..40 {
            let quiet = small(link).unsignaled().id(1);
            let list = [quiet.clone(), quiet.clone(), quiet, small(link).id(round)];
            ends.a.post_send(link.a, &list);
            ends.a.expect(link.a, Queue::Send, round, WcStatus::Success);
        }
        ends.a.assert_idle(link.a, Queue::Send);
    }

    fn a_queue_pair_may_signal_all(ends: &mut Ends) {
        let setup = QpSetup { sq_sig_all: true, ..QpSetup::default() };
        let link = ends.link_with(setup, QpSetup::default());
        ends.a.post_send(link.a, &[small(link).unsignaled().id(1), small(link).id(2)]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
    }

    /// A request that finds no room is named, and those before it are under way. Devices may have
    /// more room than they promise; the software device has exactly as much.
    fn a_full_send_queue_refuses(ends: &mut Ends) {
        let link = ends.link();
        let room = link.a.max_send_wr;
        let list: Vec<Request> = (0..4 * room as u64 + 8).map(|id| small(link).id(id)).collect();
        let Refused { errno, index } = ends
            .a
            .try_post_send(link.a, &list)
            .expect_err("a queue without end");
        assert_eq!(errno, ENOMEM);
        match ends.is_software() {
            true => assert_eq!(index, room),
            false => assert!(index >= room),
        }
        for id in 0..index as u64 {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
        // Completions taken make room.
        ends.a.post_send(link.a, &list[..room]);
        for id in 0..room as u64 {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
    }

    /// Unsignaled requests hold their room until a later completion is taken.
    fn unsignaled_requests_count(ends: &mut Ends) {
        let link = ends.link();
        let room = link.a.max_send_wr;
        for _ in 0..3 {
            let mut list = vec![small(link).unsignaled().id(1); room - 1];
            list.push(small(link).id(2));
            ends.a.post_send(link.a, &list);
            if ends.is_software() {
                let refused = ends.a.try_post_send(link.a, &[small(link)]);
                assert_refused(&refused, ENOMEM, 0);
            }
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        }
    }

    fn a_full_receive_queue_refuses(ends: &mut Ends) {
        let link = ends.link();
        let room = link.b.max_recv_wr;
        let list = vec![Recv::new(1, &[link.b_mem.sge(0, 8)]); 4 * room + 8];
        let Refused { errno, index } = ends
            .b
            .try_post_recv(link.b, &list)
            .expect_err("a queue without end");
        assert_eq!(errno, ENOMEM);
        match ends.is_software() {
            true => assert_eq!(index, room),
            false => assert!(index >= room),
        }
        // A receive used makes room for another.
        ends.a.transfer(link.a, Request::send(&[]));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        ends.b.post_recv(link.b, &list[..1]);
    }

    fn too_many_elements_are_refused(ends: &mut Ends) {
        let link = ends.link();
        let send = vec![link.a_mem.sge(0, 1); link.a.max_send_sge + 1];
        let list = [small(link), Request::send(&send), small(link)];
        assert_refused(&ends.a.try_post_send(link.a, &list), EINVAL, 1);
        ends.a.expect(link.a, Queue::Send, 0, WcStatus::Success);
        let recv = vec![link.b_mem.sge(0, 1); link.b.max_recv_sge + 1];
        let list = [Recv::new(1, &[]), Recv::new(2, &recv), Recv::new(3, &[])];
        assert_refused(&ends.b.try_post_recv(link.b, &list), EINVAL, 1);
        ends.a.transfer(link.a, Request::send(&[]));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(ends.a.state(link.a), QpState::Rts);
    }

    /// Those before the bad one are posted, those behind it are not.
    fn a_list_is_posted_up_to_the_bad_request(ends: &mut Ends) {
        let link = ends.link();
        // rdma_rxe takes any opcode.
        let unknown = match ends.is_software() {
            true => Request { opcode: 99, ..small(link) },
            false => Request::send(&vec![link.a_mem.sge(0, 1); link.a.max_send_sge + 1]),
        };
        let list = [small(link).id(1), small(link).id(2), unknown.id(3), small(link).id(4)];
        assert_refused(&ends.a.try_post_send(link.a, &list), EINVAL, 2);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        ends.a.assert_idle(link.a, Queue::Send);
        ends.a.transfer(link.a, small(link).id(5));
    }

    /// Everything outstanding comes back in the order in which it was posted, signaled or not.
    fn an_error_flushes_both_queues_in_order(ends: &mut Ends) {
        let link = ends.link();
        let receives: Vec<Recv> = (20..30).map(|id| Recv::new(id, &[])).collect();
        ends.a.post_recv(link.a, &receives);
        // The peer has no receive posted, so these stay.
        let sends: Vec<Request> = (0..10)
            .map(|id| Request::send(&[link.a_mem.sge(0, 8)]).id(id))
            .map(|send| if send.wr_id % 3 == 0 { send.unsignaled() } else { send })
            .collect();
        ends.a.post_send(link.a, &sends);
        ends.a.fail(link.a);
        for id in 0..10 {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::WrFlushErr);
        }
        for id in 20..30 {
            ends.a.expect(link.a, Queue::Recv, id, WcStatus::WrFlushErr);
        }
        ends.a.assert_idle(link.a, Queue::Send);
        ends.a.assert_idle(link.a, Queue::Recv);
        assert_eq!(ends.a.state(link.a), QpState::Err);
    }

    /// In the error state requests are taken, and come back flushed. With rdma_rxe, receives do so
    /// only when something else happens to the queue pair.
    fn posting_in_the_error_state_flushes(ends: &mut Ends) {
        let link = ends.link();
        ends.a.fail(link.a);
        for id in 0..20 {
            ends.a.post_send(link.a, &[small(link).unsignaled().id(id)]);
            ends.a.expect(link.a, Queue::Send, id, WcStatus::WrFlushErr);
        }
        if ends.is_software() {
            for id in 0..20 {
                ends.a.post_recv(link.a, &[Recv::new(id, &[])]);
                ends.a.expect(link.a, Queue::Recv, id, WcStatus::WrFlushErr);
            }
        }
        assert_eq!(ends.b.load(link.b_mem, 0, 8), [0; 8]);
    }

    /// RESET forgets what is outstanding.
    fn reset_drops_outstanding_requests(ends: &mut Ends) {
        let link = ends.link();
        ends.a.post_recv(link.a, &[Recv::new(1, &[])]);
        ends.a.post_send(link.a, &[Request::send(&[]).id(2)]);
        ends.a.reset(link.a);
        ends.a.assert_idle(link.a, Queue::Send);
        ends.a.assert_idle(link.a, Queue::Recv);
        // rdma_rxe does not name the request.
        let refused = ends.a.try_post_recv(link.a, &[Recv::new(3, &[])]);
        assert_eq!(refused.map_err(|refused| refused.errno), Err(EINVAL));
    }

    /// Connections of one end fail and work independently.
    fn an_error_stays_with_its_queue_pair(ends: &mut Ends) {
        let (good, bad) = (ends.link(), ends.link());
        let mut wrong = bad.b_mem.at(0);
        wrong.rkey ^= 1 << 8;
        ends.a.post_send(bad.a, &[Request::write(&[bad.a_mem.sge(0, 8)], wrong).id(1)]);
        ends.a.expect(bad.a, Queue::Send, 1, WcStatus::RemAccessErr);
        ends.a.transfer(good.a, small(good).id(2));
        ends.b.post_recv(good.b, &[Recv::new(3, &[])]);
        ends.a.transfer(good.a, Request::send(&[]).id(4));
        ends.b.expect(good.b, Queue::Recv, 3, WcStatus::Success);
    }
}
