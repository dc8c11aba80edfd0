//! Chains that are laid out once and executed many times, on a device that works.

mod common;

use common::{Pair, Result, bytes, remote};
use verbs_sys::{
    QpAttrMask, QpState, SendFlags, WcStatus,
    ffi::ibv_qp_attr,
    owned::{PostError, PreparedRequest as Request, WorkKind},
};

#[test]
fn a_chain_of_every_kind_is_executed_again_and_again() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(4096, 0)?;
    let buffers = vec![pair.region(64, 5)?, pair.region(64, 9)?];
    let requests = [
        Request::write(0, 0..8, remote(&target, 0), None),
        Request::fetch_add(1, 0, remote(&target, 64), 3),
        Request::compare_swap(1, 8, remote(&target, 128), 0, 77),
        Request::read(1, 16..24, remote(&target, 0)),
        Request::send(0, 8..28, SendFlags::empty(), Some(6)),
    ];
    let chain = pair.left.qp.prepare(buffers, &requests)?;
    for round in 0..10_u64 {
        let receive = pair.region(64, 0)?;
        pair.right.qp.post_recv(receive)?;
        assert_eq!(pair.left.qp.execute(chain)?, chain.token());
        assert_eq!(pair.left.qp.outstanding_sends(), 1);
        let message = pair.right.next()?;
        assert_eq!((message.byte_len, message.imm), (20, Some(6)));
        assert_eq!(bytes(&message.buffer.ok_or("no buffer")?, 0..20), [5; 20]);
        let done = pair.left.next()?;
        assert_eq!((done.token, done.kind), (chain.token(), WorkKind::Prepared));
        assert_eq!((done.status, done.byte_len), (WcStatus::Success, 24));
        assert!(done.buffer.is_none());
        let found = pair.left.qp.prepared_buffers(chain).ok_or("not idle")?;
        let word = |at| u64::from_ne_bytes(bytes(&found[1], at..at + 8).try_into().unwrap());
        assert_eq!(word(0), 3 * round);
        assert_eq!(word(8), if round == 0 { 0 } else { 77 });
        assert_eq!(word(16), u64::from_ne_bytes([5; 8]));
    }
    assert_eq!(pair.left.qp.outstanding_sends(), 0);
    assert_eq!(pair.left.qp.release(chain)?.len(), 2);
    Ok(())
}

#[test]
fn what_is_set_counts_from_the_next_execution_on() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(4096, 0)?;
    let buffers = vec![pair.region(64, 1)?, pair.region(64, 2)?];
    let requests = [
        Request::write(0, 0..8, remote(&target, 0), None),
        Request::fetch_add(0, 8, remote(&target, 512), 1),
    ];
    let chain = pair.left.qp.prepare(buffers, &requests)?;
    pair.left.qp.execute(chain)?;
    let mut write = pair.left.qp.prepared(chain, 0).ok_or("no request")?;
    write.set_remote(remote(&target, 100));
    write.set_local(1, 32..52)?;
    let mut add = pair.left.qp.prepared(chain, 1).ok_or("no request")?;
    add.set_operands(40, 0);
    add.set_remote(remote(&target, 520));
    pair.left.next()?;
    assert_eq!(bytes(&target, 0..120), [vec![1; 8], vec![0; 112]].concat());
    assert_eq!(
        bytes(&target, 512..528),
        [1_u64.to_ne_bytes(), [0; 8]].concat()
    );

    pair.left.qp.execute(chain)?;
    pair.left.next()?;
    assert_eq!(bytes(&target, 100..120), [2; 20]);
    assert_eq!(
        bytes(&target, 512..528),
        [1_u64.to_ne_bytes(), 40_u64.to_ne_bytes()].concat()
    );

    // What does not lie in a buffer is refused, and changes nothing.
    let mut write = pair.left.qp.prepared(chain, 0).ok_or("no request")?;
    assert!(matches!(
        write.set_local(1, 60..65),
        Err(PostError::Range { .. })
    ));
    assert!(matches!(
        write.set_local(2, 0..1),
        Err(PostError::NoBuffer { .. })
    ));
    write.set_remote(remote(&target, 200));
    pair.left.qp.execute(chain)?;
    pair.left.next()?;
    assert_eq!(bytes(&target, 200..220), [2; 20]);
    assert!(pair.left.qp.prepared(chain, 2).is_none());
    Ok(())
}

