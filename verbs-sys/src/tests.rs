//! The handles, on a device that does no work: lifetimes, events, arguments, errors.

use std::{error::Error, sync::Arc, time::Duration};

use crate::{fake, ffi, *};

fn destroyed() -> Vec<&'static str> {
    fake::with(|state| state.destroyed.clone())
}

fn position(name: &str) -> usize {
    let order = destroyed();
    order
        .iter()
        .position(|gone| *gone == name)
        .unwrap_or_else(|| panic!("{name} in {order:?}"))
}

#[test]
fn parents_outlive_children_whatever_is_dropped_first() {
    let context = fake::open();
    let pd = context.alloc_pd().unwrap();
    let channel = context.create_comp_channel().unwrap();
    let cq = context.create_cq(16, Some(&channel)).unwrap();
    let memory = context.alloc_memory(4096).unwrap();
    let mr = pd.reg_memory(&memory, AccessFlags::LOCAL_WRITE).unwrap();
    let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();

    drop((context, pd, channel, cq, memory));
    assert_eq!(destroyed(), [""; 0]);
    drop(mr);
    assert_eq!(destroyed(), ["mr", "memory"]);
    drop(qp);
    assert!(position("qp") < position("cq"));
    assert!(position("cq") < position("channel"));
    assert!(position("pd") < position("context"));
    assert!(position("channel") < position("context"));
    assert_eq!(position("device"), 7);
}

#[test]
fn memory_that_stays_registered_is_never_freed() {
    let context = fake::open();
    let memory = context.alloc_memory(4096).unwrap();
    let pd = context.alloc_pd().unwrap();
    let mr = pd.reg_memory(&memory, AccessFlags::empty()).unwrap();
    fake::with(|state| state.busy.push("mr"));
    let error = mr.deregister().unwrap_err();
    assert_eq!(error.source().unwrap().to_string(), os_error(libc::EBUSY));
    drop((error, memory, pd, context));
    assert!(!destroyed().contains(&"memory"));
}

#[test]
fn a_window_keeps_what_it_may_be_bound_to() {
    let context = fake::open();
    let memory = context.alloc_memory(4096).unwrap();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
    let access = AccessFlags::LOCAL_WRITE;
    let region = || Arc::new(pd.reg_memory(&memory, access).unwrap());
    let (first, second) = (region(), region());
    let mut window = pd.alloc_mw(MwType::Type1).unwrap();
    let info = |region, len| BindInfo {
        region,
        addr: 0,
        len,
        access: AccessFlags::REMOTE_READ,
    };
    assert_eq!((window.rkey(), window.next_rkey()), (0x1ff, 0x100));
    // SAFETY: the queue pair is nobody else's.
    unsafe {
        let flags = SendFlags::FENCE;
        window.bind(&qp, 5, flags, Some(info(&first, 7))).unwrap();
        let flags = SendFlags::empty();
        window.bind(&qp, 6, flags, Some(info(&second, 8))).unwrap();
        window.bind(&qp, 7, flags, None).unwrap();
    }
    let signaled = ffi::IBV_SEND_SIGNALED;
    assert_eq!(
        fake::with(|state| state.bound.clone()),
        [
            (5, signaled | ffi::IBV_SEND_FENCE, 7),
            (6, signaled, 8),
            (7, signaled, 0)
        ]
    );
    assert_eq!(window.rkey(), 0x102);
    drop((first, second, qp, cq));
    assert!(!destroyed().contains(&"mr"));
    window.release_former_regions();
    assert_eq!(destroyed().iter().filter(|name| **name == "mr").count(), 1);
    drop((memory, pd, context));
    drop(window);
    let order = destroyed();
    let tail = &order[order.iter().position(|name| *name == "mw").unwrap()..];
    assert_eq!(tail, ["mw", "mr", "memory", "pd", "context", "device"]);
}

