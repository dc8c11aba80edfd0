//! The queue pair that owns buffers.

use std::{
    fmt,
    mem::{self, ManuallyDrop},
    ops::Range,
    ptr,
    sync::atomic::{AtomicU64, Ordering},
};

use super::{
    Completed, PostError, Registered, Rejected, WorkKind, prepared,
    request::{Chain, Request, part_of},
    slots::{ID_SHIFT, INDEX_BITS, INDEX_SHIFT, LAST, PREPARED, RECEIVE, Slots},
};
use crate::{
    QueuePair, RemoteAddr, SendFlags, Sge, WcOpcode, WcStatus, WorkCompletion,
    error::log_destroy,
    ffi::{self, ibv_recv_wr, ibv_send_wr},
};

/// A queue pair that owns the buffers of its outstanding requests.
///
/// Dropping it destroys the queue pair first, so that the device touches nothing any more, and then
/// drops the buffers.
pub struct OwnedQueuePair<B: Registered> {
    pub(super) qp: ManuallyDrop<QueuePair>,
    /// Different for each queue pair of this process that ever was.
    id: u64,
    pub(super) sends: Slots<B>,
    receives: Slots<B>,
    /// Requests that still fit into the device's send queue.
    pub(super) send_room: u32,
    chain: Chain,
    pub(super) prepared: Vec<Option<prepared::Chain<B>>>,
    /// Executions of prepared chains that have not completed.
    pub(super) executing: u32,
}
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

impl<B: Registered> OwnedQueuePair<B> {
    /// Takes over `qp`, to which nothing has been posted, with room for `max_send` send requests
    /// and `max_recv` receives; never more than the queue pair has, nor than 1,048,576.
    #[must_use]
    pub fn new(qp: QueuePair, max_send: u32, max_recv: u32) -> Self {
        let cap = qp.cap();
        let max_send = max_send.min(cap.max_send_wr).min(1 << INDEX_BITS);
        let max_recv = max_recv.min(cap.max_recv_wr).min(1 << INDEX_BITS);
        Self {
            qp: ManuallyDrop::new(qp),
            id: NEXT_ID.fetch_add(1, Ordering::Relaxed),
            sends: Slots::new(max_send),
            receives: Slots::new(max_recv),
            send_room: max_send,
            chain: Chain::new(max_send),
            prepared: Vec::new(),
            executing: 0,
        }
    }

    /// The queue pair, to connect it and to ask for its state. Do not move it to RESET with
    /// requests outstanding: their completions never come, so their buffers stay in here.
    #[must_use]
    pub fn queue_pair(&self) -> &QueuePair {
        &self.qp
    }

    /// Number of the queue pair, which completions carry too.
    #[must_use]
    #[inline]
    pub fn qp_num(&self) -> u32 {
        self.qp.qp_num()
    }

    /// Send requests and chains that have not completed.
    #[must_use]
    pub fn outstanding_sends(&self) -> usize {
        self.sends.len() + self.executing as usize
    }

    /// Receives that have not completed.
    #[must_use]
    pub fn outstanding_receives(&self) -> usize {
        self.receives.len()
    }

    /// Send requests that can be posted now; each READ of a chain counts.
    #[must_use]
    #[inline]
    pub fn send_room(&self) -> usize {
        self.send_room as usize
    }

    /// Posts `buffer` to receive one message.
    ///
    /// # Errors
    /// Gives the buffer back.
    #[inline]
    pub fn post_recv(&mut self, buffer: B) -> Result<u64, Rejected<B>> {
        let Some(index) = self.receives.next() else {
            let max = self.receives.capacity();
            return Err(Rejected::new(
                PostError::Full {
                    queue: "receive",
                    max,
                },
                buffer,
            ));
        };
        let token = self.word(index) | RECEIVE;
        let mut sge = buffer.sge();
        let mut request = ibv_recv_wr {
            wr_id: token,
            next: ptr::null_mut(),
            sg_list: &mut sge,
            num_sge: 1,
        };
        // SAFETY: one valid request; the buffer stays in `receives` until it has completed or the
        // queue pair is destroyed, and `Registered` promises that its bytes are left alone.
        if let Err(error) = unsafe { self.qp.post_recv(&mut request) } {
            let error = PostError::Device {
                call: error.call,
                source: error.source,
            };
            return Err(Rejected::new(error, buffer));
        }
        self.receives
            .insert(WorkKind::Recv, Some(buffer), 1, sge.length);
        Ok(token)
    }

