//! Regions whose addresses are not those of their memory, or whose memory may be missing: ibv_reg_mr_iova(3),
//! ibv_alloc_dm(3), ibv_alloc_null_mr(3), ibv_advise_mr(3).

use core::ffi::{c_int, c_void};
use std::ptr;

use super::support::{ALL, End, Memory, Region, World, destroy, made, pair};
use crate::ffi::*;
use crate::soft::{PROVIDER, import_dm, reg_mr_iova, unimport_dm};

const SIGNALED: u32 = IBV_SEND_SIGNALED;
const DEMAND: u32 = ALL | IBV_ACCESS_ON_DEMAND;

fn page() -> usize {
    rustix::param::page_size()
}

/// Address space, mapped or not.
struct Space {
    start: *mut c_void,
    len: usize,
}

impl Space {
    fn new(pages: usize) -> Self {
        let len = pages * page();
        let prot = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let flags = rustix::mm::MapFlags::PRIVATE;
        // SAFETY: a fresh mapping at an address of the kernel's choice touches no existing one.
        let start = unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), len, prot, flags) };
        Self {
            start: start.unwrap(),
            len,
        }
    }

    fn addr(&self) -> u64 {
        self.start as u64
    }

    fn word(&self, page_index: usize) -> *mut u64 {
        self.start.wrapping_byte_add(page_index * page()).cast()
    }

    /// Makes a page inaccessible.
    fn protect(&self, page_index: usize) {
        let at = self.word(page_index).cast();
        let none = rustix::mm::MprotectFlags::empty();
        // SAFETY: ours, and no reference covers it.
        unsafe { rustix::mm::mprotect(at, page(), none) }.unwrap();
    }

    fn register(&self, pd: *mut ibv_pd, access: u32) -> Result<Region, c_int> {
        // SAFETY: the domain is live; the space stays for as long as the region.
        let mr = unsafe { reg_mr_iova(pd, self.start, self.len, self.addr(), access as c_int) };
        made(mr).map(Region)
    }

    fn is_present(&self, page_index: usize) -> bool {
        let mut residency = 0;
        let at = self.word(page_index).cast();
        // SAFETY: a byte for the one page.
        assert_eq!(unsafe { libc::mincore(at, page(), &raw mut residency) }, 0);
        residency & 1 != 0
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        // SAFETY: ours, and used no more.
        unsafe { rustix::mm::munmap(self.start, self.len) }.unwrap();
    }
}

/// A WRITE of eight bytes, and how it ends.
fn write(from: &End, local: ibv_sge, rkey: u32, addr: u64) -> ibv_wc_status {
    let code = from.build(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_rdma_write(rkey, addr);
        calls.list(&[local]);
    });
    assert_eq!(code, 0);
    from.next().status
}

#[test]
fn a_region_has_the_addresses_that_its_user_wants() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let (here, there) = (Memory::new(4), Memory::new(4));
    let bits = |memory: &Memory| memory.addr() % page() as u64;
    let (ours, theirs) = (0x7000_0000_0000 + bits(&here), bits(&there));
    let local = here.register_at(a.pd, ours, ALL).unwrap();
    let remote = there.register_at(b.pd, theirs, ALL).unwrap();
    here.set(1, 0x77);
    let element = local.element(ours + 8, 8);
    assert_eq!(
        write(&a, element, remote.rkey(), theirs + 16),
        IBV_WC_SUCCESS
    );
    assert_eq!(there.get(2), 0x77);
    // A message to a list, and what comes back.
    b.receive(
        1,
        &mut [remote.element(theirs, 4), remote.element(theirs + 24, 8)],
    );
    a.post(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_send();
        calls.inline(b"abcdefghijkl");
    });
    assert_eq!(b.next().byte_len, 12);
    assert_eq!(there.get(3).to_ne_bytes(), *b"efghijkl");
    a.post(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_atomic_fetch_add(remote.rkey(), theirs + 16, 1);
        calls.wr_set_sge(local.lkey(), ours, 8);
    });
    assert_eq!((here.get(0), there.get(2)), (0x77, 0x78));
    // Its own addresses are not the region's, nor is what is behind it.
    for wrong in [there.addr(), theirs + 32, theirs.wrapping_sub(8)] {
        let [a, b] = pair(&world, IBV_QPT_RC);
        let local = here.register(a.pd, ALL);
        let other = there.register_at(b.pd, theirs, ALL).unwrap();
        let element = local.element(here.addr(), 8);
        assert_eq!(
            write(&a, element, other.rkey(), wrong),
            IBV_WC_REM_ACCESS_ERR
        );
        local.deregister();
        other.deregister();
        destroy([a, b]);
    }
    let element = local.element(here.addr(), 8);
    assert_eq!(
        write(&a, element, remote.rkey(), theirs),
        IBV_WC_LOC_PROT_ERR
    );
    local.deregister();
    remote.deregister();
    destroy([a, b]);
}

