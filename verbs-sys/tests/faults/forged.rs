//! Peers that speak the protocol well until they lie.

mod answers;
mod requests;

use std::net::{TcpListener, TcpStream};

use verbs_sys::{Gid, QueuePairEndpoint};

use crate::support::{
    Grant, Host, Link, LinkKind, Made, Process, Random, Record, Setup, await_requests, connect,
    network, record, settle, start_traffic,
    wire::{self, Hello},
};

/// The packet sequence number of a liar.
const PSN: u32 = 0x123;

/// A process that is lied to, with a connection to an honest peer that goes on meanwhile.
struct Bed {
    victim: Process,
    honest: Process,
    link: Link,
    /// The liar's host.
    there: String,
    /// Of the liar's process, which is none.
    slot: u32,
    liars: u32,
}

/// A queue pair that believes to be connected, and what it is connected to.
struct Lied {
    made: Made,
    liar: u32,
}

impl Bed {
    fn new(random: &mut Random) -> Self {
        let [_, there] = network::hosts();
        let [mut victim, mut honest] = Host::two(LinkKind::Tcp).map(|host| Process::start(&host));
        let link = connect(&mut victim, &mut honest, Setup::patient());
        start_traffic([&mut victim, &mut honest], link, random, None);
        let taken = link.qp_nums[1] >> 14;
        Self {
            victim,
            honest,
            link,
            there,
            slot: if taken == 1001 { 1002 } else { 1001 },
            liars: 0,
        }
    }

    /// A new queue pair of the victim, and a new number for the liar.
    fn connect(&mut self, setup: Setup) -> Lied {
        self.liars += 1;
        let liar = self.slot << 14 | self.liars & 0x3fff;
        let made = self.victim.create(setup);
        let endpoint = QueuePairEndpoint {
            qp_num: liar,
            psn: PSN,
            gid: Gid(network::ADDRESSES[1].to_ipv6_mapped().octets()),
            lid: 0,
            mtu: 5,
        };
        let peer = Made {
            id: 0,
            endpoint: endpoint.to_string(),
            grant: Grant {
                addr: 0x1000,
                rkey: 0x77,
            },
        };
        self.victim.connect(&made, &peer);
        Lied { made, liar }
    }

    /// A connection for the liar's requests.
    fn dial(&self, lied: &Lied) -> TcpStream {
        let to = (network::ADDRESSES[0], network::port(lied.made.qp_num()));
        let hello = Hello {
            source_qpn: lied.liar,
            dest_qpn: lied.made.qp_num(),
            psn: PSN,
            executed: 0,
        };
        let dial = || TcpStream::connect(to).expect("the port is closed");
        let mut stream = network::within(&self.there, dial);
        assert!(
            wire::greet(&mut stream, hello),
            "an honest greeting is refused"
        );
        stream
    }

    /// Where the victim's requests come to.
    fn listen(&self) -> TcpListener {
        let port = network::port(self.slot << 14);
        let listen = || TcpListener::bind(("0.0.0.0", port)).expect("the port is taken");
        network::within(&self.there, listen)
    }

    /// Asserts that others have noticed nothing, and lets go of the queue pair.
    fn close(&mut self, lied: &Lied) {
        self.victim.assert_guards(lied.made.id);
        self.victim.destroy(lied.made.id);
        let id = self.link.ends[0];
        let so_far = self.victim.report(id).succeeded;
        await_requests(&mut self.victim, id, so_far + 1);
    }

    fn finish(mut self, record: &mut Record) {
        self.victim.stop_traffic(self.link.ends[0]);
        self.honest.stop_traffic(self.link.ends[1]);
        for report in settle(&mut self.victim, &mut self.honest, self.link) {
            report.assert_succeeded("the honest connection");
            record.add(&report);
        }
    }
}

fn begin(scenario: &'static str) -> (Random, Record) {
    (Random::new(record::seed()), Record::new(scenario))
}
