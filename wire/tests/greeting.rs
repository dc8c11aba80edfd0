//! Connections that do not come to be: each side says why, and neither waits for ever.

mod common;

use std::error::Error as _;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use common::*;
use wire::{
    AcceptError, BindError, Config, ConnectError, Event, GreetingError, Listener, RejectReason,
};

fn quick() -> Config {
    Config {
        max_connections: 2,
        greeting_timeout: Duration::from_millis(300),
        ..Config::default()
    }
}

/// As [`quick`], where the timeout is not what is tested.
fn patient() -> Config {
    Config {
        greeting_timeout: PATIENCE,
        ..quick()
    }
}

/// A frame of the greeting, by hand.
fn frame(version: u16, kind: u16, rest: &[u8]) -> Vec<u8> {
    let mut bytes = b"zcg\0".to_vec();
    bytes.extend(version.to_le_bytes());
    bytes.extend(kind.to_le_bytes());
    bytes.extend((rest.len() as u32).to_le_bytes());
    bytes.extend(rest);
    bytes
}

/// What a listener says to a peer that says `bytes`, and what its own error is.
fn say_to_listener(config: Config, bytes: &[u8]) -> (Vec<u8>, ConnectError) {
    let endpoint = endpoint(config);
    let mut listener = Listener::bind("127.0.0.1:0", vec![endpoint.acceptor()]).unwrap();
    let mut stream = TcpStream::connect(listener.local_addr()).unwrap();
    stream.write_all(bytes).unwrap();
    let error = match listener.accept() {
        Err(AcceptError::Greeting(error)) => error,
        other => panic!("{other:?}"),
    };
    // The listener goes on, which lets the peer read what it was told.
    let stopper = listener.stopper();
    let thread =
        std::thread::spawn(move || assert!(matches!(listener.accept(), Err(AcceptError::Stopped))));
    let mut answer = vec![];
    stream.read_to_end(&mut answer).unwrap();
    stopper.stop();
    thread.join().unwrap();
    (answer, error)
}

/// The reason and text of a rejection.
fn rejection(answer: &[u8]) -> (u16, String) {
    assert_eq!(
        answer[..8],
        frame(1, 3, &[])[..8],
        "not a rejection: {answer:x?}"
    );
    let reason = u16::from_le_bytes([answer[12], answer[13]]);
    (reason, String::from_utf8(answer[14..].to_vec()).unwrap())
}

#[test]
fn a_client_of_another_version_is_told() {
    let (answer, error) = say_to_listener(patient(), &frame(2, 1, &[0; 52]));
    assert!(
        matches!(
            error,
            ConnectError::Version {
                theirs: 2,
                ours: 1,
                ..
            }
        ),
        "{error}"
    );
    assert!(error.to_string().contains("version"), "{error}");
    let (reason, text) = rejection(&answer);
    assert_eq!(reason, 1);
    assert!(text.contains("version 1") && text.contains('2'), "{text}");
}

#[test]
fn a_client_that_speaks_something_else_is_told() {
    let cases: [(&str, Vec<u8>); 6] = [
        (
            "another protocol",
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
        ),
        ("a hello too short", frame(1, 1, &[0; 51])),
        ("a hello too long", frame(1, 1, &[0; 4000])),
        ("a hello of zeros", frame(1, 1, &[0; 52])),
        ("a type that there is not", frame(1, 99, &[])),
        ("ready before hello", frame(1, 2, &[])),
    ];
    for (name, bytes) in cases {
        let (answer, error) = say_to_listener(patient(), &bytes);
        assert!(
            matches!(error, ConnectError::Malformed { .. }),
            "{name}: {error}"
        );
        let (reason, text) = rejection(&answer);
        assert_eq!(reason, 2, "{name}");
        assert_eq!(
            text,
            error.source().unwrap().to_string(),
            "{name}: both sides name the same fault"
        );
    }
}

#[test]
fn a_client_that_is_slow_or_silent_is_given_up() {
    for bytes in [&b""[..], b"zcg", &frame(1, 1, &[0; 52])[..30]] {
        let (_, error) = say_to_listener(quick(), bytes);
        assert!(
            matches!(
                error,
                ConnectError::Timeout {
                    waiting_for: "hello",
                    ..
                }
            ),
            "{error}"
        );
    }
}

