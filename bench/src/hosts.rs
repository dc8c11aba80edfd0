//! The software device between two hosts, over TCP, beside plain TCP between the same two: a round trip, a
//! request that is answered with data, and a stream.
//!
//! The plain server copies between its socket's buffer and its memory, as one does that keeps data for
//! others. It sleeps in the kernel; so does the owner of the memory that is read and written. The client
//! polls, either way.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail, ensure};
use mr_pool::{Buffer, Pool};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};
use verbs_sys::{AccessFlags, MemoryRegion, RemoteAddr, WcStatus, WorkCompletion};

use crate::device::{Place, Side, Verb};
use crate::process::{Worker, answer};
use crate::statistics::median;

/// Bytes of the target's memory, and of the longest operation.
const MEMORY: usize = 1 << 20;
/// WRITEs of a stream that are under way at once.
const DEPTH: usize = 8;
/// Sizes of round trips; the first is one of latency.
const SIZES: [usize; 3] = [8, 64 << 10, 1 << 20];

/// What is asked of the other host.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Command {
    /// Connect to the queue pair with this endpoint; answered with [`Place`].
    Connect(String),
    /// Processor time used so far; answered with seconds.
    ProcessorTime,
    /// Where the plain server listens; answered with its address.
    Plain,
}

/// What a plain client asks for: bytes to be sent, or bytes that it will send.
#[derive(Clone, Copy)]
enum Ask {
    Send,
    Take,
}

impl Ask {
    fn encode(self, len: usize) -> [u8; 9] {
        let mut bytes = [0; 9];
        bytes[0] = match self {
            Self::Send => 0,
            Self::Take => 1,
        };
        bytes[1..].copy_from_slice(&(len as u64).to_le_bytes());
        bytes
    }
}

/// The other host's role: memory to be read and written, and a plain server.
///
/// # Errors
/// The device cannot be set up.
pub fn remote(device: &str, address: IpAddr) -> Result<()> {
    let side = Side::open(device)?;
    let memory = side.pd.context().alloc_memory(MEMORY)?;
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let region: MemoryRegion = side.pd.reg_memory(&memory, access)?;
    let listener = TcpListener::bind((address, 0))?;
    let plain = listener.local_addr()?;
    thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            // It ends with its client.
            let _ = serve_plainly(stream);
        }
    });
    answer(|command| {
        Ok(match command {
            Command::Connect(remote) => {
                side.connect(&remote)?;
                serde_json::to_value(Place {
                    endpoint: side.endpoint()?,
                    addr: region.addr(),
                    rkey: region.rkey(),
                })?
            }
            Command::ProcessorTime => serde_json::to_value(processor_time())?,
            Command::Plain => serde_json::to_value(plain)?,
        })
    })
}

fn serve_plainly(mut stream: TcpStream) -> Result<()> {
    stream.set_nodelay(true)?;
    let (mut memory, mut buffer) = (vec![0; MEMORY], vec![0; MEMORY]);
    let mut head = [0; 9];
    while stream.read_exact(&mut head).is_ok() {
        let len = u64::from_le_bytes(head[1..].try_into()?) as usize;
        if head[0] == 0 {
            let len = len.min(MEMORY);
            buffer[..len].copy_from_slice(&memory[..len]);
            stream.write_all(&buffer[..len])?;
            continue;
        }
        let mut left = len;
        while left > 0 {
            let count = stream.read(&mut buffer[..left.min(MEMORY)])?;
            ensure!(count > 0, "the client is gone");
            memory[..count].copy_from_slice(&buffer[..count]);
            left -= count;
        }
        stream.write_all(&[1])?;
    }
    Ok(())
}

/// Seconds that this process has used processors.
fn processor_time() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// One line of the result: medians over the rounds.
#[derive(Clone, Debug, Serialize)]
pub struct Line {
    /// What was measured.
    pub what: String,
    /// Of the software device.
    pub ours: f64,
    /// Of plain TCP.
    pub plain: f64,
    /// `us`, `MB/s`, or `s/GiB`.
    pub unit: &'static str,
    /// Of each round's ratio, ours to plain.
    pub ratio: f64,
}

