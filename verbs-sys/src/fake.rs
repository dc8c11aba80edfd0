//! A device for unit tests of the handles: it does no work, notes what it is asked for, and fails
//! when told to. All of its state belongs to the thread.

use std::{
    cell::RefCell,
    collections::VecDeque,
    ffi::{c_char, c_int, c_void},
    os::fd::{AsRawFd, OwnedFd, RawFd},
    ptr,
};

use rustix::event::EventfdFlags;

use crate::{
    Context, Device,
    device::list,
    ffi::{self, *},
    provider::Provider,
};

/// What happened on this thread, and what shall happen.
#[derive(Default)]
pub(crate) struct State {
    /// Names of objects in the order in which they went.
    pub(crate) destroyed: Vec<&'static str>,
    /// Send requests posted: a copy of each with its only element.
    pub(crate) sent: Vec<(ibv_send_wr, ibv_sge)>,
    /// Receive requests posted.
    pub(crate) received: Vec<(ibv_recv_wr, ibv_sge)>,
    /// Changes of regions: their flags.
    pub(crate) reregistered: Vec<u32>,
    /// Binds of windows, with the flags and the length.
    pub(crate) bound: Vec<(u64, u32, u64)>,
    /// What the next polls give.
    pub(crate) completions: VecDeque<ibv_wc>,
    /// Refuse a post with ENOMEM after this many requests.
    pub(crate) accept: Option<usize>,
    /// Calls that fail with EBUSY.
    pub(crate) busy: Vec<&'static str>,
    /// Queue of the event that waits.
    pub(crate) event: Option<*mut ibv_cq>,
    /// Events given and events acknowledged.
    pub(crate) events: (u32, u32),
    /// The asynchronous event that waits.
    pub(crate) async_event: Option<ibv_async_event>,
    /// Asynchronous events given and acknowledged.
    pub(crate) async_events: (u32, u32),
    /// Every change of a queue pair: its mask and attributes.
    pub(crate) modified: Vec<(u32, ibv_qp_attr)>,
    /// What all channels of the thread are waited for by, and all contexts: open as long as any of them may name it, or
    /// its number is soon that of another thread's.
    event_fd: Option<OwnedFd>,
    async_fd: Option<OwnedFd>,
}

impl State {
    fn event_fd(&mut self) -> RawFd {
        self.event_fd.get_or_insert_with(counter).as_raw_fd()
    }

    fn async_fd(&mut self) -> RawFd {
        self.async_fd.get_or_insert_with(counter).as_raw_fd()
    }
}

/// Readable as often as was written to it.
fn counter() -> OwnedFd {
    rustix::event::eventfd(0, EventfdFlags::SEMAPHORE).expect("eventfd")
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

pub(crate) fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    STATE.with_borrow_mut(work)
}

/// A fresh context of the fake device.
pub(crate) fn open() -> Context {
    devices()[0].open().expect("the fake device opens")
}

pub(crate) fn devices() -> Vec<Device> {
    list(&PROVIDER).expect("the fake device is listed")
}

/// Makes an event of `queue` wait on its channel.
pub(crate) fn ring(queue: *mut ibv_cq) {
    with(|state| {
        state.event = Some(queue);
        let fd = state.event_fd.as_ref().expect("a channel exists");
        rustix::io::write(fd, &1_u64.to_ne_bytes()).expect("eventfd takes the count");
    });
}

/// Makes an asynchronous event wait.
pub(crate) fn raise(event: ibv_async_event) {
    with(|state| {
        state.async_event = Some(event);
        let fd = state.async_fd.as_ref().expect("a context is open");
        rustix::io::write(fd, &1_u64.to_ne_bytes()).expect("eventfd takes the count");
    });
}

