//! Connecting to the connection manager of a peer.
//!
//! On this host it is found by the name of the address, then by those of the unspecified addresses, which
//! stand for it too; on another host, by TCP at the very address and port.

use std::collections::VecDeque;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;

use crate::endpoint::{PATIENCE, Phase};
use crate::fork::Mine;
use crate::message::Message;
use crate::network;
use crate::ports;
use crate::shared::{Key, State, new_key};
use crate::socket::{Origin, Role, Socket, origin_of};

/// Until a process whose queue of connections is full is tried again, or, for the first time, where nobody was. Each time
/// nobody is there it is twice as long.
const PAUSE: Duration = Duration::from_millis(10);
/// How often one who listens is looked for: for two thirds of a second. On a wire a request takes its time, and programs
/// whose other side begins to listen while it is under way are not refused there; perftest's `-R` is one. That side may
/// have to wait for a processor.
const ATTEMPTS: u8 = 7;

/// How long to wait behind the first attempt, and so many more.
const fn pause_behind(attempts: u8) -> Duration {
    PAUSE.saturating_mul(1 << attempts)
}

/// Where a peer may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Target {
    /// At a name of this host.
    Host(SocketAddr),
    /// At an address of another, or of another user.
    Network(SocketAddr),
}

/// An attempt to reach a peer.
#[derive(Debug)]
pub struct Dial {
    /// Attempts that are left.
    attempts: u8,
    /// All that are to be tried.
    places: Vec<Target>,
    /// Those that are left.
    targets: VecDeque<Target>,
    /// What is to be said first.
    opening: Message,
    /// There was a process, but of another user.
    denied: bool,
}

impl Dial {
    /// Looks for a peer on this host.
    #[must_use]
    pub fn host(to: SocketAddr, opening: Message) -> Self {
        let names = match to.ip().to_canonical() {
            IpAddr::V4(v4) => vec![
                IpAddr::V4(v4),
                Ipv4Addr::UNSPECIFIED.into(),
                Ipv6Addr::UNSPECIFIED.into(),
            ],
            IpAddr::V6(v6) => vec![IpAddr::V6(v6), Ipv6Addr::UNSPECIFIED.into()],
        };
        let names = names.into_iter();
        let places = names.map(|ip| Target::Host(SocketAddr::new(ip, to.port())));
        Self::new(places.collect(), opening)
    }

    /// Looks for a peer on another host.
    #[must_use]
    pub fn network(to: SocketAddr, opening: Message) -> Self {
        Self::new(vec![Target::Network(to)], opening)
    }

    fn new(places: Vec<Target>, opening: Message) -> Self {
        Self {
            attempts: ATTEMPTS,
            targets: places.clone().into(),
            places,
            opening,
            denied: false,
        }
    }
}

