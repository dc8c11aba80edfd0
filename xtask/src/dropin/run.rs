//! Running a case.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::{ADDRESS, Case, PORT, Place, Run};
use super::claim::Claim;
use super::process::{self, Started};
use super::rust;
use super::sanitizer::Sanitizer;
use super::scenery;
use crate::dist::{self, SEARCH_PATH};
use crate::hosts::Hosts;
use crate::workspace::Workspace;

/// How long a case may take: minutes, where others want the processors, too.
const PATIENCE: Duration = Duration::from_secs(300);

/// What the loader says where a library has not the versions that a program asks for.
const NO_VERSIONS: &str = "no version information";

/// In front of what is told of a server.
const SERVER: &str = "the server: ";

/// What all cases share.
pub struct Bed<'a> {
    workspace: &'a Workspace,
    /// The folder of the libraries.
    libraries: PathBuf,
    logs: PathBuf,
    sanitizer: Option<&'a Sanitizer>,
    /// Those that no case has had.
    ports: Range<u16>,
    /// Made for the first case that needs them.
    hosts: Option<Hosts<'a>>,
}

impl<'a> Bed<'a> {
    /// Programs find the libraries in this folder.
    pub fn new(
        workspace: &'a Workspace,
        libraries: PathBuf,
        sanitizer: Option<&'a Sanitizer>,
    ) -> Result<Self> {
        let logs = workspace.target.join("dropin");
        fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
        Ok(Self {
            workspace,
            libraries,
            logs,
            sanitizer,
            ports: 21_000..32_000,
            hosts: None,
        })
    }

    /// Runs a case, and gives what the program has said, of a pair the client. An error says why it failed.
    pub fn run(&mut self, case: &Case) -> Result<String> {
        let deadline = || Instant::now() + PATIENCE;
        let outputs = match &case.run {
            Run::Alone(arguments) => {
                let program = self.program(case.program, case.package)?;
                let command = self.command(case, &program, arguments, None)?;
                let mut started = Started::new(command, self.logs.join("alone.txt"))?;
                vec![("", started.succeed(deadline())?)]
            }
            Run::Pair { .. } => self.run_pair(case, deadline())?,
        };
        for (who, output) in &outputs {
            let wrong = output
                .contains(NO_VERSIONS)
                .then(|| "the loader misses versions".to_owned());
            let mut wrong = wrong.into_iter().chain(
                case.holds
                    .iter()
                    .filter(|holds| *who != SERVER || holds.is_for_servers())
                    .filter_map(|holds| holds.wrong_with(output)),
            );
            if let Some(why) = wrong.next() {
                bail!("{who}{why}; it said: {output}");
            }
        }
        let first = outputs.into_iter().next();
        Ok(first.map(|(_, output)| output).unwrap_or_default())
    }

    /// Where a program is. One of ours is compiled, and so are Rust programs of others.
    fn program(&self, name: &str, package: &str) -> Result<PathBuf> {
        if name.starts_with(rust::SCHEME) {
            return rust::build(self.workspace, name);
        }
        let Some(stem) = name.strip_suffix(".c") else {
            process::check(name, package)?;
            return Ok(name.into());
        };
        let stem = stem.rsplit('/').next().unwrap_or(stem);
        self.compile(name, stem, &["-lrdmacm", "-libverbs", "-lpthread"])
            .with_context(|| format!("that takes Debian's package {package}"))
    }

    /// Compiles a C source, a path below the workspace's folder.
    pub fn compile(&self, source: &str, out: &str, more: &[&str]) -> Result<PathBuf> {
        let (from, out) = (self.workspace.root.join(source), self.logs.join(out));
        let compiled = Command::new("cc")
            .args([
                "-std=gnu11",
                "-O1",
                "-g",
                "-Wall",
                "-Wextra",
                "-Werror",
                "-o",
            ])
            .args([&out, &from])
            .args(more)
            .output()
            .context("no C compiler, `cc`")?;
        if !compiled.status.success() {
            let said = String::from_utf8_lossy(&compiled.stderr);
            bail!("cannot compile {source}: {said}");
        }
        Ok(out)
    }

    /// A port that is free now: a new one for each case, none of those that the kernel gives to connections, which keep
    /// them for a minute after their end, and none of the software device's.
    fn free_port(&mut self) -> Result<Claim> {
        loop {
            let port = self.ports.next().context("all ports have been used")?;
            if let Ok(claim) = Claim::of(port)
                && TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok()
            {
                return Ok(claim);
            }
        }
    }

    fn run_pair(&mut self, case: &Case, deadline: Instant) -> Result<Vec<(&'static str, String)>> {
        let Run::Pair {
            server,
            client,
            other,
            place,
            port,
            stays,
        } = &case.run
        else {
            bail!("it is no pair");
        };
        let programs = [
            self.program(case.program, case.package)?,
            self.program(other.unwrap_or(case.program), case.package)?,
        ];
        let (networks, address) = match place {
            Place::OneHost => ([None, None], Ipv4Addr::LOCALHOST.to_string()),
            Place::TwoHosts => {
                let hosts = self.hosts()?;
                let names = [hosts.first(), hosts.second()].map(|name| Some(name.to_owned()));
                (names, Hosts::ADDRESSES[0].to_owned())
            }
        };
        let claim = match port {
            Some(port) => Claim::wait_for(*port, deadline)?,
            None => self.free_port()?,
        };
        let port = claim.port()?;
        let filled = |arguments: &[String]| -> Vec<String> {
            let number = port.to_string();
            let fill = |argument: &String| {
                let argument = argument.replace(PORT, &number);
                argument.replace(ADDRESS, &address)
            };
            arguments.iter().map(fill).collect()
        };
        let [first, second] = networks;
        let command = self.command(case, &programs[0], &filled(server), first.as_deref())?;
        let mut server = Started::new(command, self.logs.join("server.txt"))?;
        server
            .await_listening(port, deadline)
            .context("the server")?;
        let command = self.command(case, &programs[1], &filled(client), second.as_deref())?;
        let mut client = Started::new(command, self.logs.join("client.txt"))?;
        let said = client.succeed(deadline).context("the client");
        // Where both fail, what the server says may be the reason.
        let said = said.with_context(|| format!("(the server so far: {})", server.output()))?;
        let answered = if *stays {
            server.stop()
        } else {
            server.succeed(deadline)
        };
        let answered = answered.context("the server")?;
        Ok(vec![("the client: ", said), (SERVER, answered)])
    }

    /// A program with the libraries in front, in the network namespace of this name if there is one.
    fn command(
        &self,
        case: &Case,
        program: &Path,
        arguments: &[String],
        network: Option<&str>,
    ) -> Result<Command> {
        let mut command = match network {
            None => Command::new(program),
            Some(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name]).arg(program);
                command
            }
        };
        command.args(arguments);
        if case.scenery {
            command = scenery::before(&command, &self.logs)?;
        }
        let folder = match case.folder {
            None => self.logs.clone(),
            Some(make) => make(&self.logs)?,
        };
        command
            .env(SEARCH_PATH, dist::search_path(&self.libraries)?)
            .envs(case.environment.iter().cloned())
            .current_dir(folder);
        if let Some(sanitizer) = self.sanitizer {
            sanitizer.load(&mut command);
        }
        Ok(command)
    }

    fn hosts(&mut self) -> Result<&Hosts<'a>> {
        Ok(match &mut self.hosts {
            Some(hosts) => hosts,
            none => none.insert(Hosts::new(self.workspace)?),
        })
    }
}
