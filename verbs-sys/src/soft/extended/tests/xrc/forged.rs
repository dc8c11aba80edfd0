//! A peer on another host that names queues as it likes.

use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::process::Command;

use rustix::net::{AddressFamily, RecvFlags, SocketType};

use super::super::support::{End, PSN, World, address, attributes, connect_at, poll};
use super::support::*;
use super::{CREATE, next};
use crate::ffi::*;
use crate::soft::identity;
use crate::soft::layout::qpn_slot;
use crate::soft::link::stream::frame::{Header, Opcode};
use crate::soft::link::stream::mpa::{Answer, Hello, Outcome};
use crate::soft::link::stream::payload::ReadRequest;
use crate::soft::link::stream::socket::{Filled, Socket};
use crate::soft::link::stream::terminate::Terminate;

const VICTIM: &str = "VERBS_XRC_VICTIM";
const BASE_PORT: u16 = 17_500;
/// Where the liar is: nobody else is there.
const THERE: Ipv4Addr = Ipv4Addr::new(127, 0, 0, 9);

/// The liar's connection with a queue pair.
struct Liar {
    socket: Socket,
    msn: [u32; 2],
}

/// Connects a queue pair with the liar, and the liar with it, whose requests are those of XRC or not.
fn dial(world: &World, qp: *mut ibv_qp, xrc: bool) -> Result<Liar, Outcome> {
    // As it is one of this process, it is nobody's.
    let liar = qpn(qp) ^ 1 << 20;
    let mut there = address(world);
    there.grh.dgid = ibv_gid {
        raw: identity::gid_of(THERE.into()),
    };
    connect_at(&there, qp, liar);
    let fd = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&fd, &std::net::SocketAddrV4::new(THERE, 0)).unwrap();
    let port = BASE_PORT + qpn_slot(qpn(qp)) as u16;
    let to = std::net::SocketAddrV4::new(Ipv4Addr::LOCALHOST, port);
    rustix::net::connect(&fd, &to).unwrap();
    let hello = Hello {
        source_qpn: liar,
        dest_qpn: qpn(qp),
        psn: PSN,
        generation: 1,
        patience_ms: 1000,
        executed: 0,
        ird: 1,
        ord: 1,
        rnr_retry: 0,
        xrc,
        crc: false,
    };
    rustix::net::send(&fd, &hello.encode(), rustix::net::SendFlags::empty()).unwrap();
    let answer = receive(&fd, Answer::LEN);
    let (answer, _) = Answer::decode(&answer).unwrap().unwrap();
    match answer.result {
        Outcome::Accepted => Ok(Liar {
            socket: Socket::new(fd, &[], false),
            msn: [0; 2],
        }),
        other => Err(other),
    }
}

fn receive(fd: &OwnedFd, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let (_, read) = rustix::net::recv(fd, &mut bytes[..], RecvFlags::WAITALL).unwrap();
    assert_eq!(read, len);
    bytes
}

impl Liar {
    fn untagged(&mut self, opcode: Opcode, field: u32, last: bool, payload: &[u8]) {
        let queue = opcode.queue().unwrap();
        let msn = &mut self.msn[queue as usize];
        *msn += 1;
        let header = Header::Untagged {
            opcode,
            last,
            field,
            queue,
            msn: *msn,
            offset: 0,
        };
        self.socket.output.frame(&header, payload, false);
    }

    fn select(&mut self, number: u32) {
        self.untagged(Opcode::Announce, number, true, &[]);
    }

    fn send(&mut self, last: bool) {
        self.untagged(Opcode::Send, 0, last, &[0xee; 8]);
    }

    fn write(&mut self, shared: &Shared) {
        let header = Header::Tagged {
            opcode: Opcode::Write,
            last: true,
            stag: shared.region.rkey(),
            offset: shared.memory.addr(),
        };
        self.socket.output.frame(&header, &[0xee; 8], false);
    }

    fn read(&mut self, shared: &Shared) {
        let read = ReadRequest {
            sink_stag: 1,
            sink_offset: 0,
            len: 8,
            source_stag: shared.region.rkey(),
            source_offset: shared.memory.addr(),
        };
        self.untagged(Opcode::ReadRequest, 0, true, &read.encode());
    }

    /// What all of that comes to in the end.
    fn status(mut self) -> ibv_wc_status {
        assert!(self.socket.flush());
        loop {
            match self.socket.input.next(false).unwrap() {
                Some((header, payload, taken)) => {
                    let Header::Untagged { opcode, .. } = header else {
                        panic!("{header:?}");
                    };
                    if opcode == Opcode::Terminate {
                        return Terminate::decode(payload).unwrap().status();
                    }
                    self.socket.input.consume(taken);
                }
                None => match self.socket.input.fill(&self.socket.fd) {
                    Filled::Ended => panic!("it ends without a reason"),
                    _ => std::thread::yield_now(),
                },
            }
        }
    }
}

