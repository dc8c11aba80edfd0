//! Datagrams between hosts: UDP from one process to the other, with the destination's number in front.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendFlags, SocketType, sockopt};

use super::{DATAGRAM, Worker, bind, socket, token};
use crate::soft::qp::MAX_DATAGRAM;

/// Bytes before the datagram: the number of its queue pair.
const NUMBER: usize = 4;
/// Datagrams taken before other sockets have their turn.
const BURST: usize = 64;
/// Bytes of a socket's buffers: programs post receives for hundreds of datagrams, and send as many at a time.
const BUFFER: usize = 4 << 20;

/// A socket for datagrams of other hosts.
pub(in crate::soft) fn bind_udp(address: SocketAddr) -> Result<OwnedFd, Errno> {
    let socket = socket(address, SocketType::DGRAM)?;
    // Less than that, where the administrator allows no more.
    let _ = sockopt::set_socket_recv_buffer_size(&socket, BUFFER);
    let _ = sockopt::set_socket_send_buffer_size(&socket, BUFFER);
    bind(&socket, address)?;
    Ok(socket)
}

/// Sends a datagram to a queue pair.
pub(in crate::soft) fn send_udp(
    socket: &OwnedFd,
    to: SocketAddr,
    qpn: u32,
    parts: &[&[u8]; 2],
) -> Result<(), Errno> {
    let number = qpn.to_be_bytes();
    let parts = [
        IoSlice::new(&number),
        IoSlice::new(parts[0]),
        IoSlice::new(parts[1]),
    ];
    let mut none = SendAncillaryBuffer::default();
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    rustix::net::sendmsg_addr(socket, &to, &parts, &mut none, flags).map(drop)
}

impl Worker {
    pub(super) fn add_datagrams(&mut self, socket: OwnedFd) {
        let data = EventData::new_u64(token(DATAGRAM, 0));
        match epoll::add(&self.shared.epoll, &socket, data, EventFlags::IN) {
            Ok(()) => self.datagrams = Some(socket),
            Err(error) => tracing::error!(%error, "cannot wait for datagrams"),
        }
    }

    pub(super) fn take_datagrams(&mut self) {
        let Some(socket) = &self.datagrams else {
            return;
        };
        // One byte more than any has, so that a longer one is noticed.
        let mut space = [MaybeUninit::uninit(); NUMBER + MAX_DATAGRAM + 1];
        for _ in 0..BURST {
            let received = rustix::net::recvfrom(socket, &mut space, RecvFlags::DONTWAIT);
            let ((bytes, _), _, from) = match received {
                Ok(received) => received,
                Err(Errno::INTR) => continue,
                // Also what the kernel has heard of an earlier one of ours.
                Err(_) => return,
            };
            let Some((number, datagram)) = bytes.split_first_chunk_mut::<NUMBER>() else {
                continue;
            };
            let from = from.and_then(|from| SocketAddr::try_from(from).ok());
            let qp = self.process.qp(u32::from_be_bytes(*number));
            if let (Some(qp), Some(from)) = (qp, from)
                && datagram.len() <= MAX_DATAGRAM
            {
                qp.pass_datagram(from.ip().to_canonical(), datagram);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    #[test]
    fn buffers_are_larger_than_usual() {
        let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let usual = socket(any, SocketType::DGRAM).unwrap();
        let ours = bind_udp(any).unwrap();
        let sizes = |socket| {
            (
                sockopt::socket_recv_buffer_size(socket).unwrap(),
                sockopt::socket_send_buffer_size(socket).unwrap(),
            )
        };
        let (ours, usual) = (sizes(&ours), sizes(&usual));
        assert!(
            ours.0 > usual.0 && ours.1 > usual.1,
            "{ours:?} and {usual:?}"
        );
    }
}
