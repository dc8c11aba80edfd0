//! Runs UCX's own measuring program, `ucx_perftest`, as two processes of this host.
//!
//! Each test is many short runs in a batch, of which one that few are shorter than counts: a run during which one side lost
//! its processor would otherwise be the figure, as UCX's are means.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use super::Figures;
use crate::machine::Processors;
use crate::statistics::quantile;

/// The transports: memory that both processes map, and copies by the kernel.
const TRANSPORTS: &str = "posix,cma";
/// Which of the runs counts, from the shortest on: as for our own tests.
const COUNTS: f64 = 0.1;
/// How long a test may take: some thousand times what it should.
const PATIENCE: Duration = Duration::from_secs(120);
/// Between two looks at what cannot be waited for.
const LOOK: Duration = Duration::from_millis(2);

/// The installed program.
#[derive(Clone, Debug)]
pub struct Ucx {
    program: PathBuf,
    /// This program, which has the role of [`crate::process::follow`].
    launcher: PathBuf,
    processors: Processors,
}

impl Ucx {
    /// Looks for `program`, in PATH if it is a bare name; `None` where there is none. `launcher` is the
    /// file of this program.
    ///
    /// # Errors
    /// It is there and cannot be started.
    pub fn find(program: &Path, launcher: &Path, processors: Processors) -> Result<Option<Self>> {
        let help = Command::new(program).arg("-h").output();
        match help {
            Ok(_) => Ok(Some(Self {
                program: program.to_owned(),
                launcher: launcher.to_owned(),
                processors,
            })),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error).context(format!("cannot start {}", program.display())),
        }
    }

    /// Runs the test that `arguments` tell `runs` times: `ns`, nanoseconds of one operation, what a tenth of the runs do
    /// not exceed.
    ///
    /// # Errors
    /// Either side cannot be started, failed, or takes minutes; the error has what it printed.
    pub fn run(&self, arguments: &str, runs: usize) -> Result<Figures> {
        let folder = tempfile::tempdir().context("cannot make a folder for UCX's batch")?;
        let batch = folder.path().join("batch");
        let mut lines = String::new();
        for run in 0..runs {
            // Writing to a string does not fail.
            let _ = writeln!(lines, "{run} -t {arguments}");
        }
        fs::write(&batch, lines).context("cannot write UCX's batch")?;

        let port = free_port()?.to_string();
        let Processors { client, server } = self.processors;
        let start = |name, processor: usize, address: Option<&str>| {
            let mut command = Command::new(&self.launcher);
            command
                .arg("follow")
                .arg(&self.program)
                .env("UCX_TLS", TRANSPORTS)
                .args(address)
                .args(["-p", &port, "-c", &processor.to_string(), "-f", "-v", "-b"])
                .arg(&batch);
            Side::start(name, &mut command, &folder)
        };
        let deadline = Instant::now() + PATIENCE;
        let mut server = start("server", server, None)?;
        while !listening(&port)? {
            server.check(deadline)?;
            sleep(LOOK);
        }
        let mut client = start("client", client, Some("127.0.0.1"))?;
        while client.check(deadline)?.is_none() {
            server.check(deadline)?;
            sleep(LOOK);
        }
        while server.check(deadline)?.is_none() {
            sleep(LOOK);
        }
        let printed = client.printed();
        let times = times(&printed)
            .with_context(|| format!("ucx_perftest -t {arguments} printed {printed:?}"))?;
        let ns = quantile(times, COUNTS).context("no figures")?;
        Ok(Figures::from([("ns".to_owned(), ns)]))
    }
}

/// A port that nobody has at this moment.
fn free_port() -> Result<u16> {
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("no free port")?;
    Ok(free.local_addr()?.port())
}

/// Whether somebody listens at the port. A try to connect would be taken for the client.
fn listening(port: &str) -> Result<bool> {
    let port: u16 = port.parse()?;
    let table = fs::read_to_string("/proc/net/tcp").context("cannot read /proc/net/tcp")?;
    Ok(is_listening(&table, port))
}

/// Whether a table as in proc_net(5) has a listening socket with the port.
fn is_listening(table: &str, port: u16) -> bool {
    const LISTEN: &str = "0A";
    let address = format!(":{port:04X}");
    table.lines().any(|line| {
        let mut fields = line.split_whitespace().skip(1);
        let local = fields.next().unwrap_or_default();
        local.ends_with(&address) && fields.nth(1) == Some(LISTEN)
    })
}

/// One of the two processes. Dropping it ends it.
struct Side {
    name: &'static str,
    child: Child,
    output: PathBuf,
}

