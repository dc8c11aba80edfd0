//! What a verbs device must do, checked on the device that `VERBS_DEVICE` names: the same tests run
//! on the software device and on kernel devices.
//!
//! A test is a script for two ends, `a` and `b`. It runs four times: with both ends in this process
//! and with `b` in another one, each with memory from the device and with memory from the heap.
//!
//! Where the standard leaves a choice, or a known device deviates, the test says so.

mod async_events;
mod atomics;
mod concurrency;
mod cq;
mod datagrams;
mod events;
mod lifetime;
mod limits;
mod messages;
mod one_sided;
mod peers;
mod protection;
mod queues;
mod registration;
mod reregistration;
mod silence;
mod srq;
mod state;
mod support;
mod windows;

/// Not a test: the other process of the others, which start this executable again for it.
#[test]
fn other_process() {
    support::serve_if_asked();
}
