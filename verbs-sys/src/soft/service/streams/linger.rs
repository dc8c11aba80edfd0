//! Connections that this side is done with, but whose last words the peer must still get: closing a
//! socket that has unread input would throw them away.

use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{RecvFlags, Shutdown};

use super::{LINGER, Worker, token};
use crate::soft::link::stream::socket::Socket;

/// How long a peer may take to hear them.
const WITHIN: Duration = Duration::from_secs(2);
/// Connections that are waited for at once; those beyond are closed.
const MOST: usize = 1024;

pub(super) struct Linger {
    socket: Socket,
    pub(super) deadline: Instant,
    closed: bool,
}

impl Worker {
    pub(super) fn start_lingering(&mut self, socket: Socket) {
        if self.lingering.len() >= MOST {
            return;
        }
        let id = self.fresh();
        let linger = Linger {
            socket,
            deadline: Instant::now() + WITHIN,
            closed: false,
        };
        self.lingering.insert(id, linger);
        self.go_on_lingering(id);
    }

    pub(super) fn go_on_lingering(&mut self, id: u32) {
        let Some(linger) = self.lingering.get_mut(&id) else {
            return;
        };
        if linger.finish() {
            self.lingering.remove(&id);
        } else {
            let sends = linger.socket.output.pending() > 0;
            self.shared
                .watch(&linger.socket.fd, token(LINGER, id), true, sends);
        }
    }
}

impl Linger {
    /// `true`: it can be closed.
    fn finish(&mut self) -> bool {
        match self.socket.output.flush(&self.socket.fd) {
            Err(_) => return true,
            Ok(true) if !self.closed => {
                self.closed = true;
                if rustix::net::shutdown(&self.socket.fd, Shutdown::Write).is_err() {
                    return true;
                }
            }
            Ok(_) => {}
        }
        let mut scrap = [0u8; 4096];
        // What else comes is of no interest; a peer that never stops is not waited for.
        for _ in 0..64 {
            match rustix::net::recv(&self.socket.fd, &mut scrap, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => return true,
                Ok(_) | Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return false,
                Err(_) => return true,
            }
        }
        false
    }
}
