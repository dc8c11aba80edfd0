//! The launcher (virtme-ng, from PyPI) and the emulated machine it boots.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use xshell::{Shell, cmd};

use super::guest::{self, Step};

/// Newer ones may change options; a change of version is a change to test.
const LAUNCHER_VERSION: &str = "1.42";

/// Emulated on a busy machine a boot takes half a minute; one that takes this long hangs.
const BOOT_LIMIT: Duration = Duration::from_secs(300);

/// How often the guest's logs are looked at.
const POLL: Duration = Duration::from_millis(200);

/// Installs virtme-ng into a Python environment of its own, unless it is there, and returns the
/// path of its program.
pub fn install_launcher(sh: &Shell, folder: &Path) -> Result<PathBuf> {
    let environment = folder.join(format!("virtme-ng-{LAUNCHER_VERSION}"));
    let program = environment.join("bin").join("vng");
    // An environment whose Python has gone, or a half-made one, does not answer.
    let works = cmd!(sh, "{program} --version")
        .quiet()
        .ignore_stdout()
        .ignore_stderr()
        .run()
        .is_ok();
    if !works {
        cmd!(sh, "python3 -m venv --clear {environment}").run()?;
        let pip = environment.join("bin").join("pip");
        let requirement = format!("virtme-ng=={LAUNCHER_VERSION}");
        cmd!(sh, "{pip} install --quiet --retries 10 {requirement}").run()?;
    }
    Ok(program)
}

/// A machine to boot.
pub struct Machine {
    /// The path of `vng`.
    pub launcher: PathBuf,
    /// The kernel image.
    pub kernel: PathBuf,
    /// In QEMU's notation.
    pub memory: String,
    /// How many processors it has.
    pub cpus: u32,
    /// The launcher's home folder: keeps it from the user's settings and caches.
    pub home: PathBuf,
}

impl Machine {
    /// Boots, runs the script in `results`, shows the logs of `steps` as they grow, and returns the
    /// launcher's exit status when the machine is off. It is switched off when `limit` for the steps, and the time a boot may
    /// take, are over.
    pub fn run(
        &self,
        sh: &Shell,
        results: &Path,
        steps: &[Step],
        limit: Duration,
    ) -> Result<ExitStatus> {
        sh.create_dir(&self.home)?;
        let pid_file = results.join("qemu.pid");
        let console = results.join(guest::CONSOLE);
        let console =
            File::create(&console).with_context(|| format!("create {}", console.display()))?;
        let mut child = self
            .command(results, &pid_file)?
            .stdin(Stdio::null())
            .stdout(console.try_clone()?)
            .stderr(console)
            .spawn()
            .with_context(|| format!("start {}", self.launcher.display()))?;

        let began = Instant::now();
        let mut logs = Logs::new(results, steps);
        loop {
            let ended = child.try_wait()?;
            let started = logs.show()?;
            if let Some(status) = ended {
                return Ok(status);
            }
            let elapsed = began.elapsed();
            if elapsed > BOOT_LIMIT + limit || (!started && elapsed > BOOT_LIMIT) {
                switch_off(sh, &mut child, &pid_file)?;
                logs.show()?;
                bail!(
                    "the guest was stopped after {} s {}; its console and logs are in {}",
                    elapsed.as_secs(),
                    if started { "of work" } else { "without a sign" },
                    results.display()
                );
            }
            std::thread::sleep(POLL);
        }
    }

    fn command(&self, results: &Path, pid_file: &Path) -> Result<Command> {
        for path in [results, self.kernel.as_path()] {
            // The launcher splits a command line of its own making.
            let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
            ensure!(
                path.to_str().is_some_and(|text| text.chars().all(plain)),
                "the emulator's launcher cannot take the path {}: only letters, digits and ._-+",
                path.display()
            );
        }
        // The launcher finds its other half by PATH, as if its environment were activated.
        let programs = self.launcher.parent().map(Path::to_owned);
        let others = std::env::var_os("PATH").unwrap_or_default();
        let path = std::env::join_paths(programs.into_iter().chain(std::env::split_paths(&others)))
            .context("extend PATH")?;
        let mut command = Command::new(&self.launcher);
        command
            .env("PATH", path)
            .env("HOME", &self.home)
            // KVM may exist and not work; 9p needs no daemon on the host.
            .args(["--verbose", "--disable-kvm", "--force-9p", "--user", "root"])
            .args(["--memory", &self.memory, "--cpus", &self.cpus.to_string()])
            .arg("--run")
            .arg(&self.kernel)
            .arg(format!("--rwdir={}", results.display()))
            .arg(format!("--qemu-opts=-pidfile {}", pid_file.display()))
            // A guest that crashes beyond saying so leaves its registers.
            .arg(format!(
                "--qemu-opts=-d cpu_reset -D {}",
                results.join("emulator.log").display()
            ))
            .arg("--exec")
            .arg(results.join(guest::SCRIPT));
        Ok(command)
    }
}

/// Ends the emulator, by its own process id, and then the launcher that waits for it.
fn switch_off(sh: &Shell, child: &mut Child, pid_file: &Path) -> Result<()> {
    if let Ok(pid) = fs::read_to_string(pid_file) {
        let pid = pid.trim();
        // It may have ended by itself at this moment.
        let _ = cmd!(sh, "bash -c")
            .arg(format!("kill -KILL {pid}"))
            .quiet()
            .run();
    }
    // With the emulator gone the launcher tidies up and ends, unless it hangs itself.
    let patience = Instant::now() + Duration::from_secs(10);
    while child.try_wait()?.is_none() && Instant::now() < patience {
        std::thread::sleep(POLL);
    }
    // No error if it has ended.
    child.kill()?;
    child.wait()?;
    Ok(())
}

/// The guest's logs, shown in order as they grow.
struct Logs {
    files: Vec<(String, PathBuf)>,
    current: usize,
    offset: u64,
}

impl Logs {
    fn new(results: &Path, steps: &[Step]) -> Self {
        let script = (guest::LOG.to_owned(), results.join(guest::LOG));
        let steps = steps
            .iter()
            .map(|step| (step.name.clone(), results.join(step.log())));
        Self {
            files: std::iter::once(script).chain(steps).collect(),
            current: 0,
            offset: 0,
        }
    }

    /// Shows what is new; says whether the guest has written anything yet.
    fn show(&mut self) -> Result<bool> {
        loop {
            // A later log exists only when this one is complete.
            let complete =
                (self.files.get(self.current + 1)).is_some_and(|(_, next)| next.exists());
            let (name, path) = &self.files[self.current];
            if let Ok(mut file) = File::open(path) {
                if self.offset == 0 && file.metadata()?.len() > 0 {
                    println!("\n== guest: {name}");
                }
                file.seek(SeekFrom::Start(self.offset))?;
                let mut bytes = Vec::new();
                file.read_to_end(&mut bytes)?;
                self.offset += bytes.len() as u64;
                let mut out = io::stdout().lock();
                out.write_all(&bytes)?;
                out.flush()?;
            }
            if !complete {
                return Ok(self.current > 0 || self.offset > 0);
            }
            self.current += 1;
            self.offset = 0;
        }
    }
}
