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
use crate::spin::Spin;

/// A connection to a server. Once something goes wrong on it that leaves an outcome unknown it is closed for good.
pub struct Link {
    endpoint: Endpoint,
    connection: ConnectionId,
    server: SocketAddr,
    wait: Wait,
    timeout: Duration,
    /// Number of the last request or READ.
    last: u64,
    /// Why it was closed.
    closed: Option<String>,
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
            last: 0,
            closed: None,
        })
    }

    pub fn server(&self) -> SocketAddr {
        self.server
    }

    /// Sends the request that `encode` writes, with the number it is given as tag, and returns the reply.
    ///
    /// # Errors
    /// [`OperationError`]; unless nothing was sent, the connection is closed.
    #[inline]
    pub fn request(
        &mut self,
        encode: impl FnOnce(&mut OutgoingMessage, u64) -> Result<(), EncodeError>,
    ) -> Result<Received, OperationError> {
        let number = self.post(encode)?;
        match self.wait_for(|event| match event {
            Event::Message { message, .. } => Some(message),
            _ => None,
        })? {
            message if message.tag() == number => Ok(message),
            message => {
                let reason = format!("reply to request {}, not {number}", message.tag());
                Err(self.broken(reason))
            }
        }
    }

    /// Sends a message that is not answered.
    ///
    /// # Errors
    /// [`OperationError`], as for a request.
    #[inline]
    pub fn post(
        &mut self,
        encode: impl FnOnce(&mut OutgoingMessage, u64) -> Result<(), EncodeError>,
    ) -> Result<u64, OperationError> {
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
        match self.endpoint.send(self.connection, message) {
            Ok(()) => Ok(number),
            Err(error) => Err(self.gone(error.kind.to_string())),
        }
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

    /// WRITEs the part of `buffer` to `remote`.
    ///
    /// # Errors
    /// [`OperationError`], with the buffer where it came back; the connection is closed.
    pub fn write(
        &mut self,
        buffer: Buffer,
        range: Range<usize>,
        remote: RemoteAddr,
    ) -> Result<Buffer, (OperationError, Option<Buffer>)> {
        if let Err(error) = self.check() {
            return Err((error, Some(buffer)));
        }
        self.last += 1;
        let number = self.last;
        if let Err(error) = self
            .endpoint
            .write(self.connection, buffer, range, remote, number)
        {
            return Err((self.gone(error.kind.to_string()), error.buffer));
        }
        let done = self.wait_for(|event| match event {
            Event::WriteDone {
                token,
                result,
                buffer,
                ..
            } if token == number => Some((result, buffer)),
            _ => None,
        });
        match done {
            Ok((Ok(()), buffer)) => Ok(buffer),
            Ok((Err(status), buffer)) => {
                let error = self.gone(format!("a WRITE failed: {status:?}"));
                Err((error, Some(buffer)))
            }
            Err(error) => Err((error, None)),
        }
    }

    /// The first event that `take` wants.
    #[inline]
    fn wait_for<T>(&mut self, take: impl Fn(Event) -> Option<T>) -> Result<T, OperationError> {
        let mut spin = Spin::new();
        let mut deadline = None;
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
            let deadline = *deadline.get_or_insert_with(|| now + self.timeout);
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
