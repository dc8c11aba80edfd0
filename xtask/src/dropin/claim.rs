//! Ports that several runs at a time on one machine do not share.

use std::io;
use std::net::{Ipv4Addr, UdpSocket};
use std::thread;
use std::time::Instant;

use anyhow::{Result, ensure};

use super::process::SOON;

/// A port that is one case's as long as this lives: another run that wants it finds it taken. What is bound is the port
/// of UDP of this number, which no program of a case uses.
#[derive(Debug)]
pub struct Claim(UdpSocket);

impl Claim {
    /// Takes a port.
    pub fn of(port: u16) -> io::Result<Self> {
        UdpSocket::bind((Ipv4Addr::LOCALHOST, port)).map(Self)
    }

    /// Takes the only port that will do, once nobody else has it.
    pub fn wait_for(port: u16, deadline: Instant) -> Result<Self> {
        loop {
            if let Ok(claim) = Self::of(port) {
                return Ok(claim);
            }
            ensure!(Instant::now() < deadline, "port {port} is another run's");
            thread::sleep(SOON);
        }
    }

    /// Its number.
    pub fn port(&self) -> io::Result<u16> {
        self.0.local_addr().map(|address| address.port())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_is_taken_until_its_case_has_ended() {
        let claim = Claim::of(0).unwrap();
        let port = claim.port().unwrap();
        assert!(Claim::of(port).is_err());
        assert!(Claim::wait_for(port, Instant::now()).is_err());
        drop(claim);
        let next = Claim::wait_for(port, Instant::now()).unwrap();
        assert_eq!(next.port().unwrap(), port);
    }
}
