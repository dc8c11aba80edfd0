//! Connections of peers, until they have said which queue pair they are for.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::SocketFlags;

use super::{GREETING, Worker, adjust_tcp, read_some, token};
use crate::soft::fork;
use crate::soft::link::rendezvous;
use crate::soft::link::stream::mpa::{Answer, Hello, Outcome};
use crate::soft::link::stream::socket::Socket;

/// How long a peer may take to say it.
const WITHIN: Duration = Duration::from_secs(5);
/// Connections that may be at it at once: beyond, the oldest is closed.
const MOST: usize = 256;

pub(super) struct Greeting {
    socket: OwnedFd,
    came: Vec<u8>,
    /// `None`: a process of this host.
    pub(super) from: Option<IpAddr>,
    pub(super) deadline: Instant,
}

impl Worker {
    pub(super) fn accept(&mut self, index: usize) {
        loop {
            let Some(listener) = self.listeners.get(index) else {
                return;
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let (socket, from) = match rustix::net::acceptfrom_with(listener, flags) {
                Ok(accepted) => accepted,
                Err(Errno::INTR | Errno::CONNABORTED) => continue,
                Err(Errno::AGAIN) => return,
                Err(error) => {
                    // For want of descriptors, say: then it would be told of again at once.
                    tracing::error!(%error, "cannot accept a connection");
                    self.rest(index);
                    return;
                }
            };
            let from = from.and_then(|from| SocketAddr::try_from(from).ok());
            let from = from.map(|from| from.ip().to_canonical());
            let fits = match from {
                Some(_) => {
                    fork::made(&socket);
                    adjust_tcp(&socket)
                }
                None => rendezvous::check_user(socket.as_fd()).map(drop),
            };
            if let Err(error) = fits {
                tracing::warn!(?from, %error, "refused a connection");
                continue;
            }
            if self.greetings.len() >= MOST {
                self.drop_oldest();
            }
            let id = self.fresh();
            let greeting = Greeting {
                socket,
                came: Vec::new(),
                from,
                deadline: Instant::now() + WITHIN,
            };
            self.shared
                .watch(&greeting.socket, token(GREETING, id), true, false);
            self.greetings.insert(id, greeting);
        }
    }

    /// Too many connections say nothing: the one that has for longest is closed.
    fn drop_oldest(&mut self) {
        let by_age = |(_, greeting): &(&u32, &Greeting)| greeting.deadline;
        let oldest = self.greetings.iter().min_by_key(by_age);
        if let Some((&id, greeting)) = oldest {
            tracing::warn!(from = ?greeting.from, "too many connections do not greet; closing one");
            self.greetings.remove(&id);
        }
    }

    pub(super) fn greet(&mut self, id: u32) {
        let Some(greeting) = self.greetings.get_mut(&id) else {
            return;
        };
        match read_some(&greeting.socket, &mut greeting.came) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => {
                self.greetings.remove(&id);
                return;
            }
        }
        match Hello::decode(&greeting.came) {
            Ok(None) => {
                self.shared
                    .watch(&greeting.socket, token(GREETING, id), true, false);
            }
            Ok(Some((hello, taken))) => {
                if let Some(greeting) = self.greetings.remove(&id) {
                    self.admit(greeting, hello, taken);
                }
            }
            Err(error) => {
                tracing::warn!(from = ?greeting.from, %error, "closing a connection");
                self.greetings.remove(&id);
            }
        }
    }

    fn admit(&mut self, greeting: Greeting, hello: Hello, taken: usize) {
        let came = &greeting.came[taken..];
        let qp = self.process.qp(hello.dest_qpn);
        let (result, generation) = match &qp {
            None => (Outcome::Gone, 0),
            Some(qp) => qp.judge(&hello, greeting.from),
        };
        tracing::debug!(from = ?greeting.from, ?hello, ?result, "a queue pair connects");
        let answer = Answer {
            result,
            generation,
            crc: hello.crc,
            ird: hello.ord,
            ord: hello.ird,
        };
        let mut socket = Socket::new(greeting.socket, came, hello.crc);
        socket.output.raw(&answer.encode());
        match qp {
            Some(qp) if result == Outcome::Accepted => {
                // What came with the greeting is taken at once; the answer goes out before.
                if socket.flush() && qp.accept_stream(generation, hello, socket) {
                    qp.receive(true);
                }
            }
            _ => self.start_lingering(socket),
        }
    }
}