#[test]
fn a_key_that_is_gone_is_found_out_when_it_is_used() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let (here, there) = (Memory::new(1), Memory::new(1));
    let bits = here.addr() % page() as u64;
    let local = here.register_at(a.pd, bits, ALL).unwrap();
    let remote = there.register(b.pd, ALL);
    let element = local.element(bits, 8);
    b.receive(1, &mut []);
    local.deregister();
    assert_eq!(
        write(&a, element, remote.rkey(), there.addr()),
        IBV_WC_LOC_PROT_ERR
    );
    remote.deregister();
    destroy([a, b]);
}

#[test]
fn addresses_of_a_region_have_the_places_in_pages_that_its_memory_has() {
    let world = World::open();
    let pd = world.pd();
    let memory = Memory::new(1);
    let askew = memory.register_at(pd, memory.addr() + 8, ALL);
    assert_eq!(askew.err(), Some(libc::EINVAL));
    // But a region can begin with 0, whatever is asked for beside.
    let zero = memory.register_at(pd, 77, ALL | IBV_ACCESS_ZERO_BASED);
    zero.unwrap().deregister();
    // A window's key is its user's to choose, so it cannot tell.
    let bound = memory.register_at(pd, memory.addr() + (1 << 20), ALL | IBV_ACCESS_MW_BIND);
    assert_eq!(bound.err(), Some(libc::EOPNOTSUPP));
    // SAFETY: live, and used no more.
    assert_eq!(unsafe { (PROVIDER.dealloc_pd)(pd) }, 0);
}

#[test]
fn a_region_is_changed_with_its_addresses() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let (here, there, new) = (Memory::new(1), Memory::new(1), Memory::new(1));
    let local = here.register(a.pd, ALL);
    let iova = there.addr() % page() as u64;
    let remote = there.register_at(b.pd, iova, ALL).unwrap();
    let rkey = remote.rkey();
    here.set(0, 5);
    let element = local.element(here.addr(), 8);
    let rereg = |flags: u32, memory: &Memory, access: u32| {
        let start = memory.start().cast();
        let (flags, access) = (flags as c_int, access as c_int);
        // SAFETY: the region is live, and the memory stays for as long.
        unsafe { (PROVIDER.rereg_mr)(remote.0, flags, b.pd, start, memory.len(), access) }
    };
    assert_eq!(rereg(IBV_REREG_MR_CHANGE_ACCESS, &there, ALL), 0);
    assert_eq!(write(&a, element, rkey, iova), IBV_WC_SUCCESS);
    assert_eq!(there.get(0), 5);
    // Its new memory is named by its own address.
    assert_eq!(rereg(IBV_REREG_MR_CHANGE_TRANSLATION, &new, 0), 0);
    assert_eq!(remote.rkey(), rkey);
    assert_eq!(write(&a, element, rkey, new.addr()), IBV_WC_SUCCESS);
    assert_eq!(new.get(0), 5);
    // A key that is known to be that of memory which is there cannot become another's.
    let flags = IBV_REREG_MR_CHANGE_ACCESS as c_int;
    // SAFETY: as above.
    let code = unsafe {
        let demand = DEMAND as c_int;
        (PROVIDER.rereg_mr)(local.0, flags, a.pd, ptr::null_mut(), 0, demand)
    };
    assert_eq!(code, IBV_REREG_MR_ERR_CMD);
    assert_eq!(write(&a, element, rkey, new.addr()), IBV_WC_SUCCESS);
    local.deregister();
    remote.deregister();
    destroy([a, b]);
}

