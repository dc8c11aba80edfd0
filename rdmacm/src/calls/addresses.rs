//! Addresses and routes.
//!
//! Both are resolved at once, as the kernel knows the way; the application learns it by an event.

use core::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use libc::sockaddr;
use rustix::io::Errno;

use super::code;
use crate::abi::{
    RDMA_CM_EVENT_ADDR_ERROR, RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_ROUTE_RESOLVED, rdma_cm_id,
};
use crate::address::{gid_of, is_local, read, source_for};
use crate::deliver::complete;
use crate::device::Place;
use crate::endpoint::Phase;
use crate::event::Queued;
use crate::id::Id;
use crate::network;
use crate::shared::{Key, Shared, State};

/// rdma_bind_addr(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_bind_addr(id: *mut rdma_cm_id, address: *mut sockaddr) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { read(address) }.and_then(|address| unsafe { bind(id, address) }))
}

/// Binds an identifier to an address.
///
/// # Safety
///
/// The identifier is null, or made by this library and not destroyed.
pub unsafe fn bind(id: *mut rdma_cm_id, address: SocketAddr) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    let shared = Shared::get();
    let place = place_to_bind(shared, address)?;
    let mut state = shared.lock();
    state.bind(key, address, place)?;
    // SAFETY: by the caller's promise, and the other half was just found.
    unsafe { Id::show(id.cast(), state.endpoint(key)?) };
    Ok(())
}

/// Where on a device an address is; an unspecified one is on all of them.
fn place_to_bind(shared: &Shared, address: SocketAddr) -> Result<Option<Place>, Errno> {
    if address.ip().to_canonical().is_unspecified() {
        // Requests will be for one of them, so they are opened now.
        shared.devices()?;
        return Ok(None);
    }
    if !is_local(address) {
        return Err(Errno::ADDRNOTAVAIL);
    }
    shared.place_of(address.ip()).map(Some)
}

impl State {
    fn bind(&mut self, key: Key, address: SocketAddr, place: Option<Place>) -> Result<(), Errno> {
        let endpoint = self.endpoint(key)?;
        if endpoint.phase != Phase::Idle {
            return Err(Errno::INVAL);
        }
        let (space, shares) = (endpoint.space, endpoint.options.shares_address);
        let (local, claim) = self.ports.claim(space, address, key, shares)?;
        let endpoint = self.endpoint(key)?;
        endpoint.phase = Phase::Bound;
        endpoint.local = Some(local);
        endpoint.claim = claim;
        endpoint.place = place;
        Ok(())
    }
}

/// rdma_resolve_addr(3). It takes no time, so the timeout has no meaning.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_resolve_addr(
    id: *mut rdma_cm_id,
    source: *mut sockaddr,
    destination: *mut sockaddr,
    _timeout_ms: c_int,
) -> c_int {
    let result = || {
        let source = if source.is_null() {
            None
        } else {
            // SAFETY: by the caller's promise.
            Some(unsafe { read(source)? })
        };
        // SAFETY: as above.
        let destination = unsafe { read(destination)? };
        // SAFETY: as above.
        unsafe { resolve_address(id, source, destination) }
    };
    code(result())
}

/// Resolves the peer's address, and chooses the own one.
///
/// # Safety
///
/// The identifier is null, or made by this library and not destroyed.
pub unsafe fn resolve_address(
    id: *mut rdma_cm_id,
    source: Option<SocketAddr>,
    destination: SocketAddr,
) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    let shared = Shared::get();
    let remote = loopback_if_unspecified(destination);
    let bound = {
        let mut state = shared.lock();
        let endpoint = state.endpoint(key)?;
        if !matches!(endpoint.phase, Phase::Idle | Phase::Bound) {
            return Err(Errno::INVAL);
        }
        endpoint.local
    };
    if let (None, Some(source)) = (bound, source) {
        // SAFETY: by the caller's promise.
        unsafe { bind(id, source)? };
    }
    let bound = shared.lock().endpoint(key)?.local;
    let local = own_address(bound, remote)?;
    let resolved = resolve(shared, local, remote);
    shared.lock().resolved(key, local, remote, resolved)?;
    // SAFETY: by the caller's promise.
    unsafe { complete(id, key) }
}

