//! Forked children: a child has the parent's sockets, but no thread that looks after them.
//!
//! So it gives them up at once, or peers would not notice the parent's death before the child's, and
//! ports would stay taken. It forgets all identifiers and channels, too: calls with those fail, and new
//! ones work, with a thread of the child's own.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::shared;

/// No higher descriptors are given up.
const MOST_FDS: usize = 1 << 16;

/// The descriptors that are given up.
static MADE: [AtomicU64; MOST_FDS / 64] = [const { AtomicU64::new(0) }; MOST_FDS / 64];

/// From now on children give up what they inherit.
pub fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // If this fails for want of memory, children keep sockets; nothing else depends on it.
        // SAFETY: the function keeps to what a child of a process with threads may do.
        unsafe { libc::pthread_atfork(None, None, Some(give_up)) };
    });
}

/// In a child, whose other threads are gone with whatever locks they held: nothing but system calls.
unsafe extern "C" fn give_up() {
    shared::forget();
    // SAFETY: a valid path.
    let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    for (index, word) in MADE.iter().enumerate() {
        let mut bits = word.swap(0, Ordering::Relaxed);
        while bits != 0 {
            let fd = (index * 64) as RawFd + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            // The number stays taken: its owner is forgotten, not dropped, and must not close another's.
            // SAFETY: the descriptor is this crate's, and nobody in the child uses it.
            if null < 0 || unsafe { libc::dup3(null, fd, libc::O_CLOEXEC) } < 0 {
                // SAFETY: as above.
                unsafe { libc::close(fd) };
            }
        }
    }
    if null >= 0 {
        // SAFETY: opened above.
        unsafe { libc::close(null) };
    }
}

/// A descriptor that a child gives up.
#[derive(Debug)]
pub struct Mine(OwnedFd);

impl Mine {
    /// Marks a descriptor.
    pub fn new(fd: OwnedFd) -> Self {
        mark(fd.as_raw_fd(), true);
        Self(fd)
    }
}

impl Drop for Mine {
    fn drop(&mut self) {
        // Before it is closed, and the number another's.
        mark(self.0.as_raw_fd(), false);
    }
}

impl AsFd for Mine {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

fn mark(fd: RawFd, made: bool) {
    let number = usize::try_from(fd).unwrap_or(usize::MAX);
    if let Some(word) = MADE.get(number / 64) {
        let bit = 1 << (number % 64);
        if made {
            word.fetch_or(bit, Ordering::Relaxed);
        } else {
            word.fetch_and(!bit, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn a_child_does_not_keep_a_connection_open() {
        watch();
        let (one, mut other) = UnixStream::pair().unwrap();
        let mine = Mine::new(OwnedFd::from(one));
        let (wait, mut release) = UnixStream::pair().unwrap();
        // SAFETY: the child makes only system calls, and leaves without running destructors.
        let child = unsafe { libc::fork() };
        assert!(child >= 0);
        if child == 0 {
            // It lives until it is told to end.
            let mut byte = [0_u8];
            // SAFETY: a place for a byte.
            unsafe { libc::read(wait.as_raw_fd(), byte.as_mut_ptr().cast(), 1) };
            // SAFETY: no more than that.
            unsafe { libc::_exit(0) };
        }
        drop(mine);
        // The end comes although the child lives.
        assert_eq!(other.read(&mut [0]).unwrap(), 0);
        std::io::Write::write_all(&mut release, &[1]).unwrap();
        let mut status = 0;
        // SAFETY: a place for the result.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0);
    }
}
