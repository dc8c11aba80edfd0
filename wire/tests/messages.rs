//! Messages between two endpoints of one process: order, flow control, reads, and the ends of
//! connections.

mod common;

use std::time::Duration;

use common::*;
use mr_pool::Pool;
use wire::{Config, DisconnectCause, Endpoint, Event, OutgoingMessage, RemoteAddr, SendErrorKind};

#[test]
fn a_message_arrives_as_it_was_written() {
    let mut pair = Pair::new(Config::default(), Config::default());
    for number in 0..100 {
        let text = vec![number as u8; number as usize * 17];
        pair.client
            .send(pair.to_server, note(&pair.client, number, &text))
            .unwrap();
        let (conn, received) = message(&mut pair.server);
        assert_eq!(conn, pair.to_client);
        expect_note(&received, number, &text);
        let mut reply = OutgoingMessage::from(received.into_buffer());
        reply
            .encode_raw(7, number, 5)
            .unwrap()
            .copy_from_slice(b"hello");
        pair.server.send(conn, reply).unwrap();
        let (conn, received) = message(&mut pair.client);
        assert_eq!(
            (conn, received.kind(), received.tag(), received.body()),
            (pair.to_server, 7, number, &b"hello"[..])
        );
    }
}

#[test]
fn a_frame_as_long_as_allowed_arrives_and_a_longer_one_is_refused() {
    let mut pair = Pair::new(
        small(),
        Config {
            message_size: 4096,
            ..small()
        },
    );
    assert_eq!(
        pair.client.message_size(pair.to_server),
        Some(1024),
        "the smaller side decides"
    );
    assert_eq!(pair.server.message_size(pair.to_client), Some(1024));
    for body in [
        1024 - wire::HEADER_LEN as u32,
        1025 - wire::HEADER_LEN as u32,
    ] {
        let mut message = pair.client.message(2048).unwrap();
        message.encode_raw(1, 0, body).unwrap().fill(0x5a);
        let sent = pair.client.send(pair.to_server, message);
        if body as usize + wire::HEADER_LEN <= 1024 {
            sent.unwrap();
            let (_, received) = common::message(&mut pair.server);
            assert_eq!(received.body(), vec![0x5a; body as usize]);
        } else {
            let error = sent.unwrap_err();
            assert_eq!(
                error.kind,
                SendErrorKind::TooLong {
                    len: 1025,
                    limit: 1024
                }
            );
            assert_eq!(error.message.frame_len(), 1025, "the message comes back");
        }
    }
}

#[test]
fn an_empty_message_is_refused() {
    let mut pair = Pair::new(small(), small());
    let message = pair.client.message(100).unwrap();
    assert_eq!(
        pair.client.send(pair.to_server, message).unwrap_err().kind,
        SendErrorKind::Empty
    );
}

/// The receiver looks at nothing: what it has no room for waits at the sender, then is refused;
/// nothing is lost.
#[test]
fn a_sender_is_held_back_and_nothing_is_lost() {
    let mut pair = Pair::new(small(), small());
    let mut sent = 0u64;
    let mut received = 0u64;
    for _ in 0..20 {
        loop {
            match pair
                .client
                .send(pair.to_server, note(&pair.client, sent, b"x"))
            {
                Ok(()) => sent += 1,
                Err(error) => {
                    assert_eq!(error.kind, SendErrorKind::WouldBlock);
                    expect_note_frame(&error.message, sent);
                    break;
                }
            }
            assert!(pair.client.poll().is_none());
        }
        assert!(
            sent - received <= 8 + 6,
            "more than receives and queue hold"
        );
        while received < sent {
            while let Some(event) = pair.server.poll() {
                let Event::Message { message, .. } = event else {
                    panic!("{event:?}")
                };
                expect_note(&message, received, b"x");
                received += 1;
            }
            assert!(pair.client.poll().is_none());
        }
    }
    assert!(sent > 100);
    assert!(
        pair.server.stats().credit_messages_sent > 0,
        "nothing else returned the credits"
    );
    assert_eq!(pair.server.stats().messages_received, sent);
}

fn expect_note_frame(message: &OutgoingMessage, number: u64) {
    assert_eq!(message.frame().unwrap().header().tag, number);
}

