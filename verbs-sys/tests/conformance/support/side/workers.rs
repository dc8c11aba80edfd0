//! Work that an end does on its own, in threads: as fast as it can, until it is done or refused.

use super::{super::command::Recv, *};

impl Side {
    pub(super) fn receive_asleep(&self, qp: usize, count: u32) {
        let pair = self.pair(qp);
        let receive = [Recv::new(0, &[])];
        for _ in 0..pair.setup.max_recv_wr.min(count) {
            post_recv(&pair.qp, &receive).expect("cannot post");
        }
        let mut next = 0;
        while next < count {
            pair.recv_cq.req_notify(false).expect("cannot arm");
            let before = next;
            while let Some(completion) = poll(&pair.recv_cq) {
                assert_eq!(completion.status(), WcStatus::Success);
                assert_eq!(completion.imm, Some(next));
                next += 1;
                post_recv(&pair.qp, &receive).expect("cannot post");
            }
            if next == before {
                let event = self.channel.wait_timeout(PATIENCE).expect("no channel");
                event.expect("a message has come, and no event of it");
            }
        }
    }

    pub(super) fn receive_by_events(&self, qp: usize, count: u32) -> u32 {
        let pair = self.pair(qp);
        let mut found: Vec<_> = (0..count).map(|_| WorkCompletion::default()).collect();
        let (mut next, mut polls) = (0, 0);
        while next < count {
            let event = self.channel.wait_timeout(PATIENCE).expect("no channel");
            event.expect("a message has come, and no event of it");
            polls += 1;
            pair.recv_cq.req_notify(false).expect("cannot arm");
            let polled = pair.recv_cq.poll(&mut found).expect("cannot poll");
            for completion in &found[..polled] {
                assert_eq!(completion.status(), WcStatus::Success);
                assert_eq!(completion.imm_data(), Some(next));
                next += 1;
            }
        }
        polls
    }

    pub(super) fn batter(
        &self,
        qps: &[usize],
        sources: &[usize],
        target: Target,
        len: usize,
    ) -> Vec<u32> {
        thread::scope(|scope| {
            let start = |(qp, source): (&usize, &usize)| {
                let (pair, memory) = (self.pair(*qp), &self.memories[*source]);
                scope.spawn(move || batter(pair, memory, target, len))
            };
            let threads: Vec<_> = qps.iter().zip(sources).map(start).collect();
            let join = |thread: thread::ScopedJoinHandle<'_, u32>| {
                thread.join().expect("a thread panicked")
            };
            threads.into_iter().map(join).collect()
        })
    }

    /// Runs `work` in one thread for each queue pair, with 8 bytes of `results` for each.
    fn in_threads<T: std::marker::Send>(
        &self,
        qps: &[usize],
        results: usize,
        work: impl Fn(&Pair, &Memory, usize) -> T + Sync,
    ) -> Vec<T> {
        let (work, memory) = (&work, &self.memories[results]);
        thread::scope(|scope| {
            let start = |(index, qp): (usize, &usize)| {
                let pair = self.pair(*qp);
                scope.spawn(move || work(pair, memory, 8 * index))
            };
            let threads: Vec<_> = qps.iter().enumerate().map(start).collect();
            threads
                .into_iter()
                .map(|thread| thread.join().expect("a thread panicked"))
                .collect()
        })
    }

    pub(super) fn fetch_adds(
        &self,
        qps: &[usize],
        results: usize,
        target: Target,
        count: usize,
    ) -> Vec<u64> {
        let found = self.in_threads(qps, results, |pair, memory, offset| {
            let add = |_| {
                let request = Request::fetch_add(element(memory, offset, 8), target, 1);
                transfer(pair, &request);
                word(memory, offset)
            };
            (0..count).map(add).collect::<Vec<u64>>()
        });
        found.concat()
    }

    pub(super) fn compare_swaps(
        &self,
        qps: &[usize],
        results: usize,
        target: Target,
        count: usize,
    ) {
        self.in_threads(qps, results, |pair, memory, offset| {
            let result = element(memory, offset, 8);
            for _ in 0..count {
                transfer(pair, &Request::read(&[result], target));
                loop {
                    let expected = word(memory, offset);
                    let new = expected.wrapping_add(1);
                    transfer(pair, &Request::compare_swap(result, target, expected, new));
                    if word(memory, offset) == expected {
                        break;
                    }
                }
            }
        });
    }

    pub(super) fn write_until_refused(&self, qp: usize, source: usize, target: Target) -> u32 {
        let (pair, memory) = (self.pair(qp), &self.memories[source]);
        let deadline = Instant::now() + PATIENCE;
        let mut value = 0_u64;
        while Instant::now() < deadline {
            value += 1;
            memory.store(0, &value.to_ne_bytes());
            let request = Request::write(&[element(memory, 0, 8)], target);
            post_send(&pair.qp, &[], &[request]).expect("cannot post");
            let completion = wait(&pair.send_cq);
            if completion.status() != WcStatus::Success {
                return completion.raw_status();
            }
        }
        panic!("the target stayed open");
    }
}

fn batter(pair: &Pair, memory: &Memory, target: Target, len: usize) -> u32 {
    let deadline = Instant::now() + PATIENCE;
    let request = Request::write(&[element(memory, 0, len as u32)], target);
    let mut byte = 0_u8;
    while Instant::now() < deadline {
        byte = byte % 250 + 1;
        memory.fill(byte);
        post_send(&pair.qp, &[], std::slice::from_ref(&request)).expect("cannot post");
        let completion = wait(&pair.send_cq);
        if completion.status() != WcStatus::Success {
            return completion.raw_status();
        }
    }
    panic!("the target stayed open");
}
