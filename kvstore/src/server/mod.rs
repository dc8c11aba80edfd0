//! The server: listens, takes connections and serves requests.
//!
//! One thread greets clients and hands each to a worker; a worker is a thread with an endpoint of its own. The
//! [`store`] is shared by all workers and does no I/O; [`request`] decides what is believed of a message.

pub mod index;
pub(crate) mod request;
mod store;
mod worker;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use mr_pool::Pool;
use wire::{AcceptError, Acceptor, Endpoint, Listener, Stopper};

use crate::config::{ServerConfig, Wait};
use crate::device::{self, Source};
use crate::error::ServeError;
use crate::protocol::Statistics;
use store::Store;
use worker::Worker;

/// Longest that a client may take to introduce itself.
const GREETING: Duration = Duration::from_secs(5);

/// A store that listens for clients.
pub struct Server {
    listener: Listener,
    workers: Vec<Endpoint>,
    wait: Wait,
    shared: Arc<Shared>,
    shutdown: Shutdown,
}

/// What the threads of a server share.
struct Shared {
    store: Store,
    messages: Pool,
    acceptors: Vec<Acceptor>,
    stopping: AtomicBool,
}

impl Shared {
    fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn statistics(&self) -> Statistics {
        let values = self.store.statistics();
        let messages = self.messages.stats();
        Statistics {
            registered_bytes: values.registered_bytes + messages.registered_bytes as u64,
            registrations: values.registrations + messages.registrations,
            connections: self
                .acceptors
                .iter()
                .map(|acceptor| u64::from(acceptor.connections()))
                .sum(),
            ..values
        }
    }
}

/// Stops a running [`Server`] from another thread. Cheap to clone.
#[derive(Clone)]
pub struct Shutdown {
    stopper: Stopper,
    shared: Arc<Shared>,
}

impl Shutdown {
    /// Makes [`Server::run`] return: no new client is taken, and requests that are not answered yet never will be.
    pub fn shutdown(&self) {
        self.shared.stopping.store(true, Ordering::Release);
        self.stopper.stop();
        for acceptor in &self.shared.acceptors {
            acceptor.waker().wake();
        }
    }

    /// What the server counts.
    pub fn statistics(&self) -> Statistics {
        self.shared.statistics()
    }
}

impl Server {
    /// Opens the device and listens on `address` (port 0: any free one).
    ///
    /// # Errors
    /// [`ServeError`] when the device or the address cannot be had.
    pub fn bind(address: SocketAddr, config: &ServerConfig) -> Result<Self, ServeError> {
        let (shared, workers) = set_up(config).map_err(|source| ServeError::Device { source })?;
        let listener = Listener::bind(address, shared.acceptors.clone())?;
        let shared = Arc::new(shared);
        let shutdown = Shutdown {
            stopper: listener.stopper(),
            shared: shared.clone(),
        };
        Ok(Self {
            listener,
            workers,
            wait: config.wait,
            shared,
            shutdown,
        })
    }

    /// The address clients connect to.
    pub fn local_addr(&self) -> SocketAddr {
        self.listener.local_addr()
    }

    /// A handle that stops the server.
    pub fn shutdown_handle(&self) -> Shutdown {
        self.shutdown.clone()
    }

    /// Serves until shut down. The calling thread greets the clients; each worker is a thread of its own.
    ///
    /// # Errors
    /// [`ServeError`] when a thread cannot be started, or the listening socket or a device fails.
    pub fn run(mut self) -> Result<(), ServeError> {
        let mut threads = Vec::new();
        let mut outcome = Ok(());
        for (number, endpoint) in self.workers.into_iter().enumerate() {
            let worker = Worker::new(endpoint, self.shared.clone(), self.wait);
            match start(number, worker, self.shutdown.clone()) {
                Ok(thread) => threads.push(thread),
                Err(source) => {
                    outcome = Err(ServeError::Thread(source));
                    break;
                }
            }
        }
        if outcome.is_ok() {
            outcome = accept(&mut self.listener);
        }
        // Whatever ended one thread ends them all.
        self.shutdown.shutdown();
        for thread in threads {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err("a worker panicked".into()));
            outcome = outcome.and(ended.map_err(|source| ServeError::Worker { source }));
        }
        outcome
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Server")
            .field("local_addr", &self.local_addr())
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shutdown").finish_non_exhaustive()
    }
}

fn set_up(config: &ServerConfig) -> Result<(Shared, Vec<Endpoint>), Source> {
    let pd = device::open(config.device.as_deref())?;
    let ceiling = usize::try_from(config.memory).unwrap_or(usize::MAX);
    let values = device::blocks(&pd)
        .ceiling(ceiling)
        // What a client may have a location of stays registered.
        .high_water(usize::MAX)
        .build()?;
    let messages = device::messages(&pd)?;
    let clients = device::most_connections(&pd)?;
    let workers = (0..config.workers.max(1))
        .map(|_| Endpoint::new(&pd, &messages, device::wire_config(clients, GREETING, true)))
        .collect::<Result<Vec<_>, _>>()?;
    tracing::info!(
        device = pd.context().device_name(),
        workers = workers.len(),
        clients_per_worker = clients,
        memory = config.memory,
        "set up"
    );
    let shared = Shared {
        store: Store::new(values),
        messages,
        acceptors: workers.iter().map(Endpoint::acceptor).collect(),
        stopping: AtomicBool::new(false),
    };
    Ok((shared, workers))
}

fn start(
    number: usize,
    worker: Worker,
    shutdown: Shutdown,
) -> io::Result<JoinHandle<Result<(), Source>>> {
    /// Ends the whole server with the thread, even if that panics.
    struct EndsAll(Shutdown);
    impl Drop for EndsAll {
        fn drop(&mut self) {
            self.0.shutdown();
        }
    }
    thread::Builder::new()
        .name(format!("worker {number}"))
        .spawn(move || {
            let _ends_all = EndsAll(shutdown);
            worker.run()
        })
}

fn accept(listener: &mut Listener) -> Result<(), ServeError> {
    loop {
        match listener.accept() {
            Ok(established) => {
                let peer = established.peer_addr();
                if let Err(error) = established.hand_over() {
                    tracing::warn!(%peer, %error, "client lost");
                }
            }
            Err(AcceptError::Stopped) => return Ok(()),
            Err(AcceptError::Greeting(error)) => tracing::warn!(%error, "client refused"),
            Err(error) => return Err(ServeError::Accept(error)),
        }
    }
}