type Lie = fn(&mut Liar, [&Shared; 3]);

/// The victim and the liar are one process: the liar needs none of the device.
#[test]
fn a_liar_uses_no_queue_but_those_of_the_domain() {
    if std::env::var_os(VICTIM).is_none() {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "--nocapture"])
            .arg(concat!(
                "soft::extended::tests::xrc::forged::",
                "a_liar_uses_no_queue_but_those_of_the_domain"
            ))
            .env(VICTIM, "1")
            .env("VERBS_SOFT_LISTEN", format!("127.0.0.1:{BASE_PORT}"))
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&child.stderr);
        assert!(child.status.success(), "{said}");
        let said = String::from_utf8_lossy(&child.stdout);
        assert!(said.contains("1 passed"), "{said}");
        return;
    }
    let world = World::open();
    let [xrcd, other] = [0; 2].map(|_| open(&world, ANY, CREATE).unwrap());
    let queues = [xrcd, xrcd, other].map(|xrcd| Shared::new(&world, xrcd, 64));
    let all = [&queues[0], &queues[1], &queues[2]];
    let lies: [(&str, Lie, ibv_wc_status); 8] = [
        (
            "a SEND for no queue",
            |liar, _| liar.send(true),
            IBV_WC_REM_INV_REQ_ERR,
        ),
        (
            "a WRITE for no queue",
            |liar, all| liar.write(all[0]),
            IBV_WC_REM_INV_REQ_ERR,
        ),
        (
            "a READ for no queue",
            |liar, all| liar.read(all[0]),
            IBV_WC_REM_INV_REQ_ERR,
        ),
        (
            "a number that is none",
            |liar, _| liar.select(0),
            IBV_WC_REM_INV_REQ_ERR,
        ),
        (
            "a queue of another domain",
            |liar, all| {
                liar.select(all[2].number);
                liar.send(true);
            },
            IBV_WC_REM_INV_REQ_ERR,
        ),
        (
            "another queue in the middle of a message",
            |liar, all| {
                liar.select(all[0].number);
                liar.send(false);
                liar.select(all[1].number);
            },
            IBV_WC_REM_OP_ERR,
        ),
        (
            "a WRITE by a key of another queue's domain",
            |liar, all| {
                liar.select(all[1].number);
                liar.write(all[0]);
            },
            IBV_WC_REM_ACCESS_ERR,
        ),
        (
            "a READ by a key of another queue's domain",
            |liar, all| {
                liar.select(all[1].number);
                liar.read(all[0]);
            },
            IBV_WC_REM_ACCESS_ERR,
        ),
    ];
    for (what, lie, status) in lies {
        for queue in all {
            queue.receive(1, 0, 1);
        }
        let target = target_qp(&world, xrcd).unwrap();
        let mut liar = dial(&world, target, true).unwrap();
        let is_honest_first = !what.ends_with("no queue");
        if is_honest_first {
            liar.select(all[1].number);
            liar.send(true);
        }
        lie(&mut liar, all);
        assert_eq!(liar.status(), status, "{what}");
        if is_honest_first {
            let wc = next(all[1].cq);
            assert_eq!((wc.status, wc.qp_num), (IBV_WC_SUCCESS, qpn(target)));
        }
        // What was begun ends, and nothing else has come.
        let flushed: Vec<_> = all.iter().flat_map(|queue| poll(queue.cq, 4)).collect();
        let begun = usize::from(status == IBV_WC_REM_OP_ERR);
        assert_eq!(flushed.len(), begun, "{what}");
        assert!(flushed.iter().all(|wc| wc.status == IBV_WC_WR_FLUSH_ERR));
        destroy_qp(target);
    }
    // The two kinds of connections do not mix.
    let target = target_qp(&world, xrcd).unwrap();
    assert_eq!(dial(&world, target, false).err(), Some(Outcome::NotYet));
    destroy_qp(target);
    let plain = || End::with(&world, world.pd(), world.cq(8), &attributes(IBV_QPT_RC));
    let end = plain();
    assert_eq!(dial(&world, end.qp, true).err(), Some(Outcome::NotYet));
    end.destroy();
    let end = plain();
    let mut liar = dial(&world, end.qp, false).unwrap();
    liar.select(all[0].number);
    assert_eq!(liar.status(), IBV_WC_REM_OP_ERR);
    end.destroy();
    queues.into_iter().for_each(Shared::destroy);
    for xrcd in [xrcd, other] {
        assert_eq!(close(&world, xrcd), 0);
    }
}
