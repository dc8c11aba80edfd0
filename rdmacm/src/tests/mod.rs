//! The calls, as programs make them, on a device of the tests' own.

mod attacks;
mod channels;
mod connections;
mod endings;
mod lookups;
mod world;
