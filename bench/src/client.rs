//! The client's role: one synchronous client in a process of its own.

use std::net::SocketAddr;

use anyhow::{Context, Result, anyhow};
use kvstore::{Client, ClientConfig, Value, ValueBuffer};
use serde::{Deserialize, Serialize};

use crate::measure::{Budget, Operation, Slice, Store, batch, check_all, measure, put_all};
use crate::process::answer;
use crate::workload::{SIZES, Workload};

/// What the driver asks of a client.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Connects and answers with [`Answer::Done`].
    Connect(SocketAddr),
    /// Puts a value under every key of a size; [`Answer::Done`].
    PutAll {
        /// Bytes of a value.
        size: usize,
        /// Number of keys.
        keys: usize,
    },
    /// Gets and checks every value of a size; [`Answer::Done`].
    CheckAll {
        /// Bytes of a value.
        size: usize,
    },
    /// Warms up, then measures; [`Answer::Slice`].
    Measure {
        /// Bytes of a value.
        size: usize,
        /// What to do.
        operation: Operation,
        /// How long.
        budget: Budget,
    },
    /// [`Answer::Counters`].
    Counters,
}

/// What a client answers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Done, nothing to tell.
    Done,
    /// What was measured.
    Slice(Slice),
    /// Counts since the start.
    Counters(Counters),
}

/// What client and server have counted so far.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Memory registrations of the client.
    pub client_registrations: u64,
    /// Memory registrations of the server.
    pub server_registrations: u64,
    /// Gets that were a one-sided READ, without the server.
    pub one_sided_gets: u64,
}

/// A client of the store, and what it holds between the steps of a batch.
struct Remote {
    client: Client,
    buffers: Vec<Option<ValueBuffer>>,
    values: Vec<Option<Value>>,
}

impl Store for Remote {
    fn take(&mut self, slot: usize, size: usize) -> Result<()> {
        self.buffers[slot] = Some(self.client.buffer(size)?);
        Ok(())
    }

    fn taken(&mut self, slot: usize) -> Option<&mut [u8]> {
        self.buffers[slot].as_deref_mut()
    }

    fn put(&mut self, key: &[u8], _index: u32, slot: usize) -> Result<()> {
        let value = self.buffers[slot].as_mut().context("no memory was taken")?;
        Ok(self.client.put_buffer(key, value)?)
    }

    fn put_copied(&mut self, key: &[u8], _index: u32, value: &[u8]) -> Result<()> {
        Ok(self.client.put(key, value)?)
    }

    fn get(&mut self, key: &[u8], _index: u32, slot: usize) -> Result<()> {
        let value = self.client.get(key)?.context("the key has no value")?;
        self.values[slot] = Some(value);
        Ok(())
    }

    fn value(&self, slot: usize) -> Option<&[u8]> {
        self.values[slot].as_deref()
    }

    fn release(&mut self, slot: usize) {
        self.buffers[slot] = None;
        self.values[slot] = None;
    }
}

struct State {
    config: ClientConfig,
    remote: Option<Remote>,
    workloads: Vec<Workload>,
}

impl State {
    fn handle(&mut self, command: Command) -> Result<Answer> {
        if let Command::Connect(server) = command {
            let slots = SIZES.map(batch).into_iter().max().unwrap_or(1);
            self.remote = Some(Remote {
                client: Client::connect(server, &self.config)?,
                buffers: (0..slots).map(|_| None).collect(),
                values: (0..slots).map(|_| None).collect(),
            });
            return Ok(Answer::Done);
        }
        let remote = self.remote.as_mut().context("not connected")?;
        let workloads = &mut self.workloads;
        match command {
            Command::Connect(_) => Ok(Answer::Done),
            Command::PutAll { size, keys } => {
                let mut workload = Workload::new(size, keys);
                put_all(remote, &mut workload)?;
                workloads.retain(|other| other.size() != size);
                workloads.push(workload);
                Ok(Answer::Done)
            }
            Command::CheckAll { size } => {
                check_all(remote, find(workloads, size)?)?;
                Ok(Answer::Done)
            }
            Command::Measure {
                size,
                operation,
                budget,
            } => {
                let workload = find(workloads, size)?;
                Ok(Answer::Slice(measure(remote, workload, operation, budget)?))
            }
            Command::Counters => {
                let stats = remote.client.stats();
                Ok(Answer::Counters(Counters {
                    client_registrations: stats.registrations,
                    server_registrations: remote.client.server_statistics()?.registrations,
                    one_sided_gets: stats.one_sided_gets,
                }))
            }
        }
    }
}

fn find(workloads: &mut [Workload], size: usize) -> Result<&mut Workload> {
    workloads
        .iter_mut()
        .find(|workload| workload.size() == size)
        .ok_or_else(|| anyhow!("no values of {size} bytes were put"))
}

/// Does what standard input says until it ends.
///
/// # Errors
/// Standard input holds something else, or standard output is gone.
pub fn run(config: ClientConfig) -> Result<()> {
    let mut state = State {
        config,
        remote: None,
        workloads: Vec::new(),
    };
    answer(|command| state.handle(command))
}
