//! Two processes: this test binary starts itself as the other side. Here the server is the parent.

mod common;

use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use common::*;
use rkyv::{Archive, Serialize};
use wire::{
    Config, ConnectionId, DisconnectCause, Endpoint, Event, OutgoingMessage, RemoteAddr,
    SendErrorKind, WcStatus,
};

const ROLE: &str = "WIRE_TEST_ROLE";
const ADDRESS: &str = "WIRE_TEST_ADDRESS";

const ECHO: u16 = 10;
const MEMORY: u16 = 11;
const QUIT: u16 = 12;

/// Where the child's memory is.
#[derive(Archive, Serialize)]
struct Memory {
    addr: u64,
    rkey: u32,
}

fn config() -> Config {
    Config {
        recv_depth: 16,
        ..Config::default()
    }
}

/// Not a test of its own: the other side, when this binary was started as such.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let address: SocketAddr = std::env::var(ADDRESS).unwrap().parse().unwrap();
    let mut endpoint = endpoint(config());
    let parent = endpoint.connect(address).unwrap();
    match role.as_str() {
        "echo" => echo(&mut endpoint, parent),
        "flood" => flood(&mut endpoint, parent),
        // Until it is killed.
        "idle" => loop {
            endpoint.wait(None).unwrap();
        },
        other => panic!("no role {other}"),
    }
}

/// Answers each message with its own bytes, until told to quit.
fn echo(endpoint: &mut Endpoint, parent: ConnectionId) {
    let mut memory = endpoint.pool().take(4096).unwrap();
    memory
        .as_mut_slice()
        .iter_mut()
        .zip(0u32..)
        .for_each(|(byte, at)| *byte = (at % 251) as u8);
    let mut hello = endpoint.message(256).unwrap();
    hello
        .encode(
            MEMORY,
            0,
            &Memory {
                addr: memory.addr(),
                rkey: memory.rkey(),
            },
        )
        .unwrap();
    endpoint.send(parent, hello).unwrap();
    loop {
        let (conn, received) = message(endpoint);
        if received.kind() == QUIT {
            return;
        }
        let mut reply = endpoint.message(4096).unwrap();
        let body = received.body();
        reply
            .encode_raw(ECHO, received.tag(), body.len() as u32)
            .unwrap()
            .copy_from_slice(body);
        endpoint.send(conn, reply).unwrap();
    }
}

