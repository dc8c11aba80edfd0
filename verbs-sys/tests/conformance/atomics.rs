//! Compare-and-swap and fetch-and-add.

use verbs_sys::{AccessFlags, QpState, WcOpcode, WcStatus};

use crate::support::{Queue, Request, assert_refused, scripts};

scripts! {
    fn compare_and_swap_swaps_only_what_it_expects(ends: &mut Ends) {
        let link = ends.link();
        ends.b.store_word(link.b_mem, 64, 10);
        ends.b.store_word(link.b_mem, 72, 0xEEEE);
        let result = link.a_mem.sge(8, 8);
        for (id, (compare, swap, found, left)) in
            [(9, 1, 10, 10), (10, 11, 10, 11), (10, 12, 11, 11), (11, u64::MAX, 11, u64::MAX)]
                .into_iter()
                .enumerate()
        {
            let request = Request::compare_swap(result, link.b_mem.at(64), compare, swap);
            let done = ends.a.transfer(link.a, request.id(id as u64));
            assert_eq!(done.opcode(), WcOpcode::CompSwap);
            assert_eq!(ends.a.load_word(link.a_mem, 8), found);
            assert_eq!(ends.b.load_word(link.b_mem, 64), left);
        }
        assert_eq!(ends.b.load_word(link.b_mem, 72), 0xEEEE);
        ends.b.assert_idle(link.b, Queue::Recv);
    }

    fn fetch_and_add_wraps(ends: &mut Ends) {
        let link = ends.link();
        ends.b.store_word(link.b_mem, 0, u64::MAX - 1);
        let result = link.a_mem.sge(0, 8);
        for (add, found) in [(0, u64::MAX - 1), (3, u64::MAX - 1), (1 << 63, 1)] {
            let done = ends.a.transfer(link.a, Request::fetch_add(result, link.b_mem.at(0), add));
            assert_eq!(done.opcode(), WcOpcode::FetchAdd);
            assert_eq!(ends.a.load_word(link.a_mem, 0), found);
        }
        assert_eq!(ends.b.load_word(link.b_mem, 0), (1 << 63) + 1);
    }

    /// The value found may be scattered like any other answer.
    fn the_result_goes_where_the_elements_say(ends: &mut Ends) {
        let link = ends.link();
        ends.b.store_word(link.b_mem, 8, 0x0807_0605_0403_0201);
        let request = Request::fetch_add(link.a_mem.sge(0, 8), link.b_mem.at(8), 1);
        let elements = vec![link.a_mem.sge(1000, 3), link.a_mem.sge(2001, 5)];
        ends.a.transfer(link.a, Request { elements, ..request });
        let bytes = 0x0807_0605_0403_0201_u64.to_ne_bytes();
        assert_eq!(ends.a.load(link.a_mem, 1000, 3), bytes[..3]);
        assert_eq!(ends.a.load(link.a_mem, 2001, 5), bytes[3..]);
    }

    fn a_misaligned_atomic_is_an_invalid_request(ends: &mut Ends) {
        for offset in [1, 4, 63] {
            let link = ends.link();
            ends.b.fill(link.b_mem, 0xEE);
            let result = link.a_mem.sge(0, 8);
            let request = Request::fetch_add(result, link.b_mem.at(offset), 1);
            let posted = ends.a.try_post_send(link.a, &[request.id(1)]);
            // rdma_rxe sees it when it is posted.
            if posted.is_err() && !ends.is_software() {
                assert_refused(&posted, libc::EINVAL, 0);
                continue;
            }
            assert_eq!(posted, Ok(()));
            ends.a.expect(link.a, Queue::Send, 1, WcStatus::RemInvReqErr);
            ends.a.await_state(link.a, QpState::Err);
            ends.b.await_state(link.b, QpState::Err);
            ends.b.assert_filled(link.b_mem, 0xEE);
        }
    }

    /// Atomics follow one another and are seen by READs of the same queue pair.
    fn atomics_of_one_queue_pair_are_in_order(ends: &mut Ends) {
        let link = ends.link();
        ends.b.store_word(link.b_mem, 0, 0);
        let result = |slot: usize| link.a_mem.sge(8 * slot, 8);
        let target = link.b_mem.at(0);
        let list = [
            Request::fetch_add(result(0), target, 5).id(0),
            Request::compare_swap(result(1), target, 5, 50).id(1),
            Request::fetch_add(result(2), target, 1).id(2),
            Request::read(&[result(3)], target).id(3),
        ];
        ends.a.post_send(link.a, &list);
        for (slot, found) in [(0, 0), (1, 5), (2, 50), (3, 51)] {
            ends.a.expect(link.a, Queue::Send, slot as u64, WcStatus::Success);
            assert_eq!(ends.a.load_word(link.a_mem, 8 * slot), found);
        }
    }

    /// An atomic needs the right to atomics, and neither that to write nor that to read.
    fn atomics_need_their_own_right_alone(ends: &mut Ends) {
        let link = ends.link();
        let only = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_ATOMIC;
        let target = ends.b.register(0, 4096, only);
        let request = Request::fetch_add(link.a_mem.sge(0, 8), target.at(0), 7);
        ends.a.transfer(link.a, request);
        assert_eq!(ends.b.load_word(target, 0), 7);
    }
}
