//! Owned queue pairs on a device that works: every kind of request, and every way it can end.

mod common;

use std::time::Duration;

use common::{Pair, Result, bytes, next, remote};
use verbs_sys::{
    QpState, QueuePairInit, SendFlags, WcStatus, devices, find_device,
    owned::{PostError, WorkKind},
};

#[test]
fn messages_arrive_with_length_and_immediate() -> Result {
    let mut pair = Pair::new()?;
    for _ in 0..3 {
        let region = pair.region(4096, 0)?;
        pair.right.qp.post_recv(region)?;
    }
    let source = pair.region(4096, 7)?;
    pair.left
        .qp
        .send(source, 10..1010, SendFlags::empty(), None)?;
    pair.left
        .qp
        .send_inline(b"short", SendFlags::SOLICITED, Some(0x0102_0304))?;
    pair.left.qp.send_inline(b"", SendFlags::empty(), None)?;

    let first = pair.right.next()?;
    assert_eq!(
        (first.kind, first.byte_len, first.imm),
        (WorkKind::Recv, 1000, None)
    );
    assert_eq!(
        bytes(&first.buffer.unwrap(), 0..1001),
        [vec![7; 1000], vec![0]].concat()
    );
    let second = pair.right.next()?;
    assert_eq!((second.byte_len, second.imm), (5, Some(0x0102_0304)));
    assert_eq!(bytes(&second.buffer.unwrap(), 0..6), b"short\0");
    assert_eq!(pair.right.next()?.byte_len, 0);

    let sent: Vec<_> = (0..3).map(|_| pair.left.next()).collect::<Result<_>>()?;
    assert!(sent.iter().all(|done| done.status == WcStatus::Success));
    assert!(sent.iter().all(|done| done.kind == WorkKind::Send));
    let has_buffer: Vec<bool> = sent.iter().map(|done| done.buffer.is_some()).collect();
    assert_eq!(has_buffer, [true, false, false]);
    Ok(())
}

#[test]
fn one_sided_requests_reach_the_peers_memory() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(4096, 1)?;

    let source = pair.region(64, 2)?;
    pair.left
        .qp
        .write(source, 0..64, remote(&target, 8), None)?;
    let done = pair.left.next()?;
    assert_eq!(
        (done.kind, done.status),
        (WorkKind::Write, WcStatus::Success)
    );
    assert_eq!(
        bytes(&target, 7..73),
        [vec![1], vec![2; 64], vec![1]].concat()
    );

    pair.left
        .qp
        .write_inline(b"inline", remote(&target, 0), None)?;
    assert_eq!(pair.left.next()?.status, WcStatus::Success);
    let sink = pair.region(64, 0)?;
    pair.left.qp.read(sink, 32..40, remote(&target, 0))?;
    let done = pair.left.next()?;
    assert_eq!((done.kind, done.byte_len), (WorkKind::Read, 8));
    assert_eq!(bytes(&done.buffer.unwrap(), 31..41), b"\0inline\x01\x01\0");

    let receive = pair.region(64, 0)?;
    pair.right.qp.post_recv(receive)?;
    pair.left
        .qp
        .write_inline(b"!", remote(&target, 100), Some(9))?;
    let done = pair.right.next()?;
    assert_eq!(
        (done.kind, done.byte_len, done.imm),
        (WorkKind::RecvWrite, 1, Some(9))
    );
    assert_eq!(bytes(&target, 100..101), b"!");
    Ok(())
}

#[test]
fn a_chain_of_reads_makes_one_completion() -> Result {
    let mut pair = Pair::new()?;
    let (one, two) = (pair.region(4096, 3)?, pair.region(4096, 4)?);
    let sink = pair.region(100, 0)?;
    let parts = [
        (0..10, remote(&one, 0)),
        (50..60, remote(&two, 5)),
        (10..20, remote(&one, 1)),
    ];
    let token = pair.left.qp.read_chain(sink, &parts)?;
    let done = pair.left.next()?;
    assert_eq!(
        (done.token, done.status, done.byte_len),
        (token, WcStatus::Success, 30)
    );
    let sink = done.buffer.unwrap();
    assert_eq!(bytes(&sink, 0..21), [vec![3; 20], vec![0]].concat());
    assert_eq!(
        bytes(&sink, 49..61),
        [vec![0], vec![4; 10], vec![0]].concat()
    );
    Ok(())
}

#[test]
fn atomics_give_the_value_from_before() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(64, 0)?;
    let sink = pair.region(64, 0)?;
    pair.left.qp.fetch_add(sink, 8, remote(&target, 16), 5)?;
    let done = pair.left.next()?;
    assert_eq!(
        (done.kind, done.status),
        (WorkKind::Atomic, WcStatus::Success)
    );
    let sink = done.buffer.unwrap();
    assert_eq!(bytes(&sink, 8..16), 0_u64.to_ne_bytes());

    pair.left
        .qp
        .compare_swap(sink, 8, remote(&target, 16), 5, 77)?;
    let sink = pair.left.next()?.buffer.unwrap();
    assert_eq!(bytes(&sink, 8..16), 5_u64.to_ne_bytes());
    assert_eq!(bytes(&target, 16..24), 77_u64.to_ne_bytes());
    Ok(())
}

