//! Keys are taken away while a peer in another process writes by them as fast as it can.
//!
//! In each round the owner registers a slot of its memory for every one of its queue pairs, or binds a
//! window to it, and the peer WRITEs there without end. Then the owner takes the keys away, one by one, in
//! a way that chance decides, and the moment that call has returned it notes the slot's bytes. At the end
//! of the round the peer must have been refused on every queue pair, and no noted byte have changed.
//! `VERBS_REVOCATIONS` is how many keys are taken away; `VERBS_REVOCATION_MEMORY=heap` does it with memory that is not the device's.

use std::{
    env,
    io::{BufRead, BufReader, Write, stdin},
    os::{
        fd::{AsFd, OwnedFd},
        unix::net::UnixStream,
    },
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use verbs_sys::{
    AccessFlags, BindInfo, CompletionQueue, Context, MemoryRegion, MemoryWindow, MwType,
    PathOptions, ProtectionDomain, QpAttrMask, QueuePair, QueuePairEndpoint, QueuePairInit,
    SendFlags, WcStatus, WorkCompletion, copy, ffi, find_device,
};

type Failure = Box<dyn std::error::Error>;

/// Queue pairs, and so keys of one round.
const PAIRS: usize = 16;
/// Bytes of a slot: more than the device copies without a look at the key would show as torn.
const SLOT: usize = 8192;
/// Requests of a chain.
const RUN: usize = 16;
const PSN: u32 = 9;
/// For so long the owner now and then takes nothing away.
const REST: Duration = Duration::from_millis(40);
const PEER: &str = "VERBS_REVOCATION_PEER";
const OPEN: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_WRITE)
    .union(AccessFlags::REMOTE_READ);

/// One end: its queue pairs share a completion queue.
struct End {
    qps: Vec<QueuePair>,
    cq: CompletionQueue,
    path: PathOptions,
    pd: ProtectionDomain,
    context: Context,
}

impl End {
    fn open() -> Result<Self, Failure> {
        let context = find_device(Some("soft0"))?.open()?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(1024, None)?;
        let path = PathOptions {
            gid_index: context.choose_gid(1)?.0,
            ..PathOptions::default()
        };
        let init = QueuePairInit::new(&cq, &cq);
        let qps = (0..PAIRS).map(|_| pd.create_qp(&init));
        let qps = qps.collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            qps,
            cq,
            path,
            pd,
            context,
        })
    }

    /// From whatever they are in to INIT.
    fn begin(&self) -> Result<(), Failure> {
        for qp in &self.qps {
            let mut attr = ffi::ibv_qp_attr::zeroed();
            attr.qp_state = ffi::IBV_QPS_RESET;
            qp.modify(&attr, QpAttrMask::STATE)?;
            qp.to_init(OPEN, 1)?;
        }
        Ok(())
    }

    fn connect(&self, peers: &[QueuePairEndpoint]) -> Result<(), Failure> {
        for (qp, peer) in self.qps.iter().zip(peers) {
            qp.to_rtr(peer, &self.path)?;
            qp.to_rts(PSN, &self.path)?;
        }
        Ok(())
    }

    fn endpoints(&self) -> Result<Vec<String>, Failure> {
        let endpoint = |qp: &QueuePair| Ok(qp.endpoint(&self.path, PSN)?.to_string());
        self.qps.iter().map(endpoint).collect()
    }

    /// The next completion.
    fn next(&self) -> Result<WorkCompletion, Failure> {
        let mut wcs = [WorkCompletion::default()];
        while self.cq.poll(&mut wcs)? == 0 {
            std::thread::yield_now();
        }
        let [wc] = wcs;
        Ok(wc)
    }
}

/// Lines to the other process and back.
struct Line(BufReader<UnixStream>);

impl Line {
    fn say(&mut self, words: &[String]) -> Result<(), Failure> {
        let line = words.join("\t") + "\n";
        Ok(self.0.get_mut().write_all(line.as_bytes())?)
    }

    fn hear(&mut self) -> Result<Vec<String>, Failure> {
        let mut line = String::new();
        self.0.read_line(&mut line)?;
        Ok(line.trim().split('\t').map(str::to_owned).collect())
    }
}

/// A small generator: what chance decides can be repeated.
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit
    }
}

/// What opens a slot to the peer.
enum Opening {
    Region(MemoryRegion),
    Window(MemoryWindow),
}

