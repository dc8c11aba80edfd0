//! The application's halves of identifiers and channels.

use core::ffi::c_void;

use rustix::io::Errno;
use verbs_sys::ffi::{ibv_gid, ibv_pd, ibv_qp_init_attr, ibv_qp_type};

use crate::abi::{ibv_sa_path_rec, rdma_cm_id, rdma_event_channel, rdma_port_space, zeroed};
use crate::address;
use crate::channel::Queue;
use crate::endpoint::Endpoint;
use crate::shared::{Key, State, new_key};

/// The one partition key of a RoCE port.
const DEFAULT_PKEY: u16 = 0xffff;
/// "Exactly", in a path record.
const EXACTLY: u8 = 2;

/// An identifier. The C structure comes first: its address is the handle.
#[repr(C)]
pub struct Id {
    /// What the application sees.
    pub id: rdma_cm_id,
    /// Names the other half.
    pub key: Key,
    path: ibv_sa_path_rec,
    /// How to make the queue pairs of connections that are requested of it, rdma_create_ep(3).
    pub template: Option<(*mut ibv_pd, ibv_qp_init_attr)>,
    /// What goes in front of the application's private data, `ai_connect` of rdma_getaddrinfo(3).
    pub prefix: Vec<u8>,
}

/// A channel. The C structure comes first: its address is the handle.
#[repr(C)]
pub struct Channel {
    channel: rdma_event_channel,
}

impl Id {
    /// A new one, whose other half has a key.
    pub fn allocate(
        key: Key,
        channel: *mut rdma_event_channel,
        context: *mut c_void,
        space: rdma_port_space,
        qp_type: ibv_qp_type,
    ) -> *mut Self {
        // SAFETY: integers, raw pointers, and a union of plain bytes.
        let mut id: rdma_cm_id = unsafe { zeroed() };
        id.channel = channel;
        id.context = context;
        id.ps = space;
        id.qp_type = qp_type;
        Box::into_raw(Box::new(Self {
            id,
            key,
            // SAFETY: integers, and a union of plain bytes.
            path: unsafe { zeroed() },
            template: None,
            prefix: Vec::new(),
        }))
    }

    /// The key of an identifier.
    ///
    /// # Errors
    ///
    /// `EINVAL` for a null pointer.
    ///
    /// # Safety
    ///
    /// The identifier is null, or made by this library and not destroyed.
    pub unsafe fn key(id: *mut rdma_cm_id) -> Result<Key, Errno> {
        if id.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: by the caller's promise it is at the start of an `Id`, whose key never changes.
        Ok(unsafe { (*id.cast::<Self>()).key })
    }

    /// Shows the application the addresses that the other half has, and its device.
    ///
    /// # Safety
    ///
    /// The identifier is alive, and no other call changes it at the same time.
    pub unsafe fn show(this: *mut Self, endpoint: &Endpoint) {
        // SAFETY: by the caller's promise.
        let (id, path) = unsafe { (&mut (*this).id, &raw mut (*this).path) };
        let route = &mut id.route;
        if let Some(local) = endpoint.local {
            route.addr.src_addr = address::to_c(local).0;
        }
        if let Some(remote) = endpoint.remote {
            route.addr.dst_addr = address::to_c(remote).0;
        }
        let Some(place) = endpoint.place else { return };
        id.verbs = place.device.context;
        id.port_num = place.port;
        if id.pd.is_null() {
            id.pd = place.device.pd;
        }
        let addresses = &mut route.addr.addr;
        addresses.sgid = ibv_gid { raw: place.gid };
        addresses.dgid = ibv_gid { raw: endpoint.dgid };
        addresses.pkey = DEFAULT_PKEY.to_be();
        if endpoint.remote.is_none() {
            return;
        }
        // SAFETY: integers, and a union of plain bytes.
        let mut record: ibv_sa_path_rec = unsafe { zeroed() };
        record.sgid = addresses.sgid;
        record.dgid = addresses.dgid;
        record.pkey = addresses.pkey;
        record.reversible = 1;
        record.numb_path = 1;
        record.traffic_class = endpoint.options.tos;
        record.mtu_selector = EXACTLY;
        record.mtu = endpoint.mtu;
        // SAFETY: a part of the live identifier that no reference covers.
        unsafe { path.write(record) };
        route.path_rec = path;
        route.num_paths = 1;
    }
}

impl Channel {
    /// A new channel and its queue.
    ///
    /// # Errors
    ///
    /// `EMFILE`, `ENFILE`: there are too many files.
    pub fn create(state: &mut State) -> Result<*mut rdma_event_channel, Errno> {
        let queue = Queue::new()?;
        let key = new_key();
        let channel = rdma_event_channel { fd: queue.fd() };
        state.channels.insert(key, queue);
        let made: *mut rdma_event_channel = Box::into_raw(Box::new(Self { channel })).cast();
        state.ended.remove(&made.addr());
        state.addresses.insert(made.addr(), key);
        Ok(made)
    }

    /// Destroys a channel.
    ///
    /// # Safety
    ///
    /// It came from [`Self::create`] and is not used any more.
    pub unsafe fn destroy(state: &mut State, channel: *mut rdma_event_channel) {
        let address = channel.addr();
        let key = state.addresses.remove(&address);
        let queue = key.and_then(|key| state.channels.remove(&key));
        // SAFETY: by the caller's promise.
        let channel = unsafe { Box::from_raw(channel.cast::<Self>()) };
        if queue.as_ref().is_some_and(Queue::blocks) {
            state.ended.insert(address);
        }
        if queue.is_none() {
            // A forked child's copy of the descriptor.
            // SAFETY: it was the queue's, which this process does not have.
            unsafe { libc::close(channel.channel.fd) };
        }
    }
}
