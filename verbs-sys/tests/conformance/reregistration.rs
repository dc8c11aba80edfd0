//! Regions that are changed: ibv_rereg_mr(3).

use std::thread;

use verbs_sys::{AccessFlags, QpState, WcStatus, ffi::IBV_MW_TYPE_1};

use crate::support::{
    ALL_ACCESS, BINDABLE, Command, End, Ends, Link, QpSetup, Queue, REGION, Region, Request,
    Target, scripts,
};

/// What to change.
#[derive(Clone, Copy, Debug, Default)]
struct Change {
    /// Other bytes, so many.
    len: Option<usize>,
    pd: Option<usize>,
    access: Option<AccessFlags>,
}

fn change(end: &mut End, region: Region, what: Change) -> Result<Region, i32> {
    end.call(Command::Rereg {
        region: region.id,
        len: what.len,
        pd: what.pd,
        access: what.access.map(|access| access.bits()),
    })
}

fn load_former(end: &mut End, region: Region, offset: usize, len: usize) -> Vec<u8> {
    let bytes: crate::support::Bytes = end.call(Command::LoadFormer {
        region: region.id,
        offset,
        len,
    });
    bytes.0
}

/// Whether the device can do it at all: it has no flag for that.
fn has_rereg(ends: &mut Ends) -> bool {
    let region = ends.b.register(0, 64, ALL_ACCESS);
    let access = Some(AccessFlags::LOCAL_WRITE);
    match change(
        &mut ends.b,
        region,
        Change {
            access,
            ..Change::default()
        },
    ) {
        Ok(_) => true,
        Err(error) => {
            assert!([libc::EOPNOTSUPP, libc::ENOSYS].contains(&error), "{error}");
            crate::support::say_left_out();
            false
        }
    }
}

#[track_caller]
fn assert_refused(ends: &mut Ends, link: Link, request: Request) {
    ends.a.post_send(link.a, &[request.id(9)]);
    ends.a
        .expect(link.a, Queue::Send, 9, WcStatus::RemAccessErr);
    ends.b.await_state(link.b, QpState::Err);
}

