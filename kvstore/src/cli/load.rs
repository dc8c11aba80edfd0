//! `load`: a directory tree into the store, or compared with it, by several client processes.
//!
//! The parent walks the tree and deals the files out by size; each worker is this program again, with its share of the
//! paths on stdin and its tally on stdout. What concerns one file goes to stderr and does not stop the others.

use std::fmt;
use std::io::{self, BufRead, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use kvstore::Client;
use walkdir::WalkDir;

use super::arguments::{Connection, Load, LoadWorker, WaitArgument};
use super::commands::{FileValue, connect, put_file};
use super::describe;

/// What was done with a set of files. As text: the figures in this order, separated by spaces.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
struct Tally {
    /// Files stored, or compared and found equal.
    files: u64,
    /// Their bytes.
    bytes: u64,
    /// Files whose value differs or is missing.
    mismatches: u64,
    /// Files that could not be read, stored or fetched.
    failures: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.files += other.files;
        self.bytes += other.bytes;
        self.mismatches += other.mismatches;
        self.failures += other.failures;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            files,
            bytes,
            mismatches,
            failures,
        } = self;
        write!(f, "{files} {bytes} {mismatches} {failures}")
    }
}

impl FromStr for Tally {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let figures: Vec<u64> = text
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()
            .with_context(|| format!("tally {text:?}"))?;
        let [files, bytes, mismatches, failures] = figures[..] else {
            bail!("tally {text:?} has {} figures, not 4", figures.len());
        };
        Ok(Self {
            files,
            bytes,
            mismatches,
            failures,
        })
    }
}

pub fn load(arguments: &Load) -> Result<()> {
    // An unreachable server is one error, not one per process.
    drop(connect(&arguments.connection)?);

    let mut total = Tally::default();
    let mut files = Vec::new();
    for entry in WalkDir::new(&arguments.directory).sort_by_file_name() {
        match entry.and_then(|entry| {
            let length = entry.metadata()?.len();
            Ok((entry, length))
        }) {
            Ok((entry, _)) if entry.depth() == 0 && !entry.file_type().is_dir() => {
                bail!("{} is not a directory", arguments.directory.display());
            }
            Ok((entry, length)) if entry.file_type().is_file() => {
                let path = entry.path().strip_prefix(&arguments.directory)?.to_owned();
                files.push((path, length));
            }
            Ok(_) => {}
            Err(error) if error.depth() == 0 => {
                return Err(error).with_context(|| arguments.directory.display().to_string());
            }
            Err(error) => {
                eprintln!("error: {error}");
                total.failures += 1;
            }
        }
    }

    let started = Instant::now();
    let mut workers = Vec::new();
    for share in deal(files, arguments.processes.get()) {
        workers.push(Worker::start(arguments, &share)?);
    }
    for worker in workers {
        total += worker.finish()?;
    }
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "{} {} files, {} bytes in {seconds:.3} s, {:.1} MB/s; {} mismatches, {} failures",
        if arguments.verify {
            "verified"
        } else {
            "stored"
        },
        total.files,
        total.bytes,
        total.bytes as f64 / 1e6 / seconds,
        total.mismatches,
        total.failures,
    );
    if total.mismatches > 0 || total.failures > 0 {
        bail!(
            "{} of {} files differ, are missing, or could not be handled",
            total.mismatches + total.failures,
            total.files + total.mismatches + total.failures,
        );
    }
    Ok(())
}

/// Deals files to `count` shares so that their bytes come out even: the largest first, each to the lightest share.
/// Empty shares are left out.
fn deal(mut files: Vec<(PathBuf, u64)>, count: usize) -> Vec<Vec<PathBuf>> {
    files.sort_by_key(|(_, length)| std::cmp::Reverse(*length));
    let mut shares = vec![(0, Vec::new()); count];
    for (path, length) in files {
        if let Some((weight, share)) = shares.iter_mut().min_by_key(|(weight, _)| *weight) {
            // A file costs something even when it is empty.
            *weight += length + 4096;
            share.push(path);
        }
    }
    shares
        .into_iter()
        .map(|(_, share)| share)
        .filter(|share| !share.is_empty())
        .collect()
}

/// A worker process. Killed and reaped if the parent gives up before it has finished.
struct Worker(Option<Child>);

