//! Threads that send to, and poll, several queues of one domain.

use super::super::support::{World, poll};
use super::support::*;
use super::{CREATE, Pair, next};
use crate::ffi::*;

/// Messages of each sender to each queue.
const MESSAGES: u32 = 2000;

/// Objects of the device, whose calls any thread may make.
struct Everywhere<T>(T);

// SAFETY: what the tests do with them is as the verbs allow it to several threads at once.
unsafe impl<T> Sync for Everywhere<T> {}

#[test]
fn every_message_is_taken_once_and_in_order_whoever_polls() {
    let world = World::open();
    let xrcd = open(&world, ANY, CREATE).unwrap();
    // With one entry, so that messages wait for room, too.
    let queues = Everywhere([0; 2].map(|_| Shared::new(&world, xrcd, 1)));
    let pairs = Everywhere([0; 2].map(|_| Pair::new(&world, xrcd)));
    std::thread::scope(|scope| {
        let (queues, pairs) = (&queues, &pairs);
        for at in 0..2 {
            scope.spawn(move || {
                let Everywhere(pairs) = pairs;
                let (pair, Everywhere(queues)) = (&pairs[at], queues);
                for message in 0..MESSAGES {
                    for queue in queues {
                        let source = &pair.source;
                        source.send(&pair.sender, queue.number, 1, message, 0);
                    }
                    for _ in queues {
                        assert_eq!(pair.sender.next().status, IBV_WC_SUCCESS);
                    }
                }
            });
            scope.spawn(move || {
                let Everywhere(queues) = queues;
                let (queue, Everywhere(pairs)) = (&queues[at], pairs);
                (0..8).for_each(|wr_id| queue.receive(wr_id, 0, 1));
                let mut came = [0; 2];
                while came != [MESSAGES; 2] {
                    let wc = next(queue.cq);
                    let is_it = |pair: &Pair| qpn(pair.target) == wc.qp_num;
                    let from = pairs.iter().position(is_it).unwrap();
                    assert_eq!((wc.status, wc.imm_data), (IBV_WC_SUCCESS, came[from]));
                    came[from] += 1;
                    queue.receive(wc.wr_id, 0, 1);
                }
            });
        }
    });
    let (Everywhere(queues), Everywhere(pairs)) = (queues, pairs);
    assert!(queues.iter().all(|queue| poll(queue.cq, 1).is_empty()));
    pairs.into_iter().for_each(Pair::destroy);
    queues.into_iter().for_each(Shared::destroy);
    assert_eq!(close(&world, xrcd), 0);
}
