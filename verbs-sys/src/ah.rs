//! Address handles.

use std::{fmt, ptr::NonNull, sync::Arc};

use crate::{
    CreateError, Gid, PathOptions, ProtectionDomain,
    context::created,
    error::{check, log_destroy},
    ffi::{ibv_ah, ibv_ah_attr},
};

/// Where datagrams go: a port, not a queue pair. Cheap to clone; it keeps its protection domain
/// alive.
///
/// A posted request names it by [`as_raw`](Self::as_raw), in
/// [`ibv_send_wr_ud::ah`](crate::ffi::ibv_send_wr_ud::ah), and it has to live until that request
/// has completed.
#[derive(Clone)]
pub struct AddressHandle {
    inner: Arc<AhInner>,
}

struct AhInner {
    raw: NonNull<ibv_ah>,
    pd: ProtectionDomain,
}

// SAFETY: verbs on one address handle may be called from any thread at any time.
unsafe impl Send for AhInner {}
// SAFETY: as above.
unsafe impl Sync for AhInner {}

impl Drop for AhInner {
    fn drop(&mut self) {
        // SAFETY: this is the last reference.
        let code = unsafe { (self.pd.context().provider().destroy_ah)(self.raw.as_ptr()) };
        log_destroy("ibv_destroy_ah", check(code));
    }
}

impl AddressHandle {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        gid: Gid,
        lid: u16,
        path: &PathOptions,
    ) -> Result<Self, CreateError> {
        let mut attr = path.address(gid, lid);
        // SAFETY: the protection domain is alive and the structure is valid.
        let raw = unsafe { (pd.context().provider().create_ah)(pd.as_raw(), &mut attr) };
        let raw = created(raw, || format!("ibv_create_ah({gid})"))?;
        Ok(Self {
            inner: Arc::new(AhInner {
                raw,
                pd: pd.clone(),
            }),
        })
    }

    /// The C object, valid while a handle to it lives.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_ah {
        self.inner.raw.as_ptr()
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }
}

impl PathOptions {
    /// The address of a remote port, as seen from the local side of this path.
    pub(crate) fn address(&self, gid: Gid, lid: u16) -> ibv_ah_attr {
        let mut attr = ibv_ah_attr {
            dlid: lid,
            sl: self.service_level,
            port_num: self.port,
            ..ibv_ah_attr::zeroed()
        };
        if !gid.is_zero() {
            attr.is_global = 1;
            attr.grh.dgid = gid.into();
            attr.grh.sgid_index = self.gid_index;
            attr.grh.hop_limit = self.hop_limit;
            attr.grh.traffic_class = self.traffic_class;
        }
        attr
    }
}

impl fmt::Debug for AddressHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AddressHandle").finish_non_exhaustive()
    }
}
