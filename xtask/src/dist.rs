//! `cargo xtask dist` and `cargo xtask run`: the software device as the C library of other people's programs.

mod check;

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result};
use clap::Args;
use xshell::cmd;

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
        build(&workspace, &out)?;
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

/// Builds the libraries into a folder.
fn build(workspace: &Workspace, out: &Path) -> Result<()> {
    workspace.shell.create_dir(out)?;
    LIBRARIES
        .iter()
        .try_for_each(|library| library.build(workspace, out))
}

impl Library {
    fn build(&self, workspace: &Workspace, out: &Path) -> Result<()> {
        let sh = &workspace.shell;
        let package = self.package;
        // Each by itself, so that a feature has nothing else built twice.
        let folder = workspace.target.join("drop-in");
        let features = self.feature.iter().flat_map(|name| ["--features", name]);
        cmd!(
            sh,
            "cargo rustc --locked --release --package {package} {features...}
             --crate-type staticlib --target-dir {folder}"
        )
        .run()?;
        let archive = folder.join("release").join(self.archive);
        let versions = workspace.root.join(package).join(self.versions);
        let (name, versions) = (
            format!("-Wl,-soname,{}", self.name),
            format!("-Wl,--version-script={}", versions.display()),
        );
        let library = out.join(self.name);
        // Programs that run have the old one mapped: it is replaced, not written over.
        let part = out.join(format!("{}.part", self.name));
        let calls = self.calls.map(|name| out.join(name));
        // Rust cannot say under which version a symbol is: the C compiler links, as a C library's. The library
        // has threads, so it stays in a process that is done with it.
        cmd!(
            sh,
            "cc -shared -o {part} {name} {versions} -Wl,--whole-archive {archive} -Wl,--no-whole-archive
             {calls...} -Wl,-Bsymbolic -Wl,--gc-sections -Wl,--strip-debug -Wl,-z,nodelete -Wl,-z,defs
             -lgcc_s -lpthread -ldl -lm -lc"
        )
        .run()?;
        fs::rename(&part, &library).with_context(|| format!("cannot make {}", library.display()))
    }
}

/// Builds the libraries where they are built by default, and gives the folder.
pub fn build_default(workspace: &Workspace) -> Result<PathBuf> {
    let out = workspace.target.join("dist");
    build(workspace, &out)?;
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

impl Run {
    /// Runs a program with the libraries in front of the system's; its exit status is ours.
    pub fn run(self) -> Result<ExitCode> {
        let workspace = Workspace::locate()?;
        let out = build_default(&workspace)?;
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
