//! ibv_create_cq_ex(3).

use core::ffi::c_int;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::support::{ALL, End, Memory, World, attributes};
use crate::ffi::*;

/// A queue that threads share.
#[derive(Clone, Copy)]
struct Reader(*mut ibv_cq_ex);

// SAFETY: the queue is for any thread.
unsafe impl Send for Reader {}
// SAFETY: as for Send.
unsafe impl Sync for Reader {}

macro_rules! fields {
    ($($name:ident -> $type:ty;)+) => {$(
        fn $name(self) -> $type {
            // SAFETY: the queue is live, and the thread is reading.
            unsafe { (*self.0).$name.unwrap()(self.0) }
        }
    )+};
}

impl Reader {
    fn start(self) -> c_int {
        let mut attr = ibv_poll_cq_attr::default();
        // SAFETY: the queue is live.
        unsafe { (*self.0).start_poll.unwrap()(self.0, &raw mut attr) }
    }

    fields! {
        next_poll -> c_int;
        end_poll -> ();
        read_opcode -> ibv_wc_opcode;
        read_vendor_err -> u32;
        read_byte_len -> u32;
        read_imm_data -> u32;
        read_qp_num -> u32;
        read_wc_flags -> u32;
    }

    fn wr_id(self) -> u64 {
        // SAFETY: as above.
        unsafe { (*self.0).wr_id }
    }

    fn status(self) -> ibv_wc_status {
        // SAFETY: as above.
        unsafe { (*self.0).status }
    }
}

fn wanted(cqe: u32, flags: u32) -> ibv_cq_init_attr_ex {
    let mut attr = ibv_cq_init_attr_ex::zeroed();
    (attr.cqe, attr.flags) = (cqe, flags);
    attr.wc_flags = IBV_WC_STANDARD_FLAGS.into();
    attr.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS;
    attr
}

/// An end whose completions can be read, connected to itself.
fn end(world: &World, attr: &ibv_cq_init_attr_ex) -> (End, Reader) {
    let cq = world.cq_ex(attr).unwrap();
    let end = End::with(world, world.pd(), cq.cast(), &attributes(IBV_QPT_RC));
    end.connect(world, end.qpn());
    (end, Reader(cq))
}

/// Posts WRITEs of no bytes.
fn post(end: &End, ids: impl Iterator<Item = u64>) {
    let code = end.build(|calls| {
        for id in ids {
            calls.next(id, IBV_SEND_SIGNALED);
            calls.wr_rdma_write(0, 0);
        }
    });
    assert_eq!(code, 0);
}

#[test]
fn a_completion_is_read_field_by_field() {
    let world = World::open();
    let (end, reader) = end(&world, &wanted(64, 0));
    let memory = Memory::new(2);
    let region = memory.register(end.pd, ALL);
    end.receive(5, &mut [region.element(memory.addr(), 8)]);
    let imm = 0x1234_5678;
    let code = end.build(|calls| {
        calls.next(6, IBV_SEND_SIGNALED);
        calls.wr_send_imm(imm);
        calls.inline(b"abc");
    });
    assert_eq!(code, 0);
    // A SEND to itself ends when its receive does.
    let mut seen = Vec::new();
    while seen.len() < 2 {
        let mut code = reader.start();
        let has_begun = code == 0;
        while code == 0 {
            assert_eq!(reader.status(), IBV_WC_SUCCESS);
            assert_eq!(reader.read_qp_num(), end.qpn());
            assert_eq!(reader.read_vendor_err(), 0);
            if reader.read_opcode() == IBV_WC_RECV {
                assert_eq!(reader.wr_id(), 5);
                assert_eq!(reader.read_byte_len(), 3);
                assert_eq!(reader.read_imm_data(), imm);
                assert_eq!(reader.read_wc_flags(), IBV_WC_WITH_IMM);
            } else {
                assert_eq!(reader.read_opcode(), IBV_WC_SEND);
                assert_eq!(reader.wr_id(), 6);
            }
            seen.push(reader.wr_id());
            code = reader.next_poll();
        }
        assert_eq!(code, libc::ENOENT);
        if has_begun {
            reader.end_poll();
        }
    }
    seen.sort_unstable();
    assert_eq!(seen, [5, 6]);
    region.deregister();
    end.destroy();
}

#[test]
fn what_is_not_read_is_left_for_others() {
    let world = World::open();
    let (end, reader) = end(&world, &wanted(64, 0));
    post(&end, 1..=4);
    assert_eq!(reader.start(), 0);
    assert_eq!(reader.wr_id(), 1);
    assert_eq!(reader.next_poll(), 0);
    assert_eq!(reader.wr_id(), 2);
    reader.end_poll();
    assert_eq!(end.next().wr_id, 3);
    assert_eq!(reader.start(), 0);
    assert_eq!(reader.wr_id(), 4);
    assert_eq!(reader.next_poll(), libc::ENOENT);
    reader.end_poll();
    end.destroy();
}

