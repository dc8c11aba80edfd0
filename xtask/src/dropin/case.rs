//! What a case is: which program, how it is run, and what must hold.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::cases::pyverbs::Module;

/// In an argument: the TCP port that is free for the case.
pub const PORT: &str = "{port}";
/// In a client's argument: where the server is.
pub const ADDRESS: &str = "{address}";

/// One program, run in one way.
#[derive(Clone, Debug)]
pub struct Case {
    /// As it is reported, and chosen with `--only`.
    pub name: String,
    /// The Debian package that has the program, or what it is compiled with; or another kind, in parentheses.
    pub package: &'static str,
    /// A program that is installed; the C source of one of ours, a path below the workspace's folder; or a Rust program
    /// of others, as [`super::rust`] names it.
    pub program: &'static str,
    pub run: Run,
    /// Makes the folder in which it runs, below this one; otherwise it runs in this one.
    pub folder: Option<fn(&Path) -> Result<PathBuf>>,
    /// Whether it sees files of the kernel's about the device: see [`super::scenery`].
    pub scenery: bool,
    /// Variables of the environment.
    pub environment: Vec<(&'static str, String)>,
    /// What must hold of what it says, beside that it succeeds: every one, of every process.
    pub holds: Vec<Holds>,
}

/// How a program is run.
#[derive(Clone, Debug)]
pub enum Run {
    /// By itself, with these arguments.
    Alone(Vec<String>),
    /// As a server, which listens at the TCP port [`PORT`] of its arguments, and a client.
    Pair {
        server: Vec<String>,
        client: Vec<String>,
        /// The client's program, where it is another than the server's.
        other: Option<&'static str>,
        place: Place,
        /// The port, of a server whose arguments cannot say it.
        port: Option<u16>,
        /// Whether the server goes on when the client has ended, and is to be stopped.
        stays: bool,
    },
}

/// Where the two of a pair are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Two processes of this host.
    OneHost,
    /// Two hosts, which are network namespaces; takes root.
    TwoHosts,
}

