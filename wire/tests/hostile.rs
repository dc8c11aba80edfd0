//! Peers that keep the greeting's rules and then none: each is cut off with the reason, and others
//! are not concerned.

mod common;

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use common::*;
use mr_pool::{Buffer, Pool};
use verbs_sys::owned::OwnedQueuePair;
use verbs_sys::{
    AccessFlags, CompletionQueue, Gid, PathOptions, QueuePairEndpoint, QueuePairInit, SendFlags,
};
use wire::{Config, DisconnectCause, Endpoint, Event, FrameError, HEADER_LEN, Header, WcStatus};

/// A client made by hand from the description of the greeting.
struct Fake {
    qp: OwnedQueuePair<Buffer>,
    pool: Pool,
    stream: TcpStream,
    _cq: CompletionQueue,
}

fn frame(kind: u16, rest: &[u8]) -> Vec<u8> {
    let mut bytes = b"zcg\0\x01\0".to_vec();
    bytes.extend(kind.to_le_bytes());
    bytes.extend((rest.len() as u32).to_le_bytes());
    bytes.extend(rest);
    bytes
}

impl Fake {
    fn connect(address: SocketAddr) -> Self {
        let pd = domain();
        let pool = pool(&pd);
        let cq = pd.context().create_cq(64, None).unwrap();
        let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
        qp.to_init(AccessFlags::REMOTE_READ, 1).unwrap();
        let (gid_index, _) = pd.context().choose_gid(1).unwrap();
        let path = PathOptions {
            gid_index,
            ..PathOptions::default()
        };
        let ours = qp.endpoint(&path, 5).unwrap();

        let mut hello = ours.gid.0.to_vec();
        for number in [
            ours.qp_num,
            5,
            4096,
            8,
            0,
            0,
            u32::from(pd.context().device().is_software()),
        ] {
            hello.extend(number.to_le_bytes());
        }
        hello.extend(ours.lid.to_le_bytes());
        hello.extend([ours.mtu as u8, 4, 4, 0, 0, 0]);
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(&frame(1, &hello)).unwrap();
        let mut answer = [0; 64];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(answer[..12], frame(1, &[0; 52])[..12]);
        let number = |at: usize| u32::from_le_bytes(answer[at..at + 4].try_into().unwrap());
        let theirs = QueuePairEndpoint {
            gid: Gid(answer[12..28].try_into().unwrap()),
            qp_num: number(28),
            psn: number(32),
            lid: u16::from_le_bytes([answer[56], answer[57]]),
            mtu: answer[58].into(),
        };

        let mut qp = OwnedQueuePair::new(qp, 16, 16);
        for _ in 0..8 {
            qp.post_recv(pool.take(4096).unwrap()).unwrap();
        }
        qp.queue_pair().to_rtr(&theirs, &path).unwrap();
        qp.queue_pair().to_rts(5, &path).unwrap();
        stream.write_all(&frame(2, &[])).unwrap();
        let mut ready = [0; 12];
        stream.read_exact(&mut ready).unwrap();
        assert_eq!(ready[..], frame(2, &[]));
        Self {
            qp,
            pool,
            stream,
            _cq: cq,
        }
    }

    fn send(&mut self, bytes: &[u8]) {
        let mut buffer = self.pool.take(bytes.len()).unwrap();
        buffer.as_mut_slice().copy_from_slice(bytes);
        self.qp
            .send(buffer, 0..bytes.len(), SendFlags::empty(), None)
            .unwrap();
    }
}

fn config() -> Config {
    Config {
        recv_depth: 8,
        max_connections: 4,
        ..Config::default()
    }
}

