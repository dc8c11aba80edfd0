//! Another process: this executable again, told what to do through its standard input, which is a socket.

use std::{
    env, fs,
    io::{Read, Write, stdin},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Serialize, de::DeserializeOwned};

use super::{
    memory, network,
    node::{self, Command, Made, Setup},
    traffic::{Mix, Report},
};

/// Tells the other process what it is.
const VARIABLE: &str = "VERBS_FAULTS_NODE";
/// Nothing that works takes so long, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// How two processes reach each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// Shared memory, which the initiator copies to and from.
    Shm,
    /// The initiator copies, through the kernel.
    Cma,
    /// Shared memory until it has to be the owner who copies, then a Unix socket.
    OwnerCopies,
    /// A Unix socket; the owner of memory copies.
    Strict,
    /// On two hosts, a TCP connection.
    Tcp,
}

/// Where a process is started, and with which link to others.
#[derive(Clone, Debug)]
pub struct Host {
    /// A network namespace.
    pub network: String,
    pub kind: LinkKind,
}

impl Host {
    /// Where the two ends of a link are.
    pub fn two(kind: LinkKind) -> [Self; 2] {
        let [first, second] = network::hosts();
        let second = match kind {
            LinkKind::Tcp => second,
            _ => first.clone(),
        };
        [first, second].map(|network| Self { network, kind })
    }
}

/// What a process has of the system's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub descriptors: usize,
    pub mappings: usize,
    pub resident_kib: usize,
}

/// The other process. Dropping it ends it.
pub struct Process {
    child: Child,
    stream: UnixStream,
}

impl Process {
    pub fn start(host: &Host) -> Self {
        let (stream, theirs) = UnixStream::pair().expect("no sockets");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("no time-out");
        let own = env::current_exe().expect("no executable");
        let variables: &[_] = match host.kind {
            LinkKind::Shm => &[],
            LinkKind::Cma => &[(memory::ON_HEAP, "1")],
            LinkKind::OwnerCopies => &[(memory::ON_HEAP, "1"), ("VERBS_SOFT_CMA", "0")],
            LinkKind::Strict => &[("VERBS_SOFT_STRICT", "1")],
            LinkKind::Tcp => &[("VERBS_SOFT_LISTEN", "0.0.0.0")],
        };
        let spawn = move || {
            std::process::Command::new(own)
                .args(["--exact", "other_process", "--nocapture"])
                .env(VARIABLE, "1")
                .envs(variables.iter().copied())
                .stdin(OwnedFd::from(theirs))
                .stdout(Stdio::null())
                .spawn()
                .expect("cannot start the other process")
        };
        let child = network::within(&host.network, spawn);
        let mut process = Self { child, stream };
        // It says when it has opened the device.
        let opened: Option<((), Vec<u8>)> = receive(&mut process.stream);
        opened.expect("the other process cannot open the device");
        process
    }

    /// Has a command executed.
    #[track_caller]
    fn call<T: DeserializeOwned>(&mut self, command: &Command, blob: &[u8]) -> (T, Vec<u8>) {
        send(&mut self.stream, command, blob);
        receive(&mut self.stream)
            .unwrap_or_else(|| panic!("the other process failed, or hangs, at {command:?}"))
    }

    #[track_caller]
    pub fn create(&mut self, setup: Setup) -> Made {
        self.call(&Command::Create(setup), &[]).0
    }

    #[track_caller]
    pub fn connect(&mut self, own: &Made, peer: &Made) {
        let command = Command::Connect {
            id: own.id,
            remote: peer.endpoint.clone(),
            grant: peer.grant,
        };
        self.call::<()>(&command, &[]);
    }

    #[track_caller]
    pub fn start_traffic(&mut self, id: usize, mix: Mix) {
        self.call::<()>(&Command::Start { id, mix }, &[]);
    }

    /// No new requests from now on.
    #[track_caller]
    pub fn stop_traffic(&mut self, id: usize) {
        self.call::<()>(&Command::Stop { id }, &[]);
    }

    /// What has happened so far.
    #[track_caller]
    pub fn report(&mut self, id: usize) -> Report {
        self.call(&Command::Outcome { id, wait: false }, &[]).0
    }

