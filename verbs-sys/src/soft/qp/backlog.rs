//! Waiting for room in the queue of another queue pair's datagrams.

use rustix::io::Errno;

use crate::soft::epoch::Holder;
use crate::soft::layout::Readiness;
use crate::soft::link::{Link, Via};

/// So many times a sender waits for a receiver that gets no processor, whatever its process seems to be: a container may
/// be frozen.
const WAITS: u32 = 15;

/// Has room made, and sends as soon as there is some. `send` waits for a while, and ends with `EAGAIN` where that was in
/// vain; then `is_late` says whether it may be worth while to wait again.
#[cold]
pub(super) fn send_when_there_is_room(
    send: impl Fn() -> Result<(), Errno>,
    wake: impl Fn(),
    is_late: impl Fn() -> bool,
) -> Result<(), Errno> {
    let mut waits = 0;
    loop {
        wake();
        let sent = send();
        waits += 1;
        if sent != Err(Errno::AGAIN) || waits == WAITS || !is_late() {
            return sent;
        }
    }
}

/// Whether somebody takes datagrams there, and can go on with that.
pub(super) fn takes_datagrams(link: &Link) -> bool {
    let goes_on = match &link.via {
        Via::Local => true,
        Via::Shm(peer) => !peer.has_exited() && !peer.is_stopped(),
        Via::Remote | Via::Nobody => false,
    };
    goes_on && link.target().readiness() == Readiness::Ready
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Sends where there is room after so many waits; how often somebody was woken, and what came of it.
    fn sent_after(waits: u32, is_late: bool) -> (u32, Result<(), Errno>) {
        let woken = Cell::new(0);
        let wake = || woken.set(woken.get() + 1);
        let send = || {
            let has_room = woken.get() > waits;
            has_room.then_some(()).ok_or(Errno::AGAIN)
        };
        let sent = send_when_there_is_room(send, wake, || is_late);
        (woken.get(), sent)
    }

    #[test]
    fn one_that_gets_no_processor_is_waited_for() {
        assert_eq!(sent_after(0, true), (1, Ok(())));
        assert_eq!(sent_after(3, true), (4, Ok(())));
        assert_eq!(sent_after(WAITS, true), (WAITS, Err(Errno::AGAIN)));
    }

    #[test]
    fn one_that_takes_nothing_is_waited_for_once() {
        assert_eq!(sent_after(0, false), (1, Ok(())));
        assert_eq!(sent_after(1, false), (1, Err(Errno::AGAIN)));
    }

    #[test]
    fn where_nobody_is_there_is_no_waiting() {
        let sent = send_when_there_is_room(|| Err(Errno::CONNREFUSED), || {}, || true);
        assert_eq!(sent, Err(Errno::CONNREFUSED));
    }
}