/// This host's side of both ways.
struct Client {
    side: Side,
    buffers: Vec<Buffer>,
    place: RemoteAddr,
    plain: TcpStream,
    memory: Vec<u8>,
    buffer: Vec<u8>,
    remote: Worker,
}

impl Client {
    fn connect(device: &str, mut remote: Worker) -> Result<Self> {
        let side = Side::open(device)?;
        let pool = Pool::builder(&side.pd).build()?;
        let place: Place = remote.ask(&Command::Connect(side.endpoint()?))?;
        side.connect(&place.endpoint)?;
        let address: SocketAddr = remote.ask(&Command::Plain)?;
        let plain = TcpStream::connect(address)?;
        plain.set_nodelay(true)?;
        let buffers = (0..DEPTH).map(|_| pool.take(MEMORY));
        Ok(Self {
            buffers: buffers.collect::<Result<_, _>>()?,
            place: RemoteAddr {
                addr: place.addr,
                rkey: place.rkey,
            },
            side,
            plain,
            memory: vec![0; MEMORY],
            buffer: vec![0; MEMORY],
            remote,
        })
    }

    fn post(&mut self, verb: Verb, size: usize) -> Result<()> {
        let buffer = self.buffers.pop().context("no buffer")?;
        let posted = match verb {
            Verb::Read => self.side.qp.read(buffer, 0..size, self.place),
            Verb::Write => self.side.qp.write(buffer, 0..size, self.place, None),
        };
        posted.map_err(|rejected| rejected.error)?;
        Ok(())
    }

    /// Polls until the oldest operation has completed.
    fn complete(&mut self) -> Result<()> {
        let mut wcs = [WorkCompletion::default()];
        while self.side.cq.poll(&mut wcs)? == 0 {
            std::hint::spin_loop();
        }
        let [mut wc] = wcs;
        let done = self.side.qp.complete(&mut wc).context("not ours")?;
        self.buffers.extend(done.buffer);
        match done.status {
            WcStatus::Success => Ok(()),
            status => bail!("an operation ended with {status:?}"),
        }
    }

    fn read(&mut self, size: usize) -> Result<()> {
        self.post(Verb::Read, size)?;
        self.complete()
    }

    /// Asks the plain server for bytes, and copies them to where they are wanted.
    fn fetch(&mut self, size: usize) -> Result<()> {
        self.plain.write_all(&Ask::Send.encode(size))?;
        self.poll_plain(size)?;
        self.memory[..size].copy_from_slice(&self.buffer[..size]);
        Ok(())
    }

