//! Connections that do not come about, and how those that do can end.

use std::sync::mpsc;

use rustix::io::Errno;
use verbs_sys::ffi::*;

use super::world::*;
use crate::abi::*;
use crate::calls::testing::*;
use crate::endpoint::Phase;
use crate::fake;
use crate::message::{
    Message, REJ_CONSUMER_DEFINED, REJ_PRIVATE, REJ_TIMEOUT, REP_PRIVATE, REQ_PRIVATE,
};

/// An identifier that has asked, and one that was asked.
fn requested(asking: &Channel, listening: &Channel, listener: &Id) -> (Id, Id) {
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(asking, listener);
    active.connect(&Param::default()).unwrap();
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.create_qp(IBV_QPT_RC);
    (active, passive)
}

#[test]
fn a_rejection_says_why() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let (active, passive) = requested(&asking, &listening, &listener);
    assert_eq!(passive.reject(&[1; REJ_PRIVATE + 1]), Err(Errno::INVAL));
    passive.reject(b"full").unwrap();
    let rejected = asking.expect(RDMA_CM_EVENT_REJECTED);
    assert_eq!((rejected.get().id, rejected.status()), (active.0, 28));
    assert_eq!(rejected.private().len(), REJ_PRIVATE);
    assert!(rejected.private().starts_with(b"full\0"));
    assert_eq!(passive.accept(&Param::default()), Err(Errno::INVAL));
    drop(rejected);

    let (_second, passive) = requested(&asking, &listening, &listener);
    // SAFETY: alive, and no private data is given.
    let code = unsafe { rdma_reject_ece(passive.0, std::ptr::null(), 0) };
    assert_eq!(code, 0);
    assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 35);
}

#[test]
fn nobody_listens() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let active = asking.id(RDMA_PS_TCP);
    let bound = listening.id(RDMA_PS_TCP);
    bound.bind("127.0.0.1:0").unwrap();
    active.prepare(&asking, &bound);
    active.connect(&Param::default()).unwrap();
    assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 8);
    // It cannot be tried again.
    assert_eq!(active.connect(&Param::default()), Err(Errno::INVAL));
}

#[test]
fn private_data_has_its_limits() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(&asking, &listener);
    let bytes = [7; 255];
    let with = |len: usize| Param {
        private: &bytes[..len],
        ..Param::default()
    };
    assert_eq!(active.connect(&with(REQ_PRIVATE + 1)), Err(Errno::INVAL));
    active.connect(&with(REQ_PRIVATE)).unwrap();
    let request = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(request.private(), &bytes[..REQ_PRIVATE]);
    let passive = request.id();
    drop(request);
    passive.create_qp(IBV_QPT_RC);
    assert_eq!(passive.accept(&with(REP_PRIVATE + 1)), Err(Errno::INVAL));
    passive.accept(&with(REP_PRIVATE)).unwrap();
    let established = asking.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(established.private(), &bytes[..REP_PRIVATE]);
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
}

#[test]
fn only_so_many_requests_wait() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 2);
    let ask = || {
        let active = asking.id(RDMA_PS_TCP);
        active.prepare(&asking, &listener);
        active.connect(&Param::default()).unwrap();
        active
    };
    // The third is one too many, whichever comes third.
    let actives = [ask(), ask(), ask()];
    let rejected = asking.expect(RDMA_CM_EVENT_REJECTED);
    assert_eq!(rejected.status(), 28);
    assert!(actives.iter().any(|active| active.0 == rejected.get().id));
    drop(rejected);
    // Once the application has one, another may wait.
    let first = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    let fourth = ask();
    let second = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    let third = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    assert_eq!(third.remote(), fourth.local());
    drop((first, second, third));
    for _ in 0..3 {
        assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 28);
    }
}

#[test]
fn who_listens_no_more_refuses_those_who_wait() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(&asking, &listener);
    active.connect(&Param::default()).unwrap();
    listening.wait();
    drop(listener);
    assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 28);
    assert!(listening.is_empty());
}