#[test]
fn memory_on_demand_is_fetched_when_it_is_used() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let (here, there) = (Space::new(2), Space::new(2));
    let local = here.register(a.pd, DEMAND).unwrap();
    let remote = there.register(b.pd, DEMAND).unwrap();
    assert!(!there.is_present(1), "registration has touched nothing");
    // SAFETY: ours.
    unsafe { here.word(1).write(0x99) };
    let at = |space: &Space, index: usize| space.word(index) as u64;
    let element = local.element(at(&here, 1), 8);
    assert_eq!(
        write(&a, element, remote.rkey(), at(&there, 1)),
        IBV_WC_SUCCESS
    );
    // SAFETY: ours.
    assert_eq!(unsafe { there.word(1).read() }, 0x99);
    local.deregister();
    remote.deregister();
    destroy([a, b]);
}

#[test]
fn memory_that_is_not_there_fails_the_request_and_nothing_else() {
    let world = World::open();
    let there = Space::new(2);
    there.protect(0);
    for case in 0..4 {
        let [a, b] = pair(&world, IBV_QPT_RC);
        let here = Memory::new(2);
        let local = here.register(a.pd, ALL);
        let own = there.register(a.pd, DEMAND).unwrap();
        let remote = there.register(b.pd, DEMAND).unwrap();
        let (good, missing) = (local.element(here.addr(), 8), own.element(there.addr(), 8));
        let (rkey, addr) = (remote.rkey(), there.addr());
        let status = match case {
            0 => write(&a, good, rkey, addr),
            1 => write(&a, missing, rkey, addr + page() as u64),
            2 => {
                b.receive(1, &mut [remote.element(addr, 8)]);
                let code = a.build(|calls| {
                    calls.next(1, SIGNALED);
                    calls.wr_send();
                    calls.list(&[good]);
                });
                assert_eq!(code, 0);
                assert_eq!(b.next().status, IBV_WC_LOC_PROT_ERR);
                a.next().status
            }
            _ => {
                let code = a.build(|calls| {
                    calls.next(1, SIGNALED);
                    calls.wr_atomic_fetch_add(rkey, addr, 1);
                    calls.list(&[good]);
                });
                assert_eq!(code, 0);
                a.next().status
            }
        };
        let expected = [
            IBV_WC_REM_ACCESS_ERR,
            IBV_WC_LOC_PROT_ERR,
            IBV_WC_REM_OP_ERR,
            IBV_WC_REM_ACCESS_ERR,
        ];
        assert_eq!(status, expected[case]);
        for region in [local, own, remote] {
            region.deregister();
        }
        destroy([a, b]);
    }
}

#[test]
fn a_region_can_be_all_memory_there_is_and_will_be() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let all = |pd, access: u32| {
        // SAFETY: the domain is live.
        made(unsafe { reg_mr_iova(pd, ptr::null_mut(), usize::MAX, 0, access as c_int) })
    };
    assert_eq!(
        all(a.pd, ALL).err(),
        Some(libc::EFAULT),
        "it cannot be pinned"
    );
    let (local, remote) = (
        Region(all(a.pd, DEMAND).unwrap()),
        Region(all(b.pd, DEMAND).unwrap()),
    );
    let (here, there) = (Memory::new(1), Memory::new(1));
    here.set(0, 3);
    let element = local.element(here.addr(), 8);
    let status = write(&a, element, remote.rkey(), there.addr());
    assert_eq!((status, there.get(0)), (IBV_WC_SUCCESS, 3));
    // Nothing is mapped at 8.
    assert_eq!(write(&a, element, remote.rkey(), 8), IBV_WC_REM_ACCESS_ERR);
    local.deregister();
    remote.deregister();
    destroy([a, b]);
}