/// The owner's memory: of the device or of the heap.
struct Memory {
    base: *mut u8,
    whole: Arc<MemoryRegion>,
    _heap: Vec<u64>,
}

impl Memory {
    fn new(end: &End) -> Result<Self, Failure> {
        // One slot more: what regions are moved to.
        let len = (PAIRS + 1) * SLOT;
        let access = OPEN | AccessFlags::MW_BIND;
        if env::var("VERBS_REVOCATION_MEMORY").is_ok_and(|memory| memory == "heap") {
            let mut heap = vec![0u64; len / 8];
            let base = heap.as_mut_ptr().cast::<u8>();
            // SAFETY: the bytes live as long as the region, and are looked at by raw pointer only.
            let whole = unsafe { end.pd.reg_mr(base, len, access) }?;
            let whole = Arc::new(whole);
            return Ok(Self {
                base,
                whole,
                _heap: heap,
            });
        }
        let memory = end.context.alloc_memory(len)?;
        let whole = Arc::new(end.pd.reg_memory(&memory, access)?);
        Ok(Self {
            base: memory.addr(),
            whole,
            _heap: Vec::new(),
        })
    }

    fn slot(&self, index: usize) -> *mut u8 {
        self.base.wrapping_add(index * SLOT)
    }

    /// The bytes of a slot, which a peer may be writing.
    fn look(&self, index: usize) -> Vec<u8> {
        let mut bytes = vec![0; SLOT];
        // SAFETY: the slot lies in the memory; the copy is made for racing bytes.
        unsafe { copy::read_shared(bytes.as_mut_ptr(), self.slot(index), SLOT) };
        bytes
    }
}

fn open_slot(
    end: &End,
    memory: &Memory,
    index: usize,
    chance: &mut Chance,
) -> Result<Opening, Failure> {
    let at = memory.slot(index);
    if chance.below(2) == 0 {
        // SAFETY: the slot is part of memory that outlives the region.
        let region = unsafe { end.pd.reg_mr(at, SLOT, OPEN) }?;
        return Ok(Opening::Region(region));
    }
    let mut window = end.pd.alloc_mw(MwType::Type1)?;
    assert!(bind(end, memory, &mut window, index, Some(at))?);
    Ok(Opening::Window(window))
}

/// Binds a window to a slot, or to none, and waits until it is. `false`: the peer has used the old key
/// meanwhile, which broke the queue pair before the bind was done.
fn bind(
    end: &End,
    memory: &Memory,
    window: &mut MemoryWindow,
    index: usize,
    at: Option<*mut u8>,
) -> Result<bool, Failure> {
    let info = at.map(|at| BindInfo {
        region: &memory.whole,
        addr: at as u64,
        len: SLOT as u64,
        access: AccessFlags::REMOTE_WRITE,
    });
    // SAFETY: the queue pair is posted to by this thread alone.
    unsafe { window.bind(&end.qps[index], 0, SendFlags::empty(), info) }?;
    match end.next()?.status() {
        WcStatus::Success => Ok(true),
        WcStatus::WrFlushErr => Ok(false),
        other => Err(format!("a bind ended with {other:?}").into()),
    }
}

/// Takes a slot's key away, in one of the ways there are.
fn close_slot(
    end: &End,
    memory: &Memory,
    index: usize,
    opening: Opening,
    chance: &mut Chance,
) -> Result<Option<Opening>, Failure> {
    let spare = memory.slot(PAIRS);
    match opening {
        Opening::Region(region) if chance.below(2) == 0 => {
            region.deregister()?;
            Ok(None)
        }
        Opening::Region(region) => {
            // SAFETY: the spare slot is of the same memory.
            let moved = unsafe { region.rereg_mr(Some((spare, SLOT)), None, None) }?;
            Ok(Some(Opening::Region(moved)))
        }
        Opening::Window(mut window) => {
            let to = match chance.below(3) {
                0 => return Ok(None),
                1 => None,
                _ => Some(spare),
            };
            let bound = bind(end, memory, &mut window, index, to)?;
            // One that could not be bound anew is given up.
            Ok(bound.then_some(Opening::Window(window)))
        }
    }
}

/// The owner, and the process that writes by its keys.
struct Siege {
    peer: Child,
    line: Line,
    end: End,
    memory: Memory,
}

