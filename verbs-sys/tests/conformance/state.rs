//! The state machine of a queue pair, and which attributes each transition needs and takes.

use verbs_sys::{
    CompletionQueue, Context, QpAttrMask, QpState, QueuePair, QueuePairError, QueuePairInit,
    ffi::{self, ibv_qp_attr},
    find_device,
};

/// A queue pair in RESET, and attributes that connect it to itself.
fn fresh() -> (QueuePair, ibv_qp_attr) {
    let context = open();
    let (qp, _) = queue_pair(&context);
    let (gid_index, gid) = context.choose_gid(1).expect("no address");
    let mut attr = ibv_qp_attr {
        port_num: 1,
        qp_access_flags: ffi::IBV_ACCESS_REMOTE_WRITE | ffi::IBV_ACCESS_REMOTE_READ,
        path_mtu: ffi::IBV_MTU_1024,
        dest_qp_num: qp.qp_num(),
        rq_psn: 0x12_3456,
        sq_psn: 0x12_3456,
        max_dest_rd_atomic: 1,
        max_rd_atomic: 1,
        min_rnr_timer: 12,
        timeout: 14,
        retry_cnt: 6,
        rnr_retry: 5,
        ..ibv_qp_attr::zeroed()
    };
    attr.ah_attr.port_num = 1;
    attr.ah_attr.is_global = 1;
    attr.ah_attr.grh.dgid = gid.into();
    attr.ah_attr.grh.sgid_index = gid_index;
    attr.ah_attr.grh.hop_limit = 1;
    (qp, attr)
}

fn open() -> Context {
    let device = find_device(None).expect("no device");
    device.open().expect("the device does not open")
}

fn queue_pair(context: &Context) -> (QueuePair, CompletionQueue) {
    let cq = context.create_cq(16, None).expect("no completion queue");
    let pd = context.alloc_pd().expect("no protection domain");
    let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq));
    (qp.expect("no queue pair"), cq)
}

/// Each step on the way up, with the attributes that it needs beside the state and those that it
/// also takes.
fn steps() -> [(QpState, u32, QpAttrMask, QpAttrMask); 3] {
    let init = QpAttrMask::PKEY_INDEX | QpAttrMask::PORT | QpAttrMask::ACCESS_FLAGS;
    let rtr = QpAttrMask::AV
        | QpAttrMask::PATH_MTU
        | QpAttrMask::DEST_QPN
        | QpAttrMask::RQ_PSN
        | QpAttrMask::MAX_DEST_RD_ATOMIC
        | QpAttrMask::MIN_RNR_TIMER;
    let rts = QpAttrMask::SQ_PSN
        | QpAttrMask::TIMEOUT
        | QpAttrMask::RETRY_CNT
        | QpAttrMask::RNR_RETRY
        | QpAttrMask::MAX_QP_RD_ATOMIC;
    let rtr_too = QpAttrMask::ALT_PATH | QpAttrMask::ACCESS_FLAGS | QpAttrMask::PKEY_INDEX;
    let rts_too = QpAttrMask::CUR_STATE
        | QpAttrMask::ALT_PATH
        | QpAttrMask::ACCESS_FLAGS
        | QpAttrMask::MIN_RNR_TIMER
        | QpAttrMask::PATH_MIG_STATE;
    [
        (QpState::Init, ffi::IBV_QPS_INIT, init, QpAttrMask::empty()),
        (QpState::Rtr, ffi::IBV_QPS_RTR, rtr, rtr_too),
        (QpState::Rts, ffi::IBV_QPS_RTS, rts, rts_too),
    ]
}

/// The attributes of the classic call; kernels know of more, and refuse them in another way.
fn classic() -> QpAttrMask {
    QpAttrMask::from_bits_retain((ffi::IBV_QP_DEST_QPN << 1) - 1)
}

/// Goes up by so many steps.
fn up(qp: &QueuePair, attr: &mut ibv_qp_attr, count: usize) {
    for (state, number, needed, _) in steps().into_iter().take(count) {
        attr.qp_state = number;
        qp.modify(attr, needed | QpAttrMask::STATE)
            .expect("no way up");
        assert_eq!(qp.state().expect("no state"), state);
    }
}

#[track_caller]
fn assert_invalid(qp: &QueuePair, attr: &ibv_qp_attr, mask: QpAttrMask) {
    let before = qp.state().expect("no state");
    let error = qp.modify(attr, mask).expect_err("was not refused");
    let QueuePairError::Modify { source, .. } = error else {
        panic!("another error: {error}");
    };
    assert_eq!(source.raw_os_error(), Some(libc::EINVAL), "with {mask:?}");
    assert_eq!(qp.state().expect("no state"), before);
}

