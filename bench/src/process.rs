//! Client and server as processes of their own, driven by lines of JSON through their standard
//! input and output.
//!
//! A worker answers each line with one line and ends when its input does.

use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process, set_parent_process_death_signal};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// How long a worker may take to end once its input has.
const GRACE: Duration = Duration::from_secs(10);

/// A child process that runs one of this program's roles. Dropping it ends it.
#[derive(Debug)]
pub struct Worker {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
    paused: bool,
}

impl Worker {
    /// Starts `program` with `arguments`, and with the variables of `environment` set, or removed
    /// where they have no value; `name` is for messages.
    ///
    /// # Errors
    /// It cannot be started.
    pub fn start(
        program: &Path,
        name: &str,
        arguments: impl IntoIterator<Item = String>,
        environment: &[(&str, Option<&str>)],
    ) -> Result<Self> {
        let mut command = Command::new(program);
        for (variable, value) in environment {
            match value {
                Some(value) => command.env(variable, value),
                None => command.env_remove(variable),
            };
        }
        let mut child = command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {name} ({})", program.display()))?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            bail!("{name} has no standard input or output");
        };
        Ok(Self {
            name: name.to_owned(),
            child,
            input: Some(input),
            output: BufReader::new(output),
            paused: false,
        })
    }

    /// Sends `command` and waits for the answer.
    ///
    /// # Errors
    /// The worker answered with an error, or ended.
    pub fn ask<C: Serialize, A: DeserializeOwned>(&mut self, command: &C) -> Result<A> {
        self.resume();
        self.exchange(command)
            .with_context(|| format!("{} failed", self.name))?
            .map_err(|error| anyhow!("{}: {error}", self.name))
    }

    fn exchange<C: Serialize, A: DeserializeOwned>(
        &mut self,
        command: &C,
    ) -> Result<Result<A, String>> {
        let mut line = serde_json::to_string(command)?;
        line.push('\n');
        let sent = match &mut self.input {
            Some(input) => input.write_all(line.as_bytes()),
            None => bail!("its input is closed"),
        };
        line.clear();
        let read = self.output.read_line(&mut line)?;
        if read == 0 {
            bail!("it ended: {}", self.child.wait()?);
        }
        sent.context("it does not read its input")?;
        serde_json::from_str(&line).with_context(|| format!("answered {line:?}"))
    }

    /// Stops the process (SIGSTOP) until [`Worker::resume`] or the next command, so that it takes
    /// no core while others are measured.
    pub fn pause(&mut self) {
        self.paused = self.signal(Signal::STOP) || self.paused;
    }

    /// Undoes [`Worker::pause`].
    pub fn resume(&mut self) {
        if self.paused {
            self.paused = !self.signal(Signal::CONT);
        }
    }

    fn signal(&self, signal: Signal) -> bool {
        let pid = Pid::from_raw(self.child.id().cast_signed());
        pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
    }

    /// Ends the process by closing its input.
    ///
    /// # Errors
    /// It does not end within some seconds (then it is killed), or ends with an error.
    pub fn finish(mut self) -> Result<()> {
        let status = self.close()?;
        if !status.success() {
            bail!("{} ended with {status}", self.name);
        }
        Ok(())
    }

    fn close(&mut self) -> Result<ExitStatus> {
        self.resume();
        self.input = None;
        let deadline = Instant::now() + GRACE;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= deadline {
                self.child.kill()?;
                self.child.wait()?;
                bail!("{} did not end within {GRACE:?}: killed", self.name);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // After `finish` the process is gone and reaped: both calls do nothing.
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

/// Answers the lines of standard input until it ends: the other side of [`Worker::ask`].
///
/// # Errors
/// A line is no command, or standard output is gone.
pub fn answer<C: DeserializeOwned, A: Serialize>(
    mut handle: impl FnMut(C) -> Result<A>,
) -> Result<()> {
    // Whoever kills the driver kills its workers, stopped ones too.
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("cannot follow the driver's death")?;
    let mut output = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let command = serde_json::from_str(&line?).context("not a command")?;
        let answer = handle(command).map_err(|error| format!("{error:#}"));
        serde_json::to_writer(&mut output, &answer)?;
        output.write_all(b"\n")?;
        output.flush()?;
    }
    Ok(())
}

/// Becomes `program`, which is then killed when whoever started this process ends. For programs that
/// are not ours and would wait for ever.
///
/// # Errors
/// It cannot be started; there is no return otherwise.
pub fn follow(program: &Path, arguments: &[OsString]) -> Result<()> {
    // Kept through execve(2).
    set_parent_process_death_signal(Some(Signal::KILL))
        .context("cannot follow the driver's death")?;
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot start {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A worker that is a shell script.
    fn script(text: &str) -> Worker {
        let arguments = ["-c", text].map(str::to_owned);
        Worker::start(Path::new("/bin/sh"), "script", arguments, &[]).unwrap()
    }

    #[test]
    fn answers_and_errors_come_back() {
        let mut worker = script(r#"while read -r line; do echo "$line"; done"#);
        let answer: u32 = worker.ask(&serde_json::json!({"Ok": 7})).unwrap();
        assert_eq!(answer, 7);
        let error = worker
            .ask::<_, u32>(&serde_json::json!({"Err": "no such key"}))
            .unwrap_err();
        assert_eq!(error.to_string(), "script: no such key");
        worker.pause();
        let answer: u32 = worker.ask(&serde_json::json!({"Ok": 8})).unwrap();
        assert_eq!(answer, 8);
        worker.pause();
        worker.finish().unwrap();
    }

    #[test]
    fn an_ended_worker_is_an_error() {
        let mut worker = script("exit 3");
        let error = format!("{:#}", worker.ask::<_, u32>(&1).unwrap_err());
        assert!(error.contains("script failed"), "{error}");
        assert!(error.contains("exit status: 3"), "{error}");
        assert!(script("exit 3").finish().is_err());
        assert!(script("read -r line").finish().is_err());
    }

    #[test]
    fn a_stopped_worker_can_be_dropped() {
        let mut worker = script("cat");
        worker.pause();
        drop(worker);
    }
}
