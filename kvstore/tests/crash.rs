//! Clients and servers that die, hang, or run out of memory.

mod common;

use std::io::{BufRead, BufReader};
use std::time::Duration;

use common::{Server, helped_server, helper, until, value};
use kvstore::{Client, ClientConfig, OperationError, Refusal, Statistics, Wait};
use rustix::process::{Pid, Signal, kill_process};

/// Lengths on every way a value takes: in the request, READ by the server, with a registration of its own.
const LENGTHS: [usize; 4] = [100, 5000, 300_000, 9 << 20];

/// Not a test of its own: what the clients do that are killed. One line on stdout per operation.
#[test]
fn victim() {
    let Some(server) = helped_server() else {
        return;
    };
    let mut client = Client::connect(server, &ClientConfig::default()).expect("connect");
    let values = LENGTHS.map(|length| value(7, length));
    for step in 0usize.. {
        let key = format!("victim {}", step % 3);
        match step % 5 {
            0 => drop(client.delete(key.as_bytes()).expect("delete")),
            1 | 3 => client
                .put(key.as_bytes(), &values[step % values.len()])
                .expect("put"),
            _ => drop(client.get(key.as_bytes()).expect("get")),
        }
        println!("done {step}");
    }
}

fn baseline(statistics: &Statistics) -> (u64, u64, u64, u64, u64) {
    (
        statistics.keys,
        statistics.value_bytes,
        statistics.live_blocks,
        statistics.live_bytes,
        statistics.connections,
    )
}

#[test]
fn a_client_killed_at_any_point_leaves_nothing_behind() {
    for wait in ["event", "poll"] {
        let server = Server::start(&["--wait", wait]);
        let mut client = server.client();
        client.put(b"mine", &value(1, 10_000)).unwrap();
        let before = client.server_statistics().unwrap();
        for round in 0usize..12 {
            let mut victim = helper("victim", server.address);
            // Read no further than that, and held until the kill: it never sees its output end.
            let mut lines = BufReader::new(victim.stdout.take().expect("piped")).lines();
            // It goes on while the line travels, so the kill falls anywhere in some later operation.
            let wanted = 1 + round * 7 % 41;
            let seen = lines
                .by_ref()
                .map_while(Result::ok)
                .filter(|line| line.contains("done"))
                .take(wanted)
                .count();
            assert_eq!(seen, wanted, "the victim lived long enough");
            victim.kill().unwrap();
            victim.wait().unwrap();

            assert!(*client.get(b"mine").unwrap().expect("stored") == *value(1, 10_000));
            until("the server has noticed the death", || {
                client.server_statistics().unwrap().connections == 1
            });
            for key in 0..3 {
                let key = format!("victim {key}");
                // What was acknowledged is whole; what was not is whole or absent.
                if let Some(found) = client.get(key.as_bytes()).unwrap() {
                    assert!(*found == *value(7, found.len()));
                    drop(found);
                    client.delete(key.as_bytes()).unwrap();
                }
            }
            let after = client.server_statistics().unwrap();
            assert_eq!(baseline(&after), baseline(&before), "round {round}");
        }
    }
}

/// Operates until something fails.
fn operate(client: &mut Client) -> OperationError {
    let bytes = value(3, 20_000);
    for step in 0u64.. {
        let key = (step % 10).to_le_bytes();
        let outcome = match step % 3 {
            0 => client.put(&key, &bytes),
            1 => client.put(&key, &bytes[..50]),
            _ => client.get(&key).map(drop),
        };
        if let Err(error) = outcome {
            return error;
        }
    }
    unreachable!("the loop ends by an error")
}

#[test]
fn a_server_that_dies_is_an_error_for_its_clients_and_never_a_hang() {
    for wait in [Wait::Event, Wait::Poll] {
        let mut server = Server::start(&[]);
        let mut clients: Vec<Client> = (0..3)
            .map(|_| server.client_with(|config| config.wait = wait))
            .collect();
        let mut idle = server.client_with(|config| config.wait = wait);
        idle.put(b"idle", b"value").unwrap();
        std::thread::scope(|scope| {
            let threads: Vec<_> = clients
                .iter_mut()
                .map(|client| scope.spawn(|| operate(client)))
                .collect();
            until("all are at work", || {
                idle.server_statistics().unwrap().puts > 300
            });
            server.kill();
            for thread in threads {
                let error = thread.join().unwrap();
                assert!(
                    matches!(error, OperationError::Disconnected { .. }),
                    "{error}"
                );
            }
        });
        // It was not looking when the server died.
        let error = idle.put(b"idle", b"other").unwrap_err();
        assert!(
            matches!(error, OperationError::Disconnected { .. }),
            "{error}"
        );
        assert!(
            idle.get(b"idle").is_err(),
            "a closed connection stays closed"
        );
        assert!(Client::connect(server.address, &ClientConfig::default()).is_err());
    }
}

#[test]
fn remembered_locations_do_not_outlive_their_server() {
    let mut server = Server::start(&[]);
    let mut client = server.client();
    client.put(b"key", b"value").unwrap();
    assert!(client.get(b"key").unwrap().is_some());
    server.kill();
    until("a one-sided get fails", || client.get(b"key").is_err());
}

