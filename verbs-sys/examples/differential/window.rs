//! Memory windows of a running program.

use std::fmt::Write as _;

use verbs_sys::{BindError, BindInfo, MemoryWindow, MwType, SendFlags};

use crate::end::errno;
use crate::post::write_posted;
use crate::program::{Bind, Side};
use crate::run::World;

/// A window, and the key that it had before the present one.
pub struct Window {
    window: MemoryWindow,
    kind: MwType,
    former: u32,
}

impl World<'_> {
    pub fn window_key(&self, pair: usize) -> u32 {
        let window = self.windows[pair].as_ref();
        window.map_or(0, |window| window.window.rkey())
    }

    pub fn former_window_key(&self, pair: usize) -> u32 {
        self.windows[pair]
            .as_ref()
            .map_or(0, |window| window.former)
    }

    pub fn alloc_window(&mut self, pair: usize, kind: MwType, trace: &mut String) {
        match self.pds[0].alloc_mw(kind) {
            Ok(window) => {
                let former = window.rkey();
                self.windows[pair] = Some(Window {
                    window,
                    kind,
                    former,
                });
            }
            Err(error) => {
                // Writing to a string does not fail.
                let _ = writeln!(trace, " {error}");
            }
        }
    }

    /// Binds in the way of the window's type.
    pub fn bind(&mut self, pair: usize, side: Side, bind: &Bind, trace: &mut String) {
        let region = &self.memories[bind.place.region].region;
        let info = BindInfo {
            region,
            addr: region.addr().wrapping_add_signed(bind.place.offset),
            len: bind.place.len.into(),
            access: bind.access,
        };
        let end = &mut self.pairs[pair][side.index()];
        let Some(Window {
            window,
            kind,
            former,
        }) = &mut self.windows[pair]
        else {
            return;
        };
        *former = window.rkey();
        if *kind == MwType::Type2 {
            let rkey = if bind.same_key {
                window.rkey()
            } else {
                window.next_rkey()
            };
            let mut request = [window.bind_request(bind.id, rkey, info)];
            let result = end.post_send(&mut request);
            if result.is_ok() {
                window.set_rkey(rkey);
            }
            return write_posted(trace, result);
        }
        let info = (bind.place.len > 0).then_some(info);
        // SAFETY: the queue pair is in no `OwnedQueuePair`.
        match unsafe { window.bind(&end.qp, bind.id, SendFlags::empty(), info) } {
            Ok(()) => end.sends.push_back((bind.id, true)),
            Err(error) => {
                let text = match error {
                    BindError::Refused { source, .. } => errno(&source),
                    other => other.to_string(),
                };
                let _ = writeln!(trace, " bind {text}");
            }
        }
    }
}
