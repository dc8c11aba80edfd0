//! Handles keep each other alive, and go in any order.

use std::sync::atomic::{AtomicU32, Ordering};

use verbs_sys::{
    CompletionChannel, CompletionQueue, Context, Device, DeviceError, HostMemory, MemoryRegion,
    PathOptions, ProtectionDomain, QueuePair, QueuePairInit, WorkCompletion, devices,
    ffi::{self, ibv_send_wr, ibv_sge},
    find_device,
};

use crate::support::{ALL_ACCESS, PATIENCE};

/// One of everything, with a queue pair that is connected to itself.
struct Everything {
    device: Option<Device>,
    context: Option<Context>,
    pd: Option<ProtectionDomain>,
    channel: Option<CompletionChannel>,
    cq: Option<CompletionQueue>,
    memory: Option<HostMemory>,
    region: Option<MemoryRegion>,
    qp: Option<QueuePair>,
}

/// How many handles there are.
const HANDLES: usize = 8;

impl Everything {
    fn new() -> Self {
        let device = find_device(None).expect("no device");
        let context = device.open().expect("the device does not open");
        let pd = context.alloc_pd().expect("no protection domain");
        let channel = context.create_comp_channel().expect("no channel");
        let cq = context.create_cq(16, Some(&channel)).expect("no queue");
        let memory = context.alloc_memory(4096).expect("no memory");
        let region = pd.reg_memory(&memory, ALL_ACCESS).expect("no region");
        let qp = connected_to_itself(&context, &pd, &cq);
        Self {
            device: Some(device),
            context: Some(context),
            pd: Some(pd),
            channel: Some(channel),
            cq: Some(cq),
            memory: Some(memory),
            region: Some(region),
            qp: Some(qp),
        }
    }

    /// One more queue pair, on the same completion queue.
    fn another_pair(&self) -> QueuePair {
        let (Some(context), Some(pd), Some(cq)) = (&self.context, &self.pd, &self.cq) else {
            panic!("a handle is gone");
        };
        connected_to_itself(context, pd, cq)
    }

    fn drop_one(&mut self, index: usize) {
        match index {
            0 => drop(self.device.take()),
            1 => drop(self.context.take()),
            2 => drop(self.pd.take()),
            3 => drop(self.channel.take()),
            4 => drop(self.cq.take()),
            5 => drop(self.memory.take()),
            6 => drop(self.region.take()),
            _ => drop(self.qp.take()),
        }
    }

    /// Uses what is left, if it is enough for a transfer.
    fn transfer(&self) {
        if let (Some(qp), Some(region)) = (&self.qp, &self.region) {
            write_to_itself(qp, region);
        }
    }
}

fn connected_to_itself(
    context: &Context,
    pd: &ProtectionDomain,
    cq: &CompletionQueue,
) -> QueuePair {
    let qp = pd
        .create_qp(&QueuePairInit::new(cq, cq))
        .expect("no queue pair");
    let path = PathOptions {
        gid_index: context.choose_gid(1).expect("no address").0,
        ..PathOptions::default()
    };
    qp.to_init(ALL_ACCESS, 1).expect("no way to INIT");
    let itself = qp.endpoint(&path, 7).expect("no endpoint");
    qp.to_rtr(&itself, &path).expect("no way to RTR");
    qp.to_rts(7, &path).expect("no way to RTS");
    qp
}

/// Writes 8 bytes from the region's start to its middle, and waits for the completion.
fn write_to_itself(qp: &QueuePair, region: &MemoryRegion) {
    post_write_to_itself(qp, region);
    let mut completions = [WorkCompletion::default()];
    let deadline = std::time::Instant::now() + PATIENCE;
    while qp.send_cq().poll(&mut completions).expect("cannot poll") == 0 {
        assert!(std::time::Instant::now() < deadline, "no completion came");
        std::thread::yield_now();
    }
    assert!(completions[0].is_ok(), "{:?}", completions[0]);
    assert_eq!(completions[0].qp_num(), qp.qp_num());
}

fn post_write_to_itself(qp: &QueuePair, region: &MemoryRegion) {
    let mut element = ibv_sge {
        addr: region.addr(),
        length: 8,
        lkey: region.lkey(),
    };
    let mut request = ibv_send_wr {
        wr_id: 1,
        sg_list: &mut element,
        num_sge: 1,
        opcode: ffi::IBV_WR_RDMA_WRITE,
        send_flags: ffi::IBV_SEND_SIGNALED,
        ..ibv_send_wr::zeroed()
    };
    request.wr.rdma = ffi::ibv_send_wr_rdma {
        remote_addr: region.addr() + 64,
        rkey: region.rkey(),
    };
    // SAFETY: a list of one request, whose memory is registered until it has completed.
    unsafe { qp.post_send(&mut request) }.expect("cannot post");
}

