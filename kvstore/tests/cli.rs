//! The program: what it prints, what it refuses, and with which status.

mod common;

use std::io::Write;
use std::net::TcpListener;
use std::path::Path;

use assert_cmd::Command;
use common::{Server, value};
use rustix::process::{Pid, Signal, kill_process};

struct Outcome {
    status: i32,
    stdout: Vec<u8>,
    stderr: String,
}

/// Runs the program to its end.
fn kvstore(server: Option<&Server>, arguments: &[&str], stdin: &[u8]) -> Outcome {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvstore"));
    if let Some(server) = server {
        command.env("KVSTORE_SERVER", server.address.to_string());
    }
    let output = command
        .args(arguments)
        .write_stdin(stdin)
        .output()
        .expect("run");
    Outcome {
        status: output.status.code().expect("no signal"),
        stdout: output.stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn fails(outcome: &Outcome, status: i32, texts: &[&str]) {
    assert_eq!(outcome.status, status, "{}", outcome.stderr);
    assert!(outcome.stdout.is_empty(), "nothing on stdout");
    for text in texts {
        assert!(
            outcome.stderr.contains(text),
            "{text:?} in: {}",
            outcome.stderr
        );
    }
}

fn succeeds(outcome: &Outcome, stdout: &[u8]) {
    assert_eq!(outcome.status, 0, "{}", outcome.stderr);
    assert!(outcome.stdout == stdout, "unexpected stdout");
}

#[test]
fn usage_errors_are_status_2() {
    for arguments in [
        &[][..],
        &["nothing"],
        &["put"],
        &["get"],
        &["get", "key", "--wait", "never"],
        &["get", "key", "--server", "nowhere"],
        &["get", "key", "--timeout", "0"],
        &["put", "key", "value", "--file", "path"],
        &["serve", "--memory", "lots"],
        &["serve", "--workers", "0"],
        &["load"],
        &["load", "dir", "--processes", "0"],
    ] {
        let outcome = kvstore(None, arguments, b"");
        assert_eq!(outcome.status, 2, "{arguments:?}: {}", outcome.stderr);
        assert!(!outcome.stderr.is_empty());
    }
    assert_eq!(kvstore(None, &["--help"], b"").status, 0);
}

#[test]
fn an_unknown_device_lists_those_there_are() {
    for arguments in [
        &["serve", "--listen", "127.0.0.1:0", "--device", "nosuch7"][..],
        &["get", "key", "--device", "nosuch7"],
    ] {
        fails(&kvstore(None, arguments, b""), 1, &["nosuch7", "soft0"]);
    }
}

#[test]
fn no_server_at_the_address() {
    // A port that was free a moment ago.
    let address = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .to_string();
    for arguments in [
        &["put", "key", "value"][..],
        &["get", "key"],
        &["del", "key"],
        &["stat"],
        &["load", "."],
    ] {
        let arguments = [arguments, &["--server", &address]].concat();
        fails(&kvstore(None, &arguments, b""), 1, &[&address]);
    }
}

#[test]
fn something_else_at_the_address() {
    for (says, expected) in [
        (&b""[..], "127.0.0.1"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "greeting"),
        (&[0; 4096], "greeting"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // The client may have hung up by then.
            let _ = stream.write_all(says);
            stream
        });
        let arguments = ["get", "key", "--timeout", "0.5", "--server", &address];
        let outcome = kvstore(None, &arguments, b"");
        fails(&outcome, 1, &["error: ", expected]);
        server.join().unwrap();
    }
}

#[test]
fn an_address_in_use() {
    let server = Server::start(&[]);
    let address = server.address.to_string();
    let outcome = kvstore(None, &["serve", "--listen", &address], b"");
    fails(&outcome, 1, &[&address, "in use"]);
}

#[test]
fn keys_and_values_out_of_limits() {
    let server = Server::start(&[]);
    let server = Some(&server);
    let long = "k".repeat(1025);
    for arguments in [&["put", &long, "v"][..], &["get", &long], &["del", &long]] {
        fails(&kvstore(server, arguments, b""), 1, &["1025", "1024"]);
    }
    fails(&kvstore(server, &["put", "", "v"], b""), 1, &["1 to 1024"]);
    succeeds(&kvstore(server, &["put", &long[..1024], "v"], b""), b"");

    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("long");
    std::fs::File::create(&path)
        .unwrap()
        .set_len((256 << 20) + 1)
        .unwrap();
    let path = path.to_str().unwrap();
    let outcome = kvstore(server, &["put", "key", "--file", path], b"");
    fails(&outcome, 1, &["268435457", "268435456"]);
    fails(&kvstore(server, &["get", "key"], b""), 1, &["no such key"]);
}

#[test]
fn the_ceiling_of_the_server_leaves_the_old_value() {
    let server = Server::start(&["--memory", "4MiB"]);
    let server = Some(&server);
    succeeds(&kvstore(server, &["put", "key", "old"], b""), b"");
    let outcome = kvstore(server, &["put", "key"], &value(1, 6 << 20));
    fails(&outcome, 1, &["memory ceiling", "6291456"]);
    succeeds(&kvstore(server, &["get", "key"], b""), b"old");
}

#[test]
fn values_travel_as_raw_bytes() {
    let server = Server::start(&[]);
    let server = Some(&server);
    let directory = tempfile::tempdir().unwrap();
    for length in [0, 1, 10_000, 9 << 20] {
        let bytes = value(length as u64, length);
        let (from, to) = (directory.path().join("from"), directory.path().join("to"));
        std::fs::write(&from, &bytes).unwrap();

        succeeds(&kvstore(server, &["put", "stdin"], &bytes), b"");
        let arguments = ["put", "file", "--file", from.to_str().unwrap()];
        succeeds(&kvstore(server, &arguments, b""), b"");
        for key in ["stdin", "file"] {
            succeeds(&kvstore(server, &["get", key], b""), &bytes);
            let arguments = ["get", key, "--output", to.to_str().unwrap()];
            succeeds(&kvstore(server, &arguments, b""), b"");
            assert!(std::fs::read(&to).unwrap() == bytes);
        }
    }
    succeeds(&kvstore(server, &["del", "stdin"], b""), b"");
    fails(
        &kvstore(server, &["del", "stdin"], b""),
        1,
        &["no such key"],
    );
    let absent = directory.path().join("absent");
    let arguments = ["get", "stdin", "--output", absent.to_str().unwrap()];
    fails(
        &kvstore(server, &arguments, b""),
        1,
        &["no such key", "stdin"],
    );
    assert!(!absent.exists(), "nothing half-done");
    let arguments = ["put", "key", "--file", absent.to_str().unwrap()];
    fails(&kvstore(server, &arguments, b""), 1, &["absent"]);
}

#[test]
fn stat_prints_what_the_server_counts() {
    let server = Server::start(&["--workers", "2"]);
    let server = Some(&server);
    succeeds(&kvstore(server, &["put", "key", "value"], b""), b"");
    let outcome = kvstore(server, &["stat"], b"");
    let text = String::from_utf8(outcome.stdout).unwrap();
    for line in ["keys 1\n", "value_bytes 5\n", "live_blocks 1\n", "puts 1\n"] {
        assert!(text.contains(line), "{line:?} in {text}");
    }
}

/// A tree with empty and large files, odd names, a link and an empty folder.
fn grow(root: &Path) -> u64 {
    let names = ["a", "b c", "sub/deep/er/x", "sub/ü", "zero", "large"];
    let mut bytes = 0;
    for (i, name) in names.iter().enumerate() {
        let length = match *name {
            "zero" => 0,
            "large" => (8 << 20) + 12_345,
            _ => 3000 * i + 1,
        };
        bytes += length as u64;
        let path = root.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, value(i as u64, length)).unwrap();
    }
    for i in 0..50 {
        std::fs::write(root.join(format!("small {i}")), value(i, i as usize)).unwrap();
        bytes += i;
    }
    std::fs::create_dir(root.join("empty")).unwrap();
    std::os::unix::fs::symlink("a", root.join("link")).unwrap();
    bytes
}

