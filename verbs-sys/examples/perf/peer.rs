//! The other process: started with the plain memory and the eventfds, connected by lines of JSON, then
//! asleep until it is to serve; while it serves it burns its processor and does what words of the plain
//! memory say.

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::os::fd::RawFd;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::ValueEnum;
use rustix::process::{Signal, set_parent_process_death_signal};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};
use verbs_sys::RemoteAddr;

use crate::endpoint::{Endpoint, Options};
use crate::shared::{Bell, Shared, await_word};
use crate::{Result, messages, one_sided, revocation};

/// What the peer does, and the words by which it is told.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Task {
    /// Sleep until the next line.
    Rest,
    /// Send a line's word back.
    Line,
    /// Send an eventfd's ring back.
    Bell,
    /// Write a word back.
    Put,
    /// Read lines as they come, from the endpoint's memory.
    Consume,
    /// Read lines as they come, from the plain memory.
    ConsumeCopies,
    /// Send messages back, polling.
    Echo,
    /// Send messages back, asleep in between.
    EchoAsleep,
    /// Write over all queue pairs until told to stop.
    Traffic,
}

impl Task {
    const ALL: [Self; 9] = [
        Self::Rest,
        Self::Line,
        Self::Bell,
        Self::Put,
        Self::Consume,
        Self::ConsumeCopies,
        Self::Echo,
        Self::EchoAsleep,
        Self::Traffic,
    ];
}

/// Lines of the words: the number of the task that is asked for, which it is, how often, from which value
/// on; and the number of the task that has begun.
const ASKED: usize = 0;
const TASK: usize = 1;
const COUNT: usize = 2;
const FIRST: usize = 3;
const BEGUN: usize = 4;
/// Lines for the tasks.
pub const STOP: usize = 8;
pub const DONE: usize = 9;
pub const PING: usize = 10;
pub const PONG: usize = 11;

/// What the peer gets from who starts it.
#[derive(clap::Args)]
pub struct Inherited {
    #[arg(long)]
    shared: RawFd,
    #[arg(long)]
    ping: RawFd,
    #[arg(long)]
    pong: RawFd,
    #[arg(long)]
    processor: usize,
    #[command(flatten)]
    options: Options,
}

/// What one side tells the other.
#[derive(Serialize, Deserialize)]
pub struct Place {
    endpoints: Vec<String>,
    addr: u64,
    rkey: u32,
}

impl Place {
    fn of(endpoint: &Endpoint) -> Result<Self> {
        Ok(Self {
            endpoints: endpoint.names()?,
            addr: endpoint.mr.addr(),
            rkey: endpoint.mr.rkey(),
        })
    }

    fn remote(&self) -> RemoteAddr {
        RemoteAddr {
            addr: self.addr,
            rkey: self.rkey,
        }
    }
}

/// Both sides, as the process that measures has them.
pub struct Pair {
    pub here: Endpoint,
    /// The start of the peer's memory.
    pub there: RemoteAddr,
    pub shared: Shared,
    pub bells: [Bell; 2],
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    child: Child,
    asked: u64,
}

