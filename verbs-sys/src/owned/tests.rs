//! Ownership and bookkeeping, on a device that does no work.

use std::sync::Arc;

use super::*;
use crate::{
    QpState, QueuePairInit, RemoteAddr, SendFlags, WorkCompletion, fake,
    ffi::{self, ibv_wc},
};

/// A buffer that notes when it is dropped.
struct Buffer {
    bytes: Box<[u8]>,
    _alive: Arc<()>,
    name: &'static str,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        fake::with(|state| state.destroyed.push(self.name));
    }
}

// SAFETY: the boxed bytes stay where they are, and the tests hold no reference to them.
unsafe impl Registered for Buffer {
    fn sge(&self) -> Sge {
        let addr = self.bytes.as_ptr().expose_provenance() as u64;
        Sge {
            addr,
            length: self.bytes.len() as u32,
            lkey: 7,
        }
    }
}

struct Bench {
    qp: OwnedQueuePair<Buffer>,
    alive: Arc<()>,
}

impl Bench {
    fn new(max_send: u32, max_recv: u32) -> Self {
        let context = fake::open();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let init = QueuePairInit {
            max_send_wr: 8,
            max_recv_wr: 8,
            max_inline_data: 16,
            ..QueuePairInit::new(&cq, &cq)
        };
        let qp = pd.create_qp(&init).unwrap();
        Self {
            qp: OwnedQueuePair::new(qp, max_send, max_recv),
            alive: Arc::new(()),
        }
    }

    fn buffer(&self, len: usize) -> Buffer {
        Buffer {
            bytes: vec![0; len].into(),
            _alive: self.alive.clone(),
            name: "buffer",
        }
    }

    /// Buffers that are somewhere.
    fn live(&self) -> usize {
        Arc::strong_count(&self.alive) - 1
    }

    fn complete(&mut self, wr_id: u64, status: u32) -> Option<Completed<Buffer>> {
        let wc = ibv_wc {
            wr_id,
            status,
            byte_len: 5,
            qp_num: 0x11,
            ..ibv_wc::zeroed()
        };
        self.qp.complete(&mut WorkCompletion::from_raw(wc))
    }
}

const REMOTE: RemoteAddr = RemoteAddr {
    addr: 0x1000,
    rkey: 9,
};

