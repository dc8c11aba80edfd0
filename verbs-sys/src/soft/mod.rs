//! The software RDMA device: connections and datagrams between processes, in user space.
//!
//! No kernel module, no daemon, no root. Within one host, one-sided operations are copies that the
//! initiator makes itself, and messages go through a ring per connection; between hosts, which takes
//! [`Options::listen`], requests go over TCP and datagrams over UDP. [`Options`] are given to
//! [`Device::open_with`](crate::Device::open_with), or read from the environment.

mod ah;
mod asymmetric;
mod bias;
mod biased;
mod channel;
mod cq;
mod device;
mod epoch;
mod events;
mod executing;
mod exit;
mod extended;
mod fencing;
mod fork;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod identity;
mod index;
mod injection;
mod keys;
mod layout;
mod link;
mod memory;
mod mw;
mod nothing;
mod objects;
mod options;
mod process;
mod qp;
mod segment;
mod service;
mod shared;
mod srq;
mod turn;
mod xrc;

#[cfg(any(feature = "drop-in", test))]
pub(crate) use ah::init_ah_from_wc;
#[cfg(any(feature = "drop-in", test))]
pub(crate) use device::import_device;
pub(crate) use device::open;
#[cfg(feature = "drop-in")]
pub(crate) use device::take_async_event;
pub use injection::{FaultInjection, Hits};
#[cfg(feature = "drop-in")]
pub(crate) use objects::take_cq_event;
#[cfg(any(feature = "drop-in", test))]
pub(crate) use objects::{
    import_dm, import_mr, import_pd, qp_to_qp_ex, reg_mr_iova, unimport_dm, unimport_mr,
    unimport_pd,
};
#[cfg(feature = "drop-in")]
pub(crate) use options::switch_of;
pub use options::{Listen, Options, RegistrationCost};

use crate::provider::Provider;

/// The software device's control calls.
pub(crate) static PROVIDER: Provider = Provider {
    is_software: true,
    fork_init: || {
        fork::watch();
        0
    },
    get_device_list: device::get_device_list,
    free_device_list: device::free_device_list,
    get_device_guid: device::get_device_guid,
    open_device: device::open_device,
    close_device: device::close_device,
    query_device: device::query_device,
    query_port: device::query_port,
    query_gid: device::query_gid,
    query_pkey: device::query_pkey,
    get_async_event: device::get_async_event,
    ack_async_event: device::ack_async_event,
    alloc_memory: objects::alloc_memory,
    free_memory: objects::free_memory,
    alloc_pd: objects::alloc_pd,
    dealloc_pd: objects::dealloc_pd,
    reg_mr: objects::reg_mr,
    rereg_mr: objects::rereg_mr,
    dereg_mr: objects::dereg_mr,
    create_ah: objects::create_ah,
    destroy_ah: objects::destroy_ah,
    create_comp_channel: objects::create_comp_channel,
    destroy_comp_channel: objects::destroy_comp_channel,
    get_cq_event: objects::get_cq_event,
    ack_cq_events: objects::ack_cq_events,
    create_cq: objects::create_cq,
    resize_cq: objects::resize_cq,
    destroy_cq: objects::destroy_cq,
    create_qp: objects::create_qp,
    modify_qp: objects::modify_qp,
    query_qp: objects::query_qp,
    destroy_qp: objects::destroy_qp,
    create_srq: shared::create_srq,
    modify_srq: shared::modify_srq,
    query_srq: shared::query_srq,
    destroy_srq: shared::destroy_srq,
};
