//! What is between two hosts: it passes on what they say to each other, or nearly.

use std::{
    io::{Read, Write},
    net::{Ipv4Addr, Shutdown, TcpListener, TcpStream},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use super::{
    network::{ADDRESSES, within},
    random::Random,
};

/// What becomes of the bytes of one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// They wait, some longer than others.
    Delay,
    /// They come in pieces of up to so many.
    Split(usize),
    /// One bit of the byte at this place is changed.
    Flip {
        at: u64,
        bit: u32,
    },
    /// They end at this place, and so does the connection.
    Cut {
        at: u64,
    },
}

/// What is to become of new connections: each takes a fault for either direction, from the front.
type Plan = Mutex<Box<dyn FnMut() -> [Fault; 2] + Send>>;

struct Shared {
    plan: Plan,
    over: AtomicBool,
    random: Mutex<Random>,
}

/// One direction of passing: where connections come in, and to whom they go on.
#[derive(Clone)]
struct Way {
    inside: String,
    outside: String,
    to: (Ipv4Addr, u16),
}

/// Dropping it takes no more connections.
pub struct Proxy {
    shared: Arc<Shared>,
    listening: Vec<(Way, JoinHandle<()>)>,
}

impl Proxy {
    /// Stands between the first and last of four networks, whose processes listen at these ports.
    pub fn start(networks: &[String; 4], ports: [u16; 2], seed: u64) -> Self {
        let shared = Arc::new(Shared {
            plan: Mutex::new(Box::new(|| [Fault::None; 2])),
            over: AtomicBool::new(false),
            random: Mutex::new(Random::new(seed)),
        });
        let [_, second, first, _] = networks;
        let ways = [
            // What the first host takes for the second.
            (second, first, (ADDRESSES[1], ports[1])),
            (first, second, (ADDRESSES[0], ports[0])),
        ];
        let listening = ways.map(|(inside, outside, to)| {
            let way = Way {
                inside: inside.clone(),
                outside: outside.clone(),
                to,
            };
            let listener = within(inside, || TcpListener::bind(("0.0.0.0", to.1)));
            let listener = listener.expect("cannot take the host's place");
            let (own, shared) = (way.clone(), Arc::clone(&shared));
            (way, thread::spawn(move || take(&listener, &own, &shared)))
        });
        Self {
            shared,
            listening: listening.into(),
        }
    }

    /// What is to become of connections that begin from now on: of what they say, and of the answer.
    pub fn plan(&self, plan: impl FnMut() -> [Fault; 2] + Send + 'static) {
        *self.shared.plan.lock().expect("a plan panicked") = Box::new(plan);
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.over.store(true, Ordering::SeqCst);
        for (way, thread) in self.listening.drain(..) {
            // It looks at the flag when somebody comes.
            let _ = within(&way.inside, || TcpStream::connect(("127.0.0.1", way.to.1)));
            let _ = thread.join();
        }
    }
}

fn take(listener: &TcpListener, way: &Way, shared: &Arc<Shared>) {
    while let Ok((came, _)) = listener.accept() {
        if shared.over.load(Ordering::SeqCst) {
            return;
        }
        let Ok(goes) = within(&way.outside, || TcpStream::connect(way.to)) else {
            continue;
        };
        let [there, back] = shared.plan.lock().expect("a plan panicked")();
        for stream in [&came, &goes] {
            stream.set_nodelay(true).expect("cannot send at once");
        }
        let clone = |stream: &TcpStream| stream.try_clone().expect("no descriptor");
        let mut random = shared.random.lock().expect("no random numbers");
        for (from, to, fault) in [(clone(&came), clone(&goes), there), (goes, came, back)] {
            let random = Random::new(random.next());
            // It ends with the connection.
            thread::spawn(move || pass(from, to, fault, random));
        }
    }
}

fn pass(mut from: TcpStream, mut to: TcpStream, fault: Fault, mut random: Random) {
    let mut buffer = vec![0; 64 << 10];
    let mut passed = 0;
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let mut bytes = &mut buffer[..count];
        let end = passed + count as u64;
        match fault {
            Fault::Flip { at, bit } if (passed..end).contains(&at) => {
                bytes[(at - passed) as usize] ^= 1 << bit;
            }
            Fault::Cut { at } if (passed..end).contains(&at) => {
                bytes = &mut bytes[..(at - passed) as usize];
            }
            // How long it waits is what is tried.
            Fault::Delay => thread::sleep(Duration::from_micros(random.len(8000) as u64)),
            _ => {}
        }
        let most = match fault {
            Fault::Split(most) => most,
            _ => usize::MAX,
        };
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let piece = random.len(most.min(rest.len()) as u64);
            let piece = if most == usize::MAX {
                rest.len()
            } else {
                piece
            };
            if to.write_all(&rest[..piece]).is_err() {
                let _ = from.shutdown(Shutdown::Both);
                return;
            }
            rest = &rest[piece..];
        }
        passed = end;
        if matches!(fault, Fault::Cut { at } if at < end) {
            let _ = from.shutdown(Shutdown::Both);
            let _ = to.shutdown(Shutdown::Both);
            return;
        }
    }
    let _ = to.shutdown(Shutdown::Write);
}
