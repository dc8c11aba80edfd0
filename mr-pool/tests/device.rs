//! Pools on a device that works: `soft0`, or the one that `VERBS_DEVICE` names.

use std::error::Error;
use std::time::{Duration, Instant};

use mr_pool::{AtCeiling, Buffer, BuildError, Pool, PoolError};
use verbs_sys::owned::{Completed, OwnedQueuePair};
use verbs_sys::{
    AccessFlags, CompletionQueue, PathOptions, ProtectionDomain, QueuePairInit, RemoteAddr,
    SendFlags, WcStatus, WorkCompletion, find_device,
};

type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;

/// Longer than any completion takes.
const PATIENCE: Duration = Duration::from_secs(20);

fn domain() -> Result<ProtectionDomain> {
    Ok(find_device(None)?.open()?.alloc_pd()?)
}

/// One end of a connection, whose queue pair owns private buffers.
struct End {
    qp: OwnedQueuePair<Buffer>,
    cq: CompletionQueue,
}

impl End {
    fn next(&mut self) -> Result<Completed<Buffer>> {
        let start = Instant::now();
        let mut completions: [WorkCompletion; 1] = Default::default();
        loop {
            if self.cq.poll(&mut completions)? == 1 {
                return self
                    .qp
                    .complete(&mut completions[0])
                    .ok_or_else(|| "a stranger's".into());
            }
            if start.elapsed() > PATIENCE {
                return Err("no completion came".into());
            }
            std::hint::spin_loop();
        }
    }
}

/// Two connected ends that let each other do everything.
fn pair(pd: &ProtectionDomain) -> Result<[End; 2]> {
    let everything =
        AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
    let cqs = [
        pd.context().create_cq(16, None)?,
        pd.context().create_cq(16, None)?,
    ];
    let qps = [
        pd.create_qp(&QueuePairInit::new(&cqs[0], &cqs[0]))?,
        pd.create_qp(&QueuePairInit::new(&cqs[1], &cqs[1]))?,
    ];
    let path = PathOptions {
        gid_index: pd.context().choose_gid(1)?.0,
        ..PathOptions::default()
    };
    let ends = [qps[0].endpoint(&path, 1)?, qps[1].endpoint(&path, 2)?];
    for (qp, (local, remote)) in qps.iter().zip([(&ends[0], &ends[1]), (&ends[1], &ends[0])]) {
        qp.to_init(everything, path.port)?;
        qp.to_rtr(remote, &path)?;
        qp.to_rts(local.psn, &path)?;
    }
    let [left, right] = qps.map(|qp| OwnedQueuePair::new(qp, 8, 8));
    let [left_cq, right_cq] = cqs;
    Ok([
        End {
            qp: left,
            cq: left_cq,
        },
        End {
            qp: right,
            cq: right_cq,
        },
    ])
}

fn remote<K: mr_pool::Kind>(buffer: &Buffer<K>) -> RemoteAddr {
    RemoteAddr {
        addr: buffer.addr(),
        rkey: buffer.rkey(),
    }
}

/// Message, one-sided read, and the same buffers again: pooled and not.
#[test]
fn buffers_carry_messages_and_are_read_by_peers() -> Result {
    let pd = domain()?;
    for pool in [
        Pool::builder(&pd).build()?,
        Pool::builder(&pd).unpooled().build()?,
    ] {
        let [mut left, mut right] = pair(&pd)?;
        for len in [1, 100, 5000, 70_000, (8 << 20) + 1] {
            right.qp.post_recv(pool.take(len)?)?;
            let mut message = pool.take(len)?;
            message.as_mut_slice().fill(len as u8);
            left.qp.send(message, 0..len, SendFlags::empty(), None)?;
            let received = right.next()?;
            assert_eq!(
                (received.status, received.byte_len),
                (WcStatus::Success, len as u32)
            );
            assert!(
                received
                    .buffer
                    .unwrap()
                    .as_slice()
                    .iter()
                    .all(|&byte| byte == len as u8)
            );

            let message = left.next()?.buffer.unwrap();
            right.qp.read(pool.take(len)?, 0..len, remote(&message))?;
            let read = right.next()?;
            assert_eq!(read.status, WcStatus::Success);
            assert_eq!(read.buffer.unwrap().as_slice(), message.as_slice());
        }
        assert_eq!(pool.stats().live_buffers, 0);
    }
    Ok(())
}

