//! RDMA WRITE and READ.

use verbs_sys::{QpState, WcOpcode, WcStatus};

use crate::support::{ALL_ACCESS, QpSetup, Queue, REGION, Recv, Request, Target, pattern, scripts};

/// Lengths and offsets at both ends that meet all alignments, pages and the end of the region.
const CASES: [(usize, usize, usize); 10] = [
    (1, 0, 0),
    (8, 8, 16),
    (8, 3, 5),
    (64, 64, 64),
    (100, 1, 0),
    (1000, 7, 4090),
    (4096, 0, 4096),
    (5000, 13, 8191),
    (40_000, 9, 100),
    (REGION, 0, 0),
];

scripts! {
    fn a_write_changes_its_target_alone(ends: &mut Ends) {
        let link = ends.link();
        for (id, (len, from, to)) in CASES.into_iter().enumerate() {
            let bytes = pattern(len, len);
            ends.a.store(link.a_mem, from, &bytes);
            ends.b.fill(link.b_mem, 0xEE);
            let request = Request::write(&[link.a_mem.sge(from, len)], link.b_mem.at(to));
            let written = ends.a.transfer(link.a, request.id(id as u64));
            assert_eq!(written.opcode(), WcOpcode::RdmaWrite);
            let mut expected = vec![0xEE; REGION];
            expected[to..to + len].copy_from_slice(&bytes);
            assert!(ends.b.load(link.b_mem, 0, REGION) == expected, "{len} bytes to {to}");
        }
        ends.b.assert_idle(link.b, Queue::Recv);
    }

    fn a_read_brings_what_is_there(ends: &mut Ends) {
        let link = ends.link();
        for (id, (len, from, to)) in CASES.into_iter().enumerate() {
            let bytes = pattern(len, len);
            ends.b.store(link.b_mem, from, &bytes);
            ends.a.fill(link.a_mem, 0xEE);
            let request = Request::read(&[link.a_mem.sge(to, len)], link.b_mem.at(from));
            let read = ends.a.transfer(link.a, request.id(id as u64));
            assert_eq!(read.opcode(), WcOpcode::RdmaRead);
            assert_eq!(read.byte_len as usize, len);
            let mut expected = vec![0xEE; REGION];
            expected[to..to + len].copy_from_slice(&bytes);
            assert!(ends.a.load(link.a_mem, 0, REGION) == expected, "{len} bytes to {to}");
        }
        ends.b.assert_idle(link.b, Queue::Recv);
    }

    fn long_transfers_arrive_whole(ends: &mut Ends) {
        const LEN: usize = (1 << 20) + 77;
        let (a, b) = ends.connect(QpSetup::default(), QpSetup::default());
        let at_a = ends.a.register(0, LEN, ALL_ACCESS);
        let at_b = ends.b.register(0, LEN, ALL_ACCESS);
        let bytes = pattern(5, LEN);
        ends.a.store(at_a, 0, &bytes);
        ends.a.transfer(a, Request::write(&[at_a.sge(0, LEN)], at_b.at(0)));
        assert!(ends.b.load(at_b, 0, LEN) == bytes);
        ends.a.fill(at_a, 0);
        ends.a.transfer(a, Request::read(&[at_a.sge(0, LEN)], at_b.at(0)));
        assert!(ends.a.load(at_a, 0, LEN) == bytes);
        ends.b.fill(at_b, 0);
        ends.b.post_recv(b, &[Recv::new(1, &[at_b.sge(0, LEN)])]);
        ends.a.post_send(a, &[Request::send(&[at_a.sge(0, LEN)]).id(2)]);
        let received = ends.b.expect(b, Queue::Recv, 1, WcStatus::Success);
        assert_eq!(received.byte_len as usize, LEN);
        ends.a.expect(a, Queue::Send, 2, WcStatus::Success);
        assert!(ends.b.load(at_b, 0, LEN) == bytes);
    }

    /// An initiator that uses more regions than it can keep at hand reaches each of them all the same.
    fn many_regions_are_reached(ends: &mut Ends) {
        let (a, b) = ends.connect(QpSetup::default(), QpSetup::default());
        let here = ends.a.register(0, 4096, ALL_ACCESS);
        let regions: Vec<_> = (0..300).map(|_| ends.b.register(0, 4096, ALL_ACCESS)).collect();
        for round in 1..=2 {
            for (value, region) in regions.iter().enumerate() {
                ends.a.store_word(here, 0, round * value as u64);
                ends.a.transfer(a, Request::write(&[here.sge(0, 8)], region.at(8)));
            }
            for (value, region) in regions.iter().enumerate() {
                assert_eq!(ends.b.load_word(*region, 8), round * value as u64);
            }
        }
        assert_eq!(ends.b.state(b), QpState::Rts);
    }

    fn writes_gather_and_reads_scatter(ends: &mut Ends) {
        let link = ends.link();
        let bytes = pattern(3, 2000);
        ends.a.store(link.a_mem, 100, &bytes[..1]);
        ends.a.store(link.a_mem, 5001, &bytes[1..900]);
        ends.a.store(link.a_mem, 9000, &bytes[900..]);
        let gathered = [(100, 1), (5001, 899), (0, 0), (9000, 1100)];
        let gathered = gathered.map(|(offset, len)| link.a_mem.sge(offset, len));
        ends.a.transfer(link.a, Request::write(&gathered, link.b_mem.at(33)));
        assert_eq!(ends.b.load(link.b_mem, 33, 2000), bytes);
        ends.a.fill(link.a_mem, 0);
        let scattered = [(40_000, 1500), (3, 5), (1, 0), (20_000, 495)];
        let scattered = scattered.map(|(offset, len)| link.a_mem.sge(offset, len));
        let read = ends.a.transfer(link.a, Request::read(&scattered, link.b_mem.at(33)));
        assert_eq!(read.byte_len, 2000);
        assert_eq!(ends.a.load(link.a_mem, 40_000, 1500), bytes[..1500]);
        assert_eq!(ends.a.load(link.a_mem, 3, 5), bytes[1500..1505]);
        assert_eq!(ends.a.load(link.a_mem, 20_000, 495), bytes[1505..]);
        assert_eq!(ends.a.load(link.a_mem, 8, 100), [0; 100]);
    }

    /// A WRITE with immediate uses up a receive, but not its buffer.
    fn an_immediate_tells_the_target_of_a_write(ends: &mut Ends) {
        let link = ends.link();
        for (id, len) in [(1, 777), (2, 0)] {
            let bytes = pattern(len, len);
            ends.a.store(link.a_mem, 0, &bytes);
            ends.b.fill(link.b_mem, 0xEE);
            ends.b.post_recv(link.b, &[Recv::new(id, &[link.b_mem.sge(0, 100)])]);
            let elements = [link.a_mem.sge(0, len)];
            let request = Request::write_imm(&elements, link.b_mem.at(1000), 0xa1b2_c3d4);
            ends.a.post_send(link.a, &[request.id(id)]);
            let received = ends.b.expect(link.b, Queue::Recv, id, WcStatus::Success);
            assert_eq!(received.opcode(), WcOpcode::RecvRdmaWithImm);
            assert_eq!(received.byte_len as usize, len);
            assert_eq!(received.imm, Some(0xa1b2_c3d4));
            let written = ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
            assert_eq!(written.opcode(), WcOpcode::RdmaWrite);
            assert_eq!(ends.b.load(link.b_mem, 1000, len), bytes);
            assert_eq!(ends.b.load(link.b_mem, 0, 1000), [0xEE; 1000]);
        }
    }

    fn a_write_with_immediate_needs_a_receive(ends: &mut Ends) {
        let impatient = QpSetup { rnr_retry: 0, ..QpSetup::default() };
        let link = ends.link_with(impatient, QpSetup::default());
        let request = Request::write_imm(&[link.a_mem.sge(0, 8)], link.b_mem.at(0), 1);
        ends.a.post_send(link.a, &[request.id(1)]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::RnrRetryExcErr);
        ends.a.await_state(link.a, QpState::Err);
        assert_eq!(ends.b.state(link.b), QpState::Rts);
    }

    /// What was posted first has happened when what was posted second is seen.
    fn later_requests_see_earlier_ones(ends: &mut Ends) {
        let link = ends.link();
        for round in 0..20 {
            let bytes = pattern(round, 3000);
            ends.a.store(link.a_mem, 0, &bytes);
            ends.b.post_recv(link.b, &[Recv::new(9, &[])]);
            let (here, back) = (link.a_mem.sge(0, 3000), link.a_mem.sge(8000, 3000));
            let list = [
                Request::write(&[here], link.b_mem.at(0)).unsignaled().id(1),
                Request::read(&[back], link.b_mem.at(0)).id(2),
                Request::send(&[]).fenced().id(3),
            ];
            ends.a.post_send(link.a, &list);
            ends.b.expect(link.b, Queue::Recv, 9, WcStatus::Success);
            assert_eq!(ends.b.load(link.b_mem, 0, 3000), bytes);
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
            assert_eq!(ends.a.load(link.a_mem, 8000, 3000), bytes);
            ends.a.expect(link.a, Queue::Send, 3, WcStatus::Success);
        }
    }

    /// A list goes from one region to another, to and fro, however long it is in all.
    fn a_list_reaches_several_regions(ends: &mut Ends) {
        const LEN: usize = 300 << 10;
        let (a, b) = ends.connect(QpSetup::default(), QpSetup::default());
        let here: Vec<_> = (0..2).map(|_| ends.a.register(0, LEN, ALL_ACCESS)).collect();
        let there: Vec<_> = (0..2).map(|_| ends.b.register(0, 2 * LEN + 8, ALL_ACCESS)).collect();
        let bytes = [pattern(1, LEN), pattern(2, LEN)];
        for (region, bytes) in here.iter().zip(&bytes) {
            ends.a.store(*region, 0, bytes);
        }
        // Each to both, at an offset that aligns nothing, then back into the other.
        let places = [(0, 0, 3), (1, 0, LEN + 5), (0, 1, LEN), (1, 1, 0)];
        let writes = places.map(|(from, to, at)| {
            Request::write(&[here[from].sge(0, LEN)], there[to].at(at)).unsignaled()
        });
        let reads = [(1, 0, 3), (0, 1, 0)].map(|(into, from, at)| {
            Request::read(&[here[into].sge(0, LEN)], there[from].at(at))
        });
        let list: Vec<_> = writes.into_iter().chain(reads).zip(1..).map(|(request, id)| request.id(id)).collect();
        ends.a.post_send(a, &list);
        ends.a.expect(a, Queue::Send, 5, WcStatus::Success);
        ends.a.expect(a, Queue::Send, 6, WcStatus::Success);
        for (from, to, at) in places {
            assert!(ends.b.load(there[to], at, LEN) == bytes[from], "{from} to {to}");
        }
        assert!(ends.a.load(here[1], 0, LEN) == bytes[0]);
        assert!(ends.a.load(here[0], 0, LEN) == bytes[1]);
        ends.b.assert_idle(b, Queue::Recv);
    }

    /// What is before a request that is refused has happened, and what is behind it has not.
    fn a_list_ends_where_it_is_refused(ends: &mut Ends) {
        for write_is_refused in [true, false] {
            let link = ends.link();
            let constant = ends.a.register(0, 4096, verbs_sys::AccessFlags::empty());
            ends.a.fill(link.a_mem, 0xA1);
            ends.b.fill(link.b_mem, 0xB2);
            let write = |at| Request::write(&[link.a_mem.sge(0, 8)], link.b_mem.at(at));
            let (refused, status) = if write_is_refused {
                (write(REGION - 7), WcStatus::RemAccessErr)
            } else {
                (Request::read(&[constant.sge(0, 8)], link.b_mem.at(0)), WcStatus::LocProtErr)
            };
            let list = [
                write(0).unsignaled().id(1),
                Request::read(&[link.a_mem.sge(64, 8)], link.b_mem.at(8)).id(2),
                refused.unsignaled().id(3),
                write(16).unsignaled().id(4),
            ];
            ends.a.post_send(link.a, &list);
            ends.a.expect(link.a, Queue::Send, 2, WcStatus::Success);
            ends.a.expect(link.a, Queue::Send, 3, status);
            ends.a.expect(link.a, Queue::Send, 4, WcStatus::WrFlushErr);
            assert_eq!(ends.a.load(link.a_mem, 64, 8), [0xB2; 8]);
            assert_eq!(ends.b.load(link.b_mem, 0, 8), [0xA1; 8]);
            assert_eq!(ends.b.load(link.b_mem, 8, 16), [0xB2; 16]);
            assert_eq!(ends.a.load(constant, 0, 8), [0; 8]);
        }
    }

    /// A transfer of no bytes looks at no key and no address.
    fn an_empty_transfer_succeeds_anywhere(ends: &mut Ends) {
        let link = ends.link();
        let nowhere = Target { addr: 0x10, rkey: 0xdead_beef };
        for target in [link.b_mem.at(0), nowhere] {
            ends.a.transfer(link.a, Request::write(&[], target).id(1));
            let read = ends.a.transfer(link.a, Request::read(&[], target).id(2));
            assert_eq!(read.byte_len, 0);
            ends.a.transfer(link.a, Request::write(&[link.a_mem.sge(0, 0)], target).id(3));
        }
        assert_eq!(ends.b.state(link.b), QpState::Rts);
    }

    fn an_inline_write_takes_its_bytes_at_once(ends: &mut Ends) {
        let link = ends.link();
        let len = link.a.max_inline_data.min(48);
        let bytes = pattern(4, len);
        ends.a.store(link.a_mem, 0, &bytes);
        let mut element = link.a_mem.sge(0, len);
        element.lkey = 1;
        ends.a.post_send(link.a, &[Request::write(&[element], link.b_mem.at(11)).inline().id(1)]);
        ends.a.store(link.a_mem, 0, &[0; 48]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        assert_eq!(ends.b.load(link.b_mem, 11, len), bytes);
    }

    /// Either end may be the initiator, also at the same time.
    fn both_ends_initiate(ends: &mut Ends) {
        let link = ends.link();
        ends.a.store(link.a_mem, 0, b"to b");
        ends.b.store(link.b_mem, 0, b"to a");
        ends.a.post_send(link.a, &[Request::write(&[link.a_mem.sge(0, 4)], link.b_mem.at(64)).id(1)]);
        ends.b.post_send(link.b, &[Request::write(&[link.b_mem.sge(0, 4)], link.a_mem.at(64)).id(2)]);
        ends.a.expect(link.a, Queue::Send, 1, WcStatus::Success);
        ends.b.expect(link.b, Queue::Send, 2, WcStatus::Success);
        assert_eq!(ends.a.load(link.a_mem, 64, 4), b"to a");
        assert_eq!(ends.b.load(link.b_mem, 64, 4), b"to b");
    }

    /// A peer without remote rights to its own memory can still be an initiator.
    fn local_bytes_need_no_remote_rights(ends: &mut Ends) {
        let link = ends.link();
        let local = ends.a.register(0, 4096, verbs_sys::AccessFlags::LOCAL_WRITE);
        let source = ends.a.register(0, 4096, verbs_sys::AccessFlags::empty());
        ends.a.store(source, 0, b"only read");
        ends.a.transfer(link.a, Request::write(&[source.sge(0, 9)], link.b_mem.at(0)));
        ends.a.transfer(link.a, Request::read(&[local.sge(0, 9)], link.b_mem.at(0)));
        assert_eq!(ends.a.load(local, 0, 9), b"only read");
    }

    /// A list deeper than the READs that may be outstanding goes through all the same.
    fn more_reads_than_may_be_outstanding_queue_up(ends: &mut Ends) {
        let few = QpSetup { max_rd_atomic: 2, ..QpSetup::default() };
        let link = ends.link_with(QpSetup { max_send_wr: 64, ..few }, few);
        ends.b.store(link.b_mem, 0, &pattern(9, 64 * 100));
        let list: Vec<Request> = (0..64)
            .map(|i| {
                let element = link.a_mem.sge(i * 100, 100);
                Request::read(&[element], link.b_mem.at(i * 100)).id(i as u64)
            })
            .collect();
        ends.a.post_send(link.a, &list);
        for id in 0..64 {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
        assert_eq!(ends.a.load(link.a_mem, 0, 6400), pattern(9, 6400));
    }

    /// With one outstanding at a time, READs and atomics wait for each other, and what is posted
    /// behind them waits for none but the earlier ones.
    fn one_read_or_atomic_at_a_time_is_enough(ends: &mut Ends) {
        let one = QpSetup { max_rd_atomic: 1, max_send_wr: 64, ..QpSetup::default() };
        let link = ends.link_with(one, one);
        let at = |slot: usize| link.a_mem.sge(slot * 8, 8);
        let counter = link.b_mem.at(0);
        let mut list = Vec::new();
        for turn in 0..20 {
            list.push(Request::fetch_add(at(3 * turn), counter, 1).id(list.len() as u64));
            list.push(Request::read(&[at(3 * turn + 1)], counter).id(list.len() as u64));
            let write = Request::write(&[at(3 * turn)], link.b_mem.at(64 + turn * 8));
            list.push(write.fenced().id(list.len() as u64));
        }
        ends.a.post_send(link.a, &list);
        for id in 0..list.len() as u64 {
            ends.a.expect(link.a, Queue::Send, id, WcStatus::Success);
        }
        for turn in 0..20 {
            let before = turn as u64;
            assert_eq!(ends.a.load_word(link.a_mem, 24 * turn), before);
            assert_eq!(ends.a.load_word(link.a_mem, 24 * turn + 8), before + 1);
            assert_eq!(ends.b.load_word(link.b_mem, 64 + 8 * turn), before);
        }
    }
}