#[test]
fn binds_are_checked_for_what_libibverbs_checks_inline() {
    let context = fake::open();
    let pd = context.alloc_pd().unwrap();
    let memory = context.alloc_memory(4096).unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
    let region = Arc::new(pd.reg_memory(&memory, AccessFlags::empty()).unwrap());
    let bind = |window: &mut MemoryWindow, qp: &QueuePair| {
        // SAFETY: the queue pair is nobody else's.
        unsafe { window.bind(qp, 1, SendFlags::empty(), None) }
    };
    let mut window = pd.alloc_mw(MwType::Type2).unwrap();
    let error = bind(&mut window, &qp).unwrap_err();
    assert_eq!(error.source().unwrap().to_string(), os_error(libc::EINVAL));
    let info = BindInfo {
        region: &region,
        addr: 1,
        len: 2,
        access: AccessFlags::REMOTE_WRITE,
    };
    let request = window.bind_request(9, 0x105, info);
    assert_eq!((request.wr_id, request.opcode), (9, ffi::IBV_WR_BIND_MW));
    // SAFETY: that is what the opcode says.
    let raw = unsafe { request.extra.bind_mw };
    assert_eq!((raw.mw, raw.rkey), (window.as_raw(), 0x105));
    assert_eq!((raw.bind_info.addr, raw.bind_info.length), (1, 2));
    assert_eq!(raw.bind_info.mr, region.as_raw());
    window.set_rkey(0x105);
    assert_eq!(window.rkey(), 0x105);

    let mut window = pd.alloc_mw(MwType::Type1).unwrap();
    fake::with(|state| state.busy.push("bind"));
    let error = bind(&mut window, &qp).unwrap_err();
    assert!(matches!(error, BindError::Refused { rkey: 0x1ff, .. }));
    let elsewhere = fake::open().alloc_pd().unwrap();
    let mut window = elsewhere.alloc_mw(MwType::Type1).unwrap();
    let error = bind(&mut window, &qp).unwrap_err();
    assert!(matches!(error, BindError::OtherContext { .. }));
}

#[test]
fn a_region_that_is_changed_keeps_what_it_has_then() {
    let context = fake::open();
    let (one, two) = (context.alloc_pd().unwrap(), context.alloc_pd().unwrap());
    let memory = context.alloc_memory(4096).unwrap();
    let other = context.alloc_memory(8192).unwrap();
    let region = one.reg_memory(&memory, AccessFlags::empty()).unwrap();
    fake::with(|state| state.busy.push("rereg"));
    let change = Rereg {
        memory: Some(&other),
        pd: Some(&two),
        access: Some(AccessFlags::REMOTE_READ),
    };
    let lost = context.alloc_memory(4096).unwrap();
    let memory_too = Rereg {
        memory: Some(&lost),
        ..change
    };
    let error = region.rereg(memory_too).unwrap_err();
    assert_eq!(error.source.raw_os_error(), Some(libc::EBUSY));
    assert!(!error.is_usable && error.region.len() == 4096);
    fake::with(|state| state.busy.clear());
    let region = error.region.rereg(change).unwrap();
    assert_eq!(region.len(), 8192);
    assert_eq!(region.protection_domain().as_raw(), two.as_raw());
    let all = ffi::IBV_REREG_MR_CHANGE_TRANSLATION
        | ffi::IBV_REREG_MR_CHANGE_PD
        | ffi::IBV_REREG_MR_CHANGE_ACCESS;
    let access = Rereg {
        access: Some(AccessFlags::empty()),
        ..Rereg::default()
    };
    let region = region.rereg(access).unwrap();
    let asked = fake::with(|state| state.reregistered.clone());
    assert_eq!(asked, [all, ffi::IBV_REREG_MR_CHANGE_ACCESS]);
    drop((one, memory));
    assert_eq!(destroyed(), ["pd", "memory"]);
    drop((two, other, lost, context));
    drop(region);
    // What the device may have taken over is never freed, nor is its context.
    assert_eq!(destroyed()[2..], ["mr", "pd", "memory"]);

    let (context, elsewhere) = (fake::open(), fake::open().alloc_pd().unwrap());
    let mut bytes = [0_u8; 8];
    let pd = context.alloc_pd().unwrap();
    // SAFETY: nobody uses the bytes while they are registered.
    let region = unsafe { pd.reg_mr(bytes.as_mut_ptr(), 8, AccessFlags::empty()) }.unwrap();
    let error = region.rereg(access).unwrap_err();
    assert!(error.is_usable);
    // SAFETY: as above.
    let error = unsafe { error.region.rereg_mr(None, Some(&elsewhere), None) }.unwrap_err();
    assert!(error.is_usable);
    // SAFETY: as above.
    let region = unsafe { error.region.rereg_mr(None, None, access.access) }.unwrap();
    assert_eq!(region.len(), 8);
}

#[test]
fn deregister_frees_the_memory() {
    let context = fake::open();
    let memory = context.alloc_memory(4096).unwrap();
    let mr = context
        .alloc_pd()
        .unwrap()
        .reg_memory(&memory, AccessFlags::empty())
        .unwrap();
    assert_eq!((mr.addr(), mr.len()), (memory.addr() as u64, 4096));
    assert_eq!((mr.lkey(), mr.rkey()), (7, 8));
    drop((memory, context));
    mr.deregister().unwrap();
    assert_eq!(destroyed(), ["mr", "memory", "pd", "context", "device"]);
}

