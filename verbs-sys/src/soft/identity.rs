//! Who we are on this host: GIDs and a process slot.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::layout::MAX_SLOT;

/// The abstract socket address that stands for a slot. Whoever is bound to it owns the slot, and the
/// kernel frees it when the owner dies. Abstract names live in the network namespace, and so does
/// what this device calls a host.
pub(super) fn slot_address(slot: u32) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("verbs-soft0/{slot}").as_bytes())
}

/// The same for the socket that streams of this host come to, where there are any.
pub(super) fn stream_address(slot: u32) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("verbs-soft0/{slot}/stream").as_bytes())
}

/// Listens there.
pub(super) fn listen_for_streams(slot: u32) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::bind(&socket, &stream_address(slot)?)?;
    rustix::net::listen(&socket, 128)?;
    Ok(socket)
}

/// The address that a GID stands for.
pub(super) fn ip_of(gid: [u8; 16]) -> IpAddr {
    IpAddr::V6(Ipv6Addr::from(gid)).to_canonical()
}

pub(super) fn seqpacket() -> Result<OwnedFd, Errno> {
    rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
}

/// Claims a free slot of this host: its number and the listening socket that peers connect to.
pub(super) fn claim_slot() -> Result<(u32, OwnedFd), Errno> {
    // Start somewhere else each time: a queue pair number of the dead should not soon name the living.
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let seed = std::process::id().wrapping_mul(0x9e37_79b1)
        ^ (clock.tv_nsec as u32).wrapping_mul(0x85eb_ca6b);
    for i in 0..MAX_SLOT - 1 {
        let slot = 1 + (seed.wrapping_add(i)) % (MAX_SLOT - 1);
        let socket = seqpacket()?;
        match rustix::net::bind(&socket, &slot_address(slot)?) {
            Ok(()) => {
                rustix::net::listen(&socket, 128)?;
                return Ok((slot, socket));
            }
            Err(Errno::ADDRINUSE) => {}
            Err(other) => return Err(other),
        }
    }
    Err(Errno::NOSPC)
}

/// The GID table in RoCE v2 form: this host's addresses, those that other hosts can reach first.
pub(super) fn gids() -> Vec<[u8; 16]> {
    let mut addresses = host_addresses();
    addresses.sort_by_key(|ip| (ip.is_loopback(), ip.is_ipv6()));
    addresses.dedup();
    if addresses.is_empty() {
        // A namespace without a configured interface still has processes that talk to each other.
        addresses.push(IpAddr::V4(Ipv4Addr::LOCALHOST));
    }
    addresses.into_iter().map(gid_of).collect()
}

pub(super) fn gid_of(ip: IpAddr) -> [u8; 16] {
    match ip {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

fn host_addresses() -> Vec<IpAddr> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the result.
    if unsafe { libc::getifaddrs(&mut list) } != 0 {
        return Vec::new();
    }
    let mut found = Vec::new();
    let mut next = list;
    // SAFETY: `next` walks the list that getifaddrs made, which stays valid until freeifaddrs.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: as above; a null address is skipped by `as_ref`.
        let Some(address) = (unsafe { entry.ifa_addr.as_ref() }) else {
            continue;
        };
        match i32::from(address.sa_family) {
            libc::AF_INET => {
                // SAFETY: the family says that this is a sockaddr_in.
                let v4 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                found.push(IpAddr::V4(Ipv4Addr::from(u32::from_be(v4.sin_addr.s_addr))));
            }
            libc::AF_INET6 => {
                // SAFETY: the family says that this is a sockaddr_in6.
                let v6 = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                found.push(IpAddr::V6(Ipv6Addr::from(v6.sin6_addr.s6_addr)));
            }
            _ => {}
        }
    }
    // SAFETY: `list` came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_has_one_owner() {
        let (a, _a) = claim_slot().unwrap();
        let (b, _b) = claim_slot().unwrap();
        assert_ne!(a, b);
        assert!((1..MAX_SLOT).contains(&a) && (1..MAX_SLOT).contains(&b));
        let socket = seqpacket().unwrap();
        assert_eq!(
            rustix::net::bind(&socket, &slot_address(a).unwrap()),
            Err(Errno::ADDRINUSE)
        );
    }

    #[test]
    fn gids_are_addresses() {
        let gids = gids();
        assert!(!gids.is_empty());
        assert!(gids.iter().all(|gid| *gid != [0; 16]));
    }
}
