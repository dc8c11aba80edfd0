//! A connected socket with what has come and not been used, and what has to go and was not taken.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use super::frame::Header;
use super::{FrameError, fpdu};
use crate::copy;

/// Bytes of a buffer: a few of the longest FPDUs.
const BUFFER: usize = 256 << 10;
/// Buffers that are kept for the next socket that needs one.
const SPARE: usize = 16;
/// Bytes a frame's payload has at most: whole pages, and little enough to stay in the cache between
/// the copy, the check sum and the kernel's own copy.
pub(in crate::soft) const SEGMENT: usize = 60 << 10;

/// Bytes that each frame of a message carries, but for the last. A message of two frames has them of
/// one size: the peer takes the first while the second is made.
pub(in crate::soft) fn segment_of(len: u64) -> u64 {
    let most = SEGMENT as u64;
    if len > most && len <= 2 * most {
        len.div_ceil(2).next_multiple_of(64)
    } else {
        most
    }
}

static SPARES: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());

/// Most connections are idle most of the time, and then have no buffer.
fn take_buffer() -> Vec<u8> {
    let spare = SPARES.lock().unwrap_or_else(PoisonError::into_inner).pop();
    spare.unwrap_or_else(|| Vec::with_capacity(BUFFER))
}

fn give_buffer(mut buffer: Vec<u8>) {
    buffer.clear();
    let mut spares = SPARES.lock().unwrap_or_else(PoisonError::into_inner);
    if buffer.capacity() >= BUFFER && spares.len() < SPARE {
        spares.push(buffer);
    }
}

/// What came of reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Filled {
    /// Something came, and most likely there is more.
    Some,
    /// Something came, and nothing more is there now.
    All,
    /// Nothing is there now.
    Nothing,
    /// The peer has closed the connection, or it broke.
    Ended,
}

/// A frame that has come: its header, its payload, and the bytes it takes.
pub(in crate::soft) type Frame<'a> = (Header, &'a [u8], usize);

/// Bytes that have come.
#[derive(Debug, Default)]
pub(in crate::soft) struct Input {
    buffer: Vec<u8>,
    start: usize,
}

impl Input {
    /// With bytes that were read before.
    pub(in crate::soft) fn with(bytes: &[u8]) -> Self {
        let mut input = Self::default();
        if !bytes.is_empty() {
            input.buffer = take_buffer();
            input.buffer.extend_from_slice(bytes);
        }
        input
    }

    /// Whether no byte waits.
    pub(in crate::soft) fn is_empty(&self) -> bool {
        self.start == self.buffer.len()
    }

    /// Reads once, without waiting.
    pub(in crate::soft) fn fill(&mut self, socket: &OwnedFd) -> Filled {
        if self.buffer.capacity() == 0 {
            self.buffer = take_buffer();
        }
        let room = self.buffer.capacity() - self.buffer.len();
        let wanted = fpdu::expected(&self.buffer[self.start..]).unwrap_or(0);
        if room == 0 || self.start + wanted > self.buffer.capacity() {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        loop {
            let room = self.buffer.capacity() - self.buffer.len();
            let spare = rustix::buffer::spare_capacity(&mut self.buffer);
            let filled = match rustix::net::recv(socket, spare, RecvFlags::DONTWAIT) {
                Ok((_, 0)) => Filled::Ended,
                Ok((_, count)) if count == room => Filled::Some,
                Ok(_) => Filled::All,
                Err(Errno::INTR) => continue,
                Err(Errno::AGAIN) => Filled::Nothing,
                Err(error) => {
                    tracing::debug!(%error, "a stream broke");
                    Filled::Ended
                }
            };
            if matches!(filled, Filled::Nothing | Filled::Ended) && self.is_empty() {
                self.release();
            }
            return filled;
        }
    }

    /// The next whole frame; `None` until more has come.
    pub(in crate::soft) fn next(&self, crc: bool) -> Result<Option<Frame<'_>>, FrameError> {
        let Some((ulpdu, taken)) = fpdu::split(&self.buffer[self.start..], crc)? else {
            return Ok(None);
        };
        let (header, payload) = Header::decode(ulpdu)?;
        Ok(Some((header, payload, taken)))
    }

