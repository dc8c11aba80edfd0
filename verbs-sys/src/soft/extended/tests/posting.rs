//! ibv_create_qp_ex(3) and ibv_wr_post(3).

use core::ffi::c_int;
use std::ptr;

use super::support::{
    ALL, Calls, End, Memory, QKEY, World, address, attributes, destroy, made, pair,
};
use crate::ffi::*;
use crate::soft::{PROVIDER, qp_to_qp_ex};

const SIGNALED: u32 = IBV_SEND_SIGNALED;

type Act<'a> = &'a dyn Fn(&Calls);

#[test]
fn every_operation_on_memory_can_be_called() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let (here, there) = (Memory::new(4), Memory::new(4));
    let (local, remote) = (here.register(a.pd, ALL), there.register(b.pd, ALL));
    let rkey = remote.rkey();
    here.set(0, 0x1111);
    let wc = a.post(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_rdma_write(rkey, there.addr());
        calls.wr_set_sge(local.lkey(), here.addr(), 8);
    });
    assert_eq!((wc.wr_id, wc.opcode), (1, IBV_WC_RDMA_WRITE));
    assert_eq!(there.get(0), 0x1111);
    there.set(1, 0x2222);
    let wc = a.post(|calls| {
        calls.next(2, SIGNALED);
        calls.wr_rdma_read(rkey, there.addr());
        // The two words, the other way round.
        calls.list(&[8, 0].map(|at| local.element(here.addr() + at, 8)));
    });
    assert_eq!((wc.opcode, wc.byte_len), (IBV_WC_RDMA_READ, 16));
    assert_eq!((here.get(1), here.get(0)), (0x1111, 0x2222));
    let result = local.element(here.addr() + 16, 8);
    let swap = |compare, swap| {
        a.post(|calls| {
            calls.next(3, SIGNALED);
            calls.wr_atomic_cmp_swp(rkey, there.addr(), compare, swap);
            calls.wr_set_sge(result.lkey, result.addr, 8);
        })
    };
    assert_eq!(swap(1, 2).opcode, IBV_WC_COMP_SWAP);
    assert_eq!((here.get(2), there.get(0)), (0x1111, 0x1111));
    swap(0x1111, 2);
    assert_eq!((here.get(2), there.get(0)), (0x1111, 2));
    let wc = a.post(|calls| {
        calls.next(4, SIGNALED);
        calls.wr_atomic_fetch_add(rkey, there.addr(), 5);
        calls.wr_set_sge(result.lkey, result.addr, 8);
    });
    assert_eq!(
        (wc.opcode, here.get(2), there.get(0)),
        (IBV_WC_FETCH_ADD, 2, 7)
    );
    let wc = a.post(|calls| {
        calls.next(5, SIGNALED);
        calls.atomic_write(rkey, there.addr() + 8, 0x3333);
    });
    assert_eq!((wc.opcode, there.get(1)), (IBV_WC_ATOMIC_WRITE, 0x3333));
    b.receive(6, &mut []);
    a.post(|calls| {
        calls.next(7, SIGNALED);
        calls.wr_rdma_write_imm(rkey, there.addr() + 16, 0x55);
        calls.wr_set_sge(local.lkey(), here.addr(), 8);
    });
    let wc = b.next();
    assert_eq!((wc.wr_id, wc.opcode), (6, IBV_WC_RECV_RDMA_WITH_IMM));
    assert_eq!((wc.imm_data, wc.byte_len, there.get(2)), (0x55, 8, 0x2222));
    local.deregister();
    remote.deregister();
    destroy([a, b]);
}

#[test]
fn an_atomic_write_is_refused_where_a_write_is() {
    for (access, misplaced, status) in [
        (ALL & !IBV_ACCESS_REMOTE_WRITE, 0, IBV_WC_REM_ACCESS_ERR),
        (ALL, 8, IBV_WC_REM_ACCESS_ERR),
        (ALL, 4, IBV_WC_REM_INV_REQ_ERR),
    ] {
        let world = World::open();
        let [a, b] = pair(&world, IBV_QPT_RC);
        let there = Memory::new(1);
        let remote = there.register(b.pd, access);
        let code = a.build(|calls| {
            calls.next(1, SIGNALED);
            calls.atomic_write(remote.rkey(), there.addr() + misplaced, 1);
        });
        assert_eq!(code, 0);
        assert_eq!(a.next().status, status);
        assert_eq!(there.get(0), 0);
        remote.deregister();
        destroy([a, b]);
    }
}

