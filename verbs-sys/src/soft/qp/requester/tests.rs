//! How long whoever takes something away waits for a chain.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::ffi::*;
use crate::soft::asymmetric::can_fence_everywhere;
use crate::soft::link::ring::{AHEAD, MAX_INLINE, UNITS, units_for};
use crate::soft::qp::Qp;
use crate::soft::qp::access::CHUNK;
use crate::{
    AccessFlags, Context, PathOptions, ProtectionDomain, QueuePair, QueuePairInit, find_device,
};

/// Requests of a chain.
const LENGTH: usize = 8;

fn device_side(qp: &QueuePair) -> &Qp {
    // SAFETY: the handle of a queue pair of this device leads it, and lives as long.
    unsafe { &*qp.as_raw().cast::<Qp>() }
}

fn path(context: &Context) -> PathOptions {
    PathOptions {
        gid_index: context.choose_gid(1).unwrap().0,
        ..PathOptions::default()
    }
}

/// Two queue pairs that are connected to each other.
fn connected(
    pd: &ProtectionDomain,
    inits: [&QueuePairInit<'_>; 2],
    path: &PathOptions,
) -> [QueuePair; 2] {
    let qps = inits.map(|init| pd.create_qp(init).unwrap());
    let ends = qps.each_ref().map(|qp| qp.endpoint(path, 1).unwrap());
    for (qp, peer) in qps.iter().zip(ends.iter().rev()) {
        qp.to_init(AccessFlags::all(), 1).unwrap();
        qp.to_rtr(peer, path).unwrap();
        qp.to_rts(1, path).unwrap();
    }
    qps
}

/// A signaled WRITE of these elements.
fn write(list: *mut ibv_sge, num_sge: i32, remote_addr: u64, rkey: u32) -> ibv_send_wr {
    let mut request = ibv_send_wr::zeroed();
    request.opcode = IBV_WR_RDMA_WRITE;
    request.send_flags = IBV_SEND_SIGNALED;
    (request.sg_list, request.num_sge) = (list, num_sge);
    request.wr.rdma = ibv_send_wr_rdma { remote_addr, rkey };
    request
}

/// How often the epoch of a word was another one while something was done.
fn epochs(word: &AtomicU64, act: impl FnOnce()) -> usize {
    let before = word.load(Ordering::Relaxed);
    act();
    ((word.load(Ordering::Relaxed) - before) / 2) as usize
}

#[test]
fn a_chain_is_no_longer_epoch_than_a_request() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None).unwrap();
    let init = QueuePairInit {
        max_send_wr: 16,
        max_send_sge: 2,
        ..QueuePairInit::new(&cq, &cq)
    };
    let [a, b] = connected(&pd, [&init, &init], &path(&context));
    let memory = context.alloc_memory(2 * CHUNK).unwrap();
    let region = pd.reg_memory(&memory, AccessFlags::all()).unwrap();
    let element = |length: usize| ibv_sge {
        addr: region.addr(),
        length: length as u32,
        lkey: region.lkey(),
    };
    let there = region.addr() + CHUNK as u64;
    let post = |opcode, lists: [&mut [ibv_sge]; LENGTH]| {
        let mut chain = lists.map(|list| {
            let mut request = ibv_send_wr::zeroed();
            request.opcode = opcode;
            request.sg_list = list.as_mut_ptr();
            request.num_sge = list.len() as i32;
            request.wr.rdma = ibv_send_wr_rdma {
                remote_addr: there,
                rkey: region.rkey(),
            };
            request
        });
        for at in (1..LENGTH).rev() {
            let next = &raw mut chain[at];
            chain[at - 1].next = next;
        }
        chain[LENGTH - 1].send_flags = IBV_SEND_SIGNALED;
        // SAFETY: the chain and its lists live through the call; the elements lie in the region.
        unsafe { a.post_send(&mut chain[0]) }.unwrap();
    };
    let receive = |count: usize| {
        for _ in 0..count {
            let mut list = element(CHUNK);
            list.addr = there;
            let mut request = ibv_recv_wr::zeroed();
            (request.sg_list, request.num_sge) = (&raw mut list, 1);
            // SAFETY: as above.
            unsafe { b.post_recv(&raw mut request) }.unwrap();
        }
    };
    let sent = &device_side(&a).info().sends.0.epoch;
    let received = &device_side(&b).info().rq_epoch.0;

    // The first request finds that the peer is ready, so that the next are straight.
    let mut whole = [(); LENGTH].map(|()| [element(CHUNK)]);
    post(
        IBV_WR_RDMA_WRITE,
        whole.each_mut().map(|list| &mut list[..]),
    );
    let ends_of = || {
        let mut wcs = [crate::WorkCompletion::default()];
        while cq.poll(&mut wcs).unwrap() == 0 {}
        assert!(wcs[0].is_ok(), "{:?}", wcs[0].status());
    };
    ends_of();
    let straight = epochs(sent, || {
        post(
            IBV_WR_RDMA_WRITE,
            whole.each_mut().map(|list| &mut list[..]),
        );
    });
    ends_of();
    assert!(straight >= LENGTH, "{straight} epochs of straight requests");

    let mut halves = [(); LENGTH].map(|()| [element(CHUNK / 2), element(CHUNK / 2)]);
    let general = epochs(sent, || {
        post(
            IBV_WR_RDMA_WRITE,
            halves.each_mut().map(|list| &mut list[..]),
        );
    });
    ends_of();
    assert!(general >= LENGTH, "{general} epochs of requests with lists");

    // Messages, of which none is taken before all are posted; the last has no receive.
    receive(LENGTH - 1);
    let messages = epochs(received, || {
        post(IBV_WR_SEND, whole.each_mut().map(|list| &mut list[..]));
    });
    assert!(messages >= LENGTH - 1, "{messages} epochs of messages");
    // What waits behind it is executed when there is one.
    post(
        IBV_WR_RDMA_WRITE,
        halves.each_mut().map(|list| &mut list[..]),
    );
    let kept = epochs(sent, || receive(1));
    assert!(kept >= LENGTH, "{kept} epochs of requests that were kept");
}