#[test]
fn who_goes_tells_the_other_in_every_state() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);

    // Asked, and went.
    let (active, passive) = requested(&asking, &listening, &listener);
    drop(active);
    let gone = listening.expect(RDMA_CM_EVENT_REJECTED);
    assert_eq!(
        (gone.get().id, gone.status()),
        (passive.0, i32::from(REJ_TIMEOUT))
    );
    drop(gone);
    assert_eq!(passive.accept(&Param::default()), Err(Errno::INVAL));
    drop(passive);

    // Was asked, and went.
    let (active, passive) = requested(&asking, &listening, &listener);
    drop(passive);
    assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 28);
    drop(active);

    // Accepted, and went: who asked hears only of the end.
    let (active, passive) = requested(&asking, &listening, &listener);
    passive.accept(&Param::default()).unwrap();
    asking.wait();
    drop(passive);
    active.until(Phase::Failed);
    assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 28);
    assert_eq!(fake::states(active.get().qp), [IBV_QPS_INIT]);
    drop(active);

    // Was accepted, and went before it knew.
    let (active, passive) = requested(&asking, &listening, &listener);
    passive.accept(&Param::default()).unwrap();
    asking.wait();
    drop(active);
    assert_eq!(listening.expect(RDMA_CM_EVENT_REJECTED).status(), 28);
    assert!(asking.is_empty());
    drop(passive);

    // Was connected, and went.
    let (active, passive) = connected([&asking, &listening], &listener);
    drop(active);
    assert_eq!(
        listening.expect(RDMA_CM_EVENT_DISCONNECTED).get().id,
        passive.0
    );
    drop(passive);
    let (active, passive) = connected([&asking, &listening], &listener);
    drop(passive);
    assert_eq!(asking.expect(RDMA_CM_EVENT_DISCONNECTED).get().id, active.0);
}

#[test]
fn a_queue_pair_that_cannot_be_connected_ends_the_attempt() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let (active, passive) = requested(&asking, &listening, &listener);
    passive.accept(&Param::default()).unwrap();
    // The tests' device refuses this path MTU.
    let state = crate::shared::Shared::get();
    state.lock().endpoint(active.key()).unwrap().mtu = IBV_MTU_256 as u8;
    let failed = asking.expect(RDMA_CM_EVENT_CONNECT_ERROR);
    assert_eq!(failed.status(), -libc::EINVAL);
    assert_eq!(fake::states(active.get().qp).last(), Some(&IBV_QPS_ERR));
    assert_eq!(listening.expect(RDMA_CM_EVENT_REJECTED).status(), 28);
    assert!(asking.is_empty());
}

#[test]
fn who_goes_while_the_other_connects_its_queue_pair_was_never_connected() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        let (active, passive) = requested(&asking, &listening, &listener);
        passive.accept(&Param::default()).unwrap();
        let key = active.key();
        fake::meanwhile(active.get().qp, state, move || {
            drop(passive);
            until(key, Phase::Failed);
        });
        let gone = asking.expect(RDMA_CM_EVENT_REJECTED);
        assert_eq!((gone.get().id, gone.status()), (active.0, 28));
        drop(gone);
        assert_eq!(fake::states(active.get().qp).last(), Some(&IBV_QPS_ERR));
        assert!(asking.is_empty());
    }
}

#[test]
fn who_asked_and_goes_while_it_is_answered_leaves_a_queue_pair_in_error() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let (active, passive) = requested(&asking, &listening, &listener);
    let key = passive.key();
    fake::meanwhile(passive.get().qp, IBV_QPS_RTS, move || {
        drop(active);
        until(key, Phase::Failed);
    });
    assert_eq!(passive.accept(&Param::default()), Err(Errno::INVAL));
    assert_eq!(fake::states(passive.get().qp).last(), Some(&IBV_QPS_ERR));
    let gone = listening.expect(RDMA_CM_EVENT_REJECTED);
    assert_eq!(gone.status(), i32::from(REJ_TIMEOUT));
}