#[test]
fn inline_data_is_taken_when_it_is_set() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let memory = Memory::new(4);
    let region = memory.register(b.pd, ALL);
    b.receive(1, &mut [region.element(memory.addr(), 16)]);
    b.receive(2, &mut [region.element(memory.addr() + 16, 16)]);
    let mut text = *b"abcd";
    let code = a.build(|calls| {
        calls.next(0, SIGNALED);
        calls.wr_send();
        calls.inline_list(&[&text[..2], &[], b"123456"]);
        text.copy_from_slice(b"wxyz");
        calls.next(0, SIGNALED);
        calls.wr_send();
        calls.inline(&text);
        text.fill(0);
    });
    assert_eq!(code, 0);
    assert_eq!([b.next(), b.next()].map(|wc| wc.byte_len), [8, 4]);
    assert_eq!(memory.get(0).to_ne_bytes(), *b"ab123456");
    assert_eq!(memory.get(2).to_ne_bytes()[..4], *b"wxyz");
    region.deregister();
    destroy([a, b]);
}

#[test]
fn a_batch_that_is_aborted_or_refused_leaves_nothing() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let (here, there) = (Memory::new(1), Memory::new(1));
    let (local, remote) = (here.register(a.pd, ALL), there.register(b.pd, ALL));
    here.set(0, 1);
    let write = |calls: &Calls| {
        calls.next(1, SIGNALED);
        calls.wr_rdma_write(remote.rkey(), there.addr());
        calls.wr_set_sge(local.lkey(), here.addr(), 8);
    };
    let element = local.element(here.addr(), 1);
    // Each begins with a good request.
    let refused: [(c_int, Act<'_>); 6] = [
        (libc::EINVAL, &|calls| calls.list(&[element; 3])),
        (libc::EINVAL, &|calls| calls.inline(&[0; 65])),
        (libc::EINVAL, &|calls| {
            calls.wr_set_ud_addr(ptr::null_mut(), 1, 1)
        }),
        (libc::EINVAL, &|calls| {
            calls.wr_bind_mw(ptr::null_mut(), 0, &ibv_mw_bind_info::zeroed());
        }),
        (libc::EINVAL, &|calls| {
            // SAFETY: the queue pair is live.
            unsafe { (*calls.0).wr_send_tso.unwrap()(calls.0, ptr::null_mut(), 0, 0) };
        }),
        (libc::ENOMEM, &|calls| (0..8).for_each(|_| write(calls))),
    ];
    for (expected, act) in refused {
        let code = a.build(|calls| {
            write(calls);
            act(calls);
        });
        assert_eq!(code, expected);
    }
    // A setter without a request.
    assert_eq!(a.build(|calls| calls.inline(b"a")), libc::EINVAL);
    let ex = a.ex();
    // SAFETY: the queue pair is live.
    unsafe { (*ex).wr_start.unwrap()(ex) };
    write(&Calls(ex));
    // SAFETY: as above.
    unsafe { (*ex).wr_abort.unwrap()(ex) };
    assert_eq!(a.build(|_| {}), 0);
    assert_eq!(a.poll(1).len(), 0);
    assert_eq!(there.get(0), 0);
    // All of the queue is free.
    assert_eq!(a.build(|calls| (0..8).for_each(|_| write(calls))), 0);
    assert_eq!(there.get(0), 1);
    // Now there is room for none, and for one once a completion is polled; two are too many.
    assert_eq!(a.build(write), libc::ENOMEM);
    here.set(0, 2);
    assert_eq!(a.poll(1).len(), 1);
    let two = |calls: &Calls| {
        write(calls);
        write(calls);
    };
    assert_eq!(a.build(two), libc::ENOMEM);
    assert_eq!(there.get(0), 1, "none of the two is executed");
    assert_eq!(a.build(write), 0);
    assert_eq!(there.get(0), 2);
    local.deregister();
    remote.deregister();
    destroy([a, b]);
}

#[test]
fn a_queue_pair_that_is_not_ready_takes_no_batch() {
    let world = World::open();
    let end = End::new(&world, IBV_QPT_RC);
    let send = |calls: &Calls| {
        calls.next(1, SIGNALED);
        calls.wr_send();
    };
    assert_eq!(end.build(send), libc::EINVAL);
    assert_eq!(
        end.build(|calls| {
            send(calls);
            send(calls);
        }),
        libc::EINVAL
    );
    end.destroy();
}