#[test]
fn objects_of_two_contexts_do_not_mix() {
    let (one, two) = (fake::open(), fake::open());
    let channel = two.create_comp_channel().unwrap();
    let error = one.create_cq(16, Some(&channel)).unwrap_err();
    assert!(matches!(
        error,
        CreateError::OtherContext {
            other: "completion channel",
            ..
        }
    ));
    let (mine, theirs) = (
        one.create_cq(16, None).unwrap(),
        two.create_cq(16, None).unwrap(),
    );
    let error = one
        .alloc_pd()
        .unwrap()
        .create_qp(&QueuePairInit::new(&mine, &theirs))
        .unwrap_err();
    assert!(matches!(
        error,
        CreateError::OtherContext {
            other: "completion queue",
            ..
        }
    ));
}

#[test]
fn failures_keep_the_systems_error() {
    let context = fake::open();
    let error = context.create_cq(0, None).unwrap_err();
    assert!(error.to_string().contains("ibv_create_cq(0)"));
    assert_eq!(error.source().unwrap().to_string(), os_error(libc::EINVAL));
    let error = context.query_port(2).unwrap_err();
    assert!(error.to_string().contains("ibv_query_port(2)") && error.to_string().contains("fake0"));
    let error = context.alloc_memory(0).unwrap_err();
    assert!(matches!(error, MemoryError::Allocate { len: 0, .. }));
    let pd = context.alloc_pd().unwrap();
    let access = AccessFlags::from_bits_retain(ffi::IBV_ACCESS_MW_BIND);
    let error = pd
        .reg_memory(&context.alloc_memory(8).unwrap(), access)
        .unwrap_err();
    assert_eq!(
        error.source().unwrap().to_string(),
        os_error(libc::EOPNOTSUPP)
    );
}

fn os_error(code: i32) -> String {
    std::io::Error::from_raw_os_error(code).to_string()
}

#[test]
fn an_event_names_its_queue_and_is_acknowledged_once() {
    let context = fake::open();
    let channel = context.create_comp_channel().unwrap();
    let cq = context.create_cq(16, Some(&channel)).unwrap();
    let other = context.create_cq(16, Some(&channel)).unwrap();
    assert!(channel.try_get_event().unwrap().is_none());
    assert!(
        channel
            .wait_timeout(Duration::from_millis(1))
            .unwrap()
            .is_none()
    );
    cq.req_notify(false).unwrap();
    fake::ring(cq.as_raw());
    let event = channel.wait().unwrap();
    assert!(event.is_of(&cq) && !event.is_of(&other) && *event.queue() == cq);
    assert_eq!(fake::with(|state| state.events), (1, 0));
    // The event keeps its queue alive, so that destroying cannot wait for it for ever.
    drop(cq);
    assert_eq!(destroyed(), [""; 0]);
    drop(event);
    assert_eq!(fake::with(|state| state.events), (1, 1));
    assert_eq!(destroyed(), ["cq"]);

    fake::ring(other.as_raw());
    let event = channel
        .wait_timeout(Duration::from_secs(60))
        .unwrap()
        .unwrap();
    assert!(event.is_of(&other));
}

#[test]
fn poll_writes_into_the_callers_completions() {
    let context = fake::open();
    let cq = context.create_cq(16, None).unwrap();
    let mut room: [WorkCompletion; 2] = Default::default();
    assert_eq!(cq.poll(&mut room).unwrap(), 0);
    for wr_id in [5, 6, 7] {
        let status = if wr_id == 6 {
            ffi::IBV_WC_REM_ACCESS_ERR
        } else {
            0
        };
        let wc = ffi::ibv_wc {
            wr_id,
            status,
            ..ffi::ibv_wc::zeroed()
        };
        fake::with(|state| state.completions.push_back(wc));
    }
    assert_eq!(cq.poll(&mut room).unwrap(), 2);
    assert_eq!([room[0].wr_id(), room[1].wr_id()], [5, 6]);
    assert!(room[0].is_ok() && !room[1].is_ok());
    assert_eq!(room[1].status(), WcStatus::RemAccessErr);
    assert_eq!(cq.poll(&mut []).unwrap(), 0);
    assert_eq!(cq.poll(&mut room).unwrap(), 1);
}

