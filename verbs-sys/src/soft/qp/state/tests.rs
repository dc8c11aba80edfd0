use super::*;

const LIMITS: Limits = Limits {
    ports: 1,
    gids: 2,
    pkeys: 1,
    mtu: ffi::IBV_MTU_4096,
    max_rd_atomic: 16,
    max_dest_rd_atomic: 32,
};

/// Attributes that are all in range.
fn good() -> ibv_qp_attr {
    let mut attr = ibv_qp_attr {
        path_mtu: ffi::IBV_MTU_1024,
        port_num: 1,
        alt_port_num: 1,
        rq_psn: u32::MAX,
        sq_psn: u32::MAX,
        ..ibv_qp_attr::zeroed()
    };
    attr.ah_attr.is_global = 1;
    attr.ah_attr.port_num = 1;
    attr.alt_ah_attr = attr.ah_attr;
    attr
}

fn check(
    qp_type: ibv_qp_type,
    from: ibv_qp_state,
    to: ibv_qp_state,
    mask: ibv_qp_attr_mask,
) -> Result<ibv_qp_state, ModifyError> {
    let attr = ibv_qp_attr {
        qp_state: to,
        cur_qp_state: from,
        ..good()
    };
    check_modify(qp_type, from, &attr, mask, &LIMITS)
}

const TYPES: [ibv_qp_type; 5] = [
    IBV_QPT_RC,
    IBV_QPT_UC,
    IBV_QPT_UD,
    IBV_QPT_XRC_SEND,
    IBV_QPT_XRC_RECV,
];
const STATES: std::ops::RangeInclusive<ibv_qp_state> = IBV_QPS_RESET..=IBV_QPS_ERR;

/// The transitions that the man page draws, each with the number of attributes that a reliable
/// connection must and may have.
const ARROWS: [(ibv_qp_state, ibv_qp_state, u32, u32); 21] = [
    (IBV_QPS_RESET, IBV_QPS_RESET, 0, 0),
    (IBV_QPS_RESET, IBV_QPS_INIT, 3, 0),
    (IBV_QPS_INIT, IBV_QPS_RESET, 0, 0),
    (IBV_QPS_INIT, IBV_QPS_INIT, 0, 3),
    (IBV_QPS_INIT, IBV_QPS_RTR, 6, 3),
    (IBV_QPS_INIT, IBV_QPS_ERR, 0, 0),
    (IBV_QPS_RTR, IBV_QPS_RESET, 0, 0),
    (IBV_QPS_RTR, IBV_QPS_RTS, 5, 5),
    (IBV_QPS_RTR, IBV_QPS_ERR, 0, 0),
    (IBV_QPS_RTS, IBV_QPS_RESET, 0, 0),
    (IBV_QPS_RTS, IBV_QPS_RTS, 0, 5),
    (IBV_QPS_RTS, IBV_QPS_SQD, 0, 1),
    (IBV_QPS_RTS, IBV_QPS_ERR, 0, 0),
    (IBV_QPS_SQD, IBV_QPS_RESET, 0, 0),
    (IBV_QPS_SQD, IBV_QPS_RTS, 0, 5),
    (IBV_QPS_SQD, IBV_QPS_SQD, 0, 12),
    (IBV_QPS_SQD, IBV_QPS_ERR, 0, 0),
    (IBV_QPS_SQE, IBV_QPS_RESET, 0, 0),
    (IBV_QPS_SQE, IBV_QPS_RTS, 0, 0),
    (IBV_QPS_SQE, IBV_QPS_ERR, 0, 0),
    (IBV_QPS_ERR, IBV_QPS_RESET, 0, 0),
];

#[test]
fn transitions_are_those_of_the_man_page() {
    for qp_type in TYPES {
        for from in STATES {
            for to in STATES {
                let drawn = ARROWS.iter().any(|arrow| (arrow.0, arrow.1) == (from, to))
                    || (from, to) == (IBV_QPS_ERR, IBV_QPS_ERR);
                let exists = rule(qp_type, from, to) != Err(ModifyError::Transition);
                assert_eq!(exists, drawn, "type {qp_type}, {from} to {to}");
            }
        }
    }
    for (from, to, required, optional) in ARROWS {
        let rule = rule(IBV_QPT_RC, from, to).unwrap();
        assert_eq!(rule.required.count_ones(), required, "{from} to {to}");
        assert_eq!(rule.optional.count_ones(), optional, "{from} to {to}");
    }
}

