//! A server and its client: two processes that are measured together.

use anyhow::{Result, bail};

use crate::client::{self, Counters};
use crate::machine::Processors;
use crate::measure::{Budget, Operation, Slice};
use crate::process::Worker;
use crate::report::{Measured, Mode, Variant, Wait};
use crate::run::{Extent, Options};
use crate::server;
use crate::workload::Workload;

/// The environment variable that makes the software device charge for registrations.
const REGISTRATION_COST: &str = "VERBS_SOFT_REGISTRATION_COST";

/// The environment variable that fixes the size from which glibc takes an allocation from the
/// system and gives it back when it is freed, as its default is at the start. Left alone, glibc
/// raises it with the first large buffer freed, and hands the same warm pages out again: the
/// buffers of register-per-op would not be fresh.
const MMAP_THRESHOLD: &str = "MALLOC_MMAP_THRESHOLD_";

/// A server and its client, each a process.
pub(crate) struct Pair {
    pub(crate) variant: Variant,
    server: Worker,
    client: Worker,
}

impl Pair {
    /// Starts both and connects them.
    pub(crate) fn start(
        variant: Variant,
        options: &Options,
        processors: Option<Processors>,
    ) -> Result<Self> {
        let pooled = variant.mode == Mode::Pooled;
        let modelled = variant.mode == Mode::RegisterPerOpModelled;
        let environment = [
            (REGISTRATION_COST, modelled.then_some("published")),
            (MMAP_THRESHOLD, (!pooled).then_some("131072")),
        ];
        let memory = if pooled { "pooled" } else { "per-operation" };
        let start = |role: &str, wait: Wait, processor| {
            let name = format!("{role} ({}, {})", variant.mode.name(), variant.wait.name());
            let mut arguments = role_arguments(role, options, processor);
            arguments.extend(["--wait", wait.name(), "--memory", memory].map(str::to_owned));
            Worker::start(&options.program, &name, arguments, &environment)
        };
        let server_processor = processors.map(|both| both.server);
        let mut server = start("server", variant.wait, server_processor)?;
        let client_processor = processors.map(|both| both.client);
        let mut client = start("client", variant.client_wait, client_processor)?;
        let server::Answer::Address(address) = server.ask(&server::Command::Address)? else {
            bail!("the server gave no address");
        };
        let _: client::Answer = client.ask(&client::Command::Connect(address))?;
        Ok(Self {
            variant,
            server,
            client,
        })
    }

    /// Puts a first value under every key.
    pub(crate) fn put_all(&mut self, workload: &Workload) -> Result<()> {
        let command = client::Command::PutAll {
            size: workload.size(),
            keys: workload.len(),
        };
        self.active(|pair| pair.client.ask(&command))
            .map(|_: client::Answer| ())
    }

    /// Gets and checks every value of a size.
    pub(crate) fn check_all(&mut self, size: usize) -> Result<()> {
        let command = client::Command::CheckAll { size };
        self.active(|pair| pair.client.ask(&command))
            .map(|_: client::Answer| ())
    }

    /// Measures one operation, after a warm-up.
    pub(crate) fn measure(
        &mut self,
        size: usize,
        operation: Operation,
        extent: &Extent,
    ) -> Result<Measured> {
        self.active(|pair| {
            pair.slice(size, operation, extent.warm_up)?;
            let (counters, cpu) = (pair.counters()?, pair.server_cpu()?);
            let slice = pair.slice(size, operation, extent.budget)?;
            let server_cpu_s = pair.server_cpu()? - cpu;
            let after = pair.counters()?;
            Ok(Measured {
                slice,
                server_cpu_s,
                registrations: after.client_registrations + after.server_registrations
                    - counters.client_registrations
                    - counters.server_registrations,
                one_sided: Some(after.one_sided_gets - counters.one_sided_gets),
            })
        })
    }

    fn slice(&mut self, size: usize, operation: Operation, budget: Budget) -> Result<Slice> {
        match self.client.ask(&client::Command::Measure {
            size,
            operation,
            budget,
        })? {
            client::Answer::Slice(slice) => Ok(slice),
            other => bail!("the client answered {other:?}"),
        }
    }

    fn counters(&mut self) -> Result<Counters> {
        match self.client.ask(&client::Command::Counters)? {
            client::Answer::Counters(counters) => Ok(counters),
            other => bail!("the client answered {other:?}"),
        }
    }

    fn server_cpu(&mut self) -> Result<f64> {
        match self.server.ask(&server::Command::Cpu)? {
            server::Answer::Cpu(seconds) => Ok(seconds),
            other => bail!("the server answered {other:?}"),
        }
    }

    /// Runs `work` while the server runs. A polling server burns a core even when nobody asks it
    /// anything, and must not do so while another pair is measured.
    fn active<T>(&mut self, work: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.server.resume();
        let result = work(self);
        if self.variant.wait == Wait::Poll {
            self.server.pause();
        }
        result
    }

    /// Ends both.
    pub(crate) fn finish(self) -> Result<()> {
        self.client.finish()?;
        self.server.finish()
    }
}

/// The arguments that all roles have.
pub(crate) fn role_arguments(
    role: &str,
    options: &Options,
    processor: Option<usize>,
) -> Vec<String> {
    let mut arguments = [role, "--device", &options.device]
        .map(str::to_owned)
        .to_vec();
    if let Some(processor) = processor {
        arguments.extend(["--processor".to_owned(), processor.to_string()]);
    }
    arguments
}