#[test]
fn connecting_gives_exactly_the_attributes_each_step_needs() {
    let context = fake::open();
    let cq = context.create_cq(16, None).unwrap();
    let qp = context
        .alloc_pd()
        .unwrap()
        .create_qp(&QueuePairInit::new(&cq, &cq))
        .unwrap();
    let path = PathOptions {
        gid_index: 3,
        max_rd_atomic: 16,
        ..PathOptions::default()
    };
    let local = qp.endpoint(&path, 0xff12_3456).unwrap();
    assert_eq!(
        (local.qp_num, local.psn, local.mtu),
        (0x11, 0x12_3456, ffi::IBV_MTU_2048)
    );
    assert_eq!(local.gid.to_string(), "::ffff:127.0.0.1");

    let remote = QueuePairEndpoint {
        qp_num: 0x22,
        psn: 0x0100_0001,
        mtu: ffi::IBV_MTU_4096,
        ..local
    };
    qp.to_init(AccessFlags::REMOTE_READ, 1).unwrap();
    qp.to_rtr(&remote, &path).unwrap();
    qp.to_rts(local.psn, &path).unwrap();
    assert_eq!(qp.state().unwrap(), QpState::Rts);

    let steps = fake::with(|state| state.modified.clone());
    let masks: Vec<_> = steps
        .iter()
        .map(|(mask, _)| QpAttrMask::from_bits_retain(*mask))
        .collect();
    use QpAttrMask as M;
    assert_eq!(
        masks[0],
        M::STATE | M::PKEY_INDEX | M::PORT | M::ACCESS_FLAGS
    );
    assert_eq!(
        masks[1],
        M::STATE
            | M::AV
            | M::PATH_MTU
            | M::DEST_QPN
            | M::RQ_PSN
            | M::MAX_DEST_RD_ATOMIC
            | M::MIN_RNR_TIMER
    );
    assert_eq!(
        masks[2],
        M::STATE | M::SQ_PSN | M::TIMEOUT | M::RETRY_CNT | M::RNR_RETRY | M::MAX_QP_RD_ATOMIC
    );
    let rtr = steps[1].1;
    assert_eq!(
        (rtr.path_mtu, rtr.rq_psn, rtr.dest_qp_num),
        (ffi::IBV_MTU_2048, 1, 0x22)
    );
    assert_eq!((rtr.ah_attr.is_global, rtr.ah_attr.grh.sgid_index), (1, 3));
    // The fake device allows 4 as target and 300 as initiator.
    assert_eq!((rtr.max_dest_rd_atomic, steps[2].1.max_rd_atomic), (4, 16));

    fake::with(|state| state.busy.push("modify"));
    let error = qp.to_err().unwrap_err();
    assert!(
        error
            .to_string()
            .contains("from Rts to Err with QpAttrMask(STATE)"),
        "{error}"
    );
}

#[test]
fn the_gid_chosen_is_the_first_ipv4_mapped_one() {
    let context = fake::open();
    let (index, gid) = context.choose_gid(1).unwrap();
    assert_eq!((index, gid.to_string()), (3, "::ffff:127.0.0.1".to_owned()));
    assert!(context.query_gid(1, 1).unwrap().is_zero());
    assert!(context.query_gid(1, 300).is_err());
}

#[test]
fn a_device_is_known_by_name_and_number() {
    let device = fake::devices().remove(0);
    assert_eq!((device.name().as_str(), device.guid()), ("fake0", 0x0102));
    assert!(!device.is_software());
    let error = device.open_with(&soft::Options::default()).unwrap_err();
    assert!(matches!(error, DeviceError::NotSoftware { .. }));
    let context = device.open().unwrap();
    assert_eq!(context.query_device().unwrap().phys_port_cnt, 1);
    assert_eq!(context.device_name(), "fake0");
}

#[test]
fn handles_may_be_used_from_any_thread() {
    fn assert_both<T: Send + Sync>() {}
    assert_both::<Context>();
    assert_both::<ProtectionDomain>();
    assert_both::<CompletionChannel>();
    assert_both::<CompletionQueue>();
    assert_both::<CompletionEvent>();
    assert_both::<HostMemory>();
    assert_both::<MemoryRegion>();
    assert_both::<QueuePair>();
    assert_both::<DeregisterError>();
}

#[test]
fn every_status_and_opcode_of_c_has_a_name() {
    for status in 0..=ffi::IBV_WC_TM_RNDV_INCOMPLETE {
        let status = WcStatus::from(status);
        assert!(!matches!(status, WcStatus::Other(_)) && !status.to_string().is_empty());
    }
    assert_eq!(WcStatus::from(99), WcStatus::Other(99));
    assert_eq!(
        WcStatus::from(99).to_string(),
        "unknown completion status 99"
    );
    assert_eq!(WcOpcode::from(ffi::IBV_WC_RECV), WcOpcode::Recv);
    assert_eq!(
        WcOpcode::from(ffi::IBV_WC_TSO),
        WcOpcode::Other(ffi::IBV_WC_TSO)
    );
}

