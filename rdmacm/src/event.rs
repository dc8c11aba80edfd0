//! Events: what waits in a channel, and what the application gets.

use core::ffi::{c_int, c_void};

use verbs_sys::ffi::ibv_ah_attr;

use crate::abi::{
    rdma_cm_event, rdma_cm_event_param, rdma_cm_event_type, rdma_cm_id, rdma_conn_param,
    rdma_ud_param, zeroed,
};
use crate::message::Side;
use crate::shared::Key;

/// Most bytes of private data.
const MOST_PRIVATE: usize = 256;

/// Parameters of an event that waits.
#[derive(Clone, Copy, Default)]
pub enum Param {
    /// There are none.
    #[default]
    None,
    /// Of a connection: what the other side says, and how often it is to be repeated.
    Connection(Side, u8),
    /// Of a datagram service.
    Datagrams {
        /// The way there.
        ah_attr: ibv_ah_attr,
        /// Number of its queue pair.
        qp_num: u32,
        /// Its queue key.
        qkey: u32,
    },
}

/// An event that waits in a channel.
pub struct Queued {
    /// The identifier that it is about.
    pub target: Key,
    /// The identifier whose destruction waits for its acknowledgement: the same, or the listening one.
    pub counted: Key,
    /// Which.
    pub kind: rdma_cm_event_type,
    /// See [`rdma_cm_event::status`].
    pub status: c_int,
    /// Its parameters.
    pub param: Param,
    /// What the other application says.
    pub private: Vec<u8>,
}

impl std::fmt::Debug for Queued {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queued")
            .field("target", &self.target)
            .field("kind", &self.kind)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl Queued {
    /// One without status and parameters.
    #[must_use]
    pub fn new(target: Key, counted: Key, kind: rdma_cm_event_type) -> Self {
        Self {
            target,
            counted,
            kind,
            status: 0,
            param: Param::None,
            private: Vec::new(),
        }
    }
}

/// An event that the application has. The C structure comes first: its address is the handle.
#[repr(C)]
pub struct Event {
    event: rdma_cm_event,
    counted: Key,
    private: [u8; MOST_PRIVATE],
}

impl Event {
    /// Hands an event out.
    pub fn deliver(
        queued: &Queued,
        id: *mut rdma_cm_id,
        listener: *mut rdma_cm_id,
    ) -> *mut rdma_cm_event {
        let len = queued.private.len().min(MOST_PRIVATE);
        let mut private = [0; MOST_PRIVATE];
        private[..len].copy_from_slice(&queued.private[..len]);
        let event = Box::into_raw(Box::new(Self {
            event: rdma_cm_event {
                id,
                listen_id: listener,
                event: queued.kind,
                status: queued.status,
                // SAFETY: both members consist of integers and raw pointers.
                param: unsafe { zeroed() },
            },
            counted: queued.counted,
            private,
        }));
        // SAFETY: just made; only the address is taken.
        let start: *const c_void = unsafe { (&raw const (*event).private).cast() };
        let private_data = if len == 0 { core::ptr::null() } else { start };
        let param = parameters(queued.param, private_data, len as u8);
        // SAFETY: just made.
        unsafe { (*event).event.param = param };
        event.cast()
    }

    /// Takes an event back: whose it was.
    ///
    /// # Safety
    ///
    /// It came from [`Self::deliver`] and is not used any more.
    pub unsafe fn release(event: *mut rdma_cm_event) -> Key {
        // SAFETY: by the caller's promise.
        unsafe { Box::from_raw(event.cast::<Self>()) }.counted
    }
}

fn parameters(param: Param, private_data: *const c_void, len: u8) -> rdma_cm_event_param {
    match param {
        Param::Datagrams {
            ah_attr,
            qp_num,
            qkey,
        } => rdma_cm_event_param {
            ud: rdma_ud_param {
                private_data,
                private_data_len: len,
                ah_attr,
                qp_num,
                qkey,
            },
        },
        Param::Connection(side, retry_count) => rdma_cm_event_param {
            conn: rdma_conn_param {
                private_data,
                private_data_len: len,
                // What the other side sends is what this one has to take.
                responder_resources: side.initiator_depth,
                initiator_depth: side.responder_resources,
                flow_control: side.flow_control.into(),
                retry_count,
                rnr_retry_count: side.rnr_retry,
                srq: side.srq.into(),
                qp_num: side.qp_num,
            },
        },
        Param::None => {
            // SAFETY: both members consist of integers and raw pointers.
            let mut param: rdma_cm_event_param = unsafe { zeroed() };
            // Both members have these two in the same place.
            param.conn.private_data = private_data;
            param.conn.private_data_len = len;
            param
        }
    }
}