/// Sends as much as it can, until it is killed.
fn flood(endpoint: &mut Endpoint, parent: ConnectionId) {
    let mut number = 0;
    loop {
        match endpoint.send(parent, note(endpoint, number, b"flood")) {
            Ok(()) => number += 1,
            Err(error) if error.kind == SendErrorKind::WouldBlock => {
                endpoint
                    .poll_or_wait(Some(Duration::from_millis(1)))
                    .unwrap();
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// A child process, ended with the test.
struct Other(Child);

impl Other {
    fn start(role: &str, address: SocketAddr) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env(ADDRESS, address.to_string())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self(child)
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A server in this process, and a child connected to it.
fn with_child(role: &str) -> (Endpoint, ConnectionId, Other, Acceptance) {
    let mut server = endpoint(config());
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    let other = Other::start(role, acceptance.address);
    let Event::Connected { conn, .. } = next(&mut server) else {
        panic!()
    };
    (server, conn, other, acceptance)
}

/// The place of the child's memory, which is its first message.
fn memory(server: &mut Endpoint) -> RemoteAddr {
    let (_, received) = message(server);
    assert_eq!(received.kind(), MEMORY);
    let memory = received.view::<Memory>().unwrap();
    RemoteAddr {
        addr: memory.addr.to_native(),
        rkey: memory.rkey.to_native(),
    }
}

#[test]
fn messages_and_reads_between_processes() {
    let (mut server, conn, mut other, _acceptance) = with_child("echo");
    let remote = memory(&mut server);
    let mut expected = std::collections::VecDeque::new();
    let mut sent = 0u64;
    let mut reads = 0u64;
    while sent < 20_000 || !expected.is_empty() || reads > 0 {
        if sent < 20_000 && expected.len() < 12 {
            let len = (sent * 37 % 4000) as usize;
            let mut message = server.message(4096).unwrap();
            message
                .encode_raw(ECHO, sent, len as u32)
                .unwrap()
                .fill(sent as u8);
            server.send(conn, message).unwrap();
            expected.push_back((sent, len));
            sent += 1;
            if sent.is_multiple_of(5) && reads < 8 {
                let at = (sent % 4000) as usize;
                let into = server.pool().take(4096).unwrap();
                let from = RemoteAddr {
                    addr: remote.addr + at as u64,
                    ..remote
                };
                server.read(conn, into, at..4096, from, at as u64).unwrap();
                reads += 1;
            }
        }
        // Now and then it sleeps, most of the time it polls.
        let event = if sent.is_multiple_of(1000) {
            Some(next(&mut server))
        } else {
            server.poll()
        };
        match event {
            None => {}
            Some(Event::Message { message, .. }) => {
                let (tag, len) = expected.pop_front().unwrap();
                assert_eq!(
                    (message.kind(), message.tag(), message.body().len()),
                    (ECHO, tag, len)
                );
                assert!(message.body().iter().all(|&byte| byte == tag as u8));
            }
            Some(Event::ReadDone {
                token,
                result,
                buffer,
                ..
            }) => {
                assert_eq!(result, Ok(()));
                let from = token as usize;
                assert!(
                    (from..4096).all(|at| buffer.as_slice()[at] == (at % 251) as u8),
                    "{from}"
                );
                reads -= 1;
            }
            Some(other) => panic!("{other:?}"),
        }
    }
    let mut quit = OutgoingMessage::new(server.pool(), 64).unwrap();
    quit.encode_raw(QUIT, 0, 0).unwrap();
    server.send(conn, quit).unwrap();
    assert_eq!(end(&mut server), (conn, DisconnectCause::Closed));
    assert!(other.0.wait().unwrap().success());
}

fn is_of_a_dead_peer(cause: DisconnectCause) -> bool {
    match cause {
        DisconnectCause::PeerGone => true,
        DisconnectCause::WorkRequest { status } => {
            matches!(status, WcStatus::RetryExcErr | WcStatus::WrFlushErr)
        }
        _ => false,
    }
}

#[test]
fn the_death_of_an_idle_peer_wakes_a_sleeper() {
    let (mut server, conn, mut other, _acceptance) = with_child("idle");
    assert!(server.poll().is_none());
    let sleeper = std::thread::spawn(move || {
        let ended = end(&mut server);
        (server, ended)
    });
    other.kill();
    let (server, (ended, cause)) = sleeper.join().unwrap();
    assert_eq!(ended, conn);
    assert!(is_of_a_dead_peer(cause), "{cause:?}");
    assert_eq!(server.pool().stats().live_buffers, 0);
}

#[test]
fn the_death_of_an_idle_peer_is_noticed_by_a_poller() {
    let (mut server, conn, mut other, _acceptance) = with_child("idle");
    assert!(server.poll().is_none());
    other.kill();
    match spin(&mut server) {
        Event::Disconnected { conn: ended, cause } => {
            assert_eq!(ended, conn);
            assert!(is_of_a_dead_peer(cause), "{cause:?}");
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(server.pool().stats().live_buffers, 0);
}

#[test]
fn the_death_of_a_peer_in_full_flood_leaves_nothing_behind() {
    let (mut server, conn, mut other, _acceptance) = with_child("flood");
    for number in 0..1000 {
        expect_note(&message(&mut server).1, number, b"flood");
    }
    other.kill();
    // What it sent before may still come, in order; then the end.
    let mut number = 1000;
    loop {
        match next(&mut server) {
            Event::Message { message, .. } => {
                expect_note(&message, number, b"flood");
                number += 1;
            }
            Event::Disconnected { conn: ended, cause } => {
                assert_eq!(ended, conn);
                assert!(is_of_a_dead_peer(cause), "{cause:?}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(server.pool().stats().live_buffers, 0);
}

#[test]
fn the_death_of_a_peer_ends_messages_and_reads_on_their_way() {
    let (mut server, conn, mut other, _acceptance) = with_child("echo");
    let remote = memory(&mut server);
    other.kill();
    let mut waiting = 0;
    for token in 0..40 {
        let into = server.pool().take(4096).unwrap();
        match server.read(conn, into, 0..4096, remote, token) {
            Ok(()) => waiting += 1,
            Err(error) => drop(error.buffer),
        }
        let mut message = server.message(256).unwrap();
        message.encode_raw(ECHO, token, 10).unwrap();
        let _ = server.send(conn, message);
    }
    loop {
        match next(&mut server) {
            Event::ReadDone { .. } => waiting -= 1,
            Event::Message { message, .. } => assert_eq!(message.kind(), ECHO),
            Event::Disconnected { conn: ended, cause } => {
                assert_eq!(ended, conn);
                assert!(is_of_a_dead_peer(cause), "{cause:?}");
                break;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(waiting, 0, "reads whose buffers did not come back");
    assert_eq!(server.pool().stats().live_buffers, 0);
}

#[test]
fn a_server_outlives_its_clients() {
    let mut server = endpoint(Config {
        max_connections: 3,
        ..config()
    });
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    for round in 0..6 {
        let mut other = Other::start("echo", acceptance.address);
        let Event::Connected { conn, .. } = next(&mut server) else {
            panic!()
        };
        memory(&mut server);
        let mut ping = server.message(256).unwrap();
        ping.encode_raw(ECHO, round, 1).unwrap();
        server.send(conn, ping).unwrap();
        assert_eq!(message(&mut server).1.tag(), round);
        other.kill();
        assert_eq!(end(&mut server).0, conn);
        assert_eq!(server.pool().stats().live_buffers, 0);
    }
}
