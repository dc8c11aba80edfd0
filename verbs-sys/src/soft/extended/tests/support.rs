//! What tests of the extended calls have in common: objects as C programs have them.

use core::ffi::c_int;
use std::cell::Cell;
use std::ptr;

use crate::ffi::*;
use crate::soft::PROVIDER;

pub const ALL: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC;
pub const QKEY: u32 = 0x1111;
pub const PSN: u32 = 7;

/// An open device.
pub struct World {
    pub context: *mut ibv_context,
    closes: Cell<bool>,
}

impl World {
    pub fn open() -> Self {
        // SAFETY: the list is live while it is used.
        unsafe {
            let list = (PROVIDER.get_device_list)(ptr::null_mut());
            let context = (PROVIDER.open_device)(*list);
            (PROVIDER.free_device_list)(list);
            Self::of(context)
        }
    }

    pub fn of(context: *mut ibv_context) -> Self {
        assert!(!context.is_null());
        Self {
            context,
            closes: Cell::new(true),
        }
    }

    /// The table of extended operations.
    pub fn ops(&self) -> &verbs_context {
        let offset = core::mem::offset_of!(verbs_context, context);
        // SAFETY: the context is the last field of its table.
        unsafe { &*self.context.byte_sub(offset).cast() }
    }

    pub fn pd(&self) -> *mut ibv_pd {
        // SAFETY: the context is open.
        let pd = unsafe { (PROVIDER.alloc_pd)(self.context) };
        assert!(!pd.is_null());
        pd
    }

    pub fn cq(&self, cqe: c_int) -> *mut ibv_cq {
        let null = ptr::null_mut();
        // SAFETY: the context is open.
        let cq = unsafe { (PROVIDER.create_cq)(self.context, cqe, null, ptr::null_mut(), 0) };
        assert!(!cq.is_null());
        cq
    }

    pub fn cq_ex(&self, attr: &ibv_cq_init_attr_ex) -> Result<*mut ibv_cq_ex, c_int> {
        let mut attr = *attr;
        // SAFETY: the context is open.
        made(unsafe { self.ops().create_cq_ex.unwrap()(self.context, &raw mut attr) })
    }

    pub fn gid(&self) -> ibv_gid {
        let mut gid = ibv_gid { raw: [0; 16] };
        // SAFETY: the context is open.
        let code = unsafe { (PROVIDER.query_gid)(self.context, 1, 0, &raw mut gid) };
        assert_eq!(code, 0);
        gid
    }
}

impl Drop for World {
    fn drop(&mut self) {
        if self.closes.get() && !std::thread::panicking() {
            // SAFETY: opened once, and what was made in it is destroyed.
            assert_eq!(unsafe { (PROVIDER.close_device)(self.context) }, 0);
        }
    }
}

/// What a call that makes something has made, or its error number.
pub fn made<T>(pointer: *mut T) -> Result<*mut T, c_int> {
    if pointer.is_null() {
        Err(std::io::Error::last_os_error().raw_os_error().unwrap())
    } else {
        Ok(pointer)
    }
}

/// A queue pair with a completion queue and a domain of its own.
pub struct End {
    pub pd: *mut ibv_pd,
    pub cq: *mut ibv_cq,
    pub qp: *mut ibv_qp,
}

/// What an end's queue pair shall be.
pub fn attributes(qp_type: ibv_qp_type) -> ibv_qp_init_attr_ex {
    let mut init = ibv_qp_init_attr_ex::zeroed();
    init.qp_type = qp_type;
    init.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
    init.send_ops_flags = IBV_QP_EX_WITH_SEND;
    init.cap = ibv_qp_cap {
        max_send_wr: 8,
        max_recv_wr: 8,
        max_send_sge: 2,
        max_recv_sge: 3,
        max_inline_data: 64,
    };
    init
}

impl End {
    pub fn new(world: &World, qp_type: ibv_qp_type) -> Self {
        Self::with(world, world.pd(), world.cq(64), &attributes(qp_type))
    }

