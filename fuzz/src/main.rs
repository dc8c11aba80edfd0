//! Fuzzes one target, the one that the environment variable `FUZZ_TARGET` names, with libFuzzer's
//! arguments. With `FUZZ_SEEDS` instead, a folder, it writes the seeds of every target there, each
//! in a folder of the target's name, and does nothing else. `cargo xtask fuzz` runs it.

#![no_main]

use std::path::Path;
use std::sync::OnceLock;
use std::{env, fs, process};

use libfuzzer_sys::fuzz_target;

/// A target's name, parser and seeds; see `target.rs`.
type Target = (&'static str, fn(&[u8]) -> bool, fn() -> Vec<Vec<u8>>);

/// What is fuzzed. It is known before the first bytes come.
static CHOSEN: OnceLock<fn(&[u8]) -> bool> = OnceLock::new();

fuzz_target!(
    init: choose(),
    |bytes: &[u8]| {
        if let Some(run) = CHOSEN.get() {
            run(bytes);
        }
    }
);

fn targets() -> Vec<Target> {
    let verbs = verbs_sys::fuzzing::targets().into_iter();
    let wire = wire::fuzzing::targets().into_iter();
    let store = kvstore::fuzzing::targets().into_iter();
    let cm = rdmacm::fuzzing::targets().into_iter();
    let cm = cm.map(|target| (target.name, target.run, target.seeds));
    let verbs = verbs.map(|target| (target.name, target.run, target.seeds));
    let wire = wire.map(|target| (target.name, target.run, target.seeds));
    let store = store.map(|target| (target.name, target.run, target.seeds));
    verbs.chain(cm).chain(wire).chain(store).collect()
}

fn choose() {
    if let Some(folder) = env::var_os("FUZZ_SEEDS") {
        let written = write_seeds(Path::new(&folder));
        if let Err(error) = &written {
            eprintln!("cannot write the seeds: {error}");
        }
        process::exit(i32::from(written.is_err()));
    }
    let name = env::var("FUZZ_TARGET").unwrap_or_default();
    let target = targets().into_iter().find(|target| target.0 == name);
    let Some((_, run, _)) = target else {
        eprintln!("FUZZ_TARGET is {name:?}, which is no target");
        process::exit(2);
    };
    CHOSEN.get_or_init(|| run);
}

fn write_seeds(folder: &Path) -> std::io::Result<()> {
    for (name, _, seeds) in targets() {
        let folder = folder.join(name);
        fs::create_dir_all(&folder)?;
        for (index, seed) in seeds().iter().enumerate() {
            fs::write(folder.join(format!("seed-{index}")), seed)?;
        }
    }
    Ok(())
}