#[test]
fn silent_clients_do_not_hold_up_others() {
    let mut server = endpoint(patient());
    let mut client = endpoint(patient());
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    let silent: Vec<_> = (0..50)
        .map(|_| TcpStream::connect(acceptance.address).unwrap())
        .collect();
    let drip: Vec<_> = silent
        .iter()
        .map(|mut stream| stream.write_all(b"zc"))
        .collect();
    assert!(drip.iter().all(Result::is_ok));
    let (to_server, to_client) = connect(&mut client, &mut server, acceptance.address);
    client
        .send(to_server, note(&client, 1, b"through"))
        .unwrap();
    let (conn, received) = message(&mut server);
    assert_eq!(conn, to_client);
    expect_note(&received, 1, b"through");
}

#[test]
fn a_client_that_closes_is_named() {
    let endpoint = endpoint(patient());
    let mut listener = Listener::bind("127.0.0.1:0", vec![endpoint.acceptor()]).unwrap();
    drop(TcpStream::connect(listener.local_addr()).unwrap());
    let Err(AcceptError::Greeting(error)) = listener.accept() else {
        panic!()
    };
    assert!(
        matches!(
            error,
            ConnectError::Closed {
                waiting_for: "hello",
                ..
            }
        ),
        "{error}"
    );
}

/// What a client says of a server that answers `bytes`, and what it tells that server.
fn answer_client(config: Config, bytes: &'static [u8]) -> (Vec<u8>, ConnectError) {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let thread = std::thread::spawn(move || {
        let (mut stream, _) = server.accept().unwrap();
        stream.write_all(bytes).unwrap();
        let mut heard = vec![];
        stream.read_to_end(&mut heard).unwrap();
        heard
    });
    let error = endpoint(config).connect(address).unwrap_err();
    (thread.join().unwrap(), error)
}

