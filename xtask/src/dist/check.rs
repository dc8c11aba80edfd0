//! What a program wants of the libraries, and they do not have: what the dynamic loader would say, beforehand and
//! all of it.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use anyhow::{Context, Result, bail};
use object::elf::FileHeader64;
use object::read::elf::{FileHeader, Sym, VersionTable};
use object::{Endianness, SymbolIndex};

use super::{LIBRARIES, SEARCH_PATH, search_path};

type Header = FileHeader64<Endianness>;

/// A symbol, and its version if it has one.
type Symbol = (String, Option<String>);

/// The symbols of a file for the dynamic loader.
struct Symbols {
    /// Those that others can use.
    exported: HashSet<Symbol>,
    /// Those that it needs, with the library that they are to come from if it says so.
    needed: BTreeSet<(Symbol, Option<String>)>,
}

impl Symbols {
    fn of(path: &Path) -> Result<Self> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        Self::parse(&bytes).with_context(|| {
            format!(
                "{} is no program or library of this kind of machine",
                path.display()
            )
        })
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let header = Header::parse(bytes)?;
        let endian = header.endian()?;
        let sections = header.sections(endian, bytes)?;
        let versions = sections.versions(endian, bytes)?.unwrap_or_default();
        let table = sections.symbols(endian, bytes, object::elf::SHT_DYNSYM)?;
        let mut symbols = Self {
            exported: HashSet::new(),
            needed: BTreeSet::new(),
        };
        for (index, symbol) in table.enumerate() {
            let name = String::from_utf8_lossy(symbol.name(endian, table.strings())?).into_owned();
            if name.is_empty() || symbol.is_local() {
                continue;
            }
            let (version, file) = version_of(&versions, endian, index)?;
            if !symbol.is_undefined(endian) {
                symbols.exported.insert((name, version));
            } else if !symbol.is_weak() {
                symbols.needed.insert(((name, version), file));
            }
        }
        Ok(symbols)
    }
}

fn version_of(
    versions: &VersionTable<'_, Header>,
    endian: Endianness,
    index: SymbolIndex,
) -> Result<(Option<String>, Option<String>)> {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let of_symbol = versions.version_index(endian, index);
    let version = versions.version(of_symbol.index())?;
    Ok(match version {
        Some(version) => (Some(text(version.name())), version.file().map(text)),
        None => (None, None),
    })
}

/// Says what a program, and what it is linked with, wants of the libraries in a folder without finding it; `true`
/// if there is nothing.
pub fn check(program: &OsStr, out: &Path) -> Result<bool> {
    let program = find(program)?;
    let mut ours = BTreeMap::new();
    for library in &LIBRARIES {
        let symbols = Symbols::of(&out.join(library.name))?;
        ours.insert(library.name, symbols.exported);
    }
    let (mut missing, mut files, mut used) = (0, 0, 0);
    for file in closure(&program, out)? {
        if file.starts_with(out) {
            continue;
        }
        files += 1;
        for ((name, version), library) in Symbols::of(&file)?.needed {
            let Some(exported) = wanted_of(&ours, &name, library.as_deref()) else {
                continue;
            };
            used += 1;
            if !has(exported, &name, version.as_deref()) {
                missing += 1;
                let version = version.map_or(String::new(), |version| format!("@{version}"));
                println!("{} wants {name}{version}", file.display());
            }
        }
    }
    println!(
        "{}: {used} symbols wanted by {files} files, {missing} missing (what it opens while it runs is not \
         seen: check such files by themselves)",
        program.display()
    );
    Ok(missing == 0)
}

/// The symbols of the library that a name is to come from, if it is one of ours.
fn wanted_of<'a>(
    ours: &'a BTreeMap<&str, HashSet<Symbol>>,
    name: &str,
    library: Option<&str>,
) -> Option<&'a HashSet<Symbol>> {
    match library {
        Some(library) => ours.get(library),
        None if name.starts_with("ibv_") => ours.get(super::VERBS),
        None if name.starts_with("rdma_") => ours.get(super::MANAGER),
        None => None,
    }
}

/// Whether a symbol is exported, in this version; without one any will do, as the loader has it.
fn has(exported: &HashSet<Symbol>, name: &str, version: Option<&str>) -> bool {
    exported
        .iter()
        .any(|(is, of)| is == name && (version.is_none() || of.as_deref() == version))
}

/// A program as a shell finds it.
fn find(program: &OsStr) -> Result<PathBuf> {
    let path = Path::new(program);
    if path.components().count() > 1 || path.is_file() {
        return Ok(path.to_owned());
    }
    let folders = env::var_os("PATH").unwrap_or_default();
    let found = env::split_paths(&folders).map(|folder| folder.join(path));
    let mut found = found.filter(|path| path.is_file());
    let Some(found) = found.next() else {
        bail!("no program {} in PATH", path.display());
    };
    Ok(found)
}

/// The program and all that it is linked with, as the dynamic loader finds it.
fn closure(program: &Path, out: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("ldd")
        .arg(program)
        .env(SEARCH_PATH, search_path(out)?)
        .output()
        .context("cannot run ldd")?;
    let mut files = vec![program.to_owned()];
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let Some((name, found)) = line.trim().split_once(" => ") else {
            continue;
        };
        match found.split(" (").next() {
            Some("not found") => println!("{} wants {name}, which is not found", program.display()),
            Some(path) => files.push(PathBuf::from(path)),
            None => {}
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_of_this_machine_is_read() {
        let own = env::current_exe().unwrap();
        let symbols = Symbols::of(&own).unwrap();
        let of_libc = |((name, version), file): &(Symbol, Option<String>)| {
            name == "malloc" && version.is_some() && file.as_deref() == Some("libc.so.6")
        };
        assert!(symbols.needed.iter().any(of_libc), "{:?}", symbols.needed);
    }

    #[test]
    fn versions_count_where_one_is_asked_for() {
        let exported = HashSet::from([("ibv_open".to_owned(), Some("IBVERBS_1.1".to_owned()))]);
        assert!(has(&exported, "ibv_open", Some("IBVERBS_1.1")));
        assert!(has(&exported, "ibv_open", None));
        assert!(!has(&exported, "ibv_open", Some("IBVERBS_9.9")));
        assert!(!has(&exported, "ibv_shut", None));
    }

    #[test]
    fn other_files_are_refused() {
        assert!(Symbols::parse(b"#!/bin/sh\n").is_err());
        assert!(Symbols::parse(b"").is_err());
        assert!(find(OsStr::new("no-such-program-anywhere")).is_err());
    }

    #[test]
    fn names_without_a_library_are_known_by_their_beginning() {
        let one = |name: &str| HashSet::from([(name.to_owned(), None)]);
        let ours = BTreeMap::from([("libibverbs.so.1", one("a")), ("librdmacm.so.1", one("b"))]);
        let found = |name, library| wanted_of(&ours, name, library).cloned();
        assert_eq!(found("ibv_open_device", None), Some(one("a")));
        assert_eq!(found("rdma_listen", None), Some(one("b")));
        assert_eq!(found("anything", Some("librdmacm.so.1")), Some(one("b")));
        assert_eq!(found("ibv_open_device", Some("other.so")), None);
        assert_eq!(found("malloc", None), None);
    }
}
