//! Chains that are laid out once, with buffers of their own, and executed many times.

use std::{fmt, ops::Range};

use super::{
    Completed, OwnedQueuePair, PostError, Registered, Rejected, WorkKind,
    request::{Request, part_of},
    slots::{INDEX_BITS, LAST, PREPARED},
};
use crate::{
    PreparedSend, RemoteAddr, RequestFields, SendFlags, Sge, WcStatus,
    ffi::{self, ibv_send_wr},
};

/// One request of a chain that is prepared: what it does, with which bytes of which of the chain's
/// buffers.
pub struct PreparedRequest {
    buffer: usize,
    range: Range<usize>,
    request: Request,
}

impl PreparedRequest {
    fn new(buffer: usize, range: Range<usize>, request: Request) -> Self {
        Self {
            buffer,
            range,
            request,
        }
    }

    /// Sends the bytes as one message, with an immediate if one is given.
    #[must_use]
    pub fn send(buffer: usize, range: Range<usize>, flags: SendFlags, imm: Option<u32>) -> Self {
        Self::new(buffer, range, Request::send(flags, imm))
    }

    /// Writes the bytes to the peer's memory; with an immediate it uses up a receive of the peer.
    #[must_use]
    pub fn write(buffer: usize, range: Range<usize>, remote: RemoteAddr, imm: Option<u32>) -> Self {
        Self::new(buffer, range, Request::write(remote, imm))
    }

    /// Reads the peer's bytes.
    #[must_use]
    pub fn read(buffer: usize, range: Range<usize>, remote: RemoteAddr) -> Self {
        Self::new(buffer, range, Request::read(remote))
    }

    /// Adds to a word of the peer's memory, and puts what was there at `offset`.
    #[must_use]
    pub fn fetch_add(buffer: usize, offset: usize, remote: RemoteAddr, add: u64) -> Self {
        let range = offset..offset.saturating_add(8);
        Self::new(buffer, range, Request::fetch_add(remote, add))
    }

    /// Puts `swap` to a word of the peer's memory if it is `compare`, and what was there at `offset`.
    #[must_use]
    pub fn compare_swap(
        buffer: usize,
        offset: usize,
        remote: RemoteAddr,
        compare: u64,
        swap: u64,
    ) -> Self {
        let range = offset..offset.saturating_add(8);
        Self::new(buffer, range, Request::compare_swap(remote, compare, swap))
    }
}

impl fmt::Debug for PreparedRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedRequest")
            .field("kind", &self.request.kind)
            .field("buffer", &self.buffer)
            .field("range", &self.range)
            .finish_non_exhaustive()
    }
}

/// Names a chain that [`OwnedQueuePair::prepare`] has laid out, to that queue pair alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Prepared {
    token: u64,
}

impl Prepared {
    /// What [`Completed::token`] will be, for each execution.
    #[must_use]
    pub fn token(&self) -> u64 {
        self.token
    }
}

/// A chain with its buffers, and where in them each request's bytes are.
pub(super) struct Chain<B> {
    send: PreparedSend,
    buffers: Vec<B>,
    places: Vec<Place>,
    /// The buffers may be others than those that the elements were made of.
    is_stale: bool,
    /// Executions that have not completed.
    outstanding: u32,
    /// Status of the first request that failed since a completion of the chain.
    error: Option<WcStatus>,
}

struct Place {
    buffer: usize,
    range: Range<usize>,
    /// Its bytes are the peer's in the end.
    fetches: bool,
}

fn element<B: Registered>(buffers: &[B], place: &Place) -> Result<Sge, PostError> {
    let buffer = buffers.get(place.buffer).ok_or(PostError::NoBuffer {
        index: place.buffer,
        len: buffers.len(),
    })?;
    part_of(buffer.sge(), place.range.clone())
}

impl<B: Registered> Chain<B> {
    fn new(
        buffers: Vec<B>,
        requests: &[PreparedRequest],
        token: u64,
    ) -> Result<Self, Rejected<Vec<B>>> {
        let places: Vec<Place> = requests
            .iter()
            .map(|wanted| Place {
                buffer: wanted.buffer,
                range: wanted.range.clone(),
                fetches: matches!(wanted.request.kind, WorkKind::Read | WorkKind::Atomic),
            })
            .collect();
        let elements: Result<Vec<Sge>, PostError> = places
            .iter()
            .map(|place| element(&buffers, place))
            .collect();
        let elements = match elements {
            Ok(elements) => elements,
            Err(error) => return Err(Rejected::new(error, buffers)),
        };
        let last = requests.len().saturating_sub(1);
        let list: Vec<(ibv_send_wr, &[Sge])> = requests
            .iter()
            .zip(elements.chunks(1))
            .enumerate()
            .map(|(at, (wanted, elements))| {
                let (signaled, word) = if at == last {
                    (ffi::IBV_SEND_SIGNALED, token)
                } else {
                    (0, token & !LAST)
                };
                let request = &wanted.request;
                let wr = ibv_send_wr {
                    wr_id: word,
                    opcode: request.opcode,
                    send_flags: request.flags.bits() | signaled,
                    imm_data: request.imm.unwrap_or(0).to_be(),
                    wr: request.wr,
                    ..ibv_send_wr::zeroed()
                };
                (wr, elements)
            })
            .collect();
        Ok(Self {
            send: PreparedSend::new(&list),
            buffers,
            places,
            is_stale: false,
            outstanding: 0,
            error: None,
        })
    }