impl Siege {
    fn begin() -> Result<Self, Failure> {
        let (ours, theirs) = UnixStream::pair()?;
        let peer = Command::new(env::current_exe()?)
            .args(["--exact", "peer", "--nocapture"])
            .env(PEER, "1")
            .stdin(OwnedFd::from(theirs))
            .stdout(Stdio::null())
            .spawn()?;
        let end = End::open()?;
        Ok(Self {
            peer,
            line: Line(BufReader::new(ours)),
            memory: Memory::new(&end)?,
            end,
        })
    }

    /// Connects all queue pairs anew, opens every slot, and waits until each has been written once.
    fn open_slots(
        &mut self,
        mut open: impl FnMut(&End, &Memory, usize) -> Result<Opening, Failure>,
    ) -> Result<Vec<(usize, Opening)>, Failure> {
        let Self {
            line, end, memory, ..
        } = self;
        end.begin()?;
        line.say(&end.endpoints()?)?;
        let peers = line.hear()?;
        let peers = peers.iter().map(|text| text.parse());
        end.connect(&peers.collect::<Result<Vec<_>, _>>()?)?;
        let mut openings = Vec::new();
        let mut keys = Vec::new();
        for index in 0..PAIRS {
            let opening = open(end, memory, index)?;
            let rkey = match &opening {
                Opening::Region(region) => region.rkey(),
                Opening::Window(window) => window.rkey(),
            };
            keys.push(format!("{} {rkey}", memory.slot(index) as u64));
            openings.push((index, opening));
        }
        line.say(&keys)?;
        assert_eq!(line.hear()?, ["written"]);
        Ok(openings)
    }

    /// Every key was taken away, and the peer was refused by each.
    fn all_were_refused(&mut self) -> Result<(), Failure> {
        let refused = self.line.hear()?;
        assert_eq!(refused, [PAIRS.to_string()], "stale keys that were refused");
        Ok(())
    }

    fn end(mut self) -> Result<(), Failure> {
        self.line.say(&["end".to_owned()])?;
        assert!(self.peer.wait()?.success());
        Ok(())
    }

    /// Holds the peer's process, wherever it is.
    fn stop(&self) -> Result<(), Failure> {
        let pid = Pid::from_child(&self.peer);
        kill_process(pid, Signal::STOP)?;
        waitpid(Some(pid), WaitOptions::UNTRACED)?;
        Ok(())
    }

    fn go_on(&self) -> Result<(), Failure> {
        Ok(kill_process(Pid::from_child(&self.peer), Signal::CONT)?)
    }
}

fn own(revocations: usize) -> Result<(), Failure> {
    let mut siege = Siege::begin()?;
    let mut chance = Chance(0x9e37_79b9_7f4a_7c15);
    let mut taken = 0;
    while taken < revocations {
        let mut openings =
            siege.open_slots(|end, memory, index| open_slot(end, memory, index, &mut chance))?;
        let mut noted = Vec::new();
        let mut kept = Vec::new();
        let (end, memory) = (&siege.end, &siege.memory);
        while !openings.is_empty() {
            let (index, opening) = openings.swap_remove(chance.below(openings.len()));
            if chance.below(32) == 0 {
                // Long enough for the peer to post without fences again, on every queue pair.
                std::thread::sleep(REST);
            }
            kept.extend(close_slot(end, memory, index, opening, &mut chance)?);
            noted.push((index, memory.look(index)));
            taken += 1;
        }
        siege.all_were_refused()?;
        for (index, bytes) in noted {
            assert!(
                siege.memory.look(index) == bytes,
                "a byte has changed in a slot that was closed"
            );
        }
    }
    siege.end()?;
    println!(
        "{taken} keys taken away while they were used; no byte changed afterwards, every later use was refused"
    );
    Ok(())
}

#[test]
fn nothing_is_written_by_a_key_that_was_taken_away() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    let revocations = env::var("VERBS_REVOCATIONS")
        .ok()
        .and_then(|text| text.parse().ok());
    own(revocations.unwrap_or(2000)).unwrap();
}

/// One siege at a time. Their peers are those of one process, which waits for every one of them whatever key it takes
/// away: while the one test has its peer stopped, the other's deregistration may say `EBUSY` as well.
static ONE: Mutex<()> = Mutex::new(());

