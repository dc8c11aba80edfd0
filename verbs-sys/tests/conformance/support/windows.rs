//! How a test drives memory windows.

use serde::{Deserialize, Serialize};
use verbs_sys::{AccessFlags, WcStatus, ffi};

use super::{Command, Element, End, Qp, Queue, Refused, Region, Request, Target};

/// What a region needs so that a window can allow everything.
pub const BINDABLE: AccessFlags = AccessFlags::LOCAL_WRITE.union(AccessFlags::MW_BIND);

/// A memory window of an end: an index there, and its first key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    pub id: usize,
    pub rkey: u32,
}

/// What to bind a window to.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Bind {
    pub wr_id: u64,
    /// Index of the region, if any.
    pub region: Option<usize>,
    pub addr: u64,
    pub len: u64,
    pub access: u32,
}

impl Request {
    /// `rkey` is a key of the peer.
    pub fn send_inv(elements: &[Element], rkey: u32) -> Self {
        let request = Self::new(ffi::IBV_WR_SEND_WITH_INV, elements, Target::default());
        Self {
            imm: rkey,
            ..request
        }
    }

    pub fn local_inv(rkey: u32) -> Self {
        let request = Self::new(ffi::IBV_WR_LOCAL_INV, &[], Target::default());
        Self {
            imm: rkey,
            ..request
        }
    }
}

impl Region {
    /// A part of it for a window.
    pub fn part(&self, offset: usize, len: usize, access: AccessFlags) -> Bind {
        Bind {
            wr_id: 0,
            region: Some(self.id),
            addr: self.addr + offset as u64,
            len: len as u64,
            access: access.bits(),
        }
    }
}

impl End {
    /// Whether the device has these `ibv_device_cap_flags`.
    pub fn is_capable(&mut self, flags: ffi::ibv_device_cap_flags) -> bool {
        let has: u32 = self.call(Command::Capabilities);
        has & flags == flags
    }

    pub fn alloc_mw(&mut self, pd: usize, kind: ffi::ibv_mw_type) -> Window {
        self.call(Command::AllocMw { pd, kind })
    }

    pub fn dealloc_mw(&mut self, window: Window) {
        self.call(Command::DeallocMw { window: window.id })
    }

    pub fn try_deregister(&mut self, region: Region) -> Option<i32> {
        self.call(Command::TryDeregister { region: region.id })
    }

    /// ibv_bind_mw(3): the new key.
    pub fn try_bind(&mut self, qp: Qp, window: Window, bind: Bind) -> Result<u32, i32> {
        self.call(Command::BindMw {
            qp: qp.id,
            window: window.id,
            bind,
        })
    }

    /// The same, and its success.
    #[track_caller]
    pub fn bind(&mut self, qp: Qp, window: Window, bind: Bind) -> u32 {
        let rkey = self.try_bind(qp, window, bind).expect("cannot bind");
        self.expect(qp, Queue::Send, bind.wr_id, WcStatus::Success);
        rkey
    }

    pub fn unbind(&mut self, qp: Qp, window: Window) -> u32 {
        self.bind(qp, window, Bind::default())
    }

    /// Posts a bind to a key.
    pub fn try_post_bind(
        &mut self,
        qp: Qp,
        window: Window,
        rkey: u32,
        bind: Bind,
    ) -> Result<(), Refused> {
        self.call(Command::PostBind {
            qp: qp.id,
            window: window.id,
            rkey,
            bind,
        })
    }

    /// The same, and its success.
    #[track_caller]
    pub fn post_bind(&mut self, qp: Qp, window: Window, rkey: u32, bind: Bind) {
        let posted = self.try_post_bind(qp, window, rkey, bind);
        assert_eq!(posted, Ok(()), "posting a bind");
        let completion = self.expect(qp, Queue::Send, bind.wr_id, WcStatus::Success);
        assert_eq!(completion.opcode(), verbs_sys::WcOpcode::BindMw);
    }

    pub fn digest(&mut self, region: Region) -> u64 {
        self.call(Command::Digest { region: region.id })
    }
}
