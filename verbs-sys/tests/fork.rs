//! A program that uses the software device forks. One test alone is in this program, so that nothing
//! else goes on in it.

mod common;

use std::{
    ffi::c_int,
    io::{BufRead, BufReader, Write},
    os::unix::net::UnixStream,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use common::{ALL, Pair, Queue, Result, Side, bytes, remote};
use verbs_sys::{
    Context, MemoryRegion, PathOptions, ProtectionDomain, QpType, QueuePairInit, RemoteAddr,
    SendFlags, WcStatus, WorkCompletion, find_device, fork_init, owned::OwnedQueuePair,
};

/// What each end tells the other: itself, and a region.
fn greet(
    stream: &mut BufReader<UnixStream>,
    side: &Side,
    path: &PathOptions,
    region: &MemoryRegion,
) -> Result<(String, RemoteAddr)> {
    let endpoint = side.qp.queue_pair().endpoint(path, 5)?;
    let line = format!("{endpoint} {} {}\n", region.addr(), region.rkey());
    stream.get_mut().write_all(line.as_bytes())?;
    let mut answer = String::new();
    stream.read_line(&mut answer)?;
    let mut words = answer.split_whitespace();
    let mut word = || words.next().ok_or("the other end is gone");
    let endpoint = word()?.to_owned();
    let (addr, rkey) = (word()?.parse()?, word()?.parse()?);
    Ok((endpoint, RemoteAddr { addr, rkey }))
}

fn side(context: &Context, pd: &ProtectionDomain) -> Result<Side> {
    let channel = context.create_comp_channel()?;
    let cq = context.create_cq(64, Some(&channel))?;
    let init = QueuePairInit {
        max_inline_data: 64,
        ..QueuePairInit::new(&cq, &cq)
    };
    let qp: Queue = OwnedQueuePair::new(pd.create_qp(&init)?, 16, 16);
    qp.queue_pair().to_init(ALL, 1)?;
    Ok(Side { qp, cq, channel })
}

/// Connects a side to that of the other process; gives the other's memory.
fn meet(
    stream: &mut BufReader<UnixStream>,
    side: &Side,
    context: &Context,
    region: &MemoryRegion,
) -> Result<RemoteAddr> {
    let path = PathOptions {
        gid_index: context.choose_gid(1)?.0,
        ..PathOptions::default()
    };
    let (endpoint, theirs) = greet(stream, side, &path, region)?;
    side.qp.queue_pair().to_rtr(&endpoint.parse()?, &path)?;
    side.qp.queue_pair().to_rts(5, &path)?;
    Ok(theirs)
}

/// The whole of what a pair can do, within the parent.
fn works(pair: &mut Pair) -> Result {
    let target = pair.region(4096, 0)?;
    let source = pair.region(4096, 6)?;
    let receive = pair.region(4096, 0)?;
    pair.right.qp.post_recv(receive)?;
    pair.left
        .qp
        .write(source, 0..100, remote(&target, 0), None)?;
    let source = pair.left.next()?.buffer.ok_or("no buffer")?;
    assert_eq!(bytes(&target, 0..101), [vec![6; 100], vec![0]].concat());
    pair.right.cq.req_notify(false)?;
    pair.left
        .qp
        .send(source, 0..200, SendFlags::empty(), None)?;
    let event = pair.right.channel.wait_timeout(Duration::from_secs(60))?;
    assert!(event.is_some_and(|event| event.is_of(&pair.right.cq)));
    let message = pair.right.next()?;
    assert_eq!(bytes(&message.buffer.ok_or("no buffer")?, 0..200), [6; 200]);
    assert_eq!(pair.left.next()?.status, WcStatus::Success);
    Ok(())
}

/// The child: lets go of what it has inherited, and uses a device of its own.
fn child(inherited: (Pair, MemoryRegion, verbs_sys::QueuePair), stream: UnixStream) -> Result {
    let mut stream = BufReader::new(stream);
    drop(inherited);
    stream.get_mut().write_all(b"dropped\n")?;

    let context = find_device(Some("soft0"))?.open()?;
    let pd = context.alloc_pd()?;
    let memory = context.alloc_memory(4096)?;
    let region = pd.reg_memory(&memory, ALL)?;
    let buffer = pd.reg_memory(&context.alloc_memory(4096)?, ALL)?;
    let mut side = side(&context, &pd)?;
    side.qp.post_recv(buffer)?;
    let theirs = meet(&mut stream, &side, &context, &region)?;
    let message = side.next()?;
    let buffer = message.buffer.ok_or("no buffer")?;
    assert_eq!(bytes(&buffer, 0..6), b"parent");
    // The parent wrote before it sent.
    assert_eq!(bytes(&region, 0..8), [9; 8]);
    side.qp.write(region, 0..8, theirs, None)?;
    side.next()?;
    side.qp.send_inline(b"child", SendFlags::empty(), None)?;
    assert_eq!(side.next()?.status, WcStatus::Success);
    // Stays until the parent has seen all.
    let mut line = String::new();
    stream.read_line(&mut line)?;
    Ok(())
}

/// A child that connects, forks a child of its own, and dies while that one lives.
fn short_lived_child(stream: UnixStream) -> Result<std::convert::Infallible> {
    let mut stream = BufReader::new(stream);
    let context = find_device(Some("soft0"))?.open()?;
    let pd = context.alloc_pd()?;
    let region = pd.reg_memory(&context.alloc_memory(4096)?, ALL)?;
    let side = side(&context, &pd)?;
    meet(&mut stream, &side, &context, &region)?;
    // The parent has connected, too.
    stream.read_line(&mut String::new())?;
    // SAFETY: as in the test.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // Lives on until its parent's peer has seen enough.
        let _ = stream.read_line(&mut String::new());
    }
    // SAFETY: it ends here, as a crash would.
    unsafe { libc::_exit((pid < 0).into()) }
}

