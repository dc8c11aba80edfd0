//! Sockets that the thread looks after: listeners, and streams of messages.

use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketAddrAny};

use crate::fork::Mine;
use crate::message::{Message, MessageError};
use crate::protocol::Ending;
use crate::shared::{Key, State, new_key};

/// How long what is last said to a peer may take to leave.
const LINGER: Duration = Duration::from_secs(5);
/// Bytes that are read at a time, more than any message has.
const CHUNK: usize = 512;

/// A socket.
#[derive(Debug)]
pub enum Socket {
    /// Peers connect to it.
    Listener {
        /// The descriptor.
        fd: Mine,
        /// Who listens.
        endpoint: Key,
    },
    /// Messages go through it.
    Stream(Stream),
    /// None: an identifier waits until it tries again to connect.
    Pause {
        /// Which.
        endpoint: Key,
    },
}

/// A stream of messages.
#[derive(Debug)]
pub struct Stream {
    /// The descriptor.
    pub fd: Mine,
    /// Whose it is.
    pub role: Role,
    /// Where the other end is.
    pub origin: Origin,
    input: Vec<u8>,
    output: Vec<u8>,
    /// Whether it is watched for room for `output`.
    is_full: bool,
}

/// Whose a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// An identifier's, being connected.
    Dialing(Key),
    /// A listener's, who waits for the first message.
    Greeting(Key),
    /// An identifier's.
    Talking(Key),
    /// Nobody's: its last message is leaving.
    Leaving,
}

/// Where the other end of a stream is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// In a process of this host and user.
    Host,
    /// Anywhere.
    Network {
        /// The address here.
        local: SocketAddr,
        /// The address there.
        peer: SocketAddr,
    },
}

/// Both ends of a connection through the network.
///
/// # Errors
///
/// `ENOTCONN` if it has been closed already.
pub fn origin_of(fd: impl AsFd) -> Result<Origin, Errno> {
    let internet = |address: SocketAddrAny| SocketAddr::try_from(address);
    let local = internet(rustix::net::getsockname(&fd)?)?;
    let peer = rustix::net::getpeername(&fd)?.ok_or(Errno::NOTCONN)?;
    Ok(Origin::Network {
        local,
        peer: internet(peer)?,
    })
}

impl State {
    /// Has the thread look after a stream.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, `ENOSPC`: the kernel does not watch so many.
    pub fn add_stream(&mut self, fd: Mine, role: Role, origin: Origin) -> Result<Key, Errno> {
        let watched = if matches!(role, Role::Dialing(_)) {
            EventFlags::OUT
        } else {
            EventFlags::IN
        };
        let stream = Stream {
            fd,
            role,
            origin,
            input: Vec::new(),
            output: Vec::new(),
            is_full: false,
        };
        self.add_socket(Socket::Stream(stream), watched)
    }

    /// Has the thread look after a socket.
    ///
    /// # Errors
    ///
    /// As for [`Self::add_stream`].
    pub fn add_socket(&mut self, socket: Socket, watched: EventFlags) -> Result<Key, Errno> {
        let key = new_key();
        if let Some(fd) = socket.fd() {
            self.engine()?.watch(fd, key, watched)?;
        }
        self.sockets.insert(key, socket);
        Ok(key)
    }

    /// Closes a socket.
    pub fn close(&mut self, key: Key) {
        self.clear_timer(key);
        let socket = self.sockets.remove(&key);
        if let (Some(engine), Some(fd)) = (&self.engine, socket.as_ref().and_then(Socket::fd)) {
            engine.forget(fd);
        }
    }

    /// The stream of a key.
    pub fn stream(&mut self, key: Key) -> Option<&mut Stream> {
        match self.sockets.get_mut(&key)? {
            Socket::Stream(stream) => Some(stream),
            Socket::Listener { .. } | Socket::Pause { .. } => None,
        }
    }

    /// Sends a message. What does not leave at once leaves later; that the peer has gone is learned by reading.
    pub fn send(&mut self, key: Key, message: &Message) {
        if let Some(stream) = self.stream(key) {
            stream.output.extend(message.encode());
            self.flush(key);
        }
    }