#[test]
fn advice_is_about_memory_on_demand() {
    let world = World::open();
    let (pd, other) = (world.pd(), world.pd());
    let space = Space::new(3);
    let region = space.register(pd, DEMAND).unwrap();
    let read_only = space
        .register(pd, IBV_ACCESS_REMOTE_READ | IBV_ACCESS_ON_DEMAND)
        .unwrap();
    let memory = Memory::new(1);
    let pinned = memory.register(pd, ALL);
    let advise = |pd, advice, flags, mut sge: ibv_sge| {
        // SAFETY: the domain is live, and the list has one element.
        unsafe { world.ops().advise_mr.unwrap()(pd, advice, flags, &raw mut sge, 1) }
    };
    let second = region.element(space.word(1) as u64, page());
    let fetch = IBV_ADVISE_MR_ADVICE_PREFETCH;
    let fetch_write = IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE;
    let no_fault = IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT;
    assert_eq!(advise(pd, no_fault, 0, second), 0);
    assert!(!space.is_present(1));
    assert_eq!(advise(pd, fetch_write, IBV_ADVISE_MR_FLAG_FLUSH, second), 0);
    assert!(space.is_present(1) && !space.is_present(2));
    let dead = ibv_sge {
        lkey: region.lkey() ^ 1,
        ..second
    };
    let beyond = region.element(space.word(2) as u64, page() + 1);
    let of_read_only = read_only.element(space.addr(), 8);
    assert_eq!(advise(pd, fetch, 0, of_read_only), 0);
    let refused = [
        (advise(pd, 77, 0, second), libc::EOPNOTSUPP),
        (advise(pd, fetch, 8, second), libc::EINVAL),
        (advise(pd, fetch, 0, dead), libc::EFAULT),
        (advise(pd, fetch, 0, beyond), libc::EFAULT),
        (advise(other, fetch, 0, second), libc::EPERM),
        (advise(pd, fetch_write, 0, of_read_only), libc::EPERM),
        (
            advise(pd, fetch, 0, pinned.element(memory.addr(), 8)),
            libc::EINVAL,
        ),
    ];
    for (at, (code, expected)) in refused.into_iter().enumerate() {
        assert_eq!(code, expected, "case {at}");
    }
    space.protect(2);
    let gone = region.element(space.word(2) as u64, 8);
    assert_eq!(advise(pd, fetch, 0, gone), libc::EFAULT);
    for region in [region, read_only, pinned] {
        region.deregister();
    }
    for pd in [pd, other] {
        // SAFETY: live, and used no more.
        assert_eq!(unsafe { (PROVIDER.dealloc_pd)(pd) }, 0);
    }
}

#[test]
fn a_region_of_nothing_takes_everything_and_has_zeros() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let null = |pd| {
        // SAFETY: the domain is live.
        Region(made(unsafe { world.ops().alloc_null_mr.unwrap()(pd) }).unwrap())
    };
    let (ours, theirs) = (null(a.pd), null(b.pd));
    let there = Memory::new(3);
    let remote = there.register(b.pd, ALL);
    (0..3).for_each(|word| there.set(word, u64::MAX));
    // The middle of a message goes nowhere.
    b.receive(
        1,
        &mut [
            remote.element(there.addr(), 8),
            theirs.element(0x1234_5678_9abc, 8),
            remote.element(there.addr() + 16, 8),
        ],
    );
    a.post(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_send();
        calls.inline(b"first...second..third...");
    });
    assert_eq!(b.next().byte_len, 24);
    assert_eq!(there.get(0).to_ne_bytes(), *b"first...");
    assert_eq!(there.get(1), u64::MAX);
    assert_eq!(there.get(2).to_ne_bytes(), *b"third...");
    // What was read into nothing is not there afterwards.
    a.post(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_rdma_read(remote.rkey(), there.addr());
        calls.wr_set_sge(ours.lkey(), 64, 24);
    });
    let zeros = ours.element(64, 24);
    assert_eq!(
        write(&a, zeros, remote.rkey(), there.addr()),
        IBV_WC_SUCCESS
    );
    assert_eq!([0, 1, 2].map(|word| there.get(word)), [0; 3]);
    // And peers have nothing to look for in it.
    assert_eq!(write(&a, zeros, theirs.rkey(), 64), IBV_WC_REM_ACCESS_ERR);
    for region in [ours, theirs, remote] {
        region.deregister();
    }
    destroy([a, b]);
}

