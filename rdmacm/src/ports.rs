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
    used: HashMap<(rdma_port_space, u16), Vec<(IpAddr, Key)>>,
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
    /// Takes an address for an identifier, and its name on this host: where the port is 0, a free one.
    ///
    /// # Errors
    ///
    /// `EADDRINUSE`; `EADDRNOTAVAIL` if all ports are taken.
    pub fn claim(
        &mut self,
        space: rdma_port_space,
        address: SocketAddr,
        key: Key,
    ) -> Result<(SocketAddr, Mine), Errno> {
        if address.port() != 0 {
            let socket = self.bind(space, address)?;
            self.note(space, address, key);
            return Ok((address, socket));
        }
        for port in ephemeral() {
            let mut address = address;
            address.set_port(port);
            match self.bind(space, address) {
                Ok(socket) => {
                    self.note(space, address, key);
                    return Ok((address, socket));
                }
                Err(Errno::ADDRINUSE) => {}
                Err(error) => return Err(error),
            }
        }
        Err(Errno::ADDRNOTAVAIL)
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
        self.note(space, address, key);
        Ok(address)
    }

    /// Gives an identifier's port back.
    pub fn release(&mut self, space: rdma_port_space, port: u16, key: Key) {
        if let Some(owners) = self.used.get_mut(&(space, port)) {
            owners.retain(|(_, owner)| *owner != key);
            if owners.is_empty() {
                self.used.remove(&(space, port));
            }
        }
    }

    fn note(&mut self, space: rdma_port_space, address: SocketAddr, key: Key) {
        let owners = self.used.entry((space, address.port())).or_default();
        owners.push((address.ip().to_canonical(), key));
    }

    fn bind(&self, space: rdma_port_space, address: SocketAddr) -> Result<Mine, Errno> {
        let ip = address.ip().to_canonical();
        let owners = self.used.get(&(space, address.port()));
        let in_the_way = |other: &IpAddr| {
            *other == ip
                || (other.is_ipv4() == ip.is_ipv4()
                    && (other.is_unspecified() || ip.is_unspecified()))
        };
        if owners.is_some_and(|owners| owners.iter().any(|(other, _)| in_the_way(other))) {
            return Err(Errno::ADDRINUSE);
        }
        let socket = socket()?;
        rustix::net::bind(&socket, &name(space, address)?)?;
        Ok(socket)
    }
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
        let (first, _socket) = ports.claim(RDMA_PS_TCP, address("127.0.0.1:0"), 1).unwrap();
        assert_ne!(first.port(), 0);
        let all = SocketAddr::new(address("0.0.0.0:0").ip(), first.port());
        for taken in [first, all] {
            let again = ports.claim(RDMA_PS_TCP, taken, 2).map(|(at, _)| at);
            assert_eq!(again, Err(Errno::ADDRINUSE), "{taken}");
        }
        // Another process sees the name.
        let again = Ports::default()
            .claim(RDMA_PS_TCP, first, 2)
            .map(|(at, _)| at);
        assert_eq!(again, Err(Errno::ADDRINUSE));
        // Other port spaces and other addresses are apart.
        assert!(ports.claim(RDMA_PS_UDP, first, 3).is_ok());
        let other = SocketAddr::new(address("127.0.0.2:0").ip(), first.port());
        assert!(ports.claim(RDMA_PS_TCP, other, 4).is_ok());
    }

    #[test]
    fn a_port_can_be_had_again() {
        let mut ports = Ports::default();
        let (at, socket) = ports.claim(RDMA_PS_TCP, address("127.0.0.1:0"), 1).unwrap();
        ports.release(RDMA_PS_TCP, at.port(), 1);
        drop(socket);
        assert_eq!(ports.claim(RDMA_PS_TCP, at, 2).map(|(at, _)| at), Ok(at));
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