#[test]
fn an_asynchronous_event_is_acknowledged_once_and_names_its_object() {
    let context = fake::open();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
    let other = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
    let element = ffi::ibv_async_event_element { qp: qp.as_raw() };
    let raw = |event_type, element| ffi::ibv_async_event {
        element,
        event_type,
    };
    assert!(context.try_get_async_event().unwrap().is_none());
    let nothing = context.next_async_event_timeout(Duration::ZERO);
    assert!(nothing.unwrap().is_none());

    fake::raise(raw(ffi::IBV_EVENT_QP_FATAL, element));
    let event = context.next_async_event().unwrap();
    assert_eq!(*event.kind(), AsyncEventKind::QpFatal(qp.qp_num()));
    assert!(event.is_of(&qp) && !event.is_of(&other));
    assert_eq!(fake::with(|state| state.async_events), (1, 0));
    drop(event);
    assert_eq!(fake::with(|state| state.async_events), (1, 1));

    let element = ffi::ibv_async_event_element { cq: cq.as_raw() };
    fake::raise(raw(ffi::IBV_EVENT_CQ_ERR, element));
    let event = context.try_get_async_event().unwrap().unwrap();
    assert_eq!(*event.kind(), AsyncEventKind::CqErr(cq.clone()));
    // The event keeps its queue alive.
    drop((qp, other, cq));
    assert!(!destroyed().contains(&"cq"));
    drop(event);
    assert_eq!(fake::with(|state| state.async_events), (2, 2));
    assert!(destroyed().contains(&"cq"));

    let element = ffi::ibv_async_event_element { port_num: 1 };
    fake::raise(raw(ffi::IBV_EVENT_PORT_ERR, element));
    let event = context.next_async_event().unwrap();
    assert_eq!(*event.kind(), AsyncEventKind::PortErr(1));
}

#[test]
fn a_shared_receive_queue_lives_as_long_as_it_is_used() {
    let context = fake::open();
    let pd = context.alloc_pd().unwrap();
    let cq = context.create_cq(16, None).unwrap();
    let srq = pd.create_srq(5, 1).unwrap();
    assert_eq!((srq.max_wr(), srq.max_sge()), (8, 1));
    srq.set_limit(16).unwrap();
    assert!(srq.set_limit(17).is_err());
    assert_eq!(srq.query().unwrap().srq_limit, 3);
    let init = QueuePairInit {
        srq: Some(&srq),
        ..QueuePairInit::new(&cq, &cq)
    };
    let qp = pd.create_qp(&init).unwrap();
    assert_eq!(qp.srq(), Some(&srq));
    let stranger = fake::open().alloc_pd().unwrap().create_srq(5, 1).unwrap();
    let init = QueuePairInit {
        srq: Some(&stranger),
        ..init
    };
    let error = pd.create_qp(&init).unwrap_err();
    assert!(matches!(error, CreateError::OtherContext { .. }));
    drop(stranger);
    let before = destroyed().len();

    let element = ffi::ibv_async_event_element { srq: srq.as_raw() };
    let event_type = ffi::IBV_EVENT_SRQ_LIMIT_REACHED;
    fake::raise(ffi::ibv_async_event {
        element,
        event_type,
    });
    let event = context.next_async_event().unwrap();
    assert_eq!(*event.kind(), AsyncEventKind::SrqLimitReached(srq.clone()));
    drop((srq, pd, cq, qp));
    assert_eq!(destroyed()[before..], ["qp", "cq"]);
    drop(event);
    assert_eq!(destroyed()[before..], ["qp", "cq", "srq", "pd"]);
}

#[test]
fn a_resized_queue_tells_its_new_size() {
    let context = fake::open();
    let cq = context.create_cq(16, None).unwrap();
    cq.resize(20).unwrap();
    assert_eq!(cq.capacity(), 40);
    fake::with(|state| state.busy.push("resize"));
    let error = cq.resize(3).unwrap_err();
    assert_eq!(error.cqe, 3);
    assert_eq!(error.source.raw_os_error(), Some(libc::EINVAL));
    assert!(error.to_string().contains("ibv_resize_cq to 3 entries"));
    assert_eq!(cq.capacity(), 40);
}

#[test]
fn partition_keys_are_in_host_order() {
    let context = fake::open();
    assert_eq!(context.query_pkey(1, 0).unwrap(), 0x8001);
    let error = context.query_pkey(1, 3).unwrap_err();
    assert!(error.to_string().contains("ibv_query_pkey(1, 3)"));
}
