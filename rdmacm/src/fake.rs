//! A device for tests: it has the addresses of the loopback interface, and remembers what queue pairs are
//! told.

#![allow(clippy::missing_safety_doc)] // the man pages, as far as tests need them

use core::ffi::{c_int, c_void};
use core::ptr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, OnceLock};

use verbs_sys::ffi::*;

/// READs and atomics at a time.
pub const MAX_RD_ATOMIC: u8 = 16;
const GIDS: [[u8; 16]; 2] = [
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127, 0, 0, 1],
    [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1],
];

/// What is to happen while a state is entered.
type Meanwhile = (ibv_qp_state, Box<dyn FnOnce()>);

/// A queue pair. The C structure comes first.
#[repr(C)]
pub struct Qp {
    qp: ibv_qp,
    moves: Mutex<Vec<(ibv_qp_attr, u32)>>,
    meanwhile: Option<Meanwhile>,
}

struct Device(ibv_device);

// SAFETY: never changed.
unsafe impl Send for Device {}
// SAFETY: as for Send.
unsafe impl Sync for Device {}

/// Ours, and one that is not to be touched.
fn devices() -> [*mut ibv_device; 2] {
    static DEVICES: OnceLock<[Device; 2]> = OnceLock::new();
    let devices = DEVICES.get_or_init(|| [b"rxe0".as_slice(), b"soft0"].map(named));
    devices
        .each_ref()
        .map(|device| (&raw const device.0).cast_mut())
}

fn named(name: &[u8]) -> Device {
    // SAFETY: integers and optional functions.
    let mut device: ibv_device = unsafe { crate::abi::zeroed() };
    for (to, from) in device.name.iter_mut().zip(name) {
        *to = *from as _;
    }
    Device(device)
}

/// What a queue pair was told: each state with its attributes.
pub fn moves(qp: *mut ibv_qp) -> Vec<(ibv_qp_attr, u32)> {
    // SAFETY: made below, and alive.
    unsafe { (*qp.cast::<Qp>()).moves.lock().unwrap().clone() }
}

/// The states that it went through.
pub fn states(qp: *mut ibv_qp) -> Vec<ibv_qp_state> {
    moves(qp).iter().map(|(attr, _)| attr.qp_state).collect()
}

/// Has something happen while a queue pair is brought to a state.
pub fn meanwhile(qp: *mut ibv_qp, state: ibv_qp_state, happen: impl FnOnce() + 'static) {
    // SAFETY: made below, and alive.
    unsafe { (*qp.cast::<Qp>()).meanwhile = Some((state, Box::new(happen))) };
}

pub unsafe fn ibv_get_device_list(_count: *mut c_int) -> *mut *mut ibv_device {
    let [other, ours] = devices();
    Box::into_raw(Box::new([other, ours, ptr::null_mut()])).cast()
}

pub unsafe fn ibv_free_device_list(list: *mut *mut ibv_device) {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 3]>()) });
}

pub unsafe fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    assert_eq!(device, devices()[1], "a device that is not ours was opened");
    // SAFETY: integers, pointers and optional functions.
    let mut context: ibv_context = unsafe { crate::abi::zeroed() };
    context.device = device;
    Box::into_raw(Box::new(context))
}

pub unsafe fn ibv_query_device(_context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int {
    let mut filled = ibv_device_attr::zeroed();
    filled.phys_port_cnt = 1;
    filled.max_qp_rd_atom = MAX_RD_ATOMIC.into();
    filled.max_qp_init_rd_atom = MAX_RD_ATOMIC.into();
    // SAFETY: a place for the result.
    unsafe { attr.write(filled) };
    0
}

pub unsafe fn ibv_query_port(
    _context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    assert_eq!(port, 1);
    let mut filled = ibv_port_attr::zeroed();
    filled.gid_tbl_len = GIDS.len() as c_int;
    filled.active_mtu = IBV_MTU_2048;
    // SAFETY: a place for the result.
    unsafe { attr.write(filled) };
    0
}

pub unsafe fn ibv_query_gid(
    _context: *mut ibv_context,
    port: u8,
    index: c_int,
    gid: *mut ibv_gid,
) -> c_int {
    assert_eq!(port, 1);
    let raw = GIDS[usize::try_from(index).unwrap()];
    // SAFETY: a place for the result.
    unsafe { gid.write(ibv_gid { raw }) };
    0
}

pub unsafe fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd {
    Box::into_raw(Box::new(ibv_pd { context, handle: 0 }))
}

pub unsafe fn ibv_create_comp_channel(_context: *mut ibv_context) -> *mut ibv_comp_channel {
    // SAFETY: integers and pointers.
    Box::into_raw(Box::new(unsafe { crate::abi::zeroed() }))
}

pub unsafe fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(channel) });
    0
}

pub unsafe fn ibv_create_cq(
    _context: *mut ibv_context,
    cqe: c_int,
    _cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: integers and pointers.
    let mut cq: ibv_cq = unsafe { crate::abi::zeroed() };
    cq.cqe = cqe;
    cq.channel = channel;
    Box::into_raw(Box::new(cq))
}

pub unsafe fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(cq) });
    0
}

pub unsafe fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    static NUMBERS: AtomicU32 = AtomicU32::new(0x100);
    // SAFETY: readable, by the man page.
    let init = unsafe { &*init };
    let mut qp = ibv_qp::zeroed();
    qp.pd = pd;
    qp.qp_type = init.qp_type;
    qp.send_cq = init.send_cq;
    qp.recv_cq = init.recv_cq;
    qp.srq = init.srq;
    qp.qp_num = NUMBERS.fetch_add(1, Ordering::Relaxed);
    Box::into_raw(Box::new(Qp {
        qp,
        moves: Mutex::default(),
        meanwhile: None,
    }))
    .cast()
}

/// Fails where the state does not follow, and for a path MTU of 256 bytes.
pub unsafe fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: made above, and readable.
    let (qp, attr) = unsafe { (&mut *qp.cast::<Qp>(), *attr) };
    let follows = matches!(
        (qp.qp.state, attr.qp_state),
        (IBV_QPS_RESET | IBV_QPS_INIT, IBV_QPS_INIT)
            | (IBV_QPS_INIT, IBV_QPS_RTR)
            | (IBV_QPS_RTR, IBV_QPS_RTS)
            | (_, IBV_QPS_ERR)
    );
    if !follows || attr.path_mtu == IBV_MTU_256 {
        return libc::EINVAL;
    }
    let now = |(state, _): &mut Meanwhile| *state == attr.qp_state;
    if let Some((_, happen)) = qp.meanwhile.take_if(now) {
        happen();
    }
    qp.qp.state = attr.qp_state;
    qp.moves.get_mut().unwrap().push((attr, mask as u32));
    0
}

pub unsafe fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(qp.cast::<Qp>()) });
    0
}

pub unsafe fn ibv_create_srq(pd: *mut ibv_pd, _init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    let mut srq = ibv_srq::zeroed();
    srq.pd = pd;
    Box::into_raw(Box::new(srq))
}

pub unsafe fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int {
    // SAFETY: made above.
    drop(unsafe { Box::from_raw(srq) });
    0
}
