//! What the tests share: servers in processes of their own, and values that tell what they are.
#![allow(dead_code)] // each test program uses a part

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use kvstore::{Client, ClientConfig};

/// A server process, killed when dropped.
pub struct Server {
    child: Child,
    pub address: SocketAddr,
}

impl Server {
    /// Starts `kvstore serve` on a free port, with further arguments; on another host, if
    /// `KVSTORE_TEST_NETWORK` names a network namespace, as `ip netns` knows it, and
    /// `KVSTORE_TEST_ADDRESS` an address there.
    pub fn start(arguments: &[&str]) -> Self {
        let program = env!("CARGO_BIN_EXE_kvstore");
        let (mut command, address) = match std::env::var(NETWORK) {
            Err(_) => (Command::new(program), "127.0.0.1".to_owned()),
            Ok(network) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", &network, program]);
                (command, std::env::var(ADDRESS).expect("an address there"))
            }
        };
        let mut child = command
            .args(["serve", "--listen", &format!("{address}:0")])
            .args(arguments)
            .env("RUST_LOG", "warn")
            .stdout(Stdio::piped())
            .spawn()
            .expect("start the server");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("piped"))
            .read_line(&mut line)
            .expect("read from the server");
        let address = line
            .trim()
            .strip_prefix("serving on ")
            .and_then(|address| address.parse().ok())
            .unwrap_or_else(|| panic!("the server said {line:?}"));
        Self { child, address }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it at once, as a crash would.
    pub fn kill(&mut self) {
        self.child.kill().expect("kill the server");
        self.child.wait().expect("wait for the server");
    }

    /// Waits for its own end.
    pub fn wait(&mut self) -> ExitStatus {
        self.child.wait().expect("wait for the server")
    }

    pub fn client(&self) -> Client {
        self.client_with(|_| {})
    }

    pub fn client_with(&self, set: impl FnOnce(&mut ClientConfig)) -> Client {
        let mut config = ClientConfig::default();
        set(&mut config);
        Client::connect(self.address, &config).expect("connect")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may be gone already, which is as well.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// `length` bytes that differ for each `seed` and at every offset nearby.
pub fn value(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(length + 8);
    while bytes.len() < length {
        // xorshift64*
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        bytes.extend_from_slice(&state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// Waits until `what` holds; a state that never comes fails the test instead of hanging it.
pub fn until(description: &str, mut what: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !what() {
        assert!(Instant::now() < deadline, "never happened: {description}");
        std::thread::yield_now();
    }
}

/// This test program again, as a process that runs only the test of that name, told to be a helper by the variable
/// `KVSTORE_TEST_SERVER`; stdout is piped.
pub fn helper(test: &str, server: SocketAddr) -> Child {
    Command::new(std::env::current_exe().expect("this program"))
        .args(["--exact", test, "--nocapture", "--test-threads=1"])
        .env(HELPER, server.to_string())
        .stdout(Stdio::piped())
        .spawn()
        .expect("start a helper")
}

/// The server to connect to, in a process started by [`helper`].
pub fn helped_server() -> Option<SocketAddr> {
    std::env::var(HELPER).ok()?.parse().ok()
}

const NETWORK: &str = "KVSTORE_TEST_NETWORK";
const ADDRESS: &str = "KVSTORE_TEST_ADDRESS";
const HELPER: &str = "KVSTORE_TEST_SERVER";