/// Buffers that are swapped for others are what the next execution uses.
#[test]
fn buffers_can_be_exchanged_between_executions() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(64, 0)?;
    let buffers = vec![pair.region(64, 1)?];
    let request = Request::write(0, 0..64, remote(&target, 0), None);
    let chain = pair.left.qp.prepare(buffers, &[request])?;
    let mut other = pair.region(64, 4)?;
    let found = pair.left.qp.prepared_buffers(chain).ok_or("not idle")?;
    std::mem::swap(&mut found[0], &mut other);
    drop(other);
    pair.left.qp.execute(chain)?;
    pair.left.next()?;
    assert_eq!(bytes(&target, 0..64), [4; 64]);
    // One that is too short is found out.
    let mut short = pair.region(63, 5)?;
    let found = pair.left.qp.prepared_buffers(chain).ok_or("not idle")?;
    std::mem::swap(&mut found[0], &mut short);
    let refused = pair.left.qp.execute(chain);
    if short.len() > 63 {
        // The device gives whole pages only.
        return Ok(());
    }
    assert!(matches!(refused, Err(PostError::Range { .. })));
    assert_eq!(pair.left.qp.outstanding_sends(), 0);
    Ok(())
}

#[test]
fn buffers_stay_while_an_execution_is_outstanding() -> Result {
    let mut pair = Pair::new()?;
    let buffers = vec![pair.region(64, 3)?];
    let requests = [Request::send(0, 0..64, SendFlags::empty(), None)];
    let chain = pair.left.qp.prepare(buffers, &requests)?;
    // The peer has no receive yet.
    pair.left.qp.execute(chain)?;
    pair.left.qp.execute(chain)?;
    assert_eq!(pair.left.qp.outstanding_sends(), 2);
    assert!(pair.left.qp.prepared_buffers(chain).is_none());
    let kept = pair.left.qp.release(chain);
    assert!(matches!(
        kept,
        Err(PostError::Outstanding { executions: 2 })
    ));
    for _ in 0..2 {
        let receive = pair.region(64, 0)?;
        pair.right.qp.post_recv(receive)?;
        pair.right.next()?;
        assert_eq!(pair.left.next()?.token, chain.token());
    }
    assert_eq!(pair.left.qp.release(chain)?.len(), 1);
    assert!(matches!(
        pair.left.qp.execute(chain),
        Err(PostError::NotPrepared)
    ));
    Ok(())
}

#[test]
fn an_execution_takes_room_for_all_its_requests() -> Result {
    let mut pair = Pair::new()?;
    let buffers = vec![pair.region(64, 3)?];
    let requests: Vec<_> = (0..3)
        .map(|_| Request::send(0, 0..8, SendFlags::empty(), None))
        .collect();
    let chain = pair.left.qp.prepare(buffers, &requests)?;
    let room = pair.left.qp.send_room();
    pair.left.qp.execute(chain)?;
    pair.left.qp.execute(chain)?;
    assert_eq!(pair.left.qp.send_room(), room - 6);
    assert!(matches!(
        pair.left.qp.execute(chain),
        Err(PostError::Full { .. })
    ));
    for _ in 0..6 {
        let receive = pair.region(64, 0)?;
        pair.right.qp.post_recv(receive)?;
        pair.right.next()?;
    }
    pair.left.next()?;
    pair.left.next()?;
    assert_eq!(pair.left.qp.send_room(), room);
    Ok(())
}

