//! `cargo xtask dist` and `cargo xtask run`: the software device as the C library of other people's programs.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::{env, fs};

use anyhow::{Context, Result};
use clap::Args;
use xshell::cmd;

use crate::workspace::Workspace;

/// The name under which programs look for it.
const LIBRARY: &str = "libibverbs.so.1";

/// Where the dynamic loader looks first.
pub const SEARCH_PATH: &str = "LD_LIBRARY_PATH";

/// Arguments of `cargo xtask dist`.
#[derive(Args)]
pub struct Dist {
    /// Where the library goes; made if need be [default: dist in cargo's target directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Dist {
    /// Builds the library, and says how to use it.
    pub fn run(self) -> Result<()> {
        let workspace = Workspace::locate()?;
        let out = match &self.out {
            Some(out) => Workspace::absolute(out)?,
            None => workspace.target.join("dist"),
        };
        build(&workspace, &out)?;
        println!("{LIBRARY} is in {}. To run a program on it:", out.display());
        println!("    {SEARCH_PATH}={} ibv_devices", out.display());
        Ok(())
    }
}

/// Builds the library into a folder.
fn build(workspace: &Workspace, out: &Path) -> Result<()> {
    let sh = &workspace.shell;
    // By itself, so that the feature does not have everything else built twice.
    let folder = workspace.target.join("drop-in");
    cmd!(
        sh,
        "cargo rustc --locked --release --package verbs-sys --features drop-in
         --crate-type staticlib --target-dir {folder}"
    )
    .run()?;
    let archive = folder.join("release").join("libverbs_sys.a");
    let source = workspace.root.join("verbs-sys").join("src");
    let versions = source.join("drop_in").join("libibverbs.map");
    let (name, versions) = (
        format!("-Wl,-soname,{LIBRARY}"),
        format!("-Wl,--version-script={}", versions.display()),
    );
    sh.create_dir(out)?;
    let library = out.join(LIBRARY);
    // Programs that run have the old one mapped: it is replaced, not written over.
    let part = out.join(format!("{LIBRARY}.part"));
    // Rust cannot say under which version a symbol is: the C compiler links, as a C library's.
    cmd!(
        sh,
        "cc -shared -o {part} {name} {versions} -Wl,--whole-archive {archive} -Wl,--no-whole-archive
         -Wl,-Bsymbolic -Wl,--gc-sections -Wl,--strip-debug -lgcc_s -lpthread -ldl -lm -lc"
    )
    .run()?;
    fs::rename(&part, &library).with_context(|| format!("cannot make {}", library.display()))
}

/// Builds the library where it is built by default, and gives the folder.
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
    /// Runs a program with the library in front of the system's; its exit status is ours.
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
