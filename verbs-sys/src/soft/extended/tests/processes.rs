//! Indirect keys between processes, by each way that requests go: shared memory and the kernel's copies,
//! and sockets, where the owner of the memory executes them.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use super::support::{ALL, End, Memory, Region, World, made};
use crate::ffi::*;

const PEER: &str = "VERBS_EXTENDED_PEER";
const SIGNALED: u32 = IBV_SEND_SIGNALED;
/// Words of each region of the peer: enough for a message that does not fit a record.
const WORDS: usize = 1024;

/// What the peer offers: a region's key, and the address of its first word.
#[derive(Clone, Copy, Debug)]
struct Offer {
    rkey: u32,
    addr: u64,
}

/// The peer: regions of three kinds, and a queue pair that answers.
struct Peer {
    child: Child,
    line: BufReader<UnixStream>,
}

impl Peer {
    fn start(variable: Option<&str>) -> Self {
        let (stream, theirs) = UnixStream::pair().unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        if let Some(variable) = variable {
            let value = if variable.ends_with("CMA") { "0" } else { "1" };
            command.env(variable, value);
        }
        let child = command
            .args(["--exact", "soft::extended::tests::processes::the_peer"])
            .args(["--nocapture"])
            .env(PEER, "1")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        Self {
            child,
            line: BufReader::new(stream),
        }
    }

    fn say(&mut self, text: &str) {
        writeln!(self.line.get_mut(), "{text}").unwrap();
    }

