#![doc = include_str!("../README.md")]

pub mod abi;
pub mod message;

mod address;
mod calls;
mod channel;
mod deliver;
mod device;
mod dial;
mod endpoint;
mod engine;
mod event;
#[cfg(test)]
mod fake;
mod fork;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod id;
mod listen;
mod network;
mod ports;
mod protocol;
mod shared;
mod socket;
#[cfg(test)]
mod tests;
mod timers;
mod verbs;
