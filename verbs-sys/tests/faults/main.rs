//! What the software device does when strangers, peers, hosts and the cables between them go wrong.
//!
//! `cargo xtask faults` runs these tests: they need network namespaces, which take root.

mod cut;
mod cycles;
mod forged;
mod garbage;
mod killed;
mod middle;
mod stopped;
mod support;

/// Not a test: the other processes of the tests, which start this executable again for them.
#[test]
fn other_process() {
    support::serve_if_asked();
}
