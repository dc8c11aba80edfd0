//! Datagrams for which receives are posted arrive, also where nobody polls meanwhile.

use std::error::Error;

use verbs_sys::ffi::{self, ibv_recv_wr, ibv_send_wr, ibv_send_wr_ud, ibv_sge};
use verbs_sys::{
    AccessFlags, PathOptions, QpType, QueuePairInit, WcStatus, WorkCompletion, find_device,
};

const QKEY: u32 = 0x1111;
/// Many more than the kernel lets wait in a datagram socket.
const COUNT: u32 = 300;
/// What stands before the payload; ibv_post_recv(3).
const GRH: usize = 40;
const MESSAGE: usize = 64;

#[test]
fn as_many_wait_as_there_are_receives() -> Result<(), Box<dyn Error>> {
    // Others send on after the call: there is no telling what still comes.
    let context = find_device(Some("soft0"))?.open()?;
    let pd = context.alloc_pd()?;
    let cqs = [
        context.create_cq(COUNT, None)?,
        context.create_cq(COUNT, None)?,
    ];
    let init = QueuePairInit {
        qp_type: QpType::Ud,
        max_send_wr: COUNT,
        max_recv_wr: COUNT,
        ..QueuePairInit::new(&cqs[0], &cqs[1])
    };
    let (sender, receiver) = (pd.create_qp(&init)?, pd.create_qp(&init)?);
    let path = PathOptions::default();
    let memory = context.alloc_memory(GRH + MESSAGE)?;
    let mr = pd.reg_memory(&memory, AccessFlags::LOCAL_WRITE)?;
    let element = |length: usize| ibv_sge {
        addr: mr.addr(),
        length: length as u32,
        lkey: mr.lkey(),
    };
    for qp in [&sender, &receiver] {
        qp.start_datagrams(1, QKEY, 0)?;
    }
    for id in 0..COUNT.into() {
        let mut sge = element(GRH + MESSAGE);
        let mut request = ibv_recv_wr {
            wr_id: id,
            sg_list: &raw mut sge,
            num_sge: 1,
            ..ibv_recv_wr::zeroed()
        };
        // SAFETY: a list of one request, whose element lies in the region; nobody refers to its bytes.
        unsafe { receiver.post_recv(&raw mut request) }?;
    }
    let to = receiver.endpoint(&path, 0)?;
    let handle = pd.create_ah(to.gid, to.lid, &path)?;
    for number in 0..COUNT {
        let mut sge = element(MESSAGE);
        let mut request = ibv_send_wr {
            opcode: ffi::IBV_WR_SEND_WITH_IMM,
            imm_data: number.to_be(),
            send_flags: ffi::IBV_SEND_SIGNALED,
            sg_list: &raw mut sge,
            num_sge: 1,
            ..ibv_send_wr::zeroed()
        };
        request.wr.ud = ibv_send_wr_ud {
            ah: handle.as_raw(),
            remote_qpn: to.qp_num,
            remote_qkey: QKEY,
        };
        // SAFETY: as above, and the address handle lives as long as the queue pair.
        unsafe { sender.post_send(&raw mut request) }?;
    }
    // None is on its way any more: what does not come now never does.
    let mut found: Vec<_> = (0..COUNT).map(|_| WorkCompletion::default()).collect();
    let count = cqs[1].poll(&mut found)?;
    let received: Vec<_> = found[..count]
        .iter()
        .map(|completion| {
            assert_eq!(completion.status(), WcStatus::Success);
            (completion.wr_id(), completion.imm_data())
        })
        .collect();
    let all: Vec<_> = (0..COUNT)
        .map(|number| (number.into(), Some(number)))
        .collect();
    assert_eq!(received, all);
    Ok(())
}
