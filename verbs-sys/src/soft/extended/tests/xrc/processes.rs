//! Between processes, by each way that requests go.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};
use std::ptr;

use super::super::support::{World, connect, made, poll};
use super::support::*;
use super::{CREATE, SIGNALED};
use crate::ffi::*;
use crate::soft::PROVIDER;

const PEER: &str = "VERBS_XRC_PEER";

/// Says and hears lines of numbers.
struct Line(BufReader<UnixStream>);

impl Line {
    fn say(&mut self, numbers: &[u64]) {
        let text: Vec<String> = numbers.iter().map(u64::to_string).collect();
        writeln!(self.0.get_mut(), "{}", text.join(" ")).unwrap();
    }

    fn hear(&mut self) -> Vec<u64> {
        let mut text = String::new();
        let read = self.0.read_line(&mut text).unwrap();
        assert_ne!(read, 0, "the other process has ended");
        let words = text.split_whitespace();
        words.map(|word| word.parse().unwrap()).collect()
    }
}

/// The next completion, slept for.
fn sleep_for(channel: *mut ibv_comp_channel, cq: *mut ibv_cq) -> ibv_wc {
    loop {
        // SAFETY: live objects, and places for the results.
        unsafe {
            let code = (*(*cq).context).ops.req_notify_cq.unwrap()(cq, 0);
            assert_eq!(code, 0);
        }
        if let Some(wc) = poll(cq, 1).pop() {
            return wc;
        }
        let (mut told, mut context) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: as above.
        unsafe {
            let code = (PROVIDER.get_cq_event)(channel, &raw mut told, &raw mut context);
            assert_eq!((code, told), (0, cq));
            (PROVIDER.ack_cq_events)(cq, 1);
        }
    }
}

/// The process that receives; does nothing where it is run as a test.
#[test]
fn the_peer() {
    if std::env::var_os(PEER).is_none() {
        return;
    }
    let world = World::open();
    let line = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut line = Line(BufReader::new(line));
    let xrcd = open(&world, ANY, CREATE).unwrap();
    // SAFETY: the context is open.
    let channel = made(unsafe { (PROVIDER.create_comp_channel)(world.context) }).unwrap();
    // SAFETY: as above.
    let cq = made(unsafe { (PROVIDER.create_cq)(world.context, 8, ptr::null_mut(), channel, 0) })
        .unwrap();
    let queues = [Shared::with(&world, xrcd, cq), Shared::new(&world, xrcd, 8)];
    let target = target_qp(&world, xrcd).unwrap();
    let [asleep, polled] = &queues;
    line.say(&[
        qpn(target).into(),
        asleep.number.into(),
        polled.number.into(),
        asleep.region.rkey().into(),
        asleep.memory.addr(),
    ]);
    let sender = line.hear()[0] as u32;
    connect(&world, target, sender);
    line.say(&[1]);
    // Those of the one are slept for, while messages for the other go by the same queue pair.
    for round in 0..10 {
        for (queue, words) in [(asleep, 1), (polled, WORDS)] {
            queue.receive(round, 0, words);
        }
        line.say(&[round]);
        let wc = sleep_for(channel, cq);
        assert_eq!((wc.wr_id, wc.status), (round, IBV_WC_SUCCESS));
        assert_eq!((wc.qp_num, wc.src_qp), (qpn(target), sender));
        assert_eq!((wc.byte_len, asleep.memory.get(0)), (8, 100 + round));
        let wc = super::next(polled.cq);
        assert_eq!((wc.wr_id, wc.status), (round, IBV_WC_SUCCESS));
        assert_eq!(wc.byte_len, 8 * WORDS as u32);
        assert_eq!(polled.memory.get(WORDS - 1), WORDS as u64);
    }
    // What was written and added by then, with its immediate.
    asleep.receive(77, 0, 1);
    asleep.memory.set(5, 50);
    line.say(&[1]);
    let wc = sleep_for(channel, cq);
    assert_eq!((wc.wr_id, wc.imm_data), (77, 9));
    assert_eq!(wc.opcode, IBV_WC_RECV_RDMA_WITH_IMM);
    line.say(&[
        asleep.memory.get(4),
        asleep.memory.get(5),
        asleep.memory.get(6),
    ]);
    // A queue that goes is refused to requests that name it.
    let number = line.hear()[0] as u32;
    assert_eq!(number, polled.number);
    polled.destroy_srq();
    line.say(&[1]);
    line.hear();
    destroy_qp(target);
    let [asleep, polled] = queues;
    polled.destroy_rest();
    asleep.destroy();
    // SAFETY: live, and used no more.
    assert_eq!(unsafe { (PROVIDER.destroy_comp_channel)(channel) }, 0);
    assert_eq!(close(&world, xrcd), 0);
    line.say(&[1]);
    std::process::exit(0);
}