/// Both sides send all they can before either looks, again and again.
#[test]
fn both_sides_at_once_do_not_deadlock() {
    let mut pair = Pair::new(small(), small());
    let mut counts = [[0u64; 2]; 2];
    for _ in 0..200 {
        for side in [0, 1] {
            let (endpoint, conn) = if side == 0 {
                (&mut pair.server, pair.to_client)
            } else {
                (&mut pair.client, pair.to_server)
            };
            while endpoint
                .send(conn, note(endpoint, counts[side][0], b"both"))
                .is_ok()
            {
                counts[side][0] += 1;
            }
        }
        for side in [0, 1] {
            let endpoint = if side == 0 {
                &mut pair.server
            } else {
                &mut pair.client
            };
            while let Some(event) = endpoint.poll() {
                let Event::Message { message, .. } = event else {
                    panic!("{event:?}")
                };
                expect_note(&message, counts[side][1], b"both");
                counts[side][1] += 1;
            }
        }
    }
    // What is still on its way arrives without anything more being sent.
    let mut idle = 0;
    while counts[0][1] < counts[1][0] || counts[1][1] < counts[0][0] {
        for side in [0, 1] {
            let endpoint = if side == 0 {
                &mut pair.server
            } else {
                &mut pair.client
            };
            if let Some(Event::Message { message, .. }) = endpoint.poll() {
                expect_note(&message, counts[side][1], b"both");
                counts[side][1] += 1;
                idle = 0;
            }
        }
        idle += 1;
        assert!(idle < 10_000_000, "stuck at {counts:?}");
    }
    assert!(counts[0][0] > 1000);
}

/// Messages only go one way, and the receiver sleeps between them.
#[test]
fn a_stream_one_way_wakes_a_sleeping_receiver() {
    let Pair {
        mut server,
        mut client,
        to_server,
        acceptance,
        ..
    } = Pair::new(small(), small());
    const COUNT: u64 = 5000;
    let receiver = std::thread::spawn(move || {
        for number in 0..COUNT {
            expect_note(&message(&mut server).1, number, b"one way");
        }
        server
    });
    let mut number = 0;
    while number < COUNT {
        match client.send(to_server, note(&client, number, b"one way")) {
            Ok(()) => number += 1,
            Err(error) => {
                assert_eq!(error.kind, SendErrorKind::WouldBlock);
                client.wait(Some(PATIENCE)).unwrap();
                assert!(client.poll().is_none());
            }
        }
    }
    // The last ones leave the queue as credits come back.
    let mut server = loop {
        assert!(
            client
                .poll_or_wait(Some(Duration::from_millis(1)))
                .unwrap()
                .is_none()
        );
        if receiver.is_finished() {
            break receiver.join().unwrap();
        }
    };
    assert!(server.poll().is_none());
    drop(acceptance);
}

#[test]
fn a_connection_closed_on_purpose_is_told_apart() {
    let mut pair = Pair::new(small(), small());
    let id = pair.to_server;
    assert!(pair.client.close(id));
    assert!(!pair.client.close(id), "it has ended already");
    assert_eq!(
        end(&mut pair.server),
        (pair.to_client, DisconnectCause::Closed)
    );
    assert!(pair.client.poll().is_none(), "who closes is not told");
    let message = note(&pair.client, 0, b"late");
    assert_eq!(
        pair.client.send(id, message).unwrap_err().kind,
        SendErrorKind::UnknownConnection
    );
    let message = note(&pair.server, 0, b"late");
    assert_eq!(
        pair.server.send(pair.to_client, message).unwrap_err().kind,
        SendErrorKind::UnknownConnection
    );
}

#[test]
fn the_end_of_an_endpoint_is_the_end_of_its_connections() {
    let mut pair = Pair::new(small(), small());
    drop(pair.client);
    assert_eq!(
        end(&mut pair.server),
        (pair.to_client, DisconnectCause::Closed)
    );
}

#[test]
fn an_old_id_is_never_a_new_connections() {
    let mut pair = Pair::new(small(), small());
    let mut old = vec![];
    for _ in 0..10 {
        old.push((pair.to_server, pair.to_client));
        assert!(pair.client.close(pair.to_server));
        assert!(pair.client.poll().is_none());
        end(&mut pair.server);
        (pair.to_server, pair.to_client) =
            connect(&mut pair.client, &mut pair.server, pair.acceptance.address);
        for &(to_server, to_client) in &old {
            assert_ne!((to_server, to_client), (pair.to_server, pair.to_client));
            assert!(
                pair.client.peer_addr(to_server).is_none()
                    && pair.server.peer_addr(to_client).is_none()
            );
        }
        pair.client
            .send(pair.to_server, note(&pair.client, 1, b"new"))
            .unwrap();
        expect_note(&message(&mut pair.server).1, 1, b"new");
    }
}

