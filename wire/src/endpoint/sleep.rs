//! Sleeping until a completion, a wake-up, or the end of a peer.

use std::fmt;
use std::io;
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use verbs_sys::{CompletionChannel, EventError};

use crate::event::ConnectionId;
use crate::talk::timespec;

/// Ids of what is not a connection: no connection's slot has such a number.
const CHANNEL: u64 = u64::MAX;
const BELL: u64 = u64::MAX - 1;

/// Sockets looked at in one go.
const SOCKETS: usize = 16;

/// What an endpoint sleeps on.
pub(crate) struct Sleeper {
    epoll: OwnedFd,
    channel: CompletionChannel,
    /// What the last [`sleep`](Self::sleep) found.
    ready: [u64; SOCKETS],
}

impl Sleeper {
    pub(crate) fn new(channel: &CompletionChannel, bell: &OwnedFd) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        epoll::add(&epoll, channel, EventData::new_u64(CHANNEL), EventFlags::IN)?;
        epoll::add(&epoll, bell, EventData::new_u64(BELL), EventFlags::IN)?;
        Ok(Self {
            epoll,
            channel: channel.clone(),
            ready: [0; SOCKETS],
        })
    }

    /// Notices from now on when the peer of a connection says something or goes.
    pub(crate) fn watch(&self, stream: &TcpStream, id: ConnectionId) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::RDHUP;
        Ok(epoll::add(
            &self.epoll,
            stream.as_fd(),
            EventData::new_u64(id.to_bits()),
            flags,
        )?)
    }

    /// Notices it no more.
    pub(crate) fn unwatch(&self, stream: &TcpStream) {
        // It fails where the socket is not watched, and then nothing is to be done.
        let _ = epoll::delete(&self.epoll, stream.as_fd());
    }

    /// Sleeps until something happens or `timeout` is over, and tells how many connections'
    /// [sockets](Self::socket) want to be looked at.
    pub(crate) fn sleep(&mut self, timeout: Option<Duration>) -> io::Result<usize> {
        let timeout = timeout.map(timespec);
        let nothing = epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        };
        let mut ready = [nothing; SOCKETS];
        let count = match epoll::wait(&self.epoll, &mut ready[..], timeout.as_ref()) {
            Ok(count) => count,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(errno.into()),
        };
        for (to, from) in self.ready.iter_mut().zip(&ready[..count]) {
            *to = from.data.u64();
        }
        Ok(count)
    }

    /// The connection of the `at`th thing that [`sleep`](Self::sleep) found; `None` where it was a
    /// completion or a wake-up.
    pub(crate) fn socket(&self, at: usize) -> Option<ConnectionId> {
        let bits = *self.ready.get(at)?;
        (bits < BELL).then(|| ConnectionId::from_bits(bits))
    }

    /// Takes a completion event back that has come, so that the next one wakes again. Should there
    /// be another, that one ends the next sleep at once.
    pub(crate) fn clear_channel(&self, found: usize) -> Result<(), EventError> {
        if self.ready[..found].contains(&CHANNEL) {
            self.channel.try_get_event()?;
        }
        Ok(())
    }
}

impl fmt::Debug for Sleeper {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sleeper")
            .field("epoll", &self.epoll)
            .finish_non_exhaustive()
    }
}
