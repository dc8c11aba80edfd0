//! Devices: opened once for the process, and found by their addresses.

use std::net::IpAddr;
use std::ptr;
use std::sync::PoisonError;

use rustix::io::Errno;
use verbs_sys::ffi::{
    ibv_context, ibv_device, ibv_device_attr, ibv_gid, ibv_mtu, ibv_pd, ibv_port_attr,
};

use crate::address::{errno_of, gid_of};
use crate::shared::Shared;
use crate::verbs;

/// An open device. It stays open: applications may use it as long as the library is there.
#[derive(Debug)]
pub struct Device {
    /// What every identifier on it has as `verbs`.
    pub context: *mut ibv_context,
    /// The default protection domain.
    pub pd: *mut ibv_pd,
    /// READs and atomics that a queue pair takes at a time.
    pub max_responder_resources: u8,
    /// READs and atomics that a queue pair sends at a time.
    pub max_initiator_depth: u8,
    ports: u8,
}

// SAFETY: the verbs may be called from any thread, and the fields do not change.
unsafe impl Send for Device {}
// SAFETY: as for Send.
unsafe impl Sync for Device {}

/// Where on a device an address is.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// The device.
    pub device: &'static Device,
    /// Its port, counted from 1.
    pub port: u8,
    /// Index in the port's GID table.
    pub gid_index: u8,
    /// The GID there.
    pub gid: [u8; 16],
}

/// What a call of the verbs that gives an `int` says.
///
/// # Errors
///
/// It gives a positive errno value, or a negative number and `errno`.
pub fn check(code: i32) -> Result<(), Errno> {
    match code {
        0 => Ok(()),
        1.. => Err(errno_of(code)),
        _ => Err(last_errno()),
    }
}

/// What a call of the verbs that gives a pointer says.
///
/// # Errors
///
/// It gives null and `errno`.
pub fn check_pointer<T>(pointer: *mut T) -> Result<*mut T, Errno> {
    if pointer.is_null() {
        Err(last_errno())
    } else {
        Ok(pointer)
    }
}

/// What the C library's last call says, which has failed.
pub fn last_errno() -> Errno {
    crate::address::errno(std::io::Error::last_os_error())
}

impl Shared {
    /// All devices; the first call opens them.
    ///
    /// # Errors
    ///
    /// `ENODEV`: there is none, or none can be opened.
    pub fn devices(&self) -> Result<&'static [Device], Errno> {
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(devices) = *devices {
            return Ok(devices);
        }
        let opened = open_all();
        if opened.is_empty() {
            return Err(Errno::NODEV);
        }
        let opened: &'static [Device] = Vec::leak(opened);
        *devices = Some(opened);
        Ok(opened)
    }

    /// The place of a local address. Addresses of the host itself that no port has are those of the
    /// first device's first GID: the whole of 127.0.0.0/8 is, and only one of it is a GID.
    ///
    /// # Errors
    ///
    /// `ENODEV`: no device has the address.
    pub fn place_of(&self, ip: IpAddr) -> Result<Place, Errno> {
        let devices = self.devices()?;
        let wanted = gid_of(ip.to_canonical());
        let places = || devices.iter().flat_map(Device::places);
        if let Some(place) = places().find(|place| place.gid == wanted) {
            return Ok(place);
        }
        let first = places().next().filter(|_| ip.to_canonical().is_loopback());
        first.ok_or(Errno::NODEV)
    }
}

impl Device {
    fn places(&'static self) -> impl Iterator<Item = Place> {
        let ports = 1..=self.ports;
        ports.flat_map(move |port| {
            let indices = 0..self.gid_count(port);
            indices.filter_map(move |gid_index| {
                let gid = self.gid(port, gid_index)?;
                Some(Place {
                    device: self,
                    port,
                    gid_index,
                    gid,
                })
            })
        })
    }

    fn gid_count(&self, port: u8) -> u8 {
        let count = self.port_attr(port).map_or(0, |attr| attr.gid_tbl_len);
        u8::try_from(count).unwrap_or(u8::MAX)
    }

    fn gid(&self, port: u8, index: u8) -> Option<[u8; 16]> {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: an open device, and a place for the result.
        let code = unsafe { verbs::ibv_query_gid(self.context, port, index.into(), &raw mut gid) };
        // SAFETY: both members are plain bytes.
        let raw = unsafe { gid.raw };
        (code == 0 && raw != [0; 16]).then_some(raw)
    }

    fn port_attr(&self, port: u8) -> Result<ibv_port_attr, Errno> {
        let mut attr = ibv_port_attr::zeroed();
        // SAFETY: an open device, and a place for the result.
        check(unsafe { verbs::ibv_query_port(self.context, port, &raw mut attr) })?;
        Ok(attr)
    }

    /// The encoded MTU of a port.
    ///
    /// # Errors
    ///
    /// What the device says.
    pub fn mtu(&self, port: u8) -> Result<ibv_mtu, Errno> {
        Ok(self.port_attr(port)?.active_mtu)
    }

    fn adopt(context: *mut ibv_context) -> Option<Self> {
        let mut attr = ibv_device_attr::zeroed();
        // SAFETY: an open device, and a place for the result.
        check(unsafe { verbs::ibv_query_device(context, &raw mut attr) }).ok()?;
        // SAFETY: an open device.
        let pd = check_pointer(unsafe { verbs::ibv_alloc_pd(context) }).ok()?;
        let limit = |number: i32| u8::try_from(number.max(0)).unwrap_or(u8::MAX);
        Some(Self {
            context,
            pd,
            max_responder_resources: limit(attr.max_qp_rd_atom),
            max_initiator_depth: limit(attr.max_qp_init_rd_atom),
            ports: attr.phys_port_cnt,
        })
    }
}

/// The device whose connections are made here. Those of real ones are the kernel's to manage.
const SOFT: &[u8] = b"soft0\0";

fn is_soft(device: &ibv_device) -> bool {
    let name = device.name.iter().map(|&byte| byte as u8);
    name.take(SOFT.len()).eq(SOFT.iter().copied())
}

/// Every device that is ours, opened.
fn open_all() -> Vec<Device> {
    // SAFETY: no count is asked for.
    let list = unsafe { verbs::ibv_get_device_list(ptr::null_mut()) };
    if list.is_null() {
        return Vec::new();
    }
    let mut devices = Vec::new();
    let mut next = list;
    loop {
        // SAFETY: the list ends in a null pointer, which is not passed.
        let device = unsafe { *next };
        if device.is_null() {
            break;
        }
        // SAFETY: as above.
        next = unsafe { next.add(1) };
        // SAFETY: a device of the list.
        if !unsafe { is_soft(&*device) } {
            continue;
        }
        // SAFETY: as above.
        let context = unsafe { verbs::ibv_open_device(device) };
        if !context.is_null() {
            devices.extend(Device::adopt(context));
        }
    }
    // SAFETY: it came from ibv_get_device_list; devices that are open stay usable.
    unsafe { verbs::ibv_free_device_list(list) };
    devices
}
