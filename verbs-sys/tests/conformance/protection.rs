//! Accesses that must not happen: they change nothing, and each end learns why.

use verbs_sys::{AccessFlags, QpState, WcStatus};

use crate::support::{
    ALL_ACCESS, Element, Ends, Link, QpSetup, Queue, REGION, Recv, Region, Request, Target, scripts,
};

/// The operations on a peer's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operation {
    Write,
    Read,
    CompareSwap,
    FetchAdd,
}

use Operation::{CompareSwap, FetchAdd, Read, Write};

const OPERATIONS: [Operation; 4] = [Write, Read, CompareSwap, FetchAdd];

impl Operation {
    /// The request; it would change every byte it may.
    fn request(self, local: Element, target: Target) -> Request {
        match self {
            Write => Request::write(&[local], target),
            Read => Request::read(&[local], target),
            CompareSwap => Request::compare_swap(local, target, 0xBBBB_BBBB_BBBB_BBBB, 1),
            FetchAdd => Request::fetch_add(local, target, 1),
        }
    }

    /// The right that it needs.
    fn right(self) -> AccessFlags {
        match self {
            Write => AccessFlags::REMOTE_WRITE,
            Read => AccessFlags::REMOTE_READ,
            CompareSwap | FetchAdd => AccessFlags::REMOTE_ATOMIC,
        }
    }
}

/// Posts a request that the target must refuse, and one behind it.
#[track_caller]
fn assert_refused_by_target(ends: &mut Ends, link: Link, request: Request, status: WcStatus) {
    ends.a.fill(link.a_mem, 0xAA);
    ends.b.fill(link.b_mem, 0xBB);
    ends.b
        .post_recv(link.b, &[Recv::new(7, &[]), Recv::new(8, &[])]);
    ends.a.post_recv(link.a, &[Recv::new(9, &[])]);
    let behind = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0));
    ends.a
        .post_send(link.a, &[request.id(1), behind.unsignaled().id(2)]);
    ends.a.expect(link.a, Queue::Send, 1, status);
    ends.a.expect(link.a, Queue::Send, 2, WcStatus::WrFlushErr);
    ends.a.expect(link.a, Queue::Recv, 9, WcStatus::WrFlushErr);
    ends.b.expect(link.b, Queue::Recv, 7, WcStatus::WrFlushErr);
    ends.b.expect(link.b, Queue::Recv, 8, WcStatus::WrFlushErr);
    ends.a.await_state(link.a, QpState::Err);
    ends.b.await_state(link.b, QpState::Err);
    ends.a.assert_filled(link.a_mem, 0xAA);
    ends.b.assert_filled(link.b_mem, 0xBB);
}

/// Posts a request that the own device must refuse.
#[track_caller]
fn assert_refused_here(ends: &mut Ends, link: Link, request: Request) {
    ends.a.fill(link.a_mem, 0xAA);
    ends.b.fill(link.b_mem, 0xBB);
    let behind = Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(0));
    ends.a.post_send(link.a, &[request.id(1), behind.id(2)]);
    // rdma_rxe has another name for it, and fails when it gets to the bad byte, packet by packet.
    let is_software = ends.is_software();
    let statuses: &[_] = match is_software {
        true => &[WcStatus::LocProtErr],
        false => &[WcStatus::LocProtErr, WcStatus::LocQpOpErr],
    };
    ends.a.expect_one_of(link.a, Queue::Send, 1, statuses);
    ends.a.expect(link.a, Queue::Send, 2, WcStatus::WrFlushErr);
    ends.a.await_state(link.a, QpState::Err);
    if is_software {
        ends.a.assert_filled(link.a_mem, 0xAA);
    }
}

/// Places around a region where 8 bytes do not fit.
fn outside(region: Region) -> [Target; 6] {
    let at = |addr| Target {
        addr,
        rkey: region.rkey,
    };
    [
        at(region.addr - 8),
        at(region.addr + REGION as u64),
        at(region.addr + REGION as u64 + 0x1000_0000),
        at(0),
        at(u64::MAX - 7),
        at(region.addr.wrapping_add(1 << 63)),
    ]
}