#[test]
fn a_queue_pair_goes_up_state_by_state() {
    let (qp, mut attr) = fresh();
    assert_eq!(qp.state().expect("no state"), QpState::Reset);
    up(&qp, &mut attr, 3);
    let all = qp.query(classic()).expect("no attributes");
    assert_eq!(all.dest_qp_num, qp.qp_num());
    assert_eq!((all.sq_psn, all.rq_psn), (0x12_3456, 0x12_3456));
    assert_eq!(all.path_mtu, ffi::IBV_MTU_1024);
    assert_eq!((all.retry_cnt, all.rnr_retry, all.timeout), (6, 5, 14));
    assert_eq!(all.min_rnr_timer, 12);
    assert_eq!((all.max_rd_atomic, all.max_dest_rd_atomic), (1, 1));
    assert_eq!(all.qp_access_flags & 7, attr.qp_access_flags);
    assert_eq!(all.port_num, 1);
    assert_eq!(all.ah_attr.is_global, 1);
    assert_eq!(all.ah_attr.grh.sgid_index, attr.ah_attr.grh.sgid_index);
}

#[test]
fn each_step_needs_its_attributes_and_takes_no_others() {
    for (below, (_, number, needed, also)) in steps().into_iter().enumerate() {
        let (qp, mut attr) = fresh();
        up(&qp, &mut attr, below);
        attr.qp_state = number;
        for missing in needed.iter() {
            assert_invalid(&qp, &attr, (needed | QpAttrMask::STATE).difference(missing));
        }
        for extra in classic()
            .difference(needed | also | QpAttrMask::STATE)
            .iter()
        {
            assert_invalid(&qp, &attr, needed | QpAttrMask::STATE | extra);
        }
        qp.modify(&attr, needed | QpAttrMask::STATE)
            .expect("no way up");
    }
}

#[test]
fn no_step_can_be_left_out() {
    let masks = steps().map(|step| (step.1, step.2 | QpAttrMask::STATE));
    for (above, skipped) in [(0, 1), (0, 2), (1, 2), (2, 0), (2, 1), (3, 0), (3, 1)] {
        let (qp, mut attr) = fresh();
        up(&qp, &mut attr, above);
        attr.qp_state = masks[skipped].0;
        assert_invalid(&qp, &attr, masks[skipped].1);
    }
}

#[test]
fn every_state_leads_to_error_and_reset() {
    for below in 0..=3 {
        let (qp, mut attr) = fresh();
        up(&qp, &mut attr, below);
        attr.qp_state = ffi::IBV_QPS_ERR;
        if below == 0 {
            // As the kernel has it; the standard is silent.
            assert_invalid(&qp, &attr, QpAttrMask::STATE);
        } else {
            qp.modify(&attr, QpAttrMask::STATE).expect("no way to ERR");
            assert_eq!(qp.state().expect("no state"), QpState::Err);
            qp.modify(&attr, QpAttrMask::STATE)
                .expect("ERR is not left");
            for (number, needed) in steps().map(|step| (step.1, step.2)) {
                attr.qp_state = number;
                assert_invalid(&qp, &attr, needed | QpAttrMask::STATE);
            }
        }
        attr.qp_state = ffi::IBV_QPS_RESET;
        qp.modify(&attr, QpAttrMask::STATE)
            .expect("no way to RESET");
        assert_eq!(qp.state().expect("no state"), QpState::Reset);
        up(&qp, &mut attr, 3);
    }
}

#[test]
fn sending_can_be_stopped_and_resumed() {
    let (qp, mut attr) = fresh();
    up(&qp, &mut attr, 3);
    for _ in 0..2 {
        attr.qp_state = ffi::IBV_QPS_SQD;
        qp.modify(&attr, QpAttrMask::STATE).expect("no way to SQD");
        assert_eq!(qp.state().expect("no state"), QpState::Sqd);
        attr.qp_state = ffi::IBV_QPS_RTS;
        qp.modify(&attr, QpAttrMask::STATE).expect("no way back");
        assert_eq!(qp.state().expect("no state"), QpState::Rts);
    }
}

#[test]
fn access_can_be_changed_on_the_way() {
    let (qp, mut attr) = fresh();
    up(&qp, &mut attr, 3);
    attr.qp_access_flags = ffi::IBV_ACCESS_REMOTE_ATOMIC;
    qp.modify(&attr, QpAttrMask::ACCESS_FLAGS)
        .expect("no change");
    let all = qp.query(QpAttrMask::ACCESS_FLAGS).expect("no attributes");
    assert_eq!(all.qp_access_flags & 0xe, ffi::IBV_ACCESS_REMOTE_ATOMIC);
    assert_eq!(qp.state().expect("no state"), QpState::Rts);
}

/// A step, counted from 0, and how to spoil its attributes.
type Case = (usize, fn(&mut ibv_qp_attr));