/// Queue pairs leave a completion queue, whichever of them was polled last, and it goes on.
#[test]
fn queue_pairs_come_and_go_on_one_queue() {
    let everything = Everything::new();
    let region = everything.region.as_ref().expect("there");
    let mut pairs: Vec<Option<QueuePair>> = Vec::new();
    for round in 0..64_usize {
        if round % 2 == 0 {
            pairs.push(Some(everything.another_pair()));
        }
        // Every order of use, and some leave that were used last and some that were not.
        let len = pairs.len();
        for turn in 0..len {
            if let Some(qp) = &pairs[(turn * 3 + round) % len] {
                write_to_itself(qp, region);
            }
        }
        if round % 3 == 2 {
            pairs[round * 7 % len] = None;
        }
    }
    everything.transfer();
}

/// A queue pair that always has something does not keep the others waiting.
#[test]
fn a_busy_queue_pair_does_not_starve_another() {
    let everything = Everything::new();
    let region = everything.region.as_ref().expect("there");
    let cq = everything.cq.as_ref().expect("there");
    let pairs = [0; 3].map(|_| everything.another_pair());
    for (busy, quiet) in [(0, 2), (2, 0), (1, 2)] {
        post_write_to_itself(&pairs[quiet], region);
        let deadline = std::time::Instant::now() + PATIENCE;
        loop {
            post_write_to_itself(&pairs[busy], region);
            let mut found = [WorkCompletion::default()];
            while cq.poll(&mut found).expect("cannot poll") == 0 {}
            if found[0].qp_num() == pairs[quiet].qp_num() {
                break;
            }
            assert!(std::time::Instant::now() < deadline, "it starves");
        }
        // The completion whose turn it was not.
        let mut left = [WorkCompletion::default()];
        while cq.poll(&mut left).expect("cannot poll") == 0 {}
        assert_eq!(left[0].qp_num(), pairs[busy].qp_num());
    }
}

/// A completion queue is much smaller than its queue pairs, and all of them are at work; but no more
/// requests are outstanding at any time than it has room for.
#[test]
fn keeping_to_the_size_of_a_queue_is_enough() {
    const EACH: u32 = 4;
    let everything = Everything::new();
    let region = everything.region.as_ref().expect("there");
    let cq = everything.cq.as_ref().expect("there");
    let context = everything.context.as_ref().expect("there");
    let pairs = [(); 4].map(|()| everything.another_pair());
    assert!(cq.capacity() >= pairs.len() * EACH as usize);
    let rounds = if context.device().is_software() {
        20_000
    } else {
        500
    };
    let outstanding = [(); 4].map(|()| AtomicU32::new(0));
    let deadline = std::time::Instant::now() + PATIENCE;
    std::thread::scope(|scope| {
        for (qp, outstanding) in pairs.iter().zip(&outstanding) {
            scope.spawn(move || {
                for _ in 0..rounds {
                    while outstanding.load(Ordering::Acquire) == EACH {
                        assert!(std::time::Instant::now() < deadline, "nothing completes");
                        std::thread::yield_now();
                    }
                    outstanding.fetch_add(1, Ordering::Relaxed);
                    post_write_to_itself(qp, region);
                }
            });
        }
        let mut completions: [WorkCompletion; 3] = Default::default();
        let mut left = rounds * pairs.len();
        while left > 0 {
            let count = cq.poll(&mut completions).expect("it has overrun");
            assert!(std::time::Instant::now() < deadline, "nothing completes");
            for completion in &completions[..count] {
                assert!(completion.is_ok(), "{completion:?}");
                let is_it = |qp: &QueuePair| qp.qp_num() == completion.qp_num();
                let which = pairs.iter().position(is_it).expect("of a stranger");
                outstanding[which].fetch_sub(1, Ordering::Release);
                left -= 1;
            }
        }
    });
    assert!(context.try_get_async_event().expect("no events").is_none());
}

#[test]
fn handles_go_in_any_order() {
    // Each handle first, and each last, in several orders.
    for start in 0..HANDLES {
        for step in [1, 3, 5, 7] {
            let mut everything = Everything::new();
            for turn in 0..HANDLES {
                everything.transfer();
                everything.drop_one((start + turn * step) % HANDLES);
            }
        }
    }
}

