//! The server's side of connection set-up: one thread greets any number of peers at once, and none
//! can hold it up.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use crate::bring_up::{Local, agree};
use crate::error::{AcceptError, BindError, ConnectError};
use crate::greeting::{Greeting, Hello, RejectReason};
use crate::shared::{Acceptor, Established};
use crate::talk::{Discarded, Talk, timespec};

/// Peers that are being greeted at once; the one that has taken longest makes room for one more.
const MAX_PENDING: usize = 256;

/// How long no connection is taken after the process ran out of descriptors.
const PAUSE: Duration = Duration::from_millis(50);

const HELLO: &str = "hello";
const READY: &str = "ready";

/// Listens on a TCP address and makes connections for one or more endpoints.
///
/// One thread calls [`accept`](Self::accept) in a loop and hands each connection over to its
/// endpoint. Peers that are slow, silent or hostile cost a socket until their time is over, nothing
/// else.
#[derive(Debug)]
pub struct Listener {
    tcp: TcpListener,
    address: SocketAddr,
    acceptors: Vec<Acceptor>,
    pending: VecDeque<Pending>,
    paused_until: Option<Instant>,
    stop: Arc<Stop>,
}

#[derive(Debug)]
struct Stop {
    stopped: AtomicBool,
    bell: OwnedFd,
}

/// Stops a [`Listener`] from another thread.
#[derive(Clone, Debug)]
pub struct Stopper(Arc<Stop>);

impl Stopper {
    /// Makes the listener's current and all later [`accept`](Listener::accept) return
    /// [`AcceptError::Stopped`].
    pub fn stop(&self) {
        self.0.stopped.store(true, Ordering::Release);
        // It can only fail where the counter is full, and then the bell has rung.
        let _ = rustix::io::write(&self.0.bell, &1u64.to_ne_bytes());
    }
}

/// A peer in the middle of its greeting.
#[derive(Debug)]
struct Pending {
    talk: Talk,
    state: State,
    since: Instant,
    timeout: Duration,
}

#[derive(Debug)]
enum State {
    /// Its hello has not come.
    Hello,
    /// Its queue pair and ours know each other; it has not said that it is ready.
    Ready(Box<Local>, Box<Hello>),
    /// It was told no, and may read that.
    Rejected,
}

impl Pending {
    fn deadline(&self) -> Instant {
        self.since + self.timeout
    }
}

