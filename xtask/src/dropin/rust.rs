//! Rust programs of others: the examples and tests that are in a package of the registry, built as they are.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use xshell::{Shell, cmd};

use crate::workspace::Workspace;

/// How the name of such a program begins; `rust:PACKAGE@VERSION/KIND/TARGET` is all of it. KIND is `example`, `test` or
/// `lib`, the last of which has its tests inside.
pub const SCHEME: &str = "rust:";

/// A program, taken apart.
#[derive(Debug, PartialEq, Eq)]
struct Program<'a> {
    package: &'a str,
    version: &'a str,
    kind: &'a str,
    target: &'a str,
}

impl<'a> Program<'a> {
    fn parse(name: &'a str) -> Option<Self> {
        let (from, rest) = name.strip_prefix(SCHEME)?.split_once('/')?;
        let (package, version) = from.split_once('@')?;
        let (kind, target) = rest.split_once('/')?;
        Some(Self {
            package,
            version,
            kind,
            target,
        })
    }
}

/// Builds a program, and says where it is.
pub fn build(workspace: &Workspace, name: &str) -> Result<PathBuf> {
    let program = Program::parse(name).with_context(|| format!("{name} names no Rust program"))?;
    let sh = &workspace.shell;
    let folder = workspace.target.join("dropin").join("rust");
    let manifest = source(sh, &folder, &program)?;
    let (command, which): (_, &[&str]) = match program.kind {
        "example" => ("build", &["--example", program.target]),
        "test" => ("test", &["--no-run", "--test", program.target]),
        _ => ("test", &["--no-run", "--lib"]),
    };
    let built = folder.join("target");
    let messages = cmd!(
        sh,
        "cargo {command} --quiet --locked --message-format=json-render-diagnostics --manifest-path {manifest}
         --target-dir {built} {which...}"
    )
    .quiet()
    .read()
    .with_context(|| format!("cannot build {name}"))?;
    executable(&messages, program.target).with_context(|| format!("cargo built no {name}"))
}

/// The manifest of a package as the registry has it, for which a package of ours depends on it.
fn source(sh: &Shell, folder: &Path, program: &Program<'_>) -> Result<PathBuf> {
    let Program {
        package, version, ..
    } = program;
    let wanting = folder.join(format!("{package}-{version}"));
    let manifest = wanting.join("Cargo.toml");
    let sources = wanting.join("src");
    fs::create_dir_all(&sources).with_context(|| format!("cannot make {}", sources.display()))?;
    sh.write_file(sources.join("lib.rs"), "")?;
    let text = format!(
        "[package]\nname = \"wanting\"\nedition = \"2024\"\n[dependencies]\n{package} = \"={version}\"\n[workspace]\n"
    );
    sh.write_file(&manifest, text)?;
    let metadata = cmd!(
        sh,
        "cargo metadata --format-version 1 --manifest-path {manifest}"
    )
    .quiet()
    .read()
    .with_context(|| format!("cannot get {package} {version}"))?;
    let metadata: Value = serde_json::from_str(&metadata).context("cannot read cargo's answer")?;
    let packages = metadata["packages"].as_array();
    let found = packages.into_iter().flatten().find(|one| {
        one["name"].as_str() == Some(package) && one["version"].as_str() == Some(version)
    });
    let path = found.and_then(|one| one["manifest_path"].as_str());
    let path = PathBuf::from(path.with_context(|| format!("cargo knows no {package}"))?);
    ensure!(path.is_file(), "{} is not there", path.display());
    Ok(path)
}

/// What was built for a target, by cargo's messages.
fn executable(messages: &str, target: &str) -> Option<PathBuf> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    messages
        .filter(|message: &Value| message["target"]["name"].as_str() == Some(target))
        .filter_map(|message| message["executable"].as_str().map(PathBuf::from))
        .next_back()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_named_by_package_and_target() {
        let program = Program::parse("rust:ibverbs@0.9.2/example/loopback");
        let expected = Program {
            package: "ibverbs",
            version: "0.9.2",
            kind: "example",
            target: "loopback",
        };
        assert_eq!(program, Some(expected));
        for bad in [
            "ibv_devices",
            "rust:ibverbs",
            "rust:ibverbs/example/loopback",
        ] {
            assert_eq!(Program::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_was_built_is_found() {
        let messages = r#"no message
{"reason":"compiler-artifact","target":{"name":"loopback"},"executable":"/t/loopback"}
{"reason":"compiler-artifact","target":{"name":"other"},"executable":"/t/other"}
{"reason":"build-finished"}"#;
        let found = executable(messages, "loopback");
        assert_eq!(found, Some(PathBuf::from("/t/loopback")));
        assert_eq!(executable(messages, "nothing"), None);
    }
}
