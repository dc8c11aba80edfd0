//! Greetings over a TCP socket. The socket never blocks; who has to wait says until when.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use socket2::{SockRef, TcpKeepalive};

use crate::error::ConnectError;
use crate::greeting::{GREETING_VERSION, Greeting, GreetingError, MAX_FRAME, RejectReason};

/// A peer whose host is gone without a word is given up after about this long: the connection is
/// idle as long as its messages go over queue pairs, so the kernel asks.
const KEEPALIVE_TIME: Duration = Duration::from_secs(5);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);
const KEEPALIVE_RETRIES: u32 = 3;

/// One side's end of a greeting.
#[derive(Debug)]
pub(crate) struct Talk {
    stream: TcpStream,
    peer: SocketAddr,
    /// The frame that is coming in, as far as it is there. Bytes of the next frame stay in the
    /// socket.
    buffer: [u8; MAX_FRAME],
    len: usize,
}

impl Talk {
    /// Takes a connected socket.
    pub(crate) fn new(stream: TcpStream, peer: SocketAddr) -> Result<Self, ConnectError> {
        let keepalive = TcpKeepalive::new()
            .with_time(KEEPALIVE_TIME)
            .with_interval(KEEPALIVE_INTERVAL)
            .with_retries(KEEPALIVE_RETRIES);
        stream
            .set_nonblocking(true)
            .and_then(|()| stream.set_nodelay(true))
            .and_then(|()| SockRef::from(&stream).set_tcp_keepalive(&keepalive))
            .map_err(|source| ConnectError::Io {
                peer,
                doing: "set socket options",
                source,
            })?;
        Ok(Self {
            stream,
            peer,
            buffer: [0; MAX_FRAME],
            len: 0,
        })
    }

    /// Who is at the other end.
    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The socket.
    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The socket, at the end of the greeting.
    pub(crate) fn into_stream(self) -> TcpStream {
        self.stream
    }

    /// Says something. A greeting is smaller than any socket buffer: a peer that lets even that
    /// fill up is given up.
    pub(crate) fn say(&mut self, greeting: &Greeting) -> Result<(), ConnectError> {
        self.stream
            .write_all(&greeting.to_bytes())
            .map_err(|source| ConnectError::Io {
                peer: self.peer,
                doing: "send the greeting",
                source,
            })
    }

    /// Says why not, and that nothing more will come. Best effort: the peer may be gone.
    pub(crate) fn reject(&mut self, reason: RejectReason, text: &str) {
        let _ = self.say(&Greeting::Reject {
            reason,
            text: text.to_owned(),
        });
        let _ = self.stream.shutdown(std::net::Shutdown::Write);
    }

    /// What the peer says next, if all of it has come. A rejection and nonsense are errors; the
    /// latter is also told to the peer.
    pub(crate) fn hear(
        &mut self,
        waiting_for: &'static str,
    ) -> Result<Option<Greeting>, ConnectError> {
        let peer = self.peer;
        loop {
            let missing = match Greeting::missing(&self.buffer[..self.len]) {
                Ok(missing) => missing,
                Err(error) => return Err(self.misunderstood(error)),
            };
            if missing == 0 {
                let heard = Greeting::parse(&self.buffer[..self.len]);
                self.len = 0;
                return match heard {
                    Ok(Some((Greeting::Reject { reason, text }, _))) => {
                        Err(ConnectError::Rejected { peer, reason, text })
                    }
                    Ok(heard) => Ok(heard.map(|(greeting, _)| greeting)),
                    Err(error) => Err(self.misunderstood(error)),
                };
            }
            let Some(room) = self.buffer.get_mut(self.len..self.len + missing) else {
                let error = GreetingError::Length {
                    kind: 0,
                    length: missing as u32,
                };
                return Err(self.misunderstood(error));
            };
            match self.stream.read(room) {
                Ok(0) => return Err(ConnectError::Closed { peer, waiting_for }),
                Ok(read) => self.len += read,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(source) => {
                    return Err(ConnectError::Io {
                        peer,
                        doing: waiting_for,
                        source,
                    });
                }
            }
        }
    }

    /// As [`hear`](Self::hear), waiting until `deadline`; `after` is how long that was, for the
    /// error.
    pub(crate) fn hear_until(
        &mut self,
        waiting_for: &'static str,
        deadline: Instant,
        after: Duration,
    ) -> Result<Greeting, ConnectError> {
        loop {
            if let Some(greeting) = self.hear(waiting_for)? {
                return Ok(greeting);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ConnectError::Timeout {
                    peer: self.peer,
                    waiting_for,
                    after,
                });
            }
            self.wait_readable(left)?;
        }
    }

    /// Lets the peer read a rejection before the socket goes: closing with unread bytes would
    /// destroy it on its way.
    pub(crate) fn linger(mut self, at_most: Duration) {
        let deadline = Instant::now() + at_most;
        loop {
            match self.discard() {
                Discarded::Open => {}
                Discarded::Ended => return,
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() || self.wait_readable(left).is_err() {
                return;
            }
        }
    }

    /// Reads and forgets what the peer has sent.
    pub(crate) fn discard(&mut self) -> Discarded {
        // Bounded: a peer that keeps sending does not keep us here.
        for _ in 0..16 {
            match self.stream.read(&mut self.buffer) {
                Ok(0) => return Discarded::Ended,
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Discarded::Open,
                Err(_) => return Discarded::Ended,
            }
        }
        Discarded::Open
    }

    fn wait_readable(&self, at_most: Duration) -> Result<(), ConnectError> {
        let mut fds = [PollFd::new(&self.stream, PollFlags::IN)];
        match poll(&mut fds, Some(&timespec(at_most))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(ConnectError::Io {
                peer: self.peer,
                doing: "wait for the greeting",
                source: error.into(),
            }),
        }
    }

    /// Tells the peer that it was not understood, and what the error is on this side.
    fn misunderstood(&mut self, error: GreetingError) -> ConnectError {
        match error {
            GreetingError::Version { found } => {
                let text = format!(
                    "this side speaks version {GREETING_VERSION} of the greeting, not {found}"
                );
                self.reject(RejectReason::Version, &text);
                ConnectError::Version {
                    peer: self.peer,
                    theirs: found,
                    ours: GREETING_VERSION,
                }
            }
            source => {
                self.reject(RejectReason::Malformed, &source.to_string());
                ConnectError::Malformed {
                    peer: self.peer,
                    source,
                }
            }
        }
    }

    /// The error for a frame that is well formed but has no place here.
    pub(crate) fn out_of_place(
        &mut self,
        greeting: &Greeting,
        expected: &'static str,
    ) -> ConnectError {
        self.misunderstood(GreetingError::Type {
            found: greeting.type_code(),
            expected,
        })
    }
}

/// Whether the peer may send more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Discarded {
    Open,
    Ended,
}

/// `duration` as `poll` and `epoll_wait` take it.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}
