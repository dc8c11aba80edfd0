//! Channels that end while somebody waits.

use std::mem::ManuallyDrop;
use std::os::unix::thread::JoinHandleExt;
use std::ptr;
use std::sync::Arc;

use rustix::io::Errno;

use super::world::*;
use crate::abi::{RDMA_PS_TCP, rdma_event_channel};
use crate::calls::testing::*;
use crate::id::Channel as Half;
use crate::shared::Shared;

/// Does nothing, so that a call is interrupted.
extern "C" fn ignore(_signal: core::ffi::c_int) {}

#[test]
fn who_waits_learns_nothing_of_a_channels_end() {
    // SAFETY: the structure consists of integers and pointers.
    let mut action: libc::sigaction = unsafe { crate::abi::zeroed() };
    action.sa_sigaction = ignore as *const () as usize;
    // SAFETY: the handler does nothing, and the old one is not asked for.
    let code = unsafe { libc::sigaction(libc::SIGUSR2, &action, ptr::null_mut()) };
    assert_eq!(code, 0);
    let channel = rdma_create_event_channel();
    let key = Shared::get().lock().channel(channel).unwrap();
    let address = channel as usize;
    let waiter = std::thread::spawn(move || {
        let mut event = ptr::null_mut();
        // SAFETY: a channel that lives when the call begins, and a place for the result.
        result(unsafe { rdma_get_cm_event(address as *mut _, &mut event) })
    });
    // The queue's, this one, and the waiter's.
    let waits = || Arc::strong_count(&Shared::get().lock().channels[&key].ends()) == 3;
    while !waits() {
        std::thread::yield_now();
    }
    // SAFETY: no call with it begins any more.
    unsafe { rdma_destroy_event_channel(channel) };
    // The first may come before it sleeps.
    while !waiter.is_finished() {
        // SAFETY: not joined yet.
        let code = unsafe { libc::pthread_kill(waiter.as_pthread_t(), libc::SIGUSR2) };
        assert_eq!(code, 0);
        std::thread::yield_now();
    }
    assert_eq!(waiter.join().unwrap(), Err(Errno::INTR));
}

/// A thread that is about to wait when another one ends the channel: it sleeps as if it had been there before.
#[test]
fn who_comes_too_late_waits_for_ever() {
    let channel = rdma_create_event_channel();
    {
        let mut state = Shared::get().lock();
        // SAFETY: just made.
        unsafe { Half::destroy(&mut state, channel) };
        assert!(state.ended.contains(&channel.addr()));
    }
    // Another one could be made there meanwhile, but not here.
    static THERE: u64 = 0;
    let address = (&raw const THERE).cast_mut().cast();
    // SAFETY: no channel is there.
    let look = || unsafe { crate::deliver::look(address) };
    assert!(matches!(look(), Err(Errno::INVAL)));
    Shared::get().lock().ended.insert(address.addr());
    assert!(matches!(look(), Ok(crate::deliver::Next::Never)));
}

/// What is at the address of one that has ended is whatever it was: nobody looks.
#[test]
fn a_channel_is_known_by_its_address() {
    let channel = Channel::new();
    let mine = channel.id(RDMA_PS_TCP);
    // SAFETY: alive, and dropped nowhere but there.
    let ended = unsafe { ManuallyDrop::new(ptr::read(channel.0.cast::<Half>())) };
    let ended = (&raw const ended).cast_mut().cast::<rdma_event_channel>();
    let mut id = ptr::null_mut();
    // SAFETY: no channel is there, which is an error; a place for the result.
    let code = unsafe { rdma_create_id(ended, &mut id, ptr::null_mut(), RDMA_PS_TCP) };
    assert_eq!(result(code), Err(Errno::INVAL));
    // SAFETY: as above.
    let code = unsafe { rdma_migrate_id(mine.0, ended) };
    assert_eq!(result(code), Err(Errno::INVAL));
}
