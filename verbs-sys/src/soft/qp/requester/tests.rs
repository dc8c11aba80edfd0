//! How long whoever takes something away waits for a chain.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::ffi::*;
use crate::soft::qp::Qp;
use crate::soft::qp::access::CHUNK;
use crate::{AccessFlags, PathOptions, QueuePair, QueuePairInit, find_device};

/// Requests of a chain.
const LENGTH: usize = 8;

fn device_side(qp: &QueuePair) -> &Qp {
    // SAFETY: the handle of a queue pair of this device leads it, and lives as long.
    unsafe { &*qp.as_raw().cast::<Qp>() }
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
    let path = PathOptions {
        gid_index: context.choose_gid(1).unwrap().0,
        ..PathOptions::default()
    };
    let init = QueuePairInit {
        max_send_wr: 16,
        max_send_sge: 2,
        ..QueuePairInit::new(&cq, &cq)
    };
    let [a, b] = [(); 2].map(|()| pd.create_qp(&init).unwrap());
    let ends = [&a, &b].map(|qp| qp.endpoint(&path, 1).unwrap());
    for (qp, peer) in [(&a, &ends[1]), (&b, &ends[0])] {
        qp.to_init(AccessFlags::all(), 1).unwrap();
        qp.to_rtr(peer, &path).unwrap();
        qp.to_rts(1, &path).unwrap();
    }
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

/// Lists of so many elements are none, also where requests have none at all.
#[test]
fn a_list_of_less_than_nothing_is_refused() {
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(64, None).unwrap();
    let path = PathOptions {
        gid_index: context.choose_gid(1).unwrap().0,
        ..PathOptions::default()
    };
    for max_send_sge in [0, 1] {
        let init = QueuePairInit {
            max_send_sge,
            ..QueuePairInit::new(&cq, &cq)
        };
        let [a, b] = [(); 2].map(|()| pd.create_qp(&init).unwrap());
        let ends = [&a, &b].map(|qp| qp.endpoint(&path, 1).unwrap());
        for (qp, peer) in [(&a, &ends[1]), (&b, &ends[0])] {
            qp.to_init(AccessFlags::all(), 1).unwrap();
            qp.to_rtr(peer, &path).unwrap();
            qp.to_rts(1, &path).unwrap();
        }
        let memory = context.alloc_memory(4096).unwrap();
        let region = pd.reg_memory(&memory, AccessFlags::all()).unwrap();
        let mut element = ibv_sge {
            addr: region.addr(),
            length: 8,
            lkey: region.lkey(),
        };
        let mut post = |num_sge| {
            let mut request = ibv_send_wr::zeroed();
            request.opcode = IBV_WR_RDMA_WRITE;
            request.send_flags = IBV_SEND_SIGNALED;
            request.sg_list = &raw mut element;
            request.num_sge = num_sge;
            request.wr.rdma = ibv_send_wr_rdma {
                remote_addr: region.addr() + 2048,
                rkey: region.rkey(),
            };
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
    use std::sync::atomic::AtomicBool;
    let context = find_device(Some("soft0")).unwrap().open().unwrap();
    let pd = context.alloc_pd().unwrap();
    let (acq, bcq) = (
        context.create_cq(64, None).unwrap(),
        context.create_cq(64, None).unwrap(),
    );
    let path = PathOptions {
        gid_index: context.choose_gid(1).unwrap().0,
        ..PathOptions::default()
    };
    let memory = context.alloc_memory(2 * CHUNK).unwrap();
    let region = pd.reg_memory(&memory, AccessFlags::all()).unwrap();
    let there = region.addr() + CHUNK as u64;
    let mut changed = 0;
    for _ in 0..40 {
        let a = pd.create_qp(&QueuePairInit::new(&acq, &acq)).unwrap();
        let b = pd.create_qp(&QueuePairInit::new(&bcq, &bcq)).unwrap();
        let ends = [&a, &b].map(|qp| qp.endpoint(&path, 1).unwrap());
        for (qp, peer) in [(&a, &ends[1]), (&b, &ends[0])] {
            qp.to_init(AccessFlags::all(), 1).unwrap();
            qp.to_rtr(peer, &path).unwrap();
            qp.to_rts(1, &path).unwrap();
        }
        let begun = AtomicBool::new(false);
        let (a, region, begun, acq) = (&a, &region, &begun, &acq);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for round in 0u64.. {
                    // SAFETY: our own memory; races with nobody.
                    unsafe {
                        (region.addr() as usize as *mut u8)
                            .add(CHUNK - 8)
                            .cast::<u64>()
                            .write_volatile(round)
                    };
                    let mut sge = ibv_sge {
                        addr: region.addr(),
                        length: CHUNK as u32,
                        lkey: region.lkey(),
                    };
                    let mut wr = ibv_send_wr::zeroed();
                    wr.opcode = IBV_WR_RDMA_WRITE;
                    wr.send_flags = IBV_SEND_SIGNALED;
                    wr.sg_list = &raw mut sge;
                    wr.num_sge = 1;
                    wr.wr.rdma = ibv_send_wr_rdma {
                        remote_addr: there,
                        rkey: region.rkey(),
                    };
                    // SAFETY: lives through the call.
                    unsafe { a.post_send(&raw mut wr) }.unwrap();
                    let mut wcs = [crate::WorkCompletion::default()];
                    while acq.poll(&mut wcs).unwrap() == 0 {}
                    begun.store(true, Ordering::Relaxed);
                    if wcs[0].status() != crate::WcStatus::Success {
                        break;
                    }
                }
            });
            while !begun.load(Ordering::Relaxed) {}
            std::thread::sleep(std::time::Duration::from_micros(1500));
            let mut attr = ibv_qp_attr::zeroed();
            attr.qp_state = IBV_QPS_ERR;
            b.modify(&attr, crate::QpAttrMask::STATE).unwrap();
            let last = (there as usize + CHUNK - 8) as *const u64;
            // SAFETY: inside the memory.
            let before = unsafe { last.read_volatile() };
            std::thread::sleep(std::time::Duration::from_millis(3));
            // SAFETY: as above.
            changed += usize::from(before != unsafe { last.read_volatile() });
        });
    }
    assert_eq!(changed, 0, "times that a byte has changed afterwards");
}