#[test]
fn both_may_disconnect_at_once() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let (active, passive) = connected([&asking, &listening], &listener);
    active.disconnect().unwrap();
    passive.disconnect().unwrap();
    asking.expect(RDMA_CM_EVENT_DISCONNECTED);
    listening.expect(RDMA_CM_EVENT_DISCONNECTED);
    // Once more does nothing.
    active.disconnect().unwrap();
    asking.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    listening.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT);
    assert!(asking.is_empty() && listening.is_empty());
}

#[test]
fn silence_ends() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    // No answer to a request.
    let (active, passive) = requested(&asking, &listening, &listener);
    active.time_out();
    assert_eq!(
        asking.expect(RDMA_CM_EVENT_UNREACHABLE).status(),
        -libc::ETIMEDOUT
    );
    assert_eq!(
        listening.expect(RDMA_CM_EVENT_REJECTED).status(),
        i32::from(REJ_TIMEOUT)
    );
    drop((active, passive));
    // No answer to an acceptance.
    let (active, passive) = requested(&asking, &listening, &listener);
    passive.accept(&Param::default()).unwrap();
    asking.wait();
    passive.time_out();
    assert_eq!(
        listening.expect(RDMA_CM_EVENT_UNREACHABLE).status(),
        -libc::ETIMEDOUT
    );
    active.until(Phase::Failed);
    assert_eq!(
        asking.expect(RDMA_CM_EVENT_REJECTED).status(),
        i32::from(REJ_TIMEOUT)
    );
    drop((active, passive));
    // A deadline of a state that has none means nothing.
    let (active, passive) = connected([&asking, &listening], &listener);
    active.time_out();
    passive.time_out();
    listener.time_out();
    assert!(asking.is_empty() && listening.is_empty());
}

#[test]
fn an_end_that_is_not_confirmed_is_one() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let mut stranger = dial(&listener);
    let mut send = |message: Message| {
        use std::io::Write;
        stranger.write_all(&message.encode()).unwrap();
        stranger.try_clone().unwrap()
    };
    let request = super::attacks::request(&listener);
    let mut stranger = send(request);
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.create_qp(IBV_QPT_RC);
    passive.accept(&Param::default()).unwrap();
    assert!(matches!(hear(&mut stranger), Some(Message::Reply { .. })));
    send(Message::ReadyToUse);
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
    passive.disconnect().unwrap();
    assert_eq!(hear(&mut stranger), Some(Message::Disconnect));
    passive.time_out();
    listening.expect(RDMA_CM_EVENT_DISCONNECTED);
    assert_eq!(hear(&mut stranger), None);
    drop(asking);
}

#[test]
fn destruction_waits_for_acknowledgement() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.resolve(listener.local()).unwrap();
    let event = asking.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    let (done, is_done) = mpsc::channel();
    std::thread::scope(|scope| {
        let (at, key) = (active.0 as usize, active.key());
        std::mem::forget(active);
        scope.spawn(move || {
            drop(Id(at as *mut rdma_cm_id));
            done.send(()).unwrap();
        });
        // It has begun, and cannot be done.
        until(key, Phase::Failed);
        assert_eq!(is_done.try_recv(), Err(mpsc::TryRecvError::Empty));
        drop(event);
        is_done.recv().unwrap();
    });
}

#[test]
fn events_of_what_is_destroyed_do_not_come() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.resolve(listener.local()).unwrap();
    asking.wait();
    drop(active);
    assert!(asking.is_empty());
    // SAFETY: alive.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw((*asking.0).fd) };
    rustix::io::ioctl_fionbio(fd, true).unwrap();
    let mut event = std::ptr::null_mut();
    // SAFETY: alive, and a place for the result.
    let code = unsafe { rdma_get_cm_event(asking.0, &mut event) };
    assert_eq!(result(code), Err(Errno::AGAIN));
    assert_eq!(REJ_CONSUMER_DEFINED, 28);
}

#[test]
fn what_another_thread_has_destroyed_was_begun() {
    let channel = Channel::new();
    let id = channel.id(RDMA_PS_TCP);
    let key = id.key();
    drop(id);
    // SAFETY: none is followed, as it is not a synchronous one.
    let completed = unsafe { crate::deliver::complete(std::ptr::null_mut(), key) };
    assert_eq!(completed, Ok(()));
}
