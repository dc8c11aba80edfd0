//! Unreliable datagrams.

use verbs_sys::{QpState, QueuePairEndpoint, WcOpcode, WcStatus, ffi};

use crate::support::{
    ALL_ACCESS, Destination, End, QpSetup, Queue, Recv, Refused, Request, pattern, scripts,
};

/// Bytes in front of a datagram in its receive buffer.
const GRH: usize = 40;
const QKEY: u32 = 0x1111_1111;

scripts! {
    /// Behind 40 bytes of routing, with its sender's number.
    fn a_datagram_arrives_behind_its_header(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, 0x2222);
        for (id, len) in [0, 1, 40, 1000, 4096].into_iter().enumerate() {
            // As much as a packet of every device takes.
            let len = if ends.is_software() { len } else { len.min(1000) };
            let (id, bytes) = (id as u64, pattern(len, len));
            ends.a.store(link.a_mem, 0, &bytes);
            ends.b.fill(link.b_mem, 0xEE);
            ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, GRH + len)])]);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, len)]).id(id).to(to));
            let received = ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            assert_eq!(received.opcode(), WcOpcode::Recv);
            assert_eq!(received.byte_len as usize, GRH + len);
            assert_eq!(received.src_qp, link.a.num);
            assert_ne!(received.flags & ffi::IBV_WC_GRH, 0);
            assert_eq!(ends.b.load(link.b_mem, GRH, len), bytes);
            assert_eq!(ends.b.load(link.b_mem, GRH + len, 8), [0xEE; 8]);
        }
    }

    fn a_datagram_brings_an_immediate(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 100)])]);
        let request = Request::send_imm(&[link.a_mem.sge(0, 8)], 0x0102_0304);
        ends.a.transfer(link.a, request.id(2).to(to));
        let received = ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(received.imm, Some(0x0102_0304));
    }

    /// An IPv4 port puts an IPv4 header into the last 20 of the 40 bytes.
    fn the_header_names_both_ports(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        if ends.leaves_out() {
            return;
        }
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 100)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(2).to(to));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        let header = ends.b.load(link.b_mem, 20, 20);
        assert_eq!(header[0], 0x45);
        let gid = |end: &mut End, qp| {
            let endpoint: QueuePairEndpoint = end.endpoint(qp).parse().expect("no endpoint");
            endpoint.gid.0
        };
        assert_eq!(header[12..16], gid(&mut ends.a, link.a)[12..16]);
        assert_eq!(header[16..20], gid(&mut ends.b, link.b)[12..16]);
    }

    /// The sender succeeds, and the receive stays for a datagram that may have it.
    fn another_queue_key_is_dropped(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        let wrong = Destination { qkey: QKEY + 1, ..to };
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 100)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(2).to(wrong));
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 16)]).id(3).to(to));
        let received = ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(received.byte_len as usize, GRH + 16);
        assert_eq!(ends.b.state(link.b), QpState::Rts);
    }

    /// A queue key with the highest bit stands for the sender's own. rdma_rxe sends it as it is.
    fn a_privileged_queue_key_is_the_senders(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        if ends.leaves_out() {
            return;
        }
        let own = Destination { qkey: 1 << 31, ..to };
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 100)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(2).to(own));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
    }

    /// To nobody, or to somebody without a receive: lost, and nobody is told.
    fn what_nobody_takes_is_lost(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        let nobody = Destination { qp_num: link.b.num ^ 0x3ff, ..to };
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(1).to(nobody));
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(2).to(to));
        if ends.leaves_out() {
            return;
        }
        let behind = ends.datagrams(QKEY, QKEY);
        ends.let_datagrams_come(behind);
        // A poll takes what has come, and drops it.
        ends.b.assert_idle(link.b, Queue::Recv);
        ends.b.post_recv(link.b, &[Recv::new(3, &[link.b_mem.sge(0, 100)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 24)]).id(4).to(to));
        let received = ends.b.expect(link.b, Queue::Recv, 3, WcStatus::Success);
        assert_eq!(received.byte_len as usize, GRH + 24);
    }

    /// One queue pair hears many, and can tell them apart.
    fn many_send_to_one(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        let (other, _) = ends.datagrams(QKEY, QKEY);
        for id in 0..8 {
            let buffer = link.b_mem.sge(id as usize * 100, 100);
            ends.b.post_recv(link.b, &[Recv::new(id, &[buffer])]);
        }
        for round in 0..4 {
            for from in [link, other] {
                ends.a.transfer(from.a, Request::send(&[from.a_mem.sge(0, 8)]).id(round).to(to));
            }
        }
        let mut senders: Vec<u32> = (0..8)
            .map(|id| ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success).src_qp)
            .collect();
        senders.sort_unstable();
        let mut want = [[link.a.num; 4], [other.a.num; 4]].concat();
        want.sort_unstable();
        assert_eq!(senders, want);
    }

    /// A sleeping receiver is woken.
    fn a_datagram_is_an_event(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 100)])]);
        ends.b.arm(link.b, Queue::Recv, false);
        ends.b.assert_idle(link.b, Queue::Recv);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(2).to(to));
        assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
    }

    /// Datagrams have no operations but SEND, and no more bytes than a packet.
    fn what_a_datagram_cannot_do_is_refused(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        if ends.leaves_out() {
            // A kernel device finds out later, each in its own way.
            return;
        }
        for request in [
            Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)),
            Request::read(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)),
            Request::fetch_add(link.a_mem.sge(0, 8), link.b_mem.at(0), 1),
        ] {
            let refused = ends.a.try_post_send(link.a, &[request]).unwrap_err();
            assert_eq!(refused.errno, libc::EINVAL);
        }
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 4097)]).id(9).to(to)]);
        ends.a.expect(link.a, Queue::Send, 9, WcStatus::LocLenErr);
        assert_eq!(ends.a.state(link.a), QpState::Err);
    }

    /// A queue pair that was reset hears nothing of before.
    fn reset_forgets_datagrams(ends: &mut Ends) {
        let (link, to) = ends.datagrams(QKEY, QKEY);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(1).to(to));
        ends.b.reset(link.b);
        let () = ends.b.call(crate::support::Command::StartDatagrams { qp: link.b.id, qkey: QKEY });
        ends.b.post_recv(link.b, &[Recv::new(2, &[link.b_mem.sge(0, 100)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 32)]).id(3).to(to));
        let received = ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
        // A packet of before may still be under way.
        let late = !ends.is_software() || ends.answers_come_later();
        assert!(received.byte_len as usize == GRH + 32 || late);
    }
}

