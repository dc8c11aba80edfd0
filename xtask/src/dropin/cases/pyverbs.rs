//! rdma-core's own tests of the verbs, by its Python bindings.

mod output;
mod skips;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

pub use self::skips::render;
use super::super::case::{Case, Holds};

const PACKAGE: &str = "python3-pyverbs";

/// Debian's interpreter, for which the bindings are built.
const PYTHON: &str = "/usr/bin/python3";

/// Where the package has the tests; most files are compressed.
const TESTS: &str = "/usr/share/doc/rdma-core/tests";

/// A file of tests.
#[derive(Debug)]
pub struct Module {
    name: &'static str,
    /// How many of its tests pass, at least.
    passes: usize,
}

const fn module(name: &'static str, passes: usize) -> Module {
    Module { name, passes }
}

/// All that are about verbs as such, not about one vendor's device.
static MODULES: [Module; 19] = [
    module("test_addr", 3),
    module("test_atomic", 9),
    module("test_cq", 4),
    module("test_cq_events", 2),
    module("test_cqex", 5),
    module("test_device", 21),
    module("test_flow", 0),
    module("test_fork", 1),
    module("test_mr", 17),
    module("test_odp", 15),
    module("test_parent_domain", 5),
    module("test_pd", 4),
    module("test_qp", 21),
    module("test_qpex", 20),
    module("test_rdmacm", 7),
    module("test_relaxed_ordering", 3),
    module("test_rss_traffic", 0),
    module("test_shared_pd", 1),
    module("test_tag_matching", 0),
];

/// A case for each module.
pub fn cases() -> Vec<Case> {
    let case = |module: &'static Module| {
        let tests = format!("tests.{}", module.name);
        let arguments = [
            "-W",
            "ignore",
            "tests/run_tests.py",
            "--dev",
            "soft0",
            "-v",
            &tests,
        ];
        let case = Case::alone(PACKAGE, PYTHON, &arguments)
            .named(&format!("pyverbs {}", module.name))
            .within(unpacked)
            .holds(Holds::Module(module));
        match module.name {
            // These look for the device's network interface.
            "test_rdmacm" => case.with_scenery(),
            _ => case,
        }
    };
    MODULES.iter().map(case).collect()
}

impl Module {
    /// Why its tests are not as they should be, if so.
    pub fn wrong_with(&self, output: &str) -> Option<String> {
        let checked = output::parse(output).and_then(|outcome| {
            skips::check(&outcome.skips)?;
            let passed = outcome.passed();
            let few = format!("{passed} passed, and not {}", self.passes);
            ensure!(passed >= self.passes, few);
            Ok(())
        });
        checked.err().map(|error| format!("{error:#}"))
    }
}

/// Puts the tests in a folder, so that Python can read them.
fn unpacked(folder: &Path) -> Result<PathBuf> {
    let missing = || {
        format!(
            "the tests are not in {TESTS}, where Debian's {PACKAGE} has them; a machine may be set up to leave out what \
             is below /usr/share/doc"
        )
    };
    ensure!(Path::new(TESTS).join("run_tests.py").is_file(), missing());
    let into = folder.join("pyverbs");
    let tests = into.join("tests");
    fs::create_dir_all(&tests).with_context(|| format!("cannot make {}", tests.display()))?;
    for entry in fs::read_dir(TESTS).with_context(missing)? {
        let from = entry?.path();
        let Some(name) = from.file_name().map(Path::new) else {
            continue;
        };
        if name.extension().is_some_and(|extension| extension == "gz") {
            let unpacked = Command::new("gzip").arg("-dc").arg(&from).output()?;
            ensure!(
                unpacked.status.success(),
                "cannot unpack {}",
                from.display()
            );
            fs::write(tests.join(name.with_extension("")), unpacked.stdout)?;
        } else if from.is_file() {
            fs::copy(&from, tests.join(name))?;
        }
    }
    Ok(into)
}

#[cfg(test)]
mod tests {
    use super::*;

    static EXAMPLE: Module = module("test_x", 2);

    #[test]
    fn too_few_that_pass_are_a_failure() {
        let output = |ran: usize| format!("Ran {ran} tests in 0.1s\n\nOK\n");
        assert_eq!(EXAMPLE.wrong_with(&output(2)), None);
        let wrong = EXAMPLE.wrong_with(&output(1));
        assert_eq!(wrong.as_deref(), Some("1 passed, and not 2"));
    }

    #[test]
    fn an_unknown_skip_is_a_failure() {
        let output = "test_y (tests.test_x.X.test_y) ... skipped 'no wish to'\n\
                      Ran 3 tests in 0.1s\n\nOK (skipped=1)\n";
        let wrong = EXAMPLE.wrong_with(output).unwrap();
        assert!(wrong.contains("test_x.X.test_y"), "{wrong}");
        assert!(wrong.contains("no wish to"), "{wrong}");
    }
}
