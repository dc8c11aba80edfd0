//! With a C library in the place of the system's library: it is loaded apart in the same way.

use super::*;
use crate::ffi::*;

/// A second C library; it stands for the real devices' in all tests of the process.
fn real() -> &'static Real {
    let load = || {
        let found = find::candidates(&own_path(), "libc.so.6");
        let path = found.first().expect("a C library");
        Some(Real::of(load_apart(path).unwrap()).unwrap())
    };
    REAL.get_or_init(load).as_ref().expect("loaded above")
}

fn errno() -> c_int {
    std::io::Error::last_os_error().raw_os_error().unwrap()
}

#[test]
fn errno_is_carried_over_in_every_thread() {
    let check = || {
        let real = real();
        // SAFETY: a function that takes nothing; both places are this thread's.
        assert_ne!(unsafe { (real.errno)() }, unsafe {
            libc::__errno_location()
        });
        let path = c"/no/such/folder".as_ptr();
        set_errno(0);
        assert_eq!(call!(real, chdir(path: *const c_char) -> c_int), -1);
        assert_eq!(errno(), libc::ENOENT);
        // What succeeds leaves it alone.
        set_errno(libc::EXDEV);
        let byte = c_int::from(b'7');
        assert_ne!(call!(real, isdigit(byte: c_int) -> c_int), 0);
        assert_eq!(errno(), libc::EXDEV);
    };
    check();
    std::thread::spawn(check).join().unwrap();
}

#[test]
fn what_an_old_library_does_not_have_is_not_supported() {
    let real = real();
    assert_eq!(call!(real, ibv_new() -> c_int), libc::EOPNOTSUPP);
    assert_eq!(
        call!(real, ibv_newer() -> isize),
        -(libc::EOPNOTSUPP as isize)
    );
    set_errno(0);
    assert!(call!(real, ibv_newest() -> *mut ibv_pd).is_null());
    assert_eq!(errno(), libc::EOPNOTSUPP);
}

#[test]
fn objects_are_told_by_their_device() {
    real();
    let mut device = ibv_device::zeroed();
    let mut context = ibv_context::zeroed();
    context.device = &raw mut device;
    let mut pd = ibv_pd::zeroed();
    pd.context = &raw mut context;
    let mut cq = ibv_cq::zeroed();
    cq.context = &raw mut context;
    let mut event = ibv_async_event::zeroed();
    event.element.cq = &raw mut cq;
    event.event_type = IBV_EVENT_CQ_ERR;
    // SAFETY: they are alive.
    unsafe {
        assert!(of(&raw mut device).is_some());
        assert!(of(&raw mut context).is_some());
        assert!(of(&raw mut pd).is_some());
        assert!(of(&raw mut cq).is_some());
        assert_eq!(context_of(&event), Some(&raw mut context));
        context.device = soft_device();
        assert!(of(soft_device()).is_none());
        assert!(of(&raw mut context).is_none());
        assert!(of(&raw mut pd).is_none());
        assert!(of(&raw mut cq).is_none());
        event.event_type = IBV_EVENT_PORT_ERR;
        event.element.port_num = 1;
        assert_eq!(context_of(&event), None);
    }
}

/// Stands for a driver's function: it fails, and says why in the other C library's `errno`.
unsafe extern "C" fn refuse(_: *mut ibv_context, _: *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex {
    // SAFETY: a function that takes nothing, and this thread's place.
    unsafe { *(real().errno)() = libc::EDQUOT };
    ptr::null_mut()
}

unsafe extern "C" fn query(_: *mut ibv_context, _: u8, _: *mut ibv_port_attr, _: usize) -> c_int {
    0
}

#[test]
fn functions_in_a_context_carry_errno_over() {
    real();
    let mut outer = verbs_context::zeroed();
    outer.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
    outer.sz = size_of::<verbs_context>() - core::mem::offset_of!(verbs_context, create_cq_ex);
    outer.create_cq_ex = Some(refuse);
    outer.query_port = Some(query);
    // In front of what the size says there is, so not a function's place.
    outer.alloc_dm = Some(stray);
    let outer = &raw mut outer;
    // SAFETY: alive, and this function's own.
    unsafe {
        let context = &raw mut (*outer).context;
        watch(context);
        let create = (*outer).create_cq_ex.unwrap();
        set_errno(0);
        assert!(create(context, ptr::null_mut()).is_null());
        assert_eq!(errno(), libc::EDQUOT);
        assert!((*outer).create_qp_ex.is_none());
        assert!((*context).ops.alloc_mw.is_none());
        let stray: unsafe extern "C" fn(_, _) -> _ = stray;
        assert!(
            (*outer)
                .alloc_dm
                .is_some_and(|is| ptr::fn_addr_eq(is, stray))
        );

        forget(context);
        set_errno(0);
        assert!(create(context, ptr::null_mut()).is_null());
        assert_eq!(errno(), libc::EOPNOTSUPP);
    }
}

unsafe extern "C" fn stray(_: *mut ibv_context, _: *mut ibv_alloc_dm_attr) -> *mut ibv_dm {
    ptr::null_mut()
}

#[test]
fn devices_of_the_kernel_are_looked_for() {
    assert!(!has_entries(Path::new("/no/such/folder")));
    assert!(has_entries(Path::new("/proc/self")));
}

#[test]
fn what_is_no_library_says_so() {
    let error = Real::open(Path::new("/proc/self/status")).err().unwrap();
    assert!(error.contains("status"), "{error}");
    let found = find::candidates(&own_path(), "libc.so.6");
    let error = Real::open(&found[0]).err().unwrap();
    assert_eq!(error, "it lists no devices");
}