impl Side {
    fn start(name: &'static str, command: &mut Command, folder: &TempDir) -> Result<Self> {
        // A file takes all at once, where a pipe nobody reads would fill.
        let output = folder.path().join(name);
        let file = File::create(&output).context("cannot make a file for UCX's output")?;
        let child = command
            .stdin(Stdio::null())
            .stderr(file.try_clone()?)
            .stdout(file)
            .spawn()
            .with_context(|| format!("cannot start UCX's {name}"))?;
        Ok(Self {
            name,
            child,
            output,
        })
    }

    fn printed(&self) -> String {
        let bytes = fs::read(&self.output).unwrap_or_default();
        String::from_utf8_lossy(&bytes).trim().to_owned()
    }

    /// Whether it has ended, well; an error if it failed or is late.
    fn check(&mut self, deadline: Instant) -> Result<Option<ExitStatus>> {
        let ended = self.child.try_wait()?;
        let how = match ended {
            Some(status) if !status.success() => format!("ended with {status}"),
            None if Instant::now() >= deadline => format!("takes longer than {PATIENCE:?}"),
            _ => return Ok(ended),
        };
        bail!("UCX's {} {how}: {}", self.name, self.printed());
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // Where it has ended and is reaped, both do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Nanoseconds of one operation in each run of what the client prints with `-f -v`.
///
/// The rate is what has all digits: the latency, which is its inverse, is rounded to nanoseconds.
fn times(printed: &str) -> Result<Vec<f64>> {
    const RATE: &str = "overall_mr";
    let mut lines = printed.lines().map(|line| line.split(',').map(str::trim));
    let (column, columns) = lines
        .find_map(|mut header| {
            let columns = header.clone().count();
            Some((header.position(|name| name == RATE)?, columns))
        })
        .with_context(|| format!("no header with {RATE}"))?;
    let times = lines.map(|mut row| {
        let whole = row.clone().count() == columns;
        let rate = row.nth(column).and_then(|rate| rate.parse::<f64>().ok());
        let rate = rate.filter(|rate| whole && *rate > 0.0 && rate.is_finite());
        rate.map(|rate| 1e9 / rate).context("a line has no rate")
    });
    let times: Vec<f64> = times.collect::<Result<_>>()?;
    if times.is_empty() {
        bail!("a header and no runs");
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: &str = "batch,iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr";

    #[test]
    fn each_run_gives_the_time_of_an_operation() {
        let text = format!(
            "{HEADER}\n0,200000,0.028,0.189,0.189,40.35,40.35,5289294,5000000\n1,1,1,1,1,1,1,1,2e6"
        );
        assert_eq!(times(&text).unwrap(), [200.0, 500.0]);
        // One test, without a batch, has a column less.
        let text = "iterations,overall_mr\n100,1000000\n";
        assert_eq!(times(text).unwrap(), [1000.0]);
    }

    #[test]
    fn what_is_no_figure_is_an_error() {
        let row = "0,200000,0.028,0.189,0.189,40.35,40.35,5289294";
        for text in [
            String::new(),
            "Waiting for connection...".into(),
            HEADER.into(),
            format!("{row},1000"),
            format!("{HEADER}\n{row}"),
            format!("{HEADER}\n{row},fast"),
            format!("{HEADER}\n{row},0"),
            format!("{HEADER}\n{row},-1"),
            format!("{HEADER}\n{row},inf"),
            format!("{HEADER}\n{row},1000,1"),
            format!("{HEADER}\n{row},1000\nwarning"),
        ] {
            assert!(times(&text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_listening_socket_is_told_from_others() {
        let table = "  sl  local_address rem_address   st\n   0: 00000000:3440 00000000:0000 0A 0:0\n   \
             1: 0100007F:3441 0100007F:3440 01 0:0\n";
        assert!(is_listening(table, 0x3440));
        assert!(!is_listening(table, 0x3441));
        assert!(!is_listening(table, 0x3442));
        assert!(!is_listening("", 1));
        let here = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = here.local_addr().unwrap().port().to_string();
        assert!(listening(&port).unwrap());
    }

    #[test]
    fn a_program_that_is_not_there_is_no_error() {
        let (none, us) = (Path::new("/nonexistent/ucx_perftest"), Path::new("/bin/sh"));
        let processors = Processors {
            client: 0,
            server: 0,
        };
        assert!(Ucx::find(none, us, processors).unwrap().is_none());
        assert!(Ucx::find(us, us, processors).unwrap().is_some());
        // There, and no program.
        assert!(Ucx::find(Path::new("/"), us, processors).is_err());
    }

    #[test]
    fn dropping_a_side_ends_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut command = Command::new("sleep");
        let side = Side::start("server", command.arg("1000"), &folder).unwrap();
        let process = PathBuf::from(format!("/proc/{}", side.child.id()));
        assert!(process.exists());
        drop(side);
        assert!(!process.exists());
    }
}
