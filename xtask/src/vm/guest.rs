//! What happens inside the guest: a script written here, and the results it leaves.
//!
//! The guest's console mixes kernel messages with output, so the script writes files: `guest.log`,
//! one log for each step, `steps` (exit status, seconds and name, one step a line), `kernel.log`,
//! and `done` at the very end.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// The RDMA device in the guest.
pub const DEVICE: &str = "rxe0";

/// The script's name in the results folder.
pub const SCRIPT: &str = "guest.sh";

/// The log of the script itself.
pub const LOG: &str = "guest.log";

/// The guest's console: kernel messages and the launcher's.
pub const CONSOLE: &str = "console.log";

/// One command to run in the guest.
pub struct Step {
    /// Names its log.
    pub name: String,
    /// Where it runs.
    pub directory: PathBuf,
    /// The program and its arguments.
    pub command: Vec<String>,
    /// When to stop it.
    pub limit: Duration,
}

impl Step {
    /// The log's file name in the results folder.
    pub fn log(&self) -> String {
        format!("{}.log", self.name)
    }
}

/// How a step ended.
#[derive(Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The step's name.
    pub name: String,
    /// Its exit status; 124 and 137 if it was stopped.
    pub status: u8,
    /// How long it took.
    pub seconds: u64,
}

const PROLOGUE: &str = r#"# Written by `cargo xtask vm`; runs as root in the guest.
exec >guest.log 2>&1 </dev/null
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
ulimit -l unlimited
export RUST_BACKTRACE=1
uname -a

modprobe --all crc32_generic rdma_rxe ib_uverbs rdma_ucm
ip link set lo up
rdma link add "$VERBS_DEVICE" type rxe netdev lo
ibv_devinfo -v -d "$VERBS_DEVICE" | grep -E 'hca_id|state:|active_mtu|GID'

step() {
    local name=$1 directory=$2 limit=$3
    shift 3
    local began=$SECONDS
    (cd "$directory" && exec timeout --kill-after=10 "$limit" "$@") >"$name.log" 2>&1
    echo "$? $((SECONDS - began)) $name" >>steps
}

"#;

const EPILOGUE: &str = "
dmesg >kernel.log
touch done
";

/// Writes the script that makes the device and runs `steps`.
pub fn write_script(results: &Path, steps: &[Step]) -> Result<()> {
    let path = results.join(SCRIPT);
    let text = script(results, steps);
    fs::write(&path, text).with_context(|| format!("write {}", path.display()))?;
    make_executable(&path)
}

fn script(results: &Path, steps: &[Step]) -> String {
    let mut text = String::from("#!/bin/bash\n");
    let results = quote(&results.to_string_lossy());
    // Writing to a String cannot fail.
    let _ = writeln!(text, "cd {results} || exit 1\nexport VERBS_DEVICE={DEVICE}");
    text.push_str(PROLOGUE);
    for step in steps {
        let directory = quote(&step.directory.to_string_lossy());
        let limit = step.limit.as_secs();
        let _ = write!(text, "step {} {directory} {limit}", quote(&step.name));
        for word in &step.command {
            let _ = write!(text, " {}", quote(word));
        }
        text.push('\n');
    }
    text.push_str(EPILOGUE);
    text
}

fn make_executable(path: &Path) -> Result<()> {
    use std::os::unix::fs::PermissionsExt;
    let permissions = fs::Permissions::from_mode(0o755);
    fs::set_permissions(path, permissions)
        .with_context(|| format!("make {} executable", path.display()))
}

/// Quotes a word for the shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Reads how the steps ended, once the guest is off; `status` is the launcher's.
pub fn read_outcomes(results: &Path, status: ExitStatus) -> Result<Vec<Outcome>> {
    if !results.join("done").exists() {
        let console = fs::read(results.join(CONSOLE)).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        let lines: Vec<&str> = console.lines().collect();
        let last = &lines[lines.len().saturating_sub(10)..];
        bail!(
            "the guest went down before it was done ({status}); its logs are in {}, and its console \
             ended:\n{}",
            results.display(),
            last.join("\n")
        );
    }
    let path = results.join("steps");
    let text = fs::read_to_string(&path).with_context(|| format!("read {}", path.display()))?;
    text.lines()
        .map(|line| parse_outcome(line).with_context(|| format!("read {line:?} as a step")))
        .collect()
}

fn parse_outcome(line: &str) -> Option<Outcome> {
    let mut words = line.splitn(3, ' ');
    Some(Outcome {
        status: words.next()?.parse().ok()?,
        seconds: words.next()?.parse().ok()?,
        name: words.next()?.to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step(name: &str, command: &[&str]) -> Step {
        Step {
            name: name.into(),
            directory: "/a b".into(),
            command: command.iter().map(|&word| word.into()).collect(),
            limit: Duration::from_secs(60),
        }
    }

    #[test]
    fn words_reach_the_command_unchanged() {
        let text = script(Path::new("/out"), &[step("s", &["echo", "it's", "$HOME"])]);
        assert!(text.contains(r"step 's' '/a b' 60 'echo' 'it'\''s' '$HOME'"));
    }

    #[test]
    fn outcomes_are_read_back() {
        let outcome = parse_outcome("101 7 kvstore-two words").expect("a valid line");
        assert_eq!(
            outcome,
            Outcome {
                name: "kvstore-two words".into(),
                status: 101,
                seconds: 7
            }
        );
        assert_eq!(parse_outcome("soon 7 x"), None);
    }
}
