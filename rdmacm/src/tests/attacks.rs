//! What strangers and lying peers of this host may try.

use std::io::Write;

use verbs_sys::ffi::{IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};

use super::world::*;
use crate::abi::*;
use crate::message::{
    Message, REJ_CLASS_VERSION, REJ_CONSUMER_DEFINED, REJ_INVALID_SERVICE_ID, Request, Service,
    Side,
};
use crate::shared::Shared;

/// A good request for a connection.
pub fn request(listener: &Id) -> Message {
    Message::Request(good(listener))
}

fn good(listener: &Id) -> Request {
    Request {
        service: Service {
            port_space: RDMA_PS_TCP as u16,
            from: "127.0.0.1:40000".parse().unwrap(),
            to: listener.local(),
        },
        qp_type: IBV_QPT_RC as u8,
        side: Side {
            qp_num: 9,
            responder_resources: 255,
            initiator_depth: 255,
            ..Side::default()
        },
        retry: 7,
        mtu: 5,
        private: Vec::new(),
    }
}

fn tell(stream: &mut impl Write, bytes: &[u8]) {
    // Who is not listened to any more may be told so.
    let _ = stream.write_all(bytes);
}

/// Who listens still takes a good request.
fn still_works(listening: &Channel, listener: &Id) {
    let mut friend = dial(listener);
    tell(&mut friend, &request(listener).encode());
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.reject(b"").unwrap();
    assert!(matches!(hear(&mut friend), Some(Message::Reject { .. })));
}

#[test]
fn nonsense_is_hung_up_on() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    for bytes in [
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 4096],
        vec![0xff; 100_000],
        [&Message::Disconnect.encode()[..6], &[0xff, 0xff][..]].concat(),
        Message::ReadyToUse.encode(),
        Message::Disconnect.encode(),
        Message::Reply {
            side: Side::default(),
            private: Vec::new(),
        }
        .encode(),
    ] {
        let mut stranger = dial(&listener);
        tell(&mut stranger, &bytes);
        assert_eq!(hear(&mut stranger), None);
        assert!(listening.is_empty());
    }
    still_works(&listening, &listener);
}

#[test]
fn another_version_is_told_so() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let mut bytes = request(&listener).encode();
    bytes[4] += 1;
    let mut stranger = dial(&listener);
    tell(&mut stranger, &bytes);
    let private = Vec::new();
    let reason = REJ_CLASS_VERSION;
    assert_eq!(
        hear(&mut stranger),
        Some(Message::Reject { reason, private })
    );
    assert_eq!(hear(&mut stranger), None);
    still_works(&listening, &listener);
}

#[test]
fn requests_for_something_else_are_refused() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let changes: [fn(&mut Request); 6] = [
        |request| request.service.port_space = RDMA_PS_IB as u16,
        |request| request.service.to.set_port(1),
        |request| request.service.to.set_ip([127, 0, 0, 9].into()),
        |request| request.qp_type = IBV_QPT_UD as u8,
        |request| request.qp_type = IBV_QPT_UC as u8,
        |request| request.qp_type = 255,
    ];
    for change in changes {
        let mut wrong = good(&listener);
        change(&mut wrong);
        let mut stranger = dial(&listener);
        tell(&mut stranger, &Message::Request(wrong.clone()).encode());
        let answer = hear(&mut stranger);
        let Some(Message::Reject { reason, .. }) = answer else {
            panic!("{wrong:?} was answered by {answer:?}");
        };
        assert_eq!(reason, REJ_INVALID_SERVICE_ID, "{wrong:?}");
    }
    assert!(listening.is_empty());
    still_works(&listening, &listener);
}

#[test]
fn resources_beyond_the_devices_are_cut() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let mut stranger = dial(&listener);
    tell(&mut stranger, &request(&listener).encode());
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.create_qp(IBV_QPT_RC);
    // SAFETY: alive, and no parameters are given.
    let code = unsafe { crate::calls::testing::rdma_accept(passive.0, std::ptr::null_mut()) };
    assert_eq!(code, 0);
    let moves = crate::fake::moves(passive.get().qp);
    assert_eq!(moves[2].0.max_dest_rd_atomic, crate::fake::MAX_RD_ATOMIC);
    assert_eq!(moves[3].0.max_rd_atomic, crate::fake::MAX_RD_ATOMIC);
}

#[test]
fn those_who_say_nothing_make_room() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let mut silent: Vec<_> = (0..200).map(|_| dial(&listener)).collect();
    for half in silent.iter_mut().skip(100) {
        tell(half, &request(&listener).encode()[..20]);
    }
    // The first have had to go, and a good request is heard among the others.
    assert_eq!(hear(&mut silent[0]), None);
    still_works(&listening, &listener);
    // The last can still say what it wants.
    let last = silent.last_mut().unwrap();
    tell(last, &request(&listener).encode()[20..]);
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    drop(passive);
    let reason = REJ_CONSUMER_DEFINED;
    let private = Vec::new();
    assert_eq!(hear(last), Some(Message::Reject { reason, private }));
}

#[test]
fn those_who_say_nothing_have_to_go_in_time() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let mut silent = dial(&listener);
    // Connections are taken in their order.
    still_works(&listening, &listener);
    let mut state = Shared::get().lock();
    let strangers = state.endpoint(listener.key()).unwrap().strangers.clone();
    assert_eq!(strangers.len(), 1);
    state.socket_timed_out(strangers[0]);
    assert!(state.endpoint(listener.key()).unwrap().strangers.is_empty());
    drop(state);
    assert_eq!(hear(&mut silent), None);
}

#[test]
fn a_request_byte_by_byte_is_one() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let mut slow = dial(&listener);
    for byte in request(&listener).encode() {
        tell(&mut slow, &[byte]);
    }
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.reject(b"").unwrap();
    assert!(matches!(hear(&mut slow), Some(Message::Reject { .. })));
}

#[test]
fn a_peer_that_says_what_it_must_not_is_cut_off() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let reply = Message::Reply {
        side: Side::default(),
        private: Vec::new(),
    };
    let found = Message::Found {
        status: 0,
        qp_num: 0,
        qkey: 0,
        private: Vec::new(),
    };
    for wrong in [
        request(&listener),
        reply,
        found,
        Message::Disconnected,
        Message::ReadyToUse,
    ] {
        // While the request waits for the application.
        let mut liar = dial(&listener);
        tell(&mut liar, &request(&listener).encode());
        let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
        tell(&mut liar, &wrong.encode());
        assert_eq!(hear(&mut liar), None, "{wrong:?}");
        assert_eq!(listening.expect(RDMA_CM_EVENT_REJECTED).get().id, passive.0);
    }
    // While it is connected.
    let mut liar = dial(&listener);
    tell(&mut liar, &request(&listener).encode());
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.create_qp(IBV_QPT_RC);
    passive.accept(&Param::default()).unwrap();
    tell(&mut liar, &Message::ReadyToUse.encode());
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
    tell(&mut liar, b"nonsense");
    assert_eq!(
        listening.expect(RDMA_CM_EVENT_DISCONNECTED).get().id,
        passive.0
    );
    still_works(&listening, &listener);
}

#[test]
fn everything_at_once_comes_in_order() {
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let mut hasty = dial(&listener);
    let reason = REJ_CONSUMER_DEFINED;
    let private = Vec::new();
    let change_of_mind = Message::Reject { reason, private };
    let bytes = [request(&listener).encode(), change_of_mind.encode()].concat();
    tell(&mut hasty, &bytes);
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    assert_eq!(listening.expect(RDMA_CM_EVENT_REJECTED).get().id, passive.0);
}