static PROVIDER: Provider = Provider {
    is_software: false,
    fork_init: || 0,
    get_device_list: |count| {
        let mut device = ibv_device::zeroed();
        for (to, from) in device.name.iter_mut().zip(b"fake0") {
            *to = *from as c_char;
        }
        // SAFETY: the caller gives room for the count.
        unsafe { *count = 1 };
        let device = Box::into_raw(Box::new(device));
        Box::into_raw(Box::new([device, ptr::null_mut()])).cast()
    },
    free_device_list: |list| {
        // SAFETY: made by `get_device_list`.
        let list = unsafe { Box::from_raw(list.cast::<[*mut ibv_device; 2]>()) };
        gone("device", list[0]);
    },
    get_device_guid: |_| 0x0102_u64.to_be(),
    open_device: |device| {
        let mut context = ibv_context {
            device,
            async_fd: with(State::async_fd),
            ..ibv_context::zeroed()
        };
        context.ops.post_send = Some(post_send);
        context.ops.post_recv = Some(post_recv);
        context.ops.post_srq_recv = Some(post_srq_recv);
        context.ops.poll_cq = Some(poll_cq);
        context.ops.req_notify_cq = Some(req_notify_cq);
        context.ops.alloc_mw = Some(alloc_mw);
        context.ops.bind_mw = Some(bind_mw);
        context.ops.dealloc_mw = Some(dealloc_mw);
        Box::into_raw(Box::new(context))
    },
    close_device: |context| gone("context", context),
    query_device: |_, attr| {
        // SAFETY: the caller gives room.
        let attr = unsafe { &mut *attr };
        attr.phys_port_cnt = 1;
        attr.max_qp_rd_atom = 4;
        attr.max_qp_init_rd_atom = 300;
        0
    },
    query_port: |_, port, attr| {
        if port != 1 {
            return libc::EINVAL;
        }
        // SAFETY: the caller gives room.
        let attr = unsafe { &mut *attr };
        attr.state = ffi::IBV_PORT_ACTIVE;
        attr.active_mtu = ffi::IBV_MTU_2048;
        attr.gid_tbl_len = 4;
        0
    },
    query_gid: |_, _, index, gid| {
        let mut raw = [0_u8; 16];
        match index {
            0 => return libc::ENODATA,
            1 => {}
            2 => raw[0] = 0xfe,
            3 => raw[10..].copy_from_slice(&[0xff, 0xff, 127, 0, 0, 1]),
            _ => return libc::EINVAL,
        }
        // SAFETY: the caller gives room.
        unsafe { (*gid).raw = raw };
        0
    },
    query_pkey: |_, _, index, pkey| {
        if index != 0 {
            return libc::EINVAL;
        }
        // SAFETY: the caller gives room.
        unsafe { *pkey = 0x8001_u16.to_be() };
        0
    },
    get_async_event: |_, event| {
        with(|state| {
            let fd = state.async_fd.as_ref().expect("a context is open");
            if let Err(error) = rustix::io::read(fd, &mut [0_u8; 8]) {
                set_errno(error.raw_os_error());
                return -1;
            }
            state.async_events.0 += 1;
            // SAFETY: the caller gives room.
            unsafe { *event = state.async_event.expect("an event waits") };
            0
        })
    },
    ack_async_event: |_| with(|state| state.async_events.1 += 1),
    alloc_memory: |_, len| Box::into_raw(vec![0_u8; len].into_boxed_slice()).cast::<c_void>(),
    free_memory: |_, addr, len| {
        // SAFETY: made by `alloc_memory` with this length.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(addr.cast::<u8>(), len)) });
        with(|state| state.destroyed.push("memory"));
        0
    },
    alloc_pd: |context| Box::into_raw(Box::new(ibv_pd { context, handle: 0 })),
    dealloc_pd: |pd| gone("pd", pd),
    reg_mr: |pd, addr, length, access| {
        if access as u32 & ffi::IBV_ACCESS_MW_BIND != 0 {
            set_errno(libc::EOPNOTSUPP);
            return ptr::null_mut();
        }
        let mr = ibv_mr {
            pd,
            addr,
            length,
            lkey: 7,
            rkey: 8,
            ..ibv_mr::zeroed()
        };
        Box::into_raw(Box::new(mr))
    },
    rereg_mr: |mr, flags, pd, addr, length, _| {
        if with(|state| state.busy.contains(&"rereg")) {
            set_errno(libc::EBUSY);
            return ffi::IBV_REREG_MR_ERR_CMD;
        }
        // SAFETY: the region is alive.
        let mr = unsafe { &mut *mr };
        if flags as u32 & ffi::IBV_REREG_MR_CHANGE_PD != 0 {
            mr.pd = pd;
        }
        if flags as u32 & ffi::IBV_REREG_MR_CHANGE_TRANSLATION != 0 {
            (mr.addr, mr.length) = (addr, length);
        }
        with(|state| state.reregistered.push(flags as u32));
        0
    },
    dereg_mr: |mr| gone("mr", mr),
    create_ah: |pd, _| {
        let ah = ibv_ah {
            pd,
            ..ibv_ah::zeroed()
        };
        Box::into_raw(Box::new(ah))
    },
    destroy_ah: |ah| gone("ah", ah),
    create_comp_channel: |context| {
        Box::into_raw(Box::new(ibv_comp_channel {
            context,
            fd: with(State::event_fd),
            refcnt: 0,
        }))
    },
    destroy_comp_channel: |channel| gone("channel", channel),
    get_cq_event: |_, cq, word| {
        with(|state| {
            let fd = state.event_fd.as_ref().expect("a channel exists");
            if let Err(error) = rustix::io::read(fd, &mut [0_u8; 8]) {
                set_errno(error.raw_os_error());
                return -1;
            }
            let queue = state.event.expect("an event waits");
            state.events.0 += 1;
            // SAFETY: the caller gives room, and the queue is alive.
            unsafe { (*cq, *word) = (queue, (*queue).cq_context) };
            0
        })
    },
    ack_cq_events: |_, count| with(|state| state.events.1 += count),
    create_cq: |context, cqe, cq_context, channel, _| {
        if cqe == 0 {
            set_errno(libc::EINVAL);
            return ptr::null_mut();
        }
        let cq = ibv_cq {
            context,
            channel,
            cq_context,
            cqe,
            ..ibv_cq::zeroed()
        };
        Box::into_raw(Box::new(cq))
    },
    resize_cq: |cq, cqe| {
        if with(|state| state.busy.contains(&"resize")) {
            return libc::EINVAL;
        }
        // A device may give more than it was asked for.
        // SAFETY: the queue is alive.
        unsafe { (*cq).cqe = 2 * cqe };
        0
    },
    destroy_cq: |cq| gone("cq", cq),
    create_qp: |pd, attr| {
        // SAFETY: the protection domain and the attributes are alive.
        let (pd_ref, attr) = unsafe { (&*pd, &mut *attr) };
        let qp = ibv_qp {
            context: pd_ref.context,
            pd,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            qp_num: 0x11,
            ..ibv_qp::zeroed()
        };
        Box::into_raw(Box::new(qp))
    },
    modify_qp: |qp, attr, mask| {
        // SAFETY: the queue pair and the attributes are alive.
        let (qp, attr) = unsafe { (&mut *qp, &*attr) };
        if with(|state| state.busy.contains(&"modify")) {
            return libc::EINVAL;
        }
        with(|state| state.modified.push((mask as u32, *attr)));
        qp.state = attr.qp_state;
        0
    },
    query_qp: |qp, attr, _, _| {
        // SAFETY: the queue pair is alive and the caller gives room.
        unsafe { (*attr).qp_state = (*qp).state };
        0
    },
    destroy_qp: |qp| gone("qp", qp),
    create_srq: |pd, init| {
        // SAFETY: the protection domain and the attributes are alive.
        let (pd_ref, init) = unsafe { (&*pd, &mut *init) };
        init.attr.max_wr = init.attr.max_wr.next_power_of_two();
        Box::into_raw(Box::new(ibv_srq {
            context: pd_ref.context,
            srq_context: init.srq_context,
            pd,
            ..ibv_srq::zeroed()
        }))
    },
    modify_srq: |_, attr, mask| {
        // SAFETY: the attributes are alive.
        let limit = unsafe { (*attr).srq_limit };
        if mask as u32 != IBV_SRQ_LIMIT || limit > 16 {
            return libc::EINVAL;
        }
        0
    },
    query_srq: |_, attr| {
        // SAFETY: the caller gives room.
        unsafe { (*attr).srq_limit = 3 };
        0
    },
    destroy_srq: |srq| gone("srq", srq),
};