#[test]
fn a_tree_is_loaded_and_verified_by_several_processes() {
    let server = Server::start(&[]);
    let server = Some(&server);
    let directory = tempfile::tempdir().unwrap();
    let bytes = grow(directory.path());
    let root = directory.path().to_str().unwrap();

    let load = |more: &[&str]| kvstore(server, &[&["load", root], more].concat(), b"");
    let summary = |outcome: &Outcome| String::from_utf8_lossy(&outcome.stdout).into_owned();
    let outcome = load(&["--verify"]);
    assert_eq!(outcome.status, 1, "nothing is stored yet");
    assert!(summary(&outcome).contains("56 mismatches"));

    let outcome = load(&["--processes", "3"]);
    assert_eq!(outcome.status, 0, "{}", outcome.stderr);
    let text = summary(&outcome);
    assert!(
        text.starts_with(&format!("stored 56 files, {bytes} bytes")),
        "{text}"
    );
    for processes in ["1", "5"] {
        let outcome = load(&["--verify", "--processes", processes]);
        assert_eq!(outcome.status, 0, "{}", outcome.stderr);
        let text = summary(&outcome);
        assert!(
            text.starts_with(&format!("verified 56 files, {bytes} bytes")),
            "{text}"
        );
    }
    succeeds(
        &kvstore(server, &["get", "sub/deep/er/x"], b""),
        &value(2, 6001),
    );

    std::fs::write(directory.path().join("a"), b"!").unwrap();
    succeeds(&kvstore(server, &["put", "b c", "other"], b""), b"");
    succeeds(&kvstore(server, &["del", "zero"], b""), b"");
    let outcome = load(&["--verify"]);
    assert_eq!(outcome.status, 1);
    assert!(summary(&outcome).contains("3 mismatches"));
    for name in ["/a:", "/b c:", "/zero:"] {
        assert!(
            outcome.stderr.contains(name),
            "{name} in {}",
            outcome.stderr
        );
    }

    let absent = directory.path().join("absent");
    for path in [absent.to_str().unwrap(), &format!("{root}/a")] {
        fails(&kvstore(server, &["load", path], b""), 1, &[path]);
    }
}

