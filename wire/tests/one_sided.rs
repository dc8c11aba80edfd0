//! READs and WRITEs of the peer's memory.

mod common;

use common::*;
use mr_pool::Pool;
use verbs_sys::AccessFlags;
use wire::{
    Config, ConnectionId, DisconnectCause, Event, OperationErrorKind, RemoteAddr, WcStatus,
};

#[test]
fn a_read_brings_the_peers_bytes_and_its_token() {
    let mut pair = Pair::new(small(), small());
    let mut source = pair.server.pool().take(3000).unwrap();
    for (at, byte) in source.as_mut_slice().iter_mut().enumerate() {
        *byte = at as u8;
    }
    let remote = |offset| RemoteAddr {
        addr: source.addr() + offset,
        rkey: source.rkey(),
    };
    for (offset, len) in [(0u64, 0usize), (0, 1), (7, 1000), (0, 3000)] {
        let into = pair.client.pool().take(3100).unwrap();
        pair.client
            .read(
                pair.to_server,
                into,
                50..50 + len,
                remote(offset),
                900 + offset,
            )
            .unwrap();
        match spin(&mut pair.client) {
            Event::ReadDone {
                conn,
                token,
                result,
                buffer,
            } => {
                assert_eq!(
                    (conn, token, result),
                    (pair.to_server, 900 + offset, Ok(()))
                );
                let at = offset as usize;
                assert_eq!(
                    buffer.as_slice()[50..50 + len],
                    source.as_slice()[at..at + len]
                );
            }
            other => panic!("{other:?}"),
        }
    }
    let into = pair.client.pool().take(64).unwrap();
    let parts = [
        (0..16, remote(100)),
        (32..40, remote(0)),
        (16..32, remote(2000)),
    ];
    pair.client
        .read_chain(pair.to_server, into, &parts, 5)
        .unwrap();
    let Event::ReadDone {
        token: 5,
        result: Ok(()),
        buffer,
        ..
    } = spin(&mut pair.client)
    else {
        panic!()
    };
    assert_eq!(buffer.as_slice()[..16], source.as_slice()[100..116]);
    assert_eq!(buffer.as_slice()[16..32], source.as_slice()[2000..2016]);
    assert_eq!(buffer.as_slice()[32..40], source.as_slice()[..8]);
}

#[test]
fn reads_that_cannot_be_posted_give_the_buffer_back() {
    let mut pair = Pair::new(small(), small());
    let remote = RemoteAddr { addr: 0, rkey: 0 };
    let take = |pair: &Pair| pair.client.pool().take(64).unwrap();
    let error = pair
        .client
        .read(pair.to_server, take(&pair), 0..65, remote, 0)
        .unwrap_err();
    assert_eq!(
        (error.kind, error.buffer.map(|buffer| buffer.len())),
        (OperationErrorKind::OutOfRange, Some(64))
    );
    let error = pair
        .client
        .read_chain(pair.to_server, take(&pair), &[], 0)
        .unwrap_err();
    assert_eq!(error.kind, OperationErrorKind::ChainLength);
    let parts = vec![(0..8, remote); 5];
    let error = pair
        .client
        .read_chain(pair.to_server, take(&pair), &parts, 0)
        .unwrap_err();
    assert_eq!(error.kind, OperationErrorKind::WouldBlock);
    let error = pair
        .client
        .read(ConnectionId::from_bits(3), take(&pair), 0..8, remote, 0)
        .unwrap_err();
    assert_eq!(error.kind, OperationErrorKind::UnknownConnection);
}

