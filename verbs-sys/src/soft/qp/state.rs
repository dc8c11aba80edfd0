//! The state machine of a queue pair: which transitions there are, which attributes each needs and
//! allows, and which values they may have; ibv_modify_qp(3), IBTA volume 1, chapter 10.3.
//!
//! Pure: nothing here changes anything, so a refused change leaves everything as it was.

use std::time::Duration;

use crate::ffi::{
    self, IBV_QP_ACCESS_FLAGS, IBV_QP_ALT_PATH, IBV_QP_AV, IBV_QP_CUR_STATE, IBV_QP_DEST_QPN,
    IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MIG_STATE, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT,
    IBV_QP_QKEY, IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE,
    IBV_QP_TIMEOUT, IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS,
    IBV_QPS_SQD, IBV_QPS_SQE, IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD, IBV_QPT_XRC_RECV,
    IBV_QPT_XRC_SEND, ibv_ah_attr, ibv_mtu, ibv_qp_attr, ibv_qp_attr_mask, ibv_qp_state,
    ibv_qp_type,
};

#[cfg(test)]
mod tests;

/// The lowest 24 bits count in packet sequence numbers and queue pair numbers; whoever stores a
/// sequence number drops the others, as the kernel does.
pub(crate) const MASK_24: u32 = 0xff_ffff;

/// Whether a queue pair in this state has a peer and takes what the peer sends.
pub(crate) fn is_connected(state: ibv_qp_state) -> bool {
    (IBV_QPS_RTR..IBV_QPS_ERR).contains(&state)
}

/// Why a change was refused. In C it is always `EINVAL`; the reason is for the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ModifyError {
    #[error("this type of queue pair is not supported")]
    Type,
    #[error("there is no transition between these states")]
    Transition,
    #[error("the queue pair is not in the state named by cur_qp_state")]
    CurrentState,
    #[error("attributes are missing: mask {0:#x}")]
    Missing(ibv_qp_attr_mask),
    #[error("attributes are not allowed in this transition: mask {0:#x}")]
    Extra(ibv_qp_attr_mask),
    #[error("{0} is out of range")]
    Value(&'static str),
}

/// What the device has, to check attributes against.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Ports, counted from 1.
    pub(crate) ports: u8,
    /// Length of a port's GID table.
    pub(crate) gids: u8,
    /// Length of a port's partition table.
    pub(crate) pkeys: u16,
    /// Largest payload of a packet.
    pub(crate) mtu: ibv_mtu,
    /// READs and atomics outstanding as initiator.
    pub(crate) max_rd_atomic: u8,
    /// READs and atomics outstanding as target.
    pub(crate) max_dest_rd_atomic: u8,
}

/// Checks a change of attributes, and gives the state it leads to.
///
/// # Errors
/// The first thing found wrong.
pub(crate) fn check_modify(
    qp_type: ibv_qp_type,
    current: ibv_qp_state,
    attr: &ibv_qp_attr,
    mask: ibv_qp_attr_mask,
    limits: &Limits,
) -> Result<ibv_qp_state, ModifyError> {
    let next = if mask & IBV_QP_STATE != 0 {
        attr.qp_state
    } else {
        current
    };
    let rule = rule(qp_type, current, next)?;
    let missing = rule.required & !mask;
    if missing != 0 {
        return Err(ModifyError::Missing(missing));
    }
    let extra = mask & !(rule.required | rule.optional | IBV_QP_STATE);
    if extra != 0 {
        return Err(ModifyError::Extra(extra));
    }
    if mask & IBV_QP_CUR_STATE != 0 && attr.cur_qp_state != current {
        return Err(ModifyError::CurrentState);
    }
    check_values(attr, mask, limits)?;
    Ok(next)
}

/// The attributes of a transition, beside `IBV_QP_STATE`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Rule {
    required: ibv_qp_attr_mask,
    optional: ibv_qp_attr_mask,
}

impl Rule {
    const fn required(required: ibv_qp_attr_mask) -> Self {
        Self {
            required,
            optional: 0,
        }
    }

    const fn optional(optional: ibv_qp_attr_mask) -> Self {
        Self {
            required: 0,
            optional,
        }
    }
}

/// What identifies a queue pair on its port.
const PLACE: ibv_qp_attr_mask = IBV_QP_PKEY_INDEX | IBV_QP_PORT;
/// What a connection can be given at any time it is up.
const LIVE: ibv_qp_attr_mask =
    IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS | IBV_QP_ALT_PATH | IBV_QP_PATH_MIG_STATE;
