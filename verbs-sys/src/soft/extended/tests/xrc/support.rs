//! Objects of extended reliable connections.

use core::ffi::c_int;
use std::ptr;

use super::super::support::{ALL, Calls, End, Memory, Region, World, attributes, connect, made};
use crate::ffi::*;
use crate::soft::PROVIDER;

pub const ANY: c_int = -1;

pub fn open(world: &World, fd: c_int, oflags: c_int) -> Result<*mut ibv_xrcd, c_int> {
    let mut attr = ibv_xrcd_init_attr {
        comp_mask: IBV_XRCD_INIT_ATTR_FD | IBV_XRCD_INIT_ATTR_OFLAGS,
        fd,
        oflags,
    };
    // SAFETY: the context is open.
    made(unsafe { world.ops().open_xrcd.unwrap()(world.context, &raw mut attr) })
}

pub fn close(world: &World, xrcd: *mut ibv_xrcd) -> c_int {
    // SAFETY: the domain is live.
    unsafe { world.ops().close_xrcd.unwrap()(xrcd) }
}

pub fn target_qp(world: &World, xrcd: *mut ibv_xrcd) -> Result<*mut ibv_qp, c_int> {
    let mut init = ibv_qp_init_attr_ex::zeroed();
    init.qp_type = IBV_QPT_XRC_RECV;
    init.comp_mask = IBV_QP_INIT_ATTR_XRCD;
    init.xrcd = xrcd.cast();
    // SAFETY: the domain is live, or null.
    made(unsafe { world.ops().create_qp_ex.unwrap()(world.context, &raw mut init) })
}

/// A queue pair that sends, in a domain of its own.
pub fn sender(world: &World) -> End {
    let mut init = attributes(IBV_QPT_XRC_SEND);
    init.send_ops_flags = IBV_QP_EX_WITH_SEND_WITH_IMM | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    End::with(world, world.pd(), world.cq(64), &init)
}

pub fn qpn(qp: *mut ibv_qp) -> u32 {
    // SAFETY: the queue pair is live.
    unsafe { (*qp).qp_num }
}

pub fn destroy_qp(qp: *mut ibv_qp) {
    // SAFETY: live, and used no more.
    assert_eq!(unsafe { (PROVIDER.destroy_qp)(qp) }, 0);
}

/// Connects a sender with a queue pair that takes its requests.
pub fn join(world: &World, sender: &End, target: *mut ibv_qp) {
    connect(world, target, sender.qpn());
    sender.connect(world, qpn(target));
}

/// A shared receive queue of an XRC domain, with a protection domain and a region of its own.
pub struct Shared {
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub srq: *mut ibv_srq,
    pub number: u32,
    pub memory: Memory,
    pub region: Region,
}

/// Words of the region of a [`Shared`].
pub const WORDS: usize = 2048;

pub fn create_srq(
    world: &World,
    xrcd: *mut ibv_xrcd,
    pd: *mut ibv_pd,
    cq: *mut ibv_cq,
) -> Result<*mut ibv_srq, c_int> {
    let mut init = ibv_srq_init_attr_ex::zeroed();
    (init.attr.max_wr, init.attr.max_sge) = (16, 2);
    init.comp_mask = IBV_SRQ_INIT_ATTR_TYPE
        | IBV_SRQ_INIT_ATTR_PD
        | IBV_SRQ_INIT_ATTR_XRCD
        | IBV_SRQ_INIT_ATTR_CQ;
    (init.srq_type, init.pd, init.xrcd, init.cq) = (IBV_SRQT_XRC, pd, xrcd, cq);
    // SAFETY: all are live, or null.
    made(unsafe { world.ops().create_srq_ex.unwrap()(world.context, &raw mut init) })
}

impl Shared {
    pub fn new(world: &World, xrcd: *mut ibv_xrcd, cqe: c_int) -> Self {
        Self::with(world, xrcd, world.cq(cqe))
    }

    pub fn with(world: &World, xrcd: *mut ibv_xrcd, cq: *mut ibv_cq) -> Self {
        let pd = world.pd();
        let srq = create_srq(world, xrcd, pd, cq).unwrap();
        let mut number = 0;
        // SAFETY: live, and a place for the result.
        let code = unsafe { world.ops().get_srq_num.unwrap()(srq, &raw mut number) };
        assert_eq!(code, 0);
        let memory = Memory::new(WORDS);
        let region = memory.register(pd, ALL);
        Self {
            pd,
            cq,
            srq,
            number,
            memory,
            region,
        }
    }

    /// Posts a receive of so many words from this one on.
    pub fn receive(&self, wr_id: u64, word: usize, words: usize) {
        let addr = self.memory.addr() + 8 * word as u64;
        let mut list = [self.region.element(addr, 8 * words)];
        let mut wr = ibv_recv_wr {
            wr_id,
            sg_list: list.as_mut_ptr(),
            num_sge: 1,
            ..ibv_recv_wr::zeroed()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue and the list are live.
        let code = unsafe {
            let post = (*(*self.srq).context).ops.post_srq_recv.unwrap();
            post(self.srq, &raw mut wr, &raw mut bad)
        };
        assert_eq!(code, 0);
    }

    pub fn destroy_srq(&self) {
        // SAFETY: live, and used no more.
        assert_eq!(unsafe { (PROVIDER.destroy_srq)(self.srq) }, 0);
    }

    /// What is left, after the queue itself.
    pub fn destroy_rest(self) {
        self.region.deregister();
        // SAFETY: live, and used no more.
        unsafe {
            assert_eq!((PROVIDER.destroy_cq)(self.cq), 0);
            assert_eq!((PROVIDER.dealloc_pd)(self.pd), 0);
        }
    }

    pub fn destroy(self) {
        self.destroy_srq();
        self.destroy_rest();
    }
}

/// Memory of a sender, and its region.
pub struct Source {
    pub memory: Memory,
    pub region: Region,
}

impl Source {
    pub fn of(sender: &End) -> Self {
        let memory = Memory::new(WORDS);
        (0..WORDS).for_each(|word| memory.set(word, word as u64 + 1));
        let region = memory.register(sender.pd, ALL);
        Self { memory, region }
    }

    /// Gives the request the first words.
    pub fn words(&self, calls: &Calls, words: usize) {
        calls.wr_set_sge(self.region.lkey(), self.memory.addr(), 8 * words as u32);
    }

    /// Sends the first words, with immediate data, to a shared receive queue.
    pub fn send(&self, sender: &End, number: u32, words: usize, imm: u32, flags: u32) {
        let code = sender.build(|calls| {
            calls.next(u64::from(imm), IBV_SEND_SIGNALED | flags);
            calls.wr_send_imm(imm);
            calls.wr_set_xrc_srqn(number);
            self.words(calls, words);
        });
        assert_eq!(code, 0);
    }
}