#[test]
fn an_empty_queue_is_not_held() {
    let world = World::open();
    let (end, reader) = end(&world, &wanted(64, 0));
    assert_eq!(reader.start(), libc::ENOENT);
    let again = std::thread::spawn(move || {
        let reader = reader;
        reader.start()
    });
    assert_eq!(again.join().unwrap(), libc::ENOENT);
    let mut attr = ibv_poll_cq_attr { comp_mask: 1 };
    // SAFETY: the queue is live.
    let code = unsafe { (*reader.0).start_poll.unwrap()(reader.0, &raw mut attr) };
    assert_eq!(code, libc::EINVAL);
    end.destroy();
}

#[test]
fn one_thread_reads_at_a_time() {
    let world = World::open();
    let (end, reader) = end(&world, &wanted(64, 0));
    post(&end, 1..=2);
    let has_ended = AtomicBool::new(false);
    assert_eq!(reader.start(), 0);
    std::thread::scope(|scope| {
        let other = scope.spawn(|| {
            let code = reader.start();
            assert!(has_ended.load(Ordering::Relaxed));
            assert_eq!((code, reader.wr_id()), (0, 2));
            reader.end_poll();
        });
        for _ in 0..1000 {
            std::thread::yield_now();
            assert_eq!(reader.wr_id(), 1);
        }
        assert!(!other.is_finished());
        has_ended.store(true, Ordering::Relaxed);
        reader.end_poll();
    });
    end.destroy();
}

#[test]
fn threads_read_every_completion_once() {
    const ROUNDS: u64 = 2000;
    let world = World::open();
    let (end, reader) = end(&world, &wanted(64, 0));
    let (sum, count) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                while count.load(Ordering::Relaxed) < ROUNDS {
                    let mut code = reader.start();
                    if code != 0 {
                        std::thread::yield_now();
                        continue;
                    }
                    while code == 0 {
                        sum.fetch_add(reader.wr_id(), Ordering::Relaxed);
                        count.fetch_add(1, Ordering::Relaxed);
                        code = reader.next_poll();
                    }
                    reader.end_poll();
                }
            });
        }
        let mut id = 1;
        while id <= ROUNDS {
            let code = end.build(|calls| {
                calls.next(id, IBV_SEND_SIGNALED);
                calls.wr_rdma_write(0, 0);
            });
            match code {
                0 => id += 1,
                libc::ENOMEM => std::thread::yield_now(),
                code => panic!("{code}"),
            }
        }
    });
    assert_eq!(count.into_inner(), ROUNDS);
    assert_eq!(sum.into_inner(), ROUNDS * (ROUNDS + 1) / 2);
    end.destroy();
}

#[test]
fn a_queue_for_one_thread_has_no_turns() {
    let world = World::open();
    let (end, reader) = end(&world, &wanted(64, IBV_CREATE_CQ_ATTR_SINGLE_THREADED));
    post(&end, 1..=2);
    assert_eq!(reader.start(), 0);
    // A second start would wait for ever if there were turns.
    assert_eq!(reader.start(), 0);
    assert_eq!(reader.wr_id(), 2);
    reader.end_poll();
    end.destroy();
}

#[test]
fn a_queue_need_not_care_for_overruns() {
    let world = World::open();
    let (end, reader) = end(&world, &wanted(1, IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN));
    post(&end, 1..=4);
    assert_eq!(reader.start(), 0);
    for id in 2..=4 {
        assert_eq!(reader.next_poll(), 0);
        assert_eq!(reader.wr_id(), id);
    }
    reader.end_poll();
    end.destroy();
}

#[test]
fn what_cannot_be_read_is_refused() {
    let world = World::open();
    let refused = |change: fn(&mut ibv_cq_init_attr_ex)| {
        let mut attr = wanted(8, 0);
        change(&mut attr);
        world.cq_ex(&attr).unwrap_err()
    };
    let stamps = IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
    assert_eq!(stamps, 1 << 7);
    assert_eq!(refused(|attr| attr.wc_flags |= 1 << 7), libc::EOPNOTSUPP);
    assert_eq!(refused(|attr| attr.flags = 1 << 9), libc::EOPNOTSUPP);
    assert_eq!(refused(|attr| attr.comp_mask = 1 << 9), libc::EINVAL);
    assert_eq!(refused(|attr| attr.comp_vector = 1), libc::EINVAL);
    assert_eq!(refused(|attr| attr.cqe = 0), libc::EINVAL);
    assert_eq!(refused(|attr| attr.cqe = u32::MAX), libc::EINVAL);
}

#[test]
fn moderation_is_taken_and_nothing_else() {
    let world = World::open();
    let cq = world.cq(8);
    let modify = world.ops().modify_cq.unwrap();
    let mut attr = ibv_modify_cq_attr {
        attr_mask: IBV_CQ_ATTR_MODERATE,
        moderate: ibv_moderate_cq {
            cq_count: 16,
            cq_period: 100,
        },
    };
    // SAFETY: the queue is live, here and below.
    assert_eq!(unsafe { modify(cq, &raw mut attr) }, 0);
    attr.attr_mask = 1 << 5;
    // SAFETY: as above.
    assert_eq!(unsafe { modify(cq, &raw mut attr) }, libc::EINVAL);
    // SAFETY: as above; it is used no more.
    assert_eq!(unsafe { (crate::soft::PROVIDER.destroy_cq)(cq) }, 0);
}
