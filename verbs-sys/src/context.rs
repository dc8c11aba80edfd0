//! An open device.

use std::{env, ffi::c_int, fmt, io, net::Ipv6Addr, ptr::NonNull, sync::Arc};

use crate::{
    CompletionChannel, CompletionQueue, CreateError, Device, DeviceError, HostMemory, MemoryError,
    ProtectionDomain,
    error::{check, log_destroy},
    ffi::{ibv_context, ibv_device_attr, ibv_gid, ibv_port_attr},
    provider::{Provider, routable_gids},
};

/// The environment variable that overrides which entry of the GID table is used.
pub const GID_INDEX_VARIABLE: &str = "VERBS_GID_INDEX";

/// An open device. Cheap to clone; everything made from it keeps it open.
#[derive(Clone)]
pub struct Context {
    inner: Arc<ContextInner>,
}

struct ContextInner {
    raw: NonNull<ibv_context>,
    device: Device,
}

// SAFETY: verbs on one context may be called from any thread at any time.
unsafe impl Send for ContextInner {}
// SAFETY: as above.
unsafe impl Sync for ContextInner {}

impl Drop for ContextInner {
    fn drop(&mut self) {
        // SAFETY: this is the last reference, and every child held one.
        let code = unsafe { (self.device.provider().close_device)(self.raw.as_ptr()) };
        log_destroy("ibv_close_device", check(code));
    }
}

impl Context {
    /// Takes over an open context, and makes sure that the data path's functions are there, so that
    /// the handles can call them without looking.
    ///
    /// # Safety
    /// `raw` was opened by the provider of `device`, and nobody else will close it.
    pub(crate) unsafe fn from_raw(
        raw: NonNull<ibv_context>,
        device: Device,
    ) -> Result<Self, DeviceError> {
        let context = Self {
            inner: Arc::new(ContextInner { raw, device }),
        };
        // SAFETY: the context is open, and its table does not change after it was opened.
        let ops = unsafe { &(*raw.as_ptr()).ops };
        let present = [
            ("ibv_post_send", ops.post_send.is_some()),
            ("ibv_post_recv", ops.post_recv.is_some()),
            ("ibv_poll_cq", ops.poll_cq.is_some()),
            ("ibv_req_notify_cq", ops.req_notify_cq.is_some()),
        ];
        match present.iter().find(|(_, is_there)| !is_there) {
            None => {
                // A waiting thread sleeps in poll(2), so that several can share the descriptor.
                rustix::io::ioctl_fionbio(context.async_fd(), true).map_err(|error| {
                    DeviceError::Open {
                        device: context.device_name(),
                        source: error.into(),
                    }
                })?;
                Ok(context)
            }
            Some((call, _)) => Err(DeviceError::Incomplete {
                device: context.device_name(),
                call,
            }),
        }
    }

    /// The device this is.
    #[must_use]
    pub fn device(&self) -> &Device {
        &self.inner.device
    }

    /// Name of the device.
    #[must_use]
    pub fn device_name(&self) -> String {
        self.inner.device.name()
    }

