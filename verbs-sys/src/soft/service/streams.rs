//! The thread that looks after sockets: it makes connections for queue pairs, answers those of peers,
//! executes what comes on them, and waits for what polls do not. It starts with the first that is needed.

mod datagrams;
mod dial;
mod greet;
mod linger;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use rustix::time::Timespec;

pub(in crate::soft) use self::datagrams::{bind_udp, send_udp};
use self::dial::Dial;
use self::greet::Greeting;
use self::linger::Linger;
use crate::soft::fork;
use crate::soft::link::stream::mpa::Hello;
use crate::soft::link::stream::socket::Socket;
use crate::soft::link::{Link, signal};
use crate::soft::process::Process;

/// What an event is about: the upper half of its data. The lower half says which.
const WAKE: u32 = 0;
const LISTENER: u32 = 1;
const GREETING: u32 = 2;
const DIAL: u32 = 3;
const LINGER: u32 = 4;
const OUTBOUND: u32 = 5;
const INBOUND: u32 = 6;
const DATAGRAM: u32 = 7;

/// How long a listener is not looked at when it cannot be accepted from.
const REST: Duration = Duration::from_millis(100);

fn token(kind: u32, id: u32) -> u64 {
    u64::from(kind) << 32 | u64::from(id)
}

/// The way to the thread, for everybody else.
#[derive(Debug)]
pub(in crate::soft) struct Streams {
    epoll: OwnedFd,
    wake: OwnedFd,
    commands: Mutex<Vec<Command>>,
}

#[derive(Debug)]
enum Command {
    /// A socket that peers connect to.
    Listen(OwnedFd),
    /// A socket that datagrams of other hosts come to.
    Datagrams(OwnedFd),
    /// Connect a queue pair to its peer, for its requests.
    Dial(u32, Arc<Link>, Hello),
    /// Send what is left, then wait for the peer to close.
    Linger(Socket),
    Halt,
}

impl Streams {
    pub(in crate::soft) fn new() -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let data = EventData::new_u64(token(WAKE, 0));
        epoll::add(&epoll, &wake, data, EventFlags::IN)?;
        Ok(Self {
            epoll,
            wake,
            commands: Mutex::default(),
        })
    }

    fn tell(&self, command: Command) {
        self.commands
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(command);
        signal(&self.wake);
    }

    /// Takes connections and datagrams of other hosts.
    pub(in crate::soft) fn listen(&self, tcp: OwnedFd, udp: OwnedFd) {
        self.tell(Command::Listen(tcp));
        self.tell(Command::Datagrams(udp));
    }

    /// Takes connections of processes of this host.
    pub(in crate::soft) fn listen_on_host(&self, listener: OwnedFd) {
        self.tell(Command::Listen(listener));
    }

    pub(in crate::soft) fn dial(&self, qpn: u32, link: Arc<Link>, hello: Hello) {
        self.tell(Command::Dial(qpn, link, hello));
    }

    pub(in crate::soft) fn linger(&self, socket: Socket) {
        self.tell(Command::Linger(socket));
    }

    pub(in crate::soft) fn halt(&self) {
        self.tell(Command::Halt);
    }

    /// Looks once at the connection for a queue pair's requests: when something comes, or if `sends`,
    /// when the kernel takes more.
    pub(in crate::soft) fn watch_outbound(&self, qpn: u32, socket: &OwnedFd, sends: bool) {
        self.watch(socket, token(OUTBOUND, qpn), true, sends);
    }

    /// The same for the connection of its peer's requests.
    pub(in crate::soft) fn watch_inbound(
        &self,
        qpn: u32,
        socket: &OwnedFd,
        reads: bool,
        sends: bool,
    ) {
        self.watch(socket, token(INBOUND, qpn), reads, sends);
    }

    fn watch(&self, socket: &OwnedFd, token: u64, reads: bool, sends: bool) {
        let mut flags = EventFlags::ONESHOT;
        flags.set(EventFlags::IN, reads);
        flags.set(EventFlags::OUT, sends);
        let data = EventData::new_u64(token);
        let watched = match epoll::modify(&self.epoll, socket, data, flags) {
            Err(Errno::NOENT) => epoll::add(&self.epoll, socket, data, flags),
            done => done,
        };
        if let Err(error) = watched {
            tracing::error!(%error, fd = socket.as_raw_fd(), "cannot wait for a stream");
        }
    }
}

/// The thread's own state.
pub(super) struct Worker {
    process: Arc<Process>,
    shared: Arc<Streams>,
    listeners: Vec<OwnedFd>,
    datagrams: Option<OwnedFd>,
    greetings: HashMap<u32, Greeting>,
    dials: HashMap<u32, Dial>,
    lingering: HashMap<u32, Linger>,
    next: u32,
    /// Listeners that are not looked at until then.
    resting: Vec<(usize, Instant)>,
    halted: bool,
}

impl Worker {
    pub(super) fn new(process: &Arc<Process>, shared: Arc<Streams>) -> Self {
        Self {
            process: Arc::clone(process),
            shared,
            listeners: Vec::new(),
            datagrams: None,
            greetings: HashMap::new(),
            dials: HashMap::new(),
            lingering: HashMap::new(),
            next: 0,
            resting: Vec::new(),
            halted: false,
        }
    }

