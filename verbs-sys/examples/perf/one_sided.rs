//! WRITEs and READs.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use verbs_sys::ffi::{self, ibv_wr_opcode};
use verbs_sys::{PreparedSend, RemoteAddr};

use crate::endpoint::{Endpoint, Memory, Options, request};
use crate::peer::{DONE, PING, PONG, Pair, Service, Task};
use crate::rounds::alternate;
use crate::shared::{LINE, await_word};
use crate::{Figures, Result};

/// Lines that are written in turn to a peer that reads them. It is never further behind than twice as many: with a
/// thousand, a bare copy runs so far ahead that nobody reads its lines at once.
const LINES: u64 = 64;
/// Where in the memory a source is that is not the start.
const SOURCE: usize = 1 << 20;
/// Differences in alignment of source and target, and the offsets that make them.
const SKEWS: [(usize, usize); 8] = [
    (0, 1),
    (0, 4),
    (0, 8),
    (0, 31),
    (1, 0),
    (8, 0),
    (3, 8),
    (0, 4088),
];

/// Of the bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Read,
    Write,
}

impl Direction {
    fn opcode(self) -> ibv_wr_opcode {
        match self {
            Self::Read => ffi::IBV_WR_RDMA_READ,
            Self::Write => ffi::IBV_WR_RDMA_WRITE,
        }
    }
}

fn at(place: RemoteAddr, offset: usize) -> RemoteAddr {
    RemoteAddr {
        addr: place.addr + offset as u64,
        ..place
    }
}

/// One signaled request of one element.
fn prepare(
    here: &Endpoint,
    opcode: ibv_wr_opcode,
    local: usize,
    len: usize,
    remote: RemoteAddr,
) -> PreparedSend {
    PreparedSend::new(&[(request(opcode, remote), &[here.element(local, len)])])
}

#[inline]
fn transfer(here: &Endpoint, send: &mut PreparedSend) -> Result<()> {
    here.post(0, send)?;
    here.complete()?;
    Ok(())
}

/// One at a time, post to completion, at as many places in turn as `over` has room for, or at one.
pub fn single(direction: Direction, size: usize, over: usize, budget: Duration) -> Result<Figures> {
    let pair = Pair::start(Options::PLAIN)?;
    check(&pair, size)?;
    let here = &pair.here;
    let places = over.min(SOURCE) / size.max(1);
    let offsets: Vec<usize> = (0..places.max(1)).map(|place| place * size).collect();
    let mut sends: Vec<_> = offsets
        .iter()
        .map(|&offset| {
            prepare(
                here,
                direction.opcode(),
                offset,
                size,
                at(pair.there, offset),
            )
        })
        .collect();
    let (ours, plain) = (here.bytes(), pair.shared.copies());
    let (from, to) = match direction {
        Direction::Read => (plain, ours),
        Direction::Write => (ours, plain),
    };
    let (mut sent, mut copied) = (0, 0);
    let [verb, copy] = alternate(
        budget,
        [
            &mut |count| {
                (0..count).try_for_each(|_| {
                    sent = if sent + 1 < sends.len() { sent + 1 } else { 0 };
                    transfer(here, &mut sends[sent])
                })
            },
            &mut |count| {
                for _ in 0..count {
                    copied = if copied + 1 < offsets.len() {
                        copied + 1
                    } else {
                        0
                    };
                    let offset = offsets[copied];
                    copy_plainly(from.wrapping_add(offset), to.wrapping_add(offset), size);
                }
                Ok(())
            },
        ],
    )?;
    Ok(Figures::from([("ours_ns", verb), ("memcpy_ns", copy)]))
}

/// What it writes comes back by a READ.
fn check(pair: &Pair, size: usize) -> Result<()> {
    let here = &pair.here;
    let words = size.div_ceil(8);
    for word in 0..words {
        here.word(word)
            .store(word as u64 * 3 + 1, Ordering::Relaxed);
    }
    transfer(
        here,
        &mut prepare(here, ffi::IBV_WR_RDMA_WRITE, 0, size, pair.there),
    )?;
    for word in 0..words {
        here.word(word).store(0, Ordering::Relaxed);
    }
    transfer(
        here,
        &mut prepare(here, ffi::IBV_WR_RDMA_READ, 0, size, pair.there),
    )?;
    let whole = 0..size / 8;
    if whole
        .into_iter()
        .any(|word| here.word(word).load(Ordering::Relaxed) != word as u64 * 3 + 1)
    {
        return Err(format!("a READ of {size} bytes did not give what was written").into());
    }
    Ok(())
}