/// What says where the peer is.
const PEER: ibv_qp_attr_mask = IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
/// How a reliable sender repeats, and how much it has under way.
const REPEAT: ibv_qp_attr_mask =
    IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;

/// What only those have that send requests; the time-out is everybody's.
const SENDS: ibv_qp_attr_mask = IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC;
/// What only those have that take requests.
const TAKES: ibv_qp_attr_mask = IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;

/// Those attributes of a mask that mean something to a queue pair of this type. Of what a reliable connection has, one of
/// XRC has what is about the requests it sends, or takes; programs may give it the rest, which the kernel ignores.
pub(crate) fn that_count(qp_type: ibv_qp_type, mask: ibv_qp_attr_mask) -> ibv_qp_attr_mask {
    match qp_type {
        IBV_QPT_XRC_SEND => mask & !TAKES,
        IBV_QPT_XRC_RECV => mask & !SENDS,
        _ => mask,
    }
}

/// The rule of a transition, if there is such a transition.
fn rule(qp_type: ibv_qp_type, from: ibv_qp_state, to: ibv_qp_state) -> Result<Rule, ModifyError> {
    let (rc, uc) = match qp_type {
        IBV_QPT_RC | IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV => (true, false),
        IBV_QPT_UC => (false, true),
        IBV_QPT_UD => (false, false),
        _ => return Err(ModifyError::Type),
    };
    // What differs by type: reliable connection, unreliable connection, datagrams.
    let by_type = |reliable, unreliable, datagram| {
        if rc {
            reliable
        } else if uc {
            unreliable
        } else {
            datagram
        }
    };
    let first = PLACE | by_type(IBV_QP_ACCESS_FLAGS, IBV_QP_ACCESS_FLAGS, IBV_QP_QKEY);
    let live = by_type(
        LIVE | IBV_QP_MIN_RNR_TIMER,
        LIVE,
        IBV_QP_CUR_STATE | IBV_QP_QKEY,
    );
    let rule = match (from, to) {
        (IBV_QPS_RESET..=IBV_QPS_ERR, IBV_QPS_RESET)
        | (IBV_QPS_INIT..=IBV_QPS_ERR, IBV_QPS_ERR) => Rule::default(),
        (IBV_QPS_RESET, IBV_QPS_INIT) => Rule::required(first),
        (IBV_QPS_INIT, IBV_QPS_INIT) => Rule::optional(first),
        (IBV_QPS_INIT, IBV_QPS_RTR) => Rule {
            required: by_type(
                PEER | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
                PEER,
                0,
            ),
            optional: IBV_QP_PKEY_INDEX
                | by_type(
                    IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS,
                    IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS,
                    IBV_QP_QKEY,
                ),
        },
        (IBV_QPS_RTR, IBV_QPS_RTS) => Rule {
            required: IBV_QP_SQ_PSN | by_type(REPEAT, 0, 0),
            optional: live,
        },
        (IBV_QPS_RTS, IBV_QPS_RTS) | (IBV_QPS_SQD, IBV_QPS_RTS) => Rule::optional(live),
        (IBV_QPS_RTS, IBV_QPS_SQD) => Rule::optional(IBV_QP_EN_SQD_ASYNC_NOTIFY),
        (IBV_QPS_SQD, IBV_QPS_SQD) => {
            let path = IBV_QP_AV | IBV_QP_ALT_PATH | IBV_QP_ACCESS_FLAGS | IBV_QP_PATH_MIG_STATE;
            let reliable = IBV_QP_PORT | REPEAT | IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
            Rule::optional(IBV_QP_PKEY_INDEX | by_type(path | reliable, path, IBV_QP_QKEY))
        }
        // A reliable connection never gets into this state, but may be asked to leave it.
        (IBV_QPS_SQE, IBV_QPS_RTS) => Rule::optional(by_type(
            0,
            IBV_QP_CUR_STATE | IBV_QP_ACCESS_FLAGS,
            IBV_QP_CUR_STATE | IBV_QP_QKEY,
        )),
        _ => return Err(ModifyError::Transition),
    };
    Ok(Rule {
        required: that_count(qp_type, rule.required),
        optional: that_count(qp_type, rule.optional),
    })
}