#[test]
fn a_queue_pair_and_a_region_keep_the_rest_alive() {
    let mut everything = Everything::new();
    for index in 0..6 {
        everything.drop_one(index);
    }
    everything.transfer();
    let region = everything.region.take().expect("there");
    drop(everything);
    region.deregister().expect("deregistering failed");
}

/// An event keeps its queue, and a queue its channel.
#[test]
fn an_event_outlives_the_other_handles() {
    let everything = Everything::new();
    let Everything {
        channel,
        cq,
        qp,
        region,
        ..
    } = everything;
    let (channel, cq) = (channel.expect("there"), cq.expect("there"));
    let (qp, region) = (qp.expect("there"), region.expect("there"));
    cq.req_notify(false).expect("cannot arm");
    write_to_itself(&qp, &region);
    let event = channel
        .wait_timeout(PATIENCE)
        .expect("no event")
        .expect("no event");
    assert!(event.is_of(&cq));
    drop((channel, cq, qp, region));
    assert!(event.queue().capacity() >= 16);
    drop(event);
}

/// A queue goes with requests outstanding, and the channel with an event that nobody took.
#[test]
fn what_is_outstanding_goes_too() {
    let everything = Everything::new();
    let (Some(cq), Some(qp), Some(region)) = (&everything.cq, &everything.qp, &everything.region)
    else {
        panic!("not there");
    };
    let mut recv = ffi::ibv_recv_wr::zeroed();
    // SAFETY: a list of one request without elements.
    unsafe { qp.post_recv(&mut recv) }.expect("cannot post");
    cq.req_notify(false).expect("cannot arm");
    write_to_itself(qp, region);
    drop(everything);
}

#[test]
fn the_device_says_what_it_can() {
    let device = find_device(None).expect("no device");
    let context = device.open().expect("the device does not open");
    let attr = context.query_device().expect("no attributes");
    assert!(attr.max_qp >= 64 && attr.max_cq >= 64 && attr.max_mr >= 256 && attr.max_pd >= 8);
    assert!(attr.max_qp_wr >= 64 && attr.max_sge >= 4 && attr.max_cqe >= 256);
    assert!(attr.max_qp_rd_atom >= 1 && attr.max_qp_init_rd_atom >= 1);
    assert_ne!(attr.atomic_cap, ffi::IBV_ATOMIC_NONE);
    assert!(attr.phys_port_cnt >= 1);
    let port = context.query_port(1).expect("no port");
    assert_eq!(port.state, ffi::IBV_PORT_ACTIVE);
    assert!(port.max_msg_sz >= 1 << 20);
    assert!((ffi::IBV_MTU_256..=ffi::IBV_MTU_4096).contains(&port.active_mtu));
    assert!(port.active_mtu <= port.max_mtu);
    let (index, gid) = context.choose_gid(1).expect("no address");
    assert!(!gid.is_zero());
    assert_eq!(context.query_gid(1, index.into()).expect("no entry"), gid);
    assert!(context.query_port(0).is_err() && context.query_port(200).is_err());
    assert!(context.query_gid(1, 1 << 20).is_err());
}

#[test]
fn devices_are_found_by_name() {
    let device = find_device(None).expect("no device");
    let again = find_device(Some(&device.name())).expect("no device of that name");
    assert_eq!(again.guid(), device.guid());
    let names: Vec<String> = devices()
        .expect("no list")
        .iter()
        .map(Device::name)
        .collect();
    assert!(names.contains(&device.name()) && names.contains(&"soft0".to_owned()));
    let error = find_device(Some("no such device")).expect_err("a device of no name");
    let DeviceError::Unknown { name, available } = error else {
        panic!("another error: {error}");
    };
    assert_eq!(name, "no such device");
    assert_eq!(available, names.join(", "));
}

/// What the device cannot make is refused, and does not harm it.
#[test]
fn impossible_sizes_are_refused() {
    let everything = Everything::new();
    let (Some(context), Some(pd), Some(cq)) = (&everything.context, &everything.pd, &everything.cq)
    else {
        panic!("not there");
    };
    assert!(context.create_cq(u32::MAX, None).is_err());
    let small = QueuePairInit::new(cq, cq);
    let sizes: [fn(&mut QueuePairInit<'_>); 5] = [
        |init| init.max_send_wr = u32::MAX,
        |init| init.max_recv_wr = u32::MAX,
        |init| init.max_send_sge = u32::MAX,
        |init| init.max_recv_sge = u32::MAX,
        |init| init.max_inline_data = u32::MAX,
    ];
    for too_much in sizes {
        let mut init = small.clone();
        too_much(&mut init);
        assert!(pd.create_qp(&init).is_err());
    }
    everything.transfer();
}