#[test]
fn a_server_of_another_version_is_named_and_told() {
    let (heard, error) = answer_client(patient(), b"zcg\0\x07\0\x01\0\x34\0\0\0");
    assert!(
        matches!(
            error,
            ConnectError::Version {
                theirs: 7,
                ours: 1,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(rejection(&heard[64..]).0, 1);
}

#[test]
fn a_server_that_speaks_something_else_is_named_and_told() {
    let (heard, error) = answer_client(patient(), b"220 smtp ready\r\n");
    let ConnectError::Malformed { source, .. } = error else {
        panic!("{error}")
    };
    assert_eq!(source, GreetingError::Magic { found: *b"220 " });
    assert_eq!(rejection(&heard[64..]).0, 2);
}

#[test]
fn a_servers_rejection_is_passed_on() {
    let (_, error) = answer_client(patient(), b"zcg\0\x05\0\x03\0\x0a\0\0\0\x05\0too busy");
    let ConnectError::Rejected { reason, text, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!((*reason, text.as_str()), (RejectReason::Full, "too busy"));
    assert!(error.to_string().contains("too busy"), "{error}");
}

#[test]
fn a_silent_server_is_given_up() {
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let error = endpoint(quick())
        .connect(server.local_addr().unwrap())
        .unwrap_err();
    assert!(
        matches!(
            error,
            ConnectError::Timeout {
                waiting_for: "hello",
                ..
            }
        ),
        "{error}"
    );
}

#[test]
fn nobody_at_the_address() {
    let free = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let error = endpoint(patient()).connect(free).unwrap_err();
    assert!(matches!(error, ConnectError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains(&free.to_string()), "{error}");
    let error = endpoint(patient()).connect("no address").unwrap_err();
    assert!(matches!(error, ConnectError::Resolve { .. }), "{error}");
}

#[test]
fn an_address_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let endpoint = endpoint(patient());
    let error = Listener::bind(address, vec![endpoint.acceptor()]).unwrap_err();
    assert!(matches!(error, BindError::AddressInUse { .. }), "{error}");
    assert!(error.to_string().contains(&address.to_string()), "{error}");
    let error = Listener::bind(address, vec![]).unwrap_err();
    assert!(matches!(error, BindError::NoEndpoint), "{error}");
    let error = Listener::bind("nowhere:x", vec![endpoint.acceptor()]).unwrap_err();
    assert!(matches!(error, BindError::Resolve { .. }), "{error}");
}

/// Connects a client to a server that refuses it: the errors of both.
fn refused(server: Config, client: Config) -> (ConnectError, ConnectError) {
    let server = endpoint(server);
    let mut listener = Listener::bind("127.0.0.1:0", vec![server.acceptor()]).unwrap();
    let address = listener.local_addr();
    let thread = std::thread::spawn(move || endpoint(client).connect(address).unwrap_err());
    let Err(AcceptError::Greeting(error)) = listener.accept() else {
        panic!()
    };
    (error, thread.join().unwrap())
}

#[test]
fn another_application_or_version_of_it_is_refused_and_both_sides_say_so() {
    let base = || Config {
        application: 7,
        application_version: 2,
        ..patient()
    };
    let others = [
        Config {
            application: 8,
            ..base()
        },
        Config {
            application_version: 3,
            ..base()
        },
    ];
    for other in others {
        let (ours, theirs) = refused(base(), other);
        let ConnectError::Refused {
            reason: RejectReason::Application,
            text,
            ..
        } = ours
        else {
            panic!("{ours}")
        };
        let ConnectError::Rejected {
            reason: RejectReason::Application,
            text: heard,
            ..
        } = theirs
        else {
            panic!("{theirs}")
        };
        assert_eq!(text, heard);
        assert!(text.contains("wrong protocol"), "{text}");
    }
}

#[test]
fn a_full_server_refuses_until_a_connection_ends() {
    let mut server = endpoint(patient());
    let mut client = endpoint(Config {
        max_connections: 8,
        ..patient()
    });
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    let first = connect(&mut client, &mut server, acceptance.address);
    connect(&mut client, &mut server, acceptance.address);
    let error = client.connect(acceptance.address).unwrap_err();
    assert!(
        matches!(
            error,
            ConnectError::Rejected {
                reason: RejectReason::Full,
                ..
            }
        ),
        "{error}"
    );
    client.close(first.0);
    assert!(matches!(next(&mut server), Event::Disconnected { .. }));
    connect(&mut client, &mut server, acceptance.address);
}

#[test]
fn a_full_client_says_so_itself() {
    let mut server = endpoint(Config {
        max_connections: 8,
        ..patient()
    });
    let mut client = endpoint(patient());
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    connect(&mut client, &mut server, acceptance.address);
    connect(&mut client, &mut server, acceptance.address);
    let error = client.connect(acceptance.address).unwrap_err();
    assert!(matches!(error, ConnectError::Full { limit: 2 }), "{error}");
}

#[test]
fn connections_are_shared_out_over_endpoints() {
    let mut servers = [endpoint(patient()), endpoint(patient())];
    let mut client = endpoint(Config {
        max_connections: 8,
        ..patient()
    });
    let acceptance = Acceptance::new(servers.iter().map(wire::Endpoint::acceptor).collect());
    let connector = client.acceptor();
    let address = acceptance.address;
    let thread = std::thread::spawn(move || [(); 4].map(|()| connector.connect(address).unwrap()));
    let mut counts = [0, 0];
    while counts != [2, 2] {
        for (count, server) in counts.iter_mut().zip(&mut servers) {
            if let Some(Event::Connected { .. }) = server.poll() {
                *count += 1;
            }
        }
        assert!(counts.iter().all(|&count| count <= 2), "{counts:?}");
    }
    for established in thread.join().unwrap() {
        client.adopt(established).unwrap();
    }
}

#[test]
fn a_connection_made_for_another_endpoint_is_refused() {
    let mut server = endpoint(patient());
    let (mut client, mut other) = (endpoint(patient()), endpoint(patient()));
    let acceptance = Acceptance::new(vec![server.acceptor()]);
    let (connector, address) = (client.acceptor(), acceptance.address);
    let thread = std::thread::spawn(move || connector.connect(address).unwrap());
    assert!(matches!(next(&mut server), Event::Connected { .. }));
    let established = thread.join().unwrap();
    assert!(matches!(
        other.adopt(established),
        Err(ConnectError::WrongEndpoint)
    ));
    // It ended with that, and its place is free again.
    assert!(matches!(next(&mut server), Event::Disconnected { .. }));
    assert_eq!(client.acceptor().connections(), 0);
    assert!(client.poll().is_none());
}

#[test]
fn a_connection_for_an_endpoint_that_is_gone_is_refused() {
    let server = endpoint(patient());
    let mut client = endpoint(patient());
    let mut listener = Listener::bind("127.0.0.1:0", vec![server.acceptor()]).unwrap();
    let address = listener.local_addr();
    let thread = std::thread::spawn(move || client.connect(address));
    let established = listener.accept().unwrap();
    drop(server);
    assert!(matches!(
        established.hand_over(),
        Err(ConnectError::WrongEndpoint)
    ));
    assert!(matches!(
        thread.join().unwrap(),
        Err(ConnectError::Closed {
            waiting_for: "ready",
            ..
        })
    ));
}
