//! Benchmarks of the store and its layers: what the `bench` binary and the micro-benchmarks in
//! `benches/` share.
#![forbid(unsafe_code)]

pub mod alone;
pub mod client;
pub mod device;
pub mod format;
pub mod hosts;
pub mod limit;
pub mod machine;
pub mod measure;
mod pair;
pub mod plot;
pub mod process;
pub mod report;
pub mod run;
pub mod server;
pub mod statistics;
pub mod table;
pub mod workload;
