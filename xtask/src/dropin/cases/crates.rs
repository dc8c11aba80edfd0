//! Rust crates that bind the C library: an example, and a suite of tests that needs a device.

use super::super::case::{Case, Holds};

/// `ibverbs` loads what it is linked with; its example sends a word to itself.
const LOOPBACK: &str = "rust:ibverbs@0.9.2/example/loopback";

/// `sideway` opens both libraries while it runs. Its other file of tests is about what does not compile.
const SIDEWAY: [&str; 6] = [
    "rust:sideway@0.4.3/lib/sideway",
    "rust:sideway@0.4.3/test/test_atomic",
    "rust:sideway@0.4.3/test/test_cq",
    "rust:sideway@0.4.3/test/test_mr_and_cq",
    "rust:sideway@0.4.3/test/test_post_send",
    "rust:sideway@0.4.3/test/test_qp",
];

/// One for each program.
pub fn cases() -> Vec<Case> {
    let case = |program: &'static str, words| {
        let name = program.rsplit('/').next().unwrap_or(program);
        Case::alone("(Rust)", program, &[])
            .named(&format!("crate {name}"))
            .holds(Holds::Says(words))
    };
    let loopback = case(LOOPBACK, "received");
    // Where there is no device, most of the tests pass as well: whoever finds one says so in the log of the library.
    let tests = SIDEWAY.map(|program| {
        case(program, "test result: ok")
            .with_environment("VERBS_SOFT_LOG", "debug")
            .holds(Holds::Says("the software device is opened"))
    });
    std::iter::once(loopback).chain(tests).collect()
}