/// Whether every thread of a process is in this state: `S` while it waits for something to happen, `T` stopped.
fn is_all(pid: u32, state: char) -> bool {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    threads
        .map(|thread| std::fs::read_to_string(thread.unwrap().path().join("stat")).unwrap())
        .all(|stat| {
            stat.rsplit_once(')')
                .unwrap()
                .1
                .trim_start()
                .starts_with(state)
        })
}

#[test]
fn a_server_that_hangs_costs_the_configured_time_and_no_more() {
    for wait in [Wait::Event, Wait::Poll] {
        let server = Server::start(&[]);
        let mut client = server.client_with(|config| {
            config.wait = wait;
            config.timeout = Duration::from_secs(2);
        });
        client.put(b"key", b"value").unwrap();
        let pid = Pid::from_raw(server.pid() as i32).unwrap();
        // Not in the middle of an access to our memory: whoever takes memory away waits for those to end.
        until("the server sleeps", || is_all(server.pid(), 'S'));
        kill_process(pid, Signal::STOP).unwrap();
        until("the server has stopped", || is_all(server.pid(), 'T'));
        let error = client.put(b"key", &value(1, 100_000)).unwrap_err();
        assert!(matches!(error, OperationError::TimedOut { .. }), "{error}");
        let error = client.put(b"key", b"value").unwrap_err();
        assert!(
            matches!(error, OperationError::Disconnected { .. }),
            "{error}"
        );

        // Once it runs again the abandoned put must not have left half a value.
        kill_process(pid, Signal::CONT).unwrap();
        let mut other = server.client();
        let found = other.get(b"key").unwrap().expect("stored");
        assert!(*found == *b"value" || *found == *value(1, 100_000));
        until("the server has noticed that the client left", || {
            other.server_statistics().unwrap().connections == 1
        });
        assert!(other.server_statistics().unwrap().live_blocks == 1);
    }
}

#[test]
fn at_the_memory_ceiling_old_values_stand_and_room_can_be_made() {
    let server = Server::start(&["--memory", "8MiB"]);
    let mut client = server.client();
    for length in [100, 3000, 200_000, 3 << 20, 20 << 20] {
        let bytes = |key: u64| value(key, length);
        let mut stored = 0u64;
        let error = loop {
            match client.put(&stored.to_le_bytes(), &bytes(stored)) {
                Ok(()) => stored += 1,
                Err(error) => break error,
            }
            assert!(stored * (length as u64) < 8 << 20, "above the ceiling");
        };
        let reason = Refusal::OutOfMemory;
        assert!(
            matches!(error, OperationError::Refused { reason: r, .. } if r == reason),
            "{error}"
        );
        assert!(error.to_string().contains("memory ceiling"), "{error}");
        assert!(stored > 0 || length > 8 << 20, "values of {length} bytes");
        assert!(client.get(&stored.to_le_bytes()).unwrap().is_none());
        if stored > 0 {
            // An overwrite needs room for the new value beside the old one.
            client.put(&0u64.to_le_bytes(), &bytes(77)).unwrap_err();
            assert!(*client.get(&0u64.to_le_bytes()).unwrap().expect("stored") == *bytes(0));
            assert!(client.delete(&0u64.to_le_bytes()).unwrap());
            client.put(&stored.to_le_bytes(), &bytes(stored)).unwrap();
            assert!(*client.get(&stored.to_le_bytes()).unwrap().expect("stored") == *bytes(stored));
        }
        for key in 0..=stored {
            client.delete(&key.to_le_bytes()).unwrap();
        }
        let statistics = client.server_statistics().unwrap();
        assert_eq!((statistics.keys, statistics.live_blocks), (0, 0));
        assert!(
            statistics.registered_bytes < (8 << 20) + (4 << 20),
            "messages apart"
        );
    }
}

#[test]
fn at_the_clients_ceiling_nothing_is_sent() {
    let server = Server::start(&[]);
    let mut client = server.client_with(|config| config.ceiling = 4 << 20);
    client.put(b"key", &value(1, 100_000)).unwrap();
    let error = client.put(b"key", &value(2, 20 << 20)).unwrap_err();
    assert!(matches!(error, OperationError::Memory { .. }), "{error}");
    assert!(*client.get(b"key").unwrap().expect("stored") == *value(1, 100_000));

    // A value that this client has no room for is let go of again by the server.
    let mut other = server.client();
    other.put(b"large", &value(3, 20 << 20)).unwrap();
    assert!(matches!(
        client.get(b"large").unwrap_err(),
        OperationError::Memory { .. }
    ));
    assert!(other.delete(b"large").unwrap());
    // Left are the value of "key" and the block that its client holds for its next put.
    until("the block is free", || {
        other.server_statistics().unwrap().live_blocks == 2
    });
    assert!(client.get(b"large").unwrap().is_none());
}

#[test]
fn an_idle_server_uses_no_processor() {
    let server = Server::start(&["--wait", "event"]);
    let mut client = server.client();
    client.put(b"key", b"value").unwrap();
    let ticks = || {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", server.pid())).unwrap();
        // Fields 14 and 15, counted from 3 behind the name in parentheses: user and system time.
        let fields: Vec<&str> = stat
            .rsplit_once(')')
            .unwrap()
            .1
            .split_whitespace()
            .collect();
        fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
    };
    let before = ticks();
    // A stretch of time to be idle in, with a client connected.
    std::thread::sleep(Duration::from_millis(700));
    assert!(ticks() - before <= 1, "an idle server used processor time");
    assert!(client.get(b"key").unwrap().is_some());
}