/// Frees an object and notes it, unless it shall be busy.
fn gone<T>(name: &'static str, object: *mut T) -> c_int {
    if with(|state| state.busy.contains(&name)) {
        return libc::EBUSY;
    }
    // SAFETY: every object of this device comes from `Box::into_raw`.
    drop(unsafe { Box::from_raw(object) });
    with(|state| state.destroyed.push(name));
    0
}

fn set_errno(value: c_int) {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = value };
}

unsafe extern "C" fn post_send(
    _: *mut ibv_qp,
    mut list: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    with(|state| {
        while !list.is_null() {
            // SAFETY: the caller gives a valid list of requests with one element each.
            let (request, element) = unsafe { (*list, *(*list).sg_list) };
            if state.accept == Some(0) {
                // SAFETY: the caller gives room.
                unsafe { *bad = list };
                return libc::ENOMEM;
            }
            state.accept = state.accept.map(|count| count - 1);
            state.sent.push((request, element));
            list = request.next;
        }
        0
    })
}

unsafe extern "C" fn post_recv(
    _: *mut ibv_qp,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    with(|state| {
        if state.accept == Some(0) {
            // SAFETY: the caller gives room.
            unsafe { *bad = list };
            return libc::ENOMEM;
        }
        // SAFETY: the caller gives one valid request with one element.
        state.received.push(unsafe { (*list, *(*list).sg_list) });
        0
    })
}