/// What a server says of a peer that does `what`, with an honest connection beside it.
fn cause_of(what: impl FnOnce(&mut Fake)) -> DisconnectCause {
    let mut server = endpoint(config());
    let mut honest = endpoint(config());
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    let (to_server, to_honest) = connect(&mut honest, &mut server, acceptance.address);
    let address = acceptance.address;
    let thread = std::thread::spawn(move || Fake::connect(address));
    let Event::Connected { conn, .. } = next(&mut server) else {
        panic!()
    };
    let mut fake = thread.join().unwrap();
    what(&mut fake);
    let cause = loop {
        match next(&mut server) {
            Event::Message { conn: from, .. } => assert_eq!(from, conn),
            Event::Disconnected { conn: ended, cause } => {
                assert_eq!(ended, conn);
                break cause;
            }
            other => panic!("{other:?}"),
        }
    };
    let echo = |from: &mut Endpoint, over, to: &mut Endpoint| {
        from.send(over, note(from, 4, b"still here")).unwrap();
        expect_note(&message(to).1, 4, b"still here");
    };
    echo(&mut honest, to_server, &mut server);
    echo(&mut server, to_honest, &mut honest);
    cause
}

fn header(header: Header) -> Vec<u8> {
    header.to_bytes().to_vec()
}

#[test]
fn what_is_not_a_frame_ends_the_connection() {
    let good = header(Header {
        kind: 1,
        ..Header::default()
    });
    let mut magic = good.clone();
    magic[0] ^= 1;
    let mut version = good.clone();
    version[4] = 9;
    let mut reserved = good.clone();
    reserved[20] = 1;
    let long = header(Header {
        kind: 1,
        body_len: 100,
        ..Header::default()
    });
    let cases = [
        (vec![1, 2, 3], FrameError::Truncated { len: 3 }),
        (vec![], FrameError::Truncated { len: 0 }),
        (
            magic,
            FrameError::Magic {
                found: wire::MAGIC ^ 1,
            },
        ),
        (version, FrameError::Version { found: 9 }),
        (reserved, FrameError::Reserved),
        (
            long,
            FrameError::Length {
                len: HEADER_LEN,
                expected: HEADER_LEN as u64 + 100,
            },
        ),
        (
            [good, vec![0]].concat(),
            FrameError::Length {
                len: HEADER_LEN + 1,
                expected: HEADER_LEN as u64,
            },
        ),
    ];
    for (bytes, expected) in cases {
        assert_eq!(
            cause_of(|fake| fake.send(&bytes)),
            DisconnectCause::Frame(expected)
        );
    }
}

#[test]
fn a_kind_of_the_crates_own_that_there_is_not() {
    let bytes = header(Header {
        kind: 0xff77,
        ..Header::default()
    });
    assert_eq!(
        cause_of(|fake| fake.send(&bytes)),
        DisconnectCause::Kind { kind: 0xff77 }
    );
}

#[test]
fn credits_out_of_nothing() {
    for credits in [1, u16::MAX] {
        let bytes = header(Header {
            kind: 1,
            credits,
            ..Header::default()
        });
        assert_eq!(cause_of(|fake| fake.send(&bytes)), DisconnectCause::Credits);
    }
}

#[test]
fn a_message_longer_than_the_receives() {
    let cause = cause_of(|fake| fake.send(&[0; 5000]));
    assert_eq!(
        cause,
        DisconnectCause::WorkRequest {
            status: WcStatus::LocLenErr
        }
    );
}

#[test]
fn talk_over_the_socket() {
    let cause = cause_of(|fake| fake.stream.write_all(b"are you still there?").unwrap());
    assert_eq!(cause, DisconnectCause::Socket);
}

#[test]
fn a_socket_that_is_closed_ends_the_connection() {
    let cause = cause_of(|fake| fake.stream.shutdown(std::net::Shutdown::Both).unwrap());
    assert_eq!(cause, DisconnectCause::PeerGone);
}

#[test]
fn honest_messages_of_a_client_made_by_hand_arrive() {
    let cause = cause_of(|fake| {
        for number in 0..5 {
            let bytes = header(Header {
                kind: 1,
                tag: number,
                ..Header::default()
            });
            fake.send(&bytes);
        }
        fake.stream.write_all(&frame(4, &[])).unwrap();
        fake.stream.shutdown(std::net::Shutdown::Write).unwrap();
    });
    assert_eq!(cause, DisconnectCause::Closed);
}