#[test]
fn values_out_of_range_are_refused() {
    // Not every device checks those of the second list.
    let (every, software): (&[Case], &[Case]) = (
        &[
            (0, |attr| attr.port_num = 0),
            (0, |attr| attr.port_num = 9),
            (1, |attr| attr.path_mtu = 77),
            (1, |attr| attr.ah_attr.port_num = 9),
            (2, |attr| attr.timeout = 32),
        ],
        &[
            (0, |attr| attr.pkey_index = 0xffff),
            (1, |attr| attr.path_mtu = 0),
            (1, |attr| attr.ah_attr.is_global = 0),
            (1, |attr| attr.dest_qp_num = 1 << 24),
            (1, |attr| attr.min_rnr_timer = 32),
            (1, |attr| attr.max_dest_rd_atomic = 255),
            (2, |attr| attr.retry_cnt = 8),
            (2, |attr| attr.rnr_retry = 8),
            (2, |attr| attr.max_rd_atomic = 255),
        ],
    );
    let is_software = open().device().is_software();
    let mut cases = every.to_vec();
    cases.extend_from_slice(if is_software { software } else { &[] });
    let mut accepted = Vec::new();
    for (case, (below, spoil)) in cases.into_iter().enumerate() {
        let (qp, mut attr) = fresh();
        up(&qp, &mut attr, below);
        let (_, number, needed, _) = steps()[below];
        attr.qp_state = number;
        let good = attr;
        spoil(&mut attr);
        let before = qp.state().expect("no state");
        match qp.modify(&attr, needed | QpAttrMask::STATE) {
            Ok(()) => accepted.push(case),
            Err(QueuePairError::Modify { source, .. }) => {
                assert_eq!(source.raw_os_error(), Some(libc::EINVAL), "case {case}");
                assert_eq!(qp.state().expect("no state"), before);
                let result = qp.modify(&good, needed | QpAttrMask::STATE);
                result.expect("no way up");
            }
            Err(other) => panic!("another error: {other}"),
        }
    }
    assert!(accepted.is_empty(), "accepted: {accepted:?}");
}

#[test]
fn requests_are_refused_before_their_state() {
    let (qp, mut attr) = fresh();
    let mut send = ffi::ibv_send_wr {
        opcode: ffi::IBV_WR_SEND,
        ..ffi::ibv_send_wr::zeroed()
    };
    let mut recv = ffi::ibv_recv_wr::zeroed();
    // SAFETY: a list of one request without elements.
    let refused = unsafe { qp.post_recv(&mut recv) }.expect_err("a receive in RESET");
    assert_eq!(refused.source.raw_os_error(), Some(libc::EINVAL));
    // rdma_rxe does not name the request, here and below.
    assert!(refused.bad_wr.is_null() || std::ptr::eq(refused.bad_wr, &recv));
    for below in 0..3 {
        // SAFETY: as above.
        let refused = unsafe { qp.post_send(&mut send) }.expect_err("a send before RTS");
        assert_eq!(refused.source.raw_os_error(), Some(libc::EINVAL));
        assert!(refused.bad_wr.is_null() || std::ptr::eq(refused.bad_wr, &send));
        let (_, number, needed, _) = steps()[below];
        attr.qp_state = number;
        qp.modify(&attr, needed | QpAttrMask::STATE)
            .expect("no way up");
        // SAFETY: as above.
        unsafe { qp.post_recv(&mut recv) }.expect("a receive from INIT on");
    }
}

/// As many READs and atomics may be outstanding each way as the device says, and no more.
#[test]
fn depths_of_reads_are_as_the_device_says() {
    let limits = open().query_device().expect("no attributes");
    let as_target = u8::try_from(limits.max_qp_rd_atom).unwrap_or(u8::MAX);
    let as_initiator = u8::try_from(limits.max_qp_init_rd_atom).unwrap_or(u8::MAX);
    for (target, initiator) in [(1, 1), (2, 4), (as_target, as_initiator)] {
        let (qp, mut attr) = fresh();
        (attr.max_dest_rd_atomic, attr.max_rd_atomic) = (target, initiator);
        up(&qp, &mut attr, 3);
        let all = qp.query(classic()).expect("no attributes");
        assert_eq!(all.max_dest_rd_atomic, target);
        assert_eq!(all.max_rd_atomic, initiator);
    }
    // rdma_rxe takes any.
    if !open().device().is_software() {
        return;
    }
    for (below, field) in [(1, as_target), (2, as_initiator)] {
        let too_many = field + 1;
        let (qp, mut attr) = fresh();
        up(&qp, &mut attr, below);
        let before = attr;
        (attr.max_dest_rd_atomic, attr.max_rd_atomic) = (too_many, too_many);
        let (_, number, needed, _) = steps()[below];
        attr.qp_state = number;
        assert_invalid(&qp, &attr, needed | QpAttrMask::STATE);
        attr = ibv_qp_attr {
            qp_state: number,
            ..before
        };
        qp.modify(&attr, needed | QpAttrMask::STATE)
            .expect("no way up");
    }
    // While sending is stopped they can be changed.
    let (qp, mut attr) = fresh();
    up(&qp, &mut attr, 3);
    attr.qp_state = ffi::IBV_QPS_SQD;
    qp.modify(&attr, QpAttrMask::STATE).expect("no way to SQD");
    (attr.max_dest_rd_atomic, attr.max_rd_atomic) = (7, 9);
    let depths = QpAttrMask::MAX_DEST_RD_ATOMIC | QpAttrMask::MAX_QP_RD_ATOMIC;
    qp.modify(&attr, depths).expect("no change");
    let all = qp.query(classic()).expect("no attributes");
    assert_eq!((all.max_dest_rd_atomic, all.max_rd_atomic), (7, 9));
    attr.max_rd_atomic = as_initiator + 1;
    assert_invalid(&qp, &attr, depths);
}