#[test]
fn windows_are_bound_and_invalidated_by_calls() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let (here, there) = (Memory::new(1), Memory::new(2));
    let local = here.register(a.pd, ALL);
    let region = there.register(b.pd, ALL | IBV_ACCESS_MW_BIND);
    // SAFETY: the domain is live.
    let mw = unsafe { (*world.context).ops.alloc_mw.unwrap()(b.pd, IBV_MW_TYPE_2) };
    let mw = made(mw).unwrap();
    // SAFETY: just made.
    let first = ibv_inc_rkey(unsafe { (*mw).rkey });
    let bind = |rkey| {
        let info = ibv_mw_bind_info {
            mr: region.0,
            addr: there.addr() + 8,
            length: 8,
            mw_access_flags: IBV_ACCESS_REMOTE_WRITE,
        };
        let wc = b.post(|calls| {
            calls.next(1, SIGNALED);
            calls.wr_bind_mw(mw, rkey, &raw const info);
        });
        assert_eq!(wc.opcode, IBV_WC_BIND_MW);
    };
    let write = |rkey| {
        let code = a.build(|calls| {
            calls.next(2, SIGNALED);
            calls.wr_rdma_write(rkey, there.addr() + 8);
            calls.wr_set_sge(local.lkey(), here.addr(), 8);
        });
        assert_eq!(code, 0);
        a.next().status
    };
    bind(first);
    here.set(0, 3);
    assert_eq!((write(first), there.get(1)), (IBV_WC_SUCCESS, 3));
    let wc = b.post(|calls| {
        calls.next(3, SIGNALED);
        calls.wr_local_inv(first);
    });
    assert_eq!(wc.opcode, IBV_WC_LOCAL_INV);
    let second = ibv_inc_rkey(first);
    bind(second);
    here.set(0, 4);
    assert_eq!((write(second), there.get(1)), (IBV_WC_SUCCESS, 4));
    b.receive(4, &mut []);
    a.post(|calls| {
        calls.next(5, SIGNALED);
        calls.wr_send_inv(second);
    });
    let wc = b.next();
    assert_eq!((wc.wc_flags, wc.imm_data), (IBV_WC_WITH_INV, second));
    assert_eq!(write(second), IBV_WC_REM_ACCESS_ERR);
    // SAFETY: live, and used no more.
    assert_eq!(unsafe { (*world.context).ops.dealloc_mw.unwrap()(mw) }, 0);
    local.deregister();
    region.deregister();
    destroy([a, b]);
}

#[test]
fn datagrams_are_answered_by_what_came_with_them() {
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_UD);
    let memory = [Memory::new(8), Memory::new(8)];
    let regions = [memory[0].register(a.pd, ALL), memory[1].register(b.pd, ALL)];
    let mut attr = address(&world);
    // SAFETY: the domain is live.
    let to_b = made(unsafe { (PROVIDER.create_ah)(a.pd, &raw mut attr) }).unwrap();
    for (at, end) in [&a, &b].into_iter().enumerate() {
        end.receive(1, &mut [regions[at].element(memory[at].addr(), 48)]);
    }
    let send = |from: &End, ah, qpn, text: &[u8]| {
        from.post(|calls| {
            calls.next(2, SIGNALED);
            calls.wr_send_imm(9);
            calls.wr_set_ud_addr(ah, qpn, QKEY);
            calls.inline(text);
        });
    };
    send(&a, to_b, b.qpn(), b"question");
    let wc = b.next();
    assert_eq!((wc.byte_len, wc.imm_data, wc.src_qp), (48, 9, a.qpn()));
    let is_ipv4 = memory[1].get(2).to_ne_bytes()[4] == 0x45;
    assert_eq!(wc.sl, if is_ipv4 { 10 } else { 9 });
    assert_eq!(memory[1].get(5).to_ne_bytes(), *b"question");
    let grh = memory[1].start().cast::<ibv_grh>();
    // SAFETY: the context is open, and 40 bytes stand before the datagram.
    let back = unsafe { crate::soft::init_ah_from_wc(world.context, 1, &wc, grh) };
    let mut back = back.unwrap();
    // SAFETY: the domain is live.
    let to_a = made(unsafe { (PROVIDER.create_ah)(b.pd, &raw mut back) }).unwrap();
    send(&b, to_a, wc.src_qp, b"answer!!");
    assert_eq!(a.next().byte_len, 48);
    assert_eq!(memory[0].get(5).to_ne_bytes(), *b"answer!!");
    // One without an address is refused.
    let code = a.build(|calls| {
        calls.next(1, SIGNALED);
        calls.wr_send();
    });
    assert_eq!(code, libc::EINVAL);
    for ah in [to_b, to_a] {
        // SAFETY: live, and used no more.
        assert_eq!(unsafe { (PROVIDER.destroy_ah)(ah) }, 0);
    }
    for region in regions {
        region.deregister();
    }
    destroy([a, b]);
}

