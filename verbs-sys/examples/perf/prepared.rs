//! What it costs to build requests: the same WRITEs posted one by one, as a chain that is built for each
//! post, and as a chain that is laid out once.

use std::ptr;
use std::time::Duration;

use verbs_sys::ffi::{self, ibv_send_wr};
use verbs_sys::{PreparedSend, RemoteAddr, Sge};

use crate::endpoint::{Endpoint, Options, request};
use crate::peer::Pair;
use crate::rounds::alternate;
use crate::{Figures, Result};

/// Requests of a chain.
const LENGTH: usize = 16;
/// Bytes of each.
const SIZE: usize = 64;

/// Where the next chain writes: another place each time, as for who writes something new.
struct Places {
    start: RemoteAddr,
    turn: u64,
}

impl Places {
    fn next(&mut self) -> impl Fn(usize) -> RemoteAddr + use<> {
        self.turn = (self.turn + 1) % 4;
        let (start, first) = (self.start, self.turn * (LENGTH * SIZE) as u64);
        move |place| RemoteAddr {
            addr: start.addr + first + (place * SIZE) as u64,
            ..start
        }
    }
}

/// A WRITE of its part of the memory to `remote`.
fn write(remote: RemoteAddr, is_last: bool) -> ibv_send_wr {
    let mut request = request(ffi::IBV_WR_RDMA_WRITE, remote);
    if !is_last {
        request.send_flags = 0;
    }
    request
}

fn element(here: &Endpoint, place: usize) -> Sge {
    here.element(place * SIZE, SIZE)
}

/// Posts the list that begins with `first`.
fn post(here: &Endpoint, first: *mut ibv_send_wr) -> Result<()> {
    // SAFETY: callers give a list of requests that live, with their elements, until this returns; the
    // elements lie in the endpoint's region, whose bytes are used as words or by copies only.
    unsafe { here.qps[0].post_send(first) }?;
    Ok(())
}

/// All by themselves, one after the other has completed.
fn one_by_one(here: &Endpoint, remote: impl Fn(usize) -> RemoteAddr) -> Result<()> {
    for place in 0..LENGTH {
        let mut element = element(here, place);
        let mut request = write(remote(place), true);
        (request.sg_list, request.num_sge) = (&raw mut element, 1);
        post(here, &raw mut request)?;
        here.complete()?;
    }
    Ok(())
}

/// A chain that is built on the stack.
fn rebuilt(here: &Endpoint, remote: impl Fn(usize) -> RemoteAddr) -> Result<()> {
    let mut elements: [Sge; LENGTH] = std::array::from_fn(|place| element(here, place));
    let mut requests: [ibv_send_wr; LENGTH] =
        std::array::from_fn(|place| write(remote(place), place + 1 == LENGTH));
    let mut next = ptr::null_mut();
    for (request, element) in requests.iter_mut().zip(&mut elements).rev() {
        (request.sg_list, request.num_sge, request.next) = (element, 1, next);
        next = request;
    }
    post(here, next)?;
    here.complete()?;
    Ok(())
}

/// A chain that was laid out before, of which one request goes to another place each time.
fn executed(
    here: &Endpoint,
    chain: &mut PreparedSend,
    remote: impl Fn(usize) -> RemoteAddr,
) -> Result<()> {
    let mut last = chain
        .request(LENGTH - 1)
        .ok_or("a chain that is too short")?;
    last.set_remote(remote(LENGTH - 1));
    here.post(0, chain)?;
    here.complete()?;
    Ok(())
}

/// Nanoseconds of all requests together, posts to polled completion.
pub fn prepared(budget: Duration) -> Result<Figures> {
    let pair = Pair::start(Options::PLAIN)?;
    let here = &pair.here;
    let places = || Places {
        start: pair.there,
        turn: 0,
    };
    let elements: [_; LENGTH] = std::array::from_fn(|place| [element(here, place)]);
    let requests: [_; LENGTH] =
        std::array::from_fn(|place| (write(pair.there, place + 1 == LENGTH), &elements[place][..]));
    let mut chain = PreparedSend::new(&requests);
    let mut turns = [places(), places(), places()];
    let [first, second, third] = &mut turns;
    let [singles, anew, once] = alternate(
        budget,
        [
            &mut |count| (0..count).try_for_each(|_| one_by_one(here, first.next())),
            &mut |count| (0..count).try_for_each(|_| rebuilt(here, second.next())),
            &mut |count| (0..count).try_for_each(|_| executed(here, &mut chain, third.next())),
        ],
    )?;
    Ok(Figures::from([
        ("singles_ns", singles),
        ("rebuilt_ns", anew),
        ("ours_ns", once),
    ]))
}
