//! An end in a process of its own: this executable again, told what to do through its standard input,
//! which is a socket.

use std::{
    env, fs,
    io::{BufRead, BufReader, Write, stdin},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::ExitStatusExt},
    },
    process::{Child, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use rustix::process::{Pid, Signal, kill_process};
use serde::{Serialize, de::DeserializeOwned};

use crate::node::{self, Command, Made, Setup};

/// Tells the other process what it is.
const VARIABLE: &str = "VERBS_OWNER_COPIES_NODE";
/// Nothing that works takes so long, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(120);

/// The other process. Dropping it ends it.
pub struct Process {
    child: Child,
    connection: BufReader<UnixStream>,
}

impl Process {
    /// `cma`: it may use process_vm_readv(2).
    pub fn start(cma: bool) -> Self {
        let (stream, theirs) = UnixStream::pair().expect("no sockets");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("no time-out");
        let child = std::process::Command::new(env::current_exe().expect("no executable"))
            .args(["--exact", "other_process", "--nocapture"])
            .env(VARIABLE, "1")
            .env("VERBS_SOFT_CMA", if cma { "1" } else { "0" })
            .env_remove("VERBS_SOFT_STRICT")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .expect("cannot start the other process");
        Self {
            child,
            connection: BufReader::new(stream),
        }
    }

    /// Gives a command, whose answer is yet to be heard.
    pub fn tell(&mut self, command: &Command) {
        send(self.connection.get_mut(), command);
    }

    #[track_caller]
    pub fn hear<T: DeserializeOwned>(&mut self) -> T {
        receive(&mut self.connection).expect("the other process failed, or hangs")
    }

    #[track_caller]
    pub fn call<T: DeserializeOwned>(&mut self, command: &Command) -> T {
        self.tell(command);
        self.hear()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("cannot signal a process");
    }

    /// Stops it, and returns when every thread of it stands.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let deadline = Instant::now() + PATIENCE;
        while self.of_threads("stat").any(|stat| !stat.contains(") T ")) {
            assert!(Instant::now() < deadline, "it does not stop");
            std::thread::yield_now();
        }
    }

    /// A file of /proc about each of its threads.
    fn of_threads(&self, name: &'static str) -> impl Iterator<Item = String> {
        let tasks = fs::read_dir(format!("/proc/{}/task", self.child.id())).expect("no /proc");
        // One may have ended meanwhile.
        tasks.filter_map(move |entry| fs::read_to_string(entry.ok()?.path().join(name)).ok())
    }

    /// Kills it where it stands.
    pub fn kill(&mut self) {
        self.child.kill().expect("cannot kill the other process");
        self.child.wait().expect("cannot wait for a process");
    }

    /// How it ends by itself.
    pub fn wait(&mut self) -> Ended {
        Ended::from(self.child.wait().expect("cannot wait for a process"))
    }

    /// Its open sockets.
    pub fn sockets(&self) -> usize {
        let links = fs::read_dir(format!("/proc/{}/fd", self.child.id())).expect("no /proc");
        let links = links.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok());
        links
            .filter(|link| link.to_string_lossy().starts_with("socket:"))
            .count()
    }

    /// Whether it has the thread that requests through sockets need.
    pub fn has_streams(&self) -> bool {
        let mut names = self.of_threads("comm");
        names.any(|name| name.trim() == "soft0-streams")
    }

    /// Waits until it has.
    pub fn await_streams(&self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.has_streams() {
            assert!(Instant::now() < deadline, "it never goes over");
            std::thread::yield_now();
        }
    }
}

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    With(i32),
    By(i32),
}

impl From<ExitStatus> for Ended {
    fn from(status: ExitStatus) -> Self {
        match status.code() {
            Some(code) => Self::With(code),
            None => Self::By(status.signal().unwrap_or(0)),
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It ends at the end of its orders; one that was stopped does not read them.
        let _ = self.connection.get_ref().shutdown(std::net::Shutdown::Both);
        let _ = kill_process(Pid::from_child(&self.child), Signal::CONT);
        let _ = self.child.wait();
    }
}

/// Connects a new queue pair of one process with a new one of the other.
#[track_caller]
pub fn connect(a: &mut Process, b: &mut Process, setup: Setup) -> [Made; 2] {
    let made: [Made; 2] = [&mut *a, b].map(|end| end.call(&Command::Create(setup)));
    connect_again(a, b, &made);
    made
}

/// Connects two queue pairs that are in RESET.
#[track_caller]
pub fn connect_again(a: &mut Process, b: &mut Process, made: &[Made; 2]) {
    for (end, own, peer) in [(a, &made[0], &made[1]), (b, &made[1], &made[0])] {
        let () = end.call(&Command::Connect {
            id: own.id,
            peer: peer.clone(),
        });
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

pub fn send(stream: &mut UnixStream, message: &impl Serialize) {
    let mut line = serde_json::to_vec(message).expect("cannot encode");
    line.push(b'\n');
    // A lost connection shows when the answer does not come.
    let _ = stream.write_all(&line);
}

pub fn receive<T: DeserializeOwned>(connection: &mut BufReader<UnixStream>) -> Option<T> {
    let mut line = String::new();
    match connection.read_line(&mut line) {
        Ok(1..) => Some(serde_json::from_str(&line).expect("cannot decode")),
        _ => None,
    }
}
