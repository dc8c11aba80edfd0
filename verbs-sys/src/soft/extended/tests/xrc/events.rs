//! Events of a completion queue where receives of a shared receive queue complete.

use std::ptr;
use std::sync::atomic::Ordering;

use super::super::support::{World, made, poll};
use super::support::*;
use super::{CREATE, Pair};
use crate::ffi::*;
use crate::soft::PROVIDER;
use crate::soft::cq::Cq;
use crate::soft::layout::{ARMED_ANY, ARMED_NOT};
use crate::soft::link;

fn arm(cq: *mut ibv_cq) {
    // SAFETY: the queue is live.
    let code = unsafe { (*(*cq).context).ops.req_notify_cq.unwrap()(cq, 0) };
    assert_eq!(code, 0);
}

/// Whether there is an event, of a channel that does not block.
fn has_event(channel: *mut ibv_comp_channel, of: *mut ibv_cq) -> bool {
    let (mut cq, mut context) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: a live channel, and places for the results.
    let code = unsafe { (PROVIDER.get_cq_event)(channel, &raw mut cq, &raw mut context) };
    if code != 0 {
        let error = std::io::Error::last_os_error();
        assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        return false;
    }
    assert_eq!(cq, of);
    // SAFETY: the event's queue is live.
    unsafe { (PROVIDER.ack_cq_events)(cq, 1) };
    true
}

/// Also where a queue pair that completes elsewhere has taken the message.
#[test]
fn an_event_is_of_what_came_since_the_arming() {
    let world = World::open();
    let xrcd = open(&world, ANY, CREATE).unwrap();
    // SAFETY: the context is open.
    let channel = made(unsafe { (PROVIDER.create_comp_channel)(world.context) }).unwrap();
    // SAFETY: the channel is live and owns its descriptor.
    unsafe {
        assert_eq!(
            libc::fcntl((*channel).fd, libc::F_SETFL, libc::O_NONBLOCK),
            0
        );
    }
    let none = ptr::null_mut();
    // SAFETY: both are live.
    let cq = made(unsafe { (PROVIDER.create_cq)(world.context, 8, none, channel, 0) }).unwrap();
    let shared = Shared::with(&world, xrcd, cq);
    let pair = Pair::new(&world, xrcd);
    let send = || {
        shared.receive(1, 0, 1);
        pair.source.send(&pair.sender, shared.number, 1, 0, 0);
        assert_eq!(pair.sender.next().status, IBV_WC_SUCCESS);
    };
    // SAFETY: the handle of a queue of this device leads it, and lives as long.
    let queue = unsafe { &*cq.cast::<Cq>() };
    let bell = queue.cq_bell();
    let ring = || link::ring(bell, queue.bell().unwrap().1, false);
    for _ in 0..3 {
        arm(cq);
        send();
        assert!(has_event(channel, cq));
        assert_eq!(poll(cq, 2).len(), 1);
        arm(cq);
        ring();
        assert!(!has_event(channel, cq), "an event of nothing");
        // It is polled before anybody rings.
        bell.armed.store(ARMED_NOT, Ordering::SeqCst);
        send();
        assert_eq!(poll(cq, 2).len(), 1);
        bell.armed.store(ARMED_ANY, Ordering::SeqCst);
        ring();
        assert!(has_event(channel, cq), "an event of a completion is lost");
        assert!(!has_event(channel, cq));
    }
    // What goes with its queue came all the same.
    arm(cq);
    bell.armed.store(ARMED_NOT, Ordering::SeqCst);
    send();
    shared.destroy_srq();
    bell.armed.store(ARMED_ANY, Ordering::SeqCst);
    ring();
    assert!(has_event(channel, cq));
    pair.destroy();
    shared.destroy_rest();
    // SAFETY: live, and used no more.
    assert_eq!(unsafe { (PROVIDER.destroy_comp_channel)(channel) }, 0);
    assert_eq!(close(&world, xrcd), 0);
}
