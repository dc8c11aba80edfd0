//! As many objects as the software device promises, and no more. They are a process's, so one test
//! alone is in this program. Kernel devices promise more than a machine has memory for.

use libc::ENOMEM;
use verbs_sys::{AccessFlags, CreateError, MemoryError, MwType, QueuePairInit, find_device};

/// Makes objects until the device has no more, which must be at `limit`; and again after they went.
fn fill<T>(limit: i32, make: impl Fn() -> Result<T, CreateError>) {
    let limit = usize::try_from(limit).expect("a negative limit");
    let mut all = Vec::new();
    for _ in 0..limit {
        all.push(make().unwrap_or_else(|error| panic!("only {} of {limit}: {error}", all.len())));
    }
    let Err(CreateError::Refused { source, .. }) = make() else {
        panic!("more than {limit} were made, or were refused in another way");
    };
    assert_eq!(source.raw_os_error(), Some(ENOMEM));
    all.pop();
    all.push(make().expect("one has gone"));
}

#[test]
fn as_many_objects_as_promised() {
    let device = find_device(None).expect("no device");
    if !device.is_software() {
        return;
    }
    let context = device.open().expect("the device does not open");
    let limits = context.query_device().expect("no attributes");
    fill(limits.max_pd, || context.alloc_pd());
    fill(limits.max_cq, || context.create_cq(1, None));
    let pd = context.alloc_pd().expect("no protection domain");
    fill(limits.max_srq, || pd.create_srq(1, 1));
    let cq = context.create_cq(1 << 16, None).expect("no queue");
    let least = QueuePairInit {
        max_send_wr: 1,
        max_recv_wr: 1,
        ..QueuePairInit::new(&cq, &cq)
    };
    fill(limits.max_qp, || pd.create_qp(&least));
    fill(limits.max_mw, || pd.alloc_mw(MwType::Type1));

    // Regions share their keys with windows.
    let memory = context.alloc_memory(4096).expect("no memory");
    let make = || pd.reg_memory(&memory, AccessFlags::LOCAL_WRITE);
    let regions: Vec<_> = (0..limits.max_mr)
        .map(|_| make().expect("fewer than promised"))
        .collect();
    let Err(MemoryError::Register { source, .. }) = make() else {
        panic!("more than promised, or refused in another way");
    };
    assert_eq!(source.raw_os_error(), Some(ENOMEM));
    assert!(pd.alloc_mw(MwType::Type1).is_err());
    drop(regions);
    drop(make().expect("all have gone"));
}