/// Only polls count, and a request is asked for once.
#[test]
fn an_owner_is_asked_once() {
    let state = super::State::default();
    assert!((0..10).all(|_| !state.shall_hurry()));
    state
        .hurry
        .store(super::OWNER_POLLS, std::sync::atomic::Ordering::Relaxed);
    let asked = (1..=3 * super::OWNER_POLLS).filter(|_| state.shall_hurry());
    assert_eq!(asked.collect::<Vec<_>>(), [super::OWNER_POLLS]);
}

/// The peer consumes something of its ring while a burst fills it: that is room for one message, and not for two.
#[test]
fn room_in_the_ring_is_given_once() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(512, None).unwrap();
    let init = QueuePairInit {
        max_send_wr: 256,
        ..QueuePairInit::new(&cq, &cq)
    };
    let [a, _b] = connected(&pd, [&init, &init], &path(&context));
    let memory = context.alloc_memory(MAX_INLINE).unwrap();
    let region = pd.reg_memory(&memory, AccessFlags::all()).unwrap();
    let mut element = ibv_sge {
        addr: region.addr(),
        length: MAX_INLINE as u32,
        lkey: region.lkey(),
    };
    let mut request = write(&raw mut element, 1, 0, 0);
    request.opcode = IBV_WR_SEND;
    let sender = device_side(&a);
    let sent = || sender.sq.exec.load(Ordering::Relaxed);
    let at = || sender.requester.ring_at.load(Ordering::Relaxed);
    let taken = units_for(MAX_INLINE);
    // No receive is posted, so all stay in the ring. It is full when one more would be kept.
    while UNITS - at() > AHEAD + taken {
        // SAFETY: the request and its list live through the call.
        unsafe { a.post_send(&raw mut request) }.unwrap();
        assert_eq!(sent(), sender.sq.tail.load(Ordering::Relaxed));
    }
    let before = sent();
    // Enough for one and the rest of the ring, which is too short for it.
    let consumed = 2 * taken;
    let ack = &sender.mailbox().ack;
    ack.fetch_add(u64::from(consumed) << 32, Ordering::Release);
    let mut second = request;
    request.next = &raw mut second;
    // SAFETY: as above.
    unsafe { a.post_send(&raw mut request) }.unwrap();
    assert_eq!(sent(), before + 1);
    assert!(
        at() - consumed <= UNITS,
        "{} of {UNITS} units",
        at() - consumed
    );
}

/// Lists of so many elements are none, also where requests have none at all.
#[test]
fn a_list_of_less_than_nothing_is_refused() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None).unwrap();
    for max_send_sge in [0, 1] {
        let init = QueuePairInit {
            max_send_sge,
            ..QueuePairInit::new(&cq, &cq)
        };
        let [a, _b] = connected(&pd, [&init, &init], &path(&context));
        let memory = context.alloc_memory(4096).unwrap();
        let region = pd.reg_memory(&memory, AccessFlags::all()).unwrap();
        let mut element = ibv_sge {
            addr: region.addr(),
            length: 8,
            lkey: region.lkey(),
        };
        let mut post = |num_sge| {
            let there = region.addr() + 2048;
            let mut request = write(&raw mut element, num_sge, there, region.rkey());
            // SAFETY: the request and its list live through the call.
            unsafe { a.post_send(&raw mut request) }
        };
        // Of no elements: finds that the peer is ready.
        post(0).unwrap();
        for num_sge in [-1, i32::MIN, i32::MAX, max_send_sge as i32 + 1] {
            assert!(
                post(num_sge).is_err(),
                "{num_sge} elements of {max_send_sge}"
            );
        }
    }
}

