//! Port numbers: which are taken, by whom, and a free one for who does not care.
//!
//! An abstract socket's name stands for an address and port of a port space, so that no two processes of
//! a host have the same, and the kernel gives it back when its owner dies. What is here sees more, but
//! only in this process: that an address is in use if all addresses are, and the other way round.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::abi::{RDMA_PS_IB, RDMA_PS_IPOIB, RDMA_PS_TCP, RDMA_PS_UDP, rdma_port_space};
use crate::fork::Mine;
use crate::shared::{Key, random};

/// Ports for those who do not care, as the kernel has them.
const EPHEMERAL: std::ops::Range<u16> = 32_768..60_999;

/// Ports in use in this process.
#[derive(Debug, Default)]
pub struct Ports {
    used: HashMap<(rdma_port_space, u16), Vec<Owner>>,
}

/// An identifier that has a port.
#[derive(Clone, Copy, Debug)]
struct Owner {
    ip: IpAddr,
    key: Key,
    /// Whether others that say so, too, may have the same; `RDMA_OPTION_ID_REUSEADDR`.
    shares: bool,
}

impl Owner {
    /// Whether it stands for some address that another does.
    fn overlaps(&self, ip: IpAddr) -> bool {
        self.ip == ip
            || (self.ip.is_ipv4() == ip.is_ipv4()
                && (self.ip.is_unspecified() || ip.is_unspecified()))
    }
}

/// The abstract name that stands for an address.
///
/// # Errors
///
/// `EINVAL` for an unknown port space.
pub fn name(space: rdma_port_space, address: SocketAddr) -> Result<SocketAddrUnix, Errno> {
    let space = match space {
        RDMA_PS_TCP => "tcp",
        RDMA_PS_UDP => "udp",
        RDMA_PS_IB => "ib",
        RDMA_PS_IPOIB => "ipoib",
        _ => return Err(Errno::INVAL),
    };
    let (ip, port) = (address.ip().to_canonical(), address.port());
    SocketAddrUnix::new_abstract_name(format!("verbs-rdmacm/{space}/{ip}/{port}").as_bytes())
}

/// A socket for messages of this host.
///
/// # Errors
///
/// `EMFILE`, `ENFILE`: there are too many files.
pub fn socket() -> Result<Mine, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    Ok(Mine::new(socket))
}

impl Ports {
    /// Takes an address for an identifier, and its name on this host: where the port is 0, a free one. The name is another's
    /// where both share the address.
    ///
    /// # Errors
    ///
    /// `EADDRINUSE`; `EADDRNOTAVAIL` if all ports are taken, or either address stands for all.
    pub fn claim(
        &mut self,
        space: rdma_port_space,
        address: SocketAddr,
        key: Key,
        shares: bool,
    ) -> Result<(SocketAddr, Option<Mine>), Errno> {
        if address.port() != 0 {
            let socket = self.bind(space, address, key, shares)?;
            self.note(space, address, key, shares);
            return Ok((address, socket));
        }
        for port in ephemeral() {
            let mut address = address;
            address.set_port(port);
            match self.bind(space, address, key, false) {
                Ok(socket) => {
                    self.note(space, address, key, shares);
                    return Ok((address, socket));
                }
                Err(Errno::ADDRINUSE | Errno::ADDRNOTAVAIL) => {}
                Err(error) => return Err(error),
            }
        }
        Err(Errno::ADDRNOTAVAIL)
    }

    /// Takes an address that was claimed for its owner alone, who is going to listen; and the name, unless it has that.
    ///
    /// # Errors
    ///
    /// `EADDRINUSE`: it is shared.
    pub fn own(
        &mut self,
        space: rdma_port_space,
        address: SocketAddr,
        key: Key,
        name: Option<Mine>,
    ) -> Result<Mine, (Errno, Option<Mine>)> {
        if let Err(error) = self.check(space, address, key, false) {
            return Err((error, name));
        }
        let name = match name {
            Some(name) => name,
            None => bind_name(space, address).map_err(|error| (error, None))?,
        };
        let owners = self.used.get_mut(&(space, address.port()));
        for owner in owners
            .into_iter()
            .flatten()
            .filter(|owner| owner.key == key)
        {
            owner.shares = false;
        }
        Ok(name)
    }

    /// Takes a port for one who never listens: no other process need know of it.
    ///
    /// # Errors
    ///
    /// `EADDRNOTAVAIL` if all ports are taken.
    pub fn borrow(
        &mut self,
        space: rdma_port_space,
        mut address: SocketAddr,
        key: Key,
    ) -> Result<SocketAddr, Errno> {
        let free = ephemeral().find(|port| !self.used.contains_key(&(space, *port)));
        address.set_port(free.ok_or(Errno::ADDRNOTAVAIL)?);
        self.note(space, address, key, false);
        Ok(address)
    }

    /// Gives an identifier's port back.
    pub fn release(&mut self, space: rdma_port_space, port: u16, key: Key) {
        if let Some(owners) = self.used.get_mut(&(space, port)) {
            owners.retain(|owner| owner.key != key);
            if owners.is_empty() {
                self.used.remove(&(space, port));
            }
        }
    }

    fn note(&mut self, space: rdma_port_space, address: SocketAddr, key: Key, shares: bool) {
        let owners = self.used.entry((space, address.port())).or_default();
        let ip = address.ip().to_canonical();
        owners.push(Owner { ip, key, shares });
    }

