//! The extended calls, made as C programs make them.

mod completions;
mod domains;
mod memory;
mod posting;
mod processes;
mod support;
mod xrc;

use std::ptr;

use self::support::World;
use crate::ffi::*;

#[test]
fn a_device_tells_as_much_as_its_caller_has_room_for() {
    let world = World::open();
    let query = world.ops().query_device_ex.unwrap();
    let mut attr = ibv_device_attr_ex::zeroed();
    let input = ibv_query_device_ex_input::default();
    let all = size_of::<ibv_device_attr_ex>();
    // SAFETY: an open context, and a place of so many bytes, here and below.
    unsafe {
        assert_eq!(
            query(world.context, &raw const input, &raw mut attr, all),
            0
        );
    }
    assert_eq!(attr.phys_port_cnt_ex, 1);
    assert_eq!(attr.orig_attr.phys_port_cnt, 1);
    assert_ne!(attr.orig_attr.vendor_id, 0);
    assert_ne!(attr.max_dm_size, 0);
    attr.phys_port_cnt_ex = 77;
    let less = core::mem::offset_of!(ibv_device_attr_ex, phys_port_cnt_ex);
    // SAFETY: as above.
    unsafe {
        assert_eq!(query(world.context, ptr::null(), &raw mut attr, less), 0);
    }
    assert_eq!(attr.phys_port_cnt_ex, 77);
    let unknown = ibv_query_device_ex_input { comp_mask: 1 };
    // SAFETY: as above.
    let code = unsafe { query(world.context, &raw const unknown, &raw mut attr, all) };
    assert_eq!(code, libc::EINVAL);
}

#[test]
fn the_clock_runs() {
    let world = World::open();
    let query = world.ops().query_rt_values.unwrap();
    let read = || {
        let mut values = ibv_values_ex::zeroed();
        values.comp_mask = IBV_VALUES_MASK_RAW_CLOCK | 1 << 20;
        // SAFETY: an open context, and a place for the result.
        assert_eq!(unsafe { query(world.context, &raw mut values) }, 0);
        assert_eq!(values.comp_mask, IBV_VALUES_MASK_RAW_CLOCK);
        (values.raw_clock.tv_sec, values.raw_clock.tv_nsec)
    };
    let before = read();
    while read() == before {}
    assert!(read() > before);
}
