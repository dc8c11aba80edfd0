//! SEND and receive.

use verbs_sys::{QpState, WcOpcode, WcStatus};

use crate::support::{ALL_ACCESS, QpSetup, Queue, REGION, Recv, Request, pattern, scripts};

scripts! {
    /// A message that has come is not flushed, though nobody has polled since.
    fn what_has_come_is_received_before_an_error(ends: &mut Ends) {
        let link = ends.link();
        for id in 0..10 {
            ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, 8)])]);
        }
        for id in 0..9 {
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 8)]).id(id)]);
        }
        if !ends.is_software() || ends.answers_come_later() {
            // They may be under way.
            for id in 0..9 {
                ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
            }
        }
        ends.b.fail(link.b);
        for id in 0..9 {
            ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
        }
        ends.b.expect(link.b, Queue::Recv, 9, WcStatus::WrFlushErr);
    }

    /// Bytes arrive, in the receive posted for them and nowhere else.
    fn a_message_arrives_whole(ends: &mut Ends) {
        let link = ends.link();
        for (id, len) in [1, 7, 8, 64, 1000, 4096, 4097, 40_000].into_iter().enumerate() {
            let (id, bytes) = (id as u64, pattern(len, len));
            ends.a.store(link.a_mem, 3, &bytes);
            ends.b.fill(link.b_mem, 0xEE);
            ends.b.post_recv(link.b, &[Recv::new(100 + id, &[link.b_mem.sge(5, len + 10)])]);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(3, len)]).id(id)]);
            let received = ends.b.expect(link.b, Queue::Recv, 100 + id, WcStatus::Success);
            assert_eq!(received.opcode(), WcOpcode::Recv);
            assert_eq!(received.byte_len as usize, len);
            assert_eq!(received.imm, None);
            let sent = ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
            assert_eq!(sent.opcode(), WcOpcode::Send);
            assert_eq!(ends.b.load(link.b_mem, 5, len), bytes);
            assert_eq!(ends.b.load(link.b_mem, 0, 5), [0xEE; 5]);
            assert_eq!(ends.b.load(link.b_mem, 5 + len, 10), [0xEE; 10]);
        }
        ends.a.assert_idle(link.a, Queue::Recv);
        ends.b.assert_idle(link.b, Queue::Send);
    }

    /// Messages go both ways at once.
    fn both_ends_send(ends: &mut Ends) {
        let link = ends.link();
        ends.a.store(link.a_mem, 0, b"from a");
        ends.b.store(link.b_mem, 0, b"from b");
        ends.a.post_recv(link.a, &[Recv::new(1, &[link.a_mem.sge(100, 6)])]);
        ends.b.post_recv(link.b, &[Recv::new(2, &[link.b_mem.sge(100, 6)])]);
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 6)]).id(3)]);
        ends.b.post_send(link.b, &[Request::send(&[link.b_mem.sge(0, 6)]).id(4)]);
        ends.a.expect(link.a, Queue::Recv, 1, WcStatus::Success);
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
        ends.a.expect(link.a, Queue::Send, 3, WcStatus::Success);
        ends.b.expect(link.b, Queue::Send, 4, WcStatus::Success);
        assert_eq!(ends.a.load(link.a_mem, 100, 6), b"from b");
        assert_eq!(ends.b.load(link.b_mem, 100, 6), b"from a");
    }

    /// The device takes a message and acknowledges it whether or not the application looks.
    fn a_sender_completes_though_the_receiver_does_nothing(ends: &mut Ends) {
        let link = ends.link();
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 64)])]);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 64)]).id(2));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
    }

    /// Questions and answers on one completion queue, more than any buffer between the two holds.
    fn answers_and_acknowledgements_come_together(ends: &mut Ends) {
        let setup = QpSetup { one_cq: true, ..QpSetup::default() };
        let link = ends.link_with(setup, setup);
        for round in 0..400 {
            let len = 1 + round as usize * 13 % 300;
            let question = pattern(round as usize, len);
            ends.a.store(link.a_mem, 0, &question);
            ends.a.post_recv(link.a, &[Recv::new(round, &[link.a_mem.sge(1000, len)])]);
            ends.b.post_recv(link.b, &[Recv::new(round, &[link.b_mem.sge(0, len)])]);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, len)]).id(1000 + round)]);
            ends.b.expect(link.b, Queue::Recv, round, WcStatus::Success);
            ends.b.post_send(link.b, &[Request::send(&[link.b_mem.sge(0, len)]).id(2000 + round)]);
            let mut came = [ends.a.wait(link.a, Queue::Recv), ends.a.wait(link.a, Queue::Recv)];
            came.sort_unstable_by_key(|completion| completion.wr_id);
            assert_eq!(came.map(|completion| completion.wr_id), [round, 1000 + round]);
            assert!(came.iter().all(|completion| completion.status() == WcStatus::Success));
            assert_eq!(ends.a.load(link.a_mem, 1000, len), question);
            ends.b.expect(link.b, Queue::Send, 2000 + round, WcStatus::Success);
            // Nothing is in its way.
            ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, len)], link.b_mem.at(5000)).id(9));
        }
        ends.a.assert_idle(link.a, Queue::Send);
        ends.b.assert_idle(link.b, Queue::Send);
    }

    /// What an answer acknowledges has ended, although nobody is ready for the answer.
    fn an_answer_without_a_receive_acknowledges(ends: &mut Ends) {
        let setup = QpSetup { one_cq: true, ..QpSetup::default() };
        let link = ends.link_with(setup, setup);
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 64)])]);
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 64)]).id(2)]);
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        ends.b.post_send(link.b, &[Request::send(&[link.b_mem.sge(0, 64)]).id(3)]);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        ends.a.post_recv(link.a, &[Recv::new(4, &[link.a_mem.sge(0, 64)])]);
        ends.a.expect(link.a, Queue::Recv, 4, WcStatus::Success);
        ends.b.expect(link.b, Queue::Send, 3, WcStatus::Success);
    }

    /// Nor is it held up by an earlier message that nobody is ready for.
    fn an_acknowledgement_does_not_wait_behind_a_message(ends: &mut Ends) {
        let setup = QpSetup { one_cq: true, ..QpSetup::default() };
        let link = ends.link_with(setup, setup);
        ends.b.post_send(link.b, &[Request::send(&[link.b_mem.sge(0, 8)]).id(1)]);
        ends.b.post_recv(link.b, &[Recv::new(2, &[link.b_mem.sge(0, 64)])]);
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 64)]).id(3)]);
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
        ends.b.post_send(link.b, &[Request::send(&[link.b_mem.sge(0, 16)]).id(4)]);
        ends.a.expect(link.a, Queue::Send, 3, WcStatus::Success);
        for (id, len) in [(5, 8), (6, 16)] {
            ends.a.post_recv(link.a, &[Recv::new(id, &[link.a_mem.sge(0, 64)])]);
            let received = ends.a.expect(link.a, Queue::Recv, id, WcStatus::Success);
            assert_eq!(received.byte_len, len);
        }
        ends.b.expect(link.b, Queue::Send, 1, WcStatus::Success);
        ends.b.expect(link.b, Queue::Send, 4, WcStatus::Success);
    }

    /// A message that was received has been sent, whatever comes of the connection.
    fn what_was_received_counts_when_the_connection_breaks(ends: &mut Ends) {
        for one_cq in [true, false] {
            let setup = QpSetup { one_cq, ..QpSetup::default() };
            let link = ends.link_with(setup, setup);
            ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 64)])]);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 64)]).id(2)]);
            ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
            let mut wrong = link.a_mem.at(0);
            wrong.rkey ^= 0x5a;
            ends.b.post_send(link.b, &[Request::write(&[link.b_mem.sge(0, 8)], wrong).id(3)]);
            ends.b.expect(link.b, Queue::Send, 3, WcStatus::RemAccessErr);
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        }
    }

    /// An answer counts, and what it acknowledges, when its sender has gone.
    fn an_answer_outlives_its_queue_pair(ends: &mut Ends) {
        let setup = QpSetup { one_cq: true, ..QpSetup::default() };
        let link = ends.link_with(setup, setup);
        ends.a.post_recv(link.a, &[Recv::new(1, &[link.a_mem.sge(0, 64)])]);
        ends.b.post_recv(link.b, &[Recv::new(2, &[link.b_mem.sge(0, 64)])]);
        ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 64)]).id(3)]);
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
        ends.b.post_send(link.b, &[Request::send(&[link.b_mem.sge(0, 64)]).id(4)]);
        ends.b.expect(link.b, Queue::Send, 4, WcStatus::Success);
        ends.b.destroy(link.b);
        let mut came = [ends.a.wait(link.a, Queue::Recv), ends.a.wait(link.a, Queue::Recv)];
        came.sort_unstable_by_key(|completion| completion.wr_id);
        assert_eq!(came.map(|completion| (completion.wr_id, completion.status())),
            [(1, WcStatus::Success), (3, WcStatus::Success)]);
    }

    fn an_immediate_travels_in_network_order(ends: &mut Ends) {
        let link = ends.link();
        for (id, len) in [(1, 0), (2, 12)] {
            let elements = [link.a_mem.sge(0, len)];
            ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, 64)])]);
            ends.a.post_send(link.a, &[Request::send_imm(&elements, 0x0102_0304).id(id)]);
            let received = ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            assert_eq!(received.opcode(), WcOpcode::Recv);
            assert_eq!(received.imm, Some(0x0102_0304));
            assert_eq!(received.byte_len as usize, len);
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
    }

    /// The elements of both sides cut the same bytes differently.
    fn elements_are_gathered_and_scattered(ends: &mut Ends) {
        let link = ends.link();
        let bytes = pattern(1, 300);
        for (offset, part) in [(1000, 0..50), (0, 50..53), (500, 53..300)] {
            ends.a.store(link.a_mem, offset, &bytes[part]);
        }
        ends.b.fill(link.b_mem, 0xEE);
        let scattered = [(9000, 1), (0, 0), (4000, 200), (1, 500)];
        let scattered = scattered.map(|(offset, len)| link.b_mem.sge(offset, len));
        let gathered = [(1000, 50), (0, 3), (7, 0), (500, 247)];
        let gathered = gathered.map(|(offset, len)| link.a_mem.sge(offset, len));
        ends.b.post_recv(link.b, &[Recv::new(1, &scattered)]);
        ends.a.post_send(link.a, &[Request::send(&gathered).id(2)]);
        let received = ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(received.byte_len, 300);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        assert_eq!(ends.b.load(link.b_mem, 9000, 1), bytes[..1]);
        assert_eq!(ends.b.load(link.b_mem, 4000, 200), bytes[1..201]);
        assert_eq!(ends.b.load(link.b_mem, 1, 99), bytes[201..]);
        assert_eq!(ends.b.load(link.b_mem, 100, 401), [0xEE; 401]);
    }

    fn messages_arrive_in_order(ends: &mut Ends) {
        let link = ends.link();
        let receives: Vec<Recv> = (0..16)
            .map(|id| Recv::new(id, &[link.b_mem.sge(id as usize * 8, 8)]))
            .collect();
        for round in 0..4 {
            ends.b.post_recv(link.b, &receives);
            let sends: Vec<Request> = (0..16_u32)
                .map(|id| Request::send_imm(&[link.a_mem.sge(0, 8)], id).id(id.into()))
                .collect();
            let (first, rest) = sends.split_at(5 + round);
            ends.a.post_send(link.a, first);
            ends.a.post_send(link.a, rest);
            for id in 0..16_u32 {
                let received = ends.b.expect(link.b, Queue::Recv, id.into(), WcStatus::Success);
                assert_eq!(received.imm, Some(id));
            }
            for id in 0..16 {
                ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
            }
        }
    }

    /// The keys of elements without bytes are not looked at.
    fn an_empty_message_needs_no_memory(ends: &mut Ends) {
        let link = ends.link();
        let mut nowhere = link.a_mem.sge(0, 0);
        (nowhere.addr, nowhere.lkey) = (8, 0xdead_beef);
        for elements in [&[][..], &[nowhere], &[nowhere, nowhere]] {
            ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
            ends.a.post_send(link.a, &[Request::send(elements).id(2)]);
            let received = ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
            assert_eq!(received.byte_len, 0);
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        }
    }

    /// Inline bytes are taken when they are posted, from anywhere.
    fn an_inline_buffer_can_be_reused_at_once(ends: &mut Ends) {
        let link = ends.link();
        let len = link.a.max_inline_data.min(64);
        let (first, second) = (pattern(1, len), pattern(2, len));
        let mut element = link.a_mem.sge(0, len);
        element.lkey = 0xdead_beef;
        ends.a.store(link.a_mem, 0, &first);
        ends.a.post_send(link.a, &[Request::send(&[element]).inline().id(1)]);
        ends.a.store(link.a_mem, 0, &second);
        ends.b.post_recv(link.b, &[Recv::new(2, &[link.b_mem.sge(0, len)])]);
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        assert_eq!(ends.b.load(link.b_mem, 0, len), first);
    }

    /// Memory of another protection domain will do for inline bytes too, and several elements.
    fn inline_elements_need_no_key(ends: &mut Ends) {
        let link = ends.link();
        let other = ends.a.alloc_pd();
        let foreign = ends.a.register(other, 4096, ALL_ACCESS);
        ends.a.store(foreign, 0, b"inline");
        let elements = [foreign.sge(0, 2), foreign.sge(2, 4)];
        ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 6)])]);
        ends.a.transfer(link.a, Request::send(&elements).inline());
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(ends.b.load(link.b_mem, 0, 6), b"inline");
    }

    fn too_much_inline_data_is_refused(ends: &mut Ends) {
        let link = ends.link();
        let element = link.a_mem.sge(0, link.a.max_inline_data + 1);
        let refused = ends.a.try_post_send(link.a, &[Request::send(&[element]).inline()]);
        crate::support::assert_refused(&refused, libc::EINVAL, 0);
        let half = link.a_mem.sge(0, link.a.max_inline_data / 2 + 1);
        let refused = ends.a.try_post_send(link.a, &[Request::send(&[half, half]).inline()]);
        crate::support::assert_refused(&refused, libc::EINVAL, 0);
        assert_eq!(ends.a.state(link.a), QpState::Rts);
    }

    /// The receiver has what does not fit as its error, the sender as an invalid request.
    fn a_message_longer_than_its_receive_fails_at_both_ends(ends: &mut Ends) {
        for elements in [1, 2] {
            let link = ends.link();
            ends.b.fill(link.b_mem, 0xEE);
            let element = link.b_mem.sge(0, 100 / elements);
            ends.b.post_recv(link.b, &[Recv::new(1, &vec![element; elements]), Recv::new(2, &[])]);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 101)]).id(3)]);
            // rdma_rxe has other names for it.
            let (receiver, sender): (&[_], &[_]) = match ends.is_software() {
                true => (&[WcStatus::LocLenErr], &[WcStatus::RemInvReqErr]),
                false => (
                    &[WcStatus::LocLenErr, WcStatus::LocQpOpErr, WcStatus::RemInvReqErr],
                    &[WcStatus::RemInvReqErr, WcStatus::RemOpErr],
                ),
            };
            ends.b.expect_one_of(link.b, Queue::Recv, 1, receiver);
            ends.b.expect(link.b, Queue::Recv, 2, WcStatus::WrFlushErr);
            ends.a.expect_one_of(link.a, Queue::Send, 3, sender);
            ends.a.await_state(link.a, QpState::Err);
            ends.b.await_state(link.b, QpState::Err);
            let beyond = ends.b.load(link.b_mem, 100, REGION - 100);
            assert!(beyond.iter().all(|byte| *byte == 0xEE));
        }
    }

    /// Without a receive, a sender that may not repeat fails at once; the receiver is none the
    /// worse.
    fn a_sender_without_patience_needs_a_receive(ends: &mut Ends) {
        for rnr_retry in [0, 1] {
            let impatient = QpSetup { rnr_retry, ..QpSetup::default() };
            let link = ends.link_with(impatient, QpSetup::default());
            let message = Request::send(&[link.a_mem.sge(0, 8)]);
            ends.a.post_send(link.a, &[message.clone().id(1), message.id(2)]);
            ends.a.expect(link.a, Queue::Send, 1, WcStatus::RnrRetryExcErr);
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::WrFlushErr);
            ends.a.await_state(link.a, QpState::Err);
            assert_eq!(ends.b.state(link.b), QpState::Rts);
            ends.b.assert_idle(link.b, Queue::Recv);
        }
    }

    fn a_patient_sender_waits_for_a_receive(ends: &mut Ends) {
        let link = ends.link();
        ends.a.store(link.a_mem, 0, b"patience");
        let message = Request::send(&[link.a_mem.sge(0, 8)]);
        ends.a.post_send(link.a, &[message.clone().id(1), message.id(2)]);
        ends.a.assert_idle(link.a, Queue::Send);
        ends.b.assert_idle(link.b, Queue::Recv);
        for id in 1..=2 {
            ends.b.post_recv(link.b, &[Recv::new(10 + id, &[link.b_mem.sge(0, 8)])]);
            ends.b.expect(link.b, Queue::Recv, 10 + id, WcStatus::Success);
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
            if id == 1 {
                ends.a.assert_idle(link.a, Queue::Send);
            }
        }
        assert_eq!(ends.b.load(link.b_mem, 0, 8), b"patience");
    }

    /// Receives posted before the queue pair is ready to receive are good.
    fn receives_may_be_posted_in_init(ends: &mut Ends) {
        let (a, b) = (
            ends.a.create_qp(QpSetup::default()),
            ends.b.create_qp(QpSetup::default()),
        );
        let memory = ends.b.register(0, 4096, ALL_ACCESS);
        ends.a.init(a);
        ends.b.init(b);
        ends.b.post_recv(b, &[Recv::new(1, &[memory.sge(0, 8)])]);
        ends.connect_from_init(a, b);
        ends.a.transfer(a, Request::send(&[]).id(2));
        ends.b.expect(b, Queue::Recv, 1, WcStatus::Success);
    }

    /// Long messages wait for their receives as short ones do, all that fit into the queue.
    fn long_messages_wait_for_receives(ends: &mut Ends) {
        const LEN: usize = 200_000;
        let (a, b) = ends.connect(QpSetup::default(), QpSetup::default());
        let at_a = ends.a.register(0, 16 * LEN, ALL_ACCESS);
        let at_b = ends.b.register(0, 16 * LEN, ALL_ACCESS);
        ends.a.store(at_a, 0, &pattern(1, 16 * LEN));
        let list: Vec<Request> = (0..16)
            .map(|i| Request::send(&[at_a.sge(i * LEN, LEN)]).id(i as u64))
            .collect();
        ends.a.post_send(a, &list);
        ends.a.assert_idle(a, Queue::Send);
        for i in 0..16 {
            ends.b.post_recv(b, &[Recv::new(i as u64, &[at_b.sge(i * LEN, LEN)])]);
        }
        for i in 0..16 {
            ends.b.expect(b, Queue::Recv, i, WcStatus::Success);
            ends.a.expect(a, Queue::Send, i, WcStatus::Success);
        }
        assert!(ends.b.load(at_b, 0, 16 * LEN) == pattern(1, 16 * LEN));
    }

    /// A sender whose peer is still on its way up repeats until it is there.
    fn a_peer_may_become_ready_later(ends: &mut Ends) {
        let (a, b) = (
            ends.a.create_qp(QpSetup::default()),
            ends.b.create_qp(QpSetup::default()),
        );
        ends.a.init(a);
        ends.b.init(b);
        let (at_a, at_b) = (ends.a.endpoint(a), ends.b.endpoint(b));
        ends.a.to_rtr(a, at_b);
        ends.a.to_rts(a);
        ends.a.post_send(a, &[Request::send(&[]).id(1)]);
        ends.a.assert_idle(a, Queue::Send);
        ends.b.post_recv(b, &[Recv::new(2, &[])]);
        ends.b.to_rtr(b, at_a);
        ends.a.expect(a, Queue::Send, 1, WcStatus::Success);
        ends.b.expect(b, Queue::Recv, 2, WcStatus::Success);
    }

    /// To be written to and sent to, a queue pair need not be able to send.
    fn a_receiver_need_not_be_able_to_send(ends: &mut Ends) {
        let (a, b) = (
            ends.a.create_qp(QpSetup::default()),
            ends.b.create_qp(QpSetup::default()),
        );
        ends.a.init(a);
        ends.b.init(b);
        let (at_a, at_b) = (ends.a.endpoint(a), ends.b.endpoint(b));
        ends.b.to_rtr(b, at_a);
        ends.a.to_rtr(a, at_b);
        ends.a.to_rts(a);
        let (here, there) =
            (ends.a.register(0, 4096, ALL_ACCESS), ends.b.register(0, 4096, ALL_ACCESS));
        ends.a.store(here, 0, b"ready");
        ends.a.transfer(a, Request::write(&[here.sge(0, 5)], there.at(0)));
        assert_eq!(ends.b.load(there, 0, 5), b"ready");
        ends.b.post_recv(b, &[Recv::new(1, &[there.sge(8, 5)])]);
        ends.a.transfer(a, Request::send(&[here.sge(0, 5)]));
        ends.b.expect(b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(ends.b.load(there, 8, 5), b"ready");
        assert_eq!(ends.b.state(b), QpState::Rtr);
    }

    /// Requests posted while sending is stopped wait; receiving goes on.
    fn a_stopped_queue_pair_keeps_its_requests(ends: &mut Ends) {
        let link = ends.link();
        ends.a.fill(link.a_mem, 0xAA);
        let write = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0));
        ends.a.transfer(link.a, write.clone());
        ends.a.pause(link.a);
        ends.b.store_word(link.b_mem, 0, 0);
        ends.a.post_send(link.a, &[write.clone().id(1)]);
        ends.a.assert_idle(link.a, Queue::Send);
        assert_eq!(ends.b.load_word(link.b_mem, 0), 0);
        ends.a.post_recv(link.a, &[Recv::new(2, &[])]);
        ends.b.transfer(link.b, Request::send(&[]));
        ends.a.expect(link.a, Queue::Recv, 2, WcStatus::Success);
        ends.a.resume(link.a);
        ends.a.post_send(link.a, &[write.id(3)]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        ends.a.expect(link.a, Queue::Send, 3, WcStatus::Success);
        assert_eq!(ends.b.load_word(link.b_mem, 0), 0xAAAA_AAAA_AAAA_AAAA);
    }

    /// A queue pair that failed works again after it was reset and connected anew.
    fn a_failed_connection_can_be_made_again(ends: &mut Ends) {
        let impatient = QpSetup { rnr_retry: 0, ..QpSetup::default() };
        let link = ends.link_with(impatient, QpSetup::default());
        for round in 0..3 {
            ends.a.post_send(link.a, &[Request::send(&[]).id(round)]);
            ends.a.expect(link.a, Queue::Send, round, WcStatus::RnrRetryExcErr);
            ends.a.reset(link.a);
            ends.b.reset(link.b);
            assert_eq!(ends.a.state(link.a), QpState::Reset);
            ends.connect_again(link.a, link.b);
            ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 8)])]);
            ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(2));
            ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        }
    }

    fn many_messages_stay_intact(ends: &mut Ends) {
        let link = ends.link();
        for round in 0..30 {
            let len = 1 + round * 37 % 500;
            for slot in 0..16 {
                let element = link.b_mem.sge(slot * 1024, 1024);
                ends.b.post_recv(link.b, &[Recv::new(slot as u64, &[element])]);
                ends.a.store(link.a_mem, slot * 1024, &pattern(round + slot, len));
            }
            let sends: Vec<Request> = (0..16)
                .map(|slot| Request::send(&[link.a_mem.sge(slot * 1024, len)]).id(slot as u64))
                .collect();
            ends.a.post_send(link.a, &sends);
            for slot in 0..16 {
                let id = slot as u64;
                let received = ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
                assert_eq!(received.byte_len as usize, len);
                ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
                let bytes = ends.b.load(link.b_mem, slot * 1024, len);
                assert_eq!(bytes, pattern(round + slot, len), "round {round}, slot {slot}");
            }
        }
    }
}