#[test]
fn a_peer_of_this_process_is_waited_for_when_a_state_is_left() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let [acq, bcq] = [(); 2].map(|()| context.create_cq(64, None).unwrap());
    // What is posted afterwards fails soon.
    let path = PathOptions {
        timeout: 1,
        retry_cnt: 0,
        ..path(&context)
    };
    let memory = context.alloc_memory(2 * CHUNK).unwrap();
    let region = pd.reg_memory(&memory, AccessFlags::all()).unwrap();
    let there = region.addr() + CHUNK as u64;
    // SAFETY: inside the memory, whose word there is used as an atomic, or by copies, only.
    let last = |start: u64| unsafe { &*((start as usize + CHUNK - 8) as *const AtomicU64) };
    let mut changed = 0;
    for _ in 0..40 {
        let inits = [&acq, &bcq].map(|cq| QueuePairInit::new(cq, cq));
        let [a, b] = connected(&pd, inits.each_ref(), &path);
        let (a, region, acq) = (&a, &region, &acq);
        std::thread::scope(|scope| {
            let writer = scope.spawn(move || {
                for round in 0u64.. {
                    last(region.addr()).store(round, Ordering::Relaxed);
                    let mut element = ibv_sge {
                        addr: region.addr(),
                        length: CHUNK as u32,
                        lkey: region.lkey(),
                    };
                    let mut request = write(&raw mut element, 1, there, region.rkey());
                    // SAFETY: the request and its list live through the call.
                    unsafe { a.post_send(&raw mut request) }.unwrap();
                    let mut wcs = [crate::WorkCompletion::default()];
                    while acq.poll(&mut wcs).unwrap() == 0 {}
                    if !wcs[0].is_ok() {
                        break;
                    }
                }
            });
            // In the middle of a copy, which is not the first.
            let is_odd = |epoch: &AtomicU64| epoch.load(Ordering::Relaxed) & 1 != 0;
            let copies = || device_side(a).info().sends.0.epochs().any(is_odd);
            while last(there).load(Ordering::Relaxed) < 8 || !copies() {}
            let mut attr = ibv_qp_attr::zeroed();
            attr.qp_state = IBV_QPS_ERR;
            b.modify(&attr, crate::QpAttrMask::STATE).unwrap();
            let before = last(there).load(Ordering::Relaxed);
            // Everything that it was at has ended then.
            writer.join().unwrap();
            changed += usize::from(before != last(there).load(Ordering::Relaxed));
            last(there).store(0, Ordering::Relaxed);
        });
    }
    assert_eq!(changed, 0, "times that a byte has changed afterwards");
}

#[test]
fn whoever_is_at_a_request_is_let_tell_of_it() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let cq = context.create_cq(4, None).unwrap();
    let pd = context.alloc_pd().unwrap();
    let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
    let device_side = device_side(&qp);
    let sends = &device_side.info().sends.0;
    // Of a thread that has the bias, beside the lock's.
    sends.places.store(1, Ordering::Relaxed);
    assert_eq!(sends.epochs().count(), 2);
    for epoch in sends.epochs() {
        epoch.store(1, Ordering::Relaxed);
        let began = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                began.store(true, Ordering::Relaxed);
                device_side.let_others_tell();
            });
            while !began.load(Ordering::Relaxed) {
                std::thread::yield_now();
            }
            for _ in 0..1000 {
                assert!(!waiter.is_finished(), "it is still at it");
                std::thread::yield_now();
            }
            epoch.store(2, Ordering::Relaxed);
        });
    }
}

/// Its first requests go without a fence, by the bias, and the others under the lock.
#[test]
fn nobody_elses_requests_come_between_those_of_a_chain() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None).unwrap();
    let init = QueuePairInit::new(&cq, &cq);
    let [a, _b] = connected(&pd, [&init, &init], &path(&context));
    let memory = context.alloc_memory(4096).unwrap();
    let region = pd.reg_memory(&memory, AccessFlags::all()).unwrap();
    let post = || {
        let mut element = ibv_sge {
            addr: region.addr(),
            length: 8,
            lkey: region.lkey(),
        };
        let mut request = write(&raw mut element, 1, region.addr() + 2048, region.rkey());
        // SAFETY: the request and its list live through the call; the element lies in the region.
        unsafe { a.post_send(&raw mut request) }.unwrap();
    };
    if !can_fence_everywhere() {
        return;
    }
    let qp = device_side(&a);
    // Given to who posts often enough, once nobody needs fences any more.
    let inside = loop {
        post();
        while cq.poll(&mut [crate::WorkCompletion::default()]).unwrap() == 0 {}
        if let Some(inside) = qp.enter_sends() {
            break inside;
        }
    };
    let posted = || qp.sq.tail.load(Ordering::Relaxed);
    let before = posted();
    std::thread::scope(|scope| {
        scope.spawn(post);
        // It has the lock, and waits for the bias.
        while qp.send_epoch().load(Ordering::Relaxed) & 1 == 0 {
            std::thread::yield_now();
        }
        qp.leave_and_lock_sends(inside);
        let meanwhile = posted();
        qp.unlock_sends();
        assert_eq!(meanwhile, before);
    });
    assert_eq!(posted(), before + 1);
}
