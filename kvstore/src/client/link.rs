//! The connection of a client: one request or READ at a time, each bounded in time.

use std::net::SocketAddr;
use std::ops::Range;
use std::time::{Duration, Instant};

use mr_pool::{Buffer, Pool};
use verbs_sys::{ProtectionDomain, RemoteAddr};
use wire::{ConnectionId, EncodeError, Endpoint, Event, OutgoingMessage, Received};

use crate::config::{ClientConfig, Wait};
use crate::device;
use crate::error::{ConnectError, OperationError};
use crate::segments;
use crate::spin::Spin;

/// A connection to a server. Once something goes wrong on it that leaves an outcome unknown it is closed for good.
pub struct Link {
    endpoint: Endpoint,
    connection: ConnectionId,
    server: SocketAddr,
    wait: Wait,
    timeout: Duration,
    /// When the operation under way has taken too long, once it has taken long enough to look at the clock.
    deadline: Option<Instant>,
    /// Number of the last request or READ.
    last: u64,
    /// Why it was closed.
    closed: Option<String>,
}

/// A message, and the number by which its reply is known.
pub struct Numbered {
    number: u64,
    message: OutgoingMessage,
}

impl Link {
    pub fn connect(
        pd: &ProtectionDomain,
        messages: &Pool,
        server: SocketAddr,
        config: &ClientConfig,
    ) -> Result<Self, ConnectError> {
        let mut endpoint =
            Endpoint::new(pd, messages, device::wire_config(1, config.timeout, false)).map_err(
                |source| ConnectError::Device {
                    source: source.into(),
                },
            )?;
        let connection = endpoint.connect(server)?;
        Ok(Self {
            endpoint,
            connection,
            server,
            wait: config.wait,
            timeout: config.timeout,
            deadline: None,
            last: 0,
            closed: None,
        })
    }

    pub fn server(&self) -> SocketAddr {
        self.server
    }

    /// Starts an operation, whose steps together may take the configured time.
    #[inline]
    pub fn begin(&mut self) {
        self.deadline = None;
    }

    /// The message that `encode` writes, with the number it is given as tag.
    ///
    /// # Errors
    /// [`OperationError`]; nothing was sent, and the connection stays as it is.
    #[inline]
    pub fn message(
        &mut self,
        encode: impl FnOnce(&mut OutgoingMessage, u64) -> Result<(), EncodeError>,
    ) -> Result<Numbered, OperationError> {
        self.check()?;
        self.last += 1;
        let number = self.last;
        let mut message =
            self.endpoint
                .message(device::MESSAGE)
                .map_err(|source| OperationError::Memory {
                    length: device::MESSAGE,
                    source: source.into(),
                })?;
        encode(&mut message, number).map_err(|source| OperationError::Encode {
            source: source.into(),
        })?;
        Ok(Numbered { number, message })
    }

    /// Sends a message that is not answered.
    ///
    /// # Errors
    /// [`OperationError`]; the connection is closed.
    #[inline]
    pub fn post(&mut self, message: Numbered) -> Result<(), OperationError> {
        match self.endpoint.send(self.connection, message.message) {
            Ok(()) => Ok(()),
            Err(error) => Err(self.gone(error.kind.to_string())),
        }
    }

    /// Sends a request and returns the reply.
    ///
    /// # Errors
    /// [`OperationError`]; the connection is closed.
    #[inline]
    pub fn request(&mut self, message: Numbered) -> Result<Received, OperationError> {
        let number = message.number;
        self.post(message)?;
        let reply = self.wait_for(|event| match event {
            Event::Message { message, .. } => Some(message),
            _ => None,
        })?;
        self.check_reply(number, reply)
    }

    #[inline]
    fn check_reply(&mut self, number: u64, reply: Received) -> Result<Received, OperationError> {
        if reply.tag() == number {
            return Ok(reply);
        }
        Err(self.broken(format!("reply to request {}, not {number}", reply.tag())))
    }

    /// READs the parts of a chain, in order, into `buffer`.
    ///
    /// # Errors
    /// [`OperationError`]; the connection is closed.
    #[inline]
    pub fn read(
        &mut self,
        buffer: Buffer,
        chain: &[(Range<usize>, RemoteAddr)],
    ) -> Result<Buffer, OperationError> {
        self.check()?;
        self.last += 1;
        let number = self.last;
        if let Err(error) = self
            .endpoint
            .read_chain(self.connection, buffer, chain, number)
        {
            return Err(self.gone(error.kind.to_string()));
        }
        let (result, buffer) = self.wait_for(|event| match event {
            Event::ReadDone {
                token,
                result,
                buffer,
                ..
            } if token == number => Some((result, buffer)),
            _ => None,
        })?;
        match result {
            Ok(()) => Ok(buffer),
            Err(status) => Err(self.gone(format!("a READ failed: {status:?}"))),
        }
    }