    /// Sends the last message of a stream, and closes it once that has left.
    pub fn send_last(&mut self, key: Key, message: &Message) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        stream.role = Role::Leaving;
        self.send(key, message);
        if self.sockets.contains_key(&key) {
            self.set_timer(key, Instant::now() + LINGER);
        }
    }

    /// Sends what waits.
    fn flush(&mut self, key: Key) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        while !stream.output.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(&stream.fd, &stream.output, flags) {
                Ok(sent) => drop(stream.output.drain(..sent)),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                // Whoever reads finds out.
                Err(_) => stream.output.clear(),
            }
        }
        let is_full = !stream.output.is_empty();
        if stream.role == Role::Leaving && !is_full {
            self.close(key);
        } else if stream.is_full != is_full {
            stream.is_full = is_full;
            let mut watched = EventFlags::IN;
            watched.set(EventFlags::OUT, is_full);
            self.watch_for(key, watched);
        }
    }

    /// Changes what is waited for on a stream.
    pub fn watch_for(&mut self, key: Key, watched: EventFlags) {
        let fd = self.sockets.get(&key).and_then(Socket::fd);
        if let (Some(engine), Some(fd)) = (&self.engine, fd) {
            engine.change(fd, key, watched);
        }
    }

    /// Something has happened on a socket.
    pub fn socket_ready(&mut self, key: Key, flags: EventFlags) {
        match self.sockets.get(&key) {
            Some(Socket::Listener { .. }) => self.accept(key),
            Some(Socket::Stream(stream)) => {
                if let Role::Dialing(endpoint) = stream.role {
                    self.dialed(endpoint, key);
                    return;
                }
                if flags.contains(EventFlags::OUT) {
                    self.flush(key);
                }
                if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
                    self.read(key);
                }
            }
            Some(Socket::Pause { .. }) | None => {}
        }
    }

    /// A socket's time has come.
    pub fn socket_timed_out(&mut self, key: Key) {
        match self.sockets.get(&key) {
            Some(Socket::Listener { .. }) => self.watch_for(key, EventFlags::IN),
            Some(Socket::Pause { endpoint }) => {
                let endpoint = *endpoint;
                self.close(key);
                self.dial(endpoint);
            }
            Some(Socket::Stream(stream)) => match stream.role {
                Role::Greeting(listener) => {
                    self.close(key);
                    self.no_stranger(listener, key);
                }
                Role::Leaving => self.close(key),
                Role::Dialing(_) | Role::Talking(_) => {}
            },
            None => {}
        }
    }

    /// Takes what a stream has brought.
    fn read(&mut self, key: Key) {
        let Some(stream) = self.stream(key) else {
            return;
        };
        let mut chunk = [0; CHUNK];
        match rustix::net::recv(&stream.fd, &mut chunk, RecvFlags::DONTWAIT) {
            Ok((len @ 1.., _)) => stream.input.extend_from_slice(&chunk[..len]),
            Err(Errno::AGAIN | Errno::INTR) => return,
            Ok(_) | Err(_) => {
                self.ended(key, Ending::Closed);
                return;
            }
        }
        loop {
            match self.stream(key).map(Stream::next) {
                Some(Ok(Some(message))) => self.received(key, message),
                Some(Ok(None)) | None => return,
                Some(Err(error)) => {
                    self.ended(key, Ending::Nonsense(error));
                    return;
                }
            }
        }
    }
}

impl Socket {
    fn fd(&self) -> Option<&Mine> {
        match self {
            Self::Listener { fd, .. } => Some(fd),
            Self::Stream(stream) => Some(&stream.fd),
            Self::Pause { .. } => None,
        }
    }
}

impl Stream {
    /// The next message that has come whole. A stream that is leaving is not listened to.
    fn next(&mut self) -> Result<Option<Message>, MessageError> {
        if self.role == Role::Leaving {
            self.input.clear();
        }
        let Some((message, len)) = Message::decode(&self.input)? else {
            return Ok(None);
        };
        self.input.drain(..len);
        Ok(Some(message))
    }
}