    /// What has happened once no request is under way.
    #[track_caller]
    pub fn outcome(&mut self, id: usize) -> Report {
        let report: Report = self.call(&Command::Outcome { id, wait: true }, &[]).0;
        assert!(report.is_over, "requests hang: {report:?}");
        report
    }

    /// The bytes that the peer may use.
    #[track_caller]
    pub fn memory(&mut self, id: usize) -> Vec<u8> {
        self.call::<()>(&Command::Memory { id }, &[]).1
    }

    /// Asserts that a peer's bytes, and the messages it got, are what this end's requests have made.
    #[track_caller]
    pub fn judge(&mut self, id: usize, bytes: Vec<u8>, received: u64) {
        let wrong: Option<String> = self.call(&Command::Judge { id, received }, &bytes).0;
        assert_eq!(wrong, None, "the peer's memory");
    }

    /// Asserts that no byte beside what was granted has changed.
    #[track_caller]
    pub fn assert_guards(&mut self, id: usize) {
        let wrong: Option<usize> = self.call(&Command::Guards { id }, &[]).0;
        assert_eq!(wrong, None, "a byte beside the region has changed");
    }

    #[track_caller]
    pub fn destroy(&mut self, id: usize) {
        self.call::<()>(&Command::Destroy { id }, &[]);
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("cannot signal the other process");
    }

    /// Kills it where it stands.
    pub fn kill(&mut self) {
        self.child.kill().expect("cannot kill the other process");
        self.child
            .wait()
            .expect("cannot wait for the other process");
    }

    /// What the process has once it has no more descriptors than so many.
    #[track_caller]
    pub fn await_descriptors(&self, most: usize) -> Usage {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let usage = self.usage();
            if usage.descriptors <= most {
                return usage;
            }
            assert!(
                Instant::now() < deadline,
                "{usage:?}, not {most} descriptors"
            );
            thread::yield_now();
        }
    }

    pub fn usage(&self) -> Usage {
        let proc = format!("/proc/{}", self.child.id());
        let read =
            |name: &str| fs::read_to_string(format!("{proc}/{name}")).expect("cannot read /proc");
        let status = read("status");
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
        let resident = resident.and_then(|text| text.trim().strip_suffix(" kB"));
        Usage {
            descriptors: fs::read_dir(format!("{proc}/fd"))
                .expect("no descriptors")
                .count(),
            mappings: read("maps").lines().count(),
            resident_kib: resident
                .and_then(|text| text.parse().ok())
                .expect("no VmRSS"),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It ends at the end of its orders; one that was stopped does not read them.
        let _ = self.stream.shutdown(std::net::Shutdown::Both);
        let _ = kill_process(self.pid(), Signal::CONT);
        let _ = self.child.wait();
    }
}

/// In the other process: does as told until the connection ends.
pub fn serve_if_asked() {
    if env::var_os(VARIABLE).is_none() {
        return;
    }
    let orders = stdin().as_fd().try_clone_to_owned();
    node::run(UnixStream::from(orders.expect("cannot reach the test")));
}

/// A message is a JSON value and bytes, each behind its length.
pub fn send(stream: &mut UnixStream, message: &impl Serialize, blob: &[u8]) {
    let json = serde_json::to_vec(message).expect("cannot encode");
    let mut bytes = Vec::with_capacity(8 + json.len() + blob.len());
    for part in [&json[..], blob] {
        bytes.extend((part.len() as u32).to_ne_bytes());
        bytes.extend(part);
    }
    // A lost connection shows when the answer does not come.
    let _ = stream.write_all(&bytes);
}

pub fn receive<T: DeserializeOwned>(stream: &mut UnixStream) -> Option<(T, Vec<u8>)> {
    let mut part = || {
        let mut len = [0; 4];
        stream.read_exact(&mut len).ok()?;
        let mut bytes = vec![0; u32::from_ne_bytes(len) as usize];
        stream.read_exact(&mut bytes).ok()?;
        Some(bytes)
    };
    let (json, blob) = (part()?, part()?);
    Some((serde_json::from_slice(&json).expect("cannot decode"), blob))
}