#[test]
fn a_read_without_permission_ends_the_connection_on_both_sides() {
    let mut pair = Pair::new(small(), small());
    let source = pair.server.pool().take(64).unwrap();
    let into = pair.client.pool().take(64).unwrap();
    let remote = RemoteAddr {
        addr: source.addr(),
        rkey: source.rkey() ^ 0x5500,
    };
    pair.client
        .read(pair.to_server, into, 0..64, remote, 77)
        .unwrap();
    match next(&mut pair.client) {
        Event::ReadDone {
            token: 77,
            result: Err(status),
            ..
        } => assert_eq!(status, WcStatus::RemAccessErr),
        other => panic!("{other:?}"),
    }
    let (conn, cause) = end(&mut pair.client);
    assert_eq!(
        (conn, cause),
        (
            pair.to_server,
            DisconnectCause::WorkRequest {
                status: WcStatus::RemAccessErr
            }
        )
    );
    let (conn, _) = end(&mut pair.server);
    assert_eq!(conn, pair.to_client);
    assert!(pair.client.poll().is_none() && pair.server.poll().is_none());
}

#[test]
fn a_write_arrives_where_it_is_allowed() {
    for allowed in [true, false] {
        let config = Config {
            allow_remote_write: allowed,
            ..small()
        };
        let mut pair = Pair::new(config.clone(), config);
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let pool = Pool::builder(&pair.server_domain)
            .access(access)
            .shared()
            .build()
            .unwrap();
        let target = pool.take(64).unwrap();
        target.write_at(0, &[0xee; 64]).unwrap();
        let mut from = pair.client.pool().take(64).unwrap();
        from.as_mut_slice().fill(0x77);
        let remote = RemoteAddr {
            addr: target.addr() + 8,
            rkey: target.rkey(),
        };
        pair.client
            .write(pair.to_server, from, 16..48, remote, 1)
            .unwrap();
        let Event::WriteDone {
            token: 1, result, ..
        } = next(&mut pair.client)
        else {
            panic!()
        };
        let mut bytes = [0; 64];
        target.read_at(0, &mut bytes).unwrap();
        if allowed {
            assert_eq!(result, Ok(()));
            assert!(bytes[8..40].iter().all(|&byte| byte == 0x77), "{bytes:x?}");
            assert!(
                bytes[..8]
                    .iter()
                    .chain(&bytes[40..])
                    .all(|&byte| byte == 0xee),
                "{bytes:x?}"
            );
        } else {
            // The queue pair forbids it, whatever the key would allow.
            assert_eq!(result, Err(WcStatus::RemInvReqErr));
            assert_eq!(bytes, [0xee; 64]);
            end(&mut pair.client);
        }
    }
}

/// A message sent behind a chain of WRITEs finds all of them in place, though nobody waited.
#[test]
fn a_message_arrives_after_the_writes_before_it() {
    let config = Config {
        allow_remote_write: true,
        ..small()
    };
    let mut pair = Pair::new(config.clone(), config);
    let pool = Pool::builder(&pair.server_domain)
        .access(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE)
        .shared()
        .build()
        .unwrap();
    let target = pool.take(64).unwrap();
    let remote = |offset| RemoteAddr {
        addr: target.addr() + offset,
        rkey: target.rkey(),
    };
    for round in 0..200_u8 {
        let mut from = pair.client.pool().take(64).unwrap();
        from.as_mut_slice().fill(round);
        let parts = [(0..8, remote(48)), (8..64, remote(0))];
        let token = u64::from(round);
        pair.client
            .write_chain(pair.to_server, from, &parts, token)
            .unwrap();
        let message = note(&pair.client, token, b"written");
        pair.client.send(pair.to_server, message).unwrap();

        let Event::Message { message, .. } = next(&mut pair.server) else {
            panic!()
        };
        let mut bytes = [0; 56];
        target.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes, [round; 56], "round {round}");
        let answer = note(&pair.server, message.tag(), b"seen");
        pair.server.send(pair.to_client, answer).unwrap();

        let (mut written, mut answered) = (false, false);
        while !(written && answered) {
            match next(&mut pair.client) {
                Event::WriteDone {
                    token: done,
                    result: Ok(()),
                    buffer,
                    ..
                } => {
                    assert_eq!((done, buffer.len()), (token, 64));
                    written = true;
                }
                Event::Message { .. } => answered = true,
                other => panic!("{other:?}"),
            }
        }
    }
}
