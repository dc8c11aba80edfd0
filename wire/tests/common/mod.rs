//! What the tests of connections share: a device, a pool, endpoints that are connected to each
//! other.
#![allow(dead_code, reason = "each test binary uses its own part")]

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use mr_pool::Pool;
use rkyv::with::InlineAsBox;
use rkyv::{Archive, Serialize};
use verbs_sys::{AccessFlags, ProtectionDomain, find_device};
use wire::{
    Acceptor, Config, ConnectionId, DisconnectCause, Endpoint, Event, Listener, OutgoingMessage,
    Received, Stopper,
};

/// Longer than anything takes that works, on a loaded machine too; a test that waits this long has
/// failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Kind of [`Note`]s.
pub const NOTE: u16 = 1;

/// A message.
#[derive(Archive, Serialize)]
pub struct Note<'a> {
    pub number: u64,
    #[rkyv(with = InlineAsBox)]
    pub text: &'a [u8],
}

/// The device that the environment names, else the usual one; its own protection domain each time.
pub fn domain() -> ProtectionDomain {
    let device = find_device(None).expect("a device");
    device
        .open()
        .expect("the device opens")
        .alloc_pd()
        .expect("a protection domain")
}

pub fn pool(pd: &ProtectionDomain) -> Pool {
    Pool::builder(pd)
        .access(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ)
        .build()
        .expect("a pool")
}

/// Settings under which every queue is soon full.
pub fn small() -> Config {
    Config {
        recv_depth: 8,
        send_depth: 4,
        queue_limit: 6,
        max_connections: 4,
        message_size: 1024,
        ..Config::default()
    }
}

pub fn endpoint(config: Config) -> Endpoint {
    endpoint_on(&domain(), config)
}

pub fn endpoint_on(pd: &ProtectionDomain, config: Config) -> Endpoint {
    Endpoint::new(pd, &pool(pd), config).expect("an endpoint")
}

/// A thread that accepts connections and hands them over, until it is dropped.
pub struct Acceptance {
    pub address: SocketAddr,
    stopper: Stopper,
    thread: Option<JoinHandle<()>>,
}

impl Acceptance {
    pub fn new(acceptors: Vec<Acceptor>) -> Self {
        let mut listener = Listener::bind("127.0.0.1:0", acceptors).expect("a listener");
        let (address, stopper) = (listener.local_addr(), listener.stopper());
        let thread = std::thread::spawn(move || {
            loop {
                match listener.accept() {
                    Ok(established) => established.hand_over().expect("the endpoint lives"),
                    Err(wire::AcceptError::Greeting(_)) => {}
                    Err(wire::AcceptError::Stopped) => return,
                    Err(other) => panic!("{other}"),
                }
            }
        });
        Self {
            address,
            stopper,
            thread: Some(thread),
        }
    }

    /// Accepts no more; the thread has ended when this returns.
    pub fn end(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stopper.stop();
            assert!(thread.join().is_ok(), "the accepting thread panicked");
        }
    }
}

impl Drop for Acceptance {
    fn drop(&mut self) {
        self.end();
    }
}

/// Two endpoints of one process, connected: the first is the server's.
pub struct Pair {
    pub server: Endpoint,
    pub client: Endpoint,
    /// The connection, as the server knows it.
    pub to_client: ConnectionId,
    /// The connection, as the client knows it.
    pub to_server: ConnectionId,
    pub acceptance: Acceptance,
    /// The server's protection domain.
    pub server_domain: ProtectionDomain,
}

impl Pair {
    pub fn new(server: Config, client: Config) -> Self {
        let server_domain = domain();
        let mut server = endpoint_on(&server_domain, server);
        let mut client = endpoint(client);
        let acceptance = Acceptance::new(vec![server.acceptor()]);
        let (to_server, to_client) = connect(&mut client, &mut server, acceptance.address);
        Self {
            server,
            client,
            to_client,
            to_server,
            acceptance,
            server_domain,
        }
    }
}

/// Connects `client` to the listener at `address`, which accepts for `server`.
pub fn connect(
    client: &mut Endpoint,
    server: &mut Endpoint,
    address: SocketAddr,
) -> (ConnectionId, ConnectionId) {
    let connector = client.acceptor();
    let thread = std::thread::spawn(move || connector.connect(address));
    let to_client = match next(server) {
        Event::Connected { conn, .. } => conn,
        other => panic!("{other:?} instead of a connection"),
    };
    let established = thread.join().expect("no panic").expect("a connection");
    (
        client.adopt(established).expect("its own endpoint"),
        to_client,
    )
}

/// The next event, sleeping until it comes.
pub fn next(endpoint: &mut Endpoint) -> Event {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(event) = endpoint.poll() {
            return event;
        }
        let left = deadline.saturating_duration_since(Instant::now());
        assert!(!left.is_zero(), "no event within {PATIENCE:?}");
        endpoint.wait(Some(left)).expect("it can wait");
    }
}

/// The next event, spinning until it comes.
pub fn spin(endpoint: &mut Endpoint) -> Event {
    let deadline = Instant::now() + PATIENCE;
    loop {
        for _ in 0..10_000 {
            if let Some(event) = endpoint.poll() {
                return event;
            }
            std::hint::spin_loop();
        }
        assert!(Instant::now() < deadline, "no event within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

/// The next event, which must be a message.
pub fn message(endpoint: &mut Endpoint) -> (ConnectionId, Received) {
    match next(endpoint) {
        Event::Message { conn, message } => (conn, message),
        other => panic!("{other:?} instead of a message"),
    }
}

/// The next event, which must be the end of a connection.
pub fn end(endpoint: &mut Endpoint) -> (ConnectionId, DisconnectCause) {
    match next(endpoint) {
        Event::Disconnected { conn, cause } => (conn, cause),
        other => panic!("{other:?} instead of the end"),
    }
}

pub fn note(endpoint: &Endpoint, number: u64, text: &[u8]) -> OutgoingMessage {
    let mut message = endpoint.message(text.len() + 128).expect("memory");
    message
        .encode(NOTE, number, &Note { number, text })
        .expect("it fits");
    message
}

/// Checks that a message is the note that [`note`] makes.
pub fn expect_note(message: &Received, number: u64, text: &[u8]) {
    assert_eq!((message.kind(), message.tag()), (NOTE, number));
    let note = message.view::<Note>().expect("a note");
    assert_eq!((note.number.to_native(), &*note.text), (number, text));
}
