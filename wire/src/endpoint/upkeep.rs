//! What an endpoint does off the path of messages: sleeping, looking after connections, ending
//! them.

use std::io;
use std::time::Duration;

use verbs_sys::{EventError, PollError};

use super::Endpoint;
use super::connection::{Care, State};
use super::socket::SocketNews;
use crate::event::{DisconnectCause, Event};

/// How long an endpoint sleeps at most while a connection has no memory to receive into: nobody
/// tells it when another thread gives some back.
const STARVED: Duration = Duration::from_millis(10);

/// Why an endpoint cannot wait.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError {
    /// The device does not announce completions.
    #[error("wait: the device cannot announce completions")]
    Device(#[from] EventError),
    /// The kernel does not let it sleep.
    #[error("wait: epoll_wait failed")]
    Sleep(#[source] io::Error),
}

impl Endpoint {
    /// Sleeps until there may be an event to [`poll`](Self::poll) for, at most `timeout`.
    ///
    /// It returns at once where there is one, and also when nothing has happened: poll until there
    /// is nothing more, then wait again. The end of a peer's process is noticed here, on
    /// connections that are idle too.
    ///
    /// # Errors
    ///
    /// [`WaitError`] where the device or the kernel fails.
    pub fn wait(&mut self, timeout: Option<Duration>) -> Result<(), WaitError> {
        if self.done < self.filled || !self.events.is_empty() || self.shared.take_wake() {
            return Ok(());
        }
        self.shared.cq.req_notify(false)?;
        loop {
            // What completed before is not announced.
            if self.look() || self.shared.take_wake() {
                return Ok(());
            }
            if !self.again {
                break;
            }
        }
        let timeout = if self.starved {
            Some(timeout.map_or(STARVED, |timeout| timeout.min(STARVED)))
        } else {
            timeout
        };
        let found = self.sleeper.sleep(timeout).map_err(WaitError::Sleep)?;
        self.sleeper.clear_channel(found)?;
        self.shared.take_wake();
        self.read_sockets(found);
        Ok(())
    }

    /// The next event, waiting for it at most `timeout`; `None` where none came, or where the
    /// endpoint was [woken](crate::Waker::wake).
    ///
    /// # Errors
    ///
    /// As [`wait`](Self::wait).
    pub fn poll_or_wait(&mut self, timeout: Option<Duration>) -> Result<Option<Event>, WaitError> {
        if let Some(event) = self.poll() {
            return Ok(Some(event));
        }
        self.wait(timeout)?;
        Ok(self.poll())
    }

    #[inline]
    pub(super) fn look_after(&mut self) {
        self.starved = false;
        self.again = false;
        // Those that need more go behind the ones that are looked at now.
        let count = self.listed.len();
        for at in 0..count {
            let index = self.listed[at];
            let Some(connection) = self.connections.at_mut(index) else {
                continue;
            };
            connection.listed = false;
            match connection.look_after(&self.shared.pool) {
                Care::Done => {}
                Care::GoesOn {
                    starved,
                    again,
                    returned,
                } => {
                    self.starved |= starved;
                    self.again |= again;
                    self.stats.credit_messages_sent += u64::from(returned);
                }
                Care::End(cause) => self.end(index, Some(cause)),
                Care::Finish(cause) => self.finish(index, cause),
            }
            if let Some(connection) = self.connections.at_mut(index) {
                Self::list(connection, index, &mut self.listed);
            }
        }
        self.listed.drain(..count);
    }

    #[cold]
    pub(super) fn take_mail(&mut self) {
        for established in self.shared.take_mail() {
            let peer = established.peer;
            match self.adopt(established) {
                Ok(conn) => self.events.push_back(Event::Connected { conn, peer }),
                Err(error) => tracing::debug!(%error, "a connection ended before it began"),
            }
        }
    }

    #[cold]
    pub(super) fn check_sockets(&mut self) {
        match self.sleeper.sleep(Some(Duration::ZERO)) {
            Ok(found) => self.read_sockets(found),
            Err(error) => tracing::warn!(%error, "cannot look at the sockets"),
        }
    }

    /// Looks at the sockets that have something to say: those connections come to their end.
    fn read_sockets(&mut self, found: usize) {
        for at in 0..found {
            let Some(id) = self.sleeper.socket(at) else {
                continue;
            };
            let Some(connection) = self.connections.get_mut(id) else {
                continue;
            };
            if let SocketNews::Ended(cause) = connection.socket.news() {
                self.sleeper.unwatch(connection.socket.stream());
                connection.leave(cause);
                self.leaving.push(id.index);
            }
        }
    }

    /// Ends the connections whose peers have gone, now that what they sent before was taken.
    #[cold]
    pub(super) fn end_leaving(&mut self) {
        while let Some(index) = self.leaving.pop() {
            let state = self
                .connections
                .at_mut(index)
                .map(|connection| connection.state());
            if let Some(State::Leaving(cause)) = state {
                self.end(index, Some(cause));
            }
        }
    }

    /// Starts to end a connection; where nothing is on its way, that is its end.
    pub(super) fn end(&mut self, index: u32, cause: Option<DisconnectCause>) {
        let Some(connection) = self.connections.at_mut(index) else {
            return;
        };
        if matches!(connection.state(), State::Ending(_)) {
            return;
        }
        // A queue pair breaks when its peer goes: then that is the cause.
        let cause = match (cause, connection.state()) {
            (Some(DisconnectCause::WorkRequest { .. }), State::Leaving(gone)) => Some(gone),
            (Some(DisconnectCause::WorkRequest { status }), _) => {
                Some(match connection.socket.news() {
                    SocketNews::Ended(gone) => gone,
                    SocketNews::Nothing => DisconnectCause::WorkRequest { status },
                })
            }
            (cause, _) => cause,
        };
        self.sleeper.unwatch(connection.socket.stream());
        if !connection.end(cause) {
            self.finish(index, cause);
        }
    }

    /// Destroys a connection, and tells.
    fn finish(&mut self, index: u32, cause: Option<DisconnectCause>) {
        let conn = self.connections.id(index);
        let Some(connection) = self.connections.remove(index) else {
            return;
        };
        self.by_qp.remove(connection.qp_num());
        drop(connection);
        if let Some(cause) = cause {
            self.events.push_back(Event::Disconnected { conn, cause });
        }
    }

    /// The completion queue is of no use any more: all connections end as they are.
    #[cold]
    pub(super) fn fail_all(&mut self, error: &PollError) {
        tracing::error!(%error, "all connections of the endpoint end");
        let indices: Vec<u32> = self.connections.indices().collect();
        for index in indices {
            let state = self
                .connections
                .at_mut(index)
                .map(|connection| connection.state());
            let told = state != Some(State::Ending(None));
            self.finish(index, told.then_some(DisconnectCause::CompletionQueue));
        }
    }
}