/// A peer at the unspecified address is one of this host.
fn loopback_if_unspecified(mut address: SocketAddr) -> SocketAddr {
    match address.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => address.set_ip(Ipv4Addr::LOCALHOST.into()),
        IpAddr::V6(ip) if ip.is_unspecified() => address.set_ip(Ipv6Addr::LOCALHOST.into()),
        _ => {}
    }
    address
}

/// The own address for a peer: what the identifier is bound to, else what the kernel would take.
fn own_address(bound: Option<SocketAddr>, remote: SocketAddr) -> Result<SocketAddr, Errno> {
    let port = bound.map_or(0, |bound| bound.port());
    match bound {
        Some(bound) if !bound.ip().to_canonical().is_unspecified() => {
            if bound.ip().to_canonical().is_ipv4() != remote.ip().to_canonical().is_ipv4() {
                return Err(Errno::INVAL);
            }
            Ok(bound)
        }
        _ => {
            let mut local = source_for(remote)?;
            local.set_port(port);
            Ok(local)
        }
    }
}

/// The own place, and the peer's GID.
fn resolve(
    shared: &Shared,
    local: SocketAddr,
    remote: SocketAddr,
) -> Result<(Place, [u8; 16]), Errno> {
    let place = shared.place_of(local.ip())?;
    if is_local(remote) {
        let there = shared.place_of(remote.ip());
        return Ok((place, there.map_or(place.gid, |there| there.gid)));
    }
    // Queue pairs of this process go nowhere else, then.
    network::reach().ok_or(Errno::HOSTUNREACH)?;
    Ok((place, gid_of(remote.ip().to_canonical())))
}

impl State {
    fn resolved(
        &mut self,
        key: Key,
        mut local: SocketAddr,
        remote: SocketAddr,
        resolved: Result<(Place, [u8; 16]), Errno>,
    ) -> Result<(), Errno> {
        let endpoint = self.endpoint(key)?;
        let (place, dgid) = match resolved {
            Ok(resolved) => resolved,
            Err(error) => {
                let mut event = Queued::new(key, key, RDMA_CM_EVENT_ADDR_ERROR);
                event.status = -error.raw_os_error();
                self.push(event);
                return Ok(());
            }
        };
        if local.port() == 0 {
            let space = endpoint.space;
            local = self.ports.borrow(space, local, key)?;
        }
        let endpoint = self.endpoint(key)?;
        endpoint.phase = Phase::AddressResolved;
        endpoint.local = Some(local);
        endpoint.remote = Some(remote);
        endpoint.place = Some(place);
        endpoint.dgid = dgid;
        endpoint.mtu = place.device.mtu(place.port)? as u8;
        self.push(Queued::new(key, key, RDMA_CM_EVENT_ADDR_RESOLVED));
        Ok(())
    }
}

/// rdma_resolve_route(3). There is nothing to resolve but the address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_resolve_route(id: *mut rdma_cm_id, _timeout_ms: c_int) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { resolve_route(id) })
}

/// Resolves the route to the peer.
///
/// # Safety
///
/// The identifier is null, or made by this library and not destroyed.
pub unsafe fn resolve_route(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    {
        let mut state = Shared::get().lock();
        let endpoint = state.endpoint(key)?;
        if endpoint.phase != Phase::AddressResolved {
            return Err(Errno::INVAL);
        }
        endpoint.phase = Phase::RouteResolved;
        state.push(Queued::new(key, key, RDMA_CM_EVENT_ROUTE_RESOLVED));
    }
    // SAFETY: by the caller's promise.
    unsafe { complete(id, key) }
}
