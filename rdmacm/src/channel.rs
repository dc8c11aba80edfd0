//! Event channels: a queue, and a descriptor that is readable exactly while something is in it.
//!
//! The descriptor is one end of a pair of sockets, so that a blocking rdma_get_cm_event(3) is a system
//! call that looks at a byte and leaves it there: it sleeps, sees `O_NONBLOCK`, and is interrupted by
//! signals or goes on after them, as the application has asked for.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};

use crate::event::Queued;
use crate::shared::Key;

/// The queue of a channel.
#[derive(Debug)]
pub struct Queue {
    events: VecDeque<Queued>,
    ends: Arc<Ends>,
}

/// What is readable while a queue has something. Who waits has it, too: a channel that is destroyed meanwhile stays
/// open and silent, as a file of the kernel's does while a system call uses it.
#[derive(Debug)]
pub struct Ends {
    readable: OwnedFd,
    writable: OwnedFd,
}

impl Queue {
    /// An empty one.
    ///
    /// # Errors
    ///
    /// `EMFILE`, `ENFILE`: there are too many files.
    pub fn new() -> Result<Self, Errno> {
        let (readable, writable) = rustix::net::socketpair(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        Ok(Self {
            events: VecDeque::new(),
            ends: Arc::new(Ends { readable, writable }),
        })
    }

    /// What the application polls.
    pub fn fd(&self) -> RawFd {
        self.ends.readable.as_raw_fd()
    }

    /// To wait for something.
    #[must_use]
    pub fn ends(&self) -> Arc<Ends> {
        Arc::clone(&self.ends)
    }

    /// Adds an event.
    pub fn push(&mut self, event: Queued) {
        self.events.push_back(event);
        // One byte for each, so that edge-triggered pollers see each. A full socket is readable anyway.
        let _ = rustix::net::send(
            &self.ends.writable,
            &[0],
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
    }

    /// Whether who asks for an event waits for it.
    pub fn blocks(&self) -> bool {
        let flags = rustix::fs::fcntl_getfl(&self.ends.readable);
        flags.is_ok_and(|flags| !flags.contains(rustix::fs::OFlags::NONBLOCK))
    }

    /// Whether an event waits.
    pub fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    /// Takes the first event.
    pub fn pop(&mut self) -> Option<Queued> {
        let event = self.events.pop_front();
        self.settle();
        event
    }

    /// Takes all events that are about an identifier, or that another has of it.
    pub fn take_of(&mut self, key: Key) -> Vec<Queued> {
        let is_of = |event: &Queued| event.target == key || event.counted == key;
        let (taken, left): (Vec<_>, Vec<_>) = self.events.drain(..).partition(is_of);
        self.events = left.into();
        self.settle();
        taken
    }

    fn settle(&self) {
        if !self.events.is_empty() {
            return;
        }
        let mut bytes = [0; 4096];
        while matches!(
            rustix::net::recv(&self.ends.readable, &mut bytes, RecvFlags::DONTWAIT),
            Ok((1.., _))
        ) {}
    }
}

impl Drop for Queue {
    /// Nothing of a destroyed channel is to be had, for who still waits either.
    fn drop(&mut self) {
        self.events.clear();
        self.settle();
    }
}

impl Ends {
    /// What is readable.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.readable.as_raw_fd()
    }

    /// Waits until there is something.
    ///
    /// # Errors
    ///
    /// `EAGAIN` if there is nothing and the descriptor shall not block, `EINTR` after a signal.
    pub fn wait(&self) -> Result<(), Errno> {
        // The other end is open as long as this one.
        rustix::net::recv(&self.readable, &mut [0], RecvFlags::PEEK).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn readable_exactly_while_there_is_something() {
        let mut queue = Queue::new().unwrap();
        rustix::io::ioctl_fionbio(&queue.ends.readable, true).unwrap();
        assert_eq!(queue.ends.wait(), Err(Errno::AGAIN));
        for round in 0..3000 {
            queue.push(Queued::new(1, 1, round));
        }
        for round in 0..3000 {
            assert_eq!(queue.ends.wait(), Ok(()));
            assert_eq!(queue.pop().unwrap().kind, round);
        }
        assert_eq!(queue.ends.wait(), Err(Errno::AGAIN));
        assert!(queue.pop().is_none());
    }

    #[test]
    fn events_of_one_identifier_can_be_taken() {
        let mut queue = Queue::new().unwrap();
        for (target, counted) in [(1, 1), (2, 1), (3, 3)] {
            queue.push(Queued::new(target, counted, 0));
        }
        let taken = queue.take_of(1);
        assert_eq!(
            taken.iter().map(|event| event.target).collect::<Vec<_>>(),
            [1, 2]
        );
        assert_eq!(queue.pop().unwrap().target, 3);
    }
}