impl Pair {
    pub fn start(options: Options) -> Result<Self> {
        let [ours, theirs] = processors()?;
        occupy(ours)?;
        let theirs = theirs.to_string();
        let (shared, bells) = (Shared::new()?, [Bell::new()?, Bell::new()?]);
        let fds = [shared.fd(), bells[0].fd(), bells[1].fd()].map(|fd| fd.to_string());
        let [plain, ping, pong] = &fds;
        let mut child = Command::new(std::env::current_exe()?)
            .args(["peer", "--shared", plain, "--ping", ping, "--pong", pong])
            .args(["--processor", &theirs])
            .args([
                "--memory",
                &name(options.memory),
                "--wait",
                &name(options.wait),
            ])
            .args(["--qps", &options.qps.to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let mut input = child.stdin.take().ok_or("the peer has no input")?;
        let output = child.stdout.take().ok_or("the peer has no output")?;
        let mut output = BufReader::new(output);
        let here = Endpoint::open(options)?;
        tell(&mut input, &Place::of(&here)?)?;
        let place: Place = hear(&mut output)?;
        here.connect(&place.endpoints)?;
        Ok(Self {
            here,
            there: place.remote(),
            shared,
            bells,
            input,
            output,
            child,
            asked: 0,
        })
    }

    /// Has the peer spin until the next task, or rest.
    pub fn wake(&mut self) -> Result<()> {
        tell(&mut self.input, &())
    }

    /// Has it sleep again.
    pub fn rest(&mut self) -> Result<()> {
        self.ask(Task::Rest, 0, 0)?;
        hear(&mut self.output)
    }

    /// Gives the peer, which is awake, a task; returns when it has begun.
    pub fn ask(&mut self, task: Task, count: u64, first: u64) -> Result<()> {
        self.asked += 1;
        for (line, value) in [(TASK, task as u64), (COUNT, count), (FIRST, first)] {
            self.shared.word(line).store(value, Ordering::Relaxed);
        }
        self.shared.word(ASKED).store(self.asked, Ordering::Release);
        while self.shared.word(BEGUN).load(Ordering::Acquire) != self.asked {
            if let Some(status) = self.child.try_wait()? {
                return Err(format!("the peer ended: {status}").into());
            }
        }
        Ok(())
    }

    /// The peer's process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        // It does not wait for anything that it would have to be told.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As it is written on the command line.
fn name(value: impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value
        .map(|value| value.get_name().to_owned())
        .unwrap_or_default()
}

fn tell<T: Serialize>(to: &mut impl Write, what: &T) -> Result<()> {
    let mut line = serde_json::to_string(what)?;
    line.push('\n');
    to.write_all(line.as_bytes())?;
    Ok(to.flush()?)
}

fn hear<T: for<'a> Deserialize<'a>>(from: &mut impl BufRead) -> Result<T> {
    let mut line = String::new();
    if from.read_line(&mut line)? == 0 {
        return Err("the other process ended".into());
    }
    Ok(serde_json::from_str(&line)?)
}

/// The processors of both sides: the first and the last of those that are allowed to this process.
fn processors() -> Result<[usize; 2]> {
    // Once, as this process then stays on one.
    static CHOSEN: OnceLock<Option<[usize; 2]>> = OnceLock::new();
    let chosen = CHOSEN.get_or_init(|| {
        let allowed = sched_getaffinity(None).ok()?;
        let each = || (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
        Some([each().next()?, each().next_back()?])
    });
    Ok(chosen.ok_or("no processor is allowed")?)
}

/// Stays on this processor.
fn occupy(processor: usize) -> Result<()> {
    let mut only = CpuSet::new();
    only.set(processor);
    Ok(sched_setaffinity(None, &only)?)
}

/// What the tasks work with.
pub struct Service {
    pub here: Endpoint,
    pub there: RemoteAddr,
    pub shared: Shared,
    pub bells: [Bell; 2],
    /// Whether receives are posted.
    pub filled: Cell<bool>,
}

/// The peer's role.
pub fn serve(inherited: &Inherited) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    occupy(inherited.processor)?;
    let (mut input, mut output) = (std::io::stdin().lock(), std::io::stdout().lock());
    let here = Endpoint::open(inherited.options)?;
    let place: Place = hear(&mut input)?;
    here.connect(&place.endpoints)?;
    tell(&mut output, &Place::of(&here)?)?;
    let service = Service {
        here,
        there: place.remote(),
        shared: Shared::inherit(inherited.shared)?,
        bells: [Bell::inherit(inherited.ping), Bell::inherit(inherited.pong)],
        filled: Cell::new(false),
    };
    let mut number = 0;
    loop {
        hear::<()>(&mut input)?;
        loop {
            number += 1;
            await_word(service.shared.word(ASKED), number);
            let value = |line| AtomicU64::load(service.shared.word(line), Ordering::Relaxed);
            let (task, count, first) = (value(TASK), value(COUNT), value(FIRST));
            let task = Task::ALL.get(task as usize).ok_or("an unknown task")?;
            service.shared.word(BEGUN).store(number, Ordering::Release);
            if *task == Task::Rest {
                break;
            }
            service.perform(*task, count, first)?;
        }
        tell(&mut output, &())?;
    }
}

impl Service {
    fn perform(&self, task: Task, count: u64, first: u64) -> Result<()> {
        match task {
            Task::Rest => Ok(()),
            Task::Line => {
                for value in first..first + count {
                    await_word(self.shared.word(PING), value);
                    self.shared.word(PONG).store(value, Ordering::Release);
                }
                Ok(())
            }
            Task::Bell => (0..count).try_for_each(|_| {
                self.bells[0].wait()?;
                self.bells[1].ring()
            }),
            Task::Put => one_sided::put_back(self, count, first),
            Task::Consume => {
                one_sided::consume(self, |line| self.here.word(line * 8), count, first);
                Ok(())
            }
            Task::ConsumeCopies => {
                one_sided::consume(self, |line| self.shared.copied(line), count, first);
                Ok(())
            }
            Task::Echo => messages::echo(self, count, first as usize, Endpoint::complete),
            Task::EchoAsleep => {
                messages::echo(self, count, first as usize, Endpoint::complete_asleep)
            }
            Task::Traffic => revocation::traffic(self),
        }
    }
}
