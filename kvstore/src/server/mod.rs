//! The server: listens, takes connections and serves requests.

pub mod index;

use std::net::SocketAddr;

use crate::config::ServerConfig;
use crate::error::ServeError;
use crate::protocol::Statistics;

/// A store that listens for clients.
#[derive(Debug)]
pub struct Server {
    address: SocketAddr,
}

/// Stops a running [`Server`] from any thread or signal handler thread.
#[derive(Clone, Debug)]
pub struct Shutdown {}

impl Shutdown {
    /// Makes [`Server::run`] return after the requests in progress.
    pub fn shutdown(&self) {}
}

impl Server {
    /// Opens the device and listens on `address` (port 0: any free one).
    ///
    /// # Errors
    /// [`ServeError`] when the device or the address cannot be had.
    pub fn bind(address: SocketAddr, _config: &ServerConfig) -> Result<Self, ServeError> {
        Ok(Self { address })
    }

    /// The address clients connect to.
    pub fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// A handle that stops the server.
    pub fn shutdown_handle(&self) -> Shutdown {
        Shutdown {}
    }

    /// What the server counts.
    pub fn statistics(&self) -> Statistics {
        Statistics::default()
    }

    /// Serves until shut down.
    ///
    /// # Errors
    /// [`ServeError`] when a thread cannot be started or the device fails.
    pub fn run(self) -> Result<(), ServeError> {
        Ok(())
    }
}