    /// Whether others have an address, with whom an identifier may share it.
    ///
    /// # Errors
    ///
    /// `EADDRINUSE` or `EADDRNOTAVAIL`: it may not.
    fn check(
        &self,
        space: rdma_port_space,
        address: SocketAddr,
        key: Key,
        shares: bool,
    ) -> Result<bool, Errno> {
        let ip = address.ip().to_canonical();
        let owners = self.used.get(&(space, address.port()));
        let others = owners.into_iter().flatten();
        let mut others = others.filter(|owner| owner.key != key && owner.overlaps(ip));
        let Some(first) = others.next() else {
            return Ok(false);
        };
        if shares && first.shares && others.all(|owner| owner.shares) {
            Ok(true)
        } else {
            Err(taken(ip, first.ip))
        }
    }

    fn bind(
        &self,
        space: rdma_port_space,
        address: SocketAddr,
        key: Key,
        shares: bool,
    ) -> Result<Option<Mine>, Errno> {
        let is_shared = self.check(space, address, key, shares)?;
        match bind_name(space, address) {
            Err(Errno::ADDRINUSE) if is_shared => Ok(None),
            Err(Errno::ADDRINUSE) => Err(taken(address.ip(), address.ip())),
            other => other.map(Some),
        }
    }
}

/// What the kernel's rdma_cm says of an address that another one is in the way of: all addresses are not available, a
/// single one is in use.
fn taken(wanted: IpAddr, there: IpAddr) -> Errno {
    if wanted.is_unspecified() || there.is_unspecified() {
        Errno::ADDRNOTAVAIL
    } else {
        Errno::ADDRINUSE
    }
}

fn bind_name(space: rdma_port_space, address: SocketAddr) -> Result<Mine, Errno> {
    let socket = socket()?;
    rustix::net::bind(&socket, &name(space, address)?)?;
    Ok(socket)
}

/// All ephemeral ports, from a random one on.
fn ephemeral() -> impl Iterator<Item = u16> {
    let count = EPHEMERAL.len() as u64;
    let start = random();
    (0..count).map(move |step| EPHEMERAL.start + (start.wrapping_add(step) % count) as u16)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    fn an_address_has_one_owner() {
        let mut ports = Ports::default();
        let (first, _socket) = ports
            .claim(RDMA_PS_TCP, address("127.0.0.1:0"), 1, false)
            .unwrap();
        assert_ne!(first.port(), 0);
        let all = SocketAddr::new(address("0.0.0.0:0").ip(), first.port());
        for (taken, error) in [(first, Errno::ADDRINUSE), (all, Errno::ADDRNOTAVAIL)] {
            let again = ports.claim(RDMA_PS_TCP, taken, 2, true).map(|(at, _)| at);
            assert_eq!(again, Err(error), "{taken}");
        }
        // Another process sees the name.
        let again = Ports::default()
            .claim(RDMA_PS_TCP, first, 2, true)
            .map(|(at, _)| at);
        assert_eq!(again, Err(Errno::ADDRINUSE));
        let everywhere = address("0.0.0.0:0");
        let (all, _all) = ports.claim(RDMA_PS_TCP, everywhere, 5, false).unwrap();
        let again = Ports::default()
            .claim(RDMA_PS_TCP, all, 6, false)
            .map(|(at, _)| at);
        assert_eq!(again, Err(Errno::ADDRNOTAVAIL));
        // Other port spaces and other addresses are apart.
        assert!(ports.claim(RDMA_PS_UDP, first, 3, false).is_ok());
        let other = SocketAddr::new(address("127.0.0.2:0").ip(), first.port());
        assert!(ports.claim(RDMA_PS_TCP, other, 4, false).is_ok());
    }

    #[test]
    fn a_port_can_be_had_again() {
        let mut ports = Ports::default();
        let (at, socket) = ports
            .claim(RDMA_PS_TCP, address("127.0.0.1:0"), 1, false)
            .unwrap();
        ports.release(RDMA_PS_TCP, at.port(), 1);
        drop(socket);
        let again = ports.claim(RDMA_PS_TCP, at, 2, false);
        assert_eq!(again.map(|(at, _)| at), Ok(at));
    }

    #[test]
    fn those_who_do_not_listen_can_share() {
        let mut ports = Ports::default();
        let any = address("127.0.0.1:0");
        let (at, first) = ports.claim(RDMA_PS_TCP, any, 1, true).unwrap();
        let alone = ports.claim(RDMA_PS_TCP, at, 2, false);
        assert_eq!(alone.map(|(at, _)| at), Err(Errno::ADDRINUSE));
        let (_, second) = ports.claim(RDMA_PS_TCP, at, 3, true).unwrap();
        assert!(first.is_some() && second.is_none());
        // Neither can listen as long as the other is there.
        let refused = ports.own(RDMA_PS_TCP, at, 3, second);
        assert!(matches!(refused, Err((Errno::ADDRINUSE, None))));
        let refused = ports.own(RDMA_PS_TCP, at, 1, first);
        let Err((Errno::ADDRINUSE, first)) = refused else {
            panic!("it is shared");
        };
        drop(first);
        ports.release(RDMA_PS_TCP, at.port(), 1);
        let name = ports.own(RDMA_PS_TCP, at, 3, None).unwrap();
        // And nobody shares with who listens.
        let late = ports.claim(RDMA_PS_TCP, at, 4, true);
        assert_eq!(late.map(|(at, _)| at), Err(Errno::ADDRINUSE));
        drop(name);
    }

    #[test]
    fn borrowed_ports_differ() {
        let mut ports = Ports::default();
        let any = address("127.0.0.1:0");
        let mut seen: Vec<u16> = (0..1000)
            .map(|key| ports.borrow(RDMA_PS_TCP, any, key).unwrap().port())
            .collect();
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), 1000);
        assert_eq!(
            ports
                .borrow(RDMA_PS_TCP, any, 0)
                .map(|at| seen.contains(&at.port())),
            Ok(false)
        );
    }
}
