//! Extended reliable connections: ibv_open_xrcd(3), and what is made in such domains.

mod events;
mod forged;
mod processes;
mod support;
mod threads;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::ptr;

use self::support::*;
use super::support::{End, World, attributes, made, next, poll};
use crate::ffi::*;
use crate::soft::PROVIDER;

const SIGNALED: u32 = IBV_SEND_SIGNALED;
const CREATE: i32 = libc::O_CREAT;

/// The next asynchronous event.
fn event(world: &World) -> ibv_async_event {
    let mut event = ibv_async_event::zeroed();
    // SAFETY: the context is open, and a place for the result.
    unsafe {
        assert_eq!((PROVIDER.get_async_event)(world.context, &raw mut event), 0);
        (PROVIDER.ack_async_event)(&raw mut event);
    }
    event
}

#[test]
fn a_domain_is_known_by_its_file() {
    let world = World::open();
    let file = File::open("/proc/self/exe").unwrap();
    let other = File::open("/proc/self/exe").unwrap();
    let (fd, same) = (file.as_raw_fd(), other.as_raw_fd());
    assert_eq!(open(&world, fd, 0), Err(libc::EAGAIN), "there is none yet");
    assert_eq!(open(&world, 1 << 20, CREATE), Err(libc::EBADF));
    assert_eq!(open(&world, -2, CREATE), Err(libc::EBADF));
    let first = open(&world, fd, CREATE | libc::O_EXCL).unwrap();
    assert_eq!(
        open(&world, same, CREATE | libc::O_EXCL),
        Err(libc::EINVAL),
        "there is one"
    );
    let second = open(&world, same, 0).unwrap();
    // What was made by the one is in the same domain as what was made by the other.
    let shared = Shared::new(&world, first, 8);
    let (sender, target) = (sender(&world), target_qp(&world, second).unwrap());
    join(&world, &sender, target);
    let source = Source::of(&sender);
    shared.receive(1, 0, 4);
    source.send(&sender, shared.number, 4, 2, 0);
    assert_eq!(next(shared.cq).wr_id, 1);
    assert_eq!(sender.next().status, IBV_WC_SUCCESS);
    // Each handle has users of its own.
    assert_eq!(close(&world, second), libc::EBUSY);
    destroy_qp(target);
    assert_eq!(close(&world, second), 0);
    assert_eq!(close(&world, first), libc::EBUSY);
    shared.destroy();
    assert_eq!(close(&world, first), 0);
    assert_eq!(open(&world, fd, 0), Err(libc::EAGAIN), "it has gone");
    source.region.deregister();
    sender.destroy();
}

#[test]
fn what_is_wrong_or_in_use_is_refused() {
    let world = World::open();
    let null: *mut ibv_pd = ptr::null_mut();
    let mut attr = ibv_xrcd_init_attr {
        comp_mask: IBV_XRCD_INIT_ATTR_FD,
        fd: ANY,
        oflags: CREATE,
    };
    // SAFETY: the context is open.
    let opened = made(unsafe { world.ops().open_xrcd.unwrap()(world.context, &raw mut attr) });
    assert_eq!(opened, Err(libc::EINVAL));
    let xrcd = open(&world, ANY, CREATE).unwrap();
    let shared = Shared::new(&world, xrcd, 8);
    let (pd, cq) = (shared.pd, shared.cq);
    assert_eq!(create_srq(&world, null.cast(), pd, cq), Err(libc::EINVAL));
    assert_eq!(create_srq(&world, xrcd, null, cq), Err(libc::EINVAL));
    assert_eq!(create_srq(&world, xrcd, pd, null.cast()), Err(libc::EINVAL));
    assert_eq!(target_qp(&world, null.cast()), Err(libc::EINVAL));
    // SAFETY: live, and used.
    assert_eq!(unsafe { (PROVIDER.destroy_cq)(cq) }, libc::EBUSY);
    // SAFETY: as above.
    assert_eq!(unsafe { (PROVIDER.dealloc_pd)(pd) }, libc::EBUSY);
    let mut init = ibv_srq_init_attr::zeroed();
    (init.attr.max_wr, init.attr.max_sge) = (1, 1);
    // SAFETY: live objects, and a place for the result.
    unsafe {
        let plain = made((PROVIDER.create_srq)(pd, &raw mut init)).unwrap();
        let mut number = 0;
        let code = world.ops().get_srq_num.unwrap()(plain, &raw mut number);
        assert_eq!(code, libc::EINVAL, "requests do not name it");
        assert_eq!((PROVIDER.destroy_srq)(plain), 0);
    }
    // Nothing is posted to a queue that is not there.
    let (sender, target) = (sender(&world), target_qp(&world, xrcd).unwrap());
    join(&world, &sender, target);
    let mut receive = ibv_recv_wr::zeroed();
    let mut request = ibv_send_wr::zeroed();
    request.opcode = IBV_WR_SEND;
    // SAFETY: live objects, and places for the results.
    unsafe {
        let ops = &(*world.context).ops;
        for qp in [sender.qp, target] {
            let mut bad = ptr::null_mut();
            let code = ops.post_recv.unwrap()(qp, &raw mut receive, &raw mut bad);
            assert_ne!(code, 0);
            assert_eq!(bad, &raw mut receive);
        }
        let mut bad = ptr::null_mut();
        let code = ops.post_send.unwrap()(target, &raw mut request, &raw mut bad);
        assert_eq!((code, bad), (libc::EINVAL, &raw mut request));
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        let code = (PROVIDER.query_qp)(target, &raw mut attr, 0, &raw mut init);
        assert_eq!((code, attr.qp_state), (0, IBV_QPS_RTS));
        assert!(init.send_cq.is_null() && init.recv_cq.is_null());
        assert_eq!(init.cap.max_send_wr + init.cap.max_recv_wr, 0);
    }
    assert_eq!(close(&world, xrcd), libc::EBUSY);
    destroy_qp(target);
    shared.destroy();
    assert_eq!(close(&world, xrcd), 0);
    sender.destroy();
}

