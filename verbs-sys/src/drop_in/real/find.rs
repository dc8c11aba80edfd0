//! Where the system's library is: what the dynamic loader would find if ours were not there.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Read;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Every file that could be the library of this name, the likeliest first: of this kind of machine, and not `own`.
pub(super) fn candidates(own: &Path, name: &str) -> Vec<PathBuf> {
    let cache = fs::read("/etc/ld.so.cache").unwrap_or_default();
    let searched = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let listed = folders(&searched).map(|folder| folder.join(name));
    let usual = USUAL.iter().map(|folder| Path::new(folder).join(name));
    let all = listed.chain(cached(&cache, name)).chain(usual);
    others(own, all)
}

/// Where the loader looks last, on the distributions that there are.
const USUAL: [&str; 6] = [
    "/lib64",
    "/usr/lib64",
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib",
    "/usr/lib",
];

/// The folders of a search path.
fn folders(path: &OsStr) -> impl Iterator<Item = &Path> {
    let parts = path.as_bytes().split(|byte| matches!(byte, b':' | b';'));
    parts
        .filter(|part| !part.is_empty())
        .map(|part| Path::new(OsStr::from_bytes(part)))
}

/// Those of the files that are there, each once, of the same kind of machine as `own` and another file.
fn others(own: &Path, files: impl Iterator<Item = PathBuf>) -> Vec<PathBuf> {
    let identity = |path: &Path| fs::metadata(path).map(|file| (file.dev(), file.ino()));
    let machine = machine(own);
    let mut seen: Vec<(u64, u64)> = identity(own).into_iter().collect();
    let mut found = Vec::new();
    for file in files {
        let Ok(id) = identity(&file) else {
            continue;
        };
        if !seen.contains(&id) && self::machine(&file).is_some_and(|of| Some(of) == machine) {
            seen.push(id);
            found.push(file);
        }
    }
    found
}

/// What the beginning of a program or library says of its machine: word size, byte order, processor.
fn machine(path: &Path) -> Option<[u8; 4]> {
    let mut head = [0; 20];
    File::open(path).ok()?.read_exact(&mut head).ok()?;
    head.starts_with(b"\x7fELF")
        .then(|| [head[4], head[5], head[18], head[19]])
}

/// The paths of a name in the loader's cache, ld.so(8); none if this is no such cache.
fn cached(cache: &[u8], name: &str) -> Vec<PathBuf> {
    parse(cache, name).unwrap_or_default()
}

/// How a cache begins. Older systems have another one in front of it.
const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
/// Bytes before the entries, and of each.
const HEADER: usize = 48;
const ENTRY: usize = 24;

fn parse(cache: &[u8], name: &str) -> Option<Vec<PathBuf>> {
    let start = cache.windows(MAGIC.len()).position(|part| part == MAGIC)?;
    let cache = &cache[start..];
    let number = |at: usize| {
        let bytes = cache.get(at..at.checked_add(4)?)?;
        usize::try_from(u32::from_ne_bytes(bytes.try_into().ok()?)).ok()
    };
    let text = |at: usize| cache.get(at..)?.split(|byte| *byte == 0).next();
    let entries = cache.get(HEADER..)?.chunks_exact(ENTRY);
    let count = number(MAGIC.len())?.min(entries.len());
    let mut found = Vec::new();
    for entry in 0..count {
        // Flags, the place of the name, that of the path; they count from the magic.
        let at = HEADER + entry * ENTRY;
        if text(number(at + 4)?)? == name.as_bytes() {
            found.push(PathBuf::from(OsStr::from_bytes(text(number(at + 8)?)?)));
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "libibverbs.so.1";

    fn cache(entries: &[(&str, &str)]) -> Vec<u8> {
        let mut strings = Vec::new();
        let mut table = Vec::new();
        let first = (HEADER + entries.len() * ENTRY) as u32;
        for (name, path) in entries {
            let mut place = |text: &str| {
                let at = first + strings.len() as u32;
                strings.extend_from_slice(text.as_bytes());
                strings.push(0);
                at
            };
            let words = [0x303, place(name), place(path), 0, 0, 0];
            table.extend(words.iter().flat_map(|word| word.to_ne_bytes()));
        }
        let mut cache = MAGIC.to_vec();
        cache.extend((entries.len() as u32).to_ne_bytes());
        cache.resize(HEADER, 0);
        [cache, table, strings].concat()
    }

    #[test]
    fn the_cache_is_read() {
        let made = cache(&[
            ("libm.so.6", "/lib/libm.so.6"),
            (NAME, "/opt/libibverbs.so.1"),
            (NAME, "/lib/libibverbs.so.1"),
        ]);
        let wanted = ["/opt/libibverbs.so.1", "/lib/libibverbs.so.1"].map(PathBuf::from);
        assert_eq!(cached(&made, NAME), wanted);
        let behind = [b"ld.so-1.7.0 and what belongs to it".to_vec(), made].concat();
        assert_eq!(cached(&behind, NAME), wanted);
    }

    #[test]
    fn a_broken_cache_is_none() {
        let made = cache(&[(NAME, "/lib/libibverbs.so.1")]);
        for len in 0..made.len() - "/lib/libibverbs.so.1".len() - 1 {
            assert!(cached(&made[..len], NAME).is_empty(), "{len}");
        }
        let mut wild = made;
        wild[HEADER + 4..HEADER + 12].fill(0xff);
        assert!(cached(&wild, NAME).is_empty());
    }

    #[test]
    fn own_file_others_machines_and_repetitions_are_left_out() {
        let own = std::env::current_exe().unwrap();
        let folder = std::env::temp_dir().join(format!("find-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let file = |name: &str, bytes: &[u8]| {
            let path = folder.join(name);
            fs::write(&path, bytes).unwrap();
            path
        };
        let head = fs::read(&own).unwrap()[..64].to_vec();
        let same = file("same", &head);
        let mut foreign = head.clone();
        foreign[18] ^= 0x55;
        let foreign = file("foreign", &foreign);
        let script = file("script", b"INPUT(libibverbs.so.1) and so on");
        let link = folder.join("link");
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(&own, &link).unwrap();
        let all = [&own, &link, &foreign, &script, &folder, &same, &same];
        let found = others(&own, all.into_iter().cloned());
        fs::remove_dir_all(&folder).unwrap();
        assert_eq!(found, [same]);
    }

    #[test]
    fn a_library_of_this_machine_is_found() {
        let own = std::env::current_exe().unwrap();
        let found = candidates(&own, "libc.so.6");
        let first = found.first().expect("this program's C library is a file");
        assert!(first.is_absolute() && first.ends_with("libc.so.6"));
        assert!(!candidates(first, "libc.so.6").contains(first));
    }

    #[test]
    fn a_search_path_has_folders() {
        let found: Vec<&Path> = folders(OsStr::new("/a::/b;c")).collect();
        assert_eq!(found, ["/a", "/b", "c"].map(Path::new));
    }
}
