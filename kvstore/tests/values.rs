//! Values of every size that is handled differently, through a server in its own process.

mod common;

use std::process::Child;

use common::{Server, helped_server, helper, value};
use kvstore::{Client, ClientConfig, INLINE_VALUE, Memory, OperationError, Wait};

/// Lengths where the way of a value changes, and their neighbours.
fn lengths() -> Vec<usize> {
    // The end of checksums, of values in requests, of values in replies, and of pooled memory (with and without the header of a block).
    let edges = [
        0,
        512,
        1024,
        INLINE_VALUE,
        (8 << 20) - 64,
        (8 << 20) - 32,
        8 << 20,
    ];
    let mut lengths: Vec<usize> = edges
        .iter()
        .flat_map(|&edge| edge.saturating_sub(1)..=edge + 1)
        .collect();
    // One in each class of a pool, and one far above them.
    lengths.extend((6..23).flat_map(|log| [1 << log, 5 << (log - 2)]));
    lengths.push((40 << 20) + 3);
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

#[test]
fn values_of_every_size_come_back_to_another_client() {
    let server = Server::start(&[]);
    let (mut writer, mut reader) = (server.client(), server.client());
    for length in lengths() {
        let key = format!("value of {length}");
        let bytes = value(length as u64, length);
        assert!(reader.get(key.as_bytes()).unwrap().is_none());
        writer.put(key.as_bytes(), &bytes).unwrap();
        // Twice: first by request, then from the learned location.
        for _ in 0..2 {
            let got = reader.get(key.as_bytes()).unwrap().expect("stored");
            assert!(*got == *bytes, "value of {length} bytes");
        }
        let own = writer.get(key.as_bytes()).unwrap().expect("stored");
        assert!(*own == *bytes, "own value of {length} bytes");
    }
    assert!(reader.stats().one_sided_gets > 0);
}

#[test]
fn every_way_to_put_stores_the_same() {
    let server = Server::start(&[]);
    for (memory, inline_value) in [
        (Memory::Pooled, INLINE_VALUE),
        (Memory::Pooled, 0),
        (Memory::PerOperation, INLINE_VALUE),
    ] {
        let mut client = server.client_with(|config| {
            config.memory = memory;
            config.inline_value = inline_value;
        });
        for length in [
            0,
            1,
            128,
            1024,
            1025,
            INLINE_VALUE,
            INLINE_VALUE + 1,
            300_000,
        ] {
            let bytes = value(length as u64, length);
            client.put(b"put", &bytes).unwrap();
            client
                .put_with(b"put_with", length, |room| room.copy_from_slice(&bytes))
                .unwrap();
            let mut buffer = client.buffer(length).unwrap();
            buffer.copy_from_slice(&bytes);
            client.put_buffer(b"put_buffer", &mut buffer).unwrap();
            for key in [&b"put"[..], b"put_with", b"put_buffer"] {
                assert!(*client.get(key).unwrap().expect("stored") == *bytes);
            }
        }
    }
}

#[test]
fn an_overwrite_of_another_size_is_seen_by_who_knew_the_old_place() {
    let server = Server::start(&[]);
    let (mut writer, mut reader) = (server.client(), server.client());
    let mut seen = 0;
    for (i, length) in [10, 5000, 0, 513, 100_000, 64, 9 << 20, 4096]
        .into_iter()
        .enumerate()
    {
        let bytes = value(i as u64, length);
        writer.put(b"key", &bytes).unwrap();
        assert!(*reader.get(b"key").unwrap().expect("stored") == *bytes);
        seen += 1;
    }
    assert_eq!(seen, 8);
    assert!(
        reader.stats().stale_locations > 0,
        "old places were tried and found out of date"
    );
}

#[test]
fn a_deleted_key_is_gone_for_everybody_and_can_be_put_again() {
    let server = Server::start(&[]);
    let (mut writer, mut reader) = (server.client(), server.client());
    for length in [20, 2000, 50_000] {
        let (old, new) = (value(1, length), value(2, length));
        writer.put(b"key", &old).unwrap();
        assert!(*reader.get(b"key").unwrap().expect("stored") == *old);
        assert!(writer.delete(b"key").unwrap());
        assert!(!reader.delete(b"key").unwrap());
        assert!(reader.get(b"key").unwrap().is_none());
        assert!(writer.get(b"key").unwrap().is_none());
        writer.put(b"key", &new).unwrap();
        assert!(*reader.get(b"key").unwrap().expect("stored") == *new);
    }
    assert!(writer.delete(b"key").unwrap());
    let statistics = writer.server_statistics().unwrap();
    assert_eq!(
        (
            statistics.keys,
            statistics.value_bytes,
            statistics.live_blocks
        ),
        // What is left is the block that the writer holds for its next put.
        (0, 0, 1)
    );
}

#[test]
fn keys_are_any_bytes_up_to_the_limit() {
    let server = Server::start(&[]);
    let mut client = server.client();
    let keys = [
        vec![0],
        vec![0xff; 1024],
        b"a/b c\n".to_vec(),
        value(3, 1023),
    ];
    for (i, key) in keys.iter().enumerate() {
        client.put(key, &[i as u8; 64]).unwrap();
        client
            .put_with(key, 6000, |room| room.fill(i as u8))
            .unwrap();
    }
    let mut other = server.client();
    for (i, key) in keys.iter().enumerate() {
        assert!(*other.get(key).unwrap().expect("stored") == [i as u8; 6000]);
        assert!(other.delete(key).unwrap());
    }
}

#[test]
fn two_servers_do_not_know_each_other() {
    let (one, two) = (Server::start(&[]), Server::start(&["--wait", "poll"]));
    let (mut a, mut b) = (
        one.client(),
        two.client_with(|config| config.wait = Wait::Poll),
    );
    for i in 0..100u64 {
        a.put(&i.to_le_bytes(), &value(i, 100)).unwrap();
        b.put(&i.to_le_bytes(), &value(i + 1000, 100)).unwrap();
    }
    for i in 0..100u64 {
        assert!(*a.get(&i.to_le_bytes()).unwrap().expect("stored") == *value(i, 100));
        assert!(*b.get(&i.to_le_bytes()).unwrap().expect("stored") == *value(i + 1000, 100));
    }
}

/// Not a test of its own: one of several client processes at work on the same keys. Every value tells its number and
/// must be whole, whoever put it.
#[test]
fn one_of_many() {
    let Some(server) = helped_server() else {
        return;
    };
    const LENGTHS: [usize; 5] = [8, 400, 3000, 40_000, 1 << 20];
    let mut client = Client::connect(server, &ClientConfig::default()).expect("connect");
    let me = u64::from(std::process::id());
    for step in 0..300u64 {
        let number = me << 32 | step;
        let length = LENGTHS[(number % 5) as usize];
        let key = (step % 7).to_le_bytes();
        let mut bytes = value(number, length);
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        client.put(&key, &bytes).expect("put");
        for other in 0..7u64 {
            let Some(found) = client.get(&other.to_le_bytes()).expect("get") else {
                continue;
            };
            let number = u64::from_le_bytes(found[..8].try_into().expect("8 bytes"));
            let whole = value(number, LENGTHS[(number % 5) as usize]);
            assert!(found.len() == whole.len() && found[8..] == whole[8..]);
        }
    }
    assert!(client.stats().one_sided_gets > 0);
}

#[test]
fn several_client_processes_share_two_servers() {
    let servers = [Server::start(&[]), Server::start(&["--workers", "2"])];
    let clients: Vec<Child> = (0..6)
        .map(|i| helper("one_of_many", servers[i % 2].address))
        .collect();
    for client in clients {
        let output = client.wait_with_output().unwrap();
        assert!(output.status.success(), "{output:?}");
    }
    for server in &servers {
        let statistics = server.client().server_statistics().unwrap();
        assert_eq!((statistics.keys, statistics.live_blocks), (7, 7));
        assert_eq!(statistics.puts, 900);
    }
}

#[derive(rkyv::Archive, rkyv::Serialize)]
struct Person {
    name: String,
    ages: Vec<u32>,
}

#[test]
fn a_typed_value_is_viewed_in_place() {
    let server = Server::start(&[]);
    let mut client = server.client();
    for count in [0, 3, 200, 5000, 3_000_000] {
        let person = Person {
            name: "Ada".to_owned(),
            ages: (0..count).collect(),
        };
        client.put_value(b"ada", &person).unwrap();
        for _ in 0..2 {
            let got = client.get_value::<Person>(b"ada").unwrap().expect("stored");
            let view = got.view().unwrap();
            assert_eq!(&*view.name, "Ada");
            assert!(view.ages.iter().map(|age| age.to_native()).eq(0..count));
        }
    }
    client.put(b"ada", b"no person").unwrap();
    let got = client.get_value::<Person>(b"ada").unwrap().expect("stored");
    assert!(got.view().is_err());
}

#[test]
fn a_buffer_of_another_client_is_refused() {
    let server = Server::start(&[]);
    let (mut one, mut other) = (server.client(), server.client());
    for length in [10, 10_000] {
        let mut buffer = one.buffer(length).unwrap();
        buffer.fill(7);
        let error = other.put_buffer(b"key", &mut buffer).unwrap_err();
        assert!(matches!(error, OperationError::Buffer { .. }), "{error}");
        one.put_buffer(b"key", &mut buffer).unwrap();
        assert_eq!(
            *other.get(b"key").unwrap().expect("stored"),
            vec![7; length]
        );
    }
}

/// What a client holds for its next put is no obstacle to it.
#[test]
fn a_reservation_makes_room_for_another() {
    let server = Server::start(&["--memory", "2MiB"]);
    let mut client = server.client();
    for key in [b"a", b"b"] {
        client.put(key, &value(1, 500_000)).unwrap();
    }
    for key in [b"a", b"b"] {
        assert!(client.delete(key).unwrap());
    }
    client.put(b"c", &value(2, 1_497_152)).unwrap();
    assert_eq!(
        *client.get(b"c").unwrap().expect("stored"),
        *value(2, 1_497_152)
    );
}
