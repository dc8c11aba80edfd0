//! What an endpoint shares with the threads that make connections for it.

use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use mr_pool::{Buffer, Pool};
use verbs_sys::owned::OwnedQueuePair;
use verbs_sys::{CompletionQueue, ProtectionDomain};

use crate::bring_up::{Port, connect};
use crate::config::Config;
use crate::error::ConnectError;
use crate::greeting::Hello;

/// The parts of an endpoint that any thread may use.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) pd: ProtectionDomain,
    pub(crate) cq: CompletionQueue,
    pub(crate) pool: Pool,
    pub(crate) config: Config,
    pub(crate) port: Port,
    /// Connections that have a share of the completion queue.
    pub(crate) live: AtomicU32,
    pub(crate) inbox: Mutex<Inbox>,
    /// Whether there is something in the inbox; looked at without the lock.
    pub(crate) mail: AtomicBool,
    /// Whether somebody wants the endpoint to look up, and the bell has rung for it.
    pub(crate) woken: AtomicBool,
    /// An eventfd.
    pub(crate) bell: OwnedFd,
}

/// Connections on their way to their endpoint.
#[derive(Debug, Default)]
pub(crate) struct Inbox {
    pub(crate) established: Vec<Established>,
    /// The endpoint is gone.
    pub(crate) closed: bool,
}

impl Shared {
    pub(crate) fn wake(&self) {
        if !self.woken.swap(true, Ordering::SeqCst) {
            // It can only fail where the counter is full, and then the bell has rung.
            let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        }
    }

    /// Takes back a wake-up that [`wake`](Self::wake) left; `true` where there was one.
    pub(crate) fn take_wake(&self) -> bool {
        if !self.woken.load(Ordering::Acquire) {
            return false;
        }
        let mut count = [0; 8];
        // The bell first: whoever rings between the two lines is seen by the swap, or rings again.
        let _ = rustix::io::read(&self.bell, &mut count);
        self.woken.swap(false, Ordering::SeqCst)
    }

    /// Takes the connections that were handed over.
    pub(crate) fn take_mail(&self) -> Vec<Established> {
        self.mail.store(false, Ordering::Release);
        std::mem::take(
            &mut self
                .inbox
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .established,
        )
    }

    /// No more connections are taken; those that were on their way are dropped.
    pub(crate) fn close_inbox(&self) {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        inbox.closed = true;
        let dropped = std::mem::take(&mut inbox.established);
        drop(inbox);
        drop(dropped);
    }
}

/// A connection's share of its endpoint's completion queue.
#[derive(Debug)]
pub(crate) struct Share(Arc<Shared>);

impl Share {
    pub(crate) fn take(shared: &Arc<Shared>) -> Result<Self, ConnectError> {
        let limit = shared.config.max_connections;
        shared
            .live
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |live| {
                (live < limit).then_some(live + 1)
            })
            .map(|_| Self(Arc::clone(shared)))
            .map_err(|_| ConnectError::Full { limit })
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.0.live.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Makes connections for an endpoint, on any thread. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Acceptor(pub(crate) Arc<Shared>);

impl Acceptor {
    /// The endpoint's settings.
    pub fn config(&self) -> &Config {
        &self.0.config
    }

    /// Connections that the endpoint has, those being made included.
    pub fn connections(&self) -> u32 {
        self.0.live.load(Ordering::Relaxed)
    }

    /// Connects to a listener, waiting at most [`Config::greeting_timeout`].
    ///
    /// # Errors
    ///
    /// [`ConnectError`]; nothing of the attempt stays.
    pub fn connect(
        &self,
        address: impl ToSocketAddrs + ToString,
    ) -> Result<Established, ConnectError> {
        connect(&self.0, address)
    }

    /// A handle that wakes the endpoint.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.0))
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }

    /// What a hello from this endpoint says, but for the queue pair.
    pub(crate) fn introduction(&self) -> Hello {
        self.0.port.introduction(&self.0.config)
    }
}

/// Wakes an endpoint from other threads. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Waker(Arc<Shared>);

impl Waker {
    /// Makes the endpoint's current [`wait`](crate::Endpoint::wait), or else its next, return.
    ///
    /// What was written before this call is seen after that return. Waking an endpoint that has not
    /// looked up since the last wake-up costs no system call.
    pub fn wake(&self) {
        self.0.wake();
    }
}

/// A connection that has been greeted and waits for its endpoint: both queue pairs can receive.
///
/// Dropping it ends the connection.
#[derive(Debug)]
pub struct Established {
    pub(crate) qp: OwnedQueuePair<Buffer>,
    pub(crate) stream: TcpStream,
    pub(crate) peer: SocketAddr,
    /// Receives that each side has posted.
    pub(crate) depth: u32,
    /// Longest frame that either side may send.
    pub(crate) message_size: u32,
    /// The peer waits to be told that it may send.
    pub(crate) owes_ready: bool,
    pub(crate) share: Share,
}

impl Established {
    /// The other side's TCP address.
    pub fn peer_addr(&self) -> SocketAddr {
        self.peer
    }

    /// Gives the connection to the endpoint that it was made for, whose thread gets
    /// [`Event::Connected`](crate::Event::Connected); an endpoint that waits is woken.
    ///
    /// # Errors
    ///
    /// [`ConnectError::WrongEndpoint`] where the endpoint is gone; the connection is then ended.
    pub fn hand_over(self) -> Result<(), ConnectError> {
        let shared = Arc::clone(self.share.shared());
        let mut inbox = shared.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        if inbox.closed {
            return Err(ConnectError::WrongEndpoint);
        }
        inbox.established.push(self);
        drop(inbox);
        shared.mail.store(true, Ordering::Release);
        shared.wake();
        Ok(())
    }
}
