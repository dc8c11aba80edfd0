//! Windows are closed while a peer writes through them as fast as it can.

use std::thread;

use verbs_sys::{
    WcStatus,
    ffi::{IBV_MW_TYPE_1, IBV_MW_TYPE_2, ibv_inc_rkey},
};

use super::{REMOTE, assert_dead, at, has_type_2};
use crate::support::{ALL_ACCESS, BINDABLE, Command, Ends, Queue, Recv, Request, scripts};

scripts! {
    /// One end takes windows away, in every way there is, while the other writes through them as fast
    /// as it can: with two queue pairs where the window allows that, in short and in long writes.
    /// `VERBS_STRESS_ROUNDS` makes it longer.
    fn nothing_comes_through_after_a_window_is_closed(ends: &mut Ends) {
        if !has_type_2(ends) { return }
        let rounds = std::env::var("VERBS_STRESS_ROUNDS").ok().and_then(|text| text.parse().ok());
        for round in 0..rounds.unwrap_or(12) {
            besiege(ends, round);
        }
    }
}

/// A way to close a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Closing {
    Unbind,
    BindElsewhere,
    Deallocate,
    Deregister,
    LocalInv,
    SendInv,
}

/// One round of the stress test.
fn besiege(ends: &mut Ends, round: usize) {
    use Closing::{BindElsewhere, Deallocate, Deregister, LocalInv, SendInv, Unbind};
    let ways = [
        Unbind,
        BindElsewhere,
        Deallocate,
        Deregister,
        LocalInv,
        SendInv,
    ];
    let closing = ways[round % ways.len()];
    let long = if ends.is_software() {
        5 << 19
    } else {
        32 << 10
    };
    let len = if (round / ways.len()).is_multiple_of(2) {
        long
    } else {
        64
    };
    let is_type_2 = matches!(closing, LocalInv | SendInv);

    let (link, other) = (ends.link(), ends.link());
    let binder = ends.link();
    let region = ends.b.register(0, len + 8192, BINDABLE);
    let spare = ends.b.register(0, 4096, BINDABLE);
    let part = region.part(4096, len, REMOTE);
    let (window, rkey) = if is_type_2 {
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_2);
        let rkey = ibv_inc_rkey(window.rkey);
        ends.b.post_bind(link.b, window, rkey, part);
        (window, rkey)
    } else {
        let window = ends.b.alloc_mw(0, IBV_MW_TYPE_1);
        let rkey = ends.b.bind(binder.b, window, part);
        (window, rkey)
    };
    let mut qps = vec![link.a.id];
    if !is_type_2 {
        qps.push(other.a.id);
    }
    let sources = qps
        .iter()
        .map(|_| ends.a.register(0, len, ALL_ACCESS).id)
        .collect();
    let writers = Command::Batter {
        qps,
        sources,
        target: at(region, 4096, rkey),
        len,
    };
    let (a, b) = (&mut ends.a, &mut ends.b);
    let statuses: Vec<u32> = thread::scope(|scope| {
        let give_back = closing == SendInv;
        let writers = scope.spawn(move || {
            if give_back {
                // In the middle of its writes.
                let list = [
                    Request::write(&[link.a_mem.sge(0, 64)], at(region, 4096, rkey)).unsignaled(),
                    Request::send_inv(&[], rkey).unsignaled(),
                ];
                a.post_send(link.a, &list);
            }
            a.call(writers)
        });
        if closing == SendInv {
            b.post_recv(link.b, &[Recv::new(9, &[])]);
            b.expect(link.b, Queue::Recv, 9, WcStatus::Success);
        } else {
            while b.load_word(region, 4096 + len - 8) == 0 {
                thread::yield_now();
            }
            match closing {
                Unbind | Deregister => drop(b.unbind(binder.b, window)),
                BindElsewhere => drop(b.bind(binder.b, window, spare.part(0, 8, REMOTE))),
                Deallocate => b.dealloc_mw(window),
                _ => {
                    // A write by the dead key breaks the queue pair, perhaps before this has completed.
                    b.post_send(link.b, &[Request::local_inv(rkey).id(3)]);
                    let statuses = [WcStatus::Success, WcStatus::WrFlushErr];
                    let done = b.expect_one_of(link.b, Queue::Send, 3, &statuses);
                    if done.status() == WcStatus::WrFlushErr {
                        b.dealloc_mw(window);
                    }
                }
            }
            if closing == Deregister {
                b.deregister(region);
            }
        }
        // From here on nothing changes.
        let bytes = b.digest(region);
        for _ in 0..10 {
            assert_eq!(b.digest(region), bytes, "{closing:?}");
        }
        let statuses = writers.join().expect("a writer panicked");
        assert_eq!(b.digest(region), bytes, "{closing:?}");
        statuses
    });
    for status in statuses {
        assert_eq!(
            WcStatus::from(status),
            WcStatus::RemAccessErr,
            "{closing:?}"
        );
    }
    let bytes = ends.b.load(region, 0, 4096);
    assert_eq!(bytes, [0; 4096], "in front of the window");
    assert_eq!(
        ends.b.load(region, 4096 + len, 4096),
        [0; 4096],
        "behind the window"
    );
    assert_dead(ends, region, rkey);
}
