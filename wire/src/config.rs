//! What an endpoint is set up with.

use std::time::Duration;

use crate::greeting::{MAX_DEPTH, MAX_MESSAGE_SIZE, MIN_DEPTH, MIN_MESSAGE_SIZE};

/// Settings of an [`Endpoint`](crate::Endpoint). Where the two sides of a connection differ, the
/// smaller value holds.
///
/// ```
/// let config = wire::Config { recv_depth: 64, message_size: 8192, ..wire::Config::default() };
/// assert!(config.validate().is_ok());
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Receives kept posted per connection: as many messages can be on their way to this side. 4
    /// to 32,768.
    pub recv_depth: u32,
    /// Work requests per connection that can be on their way at once: messages, READs and WRITEs
    /// together.
    pub send_depth: u32,
    /// Longest frame that this side receives, in bytes, and the size of its receive buffers. 64 to
    /// 2³⁰.
    pub message_size: u32,
    /// Messages per connection that wait inside the endpoint for credits or room in the send
    /// queue; one more is [`SendErrorKind::WouldBlock`](crate::SendErrorKind::WouldBlock).
    pub queue_limit: usize,
    /// Connections that the endpoint takes; one more is refused. The completion queue is made for
    /// as many.
    pub max_connections: u32,
    /// READs that each side may have in flight per connection, as far as the devices can.
    pub max_rd_atomic: u8,
    /// Port of the device, from 1.
    pub port: u8,
    /// Index of the GID to use; `None` takes the environment's `VERBS_GID_INDEX`, else the first
    /// IPv4-mapped GID, else the first that is not zero.
    pub gid_index: Option<u8>,
    /// Whether peers may WRITE to memory that is registered for it. They may always READ what is
    /// registered for that.
    pub allow_remote_write: bool,
    /// Messages of up to this many bytes are copied into the work request instead of being read
    /// from their buffer; 0 for none. Reduced to what the device can.
    pub max_inline: u32,
    /// How long a peer may take for the whole greeting, from the TCP connection on.
    pub greeting_timeout: Duration,
    /// What is spoken over the connection, by the caller's numbering: sides that differ refuse
    /// each other.
    pub application: u32,
    /// Which version of it is spoken: sides that differ refuse each other.
    pub application_version: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            recv_depth: 32,
            send_depth: 64,
            message_size: 4096,
            queue_limit: 64,
            max_connections: 64,
            max_rd_atomic: 16,
            port: 1,
            gid_index: None,
            allow_remote_write: false,
            max_inline: 0,
            greeting_timeout: Duration::from_secs(5),
            application: 0,
            application_version: 0,
        }
    }
}

/// A setting with a value that it cannot have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("config: {field} is {value}, must be {range}")]
#[non_exhaustive]
pub struct ConfigError {
    /// The setting.
    pub field: &'static str,
    /// Its value.
    pub value: u64,
    /// The values it can have.
    pub range: &'static str,
}

impl Config {
    /// Checks that every setting is within its range.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] names the first that is not.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let check = |ok: bool, field, value: u64, range| {
            if ok {
                Ok(())
            } else {
                Err(ConfigError {
                    field,
                    value,
                    range,
                })
            }
        };
        check(
            (MIN_DEPTH..=MAX_DEPTH).contains(&self.recv_depth),
            "recv_depth",
            self.recv_depth.into(),
            "4 to 32768",
        )?;
        check(
            (2..=MAX_DEPTH).contains(&self.send_depth),
            "send_depth",
            self.send_depth.into(),
            "2 to 32768",
        )?;
        check(
            (MIN_MESSAGE_SIZE..=MAX_MESSAGE_SIZE).contains(&self.message_size),
            "message_size",
            self.message_size.into(),
            "64 to 1073741824",
        )?;
        check(
            (1..=1 << 16).contains(&self.max_connections),
            "max_connections",
            self.max_connections.into(),
            "1 to 65536",
        )?;
        check(
            self.queue_limit <= 1 << 20,
            "queue_limit",
            self.queue_limit as u64,
            "at most 1048576",
        )?;
        check(
            self.max_rd_atomic >= 1,
            "max_rd_atomic",
            self.max_rd_atomic.into(),
            "at least 1",
        )?;
        check(self.port >= 1, "port", self.port.into(), "at least 1")?;
        check(
            !self.greeting_timeout.is_zero(),
            "greeting_timeout",
            0,
            "more than zero",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Puts a value into a setting that it cannot have.
    type Damage = fn(&mut Config);

    #[test]
    fn defaults_are_valid_and_each_bad_value_is_named() {
        Config::default().validate().unwrap();
        let cases: [(&str, Damage); 8] = [
            ("recv_depth", |config| config.recv_depth = 3),
            ("recv_depth", |config| config.recv_depth = 1 << 16),
            ("send_depth", |config| config.send_depth = 1),
            ("message_size", |config| config.message_size = 63),
            ("max_connections", |config| config.max_connections = 0),
            ("max_rd_atomic", |config| config.max_rd_atomic = 0),
            ("port", |config| config.port = 0),
            ("greeting_timeout", |config| {
                config.greeting_timeout = Duration::ZERO
            }),
        ];
        for (name, damage) in cases {
            let mut config = Config::default();
            damage(&mut config);
            assert_eq!(config.validate().unwrap_err().field, name);
        }
    }
}
