//! The device and its contexts.

use core::ffi::{c_char, c_int};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::OnceLock;

use rustix::io::Errno;

use super::cq::Cq;
use super::events::{AsyncEvents, Source};
use super::layout::{MAX_CQ, MAX_KEYS, MAX_PD, MAX_QP, MAX_SRQ};
use super::options::Options;
use super::process::Process;
use super::qp::Qp;
use super::srq::Srq;
use super::{extended, objects, qp};
use crate::ffi::*;

const NAME: &str = "soft0";
/// A limit that bounds nothing here, but that callers compute with.
pub(super) const MAX_CQE: c_int = 1 << 22;

/// Threads that make completions known, as callers count them.
pub(super) const COMP_VECTORS: u32 = 1;

/// Not a vendor's number: the bit in it says that it was not given out.
const VENDOR: u32 = 0x02_736f;

const DEFAULT_PKEY: u16 = 0xffff;

/// The one device. It is never freed, so a handle to it is valid for ever.
struct SoftDevice(ibv_device);

// SAFETY: the structure is written once, before it is shared, and holds no pointers.
unsafe impl Send for SoftDevice {}
// SAFETY: as for Send.
unsafe impl Sync for SoftDevice {}

fn device() -> *mut ibv_device {
    static DEVICE: OnceLock<SoftDevice> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        let mut device = ibv_device::zeroed();
        device.node_type = IBV_NODE_CA;
        device.transport_type = IBV_TRANSPORT_IB;
        copy_str(&mut device.name, NAME);
        copy_str(&mut device.dev_name, NAME);
        SoftDevice(device)
    });
    (&raw const device.0).cast_mut()
}

/// A context. The C structure comes first; the handle points into it.
#[repr(C)]
pub(super) struct Context {
    verbs: verbs_context,
    pub process: Option<Arc<Process>>,
    pub events: Arc<AsyncEvents>,
    pub options: Options,
    /// The descriptor that it was imported by, which is its own now.
    imported: Option<OwnedFd>,
}

/// The context behind a handle.
///
/// # Safety
///
/// `context` was opened by this provider and is not closed while the result is used.
pub(super) unsafe fn context<'a>(context: *mut ibv_context) -> &'a Context {
    let offset = core::mem::offset_of!(verbs_context, context);
    // SAFETY: the handle is the `context` field of a `verbs_context` at the start of a `Context`.
    unsafe { &*context.byte_sub(offset).cast::<Context>() }
}

/// Whether an object of this context is the parent's, and this is a forked child, which must leave it
/// alone.
///
/// # Safety
///
/// As for [`context`].
pub(super) unsafe fn is_inherited(handle: *mut ibv_context) -> bool {
    // SAFETY: by the caller's promise.
    let process = unsafe { context(handle) }.process();
    process.is_ok_and(|process| process.is_inherited())
}

impl Context {
    pub(super) fn process(&self) -> Result<&Arc<Process>, Errno> {
        self.process.as_ref().ok_or(Errno::NODEV)
    }
}

pub(super) unsafe fn get_device_list(num: *mut c_int) -> *mut *mut ibv_device {
    // SAFETY: null, or a place for the count, by the man page.
    if let Some(num) = unsafe { num.as_mut() } {
        *num = 1;
    }
    Box::into_raw(Box::new([device(), core::ptr::null_mut()])).cast()
}

pub(super) unsafe fn free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: the list came from `get_device_list`, which boxed two pointers.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) });
}

/// Made of the boot and the network namespace, as a NIC's is of its own address.
pub(super) unsafe fn get_device_guid(_device: *mut ibv_device) -> u64 {
    guid().to_be()
}

fn guid() -> u64 {
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let net = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in boot.iter().chain(net.as_os_str().as_encoded_bytes()) {
        hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    }
    // The second-lowest bit of the first byte marks a locally administered address.
    hash | 0x02 << 56
}

pub(super) unsafe fn open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: by this function's own contract.
    unsafe { open(device, &Options::from_env()) }
}

/// Opens the device, null and `errno` on failure.
///
/// # Safety
///
/// `device` is of this provider's list.
pub(crate) unsafe fn open(device: *mut ibv_device, options: &Options) -> *mut ibv_context {
    let events = match AsyncEvents::new() {
        Ok(events) => Arc::new(events),
        Err(error) => return objects::null(error),
    };
    let process = match Process::acquire() {
        Ok(process) => process,
        Err(error) => return objects::null(error),
    };
    if let Err(error) = process.adopt(options) {
        Process::release(process);
        return objects::null(error);
    }
    tracing::debug!(
        slot = process.slot,
        ?options,
        "the software device is opened"
    );
    let mut verbs = verbs_context::zeroed();
    verbs.sz = size_of::<verbs_context>();
    verbs.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    verbs.context.device = device;
    verbs.context.cmd_fd = process.info_file.as_raw_fd();
    verbs.context.async_fd = events.fd();
    verbs.context.num_comp_vectors = COMP_VECTORS as c_int;
    verbs.context.ops = objects::OPS;
    extended::offer(&mut verbs);
    #[cfg(feature = "drop-in")]
    {
        verbs.query_port = Some(crate::drop_in::query_port_sized);
    }
    let context = Box::new(Context {
        verbs,
        process: Some(process),
        events,
        options: options.clone(),
        imported: None,
    });
    let context = Box::into_raw(context);
    // SAFETY: just made.
    unsafe { &raw mut (*context).verbs.context }
}