/// Access that a queue pair can be given. What only regions have means nothing here, but programs give both
/// the same; nor does what is for requests that there are not, which programs give wherever they run.
const ACCESS: u32 = ffi::IBV_ACCESS_LOCAL_WRITE
    | ffi::IBV_ACCESS_REMOTE_WRITE
    | ffi::IBV_ACCESS_REMOTE_READ
    | ffi::IBV_ACCESS_REMOTE_ATOMIC
    | ffi::IBV_ACCESS_MW_BIND
    | ffi::IBV_ACCESS_ZERO_BASED
    | ffi::IBV_ACCESS_ON_DEMAND
    | ffi::IBV_ACCESS_HUGETLB
    | ffi::IBV_ACCESS_FLUSH_GLOBAL
    | ffi::IBV_ACCESS_FLUSH_PERSISTENT
    | ffi::IBV_ACCESS_RELAXED_ORDERING;

/// Checks the values of the attributes in the mask.
fn check_values(
    attr: &ibv_qp_attr,
    mask: ibv_qp_attr_mask,
    limits: &Limits,
) -> Result<(), ModifyError> {
    let port = |port| (1..=limits.ports).contains(&port);
    // RoCE has no other way to address than the global one.
    let path = |path: &ibv_ah_attr| {
        port(path.port_num) && path.is_global != 0 && path.grh.sgid_index < limits.gids
    };
    let checks = [
        (IBV_QP_PORT, port(attr.port_num), "port_num"),
        (
            IBV_QP_PKEY_INDEX,
            attr.pkey_index < limits.pkeys,
            "pkey_index",
        ),
        (
            IBV_QP_ACCESS_FLAGS,
            attr.qp_access_flags & !ACCESS == 0,
            "qp_access_flags",
        ),
        (IBV_QP_AV, path(&attr.ah_attr), "ah_attr"),
        (
            IBV_QP_PATH_MTU,
            (ffi::IBV_MTU_256..=limits.mtu).contains(&attr.path_mtu),
            "path_mtu",
        ),
        (IBV_QP_DEST_QPN, attr.dest_qp_num <= MASK_24, "dest_qp_num"),
        (IBV_QP_TIMEOUT, attr.timeout <= 31, "timeout"),
        (IBV_QP_RETRY_CNT, attr.retry_cnt <= 7, "retry_cnt"),
        (IBV_QP_RNR_RETRY, attr.rnr_retry <= 7, "rnr_retry"),
        (
            IBV_QP_MIN_RNR_TIMER,
            attr.min_rnr_timer <= 31,
            "min_rnr_timer",
        ),
        (
            IBV_QP_MAX_QP_RD_ATOMIC,
            attr.max_rd_atomic <= limits.max_rd_atomic,
            "max_rd_atomic",
        ),
        (
            IBV_QP_MAX_DEST_RD_ATOMIC,
            attr.max_dest_rd_atomic <= limits.max_dest_rd_atomic,
            "max_dest_rd_atomic",
        ),
        (
            IBV_QP_ALT_PATH,
            path(&attr.alt_ah_attr)
                && port(attr.alt_port_num)
                && attr.alt_pkey_index < limits.pkeys
                && attr.alt_timeout <= 31,
            "alt_ah_attr",
        ),
        (
            IBV_QP_PATH_MIG_STATE,
            attr.path_mig_state <= ffi::IBV_MIG_ARMED,
            "path_mig_state",
        ),
    ];
    match checks.iter().find(|(bit, ok, _)| mask & bit != 0 && !ok) {
        None => Ok(()),
        Some((_, _, name)) => Err(ModifyError::Value(name)),
    }
}

/// How long a peer waits after it was told "receiver not ready" with this value of
/// `min_rnr_timer`; of more than five bits the lowest count. IBTA volume 1, 9.7.5.2.8.
pub(crate) fn rnr_timer(min_rnr_timer: u8) -> Duration {
    /// In units of 10 us.
    const TIMES: [u32; 32] = [
        65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
        1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
    ];
    Duration::from_micros(10) * TIMES[usize::from(min_rnr_timer & 31)]
}

/// How long to wait for an acknowledgement with this value of `timeout`: 4.096 us times two to its
/// power, `None` for ever. Of more than five bits the lowest count.
pub(crate) fn ack_timeout(timeout: u8) -> Option<Duration> {
    match timeout & 31 {
        0 => None,
        power => Some(Duration::from_nanos(4096 << power)),
    }
}
