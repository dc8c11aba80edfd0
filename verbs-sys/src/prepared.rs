//! Chains of send requests that are laid out once and posted many times.

use std::{fmt, ptr};

use crate::{
    QueuePair, RawPostError, RemoteAddr, SendFlags, Sge,
    ffi::{self, ibv_send_wr, ibv_send_wr_atomic, ibv_send_wr_rdma},
};

/// A chain of send requests in the form that the device takes, laid out once; to be executed by one
/// ibv_post_send(3), as often as wanted, with nothing built anew and nothing allocated. What jVerbs
/// calls a stateful verb call.
///
/// Fields are set in place ([`request`](Self::request)), and count from the next execution on: the
/// device has taken its copy of the requests when [`execute`](Self::execute) returns.
///
/// [`OwnedQueuePair::prepare`](crate::owned::OwnedQueuePair::prepare) makes chains that own their
/// buffers, and that need no `unsafe`.
///
/// A WRITE, and behind it a message that tells of it; only the message makes a completion:
///
/// ```
/// use verbs_sys::{MemoryRegion, PreparedSend, RemoteAddr, Sge, ffi::*};
///
/// fn write_and_tell(region: &MemoryRegion, remote: RemoteAddr) -> PreparedSend {
///     let element = |offset, length| Sge {
///         addr: region.addr() + offset,
///         length,
///         lkey: region.lkey(),
///     };
///     let mut write = ibv_send_wr { opcode: IBV_WR_RDMA_WRITE, ..Default::default() };
///     write.wr.rdma = ibv_send_wr_rdma { remote_addr: remote.addr, rkey: remote.rkey };
///     let tell = ibv_send_wr {
///         wr_id: 1,
///         opcode: IBV_WR_SEND,
///         send_flags: IBV_SEND_SIGNALED,
///         ..Default::default()
///     };
///     PreparedSend::new(&[(write, &[element(0, 4096)]), (tell, &[element(4096, 8)])])
/// }
/// ```
pub struct PreparedSend {
    // Vectors, whose contents stay where they are when they move, and which never grow.
    requests: Vec<ibv_send_wr>,
    elements: Vec<Sge>,
}

// SAFETY: the pointers in the requests lead into the vectors, or are used by `execute` alone, whose
// caller answers for them.
unsafe impl Send for PreparedSend {}
// SAFETY: as above; a shared reference changes nothing.
unsafe impl Sync for PreparedSend {}

impl PreparedSend {
    /// Lays out requests in this order, each with its elements. `next`, `sg_list` and `num_sge` of
    /// what is given count for nothing.
    #[must_use]
    pub fn new(list: &[(ibv_send_wr, &[Sge])]) -> Self {
        let mut this = Self {
            requests: list.iter().map(|(request, _)| *request).collect(),
            elements: list
                .iter()
                .flat_map(|(_, elements)| *elements)
                .copied()
                .collect(),
        };
        let elements = this.elements.as_mut_ptr();
        let requests = this.requests.as_mut_ptr();
        let mut first = 0;
        for (place, (_, list)) in list.iter().enumerate() {
            let is_last = place + 1 == this.requests.len();
            let request = &mut this.requests[place];
            request.sg_list = elements.wrapping_add(first);
            request.num_sge = i32::try_from(list.len()).unwrap_or(i32::MAX);
            request.next = if is_last {
                ptr::null_mut()
            } else {
                requests.wrapping_add(place + 1)
            };
            first += list.len();
        }
        this
    }

