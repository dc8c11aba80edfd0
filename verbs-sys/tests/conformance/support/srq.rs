//! What a test can do with the shared receive queues of an end.

use verbs_sys::ffi;

use super::{AsyncEvent, Command, End, Recv, Refused, Srq};

impl End {
    /// Asserts that the next asynchronous event comes, and is this one of this queue.
    #[track_caller]
    pub fn expect_srq_event(&mut self, event_type: u32, srq: Srq) {
        let event: Option<AsyncEvent> = self.call(Command::AsyncEvent { wait: true });
        assert_eq!(
            event,
            Some(AsyncEvent {
                event_type,
                qp_num: None,
                srq: Some(srq.id),
                cq: None
            })
        );
    }

    /// A shared receive queue of the first protection domain.
    pub fn create_srq(&mut self, max_wr: u32, max_sge: u32) -> Srq {
        self.call(Command::CreateSrq {
            pd: 0,
            max_wr,
            max_sge,
        })
    }

    pub fn try_post_srq(&mut self, srq: Srq, list: &[Recv]) -> Result<(), Refused> {
        self.call(Command::PostSrqRecv {
            srq: srq.id,
            list: list.to_vec(),
        })
    }

    #[track_caller]
    pub fn post_srq(&mut self, srq: Srq, list: &[Recv]) {
        assert_eq!(self.try_post_srq(srq, list), Ok(()), "posting {list:?}");
    }

    /// Changes what `mask`, of `IBV_SRQ_*` bits, names; whether the device did it.
    pub fn modify_srq(&mut self, srq: Srq, max_wr: u32, limit: u32, mask: u32) -> bool {
        self.call(Command::ModifySrq {
            srq: srq.id,
            max_wr,
            limit,
            mask,
        })
    }

    pub fn srq_limit(&mut self, srq: Srq) -> u32 {
        self.call(Command::SrqLimit { srq: srq.id })
    }

    pub fn srq_size(&mut self, srq: Srq) -> u32 {
        self.call(Command::SrqSize { srq: srq.id })
    }

    /// Whether the device says that it changes the size of shared receive queues.
    pub fn can_resize_srqs(&mut self) -> bool {
        let capabilities: u32 = self.call(Command::Capabilities);
        capabilities & ffi::IBV_DEVICE_SRQ_RESIZE != 0
    }
}
