//! What the device says about itself, held against what it does. How many objects there can be is
//! tested elsewhere (`tests/limits.rs`), since they are a process's.

use libc::EINVAL;
use verbs_sys::{
    AccessFlags, Context, CreateError, MwType, QpAttrMask, QpState, QpType, QueuePairInit,
    WcStatus,
    ffi::{self, ibv_device_attr, ibv_qp_attr},
    find_device,
};

use crate::support::{QpSetup, Queue, Request, say_left_out, scripts};

fn open() -> (Context, ibv_device_attr) {
    let device = find_device(None).expect("no device");
    let context = device.open().expect("the device does not open");
    let limits = context.query_device().expect("no attributes");
    (context, limits)
}

/// The software device, or nothing on others.
fn software() -> Option<(Context, ibv_device_attr)> {
    let found = open();
    if found.0.device().is_software() {
        return Some(found);
    }
    say_left_out();
    None
}

/// Sizes of queue pairs at the limits, and one beyond.
#[test]
fn queue_pairs_are_as_large_as_promised() {
    let (context, limits) = open();
    let is_software = context.device().is_software();
    let pd = context.alloc_pd().expect("no protection domain");
    let cq = context.create_cq(16, None).expect("no queue");
    let (max_wr, max_sge) = (limits.max_qp_wr as u32, limits.max_sge as u32);
    let least = QueuePairInit::new(&cq, &cq);
    let most = QueuePairInit {
        max_send_sge: max_sge,
        max_recv_sge: max_sge,
        ..least.clone()
    };
    let qp = pd.create_qp(&most).expect("the most elements are refused");
    assert!(qp.cap().max_send_sge >= max_sge && qp.cap().max_recv_sge >= max_sge);
    if is_software {
        let most = QueuePairInit {
            max_send_wr: max_wr,
            max_recv_wr: max_wr,
            ..least.clone()
        };
        let qp = pd.create_qp(&most).expect("the most requests are refused");
        assert_eq!(
            (qp.cap().max_send_wr, qp.cap().max_recv_wr),
            (max_wr, max_wr)
        );
    }
    for which in 0..4 {
        let mut init = least.clone();
        let (size, most) = match which {
            0 => (&mut init.max_send_wr, max_wr),
            1 => (&mut init.max_recv_wr, max_wr),
            2 => (&mut init.max_send_sge, max_sge),
            _ => (&mut init.max_recv_sge, max_sge),
        };
        *size = most + 1;
        let Err(CreateError::Refused { source, .. }) = pd.create_qp(&init) else {
            panic!("more than the limit, or refused in another way");
        };
        assert_eq!(source.raw_os_error(), Some(EINVAL));
    }
}

/// A queue pair has what it was told, and says so.
#[test]
fn a_queue_pair_tells_what_it_has() {
    let (context, _) = open();
    let pd = context.alloc_pd().expect("no protection domain");
    let cq = context.create_cq(64, None).expect("no queue");
    for qp_type in [QpType::Rc, QpType::Uc, QpType::Ud] {
        let init = QueuePairInit {
            qp_type,
            max_send_wr: 5,
            max_recv_wr: 6,
            max_send_sge: 2,
            max_recv_sge: 3,
            max_inline_data: 32,
            ..QueuePairInit::new(&cq, &cq)
        };
        let qp = pd.create_qp(&init).expect("no queue pair");
        let cap = qp.cap();
        assert!(cap.max_send_wr >= 5 && cap.max_recv_wr >= 6 && cap.max_inline_data >= 32);
        assert!(cap.max_send_sge >= 2 && cap.max_recv_sge >= 3);
        let asked = qp
            .query(QpAttrMask::CAP | QpAttrMask::STATE)
            .expect("no attributes");
        assert_eq!(QpState::from(asked.qp_state), QpState::Reset);
        let told = asked.cap;
        assert!(told.max_send_wr >= 5 && told.max_recv_wr >= 6);
        assert!(told.max_send_sge >= 2 && told.max_recv_sge >= 3);
        if context.device().is_software() {
            let sizes =
                |cap: ffi::ibv_qp_cap| (cap.max_send_wr, cap.max_recv_wr, cap.max_inline_data);
            assert_eq!((sizes(cap), sizes(told)), ((5, 6, 32), (5, 6, 32)));
            let elements = |cap: ffi::ibv_qp_cap| (cap.max_send_sge, cap.max_recv_sge);
            assert_eq!((elements(cap), elements(told)), ((2, 3), (2, 3)));
        }
        assert!((1..1 << 24).contains(&qp.qp_num()));
    }
}