    /// Requests of the chain.
    #[must_use]
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether it has no request; then executing it does nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// The request at this place, counted from 0, to set its fields.
    #[inline]
    pub fn request(&mut self, place: usize) -> Option<RequestFields<'_>> {
        let request = self.requests.get_mut(place)?;
        let first = request.sg_list.addr() - self.elements.as_ptr().addr();
        let first = first / size_of::<Sge>();
        let count = usize::try_from(request.num_sge).unwrap_or(0);
        Some(RequestFields {
            elements: self.elements.get_mut(first..first + count)?,
            request,
        })
    }

    /// Posts the whole chain; ibv_post_send(3).
    ///
    /// # Safety
    /// As for [`QueuePair::post_send`]. What is set afterwards is of no concern to these requests.
    ///
    /// # Errors
    /// Tells the first request that was not posted; [`position`](Self::position) tells which it is. A
    /// queue pair below RTS refuses all with `EINVAL`. One in ERR takes them, and flushes them.
    #[inline]
    pub unsafe fn execute(&mut self, qp: &QueuePair) -> Result<(), RawPostError<ibv_send_wr>> {
        if self.requests.is_empty() {
            return Ok(());
        }
        // SAFETY: a list made by `new`, in vectors that have not grown; the rest is promised.
        unsafe { qp.post_send(self.requests.as_mut_ptr()) }
    }

    /// Which request of the chain it is that an error names, counted from 0.
    #[must_use]
    pub fn position(&self, request: *const ibv_send_wr) -> Option<usize> {
        let is_it = |candidate: &ibv_send_wr| ptr::eq(candidate, request);
        self.requests.iter().position(is_it)
    }
}

impl fmt::Debug for PreparedSend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedSend")
            .field("requests", &self.requests.len())
            .field("elements", &self.elements.len())
            .finish()
    }
}

/// The fields of one request of a [`PreparedSend`].
pub struct RequestFields<'a> {
    request: &'a mut ibv_send_wr,
    elements: &'a mut [Sge],
}

impl RequestFields<'_> {
    /// Sets the word that its completion will carry.
    #[inline]
    pub fn set_wr_id(&mut self, wr_id: u64) {
        self.request.wr_id = wr_id;
    }

    /// Sets the flags; whether it is signaled and whether its data is inline stays.
    #[inline]
    pub fn set_flags(&mut self, flags: SendFlags) {
        let kept = self.request.send_flags & (ffi::IBV_SEND_SIGNALED | ffi::IBV_SEND_INLINE);
        self.request.send_flags = kept | flags.bits();
    }

    /// Sets whether it makes a completion when it succeeds.
    #[inline]
    pub fn set_signaled(&mut self, signaled: bool) {
        self.request.send_flags &= !ffi::IBV_SEND_SIGNALED;
        if signaled {
            self.request.send_flags |= ffi::IBV_SEND_SIGNALED;
        }
    }

    /// Sets the immediate, host byte order.
    #[inline]
    pub fn set_imm(&mut self, imm: u32) {
        self.request.imm_data = imm.to_be();
    }

    /// Sets the peer's place of a READ, a WRITE or an atomic.
    #[inline]
    pub fn set_remote(&mut self, remote: RemoteAddr) {
        let wr = &mut self.request.wr;
        if is_atomic(self.request.opcode) {
            // SAFETY: the opcode says that this member is meant; all are plain integers.
            let before = unsafe { wr.atomic };
            wr.atomic = ibv_send_wr_atomic {
                remote_addr: remote.addr,
                rkey: remote.rkey,
                ..before
            };
        } else {
            wr.rdma = ibv_send_wr_rdma {
                remote_addr: remote.addr,
                rkey: remote.rkey,
            };
        }
    }

    /// Sets what an atomic adds, or what it compares with and what it puts there then. Other requests
    /// stay as they are.
    #[inline]
    pub fn set_operands(&mut self, compare_add: u64, swap: u64) {
        if is_atomic(self.request.opcode) {
            // SAFETY: as in `set_remote`.
            let before = unsafe { self.request.wr.atomic };
            self.request.wr.atomic = ibv_send_wr_atomic {
                compare_add,
                swap,
                ..before
            };
        }
    }

    /// The elements: address, length and key of local memory.
    #[inline]
    pub fn elements(&mut self) -> &mut [Sge] {
        self.elements
    }
}

fn is_atomic(opcode: ffi::ibv_wr_opcode) -> bool {
    matches!(
        opcode,
        ffi::IBV_WR_ATOMIC_CMP_AND_SWP | ffi::IBV_WR_ATOMIC_FETCH_AND_ADD
    )
}