/// Everything that was taken from the pools goes back, however a connection ends.
#[test]
fn buffers_go_back_to_their_pools() {
    let mut pair = Pair::new(small(), small());
    for close in [true, false] {
        if !close {
            let into = pair.client.pool().take(64).unwrap();
            let nowhere = RemoteAddr { addr: 1, rkey: 1 };
            pair.client
                .read(pair.to_server, into, 0..64, nowhere, 0)
                .unwrap();
        }
        for number in 0..30 {
            let _ = pair
                .client
                .send(pair.to_server, note(&pair.client, number, b"unread"));
        }
        if close {
            assert!(pair.client.close(pair.to_server));
        } else {
            while !matches!(next(&mut pair.client), Event::Disconnected { .. }) {}
        }
        while !matches!(next(&mut pair.server), Event::Disconnected { .. }) {}
        while pair.client.poll().is_some() {}
        assert_eq!(pair.client.pool().stats().live_buffers, 0);
        assert_eq!(pair.server.pool().stats().live_buffers, 0);
        if close {
            (pair.to_server, pair.to_client) =
                connect(&mut pair.client, &mut pair.server, pair.acceptance.address);
        }
    }
}

#[test]
fn a_wake_up_is_never_lost() {
    let mut endpoint = endpoint(small());
    let waker = endpoint.waker();
    // Before the wait.
    waker.wake();
    waker.wake();
    endpoint.wait(None).unwrap();
    // During it, from another thread, many times; each wait returns because of a wake-up or hangs
    // for ever.
    let (ask, asked) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        for () in asked {
            waker.wake();
        }
    });
    for _ in 0..1000 {
        ask.send(()).unwrap();
        endpoint.wait(None).unwrap();
        assert!(endpoint.poll().is_none());
    }
    drop(ask);
    thread.join().unwrap();
    // Nothing is left over that would keep it from sleeping: a wait with a limit ends by its limit.
    endpoint.wait(Some(Duration::from_millis(1))).unwrap();
}

#[test]
fn many_connections_share_an_endpoint() {
    let config = Config {
        max_connections: 40,
        recv_depth: 4,
        ..small()
    };
    let mut server = endpoint(config.clone());
    let mut client = endpoint(config);
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    let mut conns: Vec<_> = (0..40)
        .map(|_| connect(&mut client, &mut server, acceptance.address))
        .collect();
    for round in 0..20 {
        for (at, &(to_server, _)) in conns.iter().enumerate() {
            client
                .send(to_server, note(&client, at as u64, b"to one of many"))
                .unwrap();
        }
        for _ in 0..conns.len() {
            let (conn, received) = message(&mut server);
            let number = received.tag();
            assert_eq!(conn, conns[number as usize].1);
            expect_note(&received, number, b"to one of many");
            server.send(conn, note(&server, number, b"back")).unwrap();
        }
        for _ in 0..conns.len() {
            let (conn, received) = message(&mut client);
            assert_eq!(conn, conns[received.tag() as usize].0);
        }
        if round % 5 == 4 {
            let (to_server, to_client) = conns.swap_remove(round);
            client.close(to_server);
            assert_eq!(end(&mut server), (to_client, DisconnectCause::Closed));
            while client.poll().is_some() {}
            conns.push(connect(&mut client, &mut server, acceptance.address));
        }
    }
}

/// The receiver keeps what it gets until its pool is at its ceiling: the sender has to wait, and
/// goes on when memory comes back. Nothing fails, and nothing is lost.
#[test]
fn a_receiver_without_memory_holds_the_sender_back() {
    let config = Config {
        message_size: 256 << 10,
        ..small()
    };
    let pd = domain();
    let pool = Pool::builder(&pd).ceiling(6 << 20).build().unwrap();
    let mut server = Endpoint::new(&pd, &pool, config.clone()).unwrap();
    let mut client = endpoint(config);
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    let (to_server, _) = connect(&mut client, &mut server, acceptance.address);
    let mut hoard = Vec::new();
    let (mut sent, mut rounds) = (0, 0);
    while rounds < 1000 {
        match client.send(to_server, note(&client, sent, b"hoarded")) {
            Ok(()) => (sent, rounds) = (sent + 1, 0),
            Err(error) => {
                assert_eq!(error.kind, SendErrorKind::WouldBlock);
                rounds += 1;
            }
        }
        assert!(client.poll().is_none());
        match server.poll() {
            Some(Event::Message { message, .. }) => hoard.push(message),
            Some(other) => panic!("{other:?}"),
            None => {}
        }
    }
    assert!(
        pool.try_take(256 << 10).is_err(),
        "the pool is not at its ceiling"
    );
    assert!((hoard.len() as u64) < sent, "nothing waits");
    for (message, number) in hoard.drain(..).zip(0..) {
        expect_note(&message, number, b"hoarded");
        rounds = number + 1;
    }
    // The server sleeps, and nobody tells it that there is memory again.
    while rounds < sent {
        assert!(client.poll().is_none());
        if let Some(Event::Message { message, .. }) =
            server.poll_or_wait(Some(Duration::from_millis(1))).unwrap()
        {
            expect_note(&message, rounds, b"hoarded");
            rounds += 1;
        }
    }
}