    /// Makes the elements anew, of the buffers as they are now.
    #[cold]
    fn refresh(&mut self) -> Result<(), PostError> {
        for (at, place) in self.places.iter().enumerate() {
            let found = element(&self.buffers, place)?;
            if let Some(mut request) = self.send.request(at) {
                request.elements().fill(found);
            }
        }
        self.is_stale = false;
        Ok(())
    }

    /// Bytes that an execution fetches.
    fn fetched(&self) -> u32 {
        let fetching = self.places.iter().filter(|place| place.fetches);
        let total: usize = fetching.map(|place| place.range.len()).sum();
        u32::try_from(total).unwrap_or(u32::MAX)
    }
}

/// The fields of one request of a prepared chain, to be set in place. They count from the next
/// execution on.
pub struct PreparedFields<'a, B> {
    fields: RequestFields<'a>,
    place: &'a mut Place,
    buffers: &'a [B],
}

impl<B: Registered> PreparedFields<'_, B> {
    /// Sets which bytes of the chain's buffers are meant.
    ///
    /// # Errors
    /// [`PostError::NoBuffer`] or [`PostError::Range`]; nothing has changed then.
    #[inline]
    pub fn set_local(&mut self, buffer: usize, range: Range<usize>) -> Result<(), PostError> {
        let wanted = Place {
            buffer,
            range,
            fetches: self.place.fetches,
        };
        let found = element(self.buffers, &wanted)?;
        self.fields.elements().fill(found);
        *self.place = wanted;
        Ok(())
    }

    /// Sets the peer's place of a READ, a WRITE or an atomic.
    #[inline]
    pub fn set_remote(&mut self, remote: RemoteAddr) {
        self.fields.set_remote(remote);
    }

    /// Sets the immediate, if the request has one.
    #[inline]
    pub fn set_imm(&mut self, imm: u32) {
        self.fields.set_imm(imm);
    }

    /// Sets what an atomic adds, or what it compares with and what it puts there then.
    #[inline]
    pub fn set_operands(&mut self, compare_add: u64, swap: u64) {
        self.fields.set_operands(compare_add, swap);
    }

    /// Sets the flags.
    #[inline]
    pub fn set_flags(&mut self, flags: SendFlags) {
        self.fields.set_flags(flags);
    }
}

impl<B> fmt::Debug for PreparedFields<'_, B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreparedFields")
            .field("fields", &self.fields)
            .field("buffer", &self.place.buffer)
            .field("range", &self.place.range)
            .finish_non_exhaustive()
    }
}

impl<B: Registered> OwnedQueuePair<B> {
    /// Lays out a chain of requests once, to be executed many times. Each takes its bytes from one of
    /// `buffers`, which stay in here until [`release`](Self::release). The chain makes one completion
    /// for each execution, with the same token each time.
    ///
    /// # Errors
    /// Gives the buffers back: [`PostError::ChainLength`], [`PostError::NoBuffer`],
    /// [`PostError::Range`].
    pub fn prepare(
        &mut self,
        buffers: Vec<B>,
        requests: &[PreparedRequest],
    ) -> Result<Prepared, Rejected<Vec<B>>> {
        let max = self.sends.capacity();
        let len = requests.len();
        if len == 0 || len > max {
            return Err(Rejected::new(PostError::ChainLength { len, max }, buffers));
        }
        let free = self.prepared.iter().position(Option::is_none);
        let index = free.unwrap_or(self.prepared.len());
        let Some(index) = u32::try_from(index)
            .ok()
            .filter(|&index| index < 1 << INDEX_BITS)
        else {
            let max = 1 << INDEX_BITS;
            let error = PostError::Full {
                queue: "prepared",
                max,
            };
            return Err(Rejected::new(error, buffers));
        };
        let token = self.word(index) | PREPARED | LAST;
        let chain = Chain::new(buffers, requests, token)?;
        match free {
            Some(free) => self.prepared[free] = Some(chain),
            None => self.prepared.push(Some(chain)),
        }
        Ok(Prepared { token })
    }