#[test]
fn a_queue_pair_that_cannot_send_says_so() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(64, 0)?;
    let buffers = vec![pair.region(64, 1)?];
    let request = |n| Request::write(0, n..n + 8, remote(&target, n as u64), None);
    let chain = pair.left.qp.prepare(buffers, &[request(0), request(8)])?;

    // In ERR: by the completion.
    pair.left.qp.queue_pair().to_err()?;
    pair.left.qp.execute(chain)?;
    assert_eq!(pair.left.next()?.status, WcStatus::WrFlushErr);

    // In RESET: at once.
    let reset = ibv_qp_attr::zeroed();
    pair.left
        .qp
        .queue_pair()
        .modify(&reset, QpAttrMask::STATE)?;
    assert_eq!(pair.left.qp.queue_pair().state()?, QpState::Reset);
    let room = pair.left.qp.send_room();
    let refused = pair.left.qp.execute(chain);
    assert!(matches!(refused, Err(PostError::Device { .. })));
    assert_eq!(
        (pair.left.qp.send_room(), pair.left.qp.outstanding_sends()),
        (room, 0)
    );
    assert_eq!(bytes(&target, 0..64), [0; 64]);
    assert_eq!(pair.left.qp.release(chain)?.len(), 1);
    Ok(())
}

/// A chain is good for its own queue pair alone, also when that is gone.
#[test]
fn a_chain_of_another_queue_pair_is_refused() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(64, 0)?;
    let buffers = vec![pair.region(64, 1)?];
    let request = Request::write(0, 0..8, remote(&target, 0), None);
    let chain = pair.left.qp.prepare(buffers, &[request])?;
    assert!(matches!(
        pair.right.qp.execute(chain),
        Err(PostError::NotPrepared)
    ));
    assert!(pair.right.qp.prepared(chain, 0).is_none());
    assert!(matches!(
        pair.right.qp.release(chain),
        Err(PostError::NotPrepared)
    ));
    let mut other = Pair::new()?;
    drop(pair);
    assert!(matches!(
        other.left.qp.execute(chain),
        Err(PostError::NotPrepared)
    ));
    Ok(())
}

/// An error in the middle: the completion tells the first, and the chain can be had back.
#[test]
fn a_failed_chain_tells_the_first_error() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(64, 0)?;
    let buffers = vec![pair.region(64, 1)?];
    let good = || Request::write(0, 0..8, remote(&target, 0), None);
    let mut wrong = remote(&target, 0);
    wrong.rkey ^= 1 << 8;
    let bad = Request::write(0, 0..8, wrong, None);
    let chain = pair.left.qp.prepare(buffers, &[good(), bad, good()])?;
    pair.left.qp.execute(chain)?;
    assert_eq!(pair.left.next()?.status, WcStatus::RemAccessErr);
    assert_eq!(pair.left.qp.release(chain)?.len(), 1);
    Ok(())
}

#[test]
fn what_cannot_be_prepared_gives_the_buffers_back() -> Result {
    let mut pair = Pair::new()?;
    let target = pair.region(64, 0)?;
    let place = remote(&target, 0);
    let write = |buffer, range| Request::write(buffer, range, place, None);
    let long: Vec<Request> = (0..9).map(|_| write(0, 0..8)).collect();
    let beyond = usize::try_from(u32::MAX)?;
    let cases = [
        vec![],
        long,
        vec![write(1, 0..8)],
        vec![write(0, 0..beyond)],
    ];
    for requests in cases {
        let buffers = vec![pair.region(64, 1)?];
        let rejected = pair.left.qp.prepare(buffers, &requests).unwrap_err();
        assert!(matches!(
            rejected.error,
            PostError::ChainLength { .. } | PostError::NoBuffer { .. } | PostError::Range { .. }
        ));
        assert_eq!(rejected.buffer.map(|buffers| buffers.len()), Some(1));
    }
    Ok(())
}
