//! What a test can do with the completion queues of an end, beside polling them.

use super::{AsyncEvent, Command, Completion, End, Qp, Queue};

impl End {
    /// Entries that the queue has room for.
    pub fn capacity(&mut self, qp: Qp, queue: Queue) -> usize {
        self.call(Command::Capacity { qp: qp.id, queue })
    }

    pub fn resize_cq(&mut self, qp: Qp, queue: Queue, cqe: u32) -> Result<(), i32> {
        self.call(Command::ResizeCq {
            qp: qp.id,
            queue,
            cqe,
        })
    }

    /// A completion if there is one; `None` if the queue cannot be polled.
    pub fn try_poll(&mut self, qp: Qp, queue: Queue) -> Option<Option<Completion>> {
        // As it travels, nothing and a failure look the same.
        let answer: Vec<Option<Completion>> = self.call(Command::TryPoll { qp: qp.id, queue });
        answer.into_iter().next()
    }

    /// Asserts that the next asynchronous event comes, and is this one of this queue.
    #[track_caller]
    pub fn expect_cq_event(&mut self, event_type: u32, qp: Qp, queue: Queue) {
        let event: Option<AsyncEvent> = self.call(Command::AsyncEvent { wait: true });
        assert_eq!(
            event,
            Some(AsyncEvent {
                event_type,
                qp_num: None,
                srq: None,
                cq: Some((qp.num, queue)),
            })
        );
    }
}
