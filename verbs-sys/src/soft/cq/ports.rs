//! Completions of shared receive queues that have this completion queue, whichever queue pair took the message.

use std::sync::Arc;

use super::{Cq, Polled};
use crate::ffi::ibv_wc;
use crate::soft::xrc::Port;

impl Cq {
    pub(in crate::soft) fn attach_port(&self, port: &Arc<Port>) {
        let mut polled = self.polled.lock();
        polled.places += port.places();
        polled.ports.push(Arc::clone(port));
        self.reckon(&mut polled);
    }

    pub(in crate::soft) fn detach_port(&self, port: &Port) {
        let mut polled = self.polled.lock();
        let is_it = |other: &Arc<Port>| std::ptr::eq(&raw const **other, port);
        if let Some(at) = polled.ports.iter().position(is_it) {
            let gone = polled.ports.swap_remove(at);
            polled.asked.port_left(&gone);
            polled.places -= gone.places();
            self.reckon(&mut polled);
        }
    }

    /// Completions at a port became visible.
    pub(in crate::soft) fn notify_of_port(&self, solicited: bool) {
        if self.notes.load(std::sync::atomic::Ordering::Relaxed) {
            self.note_completions();
            self.wake(solicited);
        }
    }

    /// As [`poll`](Self::poll), where there are ports. These and the queue pairs take turns to be first.
    #[cold]
    pub(super) fn poll_with_ports(&self, polled: &mut Polled, wcs: &mut [ibv_wc]) -> usize {
        polled.ports_first = !polled.ports_first;
        let mut filled = 0;
        if polled.ports_first {
            filled = polled.poll_ports(wcs);
        }
        if filled < wcs.len() {
            filled += self.poll_members(polled, &mut wcs[filled..]);
        }
        if !polled.ports_first {
            filled += polled.poll_ports(&mut wcs[filled..]);
        }
        filled
    }
}

impl Polled {
    fn poll_ports(&mut self, wcs: &mut [ibv_wc]) -> usize {
        let mut filled = 0;
        for port in &self.ports {
            filled += port.poll(&mut wcs[filled..]);
        }
        // One that always has something must not keep the others waiting.
        if filled == wcs.len() && !self.ports.is_empty() {
            self.ports.rotate_left(1);
        }
        filled
    }
}