    /// The C object, valid while a handle to it or to one of its children lives. Its asynchronous
    /// events are taken for those of objects of this crate: whoever makes others on it must not let
    /// this crate take an event of them.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_context {
        self.inner.raw.as_ptr()
    }

    /// Capabilities and limits; ibv_query_device(3).
    ///
    /// # Errors
    /// [`DeviceError::Query`].
    pub fn query_device(&self) -> Result<ibv_device_attr, DeviceError> {
        let mut attr = ibv_device_attr::zeroed();
        // SAFETY: the context is open and the structure is valid for writing.
        let code = unsafe { (self.provider().query_device)(self.as_raw(), &mut attr) };
        self.answered(code, || "ibv_query_device".to_owned())
            .map(|()| attr)
    }

    /// Properties of a port, counted from 1; ibv_query_port(3).
    ///
    /// # Errors
    /// [`DeviceError::Query`].
    pub fn query_port(&self, port: u8) -> Result<ibv_port_attr, DeviceError> {
        let mut attr = ibv_port_attr::zeroed();
        // SAFETY: the context is open and the structure is valid for writing.
        let code = unsafe { (self.provider().query_port)(self.as_raw(), port, &mut attr) };
        self.answered(code, || format!("ibv_query_port({port})"))
            .map(|()| attr)
    }

    /// An entry of a port's table of addresses; ibv_query_gid(3).
    ///
    /// # Errors
    /// [`DeviceError::Query`].
    pub fn query_gid(&self, port: u8, index: u32) -> Result<Gid, DeviceError> {
        let mut gid = ibv_gid::zeroed();
        let call = || format!("ibv_query_gid({port}, {index})");
        let number = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: the context is open and the structure is valid for writing.
        let code = unsafe { (self.provider().query_gid)(self.as_raw(), port, number, &mut gid) };
        self.answered(code, call)?;
        // SAFETY: the call has filled all 16 bytes.
        Ok(Gid(unsafe { gid.raw }))
    }

    /// An entry of a port's table of partition keys, host byte order; ibv_query_pkey(3). The highest
    /// bit says that the port is a full member of the partition.
    ///
    /// # Errors
    /// [`DeviceError::Query`].
    pub fn query_pkey(&self, port: u8, index: u32) -> Result<u16, DeviceError> {
        let mut pkey = 0;
        let call = || format!("ibv_query_pkey({port}, {index})");
        let number = c_int::try_from(index).unwrap_or(c_int::MAX);
        // SAFETY: the context is open and the place is valid for writing.
        let code = unsafe { (self.provider().query_pkey)(self.as_raw(), port, number, &mut pkey) };
        self.answered(code, call)?;
        Ok(u16::from_be(pkey))
    }

    /// The address to use on a port, with its index: the index in the environment variable
    /// `VERBS_GID_INDEX`, else the first IPv4-mapped address, else the first that is not zero.
    /// RoCE v1 addresses of real devices are passed over where the device tells.
    ///
    /// # Errors
    /// [`DeviceError::NoGid`] if there is none, [`DeviceError::Query`] if asking failed.
    pub fn choose_gid(&self, port: u8) -> Result<(u8, Gid), DeviceError> {
        let none = || DeviceError::NoGid {
            device: self.device_name(),
            port,
        };
        if let Some(value) = env::var_os(GID_INDEX_VARIABLE).filter(|value| !value.is_empty()) {
            let index: u8 = value
                .to_str()
                .and_then(|text| text.parse().ok())
                .ok_or_else(none)?;
            return Ok((index, self.query_gid(port, index.into())?));
        }
        let entries = match port {
            1 => routable_gids(self.device()),
            _ => None,
        };
        let entries = match entries {
            Some(entries) => entries,
            None => self.gid_table(port)?,
        };
        let mapped = entries.iter().find(|(_, gid)| gid.is_ipv4_mapped());
        mapped
            .or_else(|| entries.iter().find(|(_, gid)| !gid.is_zero()))
            .copied()
            .ok_or_else(none)
    }

    /// The first 256 entries of a port's table. Tables have holes, which some devices report as
    /// errors: those are left out.
    fn gid_table(&self, port: u8) -> Result<Vec<(u8, Gid)>, DeviceError> {
        let len = usize::try_from(self.query_port(port)?.gid_tbl_len).unwrap_or(0);
        let entry = |index: u8| Some((index, self.query_gid(port, index.into()).ok()?));
        Ok((0..=u8::MAX).take(len).filter_map(entry).collect())
    }

    /// Makes a protection domain; ibv_alloc_pd(3).
    ///
    /// # Errors
    /// [`CreateError::Refused`].
    pub fn alloc_pd(&self) -> Result<ProtectionDomain, CreateError> {
        ProtectionDomain::new(self)
    }

    /// Makes a completion channel; ibv_create_comp_channel(3).
    ///
    /// # Errors
    /// [`CreateError::Refused`].
    pub fn create_comp_channel(&self) -> Result<CompletionChannel, CreateError> {
        CompletionChannel::new(self)
    }

    /// Makes a completion queue of at least `cqe` entries, with events on `channel` if one is
    /// given; ibv_create_cq(3).
    ///
    /// # Errors
    /// [`CreateError`]; a channel of another context is refused.
    pub fn create_cq(
        &self,
        cqe: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<CompletionQueue, CreateError> {
        CompletionQueue::new(self, cqe, channel)
    }

    /// Allocates `len` bytes of zeroed, page-aligned memory that this device reaches best: on the
    /// software device memory that peers on this host map, on a real one anonymous pages.
    ///
    /// # Errors
    /// [`MemoryError::Allocate`], also for no bytes at all.
    pub fn alloc_memory(&self, len: usize) -> Result<HostMemory, MemoryError> {
        HostMemory::new(self, len)
    }

    pub(crate) fn provider(&self) -> &'static Provider {
        self.inner.device.provider()
    }

    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    fn answered(&self, code: c_int, call: impl FnOnce() -> String) -> Result<(), DeviceError> {
        check(code).map_err(|source| DeviceError::Query {
            call: call(),
            device: self.device_name(),
            source,
        })
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Context")
            .field("device", &self.device_name())
            .finish()
    }
}

/// What `create` gave, or the reason why it gave nothing.
pub(crate) fn created<T>(
    raw: *mut T,
    call: impl FnOnce() -> String,
) -> Result<NonNull<T>, CreateError> {
    // The error is read first: formatting may change errno.
    NonNull::new(raw).ok_or_else(|| {
        let source = io::Error::last_os_error();
        CreateError::Refused {
            call: call(),
            source,
        }
    })
}

/// A global identifier, the address of a port: 16 bytes in network byte order, on RoCE an IPv6 or
/// IPv4-mapped address.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// Whether it is all zero, an empty entry of a table.
    #[must_use]
    pub fn is_zero(&self) -> bool {
        self.0 == [0; 16]
    }

    /// Whether it stands for an IPv4 address.
    #[must_use]
    pub fn is_ipv4_mapped(&self) -> bool {
        Ipv6Addr::from(self.0).to_ipv4_mapped().is_some()
    }
}

impl From<Gid> for ibv_gid {
    fn from(gid: Gid) -> Self {
        Self { raw: gid.0 }
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        Ipv6Addr::from(self.0).fmt(f)
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}
