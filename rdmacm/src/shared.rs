//! What all threads of a process share: identifiers, channels, sockets and deadlines, behind one lock.
//!
//! A connection manager is not on the path of data, so one lock is enough. Nothing waits while it is
//! held, and no verb is called but the look at a GID table.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use rustix::io::Errno;

use crate::abi::rdma_event_channel;
use crate::channel::Queue;
use crate::device::Device;
use crate::endpoint::Endpoint;
use crate::engine::Engine;
use crate::event::Queued;
use crate::fork;
use crate::ports::Ports;
use crate::socket::Socket;
use crate::timers::Timers;

/// Names an identifier's other half, a channel or a socket; never used twice.
pub type Key = u64;

/// What a process, and no forked child of it, has.
pub struct Shared {
    state: Mutex<State>,
    /// Told of every acknowledgement of an event.
    acknowledged: Condvar,
    /// Open devices, once there are any.
    pub devices: Mutex<Option<&'static [Device]>>,
}

/// What the lock guards.
#[derive(Default)]
pub struct State {
    /// Identifiers.
    pub endpoints: HashMap<Key, Endpoint>,
    /// Channels.
    pub channels: HashMap<Key, Queue>,
    /// Where those are that there are, and which those were that have ended and could be waited for.
    pub addresses: HashMap<usize, Key>,
    pub ended: HashSet<usize>,
    /// Sockets that the thread looks after.
    pub sockets: HashMap<Key, Socket>,
    /// Port numbers in use.
    pub ports: Ports,
    timers: Timers,
    /// The thread, once something needs it.
    pub engine: Option<Engine>,
}

static CURRENT: AtomicPtr<Shared> = AtomicPtr::new(std::ptr::null_mut());
static KEYS: AtomicU64 = AtomicU64::new(1);

/// A new key.
pub fn new_key() -> Key {
    KEYS.fetch_add(1, Ordering::Relaxed)
}

/// A random number; not for secrets.
pub fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(new_key())
}

/// Forgets what a forked child has inherited. Nothing is freed: another thread may have been changing it.
pub fn forget() {
    CURRENT.store(std::ptr::null_mut(), Ordering::Release);
}

impl Shared {
    /// What this process has.
    pub fn get() -> &'static Self {
        let current = CURRENT.load(Ordering::Acquire);
        // SAFETY: null, or leaked below and never freed.
        if let Some(current) = unsafe { current.as_ref() } {
            return current;
        }
        fork::watch();
        let made = Box::into_raw(Box::new(Self {
            state: Mutex::default(),
            acknowledged: Condvar::new(),
            devices: Mutex::new(None),
        }));
        let before = std::ptr::null_mut();
        let won = CURRENT.compare_exchange(before, made, Ordering::AcqRel, Ordering::Acquire);
        match won {
            // SAFETY: just made, and never freed.
            Ok(_) => unsafe { &*made },
            Err(other) => {
                // SAFETY: nobody else has seen it.
                drop(unsafe { Box::from_raw(made) });
                // SAFETY: another thread has leaked it.
                unsafe { &*other }
            }
        }
    }

    /// Takes the lock.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those who wait for acknowledgements that there was one.
    pub fn tell_acknowledged(&self) {
        self.acknowledged.notify_all();
    }

    /// Waits until the application has acknowledged every event of an identifier that it has got.
    pub fn until_acknowledged<'a>(
        &self,
        mut state: MutexGuard<'a, State>,
        key: Key,
    ) -> MutexGuard<'a, State> {
        while state
            .endpoints
            .get(&key)
            .is_some_and(|endpoint| endpoint.reported != endpoint.acknowledged)
        {
            state = self
                .acknowledged
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
        state
    }
}

impl State {
    /// The channel at this address: what is there is not looked at, as it may have ended.
    ///
    /// # Errors
    ///
    /// `EINVAL` if there is none, as for null and for one that a forked child has inherited.
    pub fn channel(&self, at: *mut rdma_event_channel) -> Result<Key, Errno> {
        self.addresses.get(&at.addr()).copied().ok_or(Errno::INVAL)
    }

    /// An identifier that lives.
    ///
    /// # Errors
    ///
    /// `EINVAL` for one that a forked child has inherited.
    pub fn endpoint(&mut self, key: Key) -> Result<&mut Endpoint, Errno> {
        self.endpoints.get_mut(&key).ok_or(Errno::INVAL)
    }

    /// Puts an event into the channel of the identifier that it is about, or of the one that listens for it.
    pub fn push(&mut self, event: Queued) {
        let Some(endpoint) = self.endpoints.get(&event.counted) else {
            return;
        };
        if let Some(queue) = self.channels.get_mut(&endpoint.channel) {
            queue.push(event);
        }
    }

    /// Sets a deadline.
    pub fn set_timer(&mut self, key: Key, at: Instant) {
        let before = self.timers.next();
        self.timers.set(key, at);
        self.show_timers(before);
    }

    /// Takes a deadline away.
    pub fn clear_timer(&mut self, key: Key) {
        let before = self.timers.next();
        self.timers.clear(key);
        self.show_timers(before);
    }

    /// The earliest deadline.
    pub fn next_timer(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Has whoever's time has come do what it must.
    pub fn run_timers(&mut self) {
        let before = self.timers.next();
        let now = Instant::now();
        while let Some(key) = self.timers.take_due(now) {
            if self.sockets.contains_key(&key) {
                self.socket_timed_out(key);
            } else if self.endpoints.contains_key(&key) {
                self.endpoint_timed_out(key);
            }
        }
        self.show_timers(before);
    }

    fn show_timers(&mut self, before: Option<Instant>) {
        let next = self.timers.next();
        if next != before
            && let Some(engine) = &self.engine
        {
            engine.wake_at(next);
        }
    }
}