/// Takes keys away while the peer is stopped, until it was so in the middle of a WRITE.
fn hold() -> Result<(), Failure> {
    let mut siege = Siege::begin()?;
    let mut was_busy = false;
    while !was_busy {
        let openings = siege.open_slots(|end, memory, index| {
            // SAFETY: the slot is part of memory that outlives the region.
            let region = unsafe { end.pd.reg_mr(memory.slot(index), SLOT, OPEN) }?;
            Ok(Opening::Region(region))
        })?;
        for (_, opening) in openings {
            let Opening::Region(region) = opening else {
                return Err("there is no window".into());
            };
            if was_busy {
                region.deregister()?;
                continue;
            }
            siege.stop()?;
            let ended = region.deregister();
            siege.go_on()?;
            if let Err(error) = ended {
                assert_eq!(error.source.raw_os_error(), Some(libc::EBUSY));
                error.region.deregister()?;
                was_busy = true;
            }
        }
        siege.all_were_refused()?;
    }
    siege.end()
}

#[test]
fn who_is_stopped_in_the_middle_of_a_write_is_not_waited_for() {
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    hold().unwrap();
}

/// The other process: not a test of its own.
#[test]
fn peer() {
    if env::var_os(PEER).is_some() {
        besiege().unwrap();
    }
}

fn besiege() -> Result<(), Failure> {
    let orders = UnixStream::from(stdin().as_fd().try_clone_to_owned()?);
    let mut line = Line(BufReader::new(orders));
    let end = End::open()?;
    let memory = end.context.alloc_memory(SLOT)?;
    let source = end.pd.reg_memory(&memory, AccessFlags::LOCAL_WRITE)?;
    let mut counter = 0u64;
    loop {
        let peers = line.hear()?;
        if peers == ["end"] {
            return Ok(());
        }
        end.begin()?;
        line.say(&end.endpoints()?)?;
        let peers = peers.iter().map(|text| text.parse());
        end.connect(&peers.collect::<Result<Vec<_>, _>>()?)?;
        let mut targets = Vec::new();
        for text in line.hear()? {
            let (addr, rkey) = text.split_once(' ').ok_or("no key")?;
            targets.push((addr.parse::<u64>()?, rkey.parse::<u32>()?));
        }
        let mut write = |index: usize, first: bool| -> Result<WcStatus, Failure> {
            let (remote_addr, rkey) = targets[index];
            counter += 1;
            // SAFETY: eight aligned bytes of our own memory.
            unsafe { memory.addr().cast::<u64>().write(counter) };
            // One that the device executes with a call, those that it executes without, alone and in a run.
            let (requests, len) = match counter % 4 {
                _ if first => (1, SLOT),
                0 => (1, SLOT),
                1 => (1, 64),
                2 => (1, 4096),
                _ => (RUN, 64),
            };
            let mut sges = [ffi::ibv_sge::default(); RUN];
            let mut wrs = [ffi::ibv_send_wr::zeroed(); RUN];
            let mut next = std::ptr::null_mut();
            for place in (0..requests).rev() {
                let (sge, wr) = (&mut sges[place], &mut wrs[place]);
                sge.addr = source.addr();
                sge.length = len as u32;
                sge.lkey = source.lkey();
                wr.wr_id = place as u64;
                wr.opcode = ffi::IBV_WR_RDMA_WRITE;
                if place + 1 == requests {
                    wr.send_flags = ffi::IBV_SEND_SIGNALED;
                }
                (wr.sg_list, wr.num_sge, wr.next) = (sge, 1, next);
                let remote_addr = remote_addr + (place * len) as u64;
                wr.wr.rdma = ffi::ibv_send_wr_rdma { remote_addr, rkey };
                next = wr;
            }
            // SAFETY: the requests and their lists live through the call, the source is registered.
            unsafe { end.qps[index].post_send(next) }?;
            let completion = end.next()?;
            if completion.status() != WcStatus::Success {
                // Those behind it complete, too.
                for _ in completion.wr_id() as usize + 1..requests {
                    assert_eq!(end.next()?.status(), WcStatus::WrFlushErr);
                }
            }
            Ok(completion.status())
        };
        for index in 0..PAIRS {
            assert_eq!(write(index, true)?, WcStatus::Success, "by a good key");
        }
        line.say(&["written".to_owned()])?;
        let mut open: Vec<usize> = (0..PAIRS).collect();
        let mut refused = 0;
        while !open.is_empty() {
            let mut still = Vec::new();
            for index in open {
                match write(index, false)? {
                    WcStatus::Success => still.push(index),
                    WcStatus::RemAccessErr => refused += 1,
                    other => return Err(format!("a WRITE ended with {other:?}").into()),
                }
            }
            open = still;
        }
        line.say(&[refused.to_string()])?;
    }
}