#[test]
fn a_queue_pair_offers_what_its_type_has() {
    let world = World::open();
    let (pd, cq) = (world.pd(), world.cq(8));
    let create = |change: &dyn Fn(&mut ibv_qp_init_attr_ex)| {
        let mut init = attributes(IBV_QPT_RC);
        (init.pd, init.send_cq, init.recv_cq) = (pd, cq, cq);
        change(&mut init);
        // SAFETY: all of them are live.
        made(unsafe { world.ops().create_qp_ex.unwrap()(world.context, &raw mut init) })
    };
    let refused = |change: &dyn Fn(&mut ibv_qp_init_attr_ex)| create(change).unwrap_err();
    let unsupported: [&dyn Fn(&mut ibv_qp_init_attr_ex); 6] = [
        &|init| init.send_ops_flags = IBV_QP_EX_WITH_TSO,
        &|init| (init.qp_type, init.send_ops_flags) = (IBV_QPT_UD, IBV_QP_EX_WITH_RDMA_WRITE),
        &|init| (init.qp_type, init.send_ops_flags) = (IBV_QPT_UC, IBV_QP_EX_WITH_RDMA_READ),
        &|init| init.qp_type = IBV_QPT_RAW_PACKET,
        &|init| init.comp_mask |= IBV_QP_INIT_ATTR_IND_TABLE,
        &|init| {
            init.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
            init.create_flags = 2;
        },
    ];
    for change in unsupported {
        assert_eq!(refused(change), libc::EOPNOTSUPP);
    }
    assert_eq!(refused(&|init| init.comp_mask = 0), libc::EINVAL);
    assert_eq!(
        refused(&|init| init.cap.max_send_wr = u32::MAX),
        libc::EINVAL
    );
    let classic = create(&|init| init.comp_mask = IBV_QP_INIT_ATTR_PD).unwrap();
    // SAFETY: live, and used no more afterwards.
    unsafe {
        assert!(qp_to_qp_ex(classic).is_null());
        assert_eq!((PROVIDER.destroy_qp)(classic), 0);
        assert_eq!((PROVIDER.destroy_cq)(cq), 0);
        assert_eq!((PROVIDER.dealloc_pd)(pd), 0);
    }
}

/// An end that threads share.
struct Shared<'a>(&'a End);

// SAFETY: a queue pair is for any thread.
unsafe impl Sync for Shared<'_> {}

#[test]
fn batches_of_threads_do_not_mix() {
    const ROUNDS: u64 = 300;
    let world = World::open();
    let [a, b] = pair(&world, IBV_QPT_RC);
    let memory = Memory::new(1);
    let region = memory.register(b.pd, ALL);
    let sender = Shared(&a);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let sender = &sender;
            scope.spawn(move || {
                let Shared(end) = sender;
                let mut round = 0;
                while round < ROUNDS {
                    let code = end.build(|calls| {
                        for part in 0..2u64 {
                            calls.next(thread, SIGNALED);
                            calls.wr_send();
                            calls.inline(&(thread << 32 | round << 1 | part).to_ne_bytes());
                        }
                    });
                    match code {
                        0 => round += 1,
                        libc::ENOMEM => std::thread::yield_now(),
                        code => panic!("{code}"),
                    }
                }
            });
        }
        let mut next = [0; 3];
        for _ in 0..3 * ROUNDS {
            let pair = [0, 1].map(|_| {
                b.receive(0, &mut [region.element(memory.addr(), 8)]);
                loop {
                    a.poll(8);
                    if let Some(wc) = b.poll(1).pop() {
                        assert_eq!(wc.status, IBV_WC_SUCCESS);
                        break memory.get(0);
                    }
                }
            });
            let thread = (pair[0] >> 32) as usize;
            assert_eq!(pair[0], (thread as u64) << 32 | next[thread]);
            assert_eq!(pair[1], pair[0] + 1);
            next[thread] += 2;
        }
    });
    region.deregister();
    destroy([a, b]);
}