    pub fn with(
        world: &World,
        pd: *mut ibv_pd,
        cq: *mut ibv_cq,
        init: &ibv_qp_init_attr_ex,
    ) -> Self {
        let mut init = *init;
        (init.pd, init.send_cq, init.recv_cq) = (pd, cq, cq);
        // SAFETY: all of them are live.
        let qp = unsafe { world.ops().create_qp_ex.unwrap()(world.context, &raw mut init) };
        let qp = made(qp).unwrap();
        Self { pd, cq, qp }
    }

    pub fn ex(&self) -> *mut ibv_qp_ex {
        // SAFETY: the queue pair is live.
        let ex = unsafe { crate::soft::qp_to_qp_ex(self.qp) };
        assert!(!ex.is_null());
        ex
    }

    pub fn qpn(&self) -> u32 {
        // SAFETY: the queue pair is live.
        unsafe { (*self.qp).qp_num }
    }

    /// To RTS, with a peer unless it is for datagrams.
    pub fn connect(&self, world: &World, dest_qp_num: u32) {
        connect(world, self.qp, dest_qp_num);
    }

    /// Posts a receive of these elements.
    pub fn receive(&self, wr_id: u64, list: &mut [ibv_sge]) {
        let mut wr = ibv_recv_wr {
            wr_id,
            sg_list: list.as_mut_ptr(),
            num_sge: list.len() as c_int,
            ..ibv_recv_wr::zeroed()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: the queue pair and the list are live.
        let code = unsafe {
            (*(*self.qp).context).ops.post_recv.unwrap()(self.qp, &raw mut wr, &raw mut bad)
        };
        assert_eq!(code, 0);
    }

    /// Builds requests, and posts them.
    pub fn build(&self, build: impl FnOnce(&Calls)) -> c_int {
        let calls = Calls(self.ex());
        // SAFETY: the queue pair is live.
        unsafe {
            (*calls.0).wr_start.unwrap()(calls.0);
            build(&calls);
            (*calls.0).wr_complete.unwrap()(calls.0)
        }
    }

    /// Posts one request, which succeeds.
    pub fn post(&self, build: impl FnOnce(&Calls)) -> ibv_wc {
        assert_eq!(self.build(build), 0);
        let wc = self.next();
        assert_eq!(wc.status, IBV_WC_SUCCESS);
        wc
    }

    /// Up to so many completions, as they are now.
    pub fn poll(&self, most: usize) -> Vec<ibv_wc> {
        poll(self.cq, most)
    }

    /// The next completion.
    pub fn next(&self) -> ibv_wc {
        next(self.cq)
    }

    pub fn destroy(self) {
        // SAFETY: live, and used no more.
        unsafe {
            assert_eq!((PROVIDER.destroy_qp)(self.qp), 0);
            assert_eq!((PROVIDER.destroy_cq)(self.cq), 0);
            assert_eq!((PROVIDER.dealloc_pd)(self.pd), 0);
        }
    }
}

/// Up to so many completions of a queue, as they are now.
pub fn poll(cq: *mut ibv_cq, most: usize) -> Vec<ibv_wc> {
    let mut wcs = vec![ibv_wc::zeroed(); most];
    // SAFETY: the queue is live, and the array has so many elements.
    let found = unsafe {
        let ops = &(*(*cq).context).ops;
        ops.poll_cq.unwrap()(cq, most as c_int, wcs.as_mut_ptr())
    };
    wcs.truncate(usize::try_from(found).expect("a broken queue"));
    wcs
}

/// The next completion of a queue.
pub fn next(cq: *mut ibv_cq) -> ibv_wc {
    loop {
        if let Some(wc) = poll(cq, 1).pop() {
            return wc;
        }
        std::thread::yield_now();
    }
}

/// A queue pair to RTS, with a peer unless it is for datagrams.
pub fn connect(world: &World, qp: *mut ibv_qp, dest_qp_num: u32) {
    connect_at(&address(world), qp, dest_qp_num);
}

/// A queue pair to RTS, with a peer at this address unless it is for datagrams.
pub fn connect_at(address: &ibv_ah_attr, qp: *mut ibv_qp, dest_qp_num: u32) {
    let modify = |attr: &mut ibv_qp_attr, mask: u32| {
        // SAFETY: the queue pair is live.
        let code = unsafe { (PROVIDER.modify_qp)(qp, attr, mask as c_int) };
        assert_eq!(code, 0);
    };
    let mut attr = ibv_qp_attr::zeroed();
    // SAFETY: written at creation only.
    let qp_type = unsafe { (*qp).qp_type };
    let is_ud = qp_type == IBV_QPT_UD;
    let only = |wanted: bool, mask: u32| if wanted { mask } else { 0 };
    attr.qp_state = IBV_QPS_INIT;
    (attr.port_num, attr.qkey, attr.qp_access_flags) = (1, QKEY, ALL);
    let place = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT;
    let first = only(is_ud, IBV_QP_QKEY) | only(!is_ud, IBV_QP_ACCESS_FLAGS);
    modify(&mut attr, place | first);
    attr.qp_state = IBV_QPS_RTR;
    attr.path_mtu = IBV_MTU_1024;
    (attr.rq_psn, attr.sq_psn, attr.dest_qp_num) = (PSN, PSN, dest_qp_num);
    (attr.max_rd_atomic, attr.max_dest_rd_atomic) = (1, 1);
    (
        attr.min_rnr_timer,
        attr.timeout,
        attr.retry_cnt,
        attr.rnr_retry,
    ) = (12, 14, 7, 7);
    attr.ah_attr = *address;
    let path = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    // What only the other side of XRC has is ignored.
    let taken = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    let rtr = only(!is_ud, path | taken);
    modify(&mut attr, IBV_QP_STATE | rtr);
    attr.qp_state = IBV_QPS_RTS;
    let sent = IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
    let repeat = only(!is_ud, IBV_QP_TIMEOUT | sent);
    modify(&mut attr, IBV_QP_STATE | IBV_QP_SQ_PSN | repeat);
}

/// Two ends that are connected to each other.
pub fn pair(world: &World, qp_type: ibv_qp_type) -> [End; 2] {
    let ends = [End::new(world, qp_type), End::new(world, qp_type)];
    ends[0].connect(world, ends[1].qpn());
    ends[1].connect(world, ends[0].qpn());
    ends
}

pub fn destroy(ends: [End; 2]) {
    for end in ends {
        end.destroy();
    }
}

/// This port's own address.
pub fn address(world: &World) -> ibv_ah_attr {
    let mut address = ibv_ah_attr::zeroed();
    (address.is_global, address.port_num) = (1, 1);
    address.grh.dgid = world.gid();
    address.grh.hop_limit = 64;
    address
}

/// The functions of an `ibv_qp_ex`, between `wr_start` and `wr_complete`.
pub struct Calls(pub *mut ibv_qp_ex);

macro_rules! calls {
    ($($name:ident($($arg:ident: $type:ty),*);)+) => {$(
        pub fn $name(&self, $($arg: $type),*) {
            // SAFETY: the queue pair is live, and so is what the arguments lead to.
            unsafe { (*self.0).$name.unwrap()(self.0, $($arg),*) };
        }
    )+};
}

impl Calls {
    calls! {
        wr_send();
        wr_send_imm(imm: u32);
        wr_send_inv(rkey: u32);
        wr_rdma_write(rkey: u32, addr: u64);
        wr_rdma_write_imm(rkey: u32, addr: u64, imm: u32);
        wr_rdma_read(rkey: u32, addr: u64);
        wr_atomic_cmp_swp(rkey: u32, addr: u64, compare: u64, swap: u64);
        wr_atomic_fetch_add(rkey: u32, addr: u64, add: u64);
        wr_local_inv(rkey: u32);
        wr_bind_mw(mw: *mut ibv_mw, rkey: u32, info: *const ibv_mw_bind_info);
        wr_set_sge(lkey: u32, addr: u64, length: u32);
        wr_set_ud_addr(ah: *mut ibv_ah, qpn: u32, qkey: u32);
        wr_set_xrc_srqn(number: u32);
    }

