//! `cargo xtask dropin`: programs of others, unmodified, on the software device.

use std::fs::File;
use std::io::Read;
use std::net::{Ipv4Addr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;

use crate::dist::{self, SEARCH_PATH};
use crate::workspace::Workspace;

/// How long a program may take.
const PATIENCE: Duration = Duration::from_secs(60);
/// Between two looks at something that others do.
const SOON: Duration = Duration::from_millis(10);

/// Programs that are run by themselves; what they print must have the words.
const ALONE: [(&str, &[&str], &str); 2] = [
    ("ibv_devices", &[], "soft0"),
    ("ibv_devinfo", &["-v", "-d", "soft0"], "PORT_ACTIVE"),
];

/// Programs of which one instance listens and another connects to it. They check what they get (`-c`)
/// where they can.
const PAIRS: [(&str, &[&str]); 8] = [
    ("ibv_rc_pingpong", &["-g", "0", "-c"]),
    ("ibv_rc_pingpong", &["-g", "0", "-c", "-e"]),
    ("ibv_uc_pingpong", &["-g", "0", "-c"]),
    ("ibv_uc_pingpong", &["-g", "0", "-c", "-e"]),
    ("ibv_ud_pingpong", &["-g", "0", "-c", "-s", "1024"]),
    ("ibv_ud_pingpong", &["-g", "0", "-c", "-s", "1024", "-e"]),
    ("ibv_srq_pingpong", &["-g", "0", "-c"]),
    ("ibv_srq_pingpong", &["-g", "0", "-c", "-e"]),
];

/// Arguments of `cargo xtask dropin`.
#[derive(Args)]
pub struct Dropin {}

impl Dropin {
    /// Builds the library and runs everything on it; an error names what failed.
    pub fn run(self) -> Result<()> {
        let workspace = Workspace::locate()?;
        let out = dist::build_default(&workspace)?;
        let logs = workspace.target.join("dropin");
        fs::create_dir_all(&logs)?;
        let mut failed = Vec::new();
        let mut report = |line: String, result: Result<()>| match result {
            Ok(()) => println!("passed   {line}"),
            Err(error) => {
                println!("FAILED   {line}: {error:#}");
                failed.push(line);
            }
        };
        for (program, arguments, words) in ALONE {
            let log = logs.join("alone.txt");
            let result = alone(&out, program, arguments, words, &log);
            report(text(program, arguments), result);
        }
        for (program, arguments) in PAIRS {
            report(
                text(program, arguments),
                pair(&out, program, arguments, &logs),
            );
        }
        ensure!(failed.is_empty(), "failed: {}", failed.join("; "));
        Ok(())
    }
}

fn text(program: &str, arguments: &[&str]) -> String {
    [&[program], arguments].concat().join(" ")
}

/// Starts a program with the library in front, its output in a file.
fn start(library: &Path, program: &str, arguments: &[&str], log: &Path) -> Result<Started> {
    let file = File::create(log).with_context(|| format!("cannot write {}", log.display()))?;
    let child = Command::new(program)
        .args(arguments)
        .env(SEARCH_PATH, dist::search_path(library)?)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file)
        .spawn()
        .with_context(|| format!("cannot start {program} (of which package?)"))?;
    Ok(Started(child))
}

/// A program that ends with us.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        if let Ok(None) = self.0.try_wait() {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }
}

impl Started {
    fn end(&mut self, deadline: Instant) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.0.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "does not end");
            thread::sleep(SOON);
        }
    }

    fn succeed(&mut self, deadline: Instant, log: &Path) -> Result<()> {
        let status = self.end(deadline);
        let output = || fs::read_to_string(log).unwrap_or_default();
        match status {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => bail!("{status}; it said: {}", output()),
            Err(error) => Err(error).with_context(output),
        }
    }
}

fn alone(library: &Path, program: &str, arguments: &[&str], words: &str, log: &Path) -> Result<()> {
    let mut started = start(library, program, arguments, log)?;
    started.succeed(Instant::now() + PATIENCE, log)?;
    let output = fs::read_to_string(log)?;
    ensure!(
        output.contains(words),
        "it does not say {words:?}: {output}"
    );
    ensure!(
        !output.contains("no version information"),
        "the loader misses versions: {output}"
    );
    Ok(())
}

fn pair(library: &Path, program: &str, arguments: &[&str], logs: &Path) -> Result<()> {
    // Free a moment ago, and nobody else on this host asks for it.
    let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
        .local_addr()?
        .port();
    let number = port.to_string();
    let all = [arguments, &["-p", &number]].concat();
    let [served, asked] = ["server.txt", "client.txt"].map(|name| logs.join(name));
    let deadline = Instant::now() + PATIENCE;
    let mut server = start(library, program, &all, &served)?;
    while !is_listening(port)? {
        if let Some(status) = server.0.try_wait()? {
            let said = fs::read_to_string(&served)?;
            bail!("the server ended at once, {status}; it said: {said}");
        }
        ensure!(Instant::now() < deadline, "the server does not listen");
        thread::sleep(SOON);
    }
    let mut client = start(
        library,
        program,
        &[&all[..], &["127.0.0.1"]].concat(),
        &asked,
    )?;
    client.succeed(deadline, &asked).context("the client")?;
    server.succeed(deadline, &served).context("the server")
}

/// Whether somebody listens at this TCP port: asking it would take the only connection that it waits for.
fn is_listening(port: u16) -> Result<bool> {
    // "sl local_address rem_address st ...", numbers in hex; 0A is LISTEN.
    let address = format!(":{port:04X}");
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        let mut text = String::new();
        if let Ok(mut file) = File::open(table) {
            file.read_to_string(&mut text)?;
        }
        let found = text.lines().skip(1).any(|line| {
            let mut words = line.split_whitespace().skip(1);
            let local = words.next().unwrap_or_default();
            local.ends_with(&address) && words.nth(1) == Some("0A")
        });
        if found {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listener_is_noticed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(is_listening(port).unwrap());
        drop(listener);
        assert!(!is_listening(port).unwrap());
    }
}