impl Listener {
    /// Listens at `address` for connections to the endpoints behind `acceptors`; each new
    /// connection goes to the one that has fewest.
    ///
    /// Port 0 takes a free one; [`local_addr`](Self::local_addr) tells which.
    ///
    /// # Errors
    ///
    /// [`BindError`]: no such address, or it is in use.
    pub fn bind(
        address: impl ToSocketAddrs + ToString,
        acceptors: Vec<Acceptor>,
    ) -> Result<Self, BindError> {
        if acceptors.is_empty() {
            return Err(BindError::NoEndpoint);
        }
        let resolve = |source| BindError::Resolve {
            address: address.to_string(),
            source,
        };
        let nothing = || resolve(ErrorKind::NotFound.into());
        let address = address
            .to_socket_addrs()
            .map_err(resolve)?
            .next()
            .ok_or_else(nothing)?;
        let error = |source: io::Error| match source.kind() {
            ErrorKind::AddrInUse => BindError::AddressInUse { address, source },
            _ => BindError::Io { address, source },
        };
        let tcp = TcpListener::bind(address).map_err(error)?;
        tcp.set_nonblocking(true).map_err(error)?;
        let address = tcp.local_addr().map_err(error)?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| error(io::Error::from(errno)))?;
        let stop = Arc::new(Stop {
            stopped: AtomicBool::new(false),
            bell,
        });
        Ok(Self {
            tcp,
            address,
            acceptors,
            pending: VecDeque::new(),
            paused_until: None,
            stop,
        })
    }

    /// The address that peers connect to.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// A handle that stops this listener from another thread.
    pub fn stopper(&self) -> Stopper {
        Stopper(Arc::clone(&self.stop))
    }

    /// Waits for the next connection: both queue pairs can receive, and nothing can be lost on it.
    ///
    /// The peer may send once the connection is [handed over](Established::hand_over) or
    /// [adopted](crate::Endpoint::adopt).
    ///
    /// # Errors
    ///
    /// [`AcceptError::Greeting`] concerns one peer only: call again. The others end the listener.
    pub fn accept(&mut self) -> Result<Established, AcceptError> {
        loop {
            if self.stop.stopped.load(Ordering::Acquire) {
                return Err(AcceptError::Stopped);
            }
            if let Some(outcome) = self.progress() {
                return outcome.map_err(AcceptError::Greeting);
            }
            self.wait().map_err(AcceptError::Io)?;
            self.take_new()?;
        }
    }

    /// Lets every peer that has said something go on; the first outcome, if any.
    fn progress(&mut self) -> Option<Result<Established, ConnectError>> {
        for _ in 0..self.pending.len() {
            let mut pending = self.pending.pop_front()?;
            match step(&self.acceptors, &mut pending) {
                Step::Wait => self.pending.push_back(pending),
                Step::Forget => {}
                Step::Failed(error) => {
                    if matches!(error, ConnectError::Closed { .. } | ConnectError::Io { .. }) {
                        return Some(Err(error));
                    }
                    // It was told why; it is given a moment to read that.
                    pending.state = State::Rejected;
                    self.pending.push_back(pending);
                    return Some(Err(error));
                }
                Step::Done(local, hello) => {
                    return Some(local.finish(pending.talk, &hello, true));
                }
            }
        }
        None
    }

    /// Sleeps until a peer says something, a new one comes, or a deadline is over.
    fn wait(&mut self) -> io::Result<()> {
        let now = Instant::now();
        if self.paused_until.is_some_and(|until| until <= now) {
            self.paused_until = None;
        }
        let deadline = self
            .pending
            .iter()
            .map(Pending::deadline)
            .chain(self.paused_until)
            .min();
        let timeout = deadline.map(|deadline| timespec(deadline.saturating_duration_since(now)));
        let mut fds = Vec::with_capacity(2 + self.pending.len());
        fds.push(PollFd::new(&self.stop.bell, PollFlags::IN));
        if self.paused_until.is_none() {
            fds.push(PollFd::new(&self.tcp, PollFlags::IN));
        }
        fds.extend(
            self.pending
                .iter()
                .map(|pending| PollFd::new(pending.talk.stream(), PollFlags::IN)),
        );
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Takes the connections that have come.
    fn take_new(&mut self) -> Result<(), AcceptError> {
        while self.paused_until.is_none() {
            match self.tcp.accept() {
                Ok((stream, peer)) => self.greet(stream, peer)?,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if is_about_one_peer(&error) => {}
                Err(error) if is_shortage(&error) => {
                    tracing::warn!(%error, "cannot accept a connection now");
                    self.paused_until = Some(Instant::now() + PAUSE);
                }
                Err(error) => return Err(AcceptError::Io(error)),
            }
        }
        Ok(())
    }

    fn greet(&mut self, stream: TcpStream, peer: SocketAddr) -> Result<(), AcceptError> {
        if self.pending.len() >= MAX_PENDING
            && let Some(oldest) = (0..self.pending.len()).min_by_key(|&at| self.pending[at].since)
        {
            self.pending.remove(oldest);
        }
        let talk = Talk::new(stream, peer).map_err(AcceptError::Greeting)?;
        let timeout = self.acceptors[0].config().greeting_timeout;
        self.pending.push_back(Pending {
            talk,
            state: State::Hello,
            since: Instant::now(),
            timeout,
        });
        Ok(())
    }
}

enum Step {
    Wait,
    Forget,
    Failed(ConnectError),
    Done(Box<Local>, Box<Hello>),
}

