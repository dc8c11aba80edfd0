//! The Debian packages the test bed needs, in one list.

use anyhow::{Result, bail};
use xshell::{Shell, cmd};

/// A package, those that serve in its place, and what it is for.
struct Package {
    name: &'static str,
    instead: &'static [&'static str],
    why: &'static str,
}

const fn package(name: &'static str, why: &'static str) -> Package {
    Package {
        name,
        instead: &[],
        why,
    }
}

/// What boots the guest and makes its device.
const RIG: &[Package] = &[
    package("qemu-system-x86", "the emulator"),
    package("kmod", "finds and loads kernel modules"),
    Package {
        name: "busybox-static",
        instead: &["busybox"],
        why: "the guest's first file system",
    },
    package("file", "tells the launcher the version of a kernel"),
    package("iproute2", "creates the device in the guest"),
    package("libibverbs1", "opens the device"),
    package("ibverbs-providers", "libibverbs' driver for the device"),
    package("ibverbs-utils", "shows the device"),
];

/// What the feature `rdma-core` needs to build, and what else is run on the drop-in library.
const BUILD: &[Package] = &[
    package("cmake", "builds rdma-core"),
    package("make", "builds rdma-core"),
    package("pkg-config", "finds libraries"),
    package("libclang-dev", "reads C headers"),
    package("libnl-3-dev", "a library of rdma-core"),
    package("libnl-route-3-dev", "a library of rdma-core"),
    package("libibverbs-dev", "headers and library of the verbs"),
    package(
        "python3-pyverbs",
        "rdma-core's own tests, run on the drop-in library",
    ),
];

/// Python is also right from elsewhere than Debian, so it is probed by what it can do.
const PYTHON: Package = package(
    "python3-venv",
    "holds the launcher virtme-ng, installed from PyPI",
);

/// Prints every package, for an installer to read.
pub fn print() {
    for package in RIG.iter().chain(BUILD).chain([&PYTHON]) {
        println!("{}", package.name);
    }
}

/// Fails with what is missing and the command that installs it; `build`: the feature `rdma-core`
/// is about to be built too.
pub fn check(sh: &Shell, build: bool) -> Result<()> {
    if std::env::consts::ARCH != "x86_64" {
        bail!(
            "the test bed boots an x86_64 kernel with this machine's programs, which are for {}",
            std::env::consts::ARCH
        );
    }
    for program in ["dpkg-query", "apt-get"] {
        let probe = cmd!(sh, "{program} --version")
            .quiet()
            .ignore_stdout()
            .ignore_stderr();
        if probe.run().is_err() {
            bail!(
                "`{program}` is missing: the test bed takes its kernel and programs from Debian \
                 and runs only there"
            );
        }
    }
    // It exits with 1 when it knows nothing of a name; those simply stay out of its answer.
    let answer = cmd!(sh, "dpkg-query --show")
        .arg("--showformat=${binary:Package} ${db:Status-Status}\n")
        .quiet()
        .read()?;
    let python = cmd!(sh, "python3 -c")
        .arg("import ensurepip, venv")
        .quiet()
        .ignore_stderr()
        .run();

    let wanted = RIG.iter().chain(if build { BUILD } else { &[] });
    let mut missing: Vec<&Package> = wanted
        .filter(|package| !is_installed(&answer, package))
        .collect();
    if python.is_err() {
        missing.push(&PYTHON);
    }
    if missing.is_empty() {
        return Ok(());
    }
    let reasons: Vec<String> = missing
        .iter()
        .map(|package| format!("  {} ({})", package.name, package.why))
        .collect();
    let names: Vec<&str> = missing.iter().map(|package| package.name).collect();
    bail!(
        "missing Debian packages:\n{}\ninstall with: apt-get install --no-install-recommends {}",
        reasons.join("\n"),
        names.join(" ")
    )
}

/// Whether `answer`, lines of `NAME[:ARCHITECTURE] STATUS`, shows `package` or one instead of it.
fn is_installed(answer: &str, package: &Package) -> bool {
    answer
        .lines()
        .filter_map(|line| line.strip_suffix(" installed"))
        .map(|name| name.split(':').next().unwrap_or(name))
        .any(|name| name == package.name || package.instead.contains(&name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_counts_only_when_installed_or_replaced() {
        let answer = "kmod installed\nlibnl-3-dev:amd64 installed\ncmake config-files\n\
                      busybox installed\n";
        let installed = |name| is_installed(answer, &package(name, ""));
        assert!(installed("kmod"));
        assert!(installed("libnl-3-dev"));
        assert!(!installed("cmake"));
        assert!(!installed("libnl"));
        assert!(
            RIG.iter()
                .any(|package| package.name == "busybox-static" && is_installed(answer, package))
        );
    }
}