#[test]
fn a_failed_chain_tells_why_and_everything_comes_back() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(4096, 3)?;
    let mut wrong = remote(&target, 0);
    wrong.rkey ^= 0x5555;
    let receive = pair.region(64, 0)?;
    pair.left.qp.post_recv(receive)?;
    let sink = pair.region(100, 0)?;
    let parts = [
        (0..10, remote(&target, 0)),
        (10..20, wrong),
        (20..30, remote(&target, 0)),
    ];
    let token = pair.left.qp.read_chain(sink, &parts)?;

    let mut done = [pair.left.next()?, pair.left.next()?];
    done.sort_by_key(|done| done.kind != WorkKind::Read);
    assert_eq!(
        (done[0].token, done[0].status),
        (token, WcStatus::RemAccessErr)
    );
    assert_eq!(
        (done[1].kind, done[1].status),
        (WorkKind::Recv, WcStatus::WrFlushErr)
    );
    assert!(
        done.iter()
            .all(|done| done.buffer.is_some() && done.byte_len == 0)
    );
    assert_eq!(bytes(done[0].buffer.as_ref().unwrap(), 20..30), [0; 10]);
    assert_eq!(pair.left.qp.queue_pair().state()?, QpState::Err);
    assert_eq!(
        (pair.left.qp.outstanding_sends(), pair.left.qp.send_room()),
        (0, 8)
    );
    Ok(())
}

#[test]
fn a_queue_pair_that_is_not_connected_gives_the_buffer_back() -> Result {
    let mut pair = Pair::new()?;
    pair.left.qp.queue_pair().modify(
        &verbs_sys::ffi::ibv_qp_attr::zeroed(),
        verbs_sys::QpAttrMask::STATE,
    )?;
    let source = pair.region(64, 0)?;
    let rejected = pair
        .left
        .qp
        .send(source, 0..64, SendFlags::empty(), None)
        .unwrap_err();
    assert!(
        matches!(rejected.error, PostError::Device { .. }),
        "{rejected}"
    );
    let region = rejected.buffer.unwrap();
    let rejected = pair.left.qp.post_recv(region).unwrap_err();
    assert!(rejected.buffer.is_some());
    Ok(())
}

#[test]
fn dropping_with_work_outstanding_frees_everything() -> Result {
    for _ in 0..20 {
        let mut pair = Pair::new()?;
        for _ in 0..8 {
            let region = pair.region(1 << 16, 0)?;
            pair.right.qp.post_recv(region)?;
        }
        let source = pair.region(64, 0)?;
        pair.left.qp.send(source, 0..64, SendFlags::empty(), None)?;
    }
    Ok(())
}

#[test]
fn a_sleeper_is_woken_by_a_message() -> Result {
    let mut pair = Pair::new()?;
    let region = pair.region(64, 0)?;
    pair.right.qp.post_recv(region)?;
    let Pair {
        mut left,
        mut right,
        pd,
        context,
    } = pair;
    assert!(right.channel.try_get_event()?.is_none());
    right.cq.req_notify(false)?;
    let sleeper = std::thread::spawn(move || {
        let event = right
            .channel
            .wait_timeout(Duration::from_secs(60))
            .unwrap()
            .unwrap();
        assert!(event.is_of(&right.cq));
        let done = next(&mut right.qp, &right.cq).unwrap();
        assert!(right.channel.try_get_event().unwrap().is_none());
        done.byte_len
    });
    left.qp.send_inline(b"wake up", SendFlags::empty(), None)?;
    assert_eq!(sleeper.join().unwrap(), 7);
    assert_eq!(left.next()?.status, WcStatus::Success);
    drop((pd, context));
    Ok(())
}

#[test]
fn the_software_device_is_always_there() -> Result {
    let devices = devices()?;
    let soft: Vec<_> = devices
        .iter()
        .filter(|device| device.is_software())
        .collect();
    assert_eq!(soft.len(), 1);
    assert_eq!(soft[0].name(), "soft0");
    assert!(find_device(Some("soft0"))?.is_software());
    let error = find_device(Some("no such device")).unwrap_err().to_string();
    assert!(
        error.contains("\"no such device\"") && error.contains("soft0"),
        "{error}"
    );
    Ok(())
}

/// Who asks for no inline data has the room of the elements for it, as on other devices.
#[test]
fn elements_leave_room_for_inline_data() -> Result {
    let context = find_device(None)?.open()?;
    let pd = context.alloc_pd()?;
    let cq = context.create_cq(64, None)?;
    for max_send_sge in [1, 3] {
        let init = QueuePairInit {
            max_send_sge,
            ..QueuePairInit::new(&cq, &cq)
        };
        assert_eq!(init.max_inline_data, 0);
        let cap = pd.create_qp(&init)?.cap();
        assert!(cap.max_inline_data >= 16 * max_send_sge, "{cap:?}");
    }
    Ok(())
}