/// Starts a child that ends by itself, and gives the way to it.
fn start_child(
    run: impl FnOnce(UnixStream) -> Result<std::convert::Infallible>,
) -> Result<(libc::pid_t, BufReader<UnixStream>)> {
    let (here, there) = UnixStream::pair()?;
    here.set_read_timeout(Some(Duration::from_secs(60)))?;
    there.set_read_timeout(Some(Duration::from_secs(60)))?;
    // SAFETY: as in the test.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "cannot fork");
    if pid == 0 {
        drop(here);
        let result = catch_unwind(AssertUnwindSafe(|| run(there)));
        if let Ok(Err(error)) = result {
            eprintln!("the child failed: {error}");
        }
        // SAFETY: it ends here.
        unsafe { libc::_exit(2) };
    }
    drop(there);
    Ok((pid, BufReader::new(here)))
}

/// What a forked child has inherited does not keep its parent alive to others.
fn the_end_of_a_child_is_noticed_before_that_of_its_own_child(pair: &Pair) -> Result {
    let (pid, mut stream) = start_child(short_lived_child)?;
    let region = pair.region(4096, 9)?;
    let mut side = side(&pair.context, &pair.pd)?;
    meet(&mut stream, &side, &pair.context, &region)?;
    side.qp.send_inline(b"anybody?", SendFlags::empty(), None)?;
    stream.get_mut().write_all(b"connected\n")?;
    assert_eq!(wait_for_child(pid), 0);
    assert_eq!(side.next()?.status, WcStatus::RetryExcErr);
    // Its child has lived as long as this.
    stream.get_mut().write_all(b"go\n")?;
    Ok(())
}

/// This is a child that ends by exit(3).
static ENDS_CARELESSLY: AtomicBool = AtomicBool::new(false);

/// The leak sanitizer asks for this in such an end: to a child, what the parent's other threads have is lost.
// SAFETY: nothing else has this name.
#[unsafe(no_mangle)]
extern "C" fn __lsan_is_turned_off() -> c_int {
    ENDS_CARELESSLY.load(Ordering::Relaxed).into()
}

/// A child that takes a message, posts a receive, and ends as programs do that leave all the rest to the system. If it
/// `waits`, it does so for another message, and then until it hears that it may end.
fn careless_child(stream: UnixStream, waits: bool) -> Result<std::convert::Infallible> {
    let mut stream = BufReader::new(stream);
    let context = find_device(Some("soft0"))?.open()?;
    let pd = context.alloc_pd()?;
    let region = || pd.reg_memory(&context.alloc_memory(4096)?, ALL);
    let mut side = side(&context, &pd)?;
    side.qp.post_recv(region()?)?;
    side.qp.post_recv(region()?)?;
    meet(&mut stream, &side, &context, &region()?)?;
    for _ in 0..1 + u32::from(waits) {
        let message = side.next()?;
        side.qp.post_recv(message.buffer.ok_or("no buffer")?)?;
    }
    if waits {
        stream.read_line(&mut String::new())?;
    }
    ENDS_CARELESSLY.store(true, Ordering::Relaxed);
    // SAFETY: what the process has, it has to itself.
    unsafe { libc::exit(0) }
}

/// Starts such a child, and connects with it.
fn start_careless_child(
    pair: &Pair,
    waits: bool,
) -> Result<(libc::pid_t, Side, BufReader<UnixStream>)> {
    let (pid, mut stream) = start_child(|stream| careless_child(stream, waits))?;
    let region = pair.region(4096, 9)?;
    let side = side(&pair.context, &pair.pd)?;
    meet(&mut stream, &side, &pair.context, &region)?;
    Ok((pid, side, stream))
}

/// A message that was received is never reported as lost.
fn what_a_child_received_before_its_end_has_succeeded(pair: &Pair) -> Result {
    let (pid, mut side, _stream) = start_careless_child(pair, false)?;
    side.qp.send_inline(b"the last", SendFlags::empty(), None)?;
    assert_eq!(wait_for_child(pid), 0);
    assert_eq!(side.next()?.status, WcStatus::Success);
    side.qp.send_inline(b"too late", SendFlags::empty(), None)?;
    assert_eq!(side.next()?.status, WcStatus::RetryExcErr);
    Ok(())
}