scripts! {
    fn a_wrong_rkey_is_refused(ends: &mut Ends) {
        for operation in OPERATIONS {
            for bit in [1, 1 << 8, 1 << 31] {
                let link = ends.link();
                let mut target = link.b_mem.at(64);
                target.rkey ^= bit;
                let request = operation.request(link.a_mem.sge(0, 8), target);
                assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
            }
        }
    }

    fn no_byte_outside_a_region_is_reached(ends: &mut Ends) {
        for operation in OPERATIONS {
            let count = outside(ends.link().b_mem).len();
            for case in 0..count {
                let link = ends.link();
                let target = outside(link.b_mem)[case];
                let request = operation.request(link.a_mem.sge(0, 8), target);
                assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
            }
        }
    }

    /// One byte too many at either end, and nothing of the rest is done.
    fn a_range_that_sticks_out_is_refused_whole(ends: &mut Ends) {
        for operation in [Write, Read] {
            for (back, len) in [(1, 100), (0, REGION + 1)] {
                let link = ends.link();
                let local = ends.a.register(0, REGION + 1, ALL_ACCESS);
                let mut target = link.b_mem.at(0);
                target.addr -= back;
                let request = operation.request(local.sge(0, len), target);
                assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
            }
            let link = ends.link();
            let request = operation.request(link.a_mem.sge(0, 100), link.b_mem.at(REGION - 99));
            assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
        }
    }

    fn a_region_allows_what_it_was_registered_for(ends: &mut Ends) {
        for operation in OPERATIONS {
            let link = ends.link();
            let others = ALL_ACCESS.difference(operation.right());
            let b_mem = ends.b.register(0, REGION, others);
            let link = Link { b_mem, ..link };
            let request = operation.request(link.a_mem.sge(0, 8), link.b_mem.at(64));
            assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
        }
    }

    /// What a queue pair does not do at all is an invalid request.
    fn a_queue_pair_allows_what_it_was_modified_to(ends: &mut Ends) {
        for operation in OPERATIONS {
            let access = ALL_ACCESS.difference(operation.right()).bits();
            let deaf = QpSetup { access, ..QpSetup::default() };
            let link = ends.link_with(QpSetup::default(), deaf);
            let request = operation.request(link.a_mem.sge(0, 8), link.b_mem.at(64));
            assert_refused_by_target(ends, link, request, WcStatus::RemInvReqErr);
        }
    }

    /// The access flags of the initiator's own queue pair are for its peer alone.
    fn an_initiator_needs_no_rights_of_its_own(ends: &mut Ends) {
        let mute = QpSetup { access: 0, ..QpSetup::default() };
        let link = ends.link_with(mute, QpSetup::default());
        for operation in OPERATIONS {
            let request = operation.request(link.a_mem.sge(0, 8), link.b_mem.at(0));
            ends.a.transfer(link.a, request);
        }
    }

    fn a_key_is_good_in_its_protection_domain_alone(ends: &mut Ends) {
        for operation in OPERATIONS {
            let link = ends.link();
            let pd = ends.b.alloc_pd();
            let b_mem = ends.b.register(pd, REGION, ALL_ACCESS);
            let link = Link { b_mem, ..link };
            let request = operation.request(link.a_mem.sge(0, 8), link.b_mem.at(64));
            assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
        }
    }

    fn a_deregistered_region_is_out_of_reach(ends: &mut Ends) {
        for operation in OPERATIONS {
            let link = ends.link();
            let gone = ends.b.register(0, REGION, ALL_ACCESS);
            let request = operation.request(link.a_mem.sge(0, 8), gone.at(64));
            // So that every cache on the way knows the region.
            ends.a.transfer(link.a, request.clone());
            ends.b.deregister(gone);
            assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
            ends.b.assert_zero_but(gone, 64..72);
        }
    }

    /// A new region does not answer to the key of one that was there before.
    fn keys_are_not_reused_soon(ends: &mut Ends) {
        let link = ends.link();
        let gone = ends.b.register(0, REGION, ALL_ACCESS);
        ends.b.deregister(gone);
        for _ in 0..50 {
            let new = ends.b.register(0, REGION, ALL_ACCESS);
            assert_ne!(new.rkey, gone.rkey);
            ends.b.deregister(new);
        }
        let request = Request::write(&[link.a_mem.sge(0, 8)], gone.at(0));
        assert_refused_by_target(ends, link, request, WcStatus::RemAccessErr);
    }

    fn a_wrong_lkey_is_refused(ends: &mut Ends) {
        for operation in OPERATIONS {
            let link = ends.link();
            let mut local = link.a_mem.sge(0, 8);
            local.lkey ^= 1 << 8;
            assert_refused_here(ends, link, operation.request(local, link.b_mem.at(64)));
        }
        let link = ends.link();
        let mut local = link.a_mem.sge(0, 8);
        local.lkey ^= 1 << 8;
        assert_refused_here(ends, link, Request::send(&[local]));
        ends.b.assert_filled(link.b_mem, 0xBB);
    }

    fn local_bytes_must_lie_in_their_region(ends: &mut Ends) {
        for (offset, len) in [(REGION - 7, 8), (REGION, 1), (0, REGION + 1)] {
            for operation in [Write, Read] {
                let link = ends.link();
                let target = ends.b.register(0, REGION + 1, ALL_ACCESS);
                let local = link.a_mem.sge(offset, len);
                assert_refused_here(ends, link, operation.request(local, target.at(0)));
            }
        }
        // The second element is the bad one.
        let link = ends.link();
        let elements = [link.a_mem.sge(0, 8), link.a_mem.sge(REGION, 8)];
        assert_refused_here(ends, link, Request::write(&elements, link.b_mem.at(0)));
    }

    fn local_keys_are_good_in_their_protection_domain_alone(ends: &mut Ends) {
        for operation in OPERATIONS {
            let link = ends.link();
            let pd = ends.a.alloc_pd();
            let foreign = ends.a.register(pd, 4096, ALL_ACCESS);
            let request = operation.request(foreign.sge(0, 8), link.b_mem.at(64));
            assert_refused_here(ends, link, request);
            ends.a.assert_zero_but(foreign, 0..0);
        }
    }

    /// What comes back needs a region that local work may write to.
    fn answers_need_local_write(ends: &mut Ends) {
        for operation in [Read, CompareSwap, FetchAdd] {
            let link = ends.link();
            let fixed = ends.a.register(0, 4096, AccessFlags::empty());
            let request = operation.request(fixed.sge(0, 8), link.b_mem.at(64));
            assert_refused_here(ends, link, request);
            ends.a.assert_zero_but(fixed, 0..0);
        }
    }

    /// A receive whose memory is not good fails at its own end; the sender hears of it.
    fn a_receive_needs_memory_that_can_be_written(ends: &mut Ends) {
        for case in 0..3 {
            let link = ends.link();
            let fixed = ends.b.register(0, 4096, AccessFlags::empty());
            let mut wrong = link.b_mem.sge(0, 8);
            wrong.lkey ^= 1 << 8;
            let element = [fixed.sge(0, 8), wrong, link.b_mem.sge(REGION - 4, 8)][case];
            ends.b.fill(link.b_mem, 0xBB);
            ends.b.post_recv(link.b, &[Recv::new(1, &[element]), Recv::new(2, &[])]);
            ends.a.post_send(link.a, &[Request::send(&[link.a_mem.sge(0, 8)]).id(3)]);
            // rdma_rxe says that the operation failed where the standard says why.
            let statuses: &[_] = match ends.is_software() {
                true => &[WcStatus::LocProtErr],
                false => &[WcStatus::LocProtErr, WcStatus::LocQpOpErr],
            };
            ends.b.expect_one_of(link.b, Queue::Recv, 1, statuses);
            ends.b.expect(link.b, Queue::Recv, 2, WcStatus::WrFlushErr);
            ends.a.expect(link.a, Queue::Send, 3, WcStatus::RemOpErr);
            ends.a.await_state(link.a, QpState::Err);
            ends.b.await_state(link.b, QpState::Err);
            ends.b.assert_zero_but(fixed, 0..0);
            ends.b.assert_filled(link.b_mem, 0xBB);
        }
    }

    /// Requests before the bad one are done, and those behind it are not.
    fn requests_before_a_bad_one_are_done(ends: &mut Ends) {
        let link = ends.link();
        ends.a.fill(link.a_mem, 0xAA);
        let mut wrong = link.b_mem.at(8);
        wrong.rkey ^= 1 << 8;
        let element = [link.a_mem.sge(0, 8)];
        let list = [
            Request::write(&element, link.b_mem.at(0)).unsignaled().id(1),
            Request::write(&element, wrong).unsignaled().id(2),
            Request::write(&element, link.b_mem.at(16)).unsignaled().id(3),
            Request::write(&element, link.b_mem.at(24)).id(4),
        ];
        ends.a.post_send(link.a, &list);
        ends.a.expect(link.a, Queue::Send, 2, WcStatus::RemAccessErr);
        ends.a.expect(link.a, Queue::Send, 3, WcStatus::WrFlushErr);
        ends.a.expect(link.a, Queue::Send, 4, WcStatus::WrFlushErr);
        assert_eq!(ends.b.load_word(link.b_mem, 0), 0xAAAA_AAAA_AAAA_AAAA);
        assert_eq!(ends.b.load(link.b_mem, 8, 24), [0; 24]);
    }
}