#[test]
fn a_message_goes_to_the_queue_that_it_names() {
    let world = World::open();
    let xrcd = open(&world, ANY, CREATE).unwrap();
    let queues = [0; 2].map(|_| Shared::new(&world, xrcd, 8));
    let senders = [0; 2].map(|_| sender(&world));
    let targets = [0; 2].map(|_| target_qp(&world, xrcd).unwrap());
    for (sender, target) in senders.iter().zip(targets) {
        join(&world, sender, target);
    }
    let sources = [0, 1].map(|at| Source::of(&senders[at]));
    // From either sender to either queue; the last does not fit a record.
    let mut imm = 0;
    for words in [0, 1, 100, WORDS] {
        for (from, sender) in senders.iter().enumerate() {
            for (to, shared) in queues.iter().enumerate() {
                imm += 1;
                shared.receive(u64::from(imm) + 100, 0, WORDS);
                sources[from].memory.set(0, u64::from(imm));
                sources[from].send(sender, shared.number, words, imm, 0);
                let wc = next(shared.cq);
                assert_eq!((wc.wr_id, wc.status), (u64::from(imm) + 100, 0));
                assert_eq!((wc.qp_num, wc.src_qp), (qpn(targets[from]), sender.qpn()));
                assert_eq!((wc.byte_len, wc.imm_data), (8 * words as u32, imm));
                assert!(poll(queues[1 - to].cq, 1).is_empty());
                let sent = sender.next();
                assert_eq!((sent.wr_id, sent.status), (imm.into(), IBV_WC_SUCCESS));
                if words > 0 {
                    let last = shared.memory.get(words - 1);
                    assert_eq!(last, if words == 1 { imm.into() } else { words as u64 });
                }
            }
        }
    }
    // One that finds no receive waits for it, and the next behind it for its own.
    let [first, second] = &queues;
    sources[0].send(&senders[0], first.number, 1, 1, 0);
    sources[0].send(&senders[0], second.number, 2, 2, 0);
    assert!(poll(first.cq, 1).is_empty() && senders[0].poll(1).is_empty());
    second.receive(20, 0, 8);
    assert!(poll(second.cq, 1).is_empty(), "it overtook the first");
    first.receive(10, 0, 8);
    assert_eq!((next(first.cq).wr_id, next(second.cq).wr_id), (10, 20));
    for imm in [1, 2] {
        assert_eq!(senders[0].next().wr_id, imm);
    }
    // Too long a message fails at its receive.
    first.receive(30, 0, 1);
    sources[0].send(&senders[0], first.number, 2, 3, 0);
    let wc = next(first.cq);
    assert_eq!((wc.wr_id, wc.status), (30, IBV_WC_LOC_LEN_ERR));
    assert_eq!(wc.qp_num, qpn(targets[0]));
    assert_eq!(senders[0].next().status, IBV_WC_REM_INV_REQ_ERR);
    targets.into_iter().for_each(destroy_qp);
    queues.into_iter().for_each(Shared::destroy);
    for (sender, source) in senders.into_iter().zip(sources) {
        source.region.deregister();
        sender.destroy();
    }
    assert_eq!(close(&world, xrcd), 0);
}

/// A sender that is connected with a queue pair of a domain.
struct Pair {
    sender: End,
    source: Source,
    target: *mut ibv_qp,
}