/// A message that was received has ended soon, although its receiver neither polls nor answers, and its sender polls
/// seldom.
fn few_polls_find_that_a_message_was_received(pair: &Pair) -> Result {
    let (pid, mut side, mut stream) = start_careless_child(pair, true)?;
    side.qp
        .send_inline(b"the first", SendFlags::empty(), None)?;
    assert_eq!(side.next()?.status, WcStatus::Success);
    // By now no thread of the device has anything to do, or it would ask unasked.
    std::thread::sleep(Duration::from_millis(100));
    side.qp.send_inline(b"the last", SendFlags::empty(), None)?;
    let (mut polls, mut room) = (0, [WorkCompletion::default()]);
    while side.cq.poll(&mut room)? == 0 {
        polls += 1;
        assert!(polls < 8, "nobody has asked its receiver");
        // Ever longer: what is asked for takes its time where a machine has much to do.
        std::thread::sleep(Duration::from_millis(50 << polls));
    }
    let done = side.qp.complete(&mut room[0]).ok_or("of another")?;
    assert_eq!(done.status, WcStatus::Success);
    stream.get_mut().write_all(b"go\n")?;
    assert_eq!(wait_for_child(pid), 0);
    Ok(())
}

/// The status that the child ends with.
fn wait_for_child(pid: libc::pid_t) -> i32 {
    let mut status = 0;
    // SAFETY: a place for the status.
    let found = unsafe { libc::waitpid(pid, &mut status, 0) };
    assert_eq!(found, pid);
    status
}

#[test]
fn a_forked_child_leaves_its_parents_device_alone() -> Result {
    fork_init()?;
    if !find_device(None)?.is_software() {
        return Ok(());
    }
    let mut pair = Pair::new()?;
    works(&mut pair)?;
    let kept = pair.region(4096, 3)?;
    // A datagram queue pair has a name in the system that the next one of its number takes again.
    let datagrams = |pair: &Pair| {
        let init = QueuePairInit {
            qp_type: QpType::Ud,
            ..QueuePairInit::new(&pair.left.cq, &pair.left.cq)
        };
        pair.pd.create_qp(&init)
    };
    let named = datagrams(&pair)?;
    let number = named.qp_num();
    let (here, there) = UnixStream::pair()?;
    here.set_read_timeout(Some(Duration::from_secs(60)))?;
    there.set_read_timeout(Some(Duration::from_secs(60)))?;

    // SAFETY: the child uses what a child of a process with threads may use with glibc: it allocates
    // and makes threads; it ends without running anything of the parent's.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "cannot fork");
    if pid == 0 {
        drop(here);
        let inherited = (pair, kept, named);
        let result = catch_unwind(AssertUnwindSafe(|| child(inherited, there)));
        let code = match result {
            Ok(Ok(())) => 0,
            Ok(Err(error)) => {
                eprintln!("the child failed: {error}");
                1
            }
            Err(_) => 2,
        };
        // SAFETY: it ends here.
        unsafe { libc::_exit(code) };
    }
    drop(there);
    let mut stream = BufReader::new(here);
    let mut line = String::new();
    stream.read_line(&mut line)?;
    assert_eq!(line, "dropped\n");

    // All of it is as it was.
    assert_eq!(bytes(&kept, 0..4096), [3; 4096]);
    works(&mut pair)?;
    drop(named);
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        let again = datagrams(&pair)?;
        if again.qp_num() == number {
            break;
        }
        assert!(Instant::now() < deadline, "its number does not come again");
    }

    let region = pair.region(4096, 9)?;
    let receive = pair.region(4096, 0)?;
    let mut side = side(&pair.context, &pair.pd)?;
    side.qp.post_recv(receive)?;
    let target = pair.region(4096, 0)?;
    let theirs = meet(&mut stream, &side, &pair.context, &target)?;
    side.qp.write(region, 0..8, theirs, None)?;
    assert_eq!(side.next()?.status, WcStatus::Success);
    side.qp.send_inline(b"parent", SendFlags::empty(), None)?;
    let mut ended = [side.next()?, side.next()?];
    // The child's message may come before the acknowledgement.
    ended.sort_by_key(|ended| ended.byte_len);
    assert!(ended.iter().all(|ended| ended.status == WcStatus::Success));
    let message = ended[1].buffer.as_ref().ok_or("no buffer")?;
    assert_eq!(bytes(message, 0..5), b"child");
    assert_eq!(bytes(&target, 0..8), [9; 8]);
    works(&mut pair)?;

    stream.get_mut().write_all(b"go\n")?;
    assert_eq!(wait_for_child(pid), 0);
    // The child's end is noticed, and hurts nobody else.
    side.qp.send_inline(b"gone", SendFlags::empty(), None)?;
    assert_eq!(side.next()?.status, WcStatus::RetryExcErr);
    works(&mut pair)?;
    drop(side);
    assert!(pair.context.try_get_async_event()?.is_none());

    the_end_of_a_child_is_noticed_before_that_of_its_own_child(&pair)?;
    for _ in 0..10 {
        what_a_child_received_before_its_end_has_succeeded(&pair)?;
    }
    few_polls_find_that_a_message_was_received(&pair)?;
    works(&mut pair)?;
    Ok(())
}