impl fmt::Debug for RequestFields<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestFields")
            .field("wr_id", &self.request.wr_id)
            .field("opcode", &self.request.opcode)
            .field("send_flags", &self.request.send_flags)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{QueuePairInit, fake};

    fn request(opcode: ffi::ibv_wr_opcode) -> ibv_send_wr {
        ibv_send_wr {
            opcode,
            send_flags: ffi::IBV_SEND_SIGNALED,
            ..ibv_send_wr::zeroed()
        }
    }

    const REMOTE: RemoteAddr = RemoteAddr {
        addr: 0x1234,
        rkey: 9,
    };

    fn element(addr: u64) -> Sge {
        Sge {
            addr,
            length: 8,
            lkey: 7,
        }
    }

    #[test]
    fn fields_are_set_in_place() {
        let context = fake::open();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
        let (write, add) = (
            request(ffi::IBV_WR_RDMA_WRITE_WITH_IMM),
            request(ffi::IBV_WR_ATOMIC_FETCH_AND_ADD),
        );
        let two = [element(1), element(2)];
        let mut chain = PreparedSend::new(&[(write, &two), (add, &two[..1])]);
        assert_eq!((chain.len(), chain.is_empty()), (2, false));
        // Where a chain lies does not matter.
        let mut chain = std::hint::black_box(Box::new(std::mem::replace(
            &mut chain,
            PreparedSend::new(&[]),
        )));
        let mut fields = chain.request(0).unwrap();
        fields.set_wr_id(11);
        fields.set_imm(0x0102_0304);
        fields.set_remote(REMOTE);
        fields.set_operands(1, 2);
        fields.set_signaled(false);
        fields.set_flags(SendFlags::SOLICITED);
        assert_eq!(fields.elements().len(), 2);
        fields.elements()[0] = element(5);
        let mut fields = chain.request(1).unwrap();
        fields.set_operands(40, 50);
        fields.set_remote(REMOTE);
        fields.set_flags(SendFlags::FENCE);
        assert!(chain.request(2).is_none());

        // SAFETY: the fake device does no work.
        unsafe { chain.execute(&qp) }.unwrap();
        let sent = fake::with(|state| std::mem::take(&mut state.sent));
        let [(write, first), (add, second)] = &sent[..] else {
            panic!("not two requests");
        };
        assert_eq!((write.wr_id, write.num_sge, first.addr), (11, 2, 5));
        assert_eq!(write.imm_data.to_ne_bytes(), [1, 2, 3, 4]);
        assert_eq!(write.send_flags, ffi::IBV_SEND_SOLICITED);
        // SAFETY: plain integers.
        let rdma = unsafe { write.wr.rdma };
        assert_eq!((rdma.remote_addr, rdma.rkey), (0x1234, 9));
        assert_eq!((add.num_sge, second.addr), (1, 1));
        assert_eq!(add.send_flags, ffi::IBV_SEND_SIGNALED | ffi::IBV_SEND_FENCE);
        assert!(add.next.is_null());
        // SAFETY: plain integers.
        let atomic = unsafe { add.wr.atomic };
        assert_eq!((atomic.compare_add, atomic.swap), (40, 50));
        assert_eq!((atomic.remote_addr, atomic.rkey), (0x1234, 9));
    }

    #[test]
    fn a_refused_request_is_found_in_the_chain() {
        let context = fake::open();
        let pd = context.alloc_pd().unwrap();
        let cq = context.create_cq(16, None).unwrap();
        let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq)).unwrap();
        let one = [element(1)];
        let send = request(ffi::IBV_WR_SEND);
        let mut chain = PreparedSend::new(&[(send, &one), (send, &one), (send, &one)]);
        fake::with(|state| state.accept = Some(2));
        // SAFETY: the fake device does no work.
        let error = unsafe { chain.execute(&qp) }.unwrap_err();
        assert_eq!(chain.position(error.bad_wr), Some(2));
        assert_eq!(chain.position(ptr::null()), None);
        fake::with(|state| state.accept = None);
        // SAFETY: as above; there is nothing to post.
        unsafe { PreparedSend::new(&[]).execute(&qp) }.unwrap();
    }
}