#[test]
fn a_server_ends_cleanly_on_interrupt_and_terminate() {
    for signal in [Signal::INT, Signal::TERM] {
        for wait in ["poll", "event"] {
            let mut server = Server::start(&["--wait", wait, "--workers", "2"]);
            let mut client = server.client();
            client.put(b"key", b"value").unwrap();
            kill_process(Pid::from_raw(server.pid() as i32).unwrap(), signal).unwrap();
            assert_eq!(server.wait().code(), Some(0));
            assert!(client.put(b"key", b"value").is_err());
        }
    }
}

/// A listener of our wire that speaks something else over it.
fn other_server(application: [u8; 4], version: u32) -> (String, std::thread::JoinHandle<()>) {
    let device = verbs_sys::find_device(None).unwrap();
    let pd = device.open().unwrap().alloc_pd().unwrap();
    let pool = mr_pool::Pool::builder(&pd).build().unwrap();
    let config = wire::Config {
        application: u32::from_le_bytes(application),
        application_version: version,
        ..wire::Config::default()
    };
    let endpoint = wire::Endpoint::new(&pd, &pool, config).unwrap();
    let mut listener = wire::Listener::bind("127.0.0.1:0", vec![endpoint.acceptor()]).unwrap();
    let address = listener.local_addr().to_string();
    let thread = std::thread::spawn(move || {
        assert!(
            listener.accept().is_err(),
            "it must not come to a connection"
        );
        drop(endpoint);
    });
    (address, thread)
}

#[test]
fn another_version_of_the_protocol() {
    for (application, version, expected) in [
        (*b"kvst", 999, "wrong protocol version"),
        (*b"abcd", 1, "wrong protocol"),
    ] {
        let (address, server) = other_server(application, version);
        let outcome = kvstore(None, &["put", "key", "value", "--server", &address], b"");
        fails(&outcome, 1, &[&address, expected]);
        server.join().unwrap();
    }
}

/// Runs the program with a limit on its address space, in MiB.
fn limited(server: &Server, limit: usize, arguments: &[&str]) -> Outcome {
    let output = Command::new("sh")
        .args(["-c", "ulimit -v $1; shift; exec \"$@\"", "sh"])
        .arg((limit << 10).to_string())
        .arg(env!("CARGO_BIN_EXE_kvstore"))
        .args(arguments)
        .env("KVSTORE_SERVER", server.address.to_string())
        .output()
        .expect("run");
    Outcome {
        status: output.status.code().unwrap_or(-1),
        stdout: output.stdout,
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

#[test]
fn a_registration_that_fails() {
    let server = Server::start(&[]);
    succeeds(&kvstore(Some(&server), &["put", "key", "old"], b""), b"");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("large");
    std::fs::File::create(&path)
        .unwrap()
        .set_len(256 << 20)
        .unwrap();
    // Enough for the program and its device, and less than the value more.
    let limit = (1..20)
        .map(|step| step * 200)
        .find(|&limit| limited(&server, limit, &["get", "key"]).status == 0)
        .expect("a get that succeeds");
    let arguments = ["put", "key", "--file", path.to_str().unwrap()];
    let outcome = limited(&server, limit, &arguments);
    fails(
        &outcome,
        1,
        &["registered memory", "268435456", "ulimit -l"],
    );
    succeeds(&kvstore(Some(&server), &["get", "key"], b""), b"old");
}