scripts! {
    fn rights_can_be_changed(ends: &mut Ends) {
        if !has_rereg(ends) { return }
        let link = ends.link();
        ends.a.fill(link.a_mem, 0xAA);
        let (word, other) = (link.a_mem.sge(0, 8), link.a_mem.sge(8, 8));
        let reading = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
        let writing = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        let region = ends.b.register(0, REGION, reading);
        ends.a.transfer(link.a, Request::read(&[other], region.at(0)));
        let access = Some(writing);
        let region = change(&mut ends.b, region, Change { access, ..Change::default() }).unwrap();
        ends.a.transfer(link.a, Request::write(&[word], region.at(0)));
        assert_eq!(ends.b.load(region, 0, 8), [0xAA; 8]);
        assert_refused(ends, link, Request::read(&[other], region.at(0)));
        let link = ends.link();
        let access = Some(reading);
        let region = change(&mut ends.b, region, Change { access, ..Change::default() }).unwrap();
        let word = link.a_mem.sge(0, 8);
        ends.a.transfer(link.a, Request::read(&[word], region.at(0)));
        assert_eq!(ends.a.load(link.a_mem, 0, 8), [0xAA; 8]);
        assert_refused(ends, link, Request::write(&[word], region.at(8)));
        ends.b.assert_zero_but(region, 0..8);
    }

    fn a_region_can_move(ends: &mut Ends) {
        if !has_rereg(ends) { return }
        let link = ends.link();
        ends.a.fill(link.a_mem, 0xAA);
        let old = ends.b.register(0, REGION, ALL_ACCESS);
        let local = link.a_mem.sge(0, 8);
        ends.a.transfer(link.a, Request::write(&[local], old.at(0)));
        let len = Some(2 * REGION);
        let new = change(&mut ends.b, old, Change { len, ..Change::default() }).unwrap();
        assert_ne!(new.addr, old.addr);
        assert_eq!(new.len, 2 * REGION);
        ends.a.transfer(link.a, Request::write(&[local], new.at(2 * REGION - 8)));
        ends.b.assert_zero_but(new, 2 * REGION - 8..2 * REGION);
        ends.a.transfer(link.a, Request::fetch_add(local, new.at(0), 5));
        assert_eq!(ends.b.load_word(new, 0), 5);
        // By local work, too.
        let back = Request::write(&[new.sge(2 * REGION - 8, 8)], link.a_mem.at(64));
        ends.b.transfer(link.b, back);
        for rkey in [new.rkey, old.rkey] {
            let link = ends.link();
            let target = Target { addr: old.addr + 8, rkey };
            assert_refused(ends, link, Request::write(&[link.a_mem.sge(0, 8)], target));
        }
        assert_eq!(load_former(&mut ends.b, new, 8, REGION - 8), vec![0; REGION - 8]);
        ends.b.deregister(new);
    }

    fn a_region_can_go_to_another_domain(ends: &mut Ends) {
        if !has_rereg(ends) { return }
        let link = ends.link();
        let pd = ends.b.alloc_pd();
        let setup = QpSetup { pd, ..QpSetup::default() };
        let there = ends.link_with(QpSetup::default(), setup);
        let region = ends.b.register(0, REGION, ALL_ACCESS);
        let what = Change { pd: Some(pd), ..Change::default() };
        let region = change(&mut ends.b, region, what).unwrap();
        let write = Request::write(&[there.a_mem.sge(0, 8)], region.at(0));
        ends.a.transfer(there.a, write);
        assert_refused(ends, link, Request::write(&[link.a_mem.sge(0, 8)], region.at(0)));
        // All at once.
        let link = ends.link();
        let access = Some(AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ);
        let what = Change { pd: Some(0), len: Some(100), access };
        let region = change(&mut ends.b, region, what).unwrap();
        ends.a.transfer(link.a, Request::read(&[link.a_mem.sge(0, 100)], region.at(0)));
        assert_refused(ends, there, Request::read(&[there.a_mem.sge(0, 8)], region.at(0)));
    }

    /// A device may leave a region useless when it fails; ours does not.
    fn what_cannot_be_changed_stays_as_it_is(ends: &mut Ends) {
        if !has_rereg(ends) { return }
        let link = ends.link();
        let mut region = ends.b.register(0, REGION, ALL_ACCESS);
        let access = Some(AccessFlags::REMOTE_WRITE);
        let wrong = [
            (Change::default(), libc::EINVAL),
            (Change { access, ..Change::default() }, libc::EINVAL),
            (Change { access, len: Some(64), pd: Some(0) }, libc::EINVAL),
        ];
        for (what, error) in wrong {
            assert_eq!(change(&mut ends.b, region, what), Err(error), "{what:?}");
            if ends.is_software() {
                ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], region.at(REGION - 8)));
            } else {
                region = ends.b.register(0, REGION, ALL_ACCESS);
            }
        }
        ends.b.deregister(region);
    }

    fn a_region_stays_as_it_is_while_a_window_is_bound_to_it(ends: &mut Ends) {
        if !has_rereg(ends) || ends.leaves_out() { return }
        let link = ends.link();
        let region = ends.b.register(0, REGION, BINDABLE);
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let part = region.part(0, 64, AccessFlags::REMOTE_WRITE);
        let rkey = ends.b.bind(link.b, window, part);
        let pd = ends.b.alloc_pd();
        for what in [
            Change { len: Some(64), ..Change::default() },
            Change { pd: Some(pd), ..Change::default() },
            Change { access: Some(ALL_ACCESS), ..Change::default() },
        ] {
            assert_eq!(change(&mut ends.b, region, what), Err(libc::EBUSY));
        }
        let target = Target { addr: region.addr, rkey };
        ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], target));
        ends.b.unbind(link.b, window);
        let access = Some(ALL_ACCESS);
        let region = change(&mut ends.b, region, Change { access, ..Change::default() }).unwrap();
        ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 8)], region.at(0)));
        // It has no right for windows any more.
        let part = region.part(0, 64, AccessFlags::REMOTE_READ);
        assert!(ends.b.try_bind(link.b, window, part).is_ok());
        ends.b.expect(link.b, Queue::Send, 0, WcStatus::MwBindErr);
    }

    /// When the call has returned, no write to the old bytes is under way and none comes any more.
    fn a_move_waits_for_writes_under_way(ends: &mut Ends) {
        if !has_rereg(ends) { return }
        let len = if ends.is_software() { 5 << 19 } else { 32 << 10 };
        for _ in 0..4 {
            let (link, other) = (ends.link(), ends.link());
            let region = ends.b.register(0, len, ALL_ACCESS);
            let sources = [(); 2].map(|()| ends.a.register(0, len, ALL_ACCESS).id);
            let writers = Command::Batter {
                qps: vec![link.a.id, other.a.id],
                sources: sources.to_vec(),
                target: region.at(0),
                len,
            };
            let (a, b) = (&mut ends.a, &mut ends.b);
            let statuses = thread::scope(|scope| {
                let writers = scope.spawn(move || a.call::<Vec<u32>>(writers));
                while b.load_word(region, len - 8) == 0 {
                    thread::yield_now();
                }
                let what = Change { len: Some(len), ..Change::default() };
                let moved = change(b, region, what).expect("cannot be moved");
                let places = [0, len / 2, len - 4096];
                let look = |b: &mut End| places.map(|at| load_former(b, moved, at, 4096));
                let before = look(b);
                for _ in 0..20 {
                    assert!(look(b) == before, "an old byte has changed");
                }
                let statuses = writers.join().expect("a writer panicked");
                assert!(look(b) == before, "an old byte has changed");
                b.assert_filled(moved, 0);
                statuses
            });
            for status in statuses {
                assert_eq!(WcStatus::from(status), WcStatus::RemAccessErr);
            }
        }
    }
}
