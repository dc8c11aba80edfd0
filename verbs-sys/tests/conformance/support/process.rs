//! An end in another process: this executable again, told what to do through its standard input, which
//! is a socket.
//!
//! `VERBS_PEER_NETWORK` names a network namespace, as `ip netns` knows it, to start that process in: it
//! is then on another host.

use std::{
    env,
    io::{BufRead, BufReader, Write, stdin},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Stdio},
};

use serde_json::Value;

use super::{
    command::{Command, MemoryKind},
    side::Side,
};

/// Tells the other process what it is.
const VARIABLE: &str = "VERBS_CONFORMANCE_PEER";
pub const NETWORK: &str = "VERBS_PEER_NETWORK";

/// The other process. Dropping it ends it.
pub struct Process {
    child: Child,
    connection: BufReader<UnixStream>,
}

impl Process {
    pub fn start(memory: MemoryKind) -> Self {
        let (stream, theirs) = UnixStream::pair().expect("no sockets");
        let own = env::current_exe().expect("no executable");
        let mut command = match env::var_os(NETWORK) {
            None => std::process::Command::new(own),
            Some(network) => {
                let mut command = std::process::Command::new("ip");
                command.args(["netns", "exec"]).arg(network).arg(own);
                command
            }
        };
        let child = command
            .args(["--exact", "other_process", "--nocapture"])
            .env(VARIABLE, "1")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .expect("cannot start the other process");
        let mut process = Self {
            child,
            connection: BufReader::new(stream),
        };
        process.call(&Command::Open { memory });
        process
    }

    /// Gives a command of which nobody will hear the answer.
    pub fn tell(&mut self, command: &Command) {
        send(self.connection.get_mut(), command);
    }

    pub fn call(&mut self, command: &Command) -> Value {
        self.tell(command);
        receive(&mut self.connection)
            .unwrap_or_else(|| panic!("the other process failed at {command:?}"))
    }

    /// Lets it end, as it does at the end of its orders.
    pub fn end(&mut self) {
        let _ = self.connection.get_ref().shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }

    /// Kills it where it stands.
    pub fn kill(&mut self) {
        self.child.kill().expect("cannot kill the other process");
        self.child
            .wait()
            .expect("cannot wait for the other process");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.end();
    }
}

/// In the other process: does as told until the connection ends.
pub fn serve_if_asked() {
    if env::var_os(VARIABLE).is_none() {
        return;
    }
    let orders = stdin().as_fd().try_clone_to_owned();
    let stream = UnixStream::from(orders.expect("cannot reach the test"));
    let mut connection = BufReader::new(stream);
    let Some(Command::Open { memory }) = receive(&mut connection) else {
        panic!("the first command is not to open");
    };
    let mut side = Side::open(memory);
    send(connection.get_mut(), &());
    while let Some(command) = receive(&mut connection) {
        let answer = side.execute(command);
        send(connection.get_mut(), &answer);
    }
}

fn send(stream: &mut UnixStream, message: &impl serde::Serialize) {
    let mut line = serde_json::to_vec(message).expect("cannot encode");
    line.push(b'\n');
    // A lost connection shows when the answer does not come.
    let _ = stream.write_all(&line);
}

fn receive<T: serde::de::DeserializeOwned>(connection: &mut BufReader<UnixStream>) -> Option<T> {
    let mut line = String::new();
    match connection.read_line(&mut line) {
        Ok(1..) => Some(serde_json::from_str(&line).expect("cannot decode")),
        _ => None,
    }
}