#[test]
fn peers_write_shared_buffers_and_not_private_ones() -> Result {
    let pd = domain()?;
    let (private, shared) = (
        Pool::builder(&pd).build()?,
        Pool::builder(&pd).shared().build()?,
    );
    let [mut left, _right] = pair(&pd)?;

    let target = shared.take(100)?;
    target.write_at(0, &[1; 100])?;
    let mut source = private.take(50)?;
    source.as_mut_slice().fill(2);
    left.qp.write(source, 0..50, remote(&target), None)?;
    let done = left.next()?;
    assert_eq!(done.status, WcStatus::Success);
    let mut seen = [0; 100];
    target.read_at(0, &mut seen)?;
    assert_eq!(seen, *[[2; 50], [1; 50]].as_flattened());

    let mut target = private.take(100)?;
    target.as_mut_slice().fill(3);
    left.qp
        .write(done.buffer.unwrap(), 0..50, remote(&target), None)?;
    assert_eq!(left.next()?.status, WcStatus::RemAccessErr);
    assert_eq!(target.as_slice(), [3; 100]);
    Ok(())
}

#[test]
fn a_steady_state_registers_nothing() -> Result {
    let pool = Pool::builder(&domain()?).build()?;
    let turn = || -> Result {
        for len in [0, 128, 4096, 50 << 10, 1 << 20] {
            let held = [pool.take(len)?, pool.take(len)?, pool.take(len)?];
            assert!(held.iter().all(|buffer| buffer.len() == len));
        }
        Ok(())
    };
    turn()?;
    let before = pool.stats();
    for _ in 0..1000 {
        turn()?;
    }
    let after = pool.stats();
    assert_eq!(after.registrations, before.registrations);
    assert_eq!(
        (after.misses(), after.hits()),
        (before.misses(), before.hits() + 15_000)
    );
    Ok(())
}

#[test]
fn buffers_outlive_everything_else() -> Result {
    let (mut buffer, shared) = {
        let pd = domain()?;
        let (private, shared) = (
            Pool::builder(&pd).build()?,
            Pool::builder(&pd).shared().build()?,
        );
        (private.take(9 << 20)?, shared.take(10)?)
    };
    buffer.as_mut_slice().fill(1);
    shared.write_at(0, b"0123456789")?;
    assert!(shared.write_at(1, b"0123456789").is_err());
    Ok(())
}

#[test]
fn the_ceiling_holds_with_and_without_a_pool() -> Result {
    let pd = domain()?;
    let builder = Pool::builder(&pd).ceiling(4 << 20);
    for builder in [builder.clone(), builder.unpooled()] {
        let pool = builder.clone().build()?;
        let held = [pool.take(2 << 20)?, pool.take(2 << 20)?];
        assert!(matches!(
            pool.take(1 << 20),
            Err(PoolError::CeilingReached { .. })
        ));
        assert_eq!(pool.stats().registered_bytes, 4 << 20);
        drop(held);
        drop(pool.take(3 << 20)?);

        let waits = builder.at_ceiling(AtCeiling::Wait(PATIENCE)).build()?;
        let held = waits.take(4 << 20)?;
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| waits.take(100).map(|buffer| buffer.len()));
            drop(held);
            assert_eq!(waiting.join().unwrap().unwrap(), 100);
        });
    }
    Ok(())
}

#[test]
fn builders_refuse_what_cannot_be() -> Result {
    let pd = domain()?;
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    let error = Pool::builder(&pd).access(access).build().unwrap_err();
    assert!(matches!(error, BuildError::PeersMayWrite { .. }), "{error}");
    let error = Pool::builder(&pd).ceiling(100).build().unwrap_err();
    assert!(
        matches!(error, BuildError::CeilingTooLow { ceiling: 100, .. }),
        "{error}"
    );

    // Remote write without local write: the device's own refusal comes through.
    let pool = Pool::builder(&pd)
        .shared()
        .access(AccessFlags::REMOTE_WRITE)
        .build()?;
    let error = pool.take(100).unwrap_err();
    assert!(matches!(error, PoolError::Register { .. }), "{error}");
    assert_eq!(pool.stats().registered_bytes, 0);
    Ok(())
}
