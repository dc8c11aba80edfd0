//! A process that goes away says nothing: its peers find out as on a wire, by requests that nobody answers.
//!
//! It is killed, or ends as a program does that gives back what it has.

use verbs_sys::{QpState, WcStatus, ffi};

use crate::support::{Ends, Link, QpSetup, Queue, Recv, Region, Request, say_left_out, scripts};

/// A way to go.
type Leave = fn(&mut Ends);

/// Makes two tests of a script in which the process of `b` leaves; each is run for both ways to go.
macro_rules! departures {
    ($($(#[$doc:meta])* fn $name:ident($ends:ident: &mut Ends, $leave:ident: Leave) $body:block)+) => {$(
        mod $name {
            use super::*;
            use $crate::support::{MemoryKind::{self, *}, Placement};

            $(#[$doc])*
            fn script($ends: &mut Ends, $leave: Leave) $body

            fn both_ways(memory: MemoryKind) {
                for leave in [Ends::kill_b, Ends::end_b] {
                    script(&mut Ends::open(Placement::TwoProcesses, memory), leave);
                }
            }

            #[test]
            fn two_processes_device_memory() {
                both_ways(Device);
            }

            #[test]
            fn two_processes_heap_memory() {
                both_ways(Heap);
            }
        }
    )+};
}

/// Gives up a peer that does not answer after some ten milliseconds, or on slow machines a few seconds.
fn hasty() -> QpSetup {
    QpSetup {
        timeout: 10,
        retry_cnt: 5,
        ..QpSetup::default()
    }
}

/// Has `b` leave while a message of `a` waits for a receive there, and waits until that one's queue pair knows:
/// nothing else will come to be known of it.
fn leave_for_good(ends: &mut Ends, leave: Leave) {
    let witness = ends.link_with(hasty(), QpSetup::default());
    let message = Request::send(&[witness.a_mem.sge(0, 8)]);
    ends.a.post_send(witness.a, &[message.id(77)]);
    leave(ends);
    ends.a
        .expect(witness.a, Queue::Send, 77, WcStatus::RetryExcErr);
}

/// Has `b` send all of its region in one message.
fn send_all(ends: &mut Ends, link: Link) {
    let all = link.b_mem.sge(0, link.b_mem.len);
    ends.b.post_send(
        link.b,
        &[Request::send(&[all]).id(1), Request::send(&[]).id(2)],
    );
}

fn all(region: Region) -> Recv {
    Recv::new(0, &[region.sge(0, region.len)])
}

/// Whether a message that nobody takes stays with its sender: where it goes through a socket, that may have taken
/// all of it.
fn stays_with_sender(ends: &Ends) -> bool {
    let stays = !ends.answers_come_later();
    if !stays {
        say_left_out();
    }
    stays
}

departures! {
    fn receives_stay_posted(ends: &mut Ends, leave: Leave) {
        let links = [(); 2].map(|()| ends.link());
        for (id, link) in (0..).zip(links) {
            ends.a.post_recv(link.a, &[Recv::new(id, &[]), Recv::new(id + 10, &[])]);
        }
        // One that has heard of its peer, and one that has not.
        ends.b.transfer(links[0].b, Request::send(&[]));
        ends.a.expect(links[0].a, Queue::Recv, 0, WcStatus::Success);
        leave_for_good(ends, leave);
        for link in links {
            ends.a.assert_idle(link.a, Queue::Recv);
            assert_eq!(ends.a.state(link.a), QpState::Rts);
        }
        ends.a.assert_no_async_event();
        // They were there all the time.
        for link in links {
            ends.a.fail(link.a);
        }
        ends.a.expect(links[0].a, Queue::Recv, 10, WcStatus::WrFlushErr);
        ends.a.expect(links[1].a, Queue::Recv, 1, WcStatus::WrFlushErr);
        ends.a.expect(links[1].a, Queue::Recv, 11, WcStatus::WrFlushErr);
    }

    /// What comes after the death is repeated, and what was under way before.
    fn requests_are_repeated_and_given_up(ends: &mut Ends, leave: Leave) {
        let links = [(); 4].map(|()| ends.link_with(hasty(), QpSetup::default()));
        for link in links {
            let request = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0));
            ends.a.transfer(link.a, request);
        }
        leave_for_good(ends, leave);
        for (kind, link) in links.into_iter().enumerate() {
            let here = link.a_mem.sge(0, 8);
            let request = [
                Request::write(&[here], link.b_mem.at(0)),
                Request::read(&[here], link.b_mem.at(0)),
                Request::fetch_add(here, link.b_mem.at(0), 1),
                Request::send(&[here]),
            ][kind].clone();
            ends.a.fill(link.a_mem, 0xAA);
            ends.a.post_recv(link.a, &[Recv::new(9, &[])]);
            ends.a.post_send(link.a, &[request.clone().id(1), request.clone().unsignaled().id(2)]);
            ends.a.expect(link.a, Queue::Send, 1, WcStatus::RetryExcErr);
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::WrFlushErr);
            ends.a.expect(link.a, Queue::Recv, 9, WcStatus::WrFlushErr);
            assert_eq!(ends.a.state(link.a), QpState::Err);
            ends.a.assert_filled(link.a_mem, 0xAA);
            ends.a.post_send(link.a, &[request.id(3)]);
            ends.a.expect(link.a, Queue::Send, 3, WcStatus::WrFlushErr);
        }
    }

    /// A time-out of 0 stands for ever, but that of a process which can be seen to be dead.
    fn nobody_waits_for_ever(ends: &mut Ends, leave: Leave) {
        if ends.leaves_out() {
            return;
        }
        let patient = QpSetup { timeout: 0, ..QpSetup::default() };
        let (posted, idle) = (
            ends.link_with(patient, QpSetup::default()),
            ends.link_with(patient, QpSetup::default()),
        );
        for link in [posted, idle] {
            ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0)));
        }
        ends.a.post_send(posted.a, &[Request::send(&[]).id(1)]);
        leave_for_good(ends, leave);
        ends.a.post_send(idle.a, &[Request::send(&[]).id(2)]);
        ends.a.expect(posted.a, Queue::Send, 1, WcStatus::RetryExcErr);
        ends.a.expect(idle.a, Queue::Send, 2, WcStatus::RetryExcErr);
    }

    fn who_sleeps_is_woken_in_the_end(ends: &mut Ends, leave: Leave) {
        let links = [(); 2].map(|()| ends.link_with(hasty(), QpSetup::default()));
        let [before, after] = links;
        ends.a.arm(before.a, Queue::Send, false);
        ends.a.post_send(before.a, &[Request::send(&[before.a_mem.sge(0, 8)]).id(1)]);
        ends.a.assert_idle(before.a, Queue::Send);
        leave(ends);
        assert_eq!(ends.a.wait_event(), (before.a.num, Queue::Send));
        ends.a.expect(before.a, Queue::Send, 1, WcStatus::RetryExcErr);
        ends.a.arm(after.a, Queue::Send, false);
        ends.a.post_send(after.a, &[Request::send(&[after.a_mem.sge(0, 8)]).id(2)]);
        assert_eq!(ends.a.wait_event(), (after.a.num, Queue::Send));
        ends.a.expect(after.a, Queue::Send, 2, WcStatus::RetryExcErr);
    }

    /// Without acknowledgements nobody ever finds out.
    fn unreliable_requests_succeed(ends: &mut Ends, leave: Leave) {
        let unreliable = QpSetup { qp_type: ffi::IBV_QPT_UC, ..QpSetup::default() };
        let link = ends.link_with(unreliable, unreliable);
        ends.a.transfer(link.a, Request::send(&[link.a_mem.sge(0, 8)]).id(1));
        leave_for_good(ends, leave);
        for round in 0..200 {
            let here = link.a_mem.sge(0, 2000);
            ends.a.transfer(link.a, Request::send(&[here]).id(round));
            ends.a.transfer(link.a, Request::write(&[here], link.b_mem.at(0)).id(round));
        }
        assert_eq!(ends.a.state(link.a), QpState::Rts);
    }

    /// Only part of it could have come.
    fn a_message_that_cannot_be_had_never_came(ends: &mut Ends, leave: Leave) {
        if !stays_with_sender(ends) {
            return;
        }
        let link = ends.link();
        send_all(ends, link);
        leave_for_good(ends, leave);
        ends.a.post_recv(link.a, &[all(link.a_mem), Recv::new(1, &[])]);
        ends.a.assert_idle(link.a, Queue::Recv);
        assert_eq!(ends.a.state(link.a), QpState::Rts);
        ends.a.assert_no_async_event();
        ends.a.fail(link.a);
        ends.a.expect(link.a, Queue::Recv, 0, WcStatus::WrFlushErr);
        ends.a.expect(link.a, Queue::Recv, 1, WcStatus::WrFlushErr);
    }

    /// A receive that such a message would have taken is another's.
    fn a_shared_receive_goes_to_the_living(ends: &mut Ends, leave: Leave) {
        if !stays_with_sender(ends) {
            return;
        }
        let srq = ends.a.create_srq(4, 1);
        let shared = QpSetup { srq: Some(srq.id), ..QpSetup::default() };
        let (dead, one, other) = (
            ends.link_with(shared, QpSetup::default()),
            ends.a.create_qp(shared),
            ends.a.create_qp(QpSetup::default()),
        );
        ends.a.connect_within(one, other);
        send_all(ends, dead);
        leave_for_good(ends, leave);
        // Both wait for a receive; the dead one's was the first.
        ends.a.assert_idle(dead.a, Queue::Recv);
        ends.a.post_send(other, &[Request::send_imm(&[], 5).id(3)]);
        ends.a.post_srq(srq, &[all(dead.a_mem)]);
        let got = ends.a.expect(one, Queue::Recv, 0, WcStatus::Success);
        assert_eq!(got.imm, Some(5));
        ends.a.expect(other, Queue::Send, 3, WcStatus::Success);
        ends.a.assert_idle(dead.a, Queue::Recv);
        assert_eq!(ends.a.state(dead.a), QpState::Rts);
        // The receives of later messages are where they were, and in order.
        ends.a.post_srq(srq, &[Recv::new(4, &[]), Recv::new(5, &[])]);
        for id in [4, 5] {
            ends.a.assert_idle(dead.a, Queue::Recv);
            ends.a.transfer(other, Request::send(&[]));
            ends.a.expect(one, Queue::Recv, id, WcStatus::Success);
        }
    }
}

