//! Devices: finding one by name, by the environment, or the best there is.

use std::{env, ffi::c_int, fmt, io, ptr::NonNull, sync::Arc};

use crate::{
    Context, DeviceError,
    error::check,
    ffi::{self, ibv_device},
    provider::{PROVIDERS, Provider},
    soft,
};

/// The environment variable that names the device to use.
pub const DEVICE_VARIABLE: &str = "VERBS_DEVICE";

/// A device that can be opened. Cheap to clone.
#[derive(Clone)]
pub struct Device {
    raw: NonNull<ibv_device>,
    list: Arc<DeviceList>,
}

impl Device {
    /// Name, for example `soft0` or `mlx5_0`.
    #[must_use]
    pub fn name(&self) -> String {
        // SAFETY: the list is alive, so the device is; nobody writes to it.
        let device = unsafe { self.raw.as_ref() };
        let bytes: Vec<u8> = device
            .name
            .iter()
            .map(|&c| c.cast_unsigned())
            .take_while(|&byte| byte != 0)
            .collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// Global unique identifier, host byte order.
    #[must_use]
    pub fn guid(&self) -> u64 {
        // SAFETY: the device belongs to this provider and is alive.
        u64::from_be(unsafe { (self.list.provider.get_device_guid)(self.raw.as_ptr()) })
    }

    /// Whether this is the software device.
    #[must_use]
    pub fn is_software(&self) -> bool {
        self.list.provider.is_software
    }

    /// Opens the device; ibv_open_device(3).
    ///
    /// # Errors
    /// [`DeviceError::Open`], or [`DeviceError::Incomplete`] for a device that lacks a call.
    pub fn open(&self) -> Result<Context, DeviceError> {
        // SAFETY: the device belongs to this provider and is alive.
        let raw = unsafe { (self.list.provider.open_device)(self.raw.as_ptr()) };
        self.opened(raw)
    }

    /// Opens the software device with options that only it has.
    ///
    /// # Errors
    /// As [`Device::open`], and [`DeviceError::NotSoftware`] on a real device.
    pub fn open_with(&self, options: &soft::Options) -> Result<Context, DeviceError> {
        if !self.is_software() {
            return Err(DeviceError::NotSoftware {
                device: self.name(),
            });
        }
        // SAFETY: the device belongs to the software provider and is alive.
        let raw = unsafe { soft::open(self.raw.as_ptr(), options) };
        self.opened(raw)
    }

    fn opened(&self, raw: *mut ffi::ibv_context) -> Result<Context, DeviceError> {
        match NonNull::new(raw) {
            // SAFETY: a provider's open call gave this context, and nobody else has it.
            Some(raw) => unsafe { Context::from_raw(raw, self.clone()) },
            None => Err(DeviceError::Open {
                device: self.name(),
                source: io::Error::last_os_error(),
            }),
        }
    }

    pub(crate) fn provider(&self) -> &'static Provider {
        self.list.provider
    }

    /// Whether a port of this device is active, as far as can be seen.
    fn is_active(&self) -> bool {
        let Ok(context) = self.open() else {
            return false;
        };
        let ports = context.query_device().map_or(0, |attr| attr.phys_port_cnt);
        (1..=ports).any(|port| {
            context
                .query_port(port)
                .is_ok_and(|attr| attr.state == ffi::IBV_PORT_ACTIVE)
        })
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("name", &self.name())
            .field("is_software", &self.is_software())
            .finish()
    }
}

// SAFETY: a device is read only, and the providers' calls on it are thread-safe.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// A list that a provider gave; its devices live as long as it does.
struct DeviceList {
    raw: NonNull<*mut ibv_device>,
    provider: &'static Provider,
}

// SAFETY: the list is only read, and freed once by the last owner.
unsafe impl Send for DeviceList {}
// SAFETY: as above.
unsafe impl Sync for DeviceList {}

impl Drop for DeviceList {
    fn drop(&mut self) {
        // SAFETY: the list came from this provider and no device handle is left.
        unsafe { (self.provider.free_device_list)(self.raw.as_ptr()) };
    }
}

