//! Running a case.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use super::case::{ADDRESS, Case, PORT, Place, Run};
use super::process::{self, Started};
use super::scenery;
use crate::dist::{self, SEARCH_PATH};
use crate::hosts::Hosts;
use crate::workspace::Workspace;

/// How long a case may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// What the loader says where a library has not the versions that a program asks for.
const NO_VERSIONS: &str = "no version information";

/// What all cases share.
pub struct Bed<'a> {
    workspace: &'a Workspace,
    /// The folder of the libraries.
    libraries: PathBuf,
    logs: PathBuf,
    /// Made for the first case that needs them.
    hosts: Option<Hosts<'a>>,
}

impl<'a> Bed<'a> {
    /// Programs find the libraries in this folder.
    pub fn new(workspace: &'a Workspace, libraries: PathBuf) -> Result<Self> {
        let logs = workspace.target.join("dropin");
        fs::create_dir_all(&logs).with_context(|| format!("cannot make {}", logs.display()))?;
        Ok(Self {
            workspace,
            libraries,
            logs,
            hosts: None,
        })
    }

    /// Runs a case: an error says why it failed.
    pub fn run(&mut self, case: &Case) -> Result<()> {
        process::check(case.program, case.package)?;
        let deadline = Instant::now() + PATIENCE;
        let outputs = match &case.run {
            Run::Alone(arguments) => {
                let command = self.command(case, arguments, None)?;
                let mut started = Started::new(command, self.logs.join("alone.txt"))?;
                vec![("", started.succeed(deadline)?)]
            }
            Run::Pair {
                server,
                client,
                place,
            } => self.run_pair(case, [server, client], *place, deadline)?,
        };
        for (who, output) in outputs {
            let wrong = output
                .contains(NO_VERSIONS)
                .then(|| "the loader misses versions".to_owned());
            let mut wrong = wrong.into_iter().chain(
                case.holds
                    .iter()
                    .filter_map(|holds| holds.wrong_with(&output)),
            );
            if let Some(why) = wrong.next() {
                bail!("{who}{why}; it said: {output}");
            }
        }
        Ok(())
    }

    fn run_pair(
        &mut self,
        case: &Case,
        [server, client]: [&[String]; 2],
        place: Place,
        deadline: Instant,
    ) -> Result<Vec<(&'static str, String)>> {
        let (networks, address) = match place {
            Place::OneHost => ([None, None], Ipv4Addr::LOCALHOST.to_string()),
            Place::TwoHosts => {
                let hosts = self.hosts()?;
                let names = [hosts.first(), hosts.second()].map(|name| Some(name.to_owned()));
                (names, Hosts::ADDRESSES[0].to_owned())
            }
        };
        // Free a moment ago, and nobody else on this host asks for it.
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
            .local_addr()?
            .port();
        let filled = |arguments: &[String]| -> Vec<String> {
            let number = port.to_string();
            let fill = |argument: &String| {
                let argument = argument.replace(PORT, &number);
                argument.replace(ADDRESS, &address)
            };
            arguments.iter().map(fill).collect()
        };
        let [first, second] = networks;
        let command = self.command(case, &filled(server), first.as_deref())?;
        let mut server = Started::new(command, self.logs.join("server.txt"))?;
        server
            .await_listening(port, deadline)
            .context("the server")?;
        let command = self.command(case, &filled(client), second.as_deref())?;
        let mut client = Started::new(command, self.logs.join("client.txt"))?;
        let said = client.succeed(deadline).context("the client");
        // Where both fail, what the server says may be the reason.
        let said = said.with_context(|| format!("(the server so far: {})", server.output()))?;
        let answered = server.succeed(deadline).context("the server")?;
        Ok(vec![("the client: ", said), ("the server: ", answered)])
    }

    /// A program with the libraries in front, in the network namespace of this name if there is one.
    fn command(&self, case: &Case, arguments: &[String], network: Option<&str>) -> Result<Command> {
        let mut command = match network {
            None => Command::new(case.program),
            Some(name) => {
                let mut command = Command::new("ip");
                command.args(["netns", "exec", name, case.program]);
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
            .envs(case.environment.iter().copied())
            .current_dir(folder);
        Ok(command)
    }

    fn hosts(&mut self) -> Result<&Hosts<'a>> {
        Ok(match &mut self.hosts {
            Some(hosts) => hosts,
            none => none.insert(Hosts::new(self.workspace)?),
        })
    }
}
