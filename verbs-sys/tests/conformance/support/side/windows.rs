//! What an end does with memory windows, and to its regions.

use std::hash::{DefaultHasher, Hasher};
use std::ptr;

use verbs_sys::MwType;

use super::*;
use crate::support::command::Refused;
use crate::support::windows::{Bind, Window};

impl Side {
    pub(super) fn capabilities(&self) -> u32 {
        let attr = self.context.query_device().expect("no attributes");
        attr.device_cap_flags
    }

    pub(super) fn alloc_mw(&mut self, pd: usize, kind: u32) -> Window {
        let kind = match kind {
            1 => MwType::Type1,
            _ => MwType::Type2,
        };
        let window = self.pds[pd].alloc_mw(kind).expect("no window");
        let answer = Window {
            id: self.windows.len(),
            rkey: window.rkey(),
        };
        self.windows.push(Some(window));
        answer
    }

    pub(super) fn rereg(
        &mut self,
        region: usize,
        len: Option<usize>,
        pd: Option<usize>,
        access: Option<u32>,
    ) -> Result<Region, i32> {
        let pd = pd.map(|pd| &self.pds[pd]);
        let access = access.map(AccessFlags::from_bits_retain);
        let memory = &mut self.memories[region];
        memory.rereg(self.memory, len, pd, access)?;
        let now = memory.region();
        Ok(Region {
            id: region,
            addr: now.addr(),
            len: now.len(),
            lkey: now.lkey(),
            rkey: now.rkey(),
        })
    }

    fn window(&mut self, window: usize) -> &mut MemoryWindow {
        self.windows[window].as_mut().expect("no such window")
    }

    fn bind_info(&self, bind: Bind) -> ffi::ibv_mw_bind_info {
        ffi::ibv_mw_bind_info {
            mr: bind.region.map_or(ptr::null_mut(), |region| {
                self.memories[region].region().as_raw()
            }),
            addr: bind.addr,
            length: bind.len,
            mw_access_flags: bind.access,
        }
    }

    pub(super) fn bind_mw(&mut self, qp: usize, window: usize, bind: Bind) -> Result<u32, i32> {
        let mut raw = ffi::ibv_mw_bind {
            wr_id: bind.wr_id,
            send_flags: ffi::IBV_SEND_SIGNALED,
            bind_info: self.bind_info(bind),
        };
        let window = self.window(window).as_raw();
        // SAFETY: all objects are alive and of one context. Not by the handle's function: tests
        // deregister what is bound.
        let code = unsafe {
            let bind_mw = (*self.context.as_raw()).ops.bind_mw.expect("no bind_mw");
            bind_mw(self.qp(qp).as_raw(), window, &mut raw)
        };
        match code {
            // SAFETY: the window is alive.
            0 => Ok(unsafe { (*window).rkey }),
            code => Err(code),
        }
    }

    pub(super) fn post_bind(
        &mut self,
        qp: usize,
        window: usize,
        rkey: u32,
        bind: Bind,
    ) -> Result<(), Refused> {
        let bind_info = self.bind_info(bind);
        let handle = self.window(window);
        let mut request = ffi::ibv_send_wr {
            wr_id: bind.wr_id,
            opcode: ffi::IBV_WR_BIND_MW,
            send_flags: ffi::IBV_SEND_SIGNALED,
            ..ffi::ibv_send_wr::zeroed()
        };
        request.extra.bind_mw = ffi::ibv_send_wr_bind_mw {
            mw: handle.as_raw(),
            rkey,
            bind_info,
        };
        // SAFETY: a valid request; the window and the region are alive.
        let result = unsafe { self.qp(qp).post_send(&mut request) };
        if result.is_ok() {
            self.window(window).set_rkey(rkey);
        }
        result.map_err(|error| Refused {
            errno: error.source.raw_os_error().unwrap_or(0),
            index: 0,
        })
    }

    pub(super) fn digest(&self, region: usize) -> u64 {
        let memory = &self.memories[region];
        let mut hasher = DefaultHasher::new();
        hasher.write(&memory.load(0, memory.len()));
        hasher.finish()
    }
}