    /// Posts a prepared chain with one call. It may be executed again before it has completed, as long
    /// as there is room for its requests; completions come in the order of the executions.
    ///
    /// # Errors
    /// [`PostError::Full`], [`PostError::Device`] where the queue pair is not connected, and
    /// [`PostError::NotPrepared`] for a chain of another queue pair. A queue pair in ERR takes the
    /// chain, and completes it with [`WcStatus::WrFlushErr`].
    #[inline]
    pub fn execute(&mut self, chain: Prepared) -> Result<u64, PostError> {
        let index = self.prepared_index(chain.token)?;
        let max = self.sends.capacity();
        let Some(prepared) = self.prepared[index].as_mut() else {
            return Err(PostError::NotPrepared);
        };
        let requests = prepared.places.len() as u32;
        if self.send_room < requests {
            return Err(PostError::Full { queue: "send", max });
        }
        if prepared.is_stale {
            prepared.refresh()?;
        }
        // SAFETY: the elements lie in buffers that the chain keeps until no execution is outstanding
        // or the queue pair is destroyed, and `Registered` promises that their bytes are left alone.
        match unsafe { prepared.send.execute(&self.qp) } {
            Ok(()) => {
                prepared.outstanding += 1;
                self.send_room -= requests;
                self.executing += 1;
                Ok(chain.token)
            }
            Err(error) => {
                let posted = prepared.send.position(error.bad_wr).unwrap_or(0);
                if posted == 0 {
                    return Err(PostError::Device {
                        call: error.call,
                        source: error.source,
                    });
                }
                // Never complete, so that its buffers stay.
                prepared.outstanding += 1;
                self.executing += 1;
                self.send_room = self.send_room.saturating_sub(posted as u32);
                if let Err(error) = self.qp.to_err() {
                    tracing::error!(%error, "could not give up a queue pair with half a chain");
                }
                Err(PostError::ChainBroken {
                    posted,
                    len: requests as usize,
                    source: error.source,
                })
            }
        }
    }

    /// The request at this place of a prepared chain, counted from 0, to set its fields; `None` if
    /// there is none. An execution that is outstanding has taken its own already.
    #[inline]
    pub fn prepared(&mut self, chain: Prepared, place: usize) -> Option<PreparedFields<'_, B>> {
        let index = self.prepared_index(chain.token).ok()?;
        let prepared = self.prepared[index].as_mut()?;
        Some(PreparedFields {
            fields: prepared.send.request(place)?,
            place: prepared.places.get_mut(place)?,
            buffers: &prepared.buffers,
        })
    }

    /// The buffers of a prepared chain; `None` while an execution of it is outstanding. What the
    /// chain's requests cover must still lie in them at the next execution.
    pub fn prepared_buffers(&mut self, chain: Prepared) -> Option<&mut [B]> {
        let index = self.prepared_index(chain.token).ok()?;
        let prepared = self.prepared[index].as_mut()?;
        if prepared.outstanding != 0 {
            return None;
        }
        // They may be swapped for others.
        prepared.is_stale = true;
        Some(&mut prepared.buffers)
    }

    /// Forgets a prepared chain, and gives its buffers back.
    ///
    /// # Errors
    /// [`PostError::Outstanding`] while an execution of it has not completed,
    /// [`PostError::NotPrepared`] for a chain of another queue pair.
    pub fn release(&mut self, chain: Prepared) -> Result<Vec<B>, PostError> {
        let index = self.prepared_index(chain.token)?;
        let place = &mut self.prepared[index];
        match place {
            Some(prepared) if prepared.outstanding != 0 => Err(PostError::Outstanding {
                executions: prepared.outstanding,
            }),
            _ => {
                let prepared = place.take().ok_or(PostError::NotPrepared)?;
                Ok(prepared.buffers)
            }
        }
    }

    #[inline]
    fn prepared_index(&self, token: u64) -> Result<usize, PostError> {
        let index = self.index_of(token).ok_or(PostError::NotPrepared)?;
        if index >= self.prepared.len() {
            return Err(PostError::NotPrepared);
        }
        Ok(index)
    }

    /// A request of a prepared chain has ended.
    pub(super) fn complete_prepared(
        &mut self,
        token: u64,
        status: WcStatus,
    ) -> Option<Completed<B>> {
        let index = self.index_of(token)?;
        let prepared = self.prepared.get_mut(index)?.as_mut()?;
        let ok = status == WcStatus::Success;
        if token & LAST == 0 {
            if !ok {
                prepared.error.get_or_insert(status);
            }
            return None;
        }
        prepared.outstanding = prepared.outstanding.checked_sub(1)?;
        self.executing -= 1;
        self.send_room += prepared.places.len() as u32;
        let status = prepared.error.take().unwrap_or(status);
        Some(Completed {
            token,
            kind: WorkKind::Prepared,
            status,
            byte_len: if status == WcStatus::Success {
                prepared.fetched()
            } else {
                0
            },
            imm: None,
            buffer: None,
        })
    }
}