/// The masks that programs know by heart.
#[test]
fn a_connection_comes_up_with_the_usual_masks() {
    let init = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS;
    let unreliable = IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
    let rtr = unreliable | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
    let rts = IBV_QP_STATE
        | IBV_QP_TIMEOUT
        | IBV_QP_RETRY_CNT
        | IBV_QP_RNR_RETRY
        | IBV_QP_SQ_PSN
        | IBV_QP_MAX_QP_RD_ATOMIC;
    let datagram = IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_QKEY;
    let rows = [
        (IBV_QPT_RC, [init, rtr, rts]),
        (IBV_QPT_UC, [init, unreliable, IBV_QP_STATE | IBV_QP_SQ_PSN]),
        (
            IBV_QPT_UD,
            [datagram, IBV_QP_STATE, IBV_QP_STATE | IBV_QP_SQ_PSN],
        ),
    ];
    let xrc = [
        (IBV_QPT_XRC_SEND, [init, unreliable, rts]),
        (
            IBV_QPT_XRC_RECV,
            [init, rtr, IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_SQ_PSN],
        ),
    ];
    for (qp_type, masks) in rows.into_iter().chain(xrc) {
        for (mask, from) in masks.into_iter().zip(IBV_QPS_RESET..) {
            assert_eq!(check(qp_type, from, from + 1, mask), Ok(from + 1));
        }
    }
}

#[test]
fn every_single_missing_or_extra_attribute_is_refused() {
    for qp_type in TYPES {
        for from in STATES {
            for to in STATES {
                let Ok(rule) = rule(qp_type, from, to) else {
                    let refused = check(qp_type, from, to, IBV_QP_STATE);
                    assert_eq!(refused, Err(ModifyError::Transition));
                    continue;
                };
                let least = rule.required | IBV_QP_STATE;
                assert_eq!(check(qp_type, from, to, least), Ok(to));
                assert_eq!(check(qp_type, from, to, least | rule.optional), Ok(to));
                for bit in (0..32).map(|n| 1 << n).filter(|bit| *bit != IBV_QP_STATE) {
                    let expected = if rule.required & bit != 0 {
                        Err(ModifyError::Missing(bit))
                    } else if rule.optional & bit != 0 {
                        Ok(to)
                    } else {
                        Err(ModifyError::Extra(bit))
                    };
                    let got = check(qp_type, from, to, least ^ bit);
                    assert_eq!(
                        got, expected,
                        "type {qp_type}, {from} to {to}, bit {bit:#x}"
                    );
                }
            }
        }
    }
}

#[test]
fn without_a_state_in_the_mask_the_state_stays() {
    let attr = ibv_qp_attr {
        qp_state: IBV_QPS_ERR,
        ..good()
    };
    let got = check_modify(IBV_QPT_RC, IBV_QPS_RTS, &attr, IBV_QP_ACCESS_FLAGS, &LIMITS);
    assert_eq!(got, Ok(IBV_QPS_RTS));
    let got = check_modify(IBV_QPT_RC, IBV_QPS_RTR, &attr, IBV_QP_ACCESS_FLAGS, &LIMITS);
    assert_eq!(got, Err(ModifyError::Transition));
}

#[test]
fn the_current_state_must_be_as_said() {
    let mask = IBV_QP_STATE | IBV_QP_CUR_STATE;
    let mut attr = ibv_qp_attr {
        qp_state: IBV_QPS_RTS,
        cur_qp_state: IBV_QPS_SQE,
        ..good()
    };
    let got = check_modify(IBV_QPT_RC, IBV_QPS_SQD, &attr, mask, &LIMITS);
    assert_eq!(got, Err(ModifyError::CurrentState));
    attr.cur_qp_state = IBV_QPS_SQD;
    let got = check_modify(IBV_QPT_RC, IBV_QPS_SQD, &attr, mask, &LIMITS);
    assert_eq!(got, Ok(IBV_QPS_RTS));
}

#[test]
fn unknown_types_and_states_are_refused() {
    let other = check(
        ffi::IBV_QPT_RAW_PACKET,
        IBV_QPS_RESET,
        IBV_QPS_INIT,
        IBV_QP_STATE,
    );
    assert_eq!(other, Err(ModifyError::Type));
    for state in [ffi::IBV_QPS_UNKNOWN, 100] {
        let to = check(IBV_QPT_RC, IBV_QPS_RESET, state, IBV_QP_STATE);
        assert_eq!(to, Err(ModifyError::Transition));
        let from = check(IBV_QPT_RC, state, IBV_QPS_RESET, IBV_QP_STATE);
        assert_eq!(from, Err(ModifyError::Transition));
    }
}

