//! Memory windows: what they let through, and that nothing passes once they are closed.

mod siege;
mod type_2;

use verbs_sys::{
    AccessFlags, QpState, WcOpcode, WcStatus,
    ffi::{
        IBV_DEVICE_MEM_MGT_EXTENSIONS, IBV_DEVICE_MEM_WINDOW, IBV_DEVICE_MEM_WINDOW_TYPE_2B,
        IBV_MW_TYPE_1, IBV_MW_TYPE_2, ibv_inc_rkey,
    },
};

use crate::support::{
    ALL_ACCESS, BINDABLE, Bind, Ends, Link, QpSetup, Queue, REGION, Recv, Region, Request, Target,
    Window, scripts,
};

/// Everything that a window can allow.
const REMOTE: AccessFlags = ALL_ACCESS.difference(AccessFlags::LOCAL_WRITE);

/// Where the windows here begin in their region, and how long they are.
const START: usize = 4096 + 24;
const LEN: usize = 8192;

// rdma_rxe says that it has windows, but checks the region's bounds where it should check the
// window's (Linux 6.1), and the library for it follows the null region of an unbind. So far these
// tests are for the software device.

fn has_type_1(ends: &mut Ends) -> bool {
    !ends.leaves_out() && ends.b.is_capable(IBV_DEVICE_MEM_WINDOW)
}

/// Type 2B, and the means to invalidate its keys.
fn has_type_2(ends: &mut Ends) -> bool {
    let flags = IBV_DEVICE_MEM_WINDOW_TYPE_2B | IBV_DEVICE_MEM_MGT_EXTENSIONS;
    !ends.leaves_out() && ends.b.is_capable(flags)
}

fn at(region: Region, offset: usize, rkey: u32) -> Target {
    Target {
        addr: region.addr + offset as u64,
        rkey,
    }
}

/// A link, and a region of `b` that is for windows only.
fn setup(ends: &mut Ends) -> (Link, Region) {
    let link = ends.link();
    ends.a.fill(link.a_mem, 0xAA);
    (link, ends.b.register(0, REGION, BINDABLE))
}

/// Asserts that a WRITE fails and changes nothing.
#[track_caller]
fn assert_closed(ends: &mut Ends, link: Link, region: Region, target: Target) {
    let before = ends.b.digest(region);
    let request = Request::write(&[link.a_mem.sge(0, 8)], target);
    ends.a.post_send(link.a, &[request.id(77)]);
    ends.a
        .expect(link.a, Queue::Send, 77, WcStatus::RemAccessErr);
    ends.a.await_state(link.a, QpState::Err);
    ends.b.await_state(link.b, QpState::Err);
    assert_eq!(
        ends.b.digest(region),
        before,
        "a closed window lets bytes through"
    );
}

/// Asserts that a key opens nothing, by a new pair of queue pairs.
#[track_caller]
fn assert_dead(ends: &mut Ends, region: Region, rkey: u32) {
    let link = ends.link();
    assert_closed(ends, link, region, at(region, START, rkey));
}

/// Asserts that a bind which was posted fails, and its queue pair with it.
#[track_caller]
fn assert_bind_fails(ends: &mut Ends, link: Link, wr_id: u64) {
    let statuses = [WcStatus::MwBindErr];
    ends.b.expect_one_of(link.b, Queue::Send, wr_id, &statuses);
    ends.b.await_state(link.b, QpState::Err);
}

/// A window of type 2 bound to `link.b`.
fn bound_type_2(ends: &mut Ends, link: Link, region: Region) -> (Window, u32) {
    let window = ends.b.alloc_mw(0, IBV_MW_TYPE_2);
    let rkey = ibv_inc_rkey(window.rkey);
    ends.b
        .post_bind(link.b, window, rkey, region.part(START, LEN, REMOTE));
    (window, rkey)
}

