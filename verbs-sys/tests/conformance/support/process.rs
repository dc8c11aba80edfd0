//! An end in another process: this executable again, told what to do over a TCP connection.

use std::{
    env,
    io::{BufRead, BufReader, Write},
    net::{Ipv4Addr, TcpListener, TcpStream},
    process::{Child, Stdio},
};

use serde_json::Value;

use super::{
    command::{Command, MemoryKind},
    side::Side,
};

/// Tells the other process where its orders come from.
const VARIABLE: &str = "VERBS_CONFORMANCE_PEER";

/// The other process. Dropping it ends it.
pub struct Process {
    child: Child,
    connection: BufReader<TcpStream>,
}

impl Process {
    pub fn start(memory: MemoryKind) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("cannot listen");
        let address = listener.local_addr().expect("no address");
        let child = std::process::Command::new(env::current_exe().expect("no executable"))
            .args(["--exact", "other_process", "--nocapture"])
            .env(VARIABLE, address.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .expect("cannot start the other process");
        let (stream, _) = listener.accept().expect("the other process does not call");
        stream.set_nodelay(true).expect("no TCP");
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
        // It ends at the end of its orders.
        let _ = self.connection.get_ref().shutdown(std::net::Shutdown::Both);
        let _ = self.child.wait();
    }
}

/// In the other process: does as told until the connection ends.
pub fn serve_if_asked() {
    let Ok(address) = env::var(VARIABLE) else {
        return;
    };
    let stream = TcpStream::connect(address).expect("cannot reach the test");
    stream.set_nodelay(true).expect("no TCP");
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

fn send(stream: &mut TcpStream, message: &impl serde::Serialize) {
    let mut line = serde_json::to_vec(message).expect("cannot encode");
    line.push(b'\n');
    // A lost connection shows when the answer does not come.
    let _ = stream.write_all(&line);
}

fn receive<T: serde::de::DeserializeOwned>(connection: &mut BufReader<TcpStream>) -> Option<T> {
    let mut line = String::new();
    match connection.read_line(&mut line) {
        Ok(1..) => Some(serde_json::from_str(&line).expect("cannot decode")),
        _ => None,
    }
}
