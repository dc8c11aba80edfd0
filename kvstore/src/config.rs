//! How a server and a client are set up.

use std::time::Duration;

/// How a thread waits for the next completion.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Wait {
    /// Spins on the completion queue: the shortest latency, at the price of a whole core.
    Poll,
    /// Sleeps on the completion channel (`ibv_get_cq_event(3)`): no CPU while nothing happens, and a wake-up of some
    /// microseconds when something does.
    #[default]
    Event,
}

/// What a [`Server`](crate::Server) is set up with. Fields may be added: start from `default()`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ServerConfig {
    /// Name of the device; `None`: the environment's `VERBS_DEVICE`, else the first active real device, else `soft0`.
    pub device: Option<String>,
    /// How the workers wait. Default: [`Wait::Event`].
    pub wait: Wait,
    /// Ceiling on the memory registered for values, in bytes. Default: 4 GiB. Memory is registered as it is needed and
    /// kept while the server lives.
    pub memory: u64,
    /// Threads that serve requests (at least 1); a client stays with the one it was given. Default: 1.
    pub workers: usize,
}

impl Default for ServerConfig {
    fn default() -> Self {
        Self {
            device: None,
            wait: Wait::default(),
            memory: 4 << 30,
            workers: 1,
        }
    }
}

/// Where the memory of a client's values comes from.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub enum Memory {
    /// Registered once and handed out again and again.
    #[default]
    Pooled,
    /// Allocated, registered, used, deregistered and freed by every operation. Only good for measuring what that costs.
    PerOperation,
}

/// What a [`Client`](crate::Client) is set up with. Fields may be added: start from `default()`.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ClientConfig {
    /// Name of the device; `None`: the environment's `VERBS_DEVICE`, else the first active real device, else `soft0`.
    pub device: Option<String>,
    /// How an operation waits for its reply. Default: [`Wait::Event`].
    pub wait: Wait,
    /// Where buffers for values come from. Default: [`Memory::Pooled`].
    pub memory: Memory,
    /// Ceiling on the memory registered for values, in bytes. Default: 1 GiB.
    pub ceiling: u64,
    /// Longest that one operation may take, and connecting. Default: 10 s. An operation that runs into it closes the
    /// connection, since it may or may not have been carried out.
    pub timeout: Duration,
    /// Values of at most so many bytes travel in the request of a put; longer ones are written to the server's memory.
    /// Default: 512; more than [`INLINE_VALUE`] is cut to it.
    pub inline_value: usize,
    /// Locations remembered for one-sided gets. Default: 1,048,576.
    pub locations: usize,
}

/// The longest value, in bytes, that travels in a message.
pub const INLINE_VALUE: usize = 4096;

/// The longest value, in bytes, that a put sends in its request unless told otherwise: a longer one costs more to copy
/// through the message than to WRITE to a block that came with an earlier reply.
const INLINE_PUT: usize = 512;

impl Default for ClientConfig {
    fn default() -> Self {
        Self {
            device: None,
            wait: Wait::default(),
            memory: Memory::default(),
            ceiling: 1 << 30,
            timeout: Duration::from_secs(10),
            inline_value: INLINE_PUT,
            locations: 1 << 20,
        }
    }
}