scripts! {
    fn a_window_opens_its_range(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let bind = Bind { wr_id: 5, ..region.part(START, LEN, REMOTE) };
        let rkey = ends.b.try_bind(link.b, window, bind).expect("cannot bind");
        let done = ends.b.expect(link.b, Queue::Send, 5, WcStatus::Success);
        assert_eq!(done.opcode(), WcOpcode::BindMw);
        assert_ne!(rkey, window.rkey, "a bind changes the key");
        assert_eq!(rkey >> 8, window.rkey >> 8, "but for its lowest byte");

        let whole = Request::write(&[link.a_mem.sge(0, LEN)], at(region, START, rkey));
        ends.a.transfer(link.a, whole);
        ends.b.assert_zero_but(region, START..START + LEN);
        assert_eq!(ends.b.load(region, START, LEN), [0xAA; LEN]);
        let word = link.a_mem.sge(64, 8);
        ends.a.transfer(link.a, Request::fetch_add(word, at(region, START, rkey), 1));
        ends.a.transfer(link.a, Request::read(&[word], at(region, START, rkey)));
        assert_eq!(ends.a.load_word(link.a_mem, 64), 0xAAAA_AAAA_AAAA_AAAB);

        for offset in [START - 1, START + LEN - 7, START + LEN, 0] {
            let link = ends.link();
            assert_closed(ends, link, region, at(region, offset, rkey));
        }
        // The region has no right for peers of its own.
        let link = ends.link();
        assert_closed(ends, link, region, region.at(START));
    }

    fn a_window_allows_what_it_was_bound_for(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let rights = [AccessFlags::REMOTE_WRITE, AccessFlags::REMOTE_READ, AccessFlags::REMOTE_ATOMIC];
        for right in rights {
            let (link, region) = setup(ends);
            let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
            let others = REMOTE.difference(right);
            let rkey = ends.b.bind(link.b, window, region.part(START, LEN, others));
            let (local, target) = (link.a_mem.sge(0, 8), at(region, START, rkey));
            let request = match right {
                AccessFlags::REMOTE_WRITE => Request::write(&[local], target),
                AccessFlags::REMOTE_READ => Request::read(&[local], target),
                _ => Request::fetch_add(local, target, 1),
            };
            ends.a.post_send(link.a, &[request.id(1)]);
            ends.a.expect(link.a, Queue::Send, 1, WcStatus::RemAccessErr);
            ends.b.assert_zero_but(region, 0..0);
            ends.a.assert_filled(link.a_mem, 0xAA);
        }
    }

    /// The messages that carry bytes for a window: short ones, and long ones.
    fn writes_with_immediate_go_through_a_window(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let rkey = ends.b.bind(link.b, window, region.part(START, LEN, REMOTE));
        for len in [8, LEN] {
            ends.b.post_recv(link.b, &[Recv::new(3, &[])]);
            let local = [link.a_mem.sge(0, len)];
            let request = Request::write_imm(&local, at(region, START, rkey), 9);
            ends.a.transfer(link.a, request);
            let got = ends.b.expect(link.b, Queue::Recv, 3, WcStatus::Success);
            assert_eq!(got.imm, Some(9));
            assert_eq!(ends.b.load(region, START, len), vec![0xAA; len]);
        }
        ends.b.post_recv(link.b, &[Recv::new(4, &[])]);
        let local = [link.a_mem.sge(0, LEN)];
        let request = Request::write_imm(&local, at(region, START + 8, rkey), 9);
        ends.a.post_send(link.a, &[request.id(1)]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::RemAccessErr);
        assert_eq!(ends.b.load(region, START + LEN, 8), [0; 8]);
    }

    fn binding_again_closes_the_old_range(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let first = ends.b.bind(link.b, window, region.part(START, LEN, REMOTE));
        let write = |rkey| Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
        ends.a.transfer(link.a, write(first));
        let second = ends.b.bind(link.b, window, region.part(START, LEN, REMOTE));
        assert_ne!(first, second);
        ends.a.transfer(link.a, write(second));
        assert_dead(ends, region, first);
        let third = ends.b.bind(link.b, window, region.part(START + LEN, LEN, REMOTE));
        assert_dead(ends, region, second);
        // Its present key, and its former range.
        assert_dead(ends, region, third);
        ends.b.unbind(link.b, window);
        for rkey in [first, second, third, ibv_inc_rkey(third)] {
            assert_dead(ends, region, rkey);
        }
    }

    fn a_region_cannot_go_while_a_window_is_bound_to_it(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        // rdma_rxe has another number for it.
        let errors: &[_] = if ends.is_software() { &[libc::EBUSY] } else { &[libc::EBUSY, libc::EINVAL] };
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let other = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        ends.b.bind(link.b, other, region.part(0, 8, REMOTE));
        let rkey = ends.b.bind(link.b, window, region.part(START, LEN, REMOTE));
        for _ in 0..2 {
            let error = ends.b.try_deregister(region).expect("was deregistered");
            assert!(errors.contains(&error), "{error}");
        }
        // And it is as good as before.
        let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
        ends.a.transfer(link.a, write);
        ends.b.unbind(link.b, other);
        assert!(ends.b.try_deregister(region).is_some());
        // Bound to another region, it lets this one go.
        let next = ends.b.register(0, REGION, BINDABLE);
        ends.b.bind(link.b, window, next.part(0, 8, REMOTE));
        assert_eq!(ends.b.try_deregister(region), None);
        ends.b.dealloc_mw(window);
        assert_eq!(ends.b.try_deregister(next), None);
    }

    fn deallocation_closes_a_window(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let rkey = ends.b.bind(link.b, window, region.part(START, LEN, REMOTE));
        let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, rkey));
        ends.a.transfer(link.a, write);
        ends.b.dealloc_mw(window);
        assert_dead(ends, region, rkey);
        ends.b.deregister(region);
    }

    fn what_cannot_be_bound(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let write = AccessFlags::REMOTE_WRITE;
        for case in 0..6 {
            let (link, region) = setup(ends);
            let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
            let plain = ends.b.register(0, REGION, ALL_ACCESS);
            let fixed = ends.b.register(0, REGION, AccessFlags::MW_BIND);
            let bind = match case {
                0 => plain.part(0, 8, write),
                1 => fixed.part(0, 8, write),
                2 => fixed.part(0, 8, AccessFlags::REMOTE_ATOMIC),
                3 => region.part(REGION - 7, 8, write),
                4 => Bind { addr: region.addr - 1, ..region.part(0, 8, write) },
                _ => Bind { addr: u64::MAX - 3, ..region.part(0, 8, write) },
            };
            // rdma_rxe adds address and length up, and does not notice that they wrap.
            if case == 5 && !ends.is_software() { continue }
            let old = ends.b.bind(link.b, window, region.part(START, LEN, REMOTE));
            let rkey = ends.b.try_bind(link.b, window, Bind { wr_id: 8, ..bind }).expect("cannot post");
            assert_bind_fails(ends, link, 8);
            if ends.is_software() {
                // Nothing has changed.
                let link = ends.link();
                let write = Request::write(&[link.a_mem.sge(0, 8)], at(region, START, old));
                ends.a.transfer(link.a, write);
            }
            let link = ends.link();
            assert_closed(ends, link, region, at(region, START, rkey));
        }
        // Reading needs no local write.
        let (link, _) = setup(ends);
        let fixed = ends.b.register(0, REGION, AccessFlags::MW_BIND);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let rkey = ends.b.bind(link.b, window, fixed.part(0, 8, AccessFlags::REMOTE_READ));
        ends.a.transfer(link.a, Request::read(&[link.a_mem.sge(0, 8)], at(fixed, 0, rkey)));
    }

    fn windows_regions_and_queue_pairs_are_of_one_domain(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let (link, region) = setup(ends);
        let pd = ends.b.alloc_pd();
        let foreign = ends.b.alloc_mw(pd, IBV_MW_TYPE_1);
        let refused = ends.b.try_bind(link.b, foreign, region.part(0, 8, REMOTE));
        assert_eq!(refused, Err(libc::EPERM));
        let foreign_region = ends.b.register(pd, REGION, BINDABLE);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let refused = ends.b.try_bind(link.b, window, foreign_region.part(0, 8, REMOTE));
        assert_eq!(refused, Err(libc::EPERM));
        // Bytes of nothing.
        let bind = Bind { region: None, ..region.part(0, 8, REMOTE) };
        assert_eq!(ends.b.try_bind(link.b, window, bind), Err(libc::EINVAL));
        ends.b.assert_idle(link.b, Queue::Send);
        // rdma_rxe lets a queue pair of another domain bind a window of type 1.
        if ends.is_software() {
            let bind = Bind { wr_id: 6, ..foreign_region.part(0, 8, REMOTE) };
            assert!(ends.b.try_bind(link.b, foreign, bind).is_ok());
            assert_bind_fails(ends, link, 6);
        }
        // A window is no way around the domain of the queue pair that is asked.
        let setup = QpSetup { pd, ..QpSetup::default() };
        let link = ends.link_with(QpSetup::default(), setup);
        let binder = ends.link();
        let rkey = ends.b.bind(binder.b, window, region.part(START, LEN, REMOTE));
        assert_closed(ends, link, region, at(region, START, rkey));
    }

    fn a_windows_key_is_no_local_key(ends: &mut Ends) {
        if !has_type_1(ends) { return }
        let (link, region) = setup(ends);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let rkey = ends.b.bind(link.b, window, region.part(START, LEN, REMOTE));
        let mut local = region.sge(START, 8);
        local.lkey = rkey;
        ends.b.post_send(link.b, &[Request::write(&[local], link.a_mem.at(0)).id(2)]);
        let statuses: &[_] = match ends.is_software() {
            true => &[WcStatus::LocProtErr],
            false => &[WcStatus::LocProtErr, WcStatus::LocQpOpErr],
        };
        ends.b.expect_one_of(link.b, Queue::Send, 2, statuses);
        ends.a.assert_filled(link.a_mem, 0xAA);
    }
}
