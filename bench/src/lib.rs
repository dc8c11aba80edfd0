//! Benchmarks of the store and its layers: what the `bench` binary and the micro-benchmarks in
//! `benches/` share.
#![forbid(unsafe_code)]

pub mod format;
pub mod limit;
pub mod machine;
pub mod measure;
pub mod plot;
pub mod report;
pub mod statistics;
pub mod table;
pub mod workload;
