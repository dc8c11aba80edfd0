//! The nightly toolchain, which alone has the sanitizers.

use anyhow::{Context, Result, bail};
use xshell::{Shell, cmd};

/// Compiles with AddressSanitizer.
pub const ADDRESS: &str = "-Zsanitizer=address";

/// The target that the nightly toolchain compiles for when it is not told. Naming it keeps compiler
/// flags from build scripts and macros, which run in the compiler.
pub fn target(sh: &Shell) -> Result<String> {
    let version = cmd!(sh, "rustc +nightly --version --verbose")
        .quiet()
        .ignore_stderr()
        .read();
    let Ok(version) = version else {
        bail!("there is no nightly toolchain; install it with: rustup toolchain install nightly");
    };
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    host.map(str::to_owned)
        .context("`rustc +nightly --version --verbose` names no host")
}