fn device_memory(world: &World, length: usize, log_align_req: u32) -> Result<*mut ibv_dm, c_int> {
    let mut attr = ibv_alloc_dm_attr {
        length,
        log_align_req,
        comp_mask: 0,
    };
    // SAFETY: the context is open.
    made(unsafe { world.ops().alloc_dm.unwrap()(world.context, &raw mut attr) })
}

#[test]
fn device_memory_is_used_through_its_region() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let dm = device_memory(&world, 64, 6).unwrap();
    // SAFETY: live.
    let (to, from) = unsafe { ((*dm).memcpy_to_dm.unwrap(), (*dm).memcpy_from_dm.unwrap()) };
    let (reg, free) = (world.ops().reg_dm_mr.unwrap(), world.ops().free_dm.unwrap());
    let register = |pd, offset, len, access: u32| {
        // SAFETY: the domain and the memory are live.
        made(unsafe { reg(pd, dm, offset, len, access | IBV_ACCESS_ZERO_BASED) })
    };
    let text = *b"0123456789abcdef";
    // SAFETY: the memory is live, and the text has so many bytes; here and below.
    unsafe {
        assert_eq!(to(dm, 16, text.as_ptr().cast(), 16), 0);
        assert_eq!(to(dm, 17, text.as_ptr().cast(), 4), libc::EINVAL);
        assert_eq!(to(dm, 16, text.as_ptr().cast(), 3), libc::EINVAL);
        assert_eq!(to(dm, 52, text.as_ptr().cast(), 16), libc::EINVAL);
    }
    assert_eq!(register(a.pd, 32, 36, ALL), Err(libc::EINVAL));
    // SAFETY: as above.
    let plain = made(unsafe { reg(a.pd, dm, 0, 8, ALL) });
    assert_eq!(plain, Err(libc::EINVAL), "it is zero based");
    let local = Region(register(a.pd, 16, 48, ALL).unwrap());
    let remote = Region(register(b.pd, 0, 64, ALL).unwrap());
    // Bytes 16 to 24 of the memory to its end.
    assert_eq!(
        write(&a, local.element(0, 8), remote.rkey(), 56),
        IBV_WC_SUCCESS
    );
    let mut found = [0u8; 8];
    // SAFETY: as above.
    unsafe {
        assert_eq!(from(found.as_mut_ptr().cast(), dm, 56, 8), 0);
        assert_eq!(from(found.as_mut_ptr().cast(), dm, 60, 8), libc::EINVAL);
        assert_eq!(free(dm), libc::EBUSY, "regions are in it");
    }
    assert_eq!(found, *b"01234567");
    assert_eq!(
        write(&a, local.element(0, 8), remote.rkey(), 60),
        IBV_WC_REM_ACCESS_ERR
    );
    local.deregister();
    remote.deregister();
    // SAFETY: live, and used no more.
    assert_eq!(unsafe { free(dm) }, 0);
    destroy([a, b]);
}

#[test]
fn device_memory_is_imported_by_its_number() {
    let world = World::open();
    let dm = device_memory(&world, 8, 0).unwrap();
    // SAFETY: each is live until it is freed or given up.
    unsafe {
        let number = (*dm).handle;
        let other = made(import_dm(world.context, number)).unwrap();
        let (mut found, word) = (0u64, 5u64);
        assert_eq!(
            (*dm).memcpy_to_dm.unwrap()(dm, 0, (&raw const word).cast(), 8),
            0
        );
        let from = (*other).memcpy_from_dm.unwrap();
        assert_eq!(from((&raw mut found).cast(), other, 0, 8), 0);
        assert_eq!(found, 5);
        assert_eq!(world.ops().free_dm.unwrap()(dm), 0);
        let gone = import_dm(world.context, number);
        assert_eq!(made(gone).err(), Some(libc::EINVAL));
        unimport_dm(other);
    }
}

#[test]
fn device_memory_has_limits() {
    let world = World::open();
    let most = crate::soft::objects::MAX_DEVICE_MEMORY;
    assert_eq!(device_memory(&world, most + 1, 0), Err(libc::ENOMEM));
    assert_eq!(device_memory(&world, 0, 0), Err(libc::EINVAL));
    assert_eq!(device_memory(&world, 8, 30), Err(libc::EINVAL));
}
