//! One thread's connections.

mod connection;
mod sleep;
mod socket;
mod table;
mod upkeep;

use std::collections::VecDeque;
use std::net::{SocketAddr, ToSocketAddrs};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use mr_pool::{Buffer, Pool, PoolError};
use rustix::event::{EventfdFlags, eventfd};
use verbs_sys::owned::{OwnedQueuePair, Rejected};
use verbs_sys::{ProtectionDomain, RemoteAddr, WorkCompletion};

use crate::bring_up::{EXTRA_SENDS, Port};
use crate::config::Config;
use crate::error::{ConnectError, DeviceFailure, EndpointError};
use crate::event::{
    ConnectionId, Event, OperationError, OperationErrorKind, SendError, SendErrorKind,
};
use crate::message::OutgoingMessage;
use crate::shared::{Acceptor, Established, Inbox, Shared, Waker};
use connection::{Connection, Outcome};
use sleep::Sleeper;
use table::{QpTable, Slots};
pub use upkeep::WaitError;

/// Completions taken from the queue at once.
const BATCH: usize = 32;

/// The sockets of the connections are looked at once in this many looks at the completion queue, by
/// a thread that never waits: one system call in about a millisecond of polling.
const LOOKS_PER_SOCKET_CHECK: u32 = 1 << 14;

/// What an endpoint has done since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct EndpointStats {
    /// Messages of the caller that were posted.
    pub messages_sent: u64,
    /// Messages of the caller that have come.
    pub messages_received: u64,
    /// Messages that only returned credits, sent.
    pub credit_messages_sent: u64,
    /// READs and WRITEs posted.
    pub operations: u64,
}

/// The connections of one thread: queue pairs on one completion queue, with receive buffers of one
/// pool.
///
/// [`poll`](Self::poll) gives the next event; [`wait`](Self::wait) sleeps until there may be one.
/// Other threads make connections for it through an [`Acceptor`] and wake it through a [`Waker`].
///
/// Nothing is allocated from the heap once connections are up: messages, reads and events reuse
/// pooled buffers and queues that were made at the start.
#[derive(Debug)]
pub struct Endpoint {
    connections: Slots<Connection>,
    by_qp: QpTable,
    batch: [WorkCompletion; BATCH],
    /// Completions of `batch` that were taken from the queue, and how many of them were dealt
    /// with.
    filled: usize,
    done: usize,
    events: VecDeque<Event>,
    /// Slots of connections that need looking after: credits to return, receives to post, an end
    /// to make.
    listed: Vec<u32>,
    /// Slots of connections whose peers have gone, until the completion queue has been seen empty.
    leaving: Vec<u32>,
    /// A connection waits for memory to receive into.
    starved: bool,
    /// A connection has to be looked after before anybody sleeps.
    again: bool,
    looks: u32,
    stats: EndpointStats,
    sleeper: Sleeper,
    shared: Arc<Shared>,
}