/// The tests of rdma-core 55 give these on every device.
#[test]
fn access_for_requests_that_there_are_not_is_ignored() {
    let attr = ibv_qp_attr {
        qp_access_flags: ffi::IBV_ACCESS_REMOTE_READ
            | ffi::IBV_ACCESS_FLUSH_GLOBAL
            | ffi::IBV_ACCESS_FLUSH_PERSISTENT,
        ..good()
    };
    let got = check_modify(IBV_QPT_RC, IBV_QPS_RTS, &attr, IBV_QP_ACCESS_FLAGS, &LIMITS);
    assert_eq!(got, Ok(IBV_QPS_RTS));
}

type Spoil = fn(&mut ibv_qp_attr);

#[test]
fn values_out_of_range_are_refused_and_unused_ones_ignored() {
    let spoilers: [(ibv_qp_attr_mask, Spoil); 23] = [
        (IBV_QP_PORT, |attr| attr.port_num = 0),
        (IBV_QP_PORT, |attr| attr.port_num = 2),
        (IBV_QP_PKEY_INDEX, |attr| attr.pkey_index = 1),
        (IBV_QP_ACCESS_FLAGS, |attr| attr.qp_access_flags = 1 << 30),
        (IBV_QP_AV, |attr| attr.ah_attr.is_global = 0),
        (IBV_QP_AV, |attr| attr.ah_attr.port_num = 0),
        (IBV_QP_AV, |attr| attr.ah_attr.grh.sgid_index = 2),
        (IBV_QP_PATH_MTU, |attr| attr.path_mtu = 0),
        (IBV_QP_PATH_MTU, |attr| {
            attr.path_mtu = ffi::IBV_MTU_4096 + 1
        }),
        (IBV_QP_DEST_QPN, |attr| attr.dest_qp_num = 1 << 24),
        (IBV_QP_TIMEOUT, |attr| attr.timeout = 32),
        (IBV_QP_RETRY_CNT, |attr| attr.retry_cnt = 8),
        (IBV_QP_RNR_RETRY, |attr| attr.rnr_retry = 8),
        (IBV_QP_MIN_RNR_TIMER, |attr| attr.min_rnr_timer = 32),
        (IBV_QP_MAX_QP_RD_ATOMIC, |attr| attr.max_rd_atomic = 17),
        (IBV_QP_MAX_DEST_RD_ATOMIC, |attr| {
            attr.max_dest_rd_atomic = 33
        }),
        (IBV_QP_ALT_PATH, |attr| attr.alt_port_num = 0),
        (IBV_QP_ALT_PATH, |attr| attr.alt_timeout = 32),
        (IBV_QP_ALT_PATH, |attr| attr.alt_pkey_index = 1),
        (IBV_QP_ALT_PATH, |attr| attr.alt_ah_attr.port_num = 9),
        (IBV_QP_ALT_PATH, |attr| attr.alt_ah_attr.is_global = 0),
        (IBV_QP_ALT_PATH, |attr| attr.alt_ah_attr.grh.sgid_index = 9),
        (IBV_QP_PATH_MIG_STATE, |attr| attr.path_mig_state = 3),
    ];
    for (bit, spoil) in spoilers {
        let mut attr = good();
        spoil(&mut attr);
        let refused = check_values(&attr, bit, &LIMITS);
        assert!(matches!(refused, Err(ModifyError::Value(_))), "{bit:#x}");
        assert_eq!(check_values(&attr, !bit, &LIMITS), Ok(()), "{bit:#x}");
        assert_eq!(check_values(&good(), bit, &LIMITS), Ok(()), "{bit:#x}");
    }
}

#[test]
fn times_are_those_of_the_standard() {
    assert_eq!(rnr_timer(0), Duration::from_micros(655_360));
    assert_eq!(rnr_timer(1), Duration::from_micros(10));
    assert_eq!(rnr_timer(12), Duration::from_micros(640));
    assert_eq!(rnr_timer(31), Duration::from_micros(491_520));
    for value in 1..31 {
        let (this, next) = (rnr_timer(value), rnr_timer(value + 1));
        assert!(this < next && next <= 2 * this, "value {value}");
    }
    assert_eq!(rnr_timer(32), rnr_timer(0));
    assert_eq!(ack_timeout(0), None);
    assert_eq!(ack_timeout(1), Some(Duration::from_nanos(8_192)));
    assert_eq!(ack_timeout(14), Some(Duration::from_nanos(67_108_864)));
    assert_eq!(
        ack_timeout(31),
        Some(Duration::from_nanos(8_796_093_022_208))
    );
}
