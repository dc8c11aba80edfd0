//! Random concurrent histories of several clients, per key, through the Wing-Gong-Lowe checker of `todc-utils`.

mod common;

use std::sync::Barrier;
use std::time::Instant;

use common::{Server, value};
use kvstore::{Client, Wait};
use todc_utils::Action::{Call, Response};
use todc_utils::{Action, History, Specification, WGLChecker};

/// One operation on one key. A stored value is told apart by its number.
#[derive(Clone, Debug)]
enum Operation {
    Put(u64),
    /// With what was found, once known.
    Get(Option<Option<u64>>),
    /// With whether the key was there, once known.
    Delete(Option<bool>),
}

/// A key: absent, or holding the value with a number.
struct Key;

impl Specification for Key {
    type State = Option<u64>;
    type Operation = Operation;

    fn init() -> Option<u64> {
        None
    }

    fn apply(operation: &Operation, state: &Option<u64>) -> (bool, Option<u64>) {
        match operation {
            Operation::Put(number) => (true, Some(*number)),
            Operation::Get(found) => (*found == Some(*state), *state),
            Operation::Delete(found) if *found == Some(state.is_some()) => (true, None),
            Operation::Delete(_) => (false, *state),
        }
    }
}

/// What one client did to one key, and when.
struct Done {
    process: usize,
    key: usize,
    called: (Instant, Operation),
    returned: (Instant, Operation),
}

/// Lengths on each path: checksummed, header read twice, written to a reserved block.
const LENGTHS: [usize; 4] = [16, 700, 6000, 200_000];

/// The value with a number; its length follows from the number.
fn numbered(number: u64) -> Vec<u8> {
    let mut bytes = value(number, LENGTHS[number as usize % LENGTHS.len()]);
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes
}

/// The number of a value, all of whose bytes must be as they were put.
fn number(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes"));
    assert!(*bytes == *numbered(number), "value {number} was torn");
    number
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}

fn drive(
    client: &mut Client,
    process: usize,
    keys: &[String],
    steps: usize,
    seed: u64,
) -> Vec<Done> {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut done = Vec::with_capacity(steps);
    for step in 0..steps {
        let key = random.below(keys.len() as u64) as usize;
        let name = keys[key].as_bytes();
        let fresh = (process * steps + step) as u64;
        let (called, returned) = match random.below(10) {
            0..3 => {
                let bytes = numbered(fresh);
                let start = Instant::now();
                client.put(name, &bytes).expect("put");
                ((start, Operation::Put(fresh)), Operation::Put(fresh))
            }
            3 => {
                let start = Instant::now();
                let found = client.delete(name).expect("delete");
                (
                    (start, Operation::Delete(None)),
                    Operation::Delete(Some(found)),
                )
            }
            _ => {
                let start = Instant::now();
                let found = client.get(name).expect("get");
                let end = Instant::now();
                let found = found.map(|value| number(&value));
                done.push(Done {
                    process,
                    key,
                    called: (start, Operation::Get(None)),
                    returned: (end, Operation::Get(Some(found))),
                });
                continue;
            }
        };
        done.push(Done {
            process,
            key,
            called,
            returned: (Instant::now(), returned),
        });
    }
    done
}

/// The history of one key, in the order of time; calls come before responses of the same moment.
fn history(done: &[Done], key: usize) -> Option<History<Operation>> {
    let mut actions: Vec<(Instant, bool, (usize, Action<Operation>))> = Vec::new();
    for done in done.iter().filter(|done| done.key == key) {
        let (at, operation) = done.called.clone();
        actions.push((at, false, (done.process, Call(operation))));
        let (at, operation) = done.returned.clone();
        actions.push((at, true, (done.process, Response(operation))));
    }
    actions.sort_by_key(|(at, is_response, _)| (*at, *is_response));
    (!actions.is_empty())
        .then(|| History::from_actions(actions.into_iter().map(|(_, _, action)| action).collect()))
}

fn run(wait: Wait, server_arguments: &[&str], rounds: u64) {
    const CLIENTS: usize = 4;
    const STEPS: usize = 60;
    let server = Server::start(server_arguments);
    let mut clients: Vec<Client> = (0..CLIENTS)
        .map(|_| server.client_with(|config| config.wait = wait))
        .collect();
    let mut one_sided = 0;
    for round in 0..rounds {
        // Fresh keys: every history starts with an absent key.
        let keys: Vec<String> = (0..2)
            .map(|key| format!("round {round} key {key}"))
            .collect();
        let barrier = Barrier::new(CLIENTS);
        let done: Vec<Done> = std::thread::scope(|scope| {
            let threads: Vec<_> = clients
                .iter_mut()
                .enumerate()
                .map(|(process, client)| {
                    let (barrier, keys) = (&barrier, &keys);
                    scope.spawn(move || {
                        barrier.wait();
                        let seed = round * CLIENTS as u64 + process as u64 + 1;
                        drive(client, process, keys, STEPS, seed)
                    })
                })
                .collect();
            threads
                .into_iter()
                .flat_map(|thread| thread.join().expect("client"))
                .collect()
        });
        for key in 0..keys.len() {
            let Some(history) = history(&done, key) else {
                continue;
            };
            assert!(
                WGLChecker::<Key>::is_linearizable(history.clone()),
                "round {round} key {key} is not linearizable: {history:?}",
            );
        }
        one_sided = clients
            .iter()
            .map(|client| client.stats().one_sided_gets)
            .sum();
    }
    assert!(
        one_sided > 0,
        "no get was one-sided: the test missed its subject"
    );
}

#[test]
fn histories_are_linearizable_with_a_sleeping_server() {
    run(Wait::Event, &["--wait", "event"], 40);
}

#[test]
fn histories_are_linearizable_with_several_workers() {
    run(Wait::Event, &["--wait", "event", "--workers", "3"], 40);
}

#[test]
fn histories_are_linearizable_with_everybody_spinning() {
    run(Wait::Poll, &["--wait", "poll"], 20);
}

#[test]
fn the_checker_rejects_what_it_should() {
    let stale = History::from_actions(vec![
        (0, Call(Operation::Put(1))),
        (0, Response(Operation::Put(1))),
        (0, Call(Operation::Put(2))),
        (0, Response(Operation::Put(2))),
        (1, Call(Operation::Get(None))),
        (1, Response(Operation::Get(Some(Some(1))))),
    ]);
    assert!(!WGLChecker::<Key>::is_linearizable(stale));
    let undone = History::from_actions(vec![
        (0, Call(Operation::Put(1))),
        (1, Call(Operation::Get(None))),
        (1, Response(Operation::Get(Some(Some(1))))),
        (1, Call(Operation::Get(None))),
        (1, Response(Operation::Get(Some(None)))),
        (0, Response(Operation::Put(1))),
    ]);
    assert!(!WGLChecker::<Key>::is_linearizable(undone));
}