/// Unreliable connections.
mod unreliable {
    use super::*;

    fn setup() -> QpSetup {
        QpSetup {
            qp_type: ffi::IBV_QPT_UC,
            ..QpSetup::default()
        }
    }

    scripts! {
        fn messages_and_writes_arrive(ends: &mut Ends) {
            let link = ends.link_with(setup(), setup());
            for (id, len) in [1, 64, 5000].into_iter().enumerate() {
                let (id, bytes) = (id as u64, pattern(len, len));
                ends.a.store(link.a_mem, 0, &bytes);
                ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, len)])]);
                ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, len)]).id(id));
                ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
                assert_eq!(ends.b.load(link.b_mem, 0, len), bytes);
                ends.b.post_recv(link.b, &[Recv::new(10, &[])]);
                let target = link.b_mem.at(10_000);
                ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, len)], target).id(11));
                let behind = Request::write_imm(&[], target, 7);
                ends.a.transfer(link.a, behind.id(12));
                let received = ends.b.expect(link.b, Queue::Recv, 10, WcStatus::Success);
                assert_eq!(received.imm, Some(7));
                assert_eq!(ends.b.load(link.b_mem, 10_000, len), bytes);
            }
        }

        /// Whatever the peer thinks of it, the sender succeeds.
        fn what_the_peer_refuses_is_lost(ends: &mut Ends) {
            let link = ends.link_with(setup(), setup());
            if ends.leaves_out() {
                // When a kernel device drops a packet is not for a test to know.
                return;
            }
            let mut stale = link.b_mem.at(0);
            stale.rkey ^= 0x5a;
            ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], stale).id(1));
            // Long enough to go in several parts, where messages do.
            let long = ends.a.register(0, 200_000, ALL_ACCESS);
            ends.a.transfer(link.a, Request::write(&[long.sge(0, 200_000)], stale).id(7));
            // No receive is posted.
            ends.a.transfer(link.a, Request::send(&[long.sge(0, 200_000)]).id(8));
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(2));
            ends.b.assert_filled(link.b_mem, 0);
            assert_eq!((ends.a.state(link.a), ends.b.state(link.b)), (QpState::Rts, QpState::Rts));
            ends.b.post_recv(link.b, &[Recv::new(3, &[link.b_mem.sge(0, 64)])]);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 24)]).id(4));
            let received = ends.b.expect(link.b, Queue::Recv, 3, WcStatus::Success);
            assert_eq!(received.byte_len, 24);
            ends.b.destroy(link.b);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(5));
            ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)).id(6));
            assert_eq!(ends.a.state(link.a), QpState::Rts);
        }

        fn there_are_no_reads_and_no_atomics(ends: &mut Ends) {
            let link = ends.link_with(setup(), setup());
            if ends.leaves_out() {
                return;
            }
            let write = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)).id(1);
            // Before the first request, and behind it.
            for _ in 0..2 {
                for request in [
                    Request::read(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)),
                    Request::compare_swap(link.a_mem.sge(0, 8), link.b_mem.at(0), 1, 2),
                ] {
                    let alone = ends.a.try_post_send(link.a, std::slice::from_ref(&request));
                    let refused = Refused { errno: libc::EINVAL, index: 0 };
                    assert_eq!(alone, Err(refused));
                    let list = [write.clone(), request, write.clone()];
                    let listed = ends.a.try_post_send(link.a, &list);
                    assert_eq!(listed, Err(Refused { index: 1, ..refused }));
                    ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
                }
            }
        }
    }
}
