//! Windows of type 2B, and invalidation.

use verbs_sys::{
    QpState, WcOpcode, WcStatus,
    ffi::{IBV_MW_TYPE_1, IBV_MW_TYPE_2, IBV_QPT_UC, ibv_inc_rkey},
};

use super::{
    LEN, REMOTE, START, assert_bind_fails, assert_closed, assert_dead, at, bound_type_2,
    has_type_2, setup,
};
use crate::support::{BINDABLE, Bind, QpSetup, Queue, REGION, Recv, Request, scripts};

scripts! {
    fn type_2_has_the_key_that_is_asked_for(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_2);
        let mut rkey = window.rkey;
        for step in [1, 100, 200] {
            rkey = (rkey & !0xff) | (rkey.wrapping_add(step) & 0xff);
            ends.b.post_bind(link.b, window, rkey, region.part(START, LEN, REMOTE));
            let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
            ends.a.transfer(link.a, write.id(4));
            let done = ends.b.transfer(link.b, Request::local_inv(rkey).id(5));
            assert_eq!(done.opcode(), WcOpcode::LocalInv);
        }
        let keys = [rkey, ibv_inc_rkey(rkey), window.rkey];
        assert_closed(ends, link, region, at(region, START, keys[0]));
        for key in keys {
            assert_dead(ends, region, key);
        }
        ends.b.deregister(region);
    }

    fn type_2_is_for_one_queue_pair(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let (link, region) = setup(ends);
        let (_, rkey) = bound_type_2(ends, link, region);
        assert_dead(ends, region, rkey);
        let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
        ends.a.transfer(link.a, write);
        ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
        let write = Request::write_imm(&[link.a_mem.sge(0, 8)], at(region, START, rkey), 5);
        ends.a.transfer(link.a, write);
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
    }

    /// Requests are executed in order: a bind can be followed by what tells of it, and preceded by
    /// what must be over.
    fn a_bind_keeps_its_place_in_the_queue(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_2);
        let rkey = ibv_inc_rkey(window.rkey);
        ends.a.post_recv(link.a, &[Recv::new(1, &[]), Recv::new(2, &[])]);
        ends.b.post_send(link.b, &[Request::send(&[]).id(1)]);
        let bind = Bind { wr_id: 2, ..region.part(START, LEN, REMOTE) };
        assert_eq!(ends.b.try_post_bind(link.b, window, rkey, bind), Ok(()));
        ends.b.post_send(link.b, &[Request::send(&[]).id(3)]);
        ends.a.expect(link.a, Queue::Recv, 1, WcStatus::Success);
        ends.a.expect(link.a, Queue::Recv, 2, WcStatus::Success);
        let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
        ends.a.transfer(link.a, write);
        for id in 1..=3 {
            ends.b.expect(link.b, Queue::Send, id, WcStatus::Success);
        }
        let list = [
            Request::read(&[link.b_mem.sge(0, 8)], link.a_mem.at(0)).unsignaled().id(4),
            Request::local_inv(rkey).fenced().unsignaled().id(5),
            Request::write(&[link.b_mem.sge(0, 8)], link.a_mem.at(8)).fenced().id(6),
        ];
        ends.b.post_send(link.b, &list);
        ends.b.expect(link.b, Queue::Send, 6, WcStatus::Success);
        assert_closed(ends, link, region, at(region, START, rkey));
    }

    fn a_peer_can_invalidate_the_key_it_was_given(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let (link, region) = setup(ends);
        let (window, rkey) = bound_type_2(ends, link, region);
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 8)]), Recv::new(2, &[])]);
        let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
        let give_back = Request::send_inv(&[link.a_mem.sge(0, 8)], rkey);
        ends.a.post_send(link.a, &[write.clone().unsignaled().id(1), give_back.id(2)]);
        let sent = ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        assert_eq!(sent.opcode(), WcOpcode::Send);
        let got = ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!((got.opcode(), got.byte_len), (WcOpcode::Recv, 8));
        assert_eq!((got.invalidated, got.imm), (Some(rkey), None));
        // A message without it says so.
        ends.a.transfer(link.a, Request::send(&[]));
        let got = ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
        assert_eq!((got.invalidated, got.imm), (None, None));
        // The window can be bound again, and the region can go once it is not.
        let next = ibv_inc_rkey(rkey);
        ends.b.post_bind(link.b, window, next, region.part(START, LEN, REMOTE));
        assert!(ends.b.try_deregister(region).is_some());
        ends.b.post_recv(link.b, &[Recv::new(3, &[])]);
        ends.a.transfer(link.a, Request::send_inv(&[], next));
        ends.b.expect(link.b, Queue::Recv, 3, WcStatus::Success);
        assert_closed(ends, link, region, at(region, START, next));
        assert_eq!(ends.b.try_deregister(region), None);
    }

    fn what_cannot_be_invalidated(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let cases = if ends.is_software() { 5 } else { 4 };
        for (case, by_peer) in (0..cases).flat_map(|case| [(case, false), (case, true)]) {
            let (link, region) = setup(ends);
            let (_, bound) = bound_type_2(ends, link, region);
            let type_1 = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
            let other = ends.link();
            let rkey = match case {
                0 => ibv_inc_rkey(bound),
                1 => ends.b.alloc_mw(0, IBV_MW_TYPE_2).rkey,
                2 => ends.b.bind(link.b, type_1, region.part(0, 8, REMOTE)),
                3 => region.rkey,
                // Bound to another queue pair, which rdma_rxe does not mind.
                _ => bound_type_2(ends, other, region).1,
            };
            if by_peer {
                ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
                ends.a.post_send(link.a, &[Request::send_inv(&[], rkey).id(2)]);
                let failed = ends.b.wait(link.b, Queue::Recv);
                assert_ne!(failed.status(), WcStatus::Success);
                if ends.is_software() {
                    ends.a.expect(link.a, Queue::Send, 2, WcStatus::RemAccessErr);
                }
            } else {
                ends.b.post_send(link.b, &[Request::local_inv(rkey).id(2)]);
                let statuses = [WcStatus::MwBindErr, WcStatus::LocQpOpErr];
                ends.b.expect_one_of(link.b, Queue::Send, 2, &statuses);
            }
            ends.b.await_state(link.b, QpState::Err);
            assert!(ends.b.try_deregister(region).is_some(), "what was bound is");
        }
    }

    fn what_cannot_be_bound_to_a_queue_pair(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        for case in 0..3 {
            let (link, region) = setup(ends);
            let pd = ends.b.alloc_pd();
            let (window, rkey, bind) = match case {
                // Bound already.
                0 => {
                    let (window, rkey) = bound_type_2(ends, link, region);
                    (window, ibv_inc_rkey(rkey), region.part(0, 8, REMOTE))
                }
                // Without bytes.
                1 => {
                    let window = ends.b.alloc_mw(0, IBV_MW_TYPE_2);
                    (window, ibv_inc_rkey(window.rkey), region.part(0, 0, REMOTE))
                }
                // Of another domain.
                _ => {
                    let window = ends.b.alloc_mw(pd, IBV_MW_TYPE_2);
                    let region = ends.b.register(pd, REGION, BINDABLE);
                    (window, ibv_inc_rkey(window.rkey), region.part(0, 8, REMOTE))
                }
            };
            let posted = ends.b.try_post_bind(link.b, window, rkey, Bind { wr_id: 8, ..bind });
            // Some find out at once.
            if posted.is_ok() {
                assert_bind_fails(ends, link, 8);
            }
        }
        // Each type has its own call.
        if ends.is_software() {
            let (link, region) = setup(ends);
            let (one, two) = (ends.b.alloc_mw(0, IBV_MW_TYPE_1), ends.b.alloc_mw(0, IBV_MW_TYPE_2));
            let part = region.part(0, 8, REMOTE);
            assert_eq!(ends.b.try_bind(link.b, two, part), Err(libc::EINVAL));
            assert!(ends.b.try_post_bind(link.b, one, ibv_inc_rkey(one.rkey), part).is_err());
            // The key of another window.
            assert!(ends.b.try_post_bind(link.b, two, two.rkey ^ 0x100, part).is_err());
        }
    }

    fn binds_and_invalidations_are_flushed_like_other_requests(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let (link, region) = setup(ends);
        let (_, rkey) = bound_type_2(ends, link, region);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        ends.b.fail(link.b);
        let bind = Bind { wr_id: 1, ..region.part(0, 8, REMOTE) };
        assert!(ends.b.try_bind(link.b, window, bind).is_ok());
        ends.b.post_send(link.b, &[Request::local_inv(rkey).id(2)]);
        ends.b.expect(link.b, Queue::Send, 1, WcStatus::WrFlushErr);
        ends.b.expect(link.b, Queue::Send, 2, WcStatus::WrFlushErr);
    }

    /// A peer without acknowledgements is served, and refused without being told.
    fn windows_serve_unreliable_connections(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let unreliable = QpSetup { qp_type: IBV_QPT_UC, ..QpSetup::default() };
        let link = ends.link_with(unreliable, unreliable);
        ends.a.fill(link.a_mem, 0xAA);
        let region = ends.b.register(0, REGION, BINDABLE);
        let (_, rkey) = bound_type_2(ends, link, region);
        ends.b.post_recv(link.b, &[Recv::new(1, &[]), Recv::new(2, &[])]);
        let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
        ends.a.post_send(link.a, &[write.unsignaled(), Request::send_inv(&[], rkey).id(4)]);
        ends.a.expect(link.a, Queue::Send, 4, WcStatus::Success);
        let got = ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(got.invalidated, Some(rkey));
        let bytes = ends.b.digest(region);
        let late = Request::write(&[link.a_mem.sge(8, 64)], at(region, START + 8, rkey));
        ends.a.post_send(link.a, &[late.unsignaled(), Request::send(&[]).id(5)]);
        ends.a.expect(link.a, Queue::Send, 5, WcStatus::Success);
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
        assert_eq!(ends.b.load_word(region, START), 0xAAAA_AAAA_AAAA_AAAA);
        assert_eq!(ends.b.digest(region), bytes);
        // A bind that is wrong is told all the same.
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let bind = Bind { wr_id: 7, ..region.part(REGION - 1, 8, REMOTE) };
        assert!(ends.b.try_bind(link.b, window, bind).is_ok());
        assert_bind_fails(ends, link, 7);
    }

    /// What happens here is left open by the standard.
    fn a_queue_pair_takes_its_windows_along(ends: &mut Ends) {
        if !ends.is_software() { return }
        let (link, region) = setup(ends);
        let (_, rkey) = bound_type_2(ends, link, region);
        assert_eq!(ends.b.try_deregister(region), Some(libc::EBUSY));
        ends.b.destroy(link.b);
        assert_dead(ends, region, rkey);
        assert_eq!(ends.b.try_deregister(region), None);
    }
}