/// The tables of addresses and of partitions have as many entries as the port says.
#[test]
fn tables_are_as_long_as_the_port_says() {
    let (context, limits) = open();
    for port in 1..=limits.phys_port_cnt {
        let attr = context.query_port(port).expect("no port");
        let gids = u32::try_from(attr.gid_tbl_len).expect("a negative length");
        let pkeys = u32::from(attr.pkey_tbl_len);
        assert!(gids > 0 && pkeys > 0 && pkeys <= u32::from(limits.max_pkeys));
        for index in 0..pkeys {
            context.query_pkey(port, index).expect("no partition key");
        }
        assert!(context.query_pkey(port, pkeys).is_err());
        assert!(context.query_gid(port, gids).is_err());
        // The default partition, whose key has all the lower bits.
        assert_eq!(
            context.query_pkey(port, 0).expect("no key") & 0x7fff,
            0x7fff
        );
        if context.device().is_software() {
            let entry = |index| context.query_gid(port, index).expect("no address");
            assert!((0..gids).all(|index| !entry(index).is_zero()));
        }
    }
    let beyond = limits.phys_port_cnt + 1;
    assert!(context.query_pkey(beyond, 0).is_err() && context.query_pkey(0, 0).is_err());
    assert!(context.query_gid(beyond, 0).is_err() && context.query_port(beyond).is_err());
}

/// What the device says it does beyond the least, it does, and what it does it says.
#[test]
fn capabilities_are_what_the_device_has() {
    let Some((context, limits)) = software() else {
        return;
    };
    let has = |flag| limits.device_cap_flags & flag != 0;
    let pd = context.alloc_pd().expect("no protection domain");
    let cq = context.create_cq(16, None).expect("no queue");
    // A changed size of a shared receive queue.
    let srq = pd.create_srq(1, 1).expect("no shared receive queue");
    assert_eq!(srq.resize(2).is_ok(), has(ffi::IBV_DEVICE_SRQ_RESIZE));
    // Windows of each type; those of type 2 are either A or B.
    assert_eq!(
        pd.alloc_mw(MwType::Type1).is_ok(),
        has(ffi::IBV_DEVICE_MEM_WINDOW)
    );
    let has_2a = has(ffi::IBV_DEVICE_MEM_WINDOW_TYPE_2A);
    let has_2b = has(ffi::IBV_DEVICE_MEM_WINDOW_TYPE_2B);
    assert_eq!(pd.alloc_mw(MwType::Type2).is_ok(), has_2a != has_2b);
    assert!(!(has_2a && has_2b));
    // The state that a change starts from.
    let qp = pd
        .create_qp(&QueuePairInit::new(&cq, &cq))
        .expect("no queue pair");
    qp.to_init(AccessFlags::empty(), 1).expect("no way to INIT");
    let mut attr = ibv_qp_attr::zeroed();
    attr.cap = qp.cap();
    attr.cap.max_send_wr += 1;
    // Queues of queue pairs keep their sizes.
    let resized = qp.modify(&attr, QpAttrMask::CAP);
    assert_eq!(resized.is_ok(), has(ffi::IBV_DEVICE_RESIZE_MAX_WR));
    // Extended reliable connections have tests of their own, as they are for C programs alone.
    assert!(has(ffi::IBV_DEVICE_XRC));
    // Raw packets and the rest are not there.
    assert!(!has(ffi::IBV_DEVICE_RAW_MULTI));
    assert!(!has(ffi::IBV_DEVICE_UD_IP_CSUM) && !has(ffi::IBV_DEVICE_MANAGED_FLOW_STEERING));
    assert_eq!(
        (limits.max_mcast_grp, limits.max_ee, limits.max_fmr),
        (0, 0, 0)
    );
}

scripts! {
    /// The longest message is as the port says. Kernel devices differ in where they find out.
    fn the_longest_message_is_as_the_port_says(ends: &mut Ends) {
        if ends.leaves_out() {
            return;
        }
        let most = open().0.query_port(1).expect("no port").max_msg_sz;
        let link = ends.link_with(QpSetup::default(), QpSetup::default());
        // Nobody has so much memory: the length is found out first.
        let mut half = link.a_mem.sge(0, 8);
        half.len = most / 2 + 1;
        ends.a.post_send(link.a, &[Request::write(&[half, half], link.b_mem.at(0)).id(1)]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::LocLenErr);
    }
}