impl Pair {
    fn new(world: &World, xrcd: *mut ibv_xrcd) -> Self {
        let (sender, target) = (sender(world), target_qp(world, xrcd).unwrap());
        join(world, &sender, target);
        let source = Source::of(&sender);
        Self {
            sender,
            source,
            target,
        }
    }

    fn destroy(self) {
        destroy_qp(self.target);
        self.source.region.deregister();
        self.sender.destroy();
    }

    fn write(&self, shared: &Shared, number: u32, words: usize) -> ibv_wc_status {
        let code = self.sender.build(|calls| {
            calls.next(1, SIGNALED);
            calls.wr_rdma_write(shared.region.rkey(), shared.memory.addr());
            calls.wr_set_xrc_srqn(number);
            self.source.words(calls, words);
        });
        assert_eq!(code, 0);
        self.sender.next().status
    }

    /// The request before was refused, and has ended the connection on either side.
    fn is_broken(&self, world: &World, why: ibv_event_type) {
        let event = event(world);
        assert_eq!(event.event_type, why);
        // SAFETY: the type says that this member is meant.
        assert_eq!(unsafe { event.element.qp }, self.target);
        let (mut attr, mut init) = (ibv_qp_attr::zeroed(), ibv_qp_init_attr::zeroed());
        // SAFETY: the queue pair is live.
        unsafe { (PROVIDER.query_qp)(self.target, &raw mut attr, 0, &raw mut init) };
        assert_eq!(attr.qp_state, IBV_QPS_ERR);
    }
}

#[test]
fn keys_are_of_the_domain_of_the_queue_that_is_named() {
    let world = World::open();
    let xrcd = open(&world, ANY, CREATE).unwrap();
    let [shared, other] = [0; 2].map(|_| Shared::new(&world, xrcd, 8));
    let pair = Pair::new(&world, xrcd);
    let (number, rkey, addr) = (shared.number, shared.region.rkey(), shared.memory.addr());
    assert_eq!(pair.write(&shared, number, 3), IBV_WC_SUCCESS);
    assert_eq!(shared.memory.get(2), 3);
    let post = |build: &dyn Fn(&super::support::Calls)| {
        pair.sender.post(|calls| {
            calls.next(1, SIGNALED);
            build(calls);
            calls.wr_set_xrc_srqn(number);
            pair.source.words(calls, 1);
        });
        pair.source.memory.get(0)
    };
    shared.memory.set(5, 50);
    let found = [
        post(&|calls| calls.wr_rdma_read(rkey, addr + 40)),
        post(&|calls| calls.wr_atomic_fetch_add(rkey, addr + 40, 1)),
        post(&|calls| calls.wr_atomic_cmp_swp(rkey, addr + 40, 51, 7)),
    ];
    assert_eq!((found, shared.memory.get(5)), ([50, 50, 51], 7));
    shared.receive(9, 0, 1);
    pair.sender.post(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_rdma_write_imm(rkey, addr + 48, 77);
        calls.wr_set_xrc_srqn(number);
        pair.source.words(calls, 1);
    });
    let wc = next(shared.cq);
    assert_eq!((wc.wr_id, wc.imm_data, wc.byte_len), (9, 77, 8));
    assert_eq!(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    assert_eq!(shared.memory.get(6), 51);
    // The key is good, but not there.
    assert_eq!(pair.write(&shared, other.number, 1), IBV_WC_REM_ACCESS_ERR);
    pair.is_broken(&world, IBV_EVENT_QP_ACCESS_ERR);
    pair.destroy();
    [shared, other].into_iter().for_each(Shared::destroy);
    assert_eq!(close(&world, xrcd), 0);
}

#[test]
fn a_queue_that_is_not_there_is_refused() {
    let world = World::open();
    let [xrcd, other] = [0; 2].map(|_| open(&world, ANY, CREATE).unwrap());
    let [shared, gone] = [0; 2].map(|_| Shared::new(&world, xrcd, 8));
    let elsewhere = Shared::new(&world, other, 8);
    gone.destroy_srq();
    // Of another domain, one that has gone, of another process, and what no device gives.
    let wrong = [
        elsewhere.number,
        gone.number,
        shared.number ^ 1 << 20,
        0,
        u32::MAX,
    ];
    for number in wrong {
        for queue in [&shared, &elsewhere] {
            queue.receive(1, 0, 8);
        }
        let pair = Pair::new(&world, xrcd);
        pair.source.send(&pair.sender, number, 1, 1, 0);
        assert_eq!(pair.sender.next().status, IBV_WC_REM_INV_REQ_ERR);
        pair.is_broken(&world, IBV_EVENT_QP_REQ_ERR);
        pair.destroy();
        for words in [0, 1] {
            let pair = Pair::new(&world, xrcd);
            let status = pair.write(&shared, number, words);
            assert_eq!(status, IBV_WC_REM_INV_REQ_ERR, "{number:#x}, {words} words");
            pair.is_broken(&world, IBV_EVENT_QP_REQ_ERR);
            pair.destroy();
        }
        for queue in [&shared, &elsewhere] {
            assert!(poll(queue.cq, 1).is_empty());
        }
    }
    gone.destroy_rest();
    [shared, elsewhere].into_iter().for_each(Shared::destroy);
    for xrcd in [xrcd, other] {
        assert_eq!(close(&world, xrcd), 0);
    }
}

