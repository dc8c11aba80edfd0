//! Strangers at the port where the device listens.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Shutdown, TcpStream, UdpSocket},
    time::Duration,
};

use crate::support::{
    Host, LinkKind, Process, Random, Record, Setup, assert_works, connect, network, random::bytes,
    record, settle, start_traffic,
};

/// Connections that are opened and then say nothing: more than may do so at once.
const HALF_OPEN: usize = 300;
/// What the device may keep: spare buffers, and what the allocator does not give back.
const KEPT_KIB: usize = 24 << 10;

/// Longer than any connection may take to say what it is for.
const PATIENCE: Duration = Duration::from_secs(60);

/// What begins as MPA's request does.
const REQUEST: &[u8; 16] = b"MPA ID Req Frame";

/// What happens while there is traffic.
type Meanwhile<'a> = &'a mut dyn FnMut(&mut Process, &mut Process);

/// Whatever strangers say, those that are connected notice nothing, and nothing of it stays.
#[test]
#[ignore = "cargo xtask faults runs it"]
fn garbage_at_the_port() {
    let [_, there] = network::hosts();
    let [mut a, mut b] = Host::two(LinkKind::Tcp).map(|host| Process::start(&host));
    let mut random = Random::new(record::seed());
    let mut seeds = random.clone();
    let mut record = Record::new("garbage at the port");
    let link = connect(&mut a, &mut b, Setup::patient());
    let port = network::port(link.qp_nums[0]);
    let mut traffic = |a: &mut Process, b: &mut Process, limit, meanwhile: Meanwhile<'_>| {
        start_traffic([a, b], link, &mut seeds, limit);
        meanwhile(a, b);
        if limit.is_none() {
            a.stop_traffic(link.ends[0]);
            b.stop_traffic(link.ends[1]);
        }
        let reports = settle(a, b, link);
        for report in &reports {
            report.assert_succeeded("the connected pair");
        }
        a.assert_guards(link.ends[0]);
        reports
    };
    traffic(&mut a, &mut b, Some(50), &mut |_, _| {});
    let descriptors = a.usage().descriptors;
    let mut resident = None;
    let mut reports = None;
    while record.goes_on() {
        let mut kinds = Vec::new();
        reports = Some(traffic(&mut a, &mut b, None, &mut |a, b| {
            let (did, half_open) = network::within(&there, || attack(port, &mut random));
            kinds = did;
            // There is room for others while they are there.
            let new = assert_works(a, b, &mut random, 20);
            a.destroy(new.ends[0]);
            b.destroy(new.ends[1]);
            drop(half_open);
        }));
        for kind in kinds {
            record.count(kind);
        }
        let after = a.await_descriptors(descriptors).resident_kib;
        // The first round is to warm up.
        let before = *resident.get_or_insert(after);
        assert!(after < before + KEPT_KIB, "{before} KiB became {after} KiB");
    }
    for report in reports.iter().flatten() {
        record.add(report);
    }
}

/// Everything that a stranger may do: what each was, and those that are still there.
fn attack(port: u16, random: &mut Random) -> (Vec<&'static str>, Vec<TcpStream>) {
    let to = (network::ADDRESSES[0], port);
    let open = || {
        let stream = TcpStream::connect(to).expect("the port is closed");
        stream
            .set_read_timeout(Some(PATIENCE))
            .expect("no time-out");
        stream
    };
    let mut kinds = Vec::new();
    // They may be closed at any time; what becomes of what is written does not matter.
    let datagrams = UdpSocket::bind("0.0.0.0:0").expect("no datagrams");
    for _ in 0..20 {
        let _ = datagrams.send_to(&bytes(random.next(), random.len(2000)), to);
        kinds.push("noise by UDP");
        drop(open());
        kinds.push("looked");
        let mut stream = open();
        let _ = stream.write_all(&bytes(random.next(), random.len(100_000)));
        kinds.push("noise");
        let mut stream = open();
        let _ = stream.write_all(REQUEST);
        let _ = stream.write_all(&bytes(random.next(), random.len(2000)));
        assert_ended(stream);
        kinds.push("noise behind MPA's key");
        // A good header, private data of random length, of which a part comes.
        let mut stream = open();
        let announced = random.below(513) as u16;
        let mut greeting = REQUEST.to_vec();
        greeting.extend([0x50, 2]);
        greeting.extend(announced.to_be_bytes());
        greeting.extend(bytes(
            random.next(),
            random.below(u64::from(announced) + 1) as usize,
        ));
        greeting.truncate(random.len(greeting.len() as u64));
        let _ = stream.write_all(&greeting);
        assert_ended(stream);
        kinds.push("part of a greeting");
    }
    let mut half_open: Vec<TcpStream> = (0..HALF_OPEN).map(|_| open()).collect();
    kinds.extend(half_open.iter().map(|_| "half open"));
    for stream in &mut half_open {
        let _ = stream.write_all(&REQUEST[..random.below(16) as usize]);
    }
    (kinds, half_open)
}

/// The device closes a connection whose other side says no more, and does not say anything itself.
fn assert_ended(mut stream: TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let mut answer = Vec::new();
    let ended = stream.read_to_end(&mut answer);
    let hangs = ended.is_err_and(|error| error.kind() == ErrorKind::WouldBlock);
    assert!(!hangs, "a connection that nobody needs is kept");
    assert_eq!(answer, b"", "an answer to no greeting");
}
