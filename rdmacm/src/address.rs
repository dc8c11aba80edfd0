//! Addresses: C's form and ours, which are local, and which way leads to which.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, UdpSocket};

use libc::{sockaddr, sockaddr_in, sockaddr_in6, sockaddr_storage, socklen_t};
use rustix::io::Errno;

/// Reads an IPv4 or IPv6 address.
///
/// # Errors
///
/// `EINVAL` for a null pointer and for any other family.
///
/// # Safety
///
/// `address` is null, or has as many bytes as its family takes.
pub unsafe fn read(address: *const sockaddr) -> Result<SocketAddr, Errno> {
    if address.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: every address begins with its family; it need not be aligned.
    match i32::from(unsafe { (&raw const (*address).sa_family).read_unaligned() }) {
        libc::AF_INET => {
            // SAFETY: the family says what it is.
            let v4 = unsafe { address.cast::<sockaddr_in>().read_unaligned() };
            let ip = Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr));
            Ok(SocketAddrV4::new(ip, u16::from_be(v4.sin_port)).into())
        }
        libc::AF_INET6 => {
            // SAFETY: the family says what it is.
            let v6 = unsafe { address.cast::<sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(v6.sin6_addr.s6_addr);
            let port = u16::from_be(v6.sin6_port);
            Ok(SocketAddrV6::new(ip, port, v6.sin6_flowinfo, v6.sin6_scope_id).into())
        }
        _ => Err(Errno::INVAL),
    }
}

/// The address in C's form, and how many bytes of it count.
#[must_use]
pub fn to_c(address: SocketAddr) -> (sockaddr_storage, socklen_t) {
    // SAFETY: the structure consists of integers.
    let mut storage: sockaddr_storage = unsafe { crate::abi::zeroed() };
    let place = &raw mut storage;
    match address {
        SocketAddr::V4(v4) => {
            let value = sockaddr_in {
                sin_family: libc::AF_INET as u16,
                sin_port: v4.port().to_be(),
                sin_addr: libc::in_addr {
                    s_addr: u32::from(*v4.ip()).to_be(),
                },
                sin_zero: [0; 8],
            };
            // SAFETY: the structure is made to hold any address.
            unsafe { place.cast::<sockaddr_in>().write(value) };
            (storage, size_of::<sockaddr_in>() as socklen_t)
        }
        SocketAddr::V6(v6) => {
            let value = sockaddr_in6 {
                sin6_family: libc::AF_INET6 as u16,
                sin6_port: v6.port().to_be(),
                sin6_flowinfo: v6.flowinfo(),
                sin6_addr: libc::in6_addr {
                    s6_addr: v6.ip().octets(),
                },
                sin6_scope_id: v6.scope_id(),
            };
            // SAFETY: as above.
            unsafe { place.cast::<sockaddr_in6>().write(value) };
            (storage, size_of::<sockaddr_in6>() as socklen_t)
        }
    }
}

/// The GID of an address, as a RoCE port has it.
#[must_use]
pub fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// The unspecified address of the same family.
#[must_use]
pub fn unspecified(ip: IpAddr) -> IpAddr {
    match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    }
}

/// The own address from which this host would send to another, without a port.
///
/// # Errors
///
/// What the kernel says when there is no way, e.g. `ENETUNREACH`.
pub fn source_for(to: SocketAddr) -> Result<SocketAddr, Errno> {
    // Nothing is sent: connecting a datagram socket only looks up the route. Port 0 is none to connect to.
    let mut to = to;
    to.set_port(to.port().max(1));
    let socket = UdpSocket::bind((unspecified(to.ip()), 0)).map_err(errno)?;
    socket.connect(to).map_err(errno)?;
    let mut source = socket.local_addr().map_err(errno)?;
    source.set_port(0);
    Ok(source)
}

/// Whether an address is one of this host: of its network namespace.
#[must_use]
pub fn is_local(address: SocketAddr) -> bool {
    let ip = address.ip().to_canonical();
    // To itself a host sends from the same address.
    ip.is_loopback() || source_for(address).is_ok_and(|source| source.ip().to_canonical() == ip)
}

/// The kernel's error.
pub fn errno(error: io::Error) -> Errno {
    errno_of(error.raw_os_error().unwrap_or_default())
}

/// The error of a number that somebody else says is one; `EIO` where it is none.
pub fn errno_of(code: i32) -> Errno {
    match code {
        1..4096 => Errno::from_raw_os_error(code),
        _ => Errno::IO,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn addresses_survive_cs_form() {
        for text in [
            "127.0.0.1:7174",
            "[fe80::1%3]:5",
            "[::]:0",
            "255.255.255.255:65535",
        ] {
            let (storage, len) = to_c(address(text));
            // SAFETY: a whole address.
            let back = unsafe { read((&raw const storage).cast()) };
            assert_eq!(back, Ok(address(text)));
            assert!(usize::try_from(len).unwrap() <= size_of::<sockaddr_storage>());
        }
    }

    #[test]
    fn what_is_no_error_is_some_error() {
        assert_eq!(errno_of(libc::ENOMEM), Errno::NOMEM);
        for code in [0, -1, 4096, i32::MAX, i32::MIN] {
            assert_eq!(errno_of(code), Errno::IO);
        }
    }

    #[test]
    fn other_families_are_refused() {
        // SAFETY: the structure consists of integers.
        let mut storage: sockaddr_storage = unsafe { crate::abi::zeroed() };
        for family in [libc::AF_UNSPEC, libc::AF_UNIX, 27] {
            storage.ss_family = family as u16;
            // SAFETY: an address with room for any family.
            let found = unsafe { read((&raw const storage).cast()) };
            assert_eq!(found, Err(Errno::INVAL));
        }
        // SAFETY: a null pointer is allowed.
        assert_eq!(unsafe { read(std::ptr::null()) }, Err(Errno::INVAL));
    }

    #[test]
    fn loopback_is_local_and_examples_are_not() {
        assert!(is_local(address("127.0.0.1:1")) && is_local(address("127.9.8.7:0")));
        assert!(is_local(address("[::1]:1")) && is_local(address("[::ffff:127.0.0.1]:1")));
        // RFC 5737 and RFC 3849: addresses that no host has.
        assert!(!is_local(address("203.0.113.7:1")) && !is_local(address("[2001:db8::7]:1")));
    }
}
