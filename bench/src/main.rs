//! Work in progress.
#![forbid(unsafe_code)]
fn main() {}
