//! The attributes of a queue pair on its way up.

use verbs_sys::{AccessFlags, Gid, QpAttrMask, QpType, QueuePair, QueuePairError, ffi};

use crate::program::Spoil;

/// The queue key of every datagram queue pair.
pub const QKEY: u32 = 0x1234;

/// What the attributes are made from.
#[derive(Clone, Copy)]
pub struct Connection {
    pub gid: Gid,
    pub gid_index: u8,
    pub access: AccessFlags,
    pub remote: u32,
    pub psn: u32,
    pub rnr_retry: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
}

impl Connection {
    pub fn attr(&self) -> ffi::ibv_qp_attr {
        let mut attr = ffi::ibv_qp_attr {
            port_num: 1,
            qkey: QKEY,
            qp_access_flags: self.access.bits(),
            path_mtu: ffi::IBV_MTU_1024,
            dest_qp_num: self.remote,
            rq_psn: self.psn,
            sq_psn: self.psn,
            max_dest_rd_atomic: 4,
            max_rd_atomic: 4,
            // 10 us.
            min_rnr_timer: 1,
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            rnr_retry: self.rnr_retry,
            ..ffi::ibv_qp_attr::zeroed()
        };
        attr.ah_attr.port_num = 1;
        attr.ah_attr.is_global = 1;
        attr.ah_attr.grh.dgid = self.gid.into();
        attr.ah_attr.grh.sgid_index = self.gid_index;
        attr.ah_attr.grh.hop_limit = 64;
        attr
    }

    /// Up from RESET.
    pub fn up(&self, qp: &QueuePair) -> Result<(), QueuePairError> {
        let mut attr = self.attr();
        for (state, mask) in steps(qp.qp_type()) {
            attr.qp_state = state;
            qp.modify(
                &attr,
                QpAttrMask::from_bits_retain(mask | ffi::IBV_QP_STATE),
            )?;
        }
        Ok(())
    }
}

pub fn spoil(attr: &mut ffi::ibv_qp_attr, spoil: Spoil) {
    match spoil {
        Spoil::No => {}
        Spoil::Port => attr.port_num = 9,
        Spoil::Mtu => attr.path_mtu = 77,
        Spoil::Timeout => attr.timeout = 32,
        Spoil::AvPort => attr.ah_attr.port_num = 9,
        Spoil::PkeyIndex => attr.pkey_index = 0xffff,
        Spoil::NoMtu => attr.path_mtu = 0,
        Spoil::NotGlobal => attr.ah_attr.is_global = 0,
        Spoil::DestQpn => attr.dest_qp_num = 1 << 24,
        Spoil::RnrTimer => attr.min_rnr_timer = 32,
        Spoil::RetryCount => attr.retry_cnt = 8,
        Spoil::RnrRetryCount => attr.rnr_retry = 8,
        Spoil::RdAtomic => attr.max_rd_atomic = 255,
        Spoil::DestRdAtomic => attr.max_dest_rd_atomic = 255,
    }
}

/// The states on the way up and the attributes that each step needs; ibv_modify_qp(3).
pub fn steps(qp_type: QpType) -> [(ffi::ibv_qp_state, u32); 3] {
    let place = ffi::IBV_QP_PKEY_INDEX | ffi::IBV_QP_PORT;
    let peer = ffi::IBV_QP_AV | ffi::IBV_QP_PATH_MTU | ffi::IBV_QP_DEST_QPN | ffi::IBV_QP_RQ_PSN;
    let patience = ffi::IBV_QP_TIMEOUT
        | ffi::IBV_QP_RETRY_CNT
        | ffi::IBV_QP_RNR_RETRY
        | ffi::IBV_QP_MAX_QP_RD_ATOMIC;
    let [init, rtr, rts] = match qp_type {
        QpType::Uc => [place | ffi::IBV_QP_ACCESS_FLAGS, peer, 0],
        QpType::Ud => [place | ffi::IBV_QP_QKEY, 0, 0],
        _ => [
            place | ffi::IBV_QP_ACCESS_FLAGS,
            peer | ffi::IBV_QP_MAX_DEST_RD_ATOMIC | ffi::IBV_QP_MIN_RNR_TIMER,
            patience,
        ],
    };
    [
        (ffi::IBV_QPS_INIT, init),
        (ffi::IBV_QPS_RTR, rtr),
        (ffi::IBV_QPS_RTS, rts | ffi::IBV_QP_SQ_PSN),
    ]
}

/// The attributes that a transition needs, for programs.
pub fn needed(qp_type: QpType, to: ffi::ibv_qp_state) -> u32 {
    let found = steps(qp_type).into_iter().find(|(state, _)| *state == to);
    found.map_or(0, |(_, mask)| mask)
}
