//! `cargo xtask dist` and `cargo xtask run`: the software device as the C library of other people's programs.

mod check;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs, process};

use anyhow::{Context, Result};
use clap::Args;
use xshell::cmd;

use crate::nightly;
use crate::workspace::Workspace;

/// A library that is built, and how.
struct Library {
    /// The name under which programs look for it.
    name: &'static str,
    package: &'static str,
    /// The cargo feature that turns the package into the library, or none.
    feature: Option<&'static str>,
    archive: &'static str,
    /// The versions of its symbols, below the package's folder.
    versions: &'static str,
    /// The library before it, which it calls.
    calls: Option<&'static str>,
}

/// All of them, each after those that it calls.
const LIBRARIES: [Library; 2] = [
    Library {
        name: VERBS,
        package: "verbs-sys",
        feature: Some("drop-in"),
        archive: "libverbs_sys.a",
        versions: "src/drop_in/libibverbs.map",
        calls: None,
    },
    Library {
        name: MANAGER,
        package: "rdmacm",
        feature: None,
        archive: "librdmacm.a",
        versions: "src/librdmacm.map",
        calls: Some(VERBS),
    },
];

const VERBS: &str = "libibverbs.so.1";
const MANAGER: &str = "librdmacm.so.1";

/// Where the dynamic loader looks first.
pub const SEARCH_PATH: &str = "LD_LIBRARY_PATH";

/// Arguments of `cargo xtask dist`.
#[derive(Args)]
pub struct Dist {
    /// Where the libraries go; made if need be [default: dist in cargo's target directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Say what this program, or library, wants of the libraries and does not find; the exit status tells, too
    #[arg(long, value_name = "PROGRAM")]
    check: Option<OsString>,
}

impl Dist {
    /// Builds the libraries, and says how to use them.
    pub fn run(self) -> Result<ExitCode> {
        let workspace = Workspace::locate()?;
        let out = match &self.out {
            Some(out) => Workspace::absolute(out)?,
            None => workspace.target.join("dist"),
        };
        build(&workspace, &out, Kind::Usual)?;
        if let Some(program) = &self.check {
            let fits = check::check(program, &out)?;
            return Ok(if fits {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
        let names = LIBRARIES.map(|library| library.name).join(" and ");
        println!(
            "{names} are in {}. To run a program on them:",
            out.display()
        );
        println!("    {SEARCH_PATH}={} ibv_devices", out.display());
        Ok(ExitCode::SUCCESS)
    }
}

/// How the libraries are built.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Usual,
    /// With AddressSanitizer, whose own library programs must load first.
    Sanitized,
}

/// Builds the libraries into a folder.
fn build(workspace: &Workspace, out: &Path, kind: Kind) -> Result<()> {
    workspace.shell.create_dir(out)?;
    LIBRARIES
        .iter()
        .try_for_each(|library| library.build(workspace, out, kind))
}

impl Library {
    fn build(&self, workspace: &Workspace, out: &Path, kind: Kind) -> Result<()> {
        let sh = &workspace.shell;
        let archive = self.archive(workspace, kind)?;
        let package = self.package;
        let versions = workspace.root.join(package).join(self.versions);
        let (name, versions) = (
            format!("-Wl,-soname,{}", self.name),
            format!("-Wl,--version-script={}", versions.display()),
        );
        let library = out.join(self.name);
        // Programs that run have the old one mapped: it is replaced, not written over.
        let part = part(&library, process::id());
        let calls = self.calls.map(|name| out.join(name));
        // Where something is found, one wants to know the line.
        let (strip, sanitizer) = match kind {
            Kind::Usual => (Some("-Wl,--strip-debug"), None),
            Kind::Sanitized => (None, Some("-lasan")),
        };
        // Rust cannot say under which version a symbol is: the C compiler links, as a C library's. The library
        // has threads, so it stays in a process that is done with it.
        cmd!(
            sh,
            "cc -shared -o {part} {name} {versions} -Wl,--whole-archive {archive} -Wl,--no-whole-archive
             {calls...} -Wl,-Bsymbolic -Wl,--gc-sections {strip...} -Wl,-z,nodelete -Wl,-z,defs
             {sanitizer...} -lgcc_s -lpthread -ldl -lm -lc"
        )
        .run()?;
        fs::rename(&part, &library).with_context(|| format!("cannot make {}", library.display()))
    }

    /// Compiles what is linked into the library.
    fn archive(&self, workspace: &Workspace, kind: Kind) -> Result<PathBuf> {
        let sh = &workspace.shell;
        let package = self.package;
        let features = self.feature.iter().flat_map(|name| ["--features", name]);
        // Each by itself, so that a feature has nothing else built twice.
        let (toolchain, folder, flags, target) = match kind {
            Kind::Usual => (None, "drop-in", None, None),
            Kind::Sanitized => (
                Some("+nightly"),
                "drop-in-asan",
                Some(nightly::ADDRESS),
                Some(nightly::target(sh)?),
            ),
        };
        let folder = workspace.target.join(folder);
        let targets = target.iter().flat_map(|target| ["--target", target]);
        let mut compile = cmd!(
            sh,
            "cargo {toolchain...} rustc --locked --release --package {package} {features...}
             --crate-type staticlib {targets...} --target-dir {folder}"
        );
        if let Some(flags) = flags {
            compile = compile.env("RUSTFLAGS", flags);
        }
        compile.run()?;
        let folder = target
            .as_ref()
            .map_or(folder.clone(), |target| folder.join(target));
        Ok(folder.join("release").join(self.archive))
    }
}

/// Builds the libraries where they are built by default, and gives the folder.
pub fn build_default(workspace: &Workspace, kind: Kind) -> Result<PathBuf> {
    let out = workspace.target.join(match kind {
        Kind::Usual => "dist",
        Kind::Sanitized => "dist-asan",
    });
    build(workspace, &out, kind)?;
    Ok(out)
}

/// A folder, and those that are searched already.
pub fn search_path(first: &Path) -> Result<OsString> {
    let others = env::var_os(SEARCH_PATH).unwrap_or_default();
    let others = env::split_paths(&others).filter(|path| !path.as_os_str().is_empty());
    let all = std::iter::once(first.to_owned()).chain(others);
    env::join_paths(all).context("a folder whose name has a colon cannot be searched")
}

/// Arguments of `cargo xtask run`.
#[derive(Args)]
pub struct Run {
    /// The program and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    program: Vec<OsString>,
}

/// What becomes a library once it is whole. Two processes, as for a server and its client, may build one at once.
fn part(library: &Path, process: u32) -> PathBuf {
    library.with_added_extension(format!("{process}.part"))
}

impl Run {
    /// Runs a program with the libraries in front of the system's; its exit status is ours.
    pub fn run(self) -> Result<ExitCode> {
        let workspace = Workspace::locate()?;
        let out = build_default(&workspace, Kind::Usual)?;
        let (program, arguments) = self.program.split_first().context("no program")?;
        let status = Command::new(program)
            .args(arguments)
            .env(SEARCH_PATH, search_path(&out)?)
            .status()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        Ok(code.map_or(ExitCode::FAILURE, ExitCode::from))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processes_do_not_share_the_part_of_a_library() {
        let library = Path::new("/dist").join(VERBS);
        let (mine, other) = (part(&library, 7), part(&library, 77));
        assert_ne!(mine, other);
        assert_eq!(mine.parent(), library.parent(), "renamed in one folder");
        assert!([mine, other].iter().all(|part| *part != library));
    }
}