/// Every device there is, real ones first, then the software device; ibv_get_device_list(3).
///
/// A system without RDMA support simply has no real devices. If listing the real devices fails for
/// another reason, a warning is logged and the software device is still listed.
///
/// # Errors
/// [`DeviceError::List`] if not even the software device can be listed.
pub fn devices() -> Result<Vec<Device>, DeviceError> {
    let mut devices = Vec::new();
    for provider in PROVIDERS {
        match list(provider) {
            Ok(found) => devices.extend(found),
            Err(source) if provider.is_software => return Err(DeviceError::List(source)),
            Err(error) => tracing::warn!(%error, "could not list the real RDMA devices"),
        }
    }
    Ok(devices)
}

pub(crate) fn list(provider: &'static Provider) -> io::Result<Vec<Device>> {
    let mut count: c_int = 0;
    // SAFETY: the pointer is valid for one write.
    let raw = unsafe { (provider.get_device_list)(&mut count) };
    let Some(raw) = NonNull::new(raw) else {
        let error = io::Error::last_os_error();
        return match error.raw_os_error() {
            Some(libc::ENOSYS) => Ok(Vec::new()),
            _ => Err(error),
        };
    };
    let list = Arc::new(DeviceList { raw, provider });
    let count = usize::try_from(count).unwrap_or(0);
    Ok((0..count)
        .filter_map(|index| {
            // SAFETY: the provider gave a list of `count` pointers, which lives as long as `list`.
            NonNull::new(unsafe { *list.raw.as_ptr().add(index) })
        })
        .map(|raw| Device {
            raw,
            list: list.clone(),
        })
        .collect())
}

/// The device to use: the one named, else the one named by the environment variable
/// `VERBS_DEVICE`, else the first real device with an active port, else the software device.
///
/// # Errors
/// [`DeviceError::Unknown`] lists the devices there are.
pub fn find_device(name: Option<&str>) -> Result<Device, DeviceError> {
    let variable = env::var_os(DEVICE_VARIABLE).map(|value| value.to_string_lossy().into_owned());
    let wanted = name
        .map(str::to_owned)
        .or_else(|| variable.filter(|value| !value.is_empty()));
    choose(devices()?, wanted, Device::is_active)
}

/// Makes it safe to fork(2) while memory is registered; ibv_fork_init(3). To be called before the first
/// device is opened, where real devices are used; the software device is always prepared.
///
/// In the child, inherited handles can only be dropped, which leaves the parent's objects alone. It
/// opens the device anew to use it. Memory of [`Context::alloc_memory`] is shared with the parent on the
/// software device.
///
/// # Errors
/// [`DeviceError::Fork`].
pub fn fork_init() -> Result<(), DeviceError> {
    for provider in PROVIDERS {
        check((provider.fork_init)()).map_err(DeviceError::Fork)?;
    }
    Ok(())
}

fn choose(
    devices: Vec<Device>,
    wanted: Option<String>,
    is_active: impl Fn(&Device) -> bool,
) -> Result<Device, DeviceError> {
    if let Some(name) = wanted {
        return match devices.iter().find(|device| device.name() == name) {
            Some(device) => Ok(device.clone()),
            None => {
                let names: Vec<String> = devices.iter().map(Device::name).collect();
                Err(DeviceError::Unknown {
                    name,
                    available: names.join(", "),
                })
            }
        };
    }
    devices
        .iter()
        .find(|device| !device.is_software() && is_active(device))
        .or_else(|| devices.iter().find(|device| device.is_software()))
        .cloned()
        .ok_or(DeviceError::None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake;

    #[test]
    fn a_name_decides_and_an_unknown_one_lists_what_there_is() {
        let found = choose(fake::devices(), Some("fake0".to_owned()), |_| false).unwrap();
        assert_eq!(found.name(), "fake0");
        let error = choose(fake::devices(), Some("mlx9".to_owned()), |_| true).unwrap_err();
        let text = error.to_string();
        assert!(
            text.starts_with("there is no device \"mlx9\"; there are: fake0"),
            "{text}"
        );
    }

    #[test]
    fn without_a_name_only_an_active_real_device_is_taken() {
        let found = choose(fake::devices(), None, Device::is_active).unwrap();
        assert_eq!(found.name(), "fake0");
        let error = choose(fake::devices(), None, |_| false).unwrap_err();
        assert!(matches!(error, DeviceError::None));
    }
}
