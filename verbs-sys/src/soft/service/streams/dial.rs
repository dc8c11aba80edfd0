//! Connecting a queue pair to its peer, for its requests: again and again until the peer is ready, or the
//! queue pair no longer wants it.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::{DIAL, Worker, adjust_tcp, read_some, socket, token};
use crate::soft::identity;
use crate::soft::link::Link;
use crate::soft::link::stream::Route;
use crate::soft::link::stream::mpa::{Answer, Hello, Outcome};
use crate::soft::link::stream::socket::{Output, Socket};

/// Between two attempts: from this, doubling, up to that.
const SOON: Duration = Duration::from_millis(1);
const LATER: Duration = Duration::from_millis(100);
/// How long one attempt may take: a packet that is lost costs a second.
const WITHIN: Duration = Duration::from_secs(4);

enum Stage {
    /// Until the next attempt.
    Waiting,
    Connecting(OwnedFd),
    /// Connected, and greeted.
    Greeted(OwnedFd, Vec<u8>),
}

pub(super) struct Dial {
    qpn: u32,
    link: Arc<Link>,
    hello: Hello,
    stage: Stage,
    due: Instant,
    pause: Duration,
}

impl Dial {
    /// When it is to be looked at, whatever happens.
    pub(super) fn due(&self) -> Instant {
        self.due
    }
}

/// How an attempt went on.
enum Next {
    Watch { sends: bool },
    Again,
    Done(Box<Socket>),
    Never,
}

impl Worker {
    pub(super) fn start_dialing(&mut self, qpn: u32, link: Arc<Link>, hello: Hello) {
        let id = self.fresh();
        let dial = Dial {
            qpn,
            link,
            hello,
            stage: Stage::Waiting,
            due: Instant::now(),
            pause: SOON,
        };
        self.dials.insert(id, dial);
        self.redial(id);
    }

    /// Begins a new attempt: the time for it has come, or the last one has taken too long.
    pub(super) fn redial(&mut self, id: u32) {
        let Some(dial) = self.dials.get_mut(&id) else {
            return;
        };
        let wanted = self
            .process
            .qp(dial.qpn)
            .is_some_and(|qp| qp.wants_stream(&dial.link));
        if !wanted {
            self.dials.remove(&id);
            return;
        }
        dial.due = Instant::now() + WITHIN;
        let next = match connect(&dial.link) {
            Ok(socket) => {
                dial.stage = Stage::Connecting(socket);
                Next::Watch { sends: true }
            }
            Err(error) => {
                tracing::debug!(qpn = dial.qpn, %error, "cannot connect");
                Next::Again
            }
        };
        self.follow(id, next);
    }

    pub(super) fn go_on_dialing(&mut self, id: u32) {
        let Some(dial) = self.dials.get_mut(&id) else {
            return;
        };
        let next = match std::mem::replace(&mut dial.stage, Stage::Waiting) {
            Stage::Waiting => return,
            Stage::Connecting(socket) => dial.connected(socket),
            Stage::Greeted(socket, came) => dial.answered(socket, came),
        };
        self.follow(id, next);
    }

    fn follow(&mut self, id: u32, next: Next) {
        let Some(dial) = self.dials.get_mut(&id) else {
            return;
        };
        match next {
            Next::Watch { sends } => {
                if let Stage::Connecting(socket) | Stage::Greeted(socket, _) = &dial.stage {
                    self.shared.watch(socket, token(DIAL, id), !sends, sends);
                }
            }
            Next::Again => {
                dial.stage = Stage::Waiting;
                dial.due = Instant::now() + dial.pause;
                dial.pause = (dial.pause * 2).min(LATER);
            }
            Next::Done(socket) => self.end(id, Some(*socket)),
            Next::Never => self.end(id, None),
        }
    }

    fn end(&mut self, id: u32, socket: Option<Socket>) {
        if let Some(dial) = self.dials.remove(&id)
            && let Some(qp) = self.process.qp(dial.qpn)
        {
            qp.connected_stream(&dial.link, socket);
        }
    }
}

impl Dial {
    /// The socket can be written: it is connected, or it failed.
    fn connected(&mut self, socket: OwnedFd) -> Next {
        match rustix::net::sockopt::socket_error(&socket) {
            Ok(Ok(())) => {}
            Ok(Err(error)) | Err(error) => {
                tracing::debug!(qpn = self.qpn, %error, "cannot connect");
                return Next::Again;
            }
        }
        // A fresh socket takes so few bytes.
        let mut output = Output::default();
        output.raw(&self.hello.encode());
        if !matches!(output.flush(&socket), Ok(true)) {
            return Next::Again;
        }
        self.stage = Stage::Greeted(socket, Vec::new());
        Next::Watch { sends: false }
    }

    fn answered(&mut self, socket: OwnedFd, mut came: Vec<u8>) -> Next {
        match read_some(&socket, &mut came) {
            Ok(_) | Err(Errno::AGAIN) => {}
            Err(_) => return Next::Again,
        }
        let (answer, taken) = match Answer::decode(&came) {
            Ok(Some(answer)) => answer,
            Ok(None) => {
                self.stage = Stage::Greeted(socket, came);
                return Next::Watch { sends: false };
            }
            Err(error) => {
                tracing::warn!(qpn = self.qpn, %error, "something else answers where the peer should");
                return Next::Again;
            }
        };
        match answer.result {
            Outcome::Accepted => {
                let socket = Socket::new(socket, &came[taken..], answer.crc);
                Next::Done(Box::new(socket))
            }
            Outcome::NotYet => Next::Again,
            Outcome::Gone => Next::Never,
            Outcome::Refused(code) => {
                tracing::warn!(qpn = self.qpn, code, "the peer refuses the connection");
                Next::Never
            }
        }
    }
}

/// Begins to connect.
fn connect(link: &Link) -> Result<OwnedFd, Errno> {
    let connected = |result| match result {
        Ok(()) | Err(Errno::INPROGRESS) => Ok(()),
        Err(error) => Err(error),
    };
    match link.route.ok_or(Errno::NOTCONN)? {
        Route::Tcp { from, to } => {
            let socket = socket(to, SocketType::STREAM)?;
            adjust_tcp(&socket)?;
            rustix::net::bind(&socket, &from)?;
            connected(rustix::net::connect(&socket, &to))?;
            Ok(socket)
        }
        Route::Host(slot) => {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket =
                rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            connected(rustix::net::connect(
                &socket,
                &identity::stream_address(slot)?,
            ))?;
            Ok(socket)
        }
    }
}