#[inline]
fn copy_plainly(from: *const u8, to: *mut u8, size: usize) {
    use std::hint::black_box;
    // SAFETY: both are of at least a mebibyte, which is the most that is asked for, and apart from each
    // other; a peer that reads one of them meanwhile, in another process, gets bytes of either copy.
    unsafe { ptr::copy_nonoverlapping(black_box(from), black_box(to), black_box(size)) };
}

/// Chains of which the last request is signaled: nanoseconds of one request.
pub fn chain(size: usize, length: usize, budget: Duration) -> Result<Figures> {
    let pair = Pair::start(Options::PLAIN)?;
    check(&pair, size)?;
    let mut send = chain_of(&pair, size, length, 0);
    let here = &pair.here;
    let [time] = alternate(
        budget,
        [&mut |count| (0..count).try_for_each(|_| transfer(here, &mut send))],
    )?;
    Ok(Figures::from([("ours_ns", time / length as f64)]))
}

fn chain_of(pair: &Pair, size: usize, length: usize, first: usize) -> PreparedSend {
    let elements: Vec<_> = (0..length)
        .map(|place| [pair.here.element(SOURCE + place * size % 4096, size)])
        .collect();
    let requests = elements.iter().enumerate().map(|(place, element)| {
        let remote = at(pair.there, (first + place) * size);
        let mut request = request(ffi::IBV_WR_RDMA_WRITE, remote);
        if place + 1 < length {
            request.send_flags = 0;
        }
        (request, &element[..])
    });
    PreparedSend::new(&requests.collect::<Vec<_>>())
}

/// The worst of several differences in alignment.
pub fn skew(size: usize, budget: Duration) -> Result<Figures> {
    let pair = Pair::start(Options::PLAIN)?;
    let here = &pair.here;
    let mut aligned = prepare(here, ffi::IBV_WR_RDMA_WRITE, 0, size, pair.there);
    let (mut worst, mut base) = (0.0, f64::INFINITY);
    for (local, remote) in SKEWS {
        let remote = at(pair.there, remote);
        let mut skewed = prepare(here, ffi::IBV_WR_RDMA_WRITE, local, size, remote);
        let [even, odd] = alternate(
            budget / SKEWS.len() as u32,
            [
                &mut |count| (0..count).try_for_each(|_| transfer(here, &mut aligned)),
                &mut |count| (0..count).try_for_each(|_| transfer(here, &mut skewed)),
            ],
        )?;
        if odd / even > worst / base {
            (worst, base) = (odd, even);
        }
    }
    Ok(Figures::from([("ours_ns", worst), ("aligned_ns", base)]))
}

/// Memory of the allocator, reached through the kernel.
pub fn heap(size: usize, budget: Duration) -> Result<Figures> {
    let pair = Pair::start(Options {
        memory: Memory::Heap,
        ..Options::PLAIN
    })?;
    check(&pair, size)?;
    let here = &pair.here;
    let mut send = prepare(here, ffi::IBV_WR_RDMA_WRITE, 0, size, pair.there);
    let local = libc::iovec {
        iov_base: here.bytes().cast(),
        iov_len: size,
    };
    let remote = libc::iovec {
        iov_base: pair.there.addr as *mut libc::c_void,
        iov_len: size,
    };
    let pid = pair.pid().cast_signed();
    let [verb, bare] = alternate(
        budget,
        [
            &mut |count| (0..count).try_for_each(|_| transfer(here, &mut send)),
            &mut |count| {
                for _ in 0..count {
                    // SAFETY: one range of either process, each of them in a region of its.
                    let written = unsafe { libc::process_vm_writev(pid, &local, 1, &remote, 1, 0) };
                    if written != size.cast_signed() {
                        return Err(std::io::Error::last_os_error().into());
                    }
                }
                Ok(())
            },
        ],
    )?;
    Ok(Figures::from([("ours_ns", verb), ("writev_ns", bare)]))
}