/// ibv_import_device(3): another context of this process, by the descriptor of one, which from now on is the
/// new one's. Those of other processes are not supported.
#[cfg(any(feature = "drop-in", test))]
pub(crate) unsafe fn import_device(cmd_fd: c_int) -> *mut ibv_context {
    use std::os::fd::{AsFd, BorrowedFd, FromRawFd};

    // SAFETY: open, by the man page.
    let file = unsafe { BorrowedFd::borrow_raw(cmd_fd) };
    // SAFETY: the device is this provider's.
    let handle = unsafe { open(device(), &Options::from_env()) };
    if handle.is_null() {
        return handle;
    }
    let offset = core::mem::offset_of!(verbs_context, context);
    // SAFETY: just opened, and known to nobody else.
    let context = unsafe { &mut *handle.byte_sub(offset).cast::<Context>() };
    let is_ours = |process: &Arc<Process>| {
        let [ours, theirs] = [process.info_file.as_fd(), file].map(rustix::fs::fstat);
        Ok::<_, Errno>({
            let (ours, theirs) = (ours?, theirs?);
            (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
        })
    };
    match context.process().and_then(is_ours) {
        Ok(true) => {
            context.verbs.context.cmd_fd = cmd_fd;
            // SAFETY: it is ours now, by the man page.
            context.imported = Some(unsafe { OwnedFd::from_raw_fd(cmd_fd) });
            handle
        }
        result => {
            // SAFETY: opened above.
            unsafe { close_device(handle) };
            objects::null(result.err().unwrap_or(Errno::OPNOTSUPP))
        }
    }
}

pub(super) unsafe fn close_device(context: *mut ibv_context) -> c_int {
    let offset = core::mem::offset_of!(verbs_context, context);
    // SAFETY: the handle came from `open` and is closed once.
    let mut context = unsafe { Box::from_raw(context.byte_sub(offset).cast::<Context>()) };
    drop(context.imported.take());
    if let Some(process) = context.process.take() {
        Process::release(process);
    }
    0
}

pub(super) unsafe fn query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let mut filled = ibv_device_attr::zeroed();
    copy_str(&mut filled.fw_ver, env!("CARGO_PKG_VERSION"));
    filled.node_guid = guid().to_be();
    filled.sys_image_guid = filled.node_guid;
    filled.max_mr_size = u64::MAX;
    filled.page_size_cap = !0xfff;
    filled.vendor_id = VENDOR;
    filled.max_qp = MAX_QP as c_int;
    filled.max_qp_wr = qp::MAX_WR as c_int;
    filled.device_cap_flags = IBV_DEVICE_RC_RNR_NAK_GEN
        | IBV_DEVICE_CURR_QP_STATE_MOD
        | IBV_DEVICE_SRQ_RESIZE
        | IBV_DEVICE_MEM_WINDOW
        | IBV_DEVICE_MEM_WINDOW_TYPE_2B
        | IBV_DEVICE_XRC
        // LOCAL_INV and SEND_WITH_INV; registering by work request is not for user space.
        | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    filled.max_sge = qp::MAX_SGE as c_int;
    filled.max_sge_rd = qp::MAX_SGE as c_int;
    filled.max_cq = MAX_CQ as c_int;
    filled.max_cqe = MAX_CQE;
    filled.max_mr = MAX_KEYS as c_int - 1;
    // Windows and regions share the keys.
    filled.max_mw = MAX_KEYS as c_int - 1;
    filled.max_pd = MAX_PD as c_int - 1;
    filled.max_qp_rd_atom = qp::MAX_RD_ATOMIC.into();
    filled.max_qp_init_rd_atom = qp::MAX_RD_ATOMIC.into();
    filled.max_res_rd_atom = c_int::from(qp::MAX_RD_ATOMIC) * MAX_QP as c_int;
    // They are atomic among all accesses by processor instructions, as they are such instructions, which would be
    // IBV_ATOMIC_GLOB. But hardly a device says that, and programs ask whether it is the other.
    filled.atomic_cap = IBV_ATOMIC_HCA;
    filled.max_ah = c_int::MAX;
    filled.max_srq = MAX_SRQ as c_int;
    filled.max_srq_wr = qp::MAX_WR as c_int;
    filled.max_srq_sge = qp::MAX_SGE as c_int;
    filled.max_pkeys = 1;
    filled.phys_port_cnt = 1;
    // SAFETY: a place for the result, by the man page.
    unsafe { attr.write(filled) };
    0
}

