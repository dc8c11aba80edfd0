//! Rings that come late, and the events that a program counts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{ARMED_ANY, ARMED_NOT, ARMED_SOLICITED, Cq};
use crate::ffi::*;
use crate::{
    AccessFlags, CompletionChannel, CompletionQueue, Context, PathOptions, QpAttrMask, QueuePair,
    QueuePairInit, WorkCompletion, find_device,
};

const ROOM: u32 = 16;

/// A queue pair whose receives complete on a queue with a channel, and its sends on one without.
struct Side {
    channel: CompletionChannel,
    received: CompletionQueue,
    sent: CompletionQueue,
    qp: QueuePair,
}

impl Side {
    fn new(context: &Context) -> Self {
        let channel = context.create_comp_channel().unwrap();
        let received = context.create_cq(ROOM, Some(&channel)).unwrap();
        let sent = context.create_cq(ROOM, None).unwrap();
        let init = QueuePairInit {
            max_send_wr: ROOM,
            max_recv_wr: ROOM,
            ..QueuePairInit::new(&sent, &received)
        };
        let qp = context.alloc_pd().unwrap().create_qp(&init).unwrap();
        Self {
            channel,
            received,
            sent,
            qp,
        }
    }

    fn cq(&self) -> &Cq {
        // SAFETY: the handle of a queue of this device leads it, and lives as long.
        unsafe { &*self.received.as_raw().cast::<Cq>() }
    }

    fn arm(&self) {
        self.received.req_notify(false).unwrap();
    }

    fn arm_for_solicited(&self) {
        self.received.req_notify(true).unwrap();
    }

    /// One more event is there.
    fn expect_event(&self) {
        let event = self.channel.try_get_event().unwrap();
        assert!(event.expect("no event").is_of(&self.received));
    }

    fn expect_no_event(&self) {
        let event = self.channel.try_get_event().unwrap();
        assert!(event.is_none(), "an event too many");
    }

    /// One more completion is there, and no other.
    fn expect_received(&self) {
        let mut found = <[WorkCompletion; 2]>::default();
        assert_eq!(self.received.poll(&mut found).unwrap(), 1);
        assert!(found[0].is_ok());
    }

    fn post_recv(&self) {
        let mut request = ibv_recv_wr::zeroed();
        // SAFETY: a list of one request without elements.
        unsafe { self.qp.post_recv(&raw mut request) }.unwrap();
    }

    fn post(&self, opcode: u32, flags: u32) {
        let mut request = ibv_send_wr::zeroed();
        (request.opcode, request.send_flags) = (opcode, flags);
        // SAFETY: as above.
        unsafe { self.qp.post_send(&raw mut request) }.unwrap();
    }

    /// Sends an empty message to a peer of this process, which has it at once.
    fn send(&self, to: &Self, flags: u32) {
        to.post_recv();
        self.post(IBV_WR_SEND, IBV_SEND_SIGNALED | flags);
        let mut found = [WorkCompletion::default()];
        while self.sent.poll(&mut found).unwrap() == 0 {
            std::thread::yield_now();
        }
        assert!(found[0].is_ok());
    }

    /// As [`send`](Self::send), by somebody who is interrupted before the ring. The ring is left to the caller.
    fn send_silently(&self, to: &Self, flags: u32) {
        let armed = &to.cq().cq_bell().armed;
        let before = armed.swap(ARMED_NOT, Ordering::SeqCst);
        self.send(to, flags);
        armed.store(before, Ordering::SeqCst);
    }
}

fn connect(context: &Context, sides: [&Side; 2]) {
    let path = PathOptions {
        gid_index: context.choose_gid(1).unwrap().0,
        ..PathOptions::default()
    };
    let ends = sides.map(|side| side.qp.endpoint(&path, 1).unwrap());
    for (side, peer) in sides.iter().zip(ends.iter().rev()) {
        side.qp.to_init(AccessFlags::all(), 1).unwrap();
        side.qp.to_rtr(peer, &path).unwrap();
        side.qp.to_rts(1, &path).unwrap();
    }
}

/// Two connected sides.
fn pair() -> (Context, Side, Side) {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let (a, b) = (Side::new(&context), Side::new(&context));
    connect(&context, [&a, &b]);
    (context, a, b)
}

/// A peer disarms the queue before it rings.
#[test]
fn one_who_is_killed_before_its_ring_keeps_nobody_asleep() {
    let (_context, a, b) = pair();
    b.arm();
    a.send_silently(&b, 0);
    b.cq().cq_bell().armed.store(ARMED_NOT, Ordering::SeqCst);
    b.expect_no_event();
    b.cq().ring_for_the_dead();
    b.expect_event();
    b.expect_received();
    b.arm();
    b.cq().ring_for_the_dead();
    b.expect_no_event();
    a.send(&b, 0);
    b.expect_event();
}

#[test]
fn a_ring_for_what_came_before_the_arming_is_no_event() {
    let (_context, a, b) = pair();
    b.arm();
    for _ in 0..3 {
        a.send(&b, 0);
        b.expect_event();
        // As programs do that take each event for one completion.
        b.arm();
        b.cq().wake(false);
        b.expect_received();
        b.expect_no_event();
        b.cq().wake(false);
        b.expect_no_event();
    }
    a.send(&b, 0);
    b.expect_event();
    b.cq().wake(false);
    b.expect_no_event();
}

