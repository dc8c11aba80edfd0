//! Many threads and queue pairs at once.

use std::{collections::HashSet, thread};

use verbs_sys::WcStatus;

use crate::support::{ALL_ACCESS, Command, Ends, Qp, QpSetup, Region, scripts};

/// Operations of each thread.
const COUNT: usize = 300;

/// What several threads at both ends do to a word of `b`.
struct Contention {
    /// Queue pairs of `a` that are connected to `b`.
    from_a: Vec<usize>,
    /// Queue pairs of `b` that are connected within `b`.
    from_b: Vec<usize>,
    a_results: Region,
    b_results: Region,
    word: Region,
}

fn contention(ends: &mut Ends) -> Contention {
    let from_a = (0..2)
        .map(|_| ends.connect(QpSetup::default(), QpSetup::default()).0.id)
        .collect();
    let (one, other): (Qp, Qp) = (
        ends.b.create_qp(QpSetup::default()),
        ends.b.create_qp(QpSetup::default()),
    );
    ends.b.connect_within(one, other);
    Contention {
        from_a,
        from_b: vec![one.id, other.id],
        a_results: ends.a.register(0, 4096, ALL_ACCESS),
        b_results: ends.b.register(0, 4096, ALL_ACCESS),
        word: ends.b.register(0, 4096, ALL_ACCESS),
    }
}

scripts! {
    /// Each of them finds another value, and the sum is exact.
    fn fetch_adds_of_all_threads_add_up(ends: &mut Ends) {
        let all = contention(ends);
        let target = all.word.at(8);
        let at_a = Command::FetchAdds {
            qps: all.from_a,
            results: all.a_results.id,
            target,
            count: COUNT,
        };
        let at_b = Command::FetchAdds {
            qps: all.from_b,
            results: all.b_results.id,
            target,
            count: COUNT,
        };
        let (a, b) = (&mut ends.a, &mut ends.b);
        let mut found: Vec<u64> = thread::scope(|scope| {
            let at_a = scope.spawn(move || a.call::<Vec<u64>>(at_a));
            let mut found = b.call::<Vec<u64>>(at_b);
            found.extend(at_a.join().expect("a thread panicked"));
            found
        });
        assert_eq!(found.len(), 4 * COUNT);
        assert_eq!(found.iter().collect::<HashSet<_>>().len(), 4 * COUNT);
        found.sort_unstable();
        assert_eq!(found.last(), Some(&(4 * COUNT as u64 - 1)));
        assert_eq!(ends.b.load_word(all.word, 8), 4 * COUNT as u64);
    }

    /// Several threads post to one queue pair and poll its queue.
    fn threads_share_a_queue_pair(ends: &mut Ends) {
        let link = ends.link();
        // Whose completion a thread finds is open, so the values found are too.
        let _: Vec<u64> = ends.a.call(Command::FetchAdds {
            qps: vec![link.a.id; 4],
            results: link.a_mem.id,
            target: link.b_mem.at(0),
            count: COUNT,
        });
        assert_eq!(ends.b.load_word(link.b_mem, 0), 4 * COUNT as u64);
    }

    fn compare_and_swaps_of_all_threads_add_up(ends: &mut Ends) {
        let all = contention(ends);
        let target = all.word.at(0);
        let at_a = Command::CompareSwaps {
            qps: all.from_a,
            results: all.a_results.id,
            target,
            count: COUNT / 3,
        };
        let at_b = Command::CompareSwaps {
            qps: all.from_b,
            results: all.b_results.id,
            target,
            count: COUNT / 3,
        };
        let (a, b) = (&mut ends.a, &mut ends.b);
        thread::scope(|scope| {
            scope.spawn(move || a.call::<()>(at_a));
            b.call::<()>(at_b);
        });
        assert_eq!(ends.b.load_word(all.word, 0), 4 * (COUNT as u64 / 3));
    }

    /// When deregistration has returned, no write is under way and none comes any more.
    fn deregistration_waits_for_writes_under_way(ends: &mut Ends) {
        for _ in 0..5 {
            let link = ends.link();
            let target = ends.b.register(0, 4096, ALL_ACCESS);
            let writer = Command::WriteUntilRefused {
                qp: link.a.id,
                source: link.a_mem.id,
                target: target.at(0),
            };
            let (a, b) = (&mut ends.a, &mut ends.b);
            let status = thread::scope(|scope| {
                let writer = scope.spawn(move || a.call::<u32>(writer));
                while b.load_word(target, 0) < 10 {
                    thread::yield_now();
                }
                b.deregister(target);
                let last = b.load_word(target, 0);
                for _ in 0..100 {
                    assert_eq!(b.load_word(target, 0), last);
                }
                let status = writer.join().expect("the writer panicked");
                assert_eq!(b.load_word(target, 0), last);
                status
            });
            assert_eq!(WcStatus::from(status), WcStatus::RemAccessErr);
        }
    }
}
