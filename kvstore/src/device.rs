//! What server and client set up alike: the device, its memory, and how the two talk.

use std::time::Duration;

use mr_pool::{Pool, PoolBuilder, Shared};
use verbs_sys::{AccessFlags, ProtectionDomain, find_device};

use crate::config::INLINE_VALUE;
use crate::limits::KEY_LENGTHS;
use crate::protocol;
use crate::segments;

/// Whatever a lower layer reported.
pub type Source = Box<dyn std::error::Error + Send + Sync>;

/// Names this store's protocol in the greeting: `kvst`, read as a little-endian integer.
const APPLICATION: u32 = u32::from_le_bytes(*b"kvst");

/// Room for the longest message: a key and a value that travels with it, and what describes them.
pub const MESSAGE: usize = 512 + *KEY_LENGTHS.end() + INLINE_VALUE;

/// Messages that may be on their way to one side. A client waits for each reply, so this is ample.
const DEPTH: u32 = 8;

/// Opens the device of that name (or the default one) and gives it a protection domain.
pub fn open(name: Option<&str>) -> Result<ProtectionDomain, Source> {
    let device = find_device(name)?;
    let context = device.open()?;
    Ok(context.alloc_pd()?)
}

/// A client's pool for values: nobody else reaches it.
pub fn values(pd: &ProtectionDomain) -> PoolBuilder {
    Pool::builder(pd).access(AccessFlags::LOCAL_WRITE)
}

/// A server's pool for blocks: clients READ them, and WRITE those they have reserved.
pub fn blocks(pd: &ProtectionDomain) -> PoolBuilder<Shared> {
    Pool::builder(pd)
        .shared()
        .access(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE)
}

/// The pool of messages: nobody else reaches it.
pub fn messages(pd: &ProtectionDomain) -> Result<Pool, Source> {
    Ok(Pool::builder(pd).access(AccessFlags::LOCAL_WRITE).build()?)
}

/// Most connections of one endpoint: as many as its completion queue can have room for, within reason.
pub fn most_connections(pd: &ProtectionDomain) -> Result<u32, Source> {
    /// What wire adds for itself, and then some.
    const EXTRA: u32 = 8;
    let config = wire_config(1, Duration::MAX, false);
    let entries = u32::try_from(pd.context().query_device()?.max_cqe)?;
    let connections = entries / (config.send_depth + config.recv_depth + EXTRA);
    Ok(connections.clamp(1, 1024))
}

/// How connections are made. `allow_remote_write`: the other side may WRITE memory of ours.
pub fn wire_config(
    max_connections: u32,
    greeting_timeout: Duration,
    allow_remote_write: bool,
) -> wire::Config {
    wire::Config {
        recv_depth: DEPTH,
        // A whole value and its header, and the messages beside them.
        send_depth: segments::MOST as u32 + 2 * DEPTH,
        message_size: MESSAGE as u32,
        queue_limit: DEPTH as usize,
        max_connections,
        greeting_timeout,
        allow_remote_write,
        application: APPLICATION,
        application_version: protocol::VERSION,
        ..wire::Config::default()
    }
}