    /// WRITEs the first `length` bytes of `buffer` to `remote`, sends a request behind them, and returns the reply.
    /// The buffer is empty meanwhile, and after an error perhaps for good.
    ///
    /// # Errors
    /// [`OperationError`]; the connection is closed.
    pub fn write_and_request(
        &mut self,
        buffer: &mut Option<Buffer>,
        length: usize,
        remote: RemoteAddr,
        message: Numbered,
    ) -> Result<Received, OperationError> {
        let Some(value) = buffer.take() else {
            return Err(self.gone("a value lost its memory in an earlier error".into()));
        };
        let number = message.number;
        let mut segments = segments::of(0..length, remote);
        let posted = match (segments.next(), segments.next()) {
            (Some((range, remote)), None) => {
                self.endpoint
                    .write(self.connection, value, range, remote, number)
            }
            _ => {
                let chain: Vec<_> = segments::of(0..length, remote).collect();
                self.endpoint
                    .write_chain(self.connection, value, &chain, number)
            }
        };
        if let Err(error) = posted {
            *buffer = error.buffer;
            return Err(self.gone(error.kind.to_string()));
        }
        self.post(message)?;
        // In either order: the acknowledgement of the WRITE and the reply are two messages.
        let (mut written, mut reply) = (None, None);
        let (result, reply) = self.wait_for(|event| {
            match event {
                Event::WriteDone {
                    token,
                    result,
                    buffer: value,
                    ..
                } if token == number => {
                    *buffer = Some(value);
                    written = Some(result);
                }
                Event::Message { message, .. } => reply = Some(message),
                _ => {}
            }
            let result = written.filter(|result| result.is_err() || reply.is_some())?;
            Some((result, reply.take()))
        })?;
        match (result, reply) {
            (Ok(()), Some(reply)) => self.check_reply(number, reply),
            (result, _) => Err(self.gone(format!("a WRITE ended with {result:?}"))),
        }
    }

    /// What `take` makes of the first event that it wants.
    #[inline]
    fn wait_for<T>(
        &mut self,
        mut take: impl FnMut(Event) -> Option<T>,
    ) -> Result<T, OperationError> {
        let mut spin = Spin::new();
        loop {
            while let Some(event) = self.endpoint.poll() {
                if let Event::Disconnected { cause, .. } = event {
                    return Err(self.gone(cause.to_string()));
                }
                if let Some(wanted) = take(event) {
                    return Ok(wanted);
                }
            }
            // An operation that ends while this spins never looks at the clock.
            if self.wait == Wait::Poll && !spin.is_long() {
                spin.turn();
                continue;
            }
            let now = Instant::now();
            let deadline = *self.deadline.get_or_insert(now + self.timeout);
            if now >= deadline {
                return Err(self.timed_out());
            }
            match self.wait {
                Wait::Poll => spin.turn(),
                Wait::Event => {
                    if let Err(error) = self.endpoint.wait(Some(deadline - now)) {
                        return Err(self.gone(error.to_string()));
                    }
                }
            }
        }
    }

    #[inline]
    fn check(&self) -> Result<(), OperationError> {
        match &self.closed {
            None => Ok(()),
            Some(reason) => Err(OperationError::Disconnected {
                address: self.server,
                reason: reason.clone(),
            }),
        }
    }

    /// Closes the connection, whose queue pair then refuses what the server may still want of this client's memory.
    #[cold]
    fn close(&mut self, reason: String) {
        self.endpoint.close(self.connection);
        self.closed = Some(reason);
    }

    #[cold]
    fn gone(&mut self, reason: String) -> OperationError {
        self.close(reason.clone());
        OperationError::Disconnected {
            address: self.server,
            reason,
        }
    }

    #[cold]
    fn timed_out(&mut self) -> OperationError {
        self.close(format!(
            "closed after an operation took longer than {:?}",
            self.timeout
        ));
        OperationError::TimedOut {
            address: self.server,
            timeout: self.timeout,
        }
    }

    /// Closes the connection to a server that does not keep to the protocol.
    #[cold]
    pub fn broken(&mut self, reason: String) -> OperationError {
        self.close(format!("closed after an unexpected message: {reason}"));
        OperationError::Protocol {
            address: self.server,
            reason,
        }
    }
}