    pub(super) fn run(mut self) {
        let mut events: Vec<Event> = Vec::with_capacity(64);
        while !self.halted {
            let timeout = self.until_deadline().map(timespec);
            events.clear();
            let spare = rustix::buffer::spare_capacity(&mut events);
            match epoll::wait(&self.shared.epoll, spare, timeout.as_ref()) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the thread of streams cannot wait");
                    return;
                }
            }
            for event in &events {
                let data = event.data.u64();
                self.handle((data >> 32) as u32, data as u32);
            }
            self.expire();
        }
    }

    fn handle(&mut self, kind: u32, id: u32) {
        match kind {
            WAKE => self.take_commands(),
            LISTENER => self.accept(id as usize),
            DATAGRAM => self.take_datagrams(),
            GREETING => self.greet(id),
            DIAL => self.go_on_dialing(id),
            LINGER => self.go_on_lingering(id),
            OUTBOUND => {
                if let Some(qp) = self.process.qp(id) {
                    qp.serve_outbound();
                }
            }
            INBOUND => {
                if let Some(qp) = self.process.qp(id) {
                    qp.receive(true);
                }
            }
            _ => {}
        }
    }

    fn take_commands(&mut self) {
        let mut count = [0; 8];
        let _ = rustix::io::read(&self.shared.wake, &mut count);
        let commands = std::mem::take(
            &mut *self
                .shared
                .commands
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for command in commands {
            match command {
                Command::Listen(listener) => self.add_listener(listener),
                Command::Datagrams(socket) => self.add_datagrams(socket),
                Command::Dial(qpn, link, hello) => self.start_dialing(qpn, link, hello),
                Command::Linger(socket) => self.start_lingering(socket),
                Command::Halt => self.halted = true,
            }
        }
    }

    fn add_listener(&mut self, listener: OwnedFd) {
        let data = EventData::new_u64(token(LISTENER, self.listeners.len() as u32));
        match epoll::add(&self.shared.epoll, &listener, data, EventFlags::IN) {
            Ok(()) => self.listeners.push(listener),
            Err(error) => tracing::error!(%error, "cannot wait for peers to connect"),
        }
    }

    /// Does not look at a listener for a while.
    fn rest(&mut self, index: usize) {
        self.set_listener(index, EventFlags::empty());
        self.resting.push((index, Instant::now() + REST));
    }

    fn set_listener(&self, index: usize, flags: EventFlags) {
        let data = EventData::new_u64(token(LISTENER, index as u32));
        if let Some(listener) = self.listeners.get(index)
            && let Err(error) = epoll::modify(&self.shared.epoll, listener, data, flags)
        {
            tracing::error!(%error, "cannot wait for peers to connect");
        }
    }

    fn fresh(&mut self) -> u32 {
        self.next = self.next.wrapping_add(1);
        self.next
    }

    fn deadlines(&self) -> impl Iterator<Item = Instant> + '_ {
        let greetings = self.greetings.values().map(|greeting| greeting.deadline);
        let dials = self.dials.values().map(Dial::due);
        let lingering = self.lingering.values().map(|linger| linger.deadline);
        let resting = self.resting.iter().map(|(_, until)| *until);
        greetings.chain(dials).chain(lingering).chain(resting)
    }

    fn until_deadline(&self) -> Option<Duration> {
        let first = self.deadlines().min()?;
        Some(first.saturating_duration_since(Instant::now()))
    }

    /// Does what the time has come for.
    fn expire(&mut self) {
        let now = Instant::now();
        self.greetings.retain(|_, greeting| {
            let late = greeting.deadline <= now;
            if late {
                tracing::warn!(from = ?greeting.from, "closing a connection that does not greet");
            }
            !late
        });
        self.lingering.retain(|_, linger| linger.deadline > now);
        for (index, until) in std::mem::take(&mut self.resting) {
            if until > now {
                self.resting.push((index, until));
            } else {
                self.set_listener(index, EventFlags::IN);
            }
        }
        let due = |(id, dial): (&u32, &Dial)| (dial.due() <= now).then_some(*id);
        let due: Vec<u32> = self.dials.iter().filter_map(due).collect();
        for id in due {
            self.redial(id);
        }
    }
}

/// A socket that is made for an address.
fn socket(address: SocketAddr, kind: SocketType) -> Result<OwnedFd, Errno> {
    let family = match address {
        SocketAddr::V4(_) => AddressFamily::INET,
        SocketAddr::V6(_) => AddressFamily::INET6,
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, kind, flags, None)?;
    fork::made(&socket);
    Ok(socket)
}

/// Binds a socket to an address of ours, and to no other family's.
fn bind(socket: &OwnedFd, address: SocketAddr) -> Result<(), Errno> {
    if address.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(socket, true)?;
    }
    rustix::net::bind(socket, &address)
}

/// Listens for the queue pairs of other hosts.
pub(in crate::soft) fn bind_tcp(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = socket(address, SocketType::STREAM)?;
    rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
    bind(&socket, address)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// Sets what every stream of TCP has: no waiting for more to send, and an end when the other host is gone.
fn adjust_tcp(socket: &OwnedFd) -> Result<(), Errno> {
    use rustix::net::sockopt;
    sockopt::set_tcp_nodelay(socket, true)?;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(socket, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(socket, KEEP_ALIVE_PROBES)
}

/// An idle connection to a host that is gone ends after half a minute.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_ALIVE_PROBES: u32 = 3;

fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: duration.as_secs() as i64,
        // Not a moment too early.
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

/// Reads once into `buffer`, without waiting.
fn read_some(socket: impl AsFd, buffer: &mut Vec<u8>) -> Result<usize, Errno> {
    buffer.reserve(1024);
    loop {
        let spare = rustix::buffer::spare_capacity(buffer);
        match rustix::net::recv(&socket, spare, rustix::net::RecvFlags::DONTWAIT) {
            Ok((_, 0)) => return Err(Errno::CONNRESET),
            Ok((_, count)) => return Ok(count),
            Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}