pub(super) unsafe fn query_port(
    handle: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    // SAFETY: an open context, by the provider's contract.
    let context = unsafe { context(handle) };
    let Ok(process) = context.process() else {
        return libc::ENODEV;
    };
    if port != 1 {
        return libc::EINVAL;
    }
    let mut filled = ibv_port_attr::zeroed();
    filled.state = IBV_PORT_ACTIVE;
    filled.max_mtu = IBV_MTU_4096;
    filled.active_mtu = IBV_MTU_4096;
    filled.gid_tbl_len = process.gids.len() as c_int;
    filled.port_cap_flags = IBV_PORT_IP_BASED_GIDS;
    filled.max_msg_sz = qp::MAX_MESSAGE as u32;
    filled.pkey_tbl_len = 1;
    filled.max_vl_num = 1;
    filled.active_width = 2;
    filled.active_speed = 32;
    // LinkUp.
    filled.phys_state = 5;
    filled.link_layer = IBV_LINK_LAYER_ETHERNET;
    filled.flags = IBV_QPF_GRH_REQUIRED;
    // SAFETY: a place for the result, by the man page.
    unsafe { attr.write(filled) };
    0
}

pub(super) unsafe fn query_gid(
    handle: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    // SAFETY: an open context, by the provider's contract.
    let context = unsafe { context(handle) };
    let Ok(process) = context.process() else {
        return libc::ENODEV;
    };
    let found = usize::try_from(index)
        .ok()
        .and_then(|index| process.gids.get(index));
    match found.filter(|_| port == 1) {
        Some(raw) => {
            // SAFETY: a place for the result, by the man page.
            unsafe { gid.write(ibv_gid { raw: *raw }) };
            0
        }
        None => libc::EINVAL,
    }
}

/// The one partition of a RoCE port: the default one, with full membership.
pub(super) unsafe fn query_pkey(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    pkey: *mut u16,
) -> c_int {
    if port != 1 || index != 0 {
        return libc::EINVAL;
    }
    // SAFETY: a place for the result, by the man page.
    unsafe { pkey.write(DEFAULT_PKEY.to_be()) };
    0
}

pub(super) unsafe fn get_async_event(
    handle: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // SAFETY: an open context, by the provider's contract.
    let context = unsafe { context(handle) };
    match context.events.next() {
        Ok(next) => {
            // SAFETY: a place for the result, by the man page.
            unsafe { event.write(next) };
            0
        }
        Err(error) => objects::failed(error),
    }
}

/// Takes an event, if there is one.
///
/// # Safety
///
/// As for ibv_get_async_event(3).
#[cfg(feature = "drop-in")]
pub(crate) unsafe fn take_async_event(
    handle: *mut ibv_context,
    event: *mut ibv_async_event,
) -> bool {
    // SAFETY: an open context, by the caller's promise.
    let Some(next) = (unsafe { context(handle) }).events.take() else {
        return false;
    };
    // SAFETY: a place for the result.
    unsafe { event.write(next) };
    true
}

pub(super) unsafe fn ack_async_event(event: *mut ibv_async_event) {
    // SAFETY: an event that was delivered and not yet acknowledged, by the man page.
    if let Some(source) = unsafe { source(&*event) } {
        source.acknowledge();
    }
}

/// The object of an event, if it is of an object.
///
/// # Safety
///
/// The event was delivered by this provider and is not acknowledged yet, so its object is alive.
unsafe fn source<'a>(event: &ibv_async_event) -> Option<&'a Source> {
    // SAFETY: the type tells which member is set, and the handle is the address of our structure.
    unsafe {
        match event.event_type {
            IBV_EVENT_SRQ_LIMIT_REACHED => Some((*event.element.srq.cast::<Srq>()).async_events()),
            IBV_EVENT_CQ_ERR => Some((*event.element.cq.cast::<Cq>()).async_events()),
            IBV_EVENT_QP_FATAL
            | IBV_EVENT_QP_REQ_ERR
            | IBV_EVENT_QP_ACCESS_ERR
            | IBV_EVENT_COMM_EST
            | IBV_EVENT_SQ_DRAINED
            | IBV_EVENT_QP_LAST_WQE_REACHED => {
                Some((*event.element.qp.cast::<Qp>()).async_events())
            }
            _ => None,
        }
    }
}

fn copy_str(to: &mut [c_char], from: &str) {
    for (to, from) in to.iter_mut().zip(from.bytes()) {
        *to = from as c_char;
    }
}