#[test]
fn a_request_keeps_its_buffer_until_it_completes() {
    let mut bench = Bench::new(4, 4);
    let buffer = bench.buffer(64);
    let addr = buffer.sge().addr;
    let token = bench
        .qp
        .write(buffer, 8..24, REMOTE, Some(0x0102_0304))
        .unwrap();
    assert_eq!(
        (
            bench.live(),
            bench.qp.outstanding_sends(),
            bench.qp.send_room()
        ),
        (1, 1, 3)
    );

    let (request, element) = fake::with(|state| state.sent[0]);
    assert_eq!(
        (element.addr, element.length, element.lkey),
        (addr + 8, 16, 7)
    );
    assert_eq!(request.opcode, ffi::IBV_WR_RDMA_WRITE_WITH_IMM);
    assert_eq!(request.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
    assert_eq!(request.send_flags, ffi::IBV_SEND_SIGNALED);
    assert_eq!(request.wr_id, token);

    let done = bench.complete(token, ffi::IBV_WC_SUCCESS).unwrap();
    assert_eq!(
        (done.token, done.kind, done.status),
        (token, WorkKind::Write, WcStatus::Success)
    );
    assert_eq!(done.byte_len, 0);
    assert_eq!(done.buffer.unwrap().sge().addr, addr);
    assert_eq!(
        (
            bench.live(),
            bench.qp.outstanding_sends(),
            bench.qp.send_room()
        ),
        (0, 0, 4)
    );
}

#[test]
fn one_completion_counts_once() {
    let mut bench = Bench::new(4, 4);
    let token = bench.qp.post_recv(bench.buffer(8)).unwrap();
    let mut wc = WorkCompletion::from_raw(ibv_wc {
        wr_id: token,
        ..ibv_wc::zeroed()
    });
    assert!(bench.qp.complete(&mut wc).is_some());
    bench.qp.post_recv(bench.buffer(8)).unwrap();
    assert!(bench.qp.complete(&mut wc).is_none());
    assert_eq!(bench.qp.outstanding_receives(), 1);
}

#[test]
fn completions_of_others_are_left_alone() {
    let mut one = Bench::new(4, 4);
    let mut two = Bench::new(4, 4);
    let token = one.qp.post_recv(one.buffer(8)).unwrap();
    two.qp.post_recv(two.buffer(8)).unwrap();
    let mut wc = WorkCompletion::from_raw(ibv_wc {
        wr_id: token,
        ..ibv_wc::zeroed()
    });
    assert!(two.qp.complete(&mut wc).is_none());
    assert!(two.qp.complete(&mut WorkCompletion::default()).is_none());
    assert!(one.qp.complete(&mut wc).is_some());
}

#[test]
fn an_error_gives_the_buffer_back_without_bytes() {
    let mut bench = Bench::new(4, 4);
    let token = bench.qp.post_recv(bench.buffer(8)).unwrap();
    let done = bench.complete(token, ffi::IBV_WC_WR_FLUSH_ERR).unwrap();
    assert_eq!(
        (done.status, done.byte_len, done.imm),
        (WcStatus::WrFlushErr, 0, None)
    );
    assert!(done.buffer.is_some());
}

#[test]
fn a_receive_tells_length_and_immediate() {
    let mut bench = Bench::new(4, 4);
    for (opcode, kind) in [
        (ffi::IBV_WC_RECV, WorkKind::Recv),
        (ffi::IBV_WC_RECV_RDMA_WITH_IMM, WorkKind::RecvWrite),
    ] {
        let wr_id = bench.qp.post_recv(bench.buffer(8)).unwrap();
        let wc = ibv_wc {
            wr_id,
            opcode,
            byte_len: 3,
            imm_data: 77_u32.to_be(),
            wc_flags: ffi::IBV_WC_WITH_IMM,
            ..ibv_wc::zeroed()
        };
        let done = bench
            .qp
            .complete(&mut WorkCompletion::from_raw(wc))
            .unwrap();
        assert_eq!((done.kind, done.byte_len, done.imm), (kind, 3, Some(77)));
    }
}

#[test]
fn a_refused_request_gives_the_buffer_back() {
    let mut bench = Bench::new(4, 4);
    fake::with(|state| state.accept = Some(0));
    let error = bench
        .qp
        .send(bench.buffer(8), 0..8, SendFlags::empty(), None)
        .unwrap_err();
    assert!(matches!(error.error, PostError::Device { .. }) && error.buffer.is_some());
    let error = bench.qp.post_recv(bench.buffer(8)).unwrap_err();
    assert!(matches!(error.error, PostError::Device { .. }) && error.buffer.is_some());
    let error = bench
        .qp
        .read_chain(bench.buffer(8), &[(0..8, REMOTE)])
        .unwrap_err();
    assert!(matches!(error.error, PostError::Device { .. }) && error.buffer.is_some());
    assert_eq!((bench.qp.outstanding_sends(), bench.qp.send_room()), (0, 4));
}

#[test]
fn a_full_queue_says_so_until_something_completes() {
    let mut bench = Bench::new(2, 1);
    let first = bench
        .qp
        .send_inline(b"a", SendFlags::empty(), None)
        .unwrap();
    bench
        .qp
        .send_inline(b"b", SendFlags::SOLICITED, None)
        .unwrap();
    let full = bench
        .qp
        .send_inline(b"c", SendFlags::empty(), None)
        .unwrap_err();
    assert!(matches!(full, PostError::Full { max: 2, .. }), "{full}");
    assert!(
        bench
            .complete(first, ffi::IBV_WC_SUCCESS)
            .unwrap()
            .buffer
            .is_none()
    );
    bench
        .qp
        .send_inline(b"c", SendFlags::empty(), None)
        .unwrap();

    bench.qp.post_recv(bench.buffer(8)).unwrap();
    let full = bench.qp.post_recv(bench.buffer(8)).unwrap_err();
    assert!(matches!(full.error, PostError::Full { max: 1, .. }));
}

#[test]
fn ranges_and_inline_lengths_are_checked() {
    let mut bench = Bench::new(4, 4);
    #[allow(clippy::reversed_empty_ranges)] // On purpose.
    for range in [0..9, 9..9, 5..4, usize::MAX - 1..usize::MAX] {
        let error = bench.qp.read(bench.buffer(8), range, REMOTE).unwrap_err();
        assert!(
            matches!(error.error, PostError::Range { len: 8, .. }),
            "{error}"
        );
    }
    let error = bench
        .qp
        .fetch_add(bench.buffer(8), usize::MAX, REMOTE, 1)
        .unwrap_err();
    assert!(matches!(error.error, PostError::Range { .. }));
    let error = bench.qp.write_inline(&[0; 17], REMOTE, None).unwrap_err();
    assert!(matches!(
        error,
        PostError::InlineTooLong { len: 17, max: 16 }
    ));
    bench.qp.read(bench.buffer(8), 8..8, REMOTE).unwrap();
    assert_eq!(fake::with(|state| state.sent.len()), 1);
}

#[test]
fn a_chain_makes_one_completion_and_takes_a_place_for_each_read() {
    let mut bench = Bench::new(4, 4);
    let other = RemoteAddr {
        addr: 0x2000,
        rkey: 10,
    };
    let parts = [(0..8, REMOTE), (8..24, other), (24..32, REMOTE)];
    let token = bench.qp.read_chain(bench.buffer(32), &parts).unwrap();
    assert_eq!((bench.qp.outstanding_sends(), bench.qp.send_room()), (1, 1));
    let sent = fake::with(|state| state.sent.clone());
    let flags: Vec<u32> = sent.iter().map(|(request, _)| request.send_flags).collect();
    assert_eq!(flags, [0, 0, ffi::IBV_SEND_SIGNALED]);
    let lengths: Vec<u32> = sent.iter().map(|(_, element)| element.length).collect();
    assert_eq!(lengths, [8, 16, 8]);

    let done = bench.complete(token, ffi::IBV_WC_SUCCESS).unwrap();
    assert_eq!((done.kind, done.byte_len), (WorkKind::Read, 32));
    assert_eq!(bench.qp.send_room(), 4);
}

#[test]
fn a_chain_of_writes_follows_one_of_reads() {
    let mut bench = Bench::new(4, 4);
    let parts = [(0..8, REMOTE), (8..24, REMOTE)];
    bench.qp.read_chain(bench.buffer(32), &parts).unwrap();
    let token = bench.qp.write_chain(bench.buffer(32), &parts).unwrap();
    let opcodes: Vec<_> = fake::with(|state| {
        let opcode = |(request, _): &(ffi::ibv_send_wr, _)| request.opcode;
        state.sent.iter().map(opcode).collect()
    });
    assert_eq!(
        opcodes,
        [
            ffi::IBV_WR_RDMA_READ,
            ffi::IBV_WR_RDMA_READ,
            ffi::IBV_WR_RDMA_WRITE,
            ffi::IBV_WR_RDMA_WRITE,
        ]
    );
    let done = bench.complete(token, ffi::IBV_WC_SUCCESS).unwrap();
    assert_eq!((done.kind, done.byte_len), (WorkKind::Write, 0));
    assert_eq!(bench.qp.send_room(), 2);
}

#[test]
fn a_chain_that_fails_tells_the_first_failure_at_its_end() {
    let mut bench = Bench::new(4, 4);
    let parts = [(0..8, REMOTE), (8..16, REMOTE), (16..24, REMOTE)];
    let token = bench.qp.read_chain(bench.buffer(32), &parts).unwrap();
    let words: Vec<u64> = fake::with(|state| {
        state
            .sent
            .iter()
            .map(|(request, _)| request.wr_id)
            .collect()
    });
    assert!(
        bench
            .complete(words[1], ffi::IBV_WC_REM_ACCESS_ERR)
            .is_none()
    );
    assert_eq!(bench.live(), 1);
    let done = bench.complete(token, ffi::IBV_WC_WR_FLUSH_ERR).unwrap();
    assert_eq!((done.status, done.byte_len), (WcStatus::RemAccessErr, 0));
    assert!(done.buffer.is_some());
}

#[test]
fn a_chain_posted_in_part_keeps_its_buffer_and_ends_the_connection() {
    let mut bench = Bench::new(4, 4);
    fake::with(|state| state.accept = Some(2));
    let parts = [(0..8, REMOTE), (8..16, REMOTE), (16..24, REMOTE)];
    let rejected = bench.qp.read_chain(bench.buffer(32), &parts).unwrap_err();
    assert!(matches!(
        rejected.error,
        PostError::ChainBroken {
            posted: 2,
            len: 3,
            ..
        }
    ));
    assert!(rejected.buffer.is_none());
    assert_eq!(bench.live(), 1);
    assert_eq!(bench.qp.queue_pair().state().unwrap(), QpState::Err);
    drop(bench.qp);
    assert_eq!(Arc::strong_count(&bench.alive), 1);
}

#[test]
fn chains_of_no_or_too_many_requests_are_refused() {
    let mut bench = Bench::new(2, 4);
    let error = bench.qp.read_chain(bench.buffer(8), &[]).unwrap_err();
    assert!(matches!(
        error.error,
        PostError::ChainLength { len: 0, max: 2 }
    ));
    let parts = [(0..1, REMOTE), (1..2, REMOTE), (2..3, REMOTE)];
    let error = bench.qp.read_chain(bench.buffer(8), &parts).unwrap_err();
    assert!(matches!(
        error.error,
        PostError::ChainLength { len: 3, max: 2 }
    ));
    bench.qp.send_inline(b"", SendFlags::empty(), None).unwrap();
    let error = bench
        .qp
        .read_chain(bench.buffer(8), &parts[..2])
        .unwrap_err();
    assert!(matches!(error.error, PostError::Full { .. }));
}

#[test]
fn the_queue_pair_goes_before_its_buffers() {
    let mut bench = Bench::new(4, 4);
    bench.qp.post_recv(bench.buffer(8)).unwrap();
    bench.qp.read(bench.buffer(8), 0..8, REMOTE).unwrap();
    drop(bench.qp);
    let order = fake::with(|state| state.destroyed.clone());
    assert_eq!(order[0], "qp");
    assert_eq!(order.iter().filter(|name| **name == "buffer").count(), 2);
    assert_eq!(Arc::strong_count(&bench.alive), 1);
}

#[test]
fn buffers_leak_if_the_queue_pair_cannot_be_destroyed() {
    let mut bench = Bench::new(4, 4);
    bench.qp.post_recv(bench.buffer(8)).unwrap();
    fake::with(|state| state.busy.push("qp"));
    drop(bench.qp);
    assert_eq!(Arc::strong_count(&bench.alive), 2);
}

#[test]
fn slots_never_exceed_the_device_and_can_move_to_another_thread() {
    let mut bench = Bench::new(100, 0);
    assert_eq!(bench.qp.send_room(), 8);
    let full = bench.qp.post_recv(bench.buffer(8)).unwrap_err();
    assert!(matches!(full.error, PostError::Full { max: 0, .. }));
    fn assert_send<T: Send>(_: &T) {}
    assert_send(&bench.qp);
}

/// Half a chain: the device may be at work on it, so its buffers stay until the queue pair is gone.
#[test]
fn a_prepared_chain_posted_in_part_keeps_its_buffers() {
    let mut bench = Bench::new(4, 4);
    let buffers = vec![bench.buffer(64), bench.buffer(64)];
    let requests = [0, 1, 0].map(|buffer| PreparedRequest::write(buffer, 0..8, REMOTE, None));
    let chain = bench.qp.prepare(buffers, &requests).unwrap();
    fake::with(|state| state.accept = Some(2));
    let error = bench.qp.execute(chain).unwrap_err();
    assert!(matches!(
        error,
        PostError::ChainBroken {
            posted: 2,
            len: 3,
            ..
        }
    ));
    assert!(bench.qp.release(chain).is_err());
    assert!(bench.qp.prepared_buffers(chain).is_none());
    assert_eq!((bench.live(), bench.qp.send_room()), (2, 2));
    let Bench { qp, alive } = bench;
    fake::with(|state| state.destroyed.clear());
    drop(qp);
    let gone = fake::with(|state| state.destroyed.clone());
    assert_eq!(gone[0], "qp");
    assert_eq!(gone.iter().filter(|name| **name == "buffer").count(), 2);
    assert_eq!(Arc::strong_count(&alive), 1);
}

/// A queue pair that could not be destroyed may still be at work.
#[test]
fn prepared_buffers_leak_with_their_queue_pair() {
    let mut bench = Bench::new(4, 4);
    let buffers = vec![bench.buffer(64)];
    let request = PreparedRequest::write(0, 0..8, REMOTE, None);
    bench.qp.prepare(buffers, &[request]).unwrap();
    fake::with(|state| state.busy.push("qp"));
    let Bench { qp, alive } = bench;
    drop(qp);
    assert_eq!(Arc::strong_count(&alive), 2);
}
