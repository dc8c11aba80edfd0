//! What the handles keep a program from doing.

use std::ptr;
use std::sync::Arc;

use super::Cq;
use super::room::Room;
use crate::ffi::*;
use crate::soft::PROVIDER;

/// ibv_destroy_cq(3) waits for every event that was delivered, and not for those that nobody took.
#[test]
fn destroying_a_queue_waits_for_acknowledgements() {
    // SAFETY: each call gets live objects of the ones before, and places for its results.
    let (context, channel) = unsafe {
        let list = (PROVIDER.get_device_list)(ptr::null_mut());
        let context = (PROVIDER.open_device)(*list);
        (PROVIDER.free_device_list)(list);
        (context, (PROVIDER.create_comp_channel)(context))
    };
    let mut word = 5_u32;
    let mut queues = [(); 16].map(|()| {
        // SAFETY: as above.
        unsafe { (PROVIDER.create_cq)(context, 4, (&raw mut word).cast(), channel, 0) }
    });
    // SAFETY: as above; the queue is destroyed below.
    let of = |cq: *mut ibv_cq| unsafe { &*cq.cast::<Cq>() };
    let ring = |cq| {
        of(cq).req_notify(false);
        of(cq).wake(false);
    };
    for cq in queues {
        // It has something to tell without any completion.
        of(cq).polled.lock().room = Room::Overrun;
        ring(cq);
    }
    // Two of the first, one of each of the others.
    let mut delivered = [0; 16];
    while delivered.contains(&0) || delivered[0] < 2 {
        let (mut cq, mut found) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: as above.
        let code = unsafe { (PROVIDER.get_cq_event)(channel, &mut cq, &mut found) };
        assert_eq!(code, 0);
        assert_eq!(found, (&raw mut word).cast());
        let which = queues.iter().position(|queue| *queue == cq);
        let which = which.expect("of another queue");
        delivered[which] += 1;
        if which == 0 && delivered[0] == 1 {
            ring(cq);
        }
    }
    // One that nobody takes.
    ring(queues[1]);
    for (cq, delivered) in queues.iter_mut().zip(delivered) {
        let queue = of(*cq);
        std::thread::scope(|scope| {
            let going = scope.spawn(|| queue.retire());
            while !queue.events().awaited {
                std::thread::yield_now();
            }
            for left in (0..delivered).rev() {
                assert!(!going.is_finished(), "{left} events are not acknowledged");
                queue.acknowledge(1);
            }
            assert_eq!(going.join().expect("it panicked"), Ok(()));
        });
        // SAFETY: the reference that `create_cq` gave out; what `destroy_cq` does first was done.
        drop(unsafe { Arc::from_raw(cq.cast::<Cq>().cast_const()) });
    }
    // SAFETY: as above; nothing refers to them any more.
    unsafe {
        assert_eq!((PROVIDER.destroy_comp_channel)(channel), 0);
        assert_eq!((PROVIDER.close_device)(context), 0);
    }
}
