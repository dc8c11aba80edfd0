//! One worker: a thread with an endpoint of its own, which serves the clients that were handed to it.

use std::sync::Arc;

use mr_pool::Buffer;
use wire::{ConnectionId, Endpoint, Event, OutgoingMessage, Received, SendErrorKind};

use super::Shared;
use super::request::{self, Request};
use super::store::{self, Stored};
use crate::config::{INLINE_VALUE, Wait};
use crate::device::{MESSAGE, Source};
use crate::protocol::{Location, Reply, Status, Value, kind};
use crate::spin::Spin;

/// One thread's share of a server.
pub struct Worker {
    endpoint: Endpoint,
    shared: Arc<Shared>,
    wait: Wait,
    /// What each client holds, by the index of its connection.
    holdings: Vec<Holding>,
    last_reservation: u64,
    /// A small value on its way from its block into a message.
    scratch: Vec<u8>,
}

/// The blocks that are kept from reuse for one client.
#[derive(Default)]
struct Holding {
    /// The one it was last told of by a get, until it has read it.
    pinned: Option<Arc<Stored>>,
    /// The one it may be writing a value to. It is given back when the client's connection has ended, and with it the
    /// client's access, so it is never reused under a WRITE.
    reserved: Option<Reserved>,
}

/// A block without a key yet.
struct Reserved {
    reservation: u64,
    length: usize,
    room: Buffer<mr_pool::Shared>,
}

impl Worker {
    pub fn new(endpoint: Endpoint, shared: Arc<Shared>, wait: Wait) -> Self {
        let clients = endpoint.config().max_connections as usize;
        Self {
            endpoint,
            shared,
            wait,
            holdings: (0..clients).map(|_| Holding::default()).collect(),
            last_reservation: 0,
            scratch: Vec::new(),
        }
    }

    /// Serves until the server stops.
    pub fn run(mut self) -> Result<(), Source> {
        let mut spin = Spin::new();
        while !self.shared.is_stopping() {
            if let Some(event) = self.endpoint.poll() {
                spin = Spin::new();
                self.handle(event);
                continue;
            }
            match self.wait {
                Wait::Poll => spin.turn(),
                Wait::Event => self.endpoint.wait(None)?,
            }
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Connected { peer, .. } => tracing::info!(%peer, "client connected"),
            Event::Message { conn, message } => self.serve(conn, message),
            Event::Disconnected { conn, cause } => {
                tracing::info!(%cause, "client disconnected");
                self.forget(conn);
            }
            _ => {}
        }
    }

    fn serve(&mut self, conn: ConnectionId, message: Received) {
        let tag = message.tag();
        let reply = match request::parse(&message.frame()) {
            Ok(Request::Put { key, value }) => self.shared.store.put(key, value),
            Ok(Request::Get { key }) => match self.shared.store.get(key) {
                None => store::bare(Status::NotFound),
                Some(block) if block.length() <= INLINE_VALUE => {
                    return self.reply_value(conn, tag, &block);
                }
                Some(block) => {
                    let reply = store::located(&block);
                    self.holdings[conn.index()].pinned = Some(block);
                    reply
                }
            },
            Ok(Request::Delete { key }) => self.shared.store.delete(key),
            Ok(Request::Reserve { length }) => match self.reserve(conn, length) {
                Ok(reserved) => Reply {
                    reserved,
                    ..store::bare(Status::Ok)
                },
                Err(status) => store::bare(status),
            },
            Ok(Request::Commit {
                key,
                reservation,
                length,
                again,
            }) => match self.holdings[conn.index()].reserved.take() {
                Some(block) if block.reservation == reservation && length <= block.length => {
                    let reply = self.shared.store.put_placed(key, block.room, length);
                    let next = again.then(|| self.reserve(conn, block.length));
                    Reply {
                        reserved: next.and_then(Result::ok).unwrap_or(Location::NONE),
                        ..reply
                    }
                }
                _ => store::bare(Status::Malformed),
            },
            Ok(Request::Unpin { version }) => {
                let pinned = &mut self.holdings[conn.index()].pinned;
                pinned.take_if(|block| block.version() == version);
                return;
            }
            Ok(Request::Stat) => {
                let statistics = self.shared.statistics();
                return self.send(conn, Some(message), |message| {
                    message.encode(kind::STATISTICS, tag, &statistics)
                });
            }
            Err(status) => {
                tracing::debug!(kind = message.kind(), ?status, "request refused");
                store::bare(status)
            }
        };
        self.reply(conn, tag, &reply, Some(message));
    }

    /// Lets a client write a block. What it had reserved before is given back: requests of one connection are
    /// executed in order, so its WRITEs there have ended.
    fn reserve(&mut self, conn: ConnectionId, length: usize) -> Result<Location, Status> {
        let reserved = &mut self.holdings[conn.index()].reserved;
        // First, since there may not be room for both.
        *reserved = None;
        let room = self.shared.store.room(length)?;
        self.last_reservation += 1;
        let reservation = self.last_reservation;
        let location = Location {
            address: room.addr(),
            version: reservation,
            rkey: room.rkey(),
            // Lengths are limited far below 4 GiB when the request is taken.
            length: length as u32,
        };
        let reserved = Reserved {
            reservation,
            length,
            room,
        };
        self.holdings[conn.index()].reserved = Some(reserved);
        Ok(location)
    }

    fn reply_value(&mut self, conn: ConnectionId, tag: u64, block: &Stored) {
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.resize(block.length(), 0);
        block.read_value(&mut scratch);
        let value = Value {
            location: block.location(),
        };
        self.send(conn, None, |message| {
            message
                .encode_with_body(kind::VALUE, tag, &value, scratch.len() as u32)?
                .copy_from_slice(&scratch);
            Ok(())
        });
        self.scratch = scratch;
    }

    fn reply(&mut self, conn: ConnectionId, tag: u64, reply: &Reply, reuse: Option<Received>) {
        self.send(conn, reuse, |message| {
            message.encode(kind::REPLY, tag, reply)
        });
    }

    /// Encodes and sends a message, in the buffer of the request where that is given.
    fn send(
        &mut self,
        conn: ConnectionId,
        reuse: Option<Received>,
        encode: impl FnOnce(&mut OutgoingMessage) -> Result<(), wire::EncodeError>,
    ) {
        let message = match reuse {
            Some(request) => Ok(OutgoingMessage::from(request.into_buffer())),
            None => self.endpoint.message(MESSAGE),
        };
        let failure = match message {
            Ok(mut message) => match encode(&mut message) {
                Ok(()) => match self.endpoint.send(conn, message) {
                    Ok(()) => return,
                    // It ended while its request was served; the event that says so is on its way.
                    Err(error) if error.kind == SendErrorKind::UnknownConnection => return,
                    Err(error) => error.kind.to_string(),
                },
                Err(error) => error.to_string(),
            },
            Err(error) => error.to_string(),
        };
        self.close(conn, &failure);
    }

    /// Ends a connection whose client cannot be answered and would wait in vain: one that asks for more at once than
    /// a client of ours ever does.
    fn close(&mut self, conn: ConnectionId, reason: &str) {
        tracing::warn!(reason, "cannot answer a client; closing its connection");
        self.endpoint.close(conn);
        self.forget(conn);
    }

    fn forget(&mut self, conn: ConnectionId) {
        self.holdings[conn.index()] = Holding::default();
    }
}