impl State {
    /// Begins to connect an identifier.
    pub fn start_dial(&mut self, key: Key, dial: Dial) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        endpoint.dial = Some(dial);
        // Without the thread no time comes.
        if let Err(error) = self.engine() {
            self.unreachable(key, error);
            return;
        }
        self.set_timer(key, Instant::now() + PATIENCE);
        self.dial(key);
    }

    /// Tries where the peer may be, until it is found, or it takes time.
    pub fn dial(&mut self, key: Key) {
        while let Some(endpoint) = self.endpoints.get_mut(&key) {
            endpoint.socket = None;
            let (Phase::Connecting, Some(dial)) = (endpoint.phase, &mut endpoint.dial) else {
                return;
            };
            let outcome = match dial.targets.front().copied() {
                None if !dial.denied && dial.attempts > 1 => {
                    let pause = pause_behind(ATTEMPTS - dial.attempts);
                    dial.attempts -= 1;
                    dial.targets = dial.places.clone().into();
                    self.dial_later(key, pause);
                    return;
                }
                None if !dial.denied => {
                    self.nobody_listens(key);
                    return;
                }
                None => match (endpoint.remote, network::reach()) {
                    // Other users are reached as other hosts are.
                    (Some(to), Some(_)) => {
                        dial.denied = false;
                        dial.targets.push_back(Target::Network(to));
                        continue;
                    }
                    _ => Err(Errno::ACCESS),
                },
                Some(Target::Host(to)) => self.dial_host(key, to),
                Some(Target::Network(to)) => self.dial_network(key, to),
            };
            match outcome {
                Ok(true) => return,
                Ok(false) => self.next_target(key),
                Err(error) => {
                    self.unreachable(key, error);
                    return;
                }
            }
        }
    }

    fn dial_later(&mut self, key: Key, pause: Duration) {
        let socket = new_key();
        if let Some(endpoint) = self.endpoints.get_mut(&key) {
            endpoint.socket = Some(socket);
            self.sockets.insert(socket, Socket::Pause { endpoint: key });
            self.set_timer(socket, Instant::now() + pause);
        }
    }

    fn next_target(&mut self, key: Key) {
        if let Some(endpoint) = self.endpoints.get_mut(&key)
            && let Some(dial) = &mut endpoint.dial
        {
            dial.targets.pop_front();
        }
    }

    /// Whether somebody is there, or that will be known later.
    fn dial_host(&mut self, key: Key, to: SocketAddr) -> Result<bool, Errno> {
        let space = self.endpoint(key)?.space;
        let socket = ports::socket()?;
        match rustix::net::connect(&socket, &ports::name(space, to)?) {
            Ok(()) if network::is_same_user(&socket) => {
                let stream = self.add_stream(socket, Role::Talking(key), Origin::Host)?;
                self.open(key, stream);
                Ok(true)
            }
            Ok(()) => {
                if let Some(dial) = &mut self.endpoint(key)?.dial {
                    dial.denied = true;
                }
                Ok(false)
            }
            Err(Errno::CONNREFUSED) => Ok(false),
            // Its queue is full, and nothing tells when that changes.
            Err(Errno::AGAIN) => {
                self.dial_later(key, PAUSE);
                Ok(true)
            }
            Err(error) => Err(error),
        }
    }

    /// As [`Self::dial_host`].
    fn dial_network(&mut self, key: Key, to: SocketAddr) -> Result<bool, Errno> {
        let from = self.endpoint(key)?.local.ok_or(Errno::INVAL)?;
        let (socket, done) = match network::connect(from, to) {
            Err(Errno::CONNREFUSED) => return Ok(false),
            other => other?,
        };
        if done {
            self.connected(key, socket)?;
        } else {
            let origin = Origin::Network {
                local: from,
                peer: to,
            };
            let stream = self.add_stream(socket, Role::Dialing(key), origin)?;
            self.endpoint(key)?.socket = Some(stream);
        }
        Ok(true)
    }

    fn connected(&mut self, key: Key, socket: Mine) -> Result<(), Errno> {
        network::adjust(&socket)?;
        let origin = origin_of(&socket)?;
        let stream = self.add_stream(socket, Role::Talking(key), origin)?;
        self.open(key, stream);
        Ok(())
    }

    /// A connection to another host has come about, or not.
    pub fn dialed(&mut self, key: Key, socket: Key) {
        let Some(stream) = self.stream(socket) else {
            return;
        };
        let outcome = rustix::net::sockopt::socket_error(&stream.fd).and_then(|result| result);
        let outcome = outcome
            .and_then(|()| network::adjust(&stream.fd))
            .and_then(|()| origin_of(&stream.fd));
        match outcome {
            Ok(origin) => {
                stream.origin = origin;
                stream.role = Role::Talking(key);
                self.watch_for(socket, EventFlags::IN);
                self.open(key, socket);
            }
            Err(error) => {
                self.close(socket);
                if error == Errno::CONNREFUSED {
                    self.next_target(key);
                    self.dial(key);
                } else {
                    self.unreachable(key, error);
                }
            }
        }
    }

    /// Says what is to be said first.
    fn open(&mut self, key: Key, socket: Key) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        endpoint.socket = Some(socket);
        if let Some(dial) = endpoint.dial.take() {
            self.send(socket, &dial.opening);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_listens_is_looked_for_as_long_as_programs_may_have_to_wait_for_a_processor() {
        let whole: Duration = (0..ATTEMPTS - 1).map(pause_behind).sum();
        let range = Duration::from_millis(500)..Duration::from_secs(1);
        assert!(range.contains(&whole), "{whole:?}");
    }
}
