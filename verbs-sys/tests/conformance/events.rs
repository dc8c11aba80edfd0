//! Completion channels.

use std::thread;

use verbs_sys::{WcStatus, ffi};

use crate::support::{Command, Ends, QpSetup, Queue, Recv, Request, scripts};

scripts! {
    /// A request posted after arming, while the peer's program does nothing, or nothing more.
    fn a_request_posted_after_arming_is_an_event(ends: &mut Ends) {
        for (one_cq, looks) in [(false, false), (false, true), (true, false), (true, true)] {
            let setup = QpSetup { one_cq, ..QpSetup::default() };
            let link = ends.link_with(setup, setup);
            ends.b.post_recv(link.b, &[Recv::new(1, &[link.b_mem.sge(0, 64)])]);
            ends.a.arm(link.a, Queue::Send, false);
            ends.a.assert_idle(link.a, Queue::Send);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 64)]).id(2)]);
            if looks {
                ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
            }
            assert_eq!(ends.a.wait_event(), (link.a.num, Queue::Send));
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
        }
    }

    /// One event for one request for events, at the next completion.
    fn an_armed_queue_makes_one_event(ends: &mut Ends) {
        let link = ends.link();
        let request = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0));
        ends.a.transfer(link.a, request.clone());
        ends.a.assert_no_event();
        for _ in 0..3 {
            ends.a.arm(link.a, Queue::Send, false);
            ends.a.assert_no_event();
            ends.a.post_send(link.a, &[request.clone(), request.clone()]);
            assert_eq!(ends.a.wait_event(), (link.a.num, Queue::Send));
            ends.a.expect(link.a, Queue::Send, 0, WcStatus::Success);
            ends.a.expect(link.a, Queue::Send, 0, WcStatus::Success);
            ends.a.transfer(link.a, request.clone());
            ends.a.assert_no_event();
        }
    }

    /// Completions that are already there make no event; so one polls after asking.
    fn completions_from_before_make_no_event(ends: &mut Ends) {
        let link = ends.link();
        ends.b.post_recv(link.b, &[Recv::new(1, &[]), Recv::new(2, &[])]);
        ends.a.transfer(link.a, Request::send(&[]));
        ends.b.arm(link.b, Queue::Recv, false);
        ends.b.assert_no_event();
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
        ends.a.transfer(link.a, Request::send(&[]));
        assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
    }

    /// Nor does one that a poll behind the event finds.
    fn a_completion_is_told_of_once(ends: &mut Ends) {
        for one_cq in [false, true] {
            let setup = QpSetup { one_cq, ..QpSetup::default() };
            let link = ends.link_with(setup, setup);
            for id in 0..10 {
                ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, 64)])]);
                ends.a.arm(link.a, Queue::Send, false);
                ends.a.assert_idle(link.a, Queue::Send);
                ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 64)]).id(id)]);
                ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
                assert_eq!(ends.a.wait_event(), (link.a.num, Queue::Send));
                ends.a.arm(link.a, Queue::Send, false);
                ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
                ends.a.assert_no_event();
            }
        }
    }

    /// A message has been acknowledged before its receiver can answer it.
    fn a_send_is_told_of_before_its_answer(ends: &mut Ends) {
        let link = ends.link();
        for id in 0..50 {
            ends.a.post_recv(link.a, &[Recv::new(id, &[link.a_mem.sge(0, 8)])]);
            ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, 8)])]);
            ends.a.arm(link.a, Queue::Send, false);
            ends.a.arm(link.a, Queue::Recv, false);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(64, 8)]).id(id)]);
            ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            ends.b.post_send(link.b, &[Request::send(&[link.b_mem.sge(64, 8)]).id(id)]);
            for queue in [Queue::Send, Queue::Recv] {
                assert_eq!(ends.a.wait_event(), (link.a.num, queue));
                ends.a.expect(link.a, queue, id, WcStatus::Success);
            }
            ends.b.expect(link.b, Queue::Send, id, WcStatus::Success);
        }
    }

    /// A sleeping receiver is woken, and so is the sender that waits for it.
    fn sleepers_are_woken(ends: &mut Ends) {
        let link = ends.link();
        for id in 0..20 {
            ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, 100)])]);
            ends.b.arm(link.b, Queue::Recv, false);
            ends.a.arm(link.a, Queue::Send, false);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 100)]).id(id)]);
            assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
            ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            assert_eq!(ends.a.wait_event(), (link.a.num, Queue::Send));
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
    }

    /// A sender asleep is woken by the receive that it waits for, with the receiver awake.
    fn a_late_receive_wakes_the_sender(ends: &mut Ends) {
        let link = ends.link();
        ends.a.arm(link.a, Queue::Send, false);
        ends.a.post_send(link.a, &[Request::send(&[]).id(1)]);
        ends.a.assert_no_event();
        ends.b.post_recv(link.b, &[Recv::new(2, &[])]);
        assert_eq!(ends.a.wait_event(), (link.a.num, Queue::Send));
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
    }

    fn solicited_only_waits_for_a_solicited_message(ends: &mut Ends) {
        let link = ends.link();
        let target = link.b_mem.at(0);
        let plain = [Request::send(&[]), Request::write_imm(&[], target, 1)];
        let solicited = plain.clone().map(Request::solicited);
        for (plain, solicited) in plain.into_iter().zip(solicited) {
            ends.b.post_recv(link.b, &[Recv::new(1, &[]), Recv::new(2, &[])]);
            ends.b.arm(link.b, Queue::Recv, true);
            ends.a.transfer(link.a, plain);
            ends.b.expect(link.b, Queue::Recv, 1, WcStatus::Success);
            ends.b.assert_no_event();
            ends.a.transfer(link.a, solicited.clone());
            assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
            ends.b.expect(link.b, Queue::Recv, 2, WcStatus::Success);
            // One event for one request for it.
            ends.b.post_recv(link.b, &[Recv::new(3, &[])]);
            ends.a.transfer(link.a, solicited);
            ends.b.expect(link.b, Queue::Recv, 3, WcStatus::Success);
            ends.b.assert_no_event();
        }
    }

    /// The success of a send is never solicited.
    fn solicited_only_ignores_sends_that_succeed(ends: &mut Ends) {
        let link = ends.link();
        ends.a.arm(link.a, Queue::Send, true);
        ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
        ends.a.transfer(link.a, Request::send(&[]).solicited());
        ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)));
        ends.a.assert_no_event();
    }

    /// Errors are always worth an event. rdma_rxe leaves it at those of receives.
    fn errors_count_as_solicited(ends: &mut Ends) {
        let impatient = QpSetup { rnr_retry: 0, ..QpSetup::default() };
        let link = ends.link_with(impatient, QpSetup::default());
        ends.a.arm(link.a, Queue::Send, true);
        ends.a.post_send(link.a, &[Request::send(&[]).id(1)]);
        if ends.is_software() {
            assert_eq!(ends.a.wait_event(), (link.a.num, Queue::Send));
        }
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::RnrRetryExcErr);
        ends.b.post_recv(link.b, &[Recv::new(2, &[])]);
        ends.b.arm(link.b, Queue::Recv, true);
        ends.b.fail(link.b);
        assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
        ends.b.expect(link.b, Queue::Recv, 2, WcStatus::WrFlushErr);
    }

    /// A weaker request for events does not take back a stronger one.
    fn asking_for_less_does_not_disarm(ends: &mut Ends) {
        let link = ends.link();
        ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
        ends.b.arm(link.b, Queue::Recv, false);
        ends.b.arm(link.b, Queue::Recv, true);
        ends.a.transfer(link.a, Request::send(&[]));
        assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
    }

    /// Queues share a channel; the event says which it was.
    fn an_event_names_its_queue(ends: &mut Ends) {
        let links = [ends.link(), ends.link(), ends.link()];
        for link in links {
            ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
            ends.b.arm(link.b, Queue::Recv, false);
            ends.b.arm(link.b, Queue::Send, false);
        }
        for link in [links[1], links[2], links[0]] {
            ends.a.transfer(link.a, Request::send(&[]));
            assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
        }
        ends.b.transfer(links[1].b, Request::write(&[], links[1].a_mem.at(0)));
        assert_eq!(ends.b.wait_event(), (links[1].b.num, Queue::Send));
        ends.b.assert_no_event();
    }

    /// A peer's failure wakes whoever sleeps on its receives.
    fn a_refused_access_wakes_the_target(ends: &mut Ends) {
        let link = ends.link();
        ends.b.post_recv(link.b, &[Recv::new(1, &[])]);
        ends.b.arm(link.b, Queue::Recv, false);
        let mut wrong = link.b_mem.at(0);
        wrong.rkey ^= 1 << 8;
        ends.a.post_send(link.a, &[Request::write(&[link.a_mem.sge(0, 8)], wrong).id(2)]);
        assert_eq!(ends.b.wait_event(), (link.b.num, Queue::Recv));
        ends.b.expect(link.b, Queue::Recv, 1, WcStatus::WrFlushErr);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::RemAccessErr);
    }

    /// However many queues are on one channel, each event is of the right one, and none is lost.
    fn many_queues_share_a_channel(ends: &mut Ends) {
        let links = [(); 16].map(|()| ends.link());
        for round in 0..3 {
            for link in links {
                ends.b.post_recv(link.b, &[Recv::new(round, &[])]);
                ends.b.arm(link.b, Queue::Recv, round == 1);
            }
            // Every one, in another order than they were made in.
            for turn in 0..16 {
                let link = links[(turn * 7 + 3) % 16];
                ends.a.transfer(link.a, Request::send(&[]).solicited());
            }
            let mut named: Vec<u32> = (0..16)
                .map(|_| match ends.b.wait_event() {
                    (num, Queue::Recv) => num,
                    other => panic!("an event of {other:?}"),
                })
                .collect();
            ends.b.assert_no_event();
            named.sort_unstable();
            let mut all = links.map(|link| link.b.num);
            all.sort_unstable();
            assert_eq!(named, all);
            for link in links {
                ends.b.expect(link.b, Queue::Recv, round, WcStatus::Success);
            }
        }
    }

    /// Arming and polling race with what arrives: whoever polls once more after arming, and sleeps if
    /// there is nothing, misses nothing.
    fn a_sleeper_misses_nothing(ends: &mut Ends) {
        let count = if ends.is_software() { 1_000 } else { 100 };
        for one_cq in [false, true] {
            let link = ends.link_with(QpSetup::default(), QpSetup { one_cq, ..QpSetup::default() });
            let Ends { a, b, .. } = ends;
            thread::scope(|scope| {
                let sleeper = scope.spawn(move || {
                    let () = b.call(Command::ReceiveAsleep { qp: link.b.id, count });
                });
                for number in 0..count {
                    a.transfer(link.a, Request::send_imm(&[], number).id(number.into()));
                    if number % 64 == 0 {
                        // Now and then it has the time to fall asleep.
                        thread::yield_now();
                    }
                }
                sleeper.join().expect("the sleeper failed");
            });
        }
    }

    /// Who polls once for each event misses nothing, given room for all that can have come.
    fn one_poll_for_an_event_is_enough(ends: &mut Ends) {
        const COUNT: u32 = 240;
        for qp_type in [ffi::IBV_QPT_RC, ffi::IBV_QPT_UC] {
            let setup = QpSetup {
                qp_type,
                max_send_wr: COUNT,
                max_recv_wr: COUNT,
                cqe: COUNT,
                ..QpSetup::default()
            };
            let link = ends.link_with(setup, setup);
            let receives: Vec<Recv> = (0..COUNT).map(|id| Recv::new(id.into(), &[])).collect();
            ends.b.post_recv(link.b, &receives);
            ends.b.arm(link.b, Queue::Recv, false);
            let list: Vec<Request> = (0..COUNT)
                .map(|number| Request::send_imm(&[], number).unsignaled())
                .collect();
            ends.a.post_send(link.a, &list);
            let all_is_there = ends.is_software() && !ends.answers_come_later();
            let polls: u32 = ends.b.call(Command::ReceiveByEvents { qp: link.b.id, count: COUNT });
            assert!(polls == 1 || !all_is_there, "{polls} polls");
        }
    }
}