impl Endpoint {
    /// Makes an endpoint on the device of `pd`, whose messages are in memory of `pool`, a pool of
    /// the same `pd`.
    ///
    /// # Errors
    ///
    /// [`EndpointError`] where a setting is out of range or the device cannot do it.
    pub fn new(pd: &ProtectionDomain, pool: &Pool, config: Config) -> Result<Self, EndpointError> {
        config.validate()?;
        let context = pd.context();
        let failed = |doing, source: DeviceFailure| EndpointError::Device {
            device: context.device_name(),
            doing,
            source,
        };
        let port = Port::query(context, &config)?;
        let channel = context
            .create_comp_channel()
            .map_err(|error| failed("create a completion channel", error.into()))?;
        let per_connection = config.send_depth + EXTRA_SENDS + config.recv_depth;
        let cqe = per_connection.saturating_mul(config.max_connections);
        let cq = context.create_cq(cqe, Some(&channel)).map_err(|error| {
            failed(
                "create a completion queue for that many connections",
                error.into(),
            )
        })?;
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|errno| {
            EndpointError::Io {
                doing: "create an eventfd",
                source: errno.into(),
            }
        })?;
        let sleeper = Sleeper::new(&channel, &bell).map_err(|source| EndpointError::Io {
            doing: "create an epoll instance",
            source,
        })?;
        let most = config.max_connections;
        Ok(Self {
            connections: Slots::new(most),
            by_qp: QpTable::new(most),
            batch: std::array::from_fn(|_| WorkCompletion::default()),
            filled: 0,
            done: 0,
            events: VecDeque::with_capacity(2 * most as usize),
            // Twice: a connection may be listed anew while the list is gone through.
            listed: Vec::with_capacity(2 * most as usize),
            leaving: Vec::with_capacity(most as usize),
            starved: false,
            again: false,
            looks: 0,
            stats: EndpointStats::default(),
            sleeper,
            shared: Arc::new(Shared {
                pd: pd.clone(),
                cq,
                pool: pool.clone(),
                config,
                port,
                live: AtomicU32::new(0),
                inbox: Mutex::new(Inbox::default()),
                mail: AtomicBool::new(false),
                woken: AtomicBool::new(false),
                bell,
            }),
        })
    }

    /// Makes connections for this endpoint, on any thread.
    pub fn acceptor(&self) -> Acceptor {
        Acceptor(Arc::clone(&self.shared))
    }

    /// Wakes this endpoint from another thread.
    pub fn waker(&self) -> Waker {
        self.acceptor().waker()
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.shared.config
    }

    /// The pool that received messages are in.
    pub fn pool(&self) -> &Pool {
        &self.shared.pool
    }

    /// What was done so far.
    pub fn stats(&self) -> EndpointStats {
        self.stats
    }

    /// Connects to a listener, waiting at most [`Config::greeting_timeout`].
    ///
    /// # Errors
    ///
    /// [`ConnectError`]; nothing of the attempt stays.
    pub fn connect(
        &mut self,
        address: impl ToSocketAddrs + ToString,
    ) -> Result<ConnectionId, ConnectError> {
        let established = self.acceptor().connect(address)?;
        self.adopt(established)
    }

    /// Takes a connection that was made for this endpoint, and lets the peer send.
    ///
    /// # Errors
    ///
    /// [`ConnectError::WrongEndpoint`], or [`ConnectError::Io`] where the peer has gone meanwhile.
    pub fn adopt(&mut self, established: Established) -> Result<ConnectionId, ConnectError> {
        if !Arc::ptr_eq(established.share.shared(), &self.shared) {
            return Err(ConnectError::WrongEndpoint);
        }
        let peer = established.peer;
        let owes_ready = established.owes_ready;
        let connection = Connection::new(established, &self.shared.config);
        let qp_num = connection.qp_num();
        let limit = self.shared.config.max_connections;
        let id = self
            .connections
            .insert(connection)
            .map_err(|_| ConnectError::Full { limit })?;
        self.by_qp.insert(qp_num, id.index);
        let Some(connection) = self.connections.get_mut(id) else {
            return Err(ConnectError::WrongEndpoint);
        };
        let watched = self.sleeper.watch(connection.socket.stream(), id);
        let told = watched.and_then(|()| {
            if owes_ready {
                connection.socket.say_ready()
            } else {
                Ok(())
            }
        });
        if let Err(source) = told {
            self.end(id.index, None);
            self.connections.retire(id.index);
            return Err(ConnectError::Io {
                peer,
                doing: "end the greeting",
                source,
            });
        }
        Ok(id)
    }

    /// Ends a connection on purpose; the peer is told. What was on its way may or may not arrive,
    /// and there are no more events with this id. Its place is free for another once
    /// [`poll`](Self::poll) has seen the last of it.
    ///
    /// Returns `false` where it had ended already.
    pub fn close(&mut self, conn: ConnectionId) -> bool {
        let Some(connection) = self.connections.get_mut(conn) else {
            return false;
        };
        connection.socket.say_bye();
        self.end(conn.index, None);
        self.connections.retire(conn.index);
        true
    }

    /// An empty message with room for a frame of `capacity` bytes, header included.
    ///
    /// # Errors
    ///
    /// [`PoolError`] where the pool has no memory for it.
    #[inline]
    pub fn message(&self, capacity: usize) -> Result<OutgoingMessage, PoolError> {
        OutgoingMessage::new(&self.shared.pool, capacity)
    }

    /// Sends a message, or keeps it until the peer has room for it. Messages of one connection
    /// arrive in order, once.
    ///
    /// # Errors
    ///
    /// [`SendError`] gives the message back; [`SendErrorKind::WouldBlock`] asks to try again after
    /// the connection's next event.
    #[inline]
    pub fn send(&mut self, conn: ConnectionId, message: OutgoingMessage) -> Result<(), SendError> {
        let Some(connection) = self.connections.get_mut(conn) else {
            return Err(SendError {
                kind: SendErrorKind::UnknownConnection,
                message,
            });
        };
        match connection.send(message) {
            Ok(()) => {
                self.stats.messages_sent += 1;
                Self::list(connection, conn.index, &mut self.listed);
                Ok(())
            }
            Err((kind, message)) => Err(SendError { kind, message }),
        }
    }

    /// READs from the peer's memory at `remote` into `range` of `buffer`; [`Event::ReadDone`]
    /// brings `token` and the buffer back.
    ///
    /// A READ does not wait for messages that wait for credits, nor do they for it.
    ///
    /// # Errors
    ///
    /// [`OperationError`] gives the buffer back.
    #[inline]
    pub fn read(
        &mut self,
        conn: ConnectionId,
        buffer: Buffer,
        range: Range<usize>,
        remote: RemoteAddr,
        token: u64,
    ) -> Result<(), OperationError> {
        self.operate("read", conn, (buffer, token), 1, |qp, buffer| {
            qp.read(buffer, range, remote)
        })
    }

    /// READs several places of the peer's memory into one buffer, one after the other; one
    /// [`Event::ReadDone`] comes when all are done.
    ///
    /// The READs are carried out in the order given: what a later one finds was there no earlier
    /// than what an earlier one found.
    ///
    /// # Errors
    ///
    /// [`OperationError`] gives the buffer back.
    #[inline]
    pub fn read_chain(
        &mut self,
        conn: ConnectionId,
        buffer: Buffer,
        parts: &[(Range<usize>, RemoteAddr)],
        token: u64,
    ) -> Result<(), OperationError> {
        self.operate("read", conn, (buffer, token), parts.len(), |qp, buffer| {
            qp.read_chain(buffer, parts)
        })
    }

    /// WRITEs `range` of `buffer` to the peer's memory at `remote`; [`Event::WriteDone`] brings
    /// `token` and the buffer back.
    ///
    /// # Errors
    ///
    /// [`OperationError`] gives the buffer back.
    #[inline]
    pub fn write(
        &mut self,
        conn: ConnectionId,
        buffer: Buffer,
        range: Range<usize>,
        remote: RemoteAddr,
        token: u64,
    ) -> Result<(), OperationError> {
        self.operate("write", conn, (buffer, token), 1, |qp, buffer| {
            qp.write(buffer, range, remote, None)
        })
    }

    /// WRITEs ranges of one buffer to several places of the peer's memory, one after the other; one
    /// [`Event::WriteDone`] comes when all are done.
    ///
    /// What is sent afterwards arrives after all of them.
    ///
    /// # Errors
    ///
    /// [`OperationError`] gives the buffer back.
    #[inline]
    pub fn write_chain(
        &mut self,
        conn: ConnectionId,
        buffer: Buffer,
        parts: &[(Range<usize>, RemoteAddr)],
        token: u64,
    ) -> Result<(), OperationError> {
        self.operate("write", conn, (buffer, token), parts.len(), |qp, buffer| {
            qp.write_chain(buffer, parts)
        })
    }

    #[inline]
    fn operate(
        &mut self,
        operation: &'static str,
        conn: ConnectionId,
        (buffer, token): (Buffer, u64),
        requests: usize,
        post: impl FnOnce(&mut OwnedQueuePair<Buffer>, Buffer) -> Result<u64, Rejected<Buffer>>,
    ) -> Result<(), OperationError> {
        let Some(connection) = self.connections.get_mut(conn) else {
            let kind = OperationErrorKind::UnknownConnection;
            return Err(OperationError {
                operation,
                kind,
                buffer: Some(buffer),
            });
        };
        match connection.operate(requests, buffer, token, post) {
            Ok(()) => {
                self.stats.operations += 1;
                Ok(())
            }
            Err((kind, buffer)) => {
                Self::list(connection, conn.index, &mut self.listed);
                Err(OperationError {
                    operation,
                    kind,
                    buffer,
                })
            }
        }
    }

    /// Puts a connection that needs it on the list of those to be looked after.
    #[inline]
    fn list(connection: &mut Connection, index: u32, listed: &mut Vec<u32>) {
        if connection.needs_care() && !connection.listed {
            connection.listed = true;
            listed.push(index);
        }
    }

    /// The other side's TCP address, while the connection is there.
    pub fn peer_addr(&self, conn: ConnectionId) -> Option<SocketAddr> {
        self.connections
            .get(conn)
            .map(|connection| connection.socket.peer())
    }

    /// The longest frame that the connection carries, in bytes, while it is there.
    pub fn message_size(&self, conn: ConnectionId) -> Option<u32> {
        self.connections.get(conn).map(Connection::message_size)
    }

    /// Whether a message sent now would go out at once.
    pub fn is_clear(&self, conn: ConnectionId) -> bool {
        self.connections.get(conn).is_some_and(Connection::is_clear)
    }

    /// The next thing that happened, if any. Does not wait, and makes no system call but for a look
    /// at the sockets once in a while.
    #[inline]
    pub fn poll(&mut self) -> Option<Event> {
        loop {
            if !self.events.is_empty() {
                return self.events.pop_front();
            }
            while self.done < self.filled {
                let at = self.done;
                self.done += 1;
                if let Some(event) = self.complete(at) {
                    return Some(event);
                }
            }
            if !self.look() {
                return self.events.pop_front();
            }
        }
    }

    /// Takes completions from the queue, after looking after the connections that need it. `false`
    /// where there is nothing to do now.
    #[inline]
    fn look(&mut self) -> bool {
        if !self.listed.is_empty() {
            self.look_after();
        }
        if self.shared.mail.load(Ordering::Acquire) {
            self.take_mail();
        }
        self.looks = self.looks.wrapping_add(1);
        if self.looks.is_multiple_of(LOOKS_PER_SOCKET_CHECK) {
            self.check_sockets();
        }
        self.done = 0;
        self.filled = 0;
        match self.shared.cq.poll(&mut self.batch) {
            Ok(count) => self.filled = count,
            Err(error) => self.fail_all(&error),
        }
        if self.filled < BATCH && !self.leaving.is_empty() {
            self.end_leaving();
        }
        self.filled > 0 || !self.events.is_empty()
    }

    /// Deals with one completion of the batch.
    #[inline]
    fn complete(&mut self, at: usize) -> Option<Event> {
        let completion = &mut self.batch[at];
        // None where the connection is gone: its queue pair was destroyed by a failure of the
        // completion queue.
        let index = self.by_qp.get(completion.qp_num())?;
        let id = self.connections.id(index);
        let connection = self.connections.at_mut(index)?;
        let outcome = connection.complete(completion);
        Self::list(connection, index, &mut self.listed);
        match outcome {
            Outcome::Nothing => None,
            Outcome::Message(message) => {
                self.stats.messages_received += 1;
                Some(Event::Message { conn: id, message })
            }
            Outcome::Read(token, result, buffer) => Some(Event::ReadDone {
                conn: id,
                token,
                result,
                buffer,
            }),
            Outcome::Written(token, result, buffer) => Some(Event::WriteDone {
                conn: id,
                token,
                result,
                buffer,
            }),
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.shared.close_inbox();
        let indices: Vec<u32> = self.connections.indices().collect();
        for index in indices {
            if let Some(connection) = self.connections.at_mut(index) {
                connection.socket.say_bye();
            }
        }
    }
}
