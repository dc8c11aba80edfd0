//! Two processes on the software device: one writes into the other's memory, then sends it a message.
//!
//! ```text
//! cargo run -p verbs-sys --example two_processes
//! ```
//!
//! The first starts the second and talks to it through pipes, which could as well be a socket.

use std::error::Error;
use std::io::{BufRead, BufReader, Write, stdin};
use std::process::{Command, Stdio};

use verbs_sys::owned::{Completed, OwnedQueuePair};
use verbs_sys::{
    AccessFlags, CompletionQueue, MemoryRegion, PathOptions, ProtectionDomain, QueuePairInit,
    RemoteAddr, SendFlags, WcStatus, WorkCompletion, copy, find_device,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const MEMORY: usize = 4096;
const PSN: u32 = 1;

/// What either process has.
struct Side {
    qp: OwnedQueuePair<MemoryRegion>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    path: PathOptions,
}

impl Side {
    fn open() -> Result<Self> {
        let context = find_device(Some("soft0"))?.open()?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(16, None)?;
        let init = QueuePairInit {
            max_inline_data: 64,
            ..QueuePairInit::new(&cq, &cq)
        };
        let qp = pd.create_qp(&init)?;
        let path = PathOptions::default();
        qp.to_init(AccessFlags::REMOTE_WRITE, path.port)?;
        Ok(Self {
            qp: OwnedQueuePair::new(qp, 8, 8),
            cq,
            pd,
            path,
        })
    }

    /// Registered memory, which peers may write.
    fn region(&self) -> Result<MemoryRegion> {
        let memory = self.pd.context().alloc_memory(MEMORY)?;
        let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
        Ok(self.pd.reg_memory(&memory, access)?)
    }

    /// What the other side has to know of this queue pair.
    fn endpoint(&self) -> Result<String> {
        let endpoint = self.qp.queue_pair().endpoint(&self.path, PSN)?;
        Ok(endpoint.to_string())
    }

    fn connect(&self, remote: &str) -> Result<()> {
        let qp = self.qp.queue_pair();
        qp.to_rtr(&remote.parse()?, &self.path)?;
        Ok(qp.to_rts(PSN, &self.path)?)
    }

    /// Polls for the next completion.
    fn complete(&mut self) -> Result<Completed<MemoryRegion>> {
        let mut found = [WorkCompletion::default()];
        while self.cq.poll(&mut found)? == 0 {
            std::hint::spin_loop();
        }
        let ended = self.qp.complete(&mut found[0]).ok_or("not ours")?;
        match ended.status {
            WcStatus::Success => Ok(ended),
            status => Err(format!("a request ended with {status:?}").into()),
        }
    }
}

fn first() -> Result<()> {
    let mut side = Side::open()?;
    let mut second = Command::new(std::env::current_exe()?)
        .arg("second")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let mut input = second.stdin.take().ok_or("no pipe")?;
    let mut output = BufReader::new(second.stdout.take().ok_or("no pipe")?).lines();
    let mut hear = || -> Result<String> { Ok(output.next().ok_or("the other process ended")??) };

    writeln!(input, "{}", side.endpoint()?)?;
    side.connect(&hear()?)?;
    let target = RemoteAddr {
        addr: hear()?.parse()?,
        rkey: hear()?.parse()?,
    };
    side.qp
        .write_inline(b"written by the first process", target, None)?;
    side.qp.send_inline(b"look", SendFlags::empty(), None)?;
    side.complete()?;
    side.complete()?;

    println!("the second process has found: {}", hear()?);
    // It goes first, so that nobody's queue pair loses its peer too early.
    second.wait()?;
    Ok(())
}

fn second() -> Result<()> {
    let mut side = Side::open()?;
    let target = side.region()?;
    side.qp
        .post_recv(side.region()?)
        .map_err(|rejected| rejected.error)?;
    println!("{}", side.endpoint()?);
    println!("{}\n{}", target.addr(), target.rkey());
    let mut line = String::new();
    stdin().lock().read_line(&mut line)?;
    side.connect(line.trim())?;

    // What was posted before the message has happened when the message is here.
    side.complete()?;
    let mut seen = [0; 28];
    // SAFETY: the bytes lie in the region, and no reference covers them.
    unsafe { copy::read_shared(seen.as_mut_ptr(), target.addr() as *const u8, seen.len()) };
    println!("{}", String::from_utf8_lossy(&seen));
    Ok(())
}

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("second") => second(),
        _ => first(),
    }
}