unsafe extern "C" fn post_srq_recv(
    _: *mut ibv_srq,
    list: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: the same contract; the queue is not looked at.
    unsafe { post_recv(ptr::null_mut(), list, bad) }
}

unsafe extern "C" fn poll_cq(_: *mut ibv_cq, room: c_int, out: *mut ibv_wc) -> c_int {
    with(|state| {
        let mut count = 0;
        while count < room {
            let Some(completion) = state.completions.pop_front() else {
                break;
            };
            // SAFETY: there is room for `room` completions.
            unsafe { out.add(count as usize).write(completion) };
            count += 1;
        }
        count
    })
}

unsafe extern "C" fn req_notify_cq(_: *mut ibv_cq, _: c_int) -> c_int {
    0
}

unsafe extern "C" fn alloc_mw(pd: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw {
    Box::into_raw(Box::new(ibv_mw {
        pd,
        rkey: 0x1ff,
        type_,
        ..ibv_mw::zeroed()
    }))
}

unsafe extern "C" fn bind_mw(_: *mut ibv_qp, mw: *mut ibv_mw, bind: *mut ibv_mw_bind) -> c_int {
    // SAFETY: the caller gives live objects.
    let (mw, bind) = unsafe { (&mut *mw, &*bind) };
    if with(|state| state.busy.contains(&"bind")) {
        return libc::ENOMEM;
    }
    with(|state| {
        let note = (bind.wr_id, bind.send_flags, bind.bind_info.length);
        state.bound.push(note);
    });
    mw.rkey = ibv_inc_rkey(mw.rkey);
    0
}

unsafe extern "C" fn dealloc_mw(mw: *mut ibv_mw) -> c_int {
    gone("mw", mw)
}