    /// Reads so many bytes without sleeping.
    fn poll_plain(&mut self, size: usize) -> Result<()> {
        self.plain.set_nonblocking(true)?;
        let mut came = 0;
        while came < size {
            match self.plain.read(&mut self.buffer[came..size]) {
                Ok(0) => bail!("the plain server is gone"),
                Ok(count) => came += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => std::hint::spin_loop(),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(self.plain.set_nonblocking(false)?)
    }

    fn write_stream(&mut self, count: usize) -> Result<()> {
        for _ in 0..count {
            if self.buffers.is_empty() {
                self.complete()?;
            }
            self.post(Verb::Write, MEMORY)?;
        }
        while self.buffers.len() < DEPTH {
            self.complete()?;
        }
        Ok(())
    }

    fn send_stream(&mut self, count: usize) -> Result<()> {
        self.plain.write_all(&Ask::Take.encode(count * MEMORY))?;
        for _ in 0..count {
            self.plain.write_all(&self.memory)?;
        }
        self.poll_plain(1)
    }

    /// Processor time of the other host's process, in seconds, while something runs.
    fn timed(&mut self, run: impl FnOnce(&mut Self) -> Result<()>) -> Result<(f64, f64)> {
        let before: f64 = self.remote.ask(&Command::ProcessorTime)?;
        let started = Instant::now();
        run(self)?;
        let seconds = started.elapsed().as_secs_f64();
        let after: f64 = self.remote.ask(&Command::ProcessorTime)?;
        Ok((seconds, after - before))
    }
}

/// Pairs of figures of each round, ours and plain.
#[derive(Default)]
struct Pairs(Vec<(f64, f64)>);

impl Pairs {
    fn line(&self, what: String, unit: &'static str) -> Line {
        let of = |take: fn(&(f64, f64)) -> f64| median(self.0.iter().map(take)).unwrap_or(f64::NAN);
        Line {
            what,
            unit,
            ours: of(|pair| pair.0),
            plain: of(|pair| pair.1),
            ratio: of(|pair| pair.0 / pair.1),
        }
    }
}

/// What to measure between, and for how long.
pub struct Options {
    /// This program.
    pub program: PathBuf,
    /// Name of the device.
    pub device: String,
    /// The network namespace of the other host, as `ip netns` knows it.
    pub network: String,
    /// The other host's address.
    pub address: IpAddr,
    /// How long.
    pub budget: Duration,
}

/// Measures for the budget, in rounds that have everything in turn.
///
/// # Errors
/// The device cannot be set up, or the other host failed.
pub fn run(options: &Options) -> Result<Vec<Line>> {
    let program = options.program.display().to_string();
    let (network, address) = (options.network.clone(), options.address.to_string());
    let arguments = [
        "netns",
        "exec",
        &network,
        &program,
        "remote",
        "--device",
        &options.device,
        "--address",
        &address,
    ];
    let arguments = arguments.map(str::to_owned);
    let remote = Worker::start(Path::new("ip"), "the other host", arguments, &[])?;
    let mut client = Client::connect(&options.device, remote)?;
    // The connection is made, and everything once touched.
    client.write_stream(DEPTH)?;
    client.send_stream(DEPTH)?;

    let mut trips: [Pairs; SIZES.len()] = Default::default();
    let (mut streams, mut owners, mut readers) =
        (Pairs::default(), Pairs::default(), Pairs::default());
    let started = Instant::now();
    let mut rounds = 0;
    while rounds < 3 || started.elapsed() < options.budget {
        for (size, pairs) in SIZES.into_iter().zip(&mut trips) {
            let count = if size > 100_000 { 200 } else { 1000 };
            let (ours, owner) =
                client.timed(|client| (0..count).try_for_each(|_| client.read(size)))?;
            let (plain, server) =
                client.timed(|client| (0..count).try_for_each(|_| client.fetch(size)))?;
            let each = 1e6 / f64::from(count);
            pairs.0.push((ours * each, plain * each));
            if size == MEMORY {
                let per_gib = 1024.0 / f64::from(count);
                readers.0.push((owner * per_gib, server * per_gib));
            }
        }
        let count = 512;
        let (ours, owner) = client.timed(|client| client.write_stream(count))?;
        let (plain, server) = client.timed(|client| client.send_stream(count))?;
        let megabytes = (count * MEMORY) as f64 / 1e6;
        streams.0.push((megabytes / ours, megabytes / plain));
        let per_gib = 1024.0 / count as f64;
        owners.0.push((owner * per_gib, server * per_gib));
        rounds += 1;
    }
    let trips = SIZES.iter().zip(&trips);
    let trips = trips.map(|(size, pairs)| pairs.line(format!("READ of {size} B"), "us"));
    Ok(trips
        .chain([
            streams.line("WRITEs of 1 MiB, a stream".into(), "MB/s"),
            owners.line("processor of who is written to".into(), "s/GiB"),
            readers.line("processor of who is read from".into(), "s/GiB"),
        ])
        .collect())
}

/// Writes hosts.json.
///
/// # Errors
/// It cannot be written.
pub fn write(lines: &[Line], out: &Path) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let path = out.join("hosts.json");
    let text = serde_json::to_string_pretty(lines)?;
    fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}