impl Worker {
    fn start(arguments: &Load, share: &[PathBuf]) -> Result<Self> {
        let program = std::env::current_exe().context("find this program")?;
        let mut command = Command::new(program);
        command.arg("load-worker");
        connection_arguments(&mut command, &arguments.connection);
        if arguments.verify {
            command.arg("--verify");
        }
        command
            .arg("--")
            .arg(&arguments.directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut worker = Self(Some(command.spawn().context("start a worker process")?));
        let stdin = worker.0.as_mut().and_then(|child| child.stdin.take());
        if let Some(mut stdin) = stdin {
            // The worker reads all of it before it does anything else.
            for path in share {
                stdin
                    .write_all(path.as_os_str().as_bytes())
                    .and_then(|()| stdin.write_all(&[0]))
                    .context("hand files to a worker process")?;
            }
        }
        Ok(worker)
    }

    fn finish(mut self) -> Result<Tally> {
        let Some(child) = self.0.take() else {
            return Ok(Tally::default());
        };
        let output = child
            .wait_with_output()
            .context("wait for a worker process")?;
        if !output.status.success() {
            bail!("a worker process failed: {}", output.status);
        }
        String::from_utf8_lossy(&output.stdout).parse()
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            // It may have ended by itself; either way it is gone afterwards.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn connection_arguments(command: &mut Command, connection: &Connection) {
    command.arg("--server").arg(connection.server.to_string());
    if let Some(device) = &connection.device {
        command.arg("--device").arg(device);
    }
    command.arg("--wait").arg(match connection.wait {
        WaitArgument::Poll => "poll",
        WaitArgument::Event => "event",
    });
    command
        .arg("--timeout")
        .arg(connection.timeout.as_secs_f64().to_string());
}

pub fn worker(arguments: &LoadWorker) -> Result<()> {
    let mut paths = Vec::new();
    for path in io::stdin().lock().split(0) {
        let path = path.context("read the list of files")?;
        paths.push(PathBuf::from(std::ffi::OsString::from_vec(path)));
    }
    let mut client = connect(&arguments.connection)?;
    let mut tally = Tally::default();
    for relative in &paths {
        let path = arguments.directory.join(relative);
        let key = relative.as_os_str().as_bytes();
        let done = if arguments.verify {
            compare(&mut client, key, &path)
        } else {
            FileValue::open(&path)
                .and_then(|source| put_file(&mut client, key, source))
                .map(Compared::Equal)
        };
        match done {
            Ok(Compared::Equal(length)) => {
                tally.files += 1;
                tally.bytes += length as u64;
            }
            Ok(Compared::Different(why)) => {
                eprintln!("mismatch: {}: {why}", path.display());
                tally.mismatches += 1;
            }
            Err(error) => {
                eprintln!("error: {}: {}", path.display(), describe(&error));
                tally.failures += 1;
            }
        }
    }
    println!("{tally}");
    Ok(())
}

enum Compared {
    /// Equal, with so many bytes.
    Equal(usize),
    /// Not, and how.
    Different(String),
}

fn compare(client: &mut Client, key: &[u8], path: &Path) -> Result<Compared> {
    let source = FileValue::open(path)?;
    let mut content = vec![0; source.length()];
    source.read_into(&mut content)?;
    Ok(match client.get(key)? {
        None => Compared::Different("no such key in the store".to_owned()),
        Some(value) if *value == *content => Compared::Equal(content.len()),
        Some(value) => Compared::Different(match first_difference(&value, &content) {
            Some(offset) => format!("first difference at byte {offset}"),
            None => format!(
                "{} bytes stored, {} in the file",
                value.len(),
                content.len()
            ),
        }),
    })
}

fn first_difference(a: &[u8], b: &[u8]) -> Option<usize> {
    a.iter().zip(b).position(|(a, b)| a != b)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tally_survives_being_text() {
        let tally = Tally {
            files: 1,
            bytes: 2,
            mismatches: 3,
            failures: 4,
        };
        assert_eq!(tally.to_string().parse::<Tally>().unwrap(), tally);
        for wrong in ["", "1 2 3", "1 2 3 4 5", "1 2 3 x"] {
            assert!(wrong.parse::<Tally>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn every_file_is_dealt_once_and_evenly() {
        let files: Vec<(PathBuf, u64)> = (0..100)
            .map(|i| (PathBuf::from(i.to_string()), 1000 * i))
            .collect();
        let shares = deal(files, 3);
        let mut dealt: Vec<PathBuf> = shares.concat();
        dealt.sort_by_key(|path| path.to_string_lossy().parse::<u64>().unwrap());
        let all: Vec<PathBuf> = (0..100).map(|i| PathBuf::from(i.to_string())).collect();
        assert_eq!(dealt, all);
        assert!(shares.iter().all(|share| (30..37).contains(&share.len())));
        assert_eq!(deal(vec![(PathBuf::from("x"), 1)], 3).len(), 1);
    }
}