/// Something that must hold of what a program has said.
#[derive(Clone, Copy, Debug)]
pub enum Holds {
    /// It has these words.
    Says(&'static str),
    /// Of a pair, the client's output has them.
    ClientSays(&'static str),
    /// It has a line of a table for each power of two, from the first to the last: the size of messages, in bytes. Of
    /// a pair, the client's output.
    Rows(u32, u32),
    /// It is the output of this module's tests, of which none failed and none was left out but those that are known.
    Module(&'static Module),
}

impl Case {
    /// A program that is run by itself; its name is its command line.
    pub fn alone(package: &'static str, program: &'static str, arguments: &[&str]) -> Self {
        let run = Run::Alone(owned(arguments));
        Self::new(package, program, arguments, run)
    }

    /// A program of which two are run with the same arguments, but that the client has the server's address behind
    /// them; `-p` is what names the port.
    pub fn pair(package: &'static str, program: &'static str, arguments: &[&str]) -> Self {
        let sides: [&[&str]; 2] = [&["-p", PORT], &["-p", PORT, ADDRESS]];
        Self::sides(package, program, arguments, sides)
    }

    /// A program of which two are run with the same arguments and some more, the server's and the client's.
    pub fn sides(
        package: &'static str,
        program: &'static str,
        arguments: &[&str],
        more: [&[&str]; 2],
    ) -> Self {
        let [server, client] = more.map(|more| owned(&[arguments, more].concat()));
        let run = Run::Pair {
            server,
            client,
            other: None,
            place: Place::OneHost,
            port: None,
            stays: false,
        };
        Self::new(package, program, arguments, run)
    }

    fn new(package: &'static str, program: &'static str, arguments: &[&str], run: Run) -> Self {
        Self {
            name: [&[short(program)], arguments].concat().join(" "),
            package,
            program,
            run,
            folder: None,
            scenery: false,
            environment: Vec::new(),
            holds: Vec::new(),
        }
    }

    /// The same between two hosts, which reach each other over TCP.
    pub fn between_hosts(mut self) -> Self {
        if let Run::Pair { place, .. } = &mut self.run {
            *place = Place::TwoHosts;
        }
        self.name += ", two hosts";
        self.with_environment("VERBS_SOFT_LISTEN", "0.0.0.0")
    }

    /// The same with one more variable of the environment.
    pub fn with_environment(mut self, name: &'static str, value: &str) -> Self {
        self.environment.push((name, value.to_owned()));
        self
    }

    /// The same under another name.
    pub fn named(mut self, name: &str) -> Self {
        name.clone_into(&mut self.name);
        self
    }

    /// The same in a folder that this makes.
    pub fn within(mut self, folder: fn(&Path) -> Result<PathBuf>) -> Self {
        self.folder = Some(folder);
        self
    }

    /// The same where there are files of the kernel's about the device; takes root.
    pub fn with_scenery(mut self) -> Self {
        self.scenery = true;
        self
    }

    /// The same with another program as the client.
    pub fn client_is(mut self, program: &'static str) -> Self {
        if let Run::Pair { other, .. } = &mut self.run {
            *other = Some(program);
        }
        self
    }

    /// The same with a server that listens at this port, whatever it is told.
    pub fn at_port(mut self, number: u16) -> Self {
        if let Run::Pair { port, .. } = &mut self.run {
            *port = Some(number);
        }
        self
    }

    /// The same with a server that does not end by itself.
    pub fn server_stays(mut self) -> Self {
        if let Run::Pair { stays, .. } = &mut self.run {
            *stays = true;
        }
        self
    }

    /// One more thing that must hold.
    pub fn holds(mut self, what: Holds) -> Self {
        self.holds.push(what);
        self
    }
}

impl Holds {
    /// Whether it is for servers, too.
    pub fn is_for_servers(self) -> bool {
        !matches!(self, Self::Rows(..) | Self::ClientSays(_))
    }

    /// Why it does not hold of this output, if so.
    pub fn wrong_with(self, output: &str) -> Option<String> {
        match self {
            Self::Says(words) | Self::ClientSays(words) => {
                (!output.contains(words)).then(|| format!("it does not say {words:?}"))
            }
            Self::Rows(first, last) => {
                let row = |line: &str| {
                    let mut words = line.split_whitespace();
                    let size = words.next()?.parse::<u64>().ok()?;
                    let iterations = words.next()?.parse::<u64>();
                    iterations.is_ok().then_some(size)
                };
                let rows: Vec<u64> = output.lines().filter_map(row).collect();
                let wanted: Vec<u64> = (first..=last).map(|power| 1 << power).collect();
                (rows != wanted).then(|| format!("it has lines for {rows:?}, and not {wanted:?}"))
            }
            Self::Module(module) => module.wrong_with(output),
        }
    }
}

/// What is behind the last slash.
fn short(program: &str) -> &str {
    program.rsplit('/').next().unwrap_or(program)
}

fn owned(arguments: &[&str]) -> Vec<String> {
    arguments
        .iter()
        .map(|argument| (*argument).to_owned())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_named_by_its_command_line() {
        let case = Case::pair("package", "program", &["-g", "0"]).between_hosts();
        assert_eq!(case.name, "program -g 0, two hosts");
        let Run::Pair {
            server,
            client,
            place,
            ..
        } = case.run
        else {
            panic!("not a pair");
        };
        assert_eq!(server, ["-g", "0", "-p", "{port}"]);
        assert_eq!(client, ["-g", "0", "-p", "{port}", "{address}"]);
        assert_eq!(place, Place::TwoHosts);
    }

    #[test]
    fn words_that_are_missing_are_named() {
        assert_eq!(Holds::Says("soft0").wrong_with("... soft0 ..."), None);
        let wrong = Holds::Says("soft0").wrong_with("mlx5_0");
        assert_eq!(wrong.as_deref(), Some("it does not say \"soft0\""));
    }

    #[test]
    fn lines_that_are_missing_are_named() {
        let output = " #bytes #iterations\n 2  100  0.5\n4 100 0.5\n port 4\n";
        assert_eq!(Holds::Rows(1, 2).wrong_with(output), None);
        let wrong = Holds::Rows(1, 3).wrong_with(output);
        assert_eq!(
            wrong.as_deref(),
            Some("it has lines for [2, 4], and not [2, 4, 8]")
        );
    }
}