    /// What the next request shall have.
    pub fn next(&self, wr_id: u64, flags: u32) {
        // SAFETY: the queue pair is live, and its fields are ours now.
        unsafe {
            (*self.0).wr_id = wr_id;
            (*self.0).wr_flags = flags;
        }
    }

    pub fn list(&self, list: &[ibv_sge]) {
        // SAFETY: as above.
        unsafe { (*self.0).wr_set_sge_list.unwrap()(self.0, list.len(), list.as_ptr()) };
    }

    pub fn inline(&self, bytes: &[u8]) {
        let start = bytes.as_ptr().cast_mut().cast();
        // SAFETY: as above.
        unsafe { (*self.0).wr_set_inline_data.unwrap()(self.0, start, bytes.len()) };
    }

    pub fn inline_list(&self, parts: &[&[u8]]) {
        let buffers: Vec<ibv_data_buf> = parts
            .iter()
            .map(|part| ibv_data_buf {
                addr: part.as_ptr().cast_mut().cast(),
                length: part.len(),
            })
            .collect();
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_set_inline_data_list.unwrap()(self.0, buffers.len(), buffers.as_ptr());
        }
    }

    pub fn atomic_write(&self, rkey: u32, addr: u64, value: u64) {
        // SAFETY: as above.
        unsafe {
            (*self.0).wr_atomic_write.unwrap()(self.0, rkey, addr, (&raw const value).cast());
        }
    }
}

