//! Sockets to other hosts, and who is at the other end of those of this one.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use verbs_sys::soft;

use crate::address::unspecified;
use crate::fork::Mine;

/// An idle connection to a host that is gone ends after half a minute.
const KEEP_ALIVE_IDLE: Duration = Duration::from_secs(15);
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEP_ALIVE_PROBES: u32 = 3;
/// Connections that the kernel keeps until they are taken.
pub const QUEUE: i32 = 4096;

/// The address at which this process may be reached from other hosts, and reach them: where the device's
/// own option says so, since queue pairs go no other way.
#[must_use]
pub fn reach() -> Option<IpAddr> {
    soft::Options::from_env()
        .listen
        .map(|listen| listen.address)
}

/// Where someone who listens at an address does so for other hosts; `None`: he is to be reached from this
/// one only.
#[must_use]
pub fn listen_address(wanted: SocketAddr, reach: Option<IpAddr>) -> Option<SocketAddr> {
    let reach = reach?;
    let ip = wanted.ip();
    if ip.to_canonical().is_loopback() {
        return None;
    }
    if reach.is_unspecified() {
        return Some(wanted);
    }
    let both_families = ip.is_unspecified() && ip.is_ipv6();
    let covered = ip.to_canonical() == reach.to_canonical()
        || ip == unspecified(reach.to_canonical())
        || both_families;
    covered.then(|| SocketAddr::new(reach, wanted.port()))
}

fn tcp(address: SocketAddr) -> Result<Mine, Errno> {
    let family = if address.is_ipv4() {
        AddressFamily::INET
    } else {
        AddressFamily::INET6
    };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    Ok(Mine::new(socket))
}

/// Listens for other hosts.
///
/// # Errors
///
/// What the kernel says, e.g. `EADDRINUSE`.
pub fn listen(address: SocketAddr, v6_only: bool) -> Result<Mine, Errno> {
    let socket = tcp(address)?;
    sockopt::set_socket_reuseaddr(&socket, true)?;
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, v6_only)?;
    }
    rustix::net::bind(&socket, &address)?;
    rustix::net::listen(&socket, QUEUE)?;
    Ok(socket)
}

/// Begins to connect from an address to one of another host. Whether it is done already.
///
/// # Errors
///
/// What the kernel says, e.g. `ENETUNREACH`.
pub fn connect(from: SocketAddr, to: SocketAddr) -> Result<(Mine, bool), Errno> {
    let socket = tcp(to)?;
    let mut from = from;
    from.set_port(0);
    rustix::net::bind(&socket, &from)?;
    match rustix::net::connect(&socket, &to) {
        Ok(()) => Ok((socket, true)),
        Err(Errno::INPROGRESS) => Ok((socket, false)),
        Err(error) => Err(error),
    }
}

/// Sets what every connection to another host has: no waiting for more to send, and an end when that host
/// is gone.
///
/// # Errors
///
/// `EINVAL` if it has ended already.
pub fn adjust(socket: impl AsFd) -> Result<(), Errno> {
    sockopt::set_tcp_nodelay(&socket, true)?;
    sockopt::set_socket_keepalive(&socket, true)?;
    sockopt::set_tcp_keepidle(&socket, KEEP_ALIVE_IDLE)?;
    sockopt::set_tcp_keepintvl(&socket, KEEP_ALIVE_INTERVAL)?;
    sockopt::set_tcp_keepcnt(&socket, KEEP_ALIVE_PROBES)
}

/// Whether a process of this user is at the other end of a connection within this host.
#[must_use]
pub fn is_same_user(socket: impl AsFd) -> bool {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: a place for the result, and its length.
    let code = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &mut len,
        )
    };
    code == 0 && found.uid == rustix::process::geteuid().as_raw()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_other_hosts_are_listened_to() {
        let ip = |text: &str| Some(text.parse().unwrap());
        let at = |text: &str| text.parse().unwrap();
        for (wanted, reach, listens) in [
            ("0.0.0.0:1", None, None),
            ("0.0.0.0:1", ip("0.0.0.0"), Some("0.0.0.0:1")),
            ("0.0.0.0:1", ip("192.0.2.1"), Some("192.0.2.1:1")),
            ("[::]:1", ip("192.0.2.1"), Some("192.0.2.1:1")),
            ("192.0.2.1:1", ip("0.0.0.0"), Some("192.0.2.1:1")),
            ("192.0.2.1:1", ip("192.0.2.1"), Some("192.0.2.1:1")),
            ("192.0.2.2:1", ip("192.0.2.1"), None),
            ("0.0.0.0:1", ip("2001:db8::1"), None),
            ("127.0.0.1:1", ip("0.0.0.0"), None),
            ("[::1]:1", ip("::"), None),
        ] {
            let found = listen_address(at(wanted), reach);
            assert_eq!(found, listens.map(at), "{wanted} {reach:?}");
        }
    }
}
