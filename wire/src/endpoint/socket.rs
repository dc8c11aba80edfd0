//! The TCP socket beside a connection's queue pair: by it each side knows that the other is alive.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

use crate::event::DisconnectCause;
use crate::greeting::Greeting;

/// The socket of a connection whose greeting is over. It does not block.
#[derive(Debug)]
pub(crate) struct Socket {
    stream: TcpStream,
    peer: SocketAddr,
}

/// What a socket says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SocketNews {
    Nothing,
    Ended(DisconnectCause),
}

impl Socket {
    pub(crate) fn new(stream: TcpStream, peer: SocketAddr) -> Self {
        Self { stream, peer }
    }

    pub(crate) fn stream(&self) -> &TcpStream {
        &self.stream
    }

    pub(crate) fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Tells the listener's peer that it may send.
    pub(crate) fn say_ready(&mut self) -> io::Result<()> {
        self.stream.write_all(&Greeting::Ready.to_bytes())
    }

    /// Tells the peer that the end is on purpose. Best effort: the peer may be gone.
    pub(crate) fn say_bye(&mut self) {
        let _ = self.stream.write_all(&Greeting::Bye.to_bytes());
    }

    /// Looks at what the socket says: nothing, while the connection is up.
    pub(crate) fn news(&mut self) -> SocketNews {
        let mut bytes = [0; 64];
        let mut bye = false;
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) if bye => return SocketNews::Ended(DisconnectCause::Closed),
                Ok(0) => return SocketNews::Ended(DisconnectCause::PeerGone),
                Ok(len) => match Greeting::parse(bytes.get(..len).unwrap_or_default()) {
                    Ok(Some((Greeting::Bye, _))) => bye = true,
                    // Nothing else has a place here, and a peer that says it is not one of ours.
                    _ => return SocketNews::Ended(DisconnectCause::Socket),
                },
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && bye => {
                    return SocketNews::Ended(DisconnectCause::Closed);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => return SocketNews::Nothing,
                Err(_) => return SocketNews::Ended(DisconnectCause::PeerGone),
            }
        }
    }
}