/// Words of ordinary memory that peers may use.
pub struct Memory(Box<[std::cell::UnsafeCell<u64>]>);

impl Memory {
    pub fn new(words: usize) -> Self {
        Self((0..words).map(|_| 0.into()).collect())
    }

    pub fn start(&self) -> *mut u64 {
        self.0.as_ptr().cast_mut().cast()
    }

    pub fn addr(&self) -> u64 {
        self.start() as u64
    }

    pub fn len(&self) -> usize {
        size_of_val(&*self.0)
    }

    pub fn get(&self, word: usize) -> u64 {
        assert!(word < self.0.len());
        // SAFETY: a live word.
        unsafe { self.start().add(word).read_volatile() }
    }

    pub fn set(&self, word: usize, value: u64) {
        assert!(word < self.0.len());
        // SAFETY: a live word.
        unsafe { self.start().add(word).write_volatile(value) };
    }

    pub fn register(&self, pd: *mut ibv_pd, access: u32) -> Region {
        self.register_at(pd, self.addr(), access).unwrap()
    }

    pub fn register_at(&self, pd: *mut ibv_pd, iova: u64, access: u32) -> Result<Region, c_int> {
        let (start, access) = (self.start().cast(), access as c_int);
        // SAFETY: the domain is live, and the memory stays for as long as the region.
        let mr = unsafe { crate::soft::reg_mr_iova(pd, start, self.len(), iova, access) };
        made(mr).map(Region)
    }
}

/// A region.
pub struct Region(pub *mut ibv_mr);

impl Region {
    pub fn lkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.0).lkey }
    }

    pub fn rkey(&self) -> u32 {
        // SAFETY: live.
        unsafe { (*self.0).rkey }
    }

    pub fn element(&self, addr: u64, length: usize) -> ibv_sge {
        ibv_sge {
            addr,
            length: length as u32,
            lkey: self.lkey(),
        }
    }

    pub fn deregister(self) {
        // SAFETY: live, and used no more.
        assert_eq!(unsafe { (PROVIDER.dereg_mr)(self.0) }, 0);
    }
}
