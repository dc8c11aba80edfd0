//! The thread: it sleeps until a socket has something, or somebody's time has come.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

use crate::fork::Mine;
use crate::shared::{Key, Shared, State};

/// Stands for the timer; no thing has this key.
const TIMER: Key = 0;
/// Events that are looked at under one lock.
const BATCH: usize = 32;

/// What wakes the thread. The thread itself lives as long as the process.
#[derive(Debug)]
pub struct Engine {
    epoll: &'static Mine,
    timer: &'static Mine,
}

impl State {
    /// The thread; the first call starts it.
    ///
    /// # Errors
    ///
    /// `EMFILE`, `ENFILE`, `ENOMEM`, `EAGAIN`: there are too many files, or threads.
    pub fn engine(&mut self) -> Result<&Engine, Errno> {
        if self.engine.is_none() {
            let engine = Engine::start()?;
            // Somebody may have a deadline already.
            engine.wake_at(self.next_timer());
            self.engine = Some(engine);
        }
        self.engine.as_ref().ok_or(Errno::NOMEM)
    }
}

impl Engine {
    fn start() -> Result<Self, Errno> {
        let epoll = Mine::new(epoll::create(CreateFlags::CLOEXEC)?);
        let flags = TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK;
        let timer = Mine::new(timerfd_create(TimerfdClockId::Monotonic, flags)?);
        epoll::add(&epoll, &timer, EventData::new_u64(TIMER), EventFlags::IN)?;
        // The thread keeps them for ever, and there is one.
        let engine = Self {
            epoll: Box::leak(Box::new(epoll)),
            timer: Box::leak(Box::new(timer)),
        };
        let (epoll, timer) = (engine.epoll, engine.timer);
        without_signals(|| {
            let thread = std::thread::Builder::new().name("rdmacm".into());
            let shared = Shared::get();
            let started = thread.spawn(move || run(shared, epoll, timer));
            started.map(drop).map_err(|_| Errno::AGAIN)
        })?;
        Ok(engine)
    }

    /// Has the thread look at a descriptor.
    ///
    /// # Errors
    ///
    /// `ENOMEM`, `ENOSPC`: the kernel does not watch so many.
    pub fn watch(&self, fd: impl AsFd, key: Key, flags: EventFlags) -> Result<(), Errno> {
        epoll::add(self.epoll, fd, EventData::new_u64(key), flags)
    }

    /// Changes what it looks for.
    pub fn change(&self, fd: impl AsFd, key: Key, flags: EventFlags) {
        // It is watched, so there is nothing to allocate.
        let _ = epoll::modify(self.epoll, fd, EventData::new_u64(key), flags);
    }

    /// Has it look no more. Closing would not do where a forked child has the descriptor, too.
    pub fn forget(&self, fd: impl AsFd) {
        let _ = epoll::delete(self.epoll, fd);
    }

    /// When to wake the thread.
    pub fn wake_at(&self, at: Option<Instant>) {
        // Zero would be never.
        let left = at.map_or(Duration::ZERO, |at| {
            let left = at.saturating_duration_since(Instant::now());
            left.max(Duration::from_nanos(1))
        });
        let spec = Itimerspec {
            it_interval: Timespec::default(),
            it_value: Timespec::try_from(left).unwrap_or_default(),
        };
        // The descriptor is a timer and the time is one, so this cannot fail.
        let _ = timerfd_settime(self.timer, TimerfdTimerFlags::empty(), &spec);
    }
}

fn run(shared: &'static Shared, epoll: &'static Mine, timer: &'static Mine) {
    let mut events: Vec<Event> = Vec::with_capacity(BATCH);
    loop {
        events.clear();
        match epoll::wait(epoll, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(Errno::INTR) => {}
            // The descriptor is one to wait for as long as this process lives.
            Err(_) => return,
        }
        let mut state = shared.lock();
        for event in &events {
            match event.data.u64() {
                TIMER => {
                    let _ = rustix::io::read(timer, &mut [0; 8]);
                }
                key => state.socket_ready(key, event.flags),
            }
        }
        state.run_timers();
    }
}

/// Signals are the application's business; a thread of ours must not take them.
fn without_signals<T>(start: impl FnOnce() -> T) -> T {
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both are places for a result, and `all` is filled before it is used.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let started = start();
    // SAFETY: `old` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    started
}

#[cfg(test)]
mod tests {
    use rustix::time::timerfd_gettime;

    use super::*;

    #[test]
    fn deadlines_from_before_the_thread_are_met() {
        let mut state = State::default();
        state.set_timer(1, Instant::now() + Duration::from_secs(3600));
        let engine = state.engine().unwrap();
        let left = timerfd_gettime(engine.timer).unwrap();
        assert!(left.it_value.tv_sec > 3000, "{left:?}");
    }
}
