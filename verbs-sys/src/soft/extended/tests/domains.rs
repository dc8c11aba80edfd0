//! ibv_alloc_parent_domain(3), ibv_alloc_td(3), and what is imported.

use core::ffi::c_int;
use std::os::fd::{AsRawFd, IntoRawFd};
use std::ptr;

use super::support::{ALL, End, Memory, World, attributes, made};
use crate::ffi::*;
use crate::soft::{PROVIDER, import_device, import_mr, import_pd, unimport_mr, unimport_pd};

fn parent(
    world: &World,
    pd: *mut ibv_pd,
    td: *mut ibv_td,
    comp_mask: u32,
) -> Result<*mut ibv_pd, c_int> {
    let mut attr = ibv_parent_domain_init_attr::zeroed();
    (attr.pd, attr.td, attr.comp_mask) = (pd, td, comp_mask);
    let alloc = world.ops().alloc_parent_domain.unwrap();
    // SAFETY: the context is open; the domains are live or null.
    made(unsafe { alloc(world.context, &raw mut attr) })
}

#[test]
fn a_parent_domain_stands_for_its_domain() {
    let world = World::open();
    let pd = world.pd();
    let mut attr = ibv_td_init_attr::default();
    // SAFETY: the context is open.
    let td = unsafe { world.ops().alloc_td.unwrap()(world.context, &raw mut attr) };
    let td = made(td).unwrap();
    let other = parent(&world, pd, td, IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS).unwrap();
    assert_ne!(other, pd);
    // A region of the one is used by a queue pair of the other.
    let end = End::with(&world, other, world.cq(8), &attributes(IBV_QPT_RC));
    end.connect(&world, end.qpn());
    let memory = Memory::new(2);
    let region = memory.register(pd, ALL);
    memory.set(0, 5);
    end.post(|calls| {
        calls.next(1, IBV_SEND_SIGNALED);
        calls.wr_rdma_write(region.rkey(), memory.addr() + 8);
        calls.wr_set_sge(region.lkey(), memory.addr(), 8);
    });
    assert_eq!(memory.get(1), 5);
    let (dealloc, dealloc_td) = (PROVIDER.dealloc_pd, world.ops().dealloc_td.unwrap());
    // SAFETY: each is live until the call for it succeeds.
    unsafe {
        assert_eq!(dealloc(other), libc::EBUSY, "its queue pair is there");
        assert_eq!(dealloc(pd), libc::EBUSY);
        assert_eq!(dealloc_td(td), libc::EBUSY);
        region.deregister();
        assert_eq!(dealloc(pd), libc::EBUSY, "it is a parent domain's");
        // Deallocates the parent domain, too.
        end.destroy();
        assert_eq!(dealloc(pd), 0);
        assert_eq!(dealloc_td(td), 0);
    }
}

#[test]
fn a_parent_domain_is_of_a_domain() {
    let world = World::open();
    let elsewhere = World::open();
    let (pd, theirs) = (world.pd(), elsewhere.pd());
    let no_td = ptr::null_mut();
    assert_eq!(parent(&world, ptr::null_mut(), no_td, 0), Err(libc::EINVAL));
    assert_eq!(parent(&world, theirs, no_td, 0), Err(libc::EINVAL));
    assert_eq!(parent(&world, pd, no_td, 1 << 9), Err(libc::EINVAL));
    let mut attr = ibv_td_init_attr { comp_mask: 1 };
    // SAFETY: the context is open.
    let td = unsafe { world.ops().alloc_td.unwrap()(world.context, &raw mut attr) };
    assert_eq!(made(td), Err(libc::EINVAL));
    for pd in [pd, theirs] {
        // SAFETY: live, and used no more.
        assert_eq!(unsafe { (PROVIDER.dealloc_pd)(pd) }, 0);
    }
}

#[test]
fn a_region_is_used_where_it_was_imported() {
    let world = World::open();
    let pd = world.pd();
    let memory = Memory::new(2);
    let region = memory.register(pd, ALL);
    // SAFETY: live.
    let (pd_number, mr_number) = unsafe { ((*pd).handle, (*region.0).handle) };
    // SAFETY: the descriptor is the context's; the copy goes to the call.
    let imported = unsafe {
        let copy = libc::dup((*world.context).cmd_fd);
        World::of(import_device(copy))
    };
    // SAFETY: the numbers are those of live objects.
    let (their_pd, their_mr) = unsafe {
        let pd = made(import_pd(imported.context, pd_number)).unwrap();
        (pd, made(import_mr(pd, mr_number)).unwrap())
    };
    // SAFETY: just made.
    let (addr, length, lkey, rkey) = unsafe {
        (
            (*their_mr).addr,
            (*their_mr).length,
            (*their_mr).lkey,
            (*their_mr).rkey,
        )
    };
    assert!(addr.is_null());
    assert_eq!((length, lkey, rkey), (16, region.lkey(), region.rkey()));
    let end = End::with(&imported, their_pd, imported.cq(8), &attributes(IBV_QPT_RC));
    end.connect(&imported, end.qpn());
    memory.set(0, 5);
    end.post(|calls| {
        calls.next(1, IBV_SEND_SIGNALED);
        calls.wr_rdma_write(rkey, memory.addr() + 8);
        calls.wr_set_sge(lkey, memory.addr(), 8);
    });
    assert_eq!(memory.get(1), 5);
    // SAFETY: live; what is given up is used no more, but by what was made by it.
    unsafe {
        assert_eq!((PROVIDER.dealloc_pd)(pd), libc::EBUSY);
        unimport_mr(their_mr);
        unimport_pd(their_pd);
        assert_eq!((PROVIDER.destroy_qp)(end.qp), 0);
        assert_eq!((PROVIDER.destroy_cq)(end.cq), 0);
        region.deregister();
        assert_eq!((PROVIDER.dealloc_pd)(pd), 0);
        let gone = import_pd(world.context, pd_number);
        assert_eq!(made(gone), Err(libc::EINVAL));
    }
}

#[test]
fn a_region_that_was_deregistered_elsewhere_is_gone() {
    let world = World::open();
    let (pd, other) = (world.pd(), world.pd());
    let memory = Memory::new(1);
    let region = memory.register(pd, ALL);
    // SAFETY: live, each until it is given up or deregistered.
    unsafe {
        let number = (*region.0).handle;
        assert_eq!(made(import_mr(other, number)), Err(libc::EINVAL));
        assert_eq!(made(import_mr(pd, u32::MAX)), Err(libc::EINVAL));
        let theirs = made(import_mr(pd, number)).unwrap();
        assert_eq!((PROVIDER.dereg_mr)(theirs), 0);
        assert_eq!(made(import_mr(pd, number)), Err(libc::EINVAL));
        assert_eq!((PROVIDER.dereg_mr)(region.0), libc::EINVAL);
        unimport_mr(region.0);
        assert_eq!((PROVIDER.dealloc_pd)(pd), 0);
        assert_eq!((PROVIDER.dealloc_pd)(other), 0);
    }
}

#[test]
fn other_descriptors_are_no_device() {
    let file = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: an open descriptor, which stays ours as the call fails.
    let imported = unsafe { import_device(file.as_raw_fd()) };
    assert_eq!(made(imported).err(), Some(libc::EOPNOTSUPP));
    let closed = file.into_raw_fd();
    // SAFETY: it is ours, and used no more.
    assert_eq!(unsafe { libc::close(closed) }, 0);
}