/// Lines that the peer reads as they come: nanoseconds of one line, in chains of `length`.
pub fn consumed(length: usize, budget: Duration) -> Result<Figures> {
    let mut pair = Pair::start(Options::PLAIN)?;
    pair.wake()?;
    let chains: Vec<usize> = (0..LINES as usize).step_by(length).collect();
    let mut sends: Vec<_> = chains
        .iter()
        .map(|&first| chain_of(&pair, LINE, length, first))
        .collect();
    // Both count on from where they were.
    let (mut written, mut copied) = (0, 0);
    let pair = std::cell::RefCell::new(pair);
    let [ours, copy] = alternate(
        budget,
        [
            &mut |count| {
                let lines = count * LINES;
                pair.borrow_mut().ask(Task::Consume, lines, written)?;
                let pair = pair.borrow();
                let source = |place: usize| pair.here.word((SOURCE + place * LINE) / 8);
                for _ in 0..count {
                    let lap = written / LINES + 1;
                    await_reader(&pair, written);
                    for send in &mut sends {
                        for place in 0..length {
                            source(place).store(lap, Ordering::Relaxed);
                        }
                        transfer(&pair.here, send)?;
                    }
                    written += LINES;
                }
                await_word(pair.shared.word(DONE), written);
                Ok(())
            },
            &mut |count| {
                let lines = count * LINES;
                pair.borrow_mut().ask(Task::ConsumeCopies, lines, copied)?;
                let pair = pair.borrow();
                let source = pair.here.word(SOURCE / 8);
                for _ in 0..count {
                    let lap = copied / LINES + 1;
                    await_reader(&pair, copied);
                    for line in 0..LINES as usize {
                        source.store(lap, Ordering::Relaxed);
                        let to = pair.shared.copies().wrapping_add(line * LINE);
                        copy_plainly(source.as_ptr().cast(), to, LINE);
                    }
                    copied += LINES;
                }
                await_word(pair.shared.word(DONE), copied);
                Ok(())
            },
        ],
    )?;
    let lines = LINES as f64;
    Ok(Figures::from([
        ("ours_ns", ours / lines),
        ("memcpy_ns", copy / lines),
    ]))
}

/// Waits until the peer has read all but the last lap, so that no line is written again before it was read.
fn await_reader(pair: &Pair, written: u64) {
    while pair.shared.word(DONE).load(Ordering::Acquire) + LINES < written {
        std::hint::spin_loop();
    }
}

/// The peer's part: waits for the lines in turn, and says after each lap how many it has read.
pub fn consume<'a>(
    service: &Service,
    word: impl Fn(usize) -> &'a AtomicU64,
    count: u64,
    first: u64,
) {
    let done = service.shared.word(DONE);
    done.store(first, Ordering::Release);
    for number in first..first + count {
        let (line, lap) = ((number % LINES) as usize, number / LINES + 1);
        while word(line).load(Ordering::Acquire) < lap {
            std::hint::spin_loop();
        }
        if line as u64 == LINES - 1 {
            done.store(number + 1, Ordering::Release);
        }
    }
}

/// Words written back and forth: half a round trip.
pub fn put_latency(budget: Duration) -> Result<Figures> {
    let mut pair = Pair::start(Options::PLAIN)?;
    pair.wake()?;
    let mut send = pong_of(&pair.here, pair.there);
    let (mut put, mut line) = (1, 1);
    let pair = std::cell::RefCell::new(pair);
    let [ours, bare] = alternate(
        budget,
        [
            &mut |count| {
                pair.borrow_mut().ask(Task::Put, count, put)?;
                let pair = pair.borrow();
                for value in put..put + count {
                    put_word(&pair.here, &mut send, value)?;
                    await_word(pair.here.word(0), value);
                }
                put += count;
                Ok(())
            },
            &mut |count| {
                ping_line(&mut pair.borrow_mut(), count, line)?;
                line += count;
                Ok(())
            },
        ],
    )?;
    Ok(Figures::from([
        ("ours_ns", ours / 2.0),
        ("line_ns", bare / 2.0),
    ]))
}

/// A line's word there and back, so many times.
pub fn ping_line(pair: &mut Pair, count: u64, first: u64) -> Result<()> {
    pair.ask(Task::Line, count, first)?;
    for value in first..first + count {
        pair.shared.word(PING).store(value, Ordering::Release);
        await_word(pair.shared.word(PONG), value);
    }
    Ok(())
}

/// A request that writes the word at [`SOURCE`] to the start of the other side's memory.
fn pong_of(here: &Endpoint, there: RemoteAddr) -> PreparedSend {
    let mut request = request(ffi::IBV_WR_RDMA_WRITE, there);
    request.send_flags |= ffi::IBV_SEND_INLINE;
    PreparedSend::new(&[(request, &[here.element(SOURCE, 8)])])
}

#[inline]
fn put_word(here: &Endpoint, send: &mut PreparedSend, value: u64) -> Result<()> {
    here.word(SOURCE / 8).store(value, Ordering::Relaxed);
    transfer(here, send)
}

/// The peer's part.
pub fn put_back(service: &Service, count: u64, first: u64) -> Result<()> {
    let here = &service.here;
    let mut send = pong_of(here, service.there);
    for value in first..first + count {
        await_word(here.word(0), value);
        put_word(here, &mut send, value)?;
    }
    Ok(())
}
