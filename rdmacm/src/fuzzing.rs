//! The parser of bytes that a peer controls, for a fuzzer. No part of the API: it is there only with
//! `--cfg fuzzing`, and in this crate's own tests.

#[path = "../../fuzz/target.rs"]
mod target;

use std::net::SocketAddr;

pub use target::Target;

use crate::abi::{RDMA_PS_TCP, RDMA_PS_UDP, ibv_ece};
use crate::message::{
    Message, REJ_CONSUMER_DEFINED, REJ_PRIVATE, REP_PRIVATE, REQ_PRIVATE, Request,
    SIDR_REP_PRIVATE, SIDR_REQ_PRIVATE, SIDR_SUCCESS, Service, Side,
};

/// All of them.
#[must_use]
pub fn targets() -> Vec<Target> {
    vec![Target {
        name: "rdmacm",
        run: stream,
        seeds: || messages().iter().map(Message::encode).collect(),
    }]
}

/// A stream of messages: whether it has nothing else.
fn stream(mut bytes: &[u8]) -> bool {
    let mut any = false;
    loop {
        match Message::decode(bytes) {
            Ok(Some((message, len))) => {
                assert_eq!(message.encode(), bytes[..len], "one form for each message");
                bytes = &bytes[len..];
                any = true;
            }
            Ok(None) => return any && bytes.is_empty(),
            Err(error) => {
                assert!(error.to_string().len() < 200, "an error of bounded length");
                return false;
            }
        }
    }
}

/// One message of every kind, and with and without private data.
pub(crate) fn messages() -> Vec<Message> {
    let service = |port_space: u32, from: &str, to: &str| Service {
        port_space: port_space as u16,
        from: address(from),
        to: address(to),
    };
    let side = Side {
        qp_num: 0x12_3456,
        psn: 0xff_ffff,
        responder_resources: 16,
        initiator_depth: 4,
        rnr_retry: 7,
        srq: true,
        flow_control: true,
        ece: ibv_ece {
            vendor_id: 1,
            options: 2,
            comp_mask: 0,
        },
    };
    vec![
        Message::Request(Request {
            service: service(RDMA_PS_TCP, "192.0.2.1:40000", "192.0.2.2:7174"),
            qp_type: 2,
            side,
            retry: 7,
            mtu: 5,
            private: vec![0xa5; REQ_PRIVATE],
        }),
        Message::Request(Request {
            service: service(RDMA_PS_TCP, "[fe80::1]:1", "[fe80::2]:2"),
            qp_type: 3,
            side: Side::default(),
            retry: 0,
            mtu: 1,
            private: Vec::new(),
        }),
        Message::Reply {
            side,
            private: vec![1; REP_PRIVATE],
        },
        Message::Reply {
            side: Side::default(),
            private: Vec::new(),
        },
        Message::ReadyToUse,
        Message::Reject {
            reason: REJ_CONSUMER_DEFINED,
            private: vec![2; REJ_PRIVATE],
        },
        Message::Disconnect,
        Message::Disconnected,
        Message::Lookup {
            service: service(RDMA_PS_UDP, "127.0.0.1:5", "127.0.0.1:6"),
            private: vec![3; SIDR_REQ_PRIVATE],
        },
        Message::Found {
            status: SIDR_SUCCESS,
            qp_num: 1,
            qkey: 0x0123_4567,
            private: vec![4; SIDR_REP_PRIVATE],
        },
    ]
}

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address in a seed")
}

#[cfg(test)]
#[test]
fn the_parser_stands_what_is_near_to_good_bytes() {
    target::try_near_the_seeds(&targets());
}