/// Takes one peer's greeting as far as it goes without waiting.
fn step(acceptors: &[Acceptor], pending: &mut Pending) -> Step {
    let late = Instant::now() >= pending.deadline();
    let waiting_for = match &pending.state {
        State::Hello => HELLO,
        State::Ready(..) => READY,
        State::Rejected => {
            let over = late || pending.talk.discard() == Discarded::Ended;
            return if over { Step::Forget } else { Step::Wait };
        }
    };
    let heard = match pending.talk.hear(waiting_for) {
        Ok(Some(heard)) => heard,
        Ok(None) if late => {
            let peer = pending.talk.peer();
            pending.talk.reject(
                RejectReason::Malformed,
                &format!("no {waiting_for} within {:?}", pending.timeout),
            );
            return Step::Failed(ConnectError::Timeout {
                peer,
                waiting_for,
                after: pending.timeout,
            });
        }
        Ok(None) => return Step::Wait,
        Err(error) => return Step::Failed(error),
    };
    match (
        std::mem::replace(&mut pending.state, State::Rejected),
        heard,
    ) {
        (State::Hello, Greeting::Hello(hello)) => {
            match answer(acceptors, &mut pending.talk, &hello) {
                Ok(local) => {
                    pending.state = State::Ready(Box::new(local), Box::new(hello));
                    Step::Wait
                }
                Err(error) => Step::Failed(error),
            }
        }
        (State::Ready(local, hello), Greeting::Ready) => Step::Done(local, hello),
        (_, heard) => Step::Failed(pending.talk.out_of_place(&heard, waiting_for)),
    }
}

/// Makes a queue pair for a peer that has said hello, and tells it.
fn answer(acceptors: &[Acceptor], talk: &mut Talk, hello: &Hello) -> Result<Local, ConnectError> {
    let peer = talk.peer();
    let least = acceptors
        .iter()
        .min_by_key(|acceptor| acceptor.connections());
    let Some(acceptor) = least else {
        return Err(ConnectError::WrongEndpoint);
    };
    let refused = agree(&acceptor.introduction(), hello).err();
    if let Some((reason, text)) = refused {
        talk.reject(reason, &text);
        return Err(ConnectError::Refused { peer, reason, text });
    }
    let made = Local::new(acceptor.shared(), peer).and_then(|mut local| {
        local.connect(hello)?;
        Ok(local)
    });
    match made {
        Ok(local) => {
            talk.say(&Greeting::Hello(*local.hello()))?;
            Ok(local)
        }
        Err(error) => {
            let (reason, text) = match &error {
                ConnectError::Full { limit } => (
                    RejectReason::Full,
                    format!("the server has all of its {limit} connections"),
                ),
                // What failed here is of use to the peer's owner; where and how is not the peer's
                // business.
                _ => (
                    RejectReason::Failed,
                    "the server cannot make a connection now".to_owned(),
                ),
            };
            talk.reject(reason, &text);
            Err(error)
        }
    }
}

/// Errors that `accept` passes on from the connection it was about to return; see accept(2).
fn is_about_one_peer(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionAborted | ErrorKind::ConnectionReset | ErrorKind::PermissionDenied
    ) || error.raw_os_error().is_some_and(|code| {
        use rustix::io::Errno;
        [
            Errno::PROTO,
            Errno::NETDOWN,
            Errno::HOSTUNREACH,
            Errno::NETUNREACH,
            Errno::OPNOTSUPP,
            Errno::HOSTDOWN,
        ]
        .iter()
        .any(|errno| errno.raw_os_error() == code)
    })
}

/// Errors that are over when somebody closes something.
fn is_shortage(error: &io::Error) -> bool {
    use rustix::io::Errno;
    [Errno::MFILE, Errno::NFILE, Errno::NOBUFS, Errno::NOMEM]
        .iter()
        .any(|errno| error.raw_os_error() == Some(errno.raw_os_error()))
}