struct Peer {
    child: Child,
    line: Line,
}

impl Peer {
    fn start(setting: Option<(&str, &str)>) -> Self {
        let (stream, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        let child = command
            .args(["--exact", "soft::extended::tests::xrc::processes::the_peer"])
            .args(["--nocapture"])
            .env(PEER, "1")
            .envs(setting)
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            line: Line(BufReader::new(stream)),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn traffic(setting: Option<(&str, &str)>) {
    let world = World::open();
    let mut peer = Peer::start(setting);
    let sender = sender(&world);
    let told = peer.line.hear();
    let (first, second) = (told[1] as u32, told[2] as u32);
    let (rkey, addr) = (told[3] as u32, told[4]);
    peer.line.say(&[sender.qpn().into()]);
    peer.line.hear();
    sender.connect(&world, told[0] as u32);
    let source = Source::of(&sender);
    for round in 0..10 {
        peer.line.hear();
        source.memory.set(0, 100 + round);
        source.send(&sender, second, WORDS, 1, 0);
        source.send(&sender, first, 1, 2, 0);
        for wr_id in [1, 2] {
            let wc = sender.next();
            assert_eq!((wc.wr_id, wc.status), (wr_id, IBV_WC_SUCCESS));
        }
    }
    peer.line.hear();
    let word = |word: u64| addr + 8 * word;
    source.memory.set(0, 11);
    let post = |build: &dyn Fn(&super::super::support::Calls)| {
        sender.post(|calls| {
            calls.next(1, SIGNALED);
            build(calls);
            calls.wr_set_xrc_srqn(first);
            source.words(calls, 1);
        });
        source.memory.get(0)
    };
    post(&|calls| calls.wr_rdma_write(rkey, word(4)));
    assert_eq!(
        post(&|calls| calls.wr_atomic_fetch_add(rkey, word(5), 3)),
        50
    );
    assert_eq!(
        post(&|calls| calls.wr_atomic_cmp_swp(rkey, word(5), 53, 60)),
        53
    );
    assert_eq!(post(&|calls| calls.wr_rdma_read(rkey, word(5))), 60);
    post(&|calls| calls.wr_rdma_write_imm(rkey, word(6), 9));
    assert_eq!(peer.line.hear(), [11, 60, 60]);
    peer.line.say(&[second.into()]);
    peer.line.hear();
    source.send(&sender, second, 1, 5, 0);
    let wc = sender.next();
    assert_eq!((wc.wr_id, wc.status), (5, IBV_WC_REM_INV_REQ_ERR));
    peer.line.say(&[1]);
    peer.line.hear();
    source.region.deregister();
    sender.destroy();
}

#[test]
fn the_poster_copies() {
    traffic(None);
}

#[test]
fn the_owner_copies_what_the_kernel_would() {
    traffic(Some(("VERBS_SOFT_CMA", "0")));
}

#[test]
fn the_owner_copies_everything() {
    traffic(Some(("VERBS_SOFT_STRICT", "1")));
}