#[test]
fn messages_wait_for_room_in_the_completion_queue() {
    let world = World::open();
    let xrcd = open(&world, ANY, CREATE).unwrap();
    let shared = Shared::new(&world, xrcd, 2);
    let pairs = [0; 2].map(|_| Pair::new(&world, xrcd));
    for message in 0..4 {
        for pair in &pairs {
            shared.receive(1, 0, 1);
            let source = &pair.source;
            source.send(&pair.sender, shared.number, 1, message, 0);
        }
    }
    let mut came = [0; 2];
    for _ in 0..8 {
        let wc = next(shared.cq);
        let is_it = |pair: &Pair| qpn(pair.target) == wc.qp_num;
        let from = pairs.iter().position(is_it).unwrap();
        assert_eq!((wc.status, wc.imm_data), (IBV_WC_SUCCESS, came[from]));
        came[from] += 1;
    }
    for pair in pairs {
        for _ in 0..4 {
            assert_eq!(pair.sender.next().status, IBV_WC_SUCCESS);
        }
        pair.destroy();
    }
    shared.destroy();
    assert_eq!(close(&world, xrcd), 0);
}

/// Two shared receive queues with one completion queue that has no room for both.
#[test]
fn a_completion_queue_that_overruns_breaks_its_queues() {
    let world = World::open();
    let xrcd = open(&world, ANY, CREATE).unwrap();
    let cq = world.cq(2);
    let queues = [0; 2].map(|_| Shared::with(&world, xrcd, cq));
    let pair = Pair::new(&world, xrcd);
    for queue in &queues {
        for message in 0..2 {
            queue.receive(1, 0, 1);
            pair.source.send(&pair.sender, queue.number, 1, message, 0);
        }
    }
    assert_eq!(event(&world).event_type, IBV_EVENT_CQ_ERR);
    let mut wc = ibv_wc::zeroed();
    // SAFETY: live, and a place for the result.
    let found = unsafe { (*world.context).ops.poll_cq.unwrap()(cq, 1, &raw mut wc) };
    assert!(found < 0);
    for _ in 0..4 {
        assert_eq!(pair.sender.next().status, IBV_WC_SUCCESS);
    }
    queues[0].receive(1, 0, 1);
    pair.source.send(&pair.sender, queues[0].number, 1, 1, 0);
    assert_eq!(pair.sender.next().status, IBV_WC_REM_OP_ERR);
    pair.is_broken(&world, IBV_EVENT_QP_FATAL);
    pair.destroy();
    for queue in &queues {
        queue.destroy_srq();
    }
    let [first, second] = queues;
    second.region.deregister();
    // SAFETY: live, and used no more.
    assert_eq!(unsafe { (PROVIDER.dealloc_pd)(second.pd) }, 0);
    first.destroy_rest();
    assert_eq!(close(&world, xrcd), 0);
}

/// As on a wire, where the requests of either kind are others: nobody answers.
#[test]
fn other_queue_pairs_are_no_peers() {
    let world = World::open();
    let xrcd = open(&world, ANY, CREATE).unwrap();
    let shared = Shared::new(&world, xrcd, 8);
    shared.receive(1, 0, 1);
    let target = target_qp(&world, xrcd).unwrap();
    let plain = End::with(&world, world.pd(), world.cq(8), &attributes(IBV_QPT_RC));
    join(&world, &plain, target);
    let memory = super::support::Memory::new(1);
    let region = memory.register(plain.pd, 0);
    let code = plain.build(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_send();
        calls.wr_set_sge(region.lkey(), memory.addr(), 8);
    });
    assert_eq!(code, 0);
    assert_eq!(plain.next().status, IBV_WC_RETRY_EXC_ERR);
    assert!(poll(shared.cq, 1).is_empty());
    destroy_qp(target);
    shared.destroy();
    region.deregister();
    plain.destroy();
    assert_eq!(close(&world, xrcd), 0);
}
