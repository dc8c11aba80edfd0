//! Where the workspace and its build output are, and how to build what other commands run.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use xshell::{Shell, cmd};

/// The cargo feature that adds real devices, for every package a command may build.
///
/// Cargo takes the name alone for many packages at once: those that lack it are left as they are.
pub const RDMA_CORE: &str = "rdma-core";

/// The workspace this driver belongs to.
pub struct Workspace {
    /// A shell whose current directory is the workspace's root.
    pub shell: Shell,
    /// The folder of the root `Cargo.toml`.
    pub root: PathBuf,
    /// Cargo's target directory.
    pub target: PathBuf,
}

/// A test executable that cargo has built.
pub struct TestBinary {
    /// The package it tests.
    pub package: String,
    /// The file under `tests/`; `lib` or `bin` for the tests inside the library or the program.
    pub name: String,
    /// What to execute.
    pub executable: PathBuf,
    /// The package's folder, where cargo runs its tests.
    pub directory: PathBuf,
}

impl Workspace {
    /// Asks cargo where everything is.
    pub fn locate() -> Result<Self> {
        let shell = Shell::new()?;
        // Cargo may be called from any folder below the root; the manifest's place is fixed.
        let manifest = Path::new(env!("CARGO_MANIFEST_DIR")).join("Cargo.toml");
        let text = cmd!(
            shell,
            "cargo metadata --quiet --no-deps --format-version 1 --manifest-path {manifest}"
        )
        .quiet()
        .read()?;
        let metadata: Value = serde_json::from_str(&text).context("read cargo metadata")?;
        let path = |key: &str| {
            let value = metadata[key].as_str();
            value
                .map(PathBuf::from)
                .ok_or_else(|| anyhow!("cargo metadata has no {key:?}"))
        };
        let root = path("workspace_root")?;
        let target = path("target_directory")?;
        shell.change_dir(&root);
        Ok(Self {
            shell,
            root,
            target,
        })
    }

    /// Makes `path`, relative to where the user stands, absolute.
    pub fn absolute(path: &Path) -> Result<PathBuf> {
        std::path::absolute(path).with_context(|| format!("find the folder {}", path.display()))
    }

    /// Builds the release programs `bench` and `kvstore` and returns the path of `bench`, which
    /// finds `kvstore` beside itself.
    pub fn build_bench(&self, rdma_core: bool) -> Result<PathBuf> {
        let sh = &self.shell;
        let features = features(rdma_core);
        cmd!(
            sh,
            "cargo build --locked --release --bins --package kvstore --package bench {features...}"
        )
        .run()?;
        Ok(self.target.join("release").join("bench"))
    }

    /// Builds the release test executables of `packages` without running them.
    pub fn build_tests(&self, packages: &[&str], rdma_core: bool) -> Result<Vec<TestBinary>> {
        let sh = &self.shell;
        let packages = packages.iter().flat_map(|name| ["--package", name]);
        let features = features(rdma_core);
        let messages = cmd!(
            sh,
            "cargo test --locked --release --no-run --message-format=json-render-diagnostics
             {packages...} {features...}"
        )
        .read()?;
        let binaries = test_binaries(&messages)?;
        if binaries.is_empty() {
            bail!("cargo built no test executable");
        }
        Ok(binaries)
    }

    /// Builds one release test executable: the file or folder `name` under a package's `tests`.
    pub fn build_test(&self, package: &str, name: &str) -> Result<TestBinary> {
        let sh = &self.shell;
        let messages = cmd!(
            sh,
            "cargo test --locked --release --no-run --message-format=json-render-diagnostics
             --package {package} --test {name}"
        )
        .read()?;
        let mut binaries = test_binaries(&messages)?.into_iter();
        binaries
            .find(|binary| binary.name == name)
            .with_context(|| format!("cargo built no test executable {name}"))
    }
}

/// The arguments that ask cargo for real devices, or none.
pub fn features(rdma_core: bool) -> Vec<&'static str> {
    if rdma_core {
        vec!["--features", RDMA_CORE]
    } else {
        Vec::new()
    }
}

/// Finds the test executables in cargo's messages, one JSON object to a line.
pub fn test_binaries(messages: &str) -> Result<Vec<TestBinary>> {
    let mut found = Vec::new();
    for line in messages.lines().filter(|line| line.starts_with('{')) {
        let message: Value = serde_json::from_str(line).context("read cargo's messages")?;
        let is_test = message["profile"]["test"].as_bool() == Some(true);
        let (Some(executable), true) = (message["executable"].as_str(), is_test) else {
            continue;
        };
        let manifest = message["manifest_path"].as_str().unwrap_or_default();
        let directory = Path::new(manifest)
            .parent()
            .with_context(|| format!("cargo names no package for {executable}"))?;
        let package = directory
            .file_name()
            .with_context(|| format!("cargo names no folder for {executable}"))?;
        let target = &message["target"];
        let name = match target["kind"][0].as_str() {
            Some("test") => target["name"].as_str(),
            kind => kind,
        };
        found.push(TestBinary {
            package: package.to_string_lossy().into_owned(),
            name: name.context("cargo names no target")?.to_owned(),
            executable: executable.into(),
            directory: directory.to_owned(),
        });
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn test_binaries_are_told_from_other_artifacts() {
        let messages = r#"
            {"reason":"build-script-executed"}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"a"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"name":"tool"},"profile":{"test":false},"executable":"/t/tool"}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"kind":["test"],"name":"flow"},"profile":{"test":true},"executable":"/t/flow-1"}
{"reason":"compiler-artifact","manifest_path":"/w/a/Cargo.toml","target":{"kind":["lib"],"name":"a"},"profile":{"test":true},"executable":"/t/a-1"}
{"reason":"build-finished","success":true}
"#;
        let found = test_binaries(messages).expect("valid messages");
        let [flow, lib] = found.as_slice() else {
            panic!("two test executables, not {}", found.len());
        };
        assert_eq!((lib.package.as_str(), lib.name.as_str()), ("a", "lib"));
        assert_eq!((flow.package.as_str(), flow.name.as_str()), ("a", "flow"));
        assert_eq!(flow.executable, Path::new("/t/flow-1"));
        assert_eq!(flow.directory, Path::new("/w/a"));
    }
}