    /// Done with so many bytes.
    pub(in crate::soft) fn consume(&mut self, bytes: usize) {
        self.start += bytes;
        if self.is_empty() {
            self.buffer.clear();
            self.start = 0;
        }
    }

    fn release(&mut self) {
        self.start = 0;
        give_buffer(std::mem::take(&mut self.buffer));
    }
}

/// Bytes to be sent.
#[derive(Debug, Default)]
pub(in crate::soft) struct Output {
    buffer: Vec<u8>,
    sent: usize,
}

impl Output {
    /// Bytes that the kernel has not taken yet.
    pub(in crate::soft) fn pending(&self) -> usize {
        self.buffer.len() - self.sent
    }

    /// Adds a frame with this payload.
    pub(in crate::soft) fn frame(&mut self, header: &Header, payload: &[u8], crc: bool) {
        self.frame_with(header, crc, |buffer| buffer.extend_from_slice(payload));
    }

    /// Adds a frame whose payload is copied from memory that others may be writing.
    ///
    /// # Safety
    ///
    /// Each piece is readable for its length.
    pub(in crate::soft) unsafe fn frame_of(
        &mut self,
        header: &Header,
        crc: bool,
        pieces: impl Iterator<Item = (*const u8, usize)>,
    ) {
        self.frame_with(header, crc, |buffer| {
            for (from, len) in pieces {
                buffer.reserve(len);
                let at = buffer.len();
                // SAFETY: `from` is readable by the caller's promise; `len` bytes were reserved
                // behind `at`, and are initialised once copied.
                unsafe {
                    copy::read_shared(buffer.as_mut_ptr().wrapping_add(at), from, len);
                    buffer.set_len(at + len);
                }
            }
        });
    }

    fn frame_with(&mut self, header: &Header, crc: bool, fill: impl FnOnce(&mut Vec<u8>)) {
        if self.buffer.capacity() == 0 {
            self.buffer = take_buffer();
        }
        let start = fpdu::begin(&mut self.buffer);
        let mut bytes = [0; 18];
        let len = header.encode(&mut bytes);
        self.buffer.extend_from_slice(&bytes[..len]);
        fill(&mut self.buffer);
        fpdu::finish(&mut self.buffer, start, crc);
    }

    /// Adds bytes as they are.
    pub(in crate::soft) fn raw(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// Sends what the kernel takes. `true`: nothing is left.
    ///
    /// # Errors
    ///
    /// The socket's; the connection is broken.
    pub(in crate::soft) fn flush(&mut self, socket: &OwnedFd) -> Result<bool, Errno> {
        while self.pending() > 0 {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match rustix::net::send(socket, &self.buffer[self.sent..], flags) {
                Ok(sent) => self.sent += sent,
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        if self.buffer.capacity() > 0 {
            self.sent = 0;
            give_buffer(std::mem::take(&mut self.buffer));
        }
        Ok(true)
    }
}

/// A connection that frames go through.
#[derive(Debug)]
pub(in crate::soft) struct Socket {
    pub fd: OwnedFd,
    pub input: Input,
    pub output: Output,
    /// Whether frames carry a check sum.
    pub crc: bool,
}

impl Socket {
    pub(in crate::soft) fn new(fd: OwnedFd, came: &[u8], crc: bool) -> Self {
        Self {
            fd,
            input: Input::with(came),
            output: Output::default(),
            crc,
        }
    }

    /// Bytes that the kernel has taken, and not yet brought to the other end.
    pub(in crate::soft) fn unsent(&self) -> usize {
        let mut bytes: libc::c_int = 0;
        // SAFETY: the request writes an int to where the pointer leads.
        let result = unsafe { libc::ioctl(self.fd.as_raw_fd(), libc::TIOCOUTQ, &mut bytes) };
        if result == 0 {
            usize::try_from(bytes).unwrap_or(0)
        } else {
            0
        }
    }

    /// Sends what the kernel takes; `false` once the connection is broken.
    pub(in crate::soft) fn flush(&mut self) -> bool {
        self.output.flush(&self.fd).is_ok()
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.fd.as_fd()
    }
}
