//! Programs that are started and end with us.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};
use std::{env, thread};

use anyhow::{Context, Result, bail, ensure};

/// Between two looks at something that others do.
pub const SOON: Duration = Duration::from_millis(5);

/// A program that was started. Dropping it ends it.
pub struct Started {
    child: Child,
    /// Where its output goes.
    log: PathBuf,
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Started {
    /// Starts a program, its output in a file.
    pub fn new(mut command: Command, log: PathBuf) -> Result<Self> {
        let file = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", command.get_program().display()))?;
        Ok(Self { child, log })
    }

    /// What it has said.
    pub fn output(&self) -> String {
        let bytes = fs::read(&self.log).unwrap_or_default();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Waits until it listens at a port: asking that would take the only connection that it waits for.
    pub fn await_listening(&mut self, port: u16, deadline: Instant) -> Result<()> {
        while !listens(self.child.id(), port)? {
            if let Some(status) = self.child.try_wait()? {
                bail!("it ended at once, {status}; it said: {}", self.output());
            }
            ensure!(Instant::now() < deadline, "it does not listen");
            thread::sleep(SOON);
        }
        Ok(())
    }

    /// Ends one that goes on by itself, as it must until now, and gives what it has said.
    pub fn stop(&mut self) -> Result<String> {
        if let Some(status) = self.child.try_wait()? {
            bail!("it ended too early, {status}; it said: {}", self.output());
        }
        self.child.kill()?;
        self.child.wait()?;
        Ok(self.output())
    }

    /// Waits for its end, which must be a success, and gives what it has said.
    pub fn succeed(&mut self, deadline: Instant) -> Result<String> {
        let status = self.end(deadline);
        let output = self.output();
        match status {
            Ok(status) if status.success() => Ok(output),
            Ok(status) => bail!("{status}; it said: {output}"),
            Err(error) => bail!("{error}; it said: {output}"),
        }
    }

    fn end(&mut self, deadline: Instant) -> Result<ExitStatus> {
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            ensure!(Instant::now() < deadline, "it does not end");
            thread::sleep(SOON);
        }
    }
}

/// Whether somebody listens at this port in the network of a process: of TCP, or of the connection manager.
fn listens(pid: u32, port: u16) -> Result<bool> {
    let table = |name: &str| -> Result<String> {
        let mut text = String::new();
        // There may be no IPv6.
        if let Ok(mut file) = File::open(format!("/proc/{pid}/net/{name}")) {
            file.read_to_string(&mut text)?;
        }
        Ok(text)
    };
    let mut tcp = table("tcp")?;
    tcp += &table("tcp6")?;
    let is_tcp = |line: &str| tcp_listener(line) == Some(port);
    let is_named = |line: &str| named_listener(line) == Some(port);
    Ok(tcp.lines().any(is_tcp) || table("unix")?.lines().any(is_named))
}

/// The port of a line of `/proc/net/tcp`, if somebody listens there.
fn tcp_listener(line: &str) -> Option<u16> {
    // "sl local_address rem_address st ...", numbers in hex; 0A is LISTEN.
    let mut words = line.split_whitespace().skip(1);
    let (local, state) = (words.next()?, words.nth(1)?);
    let (_, port) = local.rsplit_once(':').filter(|_| state == "0A")?;
    u16::from_str_radix(port, 16).ok()
}

/// The port of a line of `/proc/net/unix`, if that is the name of one who listens by the connection manager.
fn named_listener(line: &str) -> Option<u16> {
    // "Num RefCount Protocol Flags Type St Inode Path", flags in hex; the one is __SO_ACCEPTCON.
    let words: Vec<&str> = line.split_whitespace().collect();
    let [_, _, _, flags, _, _, _, path] = words[..] else {
        return None;
    };
    let flags = u32::from_str_radix(flags, 16).ok()?;
    let name = path.strip_prefix("@verbs-rdmacm/")?;
    let (_, port) = name.rsplit_once('/').filter(|_| flags & 0x1_0000 != 0)?;
    port.parse().ok()
}

/// Fails if a program is not there, and says which package has it.
pub fn check(program: &str, package: &str) -> Result<()> {
    let path = env::var_os("PATH").unwrap_or_default();
    let is_in = |folder: PathBuf| folder.join(program).is_file();
    let found = Path::new(program).is_absolute() && Path::new(program).is_file()
        || env::split_paths(&path).any(is_in);
    ensure!(
        found,
        "{program} is not there; it is in Debian's package {package}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    #[test]
    fn a_listener_is_noticed() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        assert!(listens(std::process::id(), port).unwrap());
        drop(listener);
        assert!(!listens(std::process::id(), port).unwrap());
    }

    #[test]
    fn a_name_of_the_connection_manager_is_a_listener_once_it_listens() {
        let line = |flags| {
            format!(
                "000000002d0b8a1c: 00000002 00000000 {flags} 0001 01 20123 @verbs-rdmacm/tcp/0.0.0.0/7174"
            )
        };
        assert_eq!(named_listener(&line("00010000")), Some(7174));
        assert_eq!(named_listener(&line("00000000")), None);
        let other = "000000002d0b8a1c: 00000002 00000000 00010000 0001 01 20123 /run/x/7174";
        assert_eq!(named_listener(other), None);
    }

    #[test]
    fn the_package_of_a_missing_program_is_named() {
        check("sh", "dash").unwrap();
        let error = check("ibv_no_such_program", "ibverbs-utils").unwrap_err();
        assert!(error.to_string().contains("ibverbs-utils"), "{error}");
    }
}