    fn hear(&mut self) -> Vec<u64> {
        hear(&mut self.line).expect("the peer has failed")
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn hear(line: &mut impl BufRead) -> Option<Vec<u64>> {
    let mut text = String::new();
    line.read_line(&mut text).ok()?;
    text.split_whitespace()
        .map(|word| word.parse().ok())
        .collect::<Option<Vec<_>>>()
        .filter(|words| !words.is_empty())
}

/// The other process; does nothing where it is run as a test.
#[test]
fn the_peer() {
    if std::env::var_os(PEER).is_none() {
        return;
    }
    let world = World::open();
    let end = End::new(&world, IBV_QPT_RC);
    let bits = |memory: &Memory| memory.addr() % rustix::param::page_size() as u64;
    let (moved, demand) = (Memory::new(WORDS), Memory::new(WORDS));
    let iova = bits(&moved);
    let demanded = demand.register(end.pd, ALL | IBV_ACCESS_ON_DEMAND);
    let mut attr = ibv_alloc_dm_attr {
        length: WORDS * 8,
        ..ibv_alloc_dm_attr::default()
    };
    // SAFETY: the context and the domain are live.
    let (dm, device) = unsafe {
        let dm = made(world.ops().alloc_dm.unwrap()(world.context, &raw mut attr)).unwrap();
        let access = ALL | IBV_ACCESS_ZERO_BASED;
        let mr = world.ops().reg_dm_mr.unwrap()(end.pd, dm, 0, WORDS * 8, access);
        (dm, Region(made(mr).unwrap()))
    };
    let region = moved.register_at(end.pd, iova, ALL).unwrap();
    let line = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned().unwrap());
    let mut line = BufReader::new(line);
    let tell = |line: &mut BufReader<UnixStream>, words: &[u64]| {
        let text: Vec<String> = words.iter().map(u64::to_string).collect();
        writeln!(line.get_mut(), "{}", text.join(" ")).unwrap();
    };
    tell(
        &mut line,
        &[
            end.qpn().into(),
            region.rkey().into(),
            iova,
            demanded.rkey().into(),
            demand.addr(),
            device.rkey().into(),
            0,
        ],
    );
    let qpn = hear(&mut line).unwrap()[0];
    end.connect(&world, qpn as u32);
    // Into the region, and out of it: a message as long as both of its halves.
    let half = WORDS * 4;
    end.receive(1, &mut [region.element(iova, half)]);
    end.receive(2, &mut []);
    tell(&mut line, &[1]);
    assert_eq!(end.next().wr_id, 1);
    end.post(|calls| {
        calls.next(3, SIGNALED);
        calls.wr_send();
        calls.wr_set_sge(region.lkey(), iova, half as u32);
    });
    let wc = end.next();
    assert_eq!((wc.wr_id, wc.opcode), (2, IBV_WC_RECV_RDMA_WITH_IMM));
    // Whatever was changed is told at the end.
    hear(&mut line).unwrap();
    let mut word = 0u64;
    // SAFETY: live, and a place for the word.
    let code = unsafe {
        (*dm).memcpy_from_dm.unwrap()((&raw mut word).cast(), dm, WORDS as u64 * 8 - 8, 8)
    };
    assert_eq!(code, 0);
    tell(
        &mut line,
        &[moved.get(WORDS - 1), demand.get(WORDS - 1), word],
    );
    hear(&mut line);
    std::process::exit(0);
}

fn traffic(variable: Option<&str>) {
    let world = World::open();
    let mut peer = Peer::start(variable);
    let end = End::new(&world, IBV_QPT_RC);
    let told = peer.hear();
    let offers: Vec<Offer> = told[1..]
        .chunks(2)
        .map(|pair| Offer {
            rkey: pair[0] as u32,
            addr: pair[1],
        })
        .collect();
    peer.say(&end.qpn().to_string());
    end.connect(&world, told[0] as u32);
    peer.hear();
    let memory = Memory::new(WORDS);
    let iova = memory.addr() % rustix::param::page_size() as u64;
    let local = memory.register_at(end.pd, iova, ALL).unwrap();
    let half = WORDS as u32 * 4;
    // A long message from a region with addresses of its own into another, and back.
    let pattern = |word: usize| 3 * word as u64 + 1;
    (0..WORDS / 2).for_each(|word| memory.set(word, pattern(word)));
    end.receive(
        1,
        &mut [local.element(iova + u64::from(half), half as usize)],
    );
    let code = end.build(|calls| {
        calls.next(2, SIGNALED);
        calls.wr_send();
        calls.wr_set_sge(local.lkey(), iova, half);
    });
    assert_eq!(code, 0);
    for _ in 0..2 {
        assert_eq!(end.next().status, IBV_WC_SUCCESS);
    }
    (0..WORDS / 2).for_each(|word| assert_eq!(memory.get(WORDS / 2 + word), pattern(word)));
    // Every operation on each kind of memory.
    for (kind, offer) in offers.iter().enumerate() {
        let last = offer.addr + 8 * (WORDS as u64 - 1);
        let element = |word: u64| (local.lkey(), iova + 8 * word, 8);
        memory.set(0, 100 + kind as u64);
        let run = |build: &dyn Fn(&super::support::Calls)| {
            let wc = end.post(|calls| {
                calls.next(3, SIGNALED);
                build(calls);
            });
            wc.opcode
        };
        let sge = |calls: &super::support::Calls, (lkey, addr, len): (u32, u64, u32)| {
            calls.wr_set_sge(lkey, addr, len);
        };
        let opcode = run(&|calls| {
            calls.wr_rdma_write(offer.rkey, last);
            sge(calls, element(0));
        });
        assert_eq!(opcode, IBV_WC_RDMA_WRITE);
        run(&|calls| {
            calls.wr_rdma_read(offer.rkey, last);
            sge(calls, element(1));
        });
        assert_eq!(memory.get(1), 100 + kind as u64);
        run(&|calls| {
            calls.wr_atomic_fetch_add(offer.rkey, last, 1000);
            sge(calls, element(2));
        });
        assert_eq!(memory.get(2), 100 + kind as u64);
        run(&|calls| {
            calls.wr_atomic_cmp_swp(offer.rkey, last, 1100 + kind as u64, 7);
            sge(calls, element(3));
        });
        assert_eq!(memory.get(3), 1100 + kind as u64);
        let opcode = run(&|calls| calls.atomic_write(offer.rkey, last, 20 + kind as u64));
        assert_eq!(opcode, IBV_WC_ATOMIC_WRITE);
        run(&|calls| {
            calls.wr_rdma_read(offer.rkey, last);
            sge(calls, element(4));
        });
        assert_eq!(memory.get(4), 20 + kind as u64);
    }
    let first = offers[0];
    memory.set(0, 55);
    end.post(|calls| {
        calls.next(4, SIGNALED);
        calls.wr_rdma_write_imm(first.rkey, first.addr + 8 * (WORDS as u64 - 1), 9);
        calls.wr_set_sge(local.lkey(), iova, 8);
    });
    peer.say("0");
    assert_eq!(peer.hear(), [55, 21, 22]);
    // What is beyond a region is not reached by its addresses.
    let beyond = first.addr + 8 * WORDS as u64;
    let code = end.build(|calls| {
        calls.next(5, SIGNALED);
        calls.wr_rdma_write(first.rkey, beyond);
        calls.wr_set_sge(local.lkey(), iova, 8);
    });
    assert_eq!(code, 0);
    assert_eq!(end.next().status, IBV_WC_REM_ACCESS_ERR);
    peer.say("0");
    local.deregister();
    end.destroy();
}

#[test]
fn the_poster_copies() {
    traffic(None);
}

#[test]
fn the_owner_copies_what_the_kernel_would() {
    traffic(Some("VERBS_SOFT_CMA"));
}

#[test]
fn the_owner_copies_everything() {
    traffic(Some("VERBS_SOFT_STRICT"));
}