    /// Sends the bytes `range` of `buffer` as one message, with an immediate if one is given.
    ///
    /// # Errors
    /// Gives the buffer back.
    #[inline]
    pub fn send(
        &mut self,
        buffer: B,
        range: Range<usize>,
        flags: SendFlags,
        imm: Option<u32>,
    ) -> Result<u64, Rejected<B>> {
        self.post(buffer, range, Request::send(flags, imm))
    }

    /// Sends `bytes`, copied before this returns, as one message.
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`] for more than the queue pair takes.
    #[inline]
    pub fn send_inline(
        &mut self,
        bytes: &[u8],
        flags: SendFlags,
        imm: Option<u32>,
    ) -> Result<u64, PostError> {
        self.post_inline(bytes, Request::send(flags, imm))
    }

    /// Reads the peer's bytes from `remote` on into the bytes `range` of `buffer`.
    ///
    /// # Errors
    /// Gives the buffer back.
    #[inline]
    pub fn read(
        &mut self,
        buffer: B,
        range: Range<usize>,
        remote: RemoteAddr,
    ) -> Result<u64, Rejected<B>> {
        self.post(buffer, range, Request::read(remote))
    }

    /// Writes the bytes `range` of `buffer` to the peer's memory from `remote` on. With an
    /// immediate it uses up a receive of the peer.
    ///
    /// # Errors
    /// Gives the buffer back.
    #[inline]
    pub fn write(
        &mut self,
        buffer: B,
        range: Range<usize>,
        remote: RemoteAddr,
        imm: Option<u32>,
    ) -> Result<u64, Rejected<B>> {
        self.post(buffer, range, Request::write(remote, imm))
    }

    /// Writes `bytes`, copied before this returns, to the peer's memory from `remote` on.
    ///
    /// # Errors
    /// [`PostError::InlineTooLong`] for more than the queue pair takes.
    #[inline]
    pub fn write_inline(
        &mut self,
        bytes: &[u8],
        remote: RemoteAddr,
        imm: Option<u32>,
    ) -> Result<u64, PostError> {
        self.post_inline(bytes, Request::write(remote, imm))
    }

    /// Adds `add` to the peer's 8-byte word at `remote`; the word's earlier value goes to the 8
    /// bytes of `buffer` from `offset` on, in host byte order.
    ///
    /// # Errors
    /// Gives the buffer back.
    pub fn fetch_add(
        &mut self,
        buffer: B,
        offset: usize,
        remote: RemoteAddr,
        add: u64,
    ) -> Result<u64, Rejected<B>> {
        let range = offset..offset.saturating_add(8);
        self.post(buffer, range, Request::fetch_add(remote, add))
    }

    /// Stores `swap` in the peer's 8-byte word at `remote` if it is `compare`; the word's earlier
    /// value goes to the 8 bytes of `buffer` from `offset` on, in host byte order.
    ///
    /// # Errors
    /// Gives the buffer back.
    pub fn compare_swap(
        &mut self,
        buffer: B,
        offset: usize,
        remote: RemoteAddr,
        compare: u64,
        swap: u64,
    ) -> Result<u64, Rejected<B>> {
        let range = offset..offset.saturating_add(8);
        self.post(buffer, range, Request::compare_swap(remote, compare, swap))
    }

    /// Reads several places of the peer's memory into ranges of one buffer, in the order given,
    /// with one completion for all. If one fails, the completion tells its status.
    ///
    /// # Errors
    /// Gives the buffer back, except with [`PostError::ChainBroken`].
    pub fn read_chain(
        &mut self,
        buffer: B,
        parts: &[(Range<usize>, RemoteAddr)],
    ) -> Result<u64, Rejected<B>> {
        self.post_chain(buffer, parts, WorkKind::Read, ffi::IBV_WR_RDMA_READ)
    }

    /// Writes ranges of one buffer to several places of the peer's memory, in the order given, with
    /// one completion for all. If one fails, the completion tells its status.
    ///
    /// # Errors
    /// Gives the buffer back, except with [`PostError::ChainBroken`].
    pub fn write_chain(
        &mut self,
        buffer: B,
        parts: &[(Range<usize>, RemoteAddr)],
    ) -> Result<u64, Rejected<B>> {
        self.post_chain(buffer, parts, WorkKind::Write, ffi::IBV_WR_RDMA_WRITE)
    }

    fn post_chain(
        &mut self,
        buffer: B,
        parts: &[(Range<usize>, RemoteAddr)],
        kind: WorkKind,
        opcode: ffi::ibv_wr_opcode,
    ) -> Result<u64, Rejected<B>> {
        let max = self.sends.capacity();
        if parts.is_empty() || parts.len() > max {
            return Err(Rejected::new(
                PostError::ChainLength {
                    len: parts.len(),
                    max,
                },
                buffer,
            ));
        }
        let Some(index) = self
            .sends
            .next()
            .filter(|_| self.send_room() >= parts.len())
        else {
            return Err(Rejected::new(
                PostError::Full { queue: "send", max },
                buffer,
            ));
        };
        let word = self.word(index);
        let mut total = 0_u32;
        for (place, (range, remote)) in parts.iter().enumerate() {
            match part_of(buffer.sge(), range.clone()) {
                Ok(sge) => {
                    self.chain.set(place, opcode, sge, *remote);
                    total = total.saturating_add(sge.length);
                }
                Err(error) => return Err(Rejected::new(error, buffer)),
            }
        }
        let token = word | LAST;
        let list = self.chain.link(parts.len(), word, token);
        // SAFETY: a valid list; the buffer stays in `sends` until the last request has completed or
        // the queue pair is destroyed, and `Registered` promises that its bytes are left alone.
        let result = unsafe { self.qp.post_send(list) };
        let (requests, result) = match result {
            Ok(()) => (parts.len(), Ok(token)),
            Err(error) => {
                let posted = self.chain.position(error.bad_wr).unwrap_or(0);
                if posted == 0 {
                    let error = PostError::Device {
                        call: error.call,
                        source: error.source,
                    };
                    return Err(Rejected::new(error, buffer));
                }
                if let Err(error) = self.qp.to_err() {
                    tracing::error!(%error, "could not give up a queue pair with half a chain");
                }
                let (len, source) = (parts.len(), error.source);
                let error = PostError::ChainBroken {
                    posted,
                    len,
                    source,
                };
                (
                    posted,
                    Err(Rejected {
                        error,
                        buffer: None,
                    }),
                )
            }
        };
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        self.send_room = self.send_room.saturating_sub(requests);
        self.sends.insert(kind, Some(buffer), requests, total);
        result
    }

    /// The request that `completion` ends, with its buffer. `None` if it is of another queue pair,
    /// was used before, or belongs to a chain that goes on.
    ///
    /// It is taken from the completion, so that nothing can be completed twice.
    #[inline]
    pub fn complete(&mut self, completion: &mut WorkCompletion) -> Option<Completed<B>> {
        let token = completion.wr_id();
        let index = self.index_of(token)? as u32;
        completion.consume();
        let status = completion.status();
        let ok = status == WcStatus::Success;
        if token & RECEIVE != 0 {
            let (_, buffer) = self.receives.remove(index)?;
            let kind = match completion.opcode() {
                WcOpcode::RecvRdmaWithImm if ok => WorkKind::RecvWrite,
                _ => WorkKind::Recv,
            };
            return Some(Completed {
                token,
                kind,
                status,
                byte_len: if ok { completion.byte_len() } else { 0 },
                imm: if ok { completion.imm_data() } else { None },
                buffer,
            });
        }
        if token & PREPARED != 0 {
            return self.complete_prepared(token, status);
        }
        if token & LAST == 0 {
            if let Some(chain) = self.sends.get_mut(index).filter(|_| !ok) {
                chain.error.get_or_insert(status);
            }
            return None;
        }
        let (done, buffer) = self.sends.remove(index)?;
        self.send_room += done.requests;
        let status = done.error.unwrap_or(status);
        let fetched = matches!(done.kind, WorkKind::Read | WorkKind::Atomic);
        Some(Completed {
            token,
            kind: done.kind,
            status,
            byte_len: if fetched && status == WcStatus::Success {
                done.len
            } else {
                0
            },
            imm: None,
            buffer,
        })
    }

    #[inline]
    pub(super) fn word(&self, index: u32) -> u64 {
        self.id << ID_SHIFT | u64::from(index) << INDEX_SHIFT
    }

    /// The index in a word, if it is of this queue pair.
    #[inline]
    pub(super) fn index_of(&self, word: u64) -> Option<usize> {
        let index = (word >> INDEX_SHIFT) as usize & ((1 << INDEX_BITS) - 1);
        (word >> ID_SHIFT == self.id).then_some(index)
    }

    #[inline(always)]
    fn post(
        &mut self,
        buffer: B,
        range: Range<usize>,
        request: Request,
    ) -> Result<u64, Rejected<B>> {
        let sge = match part_of(buffer.sge(), range) {
            Ok(sge) => sge,
            Err(error) => return Err(Rejected::new(error, buffer)),
        };
        // SAFETY: the buffer goes to `sends` at once, where it stays until the request has
        // completed or the queue pair is destroyed; `Registered` promises that its bytes are left
        // alone.
        match unsafe { self.post_one(sge, &request, 0) } {
            Ok(token) => {
                self.keep(request.kind, Some(buffer), sge.length);
                Ok(token)
            }
            Err(error) => Err(Rejected::new(error, buffer)),
        }
    }

    #[inline]
    fn post_inline(&mut self, bytes: &[u8], request: Request) -> Result<u64, PostError> {
        let max = self.qp.cap().max_inline_data;
        let length = u32::try_from(bytes.len())
            .ok()
            .filter(|&length| length <= max);
        let length = length.ok_or(PostError::InlineTooLong {
            len: bytes.len(),
            max,
        })?;
        let sge = Sge {
            addr: bytes.as_ptr().expose_provenance() as u64,
            length,
            lkey: 0,
        };
        // SAFETY: inline bytes are copied before the call returns.
        let token = unsafe { self.post_one(sge, &request, ffi::IBV_SEND_INLINE)? };
        self.keep(request.kind, None, length);
        Ok(token)
    }

    /// # Safety
    /// On success the caller keeps the bytes of `sge` valid and alone until the request has
    /// completed or the queue pair is destroyed; inline, until this returns.
    #[inline(always)]
    unsafe fn post_one(
        &mut self,
        mut sge: Sge,
        request: &Request,
        more_flags: u32,
    ) -> Result<u64, PostError> {
        let max = self.sends.capacity();
        let next = self.sends.next().filter(|_| self.send_room > 0);
        let index = next.ok_or(PostError::Full { queue: "send", max })?;
        let token = self.word(index) | LAST;
        let mut wr = ibv_send_wr {
            wr_id: token,
            sg_list: &mut sge,
            num_sge: 1,
            opcode: request.opcode,
            send_flags: request.flags.bits() | ffi::IBV_SEND_SIGNALED | more_flags,
            imm_data: request.imm.unwrap_or(0).to_be(),
            wr: request.wr,
            ..ibv_send_wr::zeroed()
        };
        // SAFETY: one valid request; the caller promises the bytes.
        match unsafe { self.qp.post_send(&mut wr) } {
            Ok(()) => Ok(token),
            Err(error) => Err(PostError::Device {
                call: error.call,
                source: error.source,
            }),
        }
    }

    /// Keeps what belongs to the request that was just posted.
    #[inline(always)]
    fn keep(&mut self, kind: WorkKind, buffer: Option<B>, len: u32) {
        self.send_room -= 1;
        self.sends.insert(kind, buffer, 1, len);
    }
}

impl<B: Registered> Drop for OwnedQueuePair<B> {
    fn drop(&mut self) {
        // SAFETY: the queue pair is taken once, here, and not used afterwards.
        let qp = unsafe { ManuallyDrop::take(&mut self.qp) };
        let result = qp.destroy();
        if result.is_err() {
            // The device may still be working on the buffers, so they must never be reused.
            mem::forget(mem::replace(&mut self.sends, Slots::new(0)));
            mem::forget(mem::replace(&mut self.receives, Slots::new(0)));
            mem::forget(mem::take(&mut self.prepared));
        }
        log_destroy("ibv_destroy_qp", result);
    }
}

impl<B: Registered> fmt::Debug for OwnedQueuePair<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OwnedQueuePair")
            .field("qp", &*self.qp)
            .field("outstanding_sends", &self.outstanding_sends())
            .field("outstanding_receives", &self.outstanding_receives())
            .finish_non_exhaustive()
    }
}
