//! Forked children: what one inherits of its parent's device it must not use, and not keep.
//!
//! A child has copies of the parent's handles, but the files behind them are shared. So destroying an
//! inherited object does nothing (see [`Process::is_inherited`](super::process::Process::is_inherited)),
//! and the sockets by which peers know the parent are given up at once: otherwise peers would not notice
//! the parent's death before the child's, and names that the parent wants again would stay taken.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Once;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::layout::MAX_SLOT;

/// What the names of our sockets begin with.
const PREFIX: &[u8] = b"\0verbs-soft0/";
/// No more file descriptors are looked at.
const MOST_FDS: libc::rlim_t = 1 << 16;

/// From now on children give up what they inherit.
pub(super) fn watch() {
    static WATCHED: Once = Once::new();
    // SAFETY: the function keeps to what a child of a process with threads may do.
    WATCHED.call_once(
        || match unsafe { libc::pthread_atfork(None, None, Some(give_up)) } {
            0 => {}
            error => tracing::warn!(error, "pthread_atfork: forked children will keep sockets"),
        },
    );
}

/// In a child, whose other threads are gone with whatever locks they held: nothing but system calls.
unsafe extern "C" fn give_up() {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: a place for the result.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    // SAFETY: a valid path.
    let null = unsafe { libc::open(c"/dev/null".as_ptr(), libc::O_RDWR | libc::O_CLOEXEC) };
    for fd in 0..limit.rlim_cur.min(MOST_FDS) as libc::c_int {
        if !is_ours(fd) {
            continue;
        }
        // The number stays taken: whoever has inherited it may yet use it.
        // SAFETY: the descriptor is this module's to give up, and nobody in the child relies on it.
        if null < 0 || unsafe { libc::dup3(null, fd, libc::O_CLOEXEC) } < 0 {
            // SAFETY: as above.
            unsafe { libc::close(fd) };
        }
    }
    if null >= 0 {
        // SAFETY: opened above.
        unsafe { libc::close(null) };
    }
}

/// The numbers of sockets of the Internet that were made here, whoever has them now.
static MADE: [AtomicU64; MOST_FDS as usize / 64] =
    [const { AtomicU64::new(0) }; MOST_FDS as usize / 64];
/// The ports that they have at one end: from above this on, as many as there are slots; 0 is none.
static BASE_PORT: AtomicU32 = AtomicU32::new(0);

/// Where the sockets of the Internet listen, of this process and of its peers.
pub(super) fn set_base_port(port: u16) {
    BASE_PORT.store(port.into(), Ordering::Relaxed);
}

/// A socket of the Internet is one of ours.
pub(super) fn made(socket: &OwnedFd) {
    let fd = socket.as_raw_fd() as usize;
    if let Some(word) = MADE.get(fd / 64) {
        word.fetch_or(1 << (fd % 64), Ordering::Relaxed);
    }
}

/// Its number may be another's by now, but not with such a port at either end.
fn was_made(fd: libc::c_int, name: &libc::sockaddr_un) -> bool {
    let family = libc::c_int::from(name.sun_family);
    if family != libc::AF_INET && family != libc::AF_INET6 {
        return false;
    }
    let number = usize::try_from(fd).unwrap_or(usize::MAX);
    let word = MADE
        .get(number / 64)
        .map(|word| word.load(Ordering::Relaxed));
    // Both families have the port in the same place.
    let port = u16::from_be_bytes([name.sun_path[0] as u8, name.sun_path[1] as u8]);
    let slot = u32::from(port).wrapping_sub(BASE_PORT.load(Ordering::Relaxed));
    word.is_some_and(|word| word >> (number % 64) & 1 != 0) && (1..MAX_SLOT).contains(&slot)
}

/// Whether it is a socket that has a name of ours at either end.
fn is_ours(fd: libc::c_int) -> bool {
    type Ask =
        unsafe extern "C" fn(libc::c_int, *mut libc::sockaddr, *mut libc::socklen_t) -> libc::c_int;
    let asks: [Ask; 2] = [libc::getsockname, libc::getpeername];
    asks.into_iter().any(|ask| {
        let mut name = libc::sockaddr_un {
            sun_family: 0,
            sun_path: [0; 108],
        };
        let mut len = size_of::<libc::sockaddr_un>() as libc::socklen_t;
        // SAFETY: a place for an address of that size.
        let found = unsafe { ask(fd, (&raw mut name).cast(), &mut len) };
        let path = name.sun_path.iter().map(|byte| *byte as u8);
        let has_name = libc::c_int::from(name.sun_family) == libc::AF_UNIX
            && path.take(PREFIX.len()).eq(PREFIX.iter().copied());
        found == 0 && (has_name || was_made(fd, &name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soft::identity;

    #[test]
    fn sockets_are_known_by_their_names() {
        let (slot, listener) = identity::claim_slot().unwrap();
        let client = identity::seqpacket().unwrap();
        assert!(is_ours(listener.as_raw_fd()) && !is_ours(client.as_raw_fd()));
        rustix::net::connect(&client, &identity::slot_address(slot).unwrap()).unwrap();
        let accepted = rustix::net::accept(&listener).unwrap();
        assert!(is_ours(client.as_raw_fd()) && is_ours(accepted.as_raw_fd()));
        let (one, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let internet = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(!is_ours(one.as_raw_fd()) && !is_ours(internet.as_raw_fd()));
        assert!(!is_ours(-1));
        // A port of ours makes a socket ours only if it was made here, and the other way round.
        let port = internet.local_addr().unwrap().port();
        set_base_port(port - 7);
        assert!(!is_ours(internet.as_raw_fd()));
        made(&OwnedFd::from(internet.try_clone().unwrap()));
        let again = OwnedFd::from(internet);
        made(&again);
        assert!(is_ours(again.as_raw_fd()));
        set_base_port(port);
        assert!(!is_ours(again.as_raw_fd()));
    }
}
