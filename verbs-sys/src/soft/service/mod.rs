//! The threads of the device, asleep unless there is something to do.
//!
//! One answers peers, the other looks after queue pairs that no application thread polls. They are
//! two because the second may have to ask a peer: if it also answered, two processes could wait for
//! each other. A third looks after sockets, where there are any.

mod answers;
mod streams;
mod upkeep;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;

use super::process::Process;
pub(super) use streams::{Streams, bind_tcp, bind_udp, send_udp};
pub(super) use upkeep::{unwatch, watch};

/// Marks the eventfd that ends both threads.
const HALT: u64 = u64::MAX;

/// Starts both threads.
pub(super) fn spawn(process: &Arc<Process>) -> Result<Vec<JoinHandle<()>>, Errno> {
    let answers = answers::Answers::new(process)?;
    let upkeep = upkeep::Upkeep::new(process)?;
    without_signals(|| {
        let first = start("soft0-answers", move || answers.run())?;
        let second = start("soft0-upkeep", move || upkeep.run());
        Ok(vec![first, second?])
    })
}

/// Starts the thread that looks after sockets.
pub(super) fn spawn_streams(
    process: &Arc<Process>,
    streams: &Arc<Streams>,
) -> Result<JoinHandle<()>, Errno> {
    let worker = streams::Worker::new(process, Arc::clone(streams));
    without_signals(|| start("soft0-streams", move || worker.run()))
}

fn without_signals<T>(start: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    // Signals are the application's business; threads of ours must not take them.
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are places for a result, and `all` is filled before it is used.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let started = start();
    // SAFETY: `old` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    started
}

fn start(name: &str, run: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>, Errno> {
    let thread = std::thread::Builder::new().name(name.into());
    thread.spawn(run).map_err(|_| Errno::AGAIN)
}

/// The next events; `None` once the device is closed.
fn next<'a>(epoll: &OwnedFd, events: &'a mut Vec<Event>) -> Option<&'a [Event]> {
    events.clear();
    match epoll::wait(epoll, rustix::buffer::spare_capacity(events), None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => {
            tracing::error!(%error, "a thread of the software device cannot wait");
            return None;
        }
    }
    let halted = events.iter().any(|event| event.data.u64() == HALT);
    (!halted).then_some(events)
}

fn add(epoll: &OwnedFd, fd: &OwnedFd, data: u64, flags: EventFlags) -> Result<(), Errno> {
    epoll::add(epoll, fd, EventData::new_u64(data), flags)
}