#[test]
fn a_ring_behind_the_event_it_was_for_is_none() {
    let (_context, a, b) = pair();
    b.arm();
    b.cq().wake(false);
    b.arm();
    a.send(&b, 0);
    // Two have rung. The first has found what came; the second has nothing left.
    b.expect_event();
    b.expect_no_event();
    b.expect_received();
    b.arm();
    b.cq().wake(false);
    b.expect_no_event();
    a.send(&b, 0);
    b.expect_event();
    b.expect_no_event();
}

#[test]
fn each_arming_has_the_event_that_it_is_due() {
    let (_context, a, b) = pair();
    for has_rung in [true, false] {
        b.arm();
        if has_rung {
            a.send(&b, 0);
        } else {
            a.send_silently(&b, 0);
        }
        b.expect_received();
        b.arm();
        // Late, if that has not been done before.
        b.cq().wake(false);
        b.expect_event();
        b.expect_no_event();
        a.send(&b, 0);
        b.expect_event();
        b.expect_no_event();
        b.expect_received();
    }
}

#[test]
fn solicited_events_are_neither_lost_nor_of_others() {
    let (_context, a, b) = pair();
    b.arm_for_solicited();
    a.send(&b, 0);
    b.expect_received();
    b.arm_for_solicited();
    b.expect_no_event();
    a.send(&b, IBV_SEND_SOLICITED);
    b.expect_received();
    // Of the arming before this one.
    b.arm_for_solicited();
    b.expect_event();
    b.expect_no_event();
    b.cq().wake(true);
    b.expect_no_event();
    a.send_silently(&b, IBV_SEND_SOLICITED);
    b.expect_received();
    b.arm_for_solicited();
    assert_eq!(
        b.cq().cq_bell().armed.load(Ordering::SeqCst),
        ARMED_SOLICITED
    );
    b.cq().wake(true);
    b.expect_event();
    b.expect_no_event();
}

#[test]
fn a_wider_arming_outlasts_a_false_ring() {
    let (_context, a, b) = pair();
    b.arm();
    b.cq().wake(false);
    b.arm_for_solicited();
    b.expect_no_event();
    assert_eq!(b.cq().cq_bell().armed.load(Ordering::SeqCst), ARMED_ANY);
    a.send(&b, 0);
    b.expect_event();
    b.expect_no_event();
}

#[test]
fn nobody_sleeps_over_a_completion() {
    let (_context, a, b) = pair();
    a.send(&b, 0);
    b.arm();
    b.expect_no_event();
    b.cq().wake(false);
    b.expect_event();
}

/// What is no completion is no reason for an event, and one that has gone with its connection is.
#[test]
fn completions_count_and_nothing_else() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let channel = context.create_comp_channel().unwrap();
    let cq = context.create_cq(ROOM, Some(&channel)).unwrap();
    let sides = [(); 2].map(|()| {
        let init = QueuePairInit {
            max_send_wr: ROOM,
            max_recv_wr: ROOM,
            ..QueuePairInit::new(&cq, &cq)
        };
        Side {
            channel: channel.clone(),
            received: cq.clone(),
            sent: cq.clone(),
            qp: context.alloc_pd().unwrap().create_qp(&init).unwrap(),
        }
    });
    let [a, b] = &sides;
    let armed = &a.cq().cq_bell().armed;
    let write_silently = |flags| {
        let before = armed.swap(ARMED_NOT, Ordering::SeqCst);
        a.post(IBV_WR_RDMA_WRITE, flags);
        armed.store(before, Ordering::SeqCst);
    };
    let connect_anew = || {
        for side in [a, b] {
            let mut attr = ibv_qp_attr::zeroed();
            attr.qp_state = IBV_QPS_RESET;
            side.qp.modify(&attr, QpAttrMask::STATE).unwrap();
        }
        connect(&context, [a, b]);
    };
    connect_anew();
    for _ in 0..3 {
        a.arm();
        for _ in 0..3 {
            write_silently(0);
            a.cq().wake(false);
            a.expect_no_event();
        }
        write_silently(IBV_SEND_SIGNALED);
        connect_anew();
        a.cq().wake(false);
        a.expect_event();
        a.expect_no_event();
    }
    // As many as there were before they were emptied.
    write_silently(IBV_SEND_SIGNALED);
    a.expect_received();
    a.arm();
    connect_anew();
    a.cq().wake(false);
    a.expect_no_event();
    write_silently(IBV_SEND_SIGNALED);
    a.expect_received();
    // Its place is taken by one that waits for a receive.
    for _ in 0..ROOM {
        a.post(IBV_WR_SEND, 0);
    }
    a.cq().wake(false);
    a.expect_event();
}

/// Both ends sleep for each message, and take each event for one; others ring all the time.
#[test]
fn events_are_as_many_as_completions_however_much_is_rung() {
    const ROUNDS: u32 = 2_000;
    let (_context, a, b) = pair();
    let over = AtomicBool::new(false);
    let receive = |side: &Side| {
        // Much longer than anything that works takes.
        let event = side.channel.wait_timeout(Duration::from_secs(120));
        drop(event.unwrap().expect("a wake-up was lost"));
        side.arm();
        side.expect_received();
    };
    a.arm();
    b.arm();
    std::thread::scope(|scope| {
        let ringer = scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                for side in [&a, &b] {
                    side.cq().wake(false);
                }
                std::thread::yield_now();
            }
        });
        let answers = scope.spawn(|| {
            for _ in 0..ROUNDS {
                receive(&b);
                b.send(&a, 0);
            }
        });
        for _ in 0..ROUNDS {
            a.send(&b, 0);
            receive(&a);
        }
        answers.join().unwrap();
        over.store(true, Ordering::Relaxed);
        ringer.join().unwrap();
    });
    a.expect_no_event();
    b.expect_no_event();
}
