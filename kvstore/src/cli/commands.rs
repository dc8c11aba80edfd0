//! The commands other than `load`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use kvstore::{Client, MAX_VALUE, Server};

use super::arguments::{Connection, Del, Get, Put, Serve};

pub fn connect(connection: &Connection) -> Result<Client> {
    Ok(Client::connect(connection.server, &connection.config())?)
}

pub fn serve(arguments: &Serve) -> Result<()> {
    let server = Server::bind(arguments.listen, &arguments.config())?;
    let shutdown = server.shutdown_handle();
    ctrlc::set_handler(move || shutdown.shutdown()).context("install the handler of Ctrl-C")?;
    // The line that scripts wait for, and learn the port from.
    println!("serving on {}", server.local_addr());
    io::stdout().flush().context("write to stdout")?;
    server.run()?;
    Ok(())
}

pub fn put(arguments: &Put) -> Result<()> {
    let key = arguments.key.as_bytes();
    kvstore::check_key(key)?;
    match (&arguments.value, &arguments.file) {
        (Some(value), _) => connect(&arguments.connection)?.put(key, value.as_bytes())?,
        (None, Some(path)) => {
            let source = FileValue::open(path)?;
            put_file(&mut connect(&arguments.connection)?, key, source)?;
        }
        (None, None) => {
            let mut value = Vec::new();
            io::stdin()
                .lock()
                // One byte more than allowed tells "too long" from "just fits".
                .take(MAX_VALUE as u64 + 1)
                .read_to_end(&mut value)
                .context("read the value from stdin")?;
            connect(&arguments.connection)?.put(key, &value)?;
        }
    }
    Ok(())
}

/// A file whose content is to be a value, its length checked.
pub struct FileValue<'a> {
    path: &'a Path,
    file: File,
    length: usize,
}

impl<'a> FileValue<'a> {
    pub fn open(path: &'a Path) -> Result<Self> {
        let file = File::open(path).with_context(|| format!("open {}", path.display()))?;
        let metadata = file
            .metadata()
            .with_context(|| format!("look at {}", path.display()))?;
        if !metadata.is_file() {
            bail!("{} is not a regular file", path.display());
        }
        let length = usize::try_from(metadata.len()).unwrap_or(usize::MAX);
        kvstore::check_value(length).with_context(|| path.display().to_string())?;
        Ok(Self { path, file, length })
    }

    pub fn length(&self) -> usize {
        self.length
    }

    /// Reads the whole content into `room`, which is as long as the file was when it was opened.
    pub fn read_into(mut self, room: &mut [u8]) -> Result<()> {
        let path = self.path.display();
        self.file
            .read_exact(room)
            .with_context(|| format!("read {path}"))?;
        if self
            .file
            .read(&mut [0])
            .with_context(|| format!("read {path}"))?
            != 0
        {
            bail!("{path} grew while it was read");
        }
        Ok(())
    }
}

/// Puts a file's content, read straight into registered memory; returns its length in bytes.
pub fn put_file(client: &mut Client, key: &[u8], source: FileValue<'_>) -> Result<usize> {
    let length = source.length();
    let mut value = client.buffer(length)?;
    source.read_into(&mut value)?;
    client.put_buffer(key, &mut value)?;
    Ok(length)
}

pub fn get(arguments: &Get) -> Result<()> {
    let key = arguments.key.as_bytes();
    kvstore::check_key(key)?;
    let Some(value) = connect(&arguments.connection)?.get(key)? else {
        bail!("no such key: {}", key.escape_ascii());
    };
    match &arguments.output {
        Some(path) => {
            std::fs::write(path, &*value).with_context(|| format!("write {}", path.display()))?;
        }
        None => {
            let mut out = io::stdout().lock();
            out.write_all(&value)
                .and_then(|()| out.flush())
                .context("write the value to stdout")?;
        }
    }
    Ok(())
}

pub fn del(arguments: &Del) -> Result<()> {
    let key = arguments.key.as_bytes();
    kvstore::check_key(key)?;
    if !connect(&arguments.connection)?.delete(key)? {
        bail!("no such key: {}", key.escape_ascii());
    }
    Ok(())
}

pub fn stat(connection: &Connection) -> Result<()> {
    let statistics = connect(connection)?.server_statistics()?;
    let mut out = io::stdout().lock();
    for (name, figure) in [
        ("keys", statistics.keys),
        ("value_bytes", statistics.value_bytes),
        ("live_blocks", statistics.live_blocks),
        ("live_bytes", statistics.live_bytes),
        ("registered_bytes", statistics.registered_bytes),
        ("registrations", statistics.registrations),
        ("connections", statistics.connections),
        ("puts", statistics.puts),
        ("gets", statistics.gets),
        ("deletes", statistics.deletes),
    ] {
        writeln!(out, "{name} {figure}").context("write to stdout")?;
    }
    Ok(())
}