scripts! {
    /// The process goes on, but its queue pair does not.
    fn a_message_of_a_queue_pair_that_has_left_never_came(ends: &mut Ends) {
        if !stays_with_sender(ends) {
            return;
        }
        for way in [crate::support::End::destroy, crate::support::End::reset, crate::support::End::fail] {
            let link = ends.link();
            send_all(ends, link);
            way(&mut ends.b, link.b);
            ends.b.fill(link.b_mem, 0xBB);
            ends.a.post_recv(link.a, &[all(link.a_mem)]);
            ends.a.assert_idle(link.a, Queue::Recv);
            assert_eq!(ends.a.state(link.a), QpState::Rts);
            ends.a.assert_zero_but(link.a_mem, 0..0);
        }
        ends.a.assert_no_async_event();
    }

    /// The sender's mistake is the sender's alone.
    fn a_sender_that_takes_its_memory_away_fails_by_itself(ends: &mut Ends) {
        if ends.leaves_out() || !stays_with_sender(ends) {
            return;
        }
        let link = ends.link();
        send_all(ends, link);
        ends.b.deregister(link.b_mem);
        ends.a.post_recv(link.a, &[all(link.a_mem)]);
        ends.b.expect(link.b, Queue::Send, 1, WcStatus::LocProtErr);
        ends.b.expect(link.b, Queue::Send, 2, WcStatus::WrFlushErr);
        ends.a.assert_idle(link.a, Queue::Recv);
        assert_eq!(ends.a.state(link.a), QpState::Rts);
    }
}
