use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use proptest::prelude::*;

use super::*;

type Copy = unsafe fn(*mut u8, *const u8, usize);

/// All routines, the portable ones also where they are not in use.
const COPIES: [(&str, Copy); 12] = [
    ("write_shared", write_shared),
    ("read_shared", read_shared),
    ("copy_shared", copy_shared),
    ("portable to shared", portable::copy_to_shared),
    ("portable from shared", portable::copy_from_shared),
    ("portable both shared", portable::copy_both_shared),
    ("in place, narrow, to shared", in_place::<true, 0>),
    ("in place, narrow, from shared", in_place::<false, 0>),
    ("in place, wide, to shared", in_place::<true, 1>),
    ("in place, wide, from shared", in_place::<false, 1>),
    ("in place, whole lines, to shared", in_place::<true, 2>),
    ("in place, whole lines, from shared", in_place::<false, 2>),
];

/// What callers make of it, as if the processor were no wider than this: the rest goes another way.
///
/// # Safety
///
/// As for [`copy_in_place`], but that `len` may be 0.
unsafe fn in_place<const TO_SHARED: bool, const WIDTH: u8>(
    dst: *mut u8,
    src: *const u8,
    len: usize,
) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        let width = || WIDTH.min(in_place::imp::width());
        // SAFETY: the caller's contract, and the length is checked first; the processor has that width.
        let copied = len != 0 && unsafe { in_place::imp::copy::<TO_SHARED>(width, dst, src, len) };
        if copied {
            return;
        }
    }
    // SAFETY: the caller's contract; nothing was copied.
    unsafe { copy_shared(dst, src, len) };
}

const GUARD: usize = 96;
const LONGEST: usize = 5000;

/// Copies `len` bytes between buffers at the given offsets from 64-byte alignment, checks every
/// byte of the destination's surroundings, and gives the routine's name on failure.
fn check(copy: Copy, dst_offset: usize, src_offset: usize, len: usize) -> Result<(), String> {
    let room = GUARD + 64 + len + GUARD;
    let mut source: Vec<u8> = (0..room + 64)
        .map(|i| (i * 7 + i / 251) as u8 | 1)
        .collect();
    let mut target = vec![0xEE_u8; room + 64];
    let src_start = source.as_ptr().align_offset(64) + GUARD / 64 * 64 + src_offset;
    let dst_start = target.as_ptr().align_offset(64) + 64 + dst_offset;
    let expected = source[src_start..src_start + len].to_vec();
    // SAFETY: both ranges lie inside their vectors, which nobody else uses.
    unsafe {
        copy(
            target.as_mut_ptr().add(dst_start),
            source.as_mut_ptr().add(src_start),
            len,
        )
    };
    let (before, rest) = target.split_at(dst_start);
    let (copied, after) = rest.split_at(len);
    if copied != expected {
        return Err("wrong bytes".into());
    }
    if before.iter().chain(after).any(|&byte| byte != 0xEE) {
        return Err("wrote outside the range".into());
    }
    Ok(())
}

#[test]
fn every_alignment_of_short_copies() {
    for (name, copy) in COPIES {
        for len in 0..=if cfg!(miri) { 20 } else { 160 } {
            for dst in 0..16 {
                for src in 0..16 {
                    let result = check(copy, dst, src, len);
                    assert_eq!(result, Ok(()), "{name} of {len} bytes from {src} to {dst}");
                }
            }
        }
    }
}

/// Those that are worth it, and nothing that has an end of its own to see to.
#[test]
#[cfg(all(target_arch = "x86_64", not(miri)))]
fn words_and_lines_are_copied_in_place() {
    #[repr(align(64))]
    struct Lines([u8; 8192 + 64]);
    look_at_processor();
    let (mut target, source) = (Lines([0; 8192 + 64]), Lines([1; 8192 + 64]));
    let mut goes = |at: usize, from: usize, len| {
        let to = target.0[at..].as_mut_ptr();
        // SAFETY: both are long enough, and nobody else's.
        unsafe { copy_in_place::<true>(to, source.0[from..].as_ptr(), len) }
    };
    for len in [8, 16, 24, 32, 40, 56] {
        assert!(goes(0, 0, len) && goes(8, 1, len), "{len} bytes");
        assert!(!goes(1, 0, len), "{len} bytes to the middle of a word");
    }
    for len in [64, 128, 192, 256, 320, 1024, 4096, 4160, 8128] {
        assert!(goes(0, 0, len) && goes(64, 1, len), "{len} bytes");
        assert_eq!(
            goes(16, 0, len),
            len <= 128,
            "{len} bytes to the middle of a line"
        );
        assert!(!goes(8, 0, len), "{len} bytes to the middle of 16");
    }
    for len in [1, 7, 12, 100, 104, 8192] {
        assert!(!goes(0, 0, len), "{len} bytes");
    }
}

/// Lengths at which copies fetch lines ahead, and the ends of their blocks.
#[test]
fn alignments_of_long_copies() {
    for (name, copy) in COPIES {
        for len in if cfg!(miri) { 0..0 } else { 32_700..33_200 } {
            let (dst, src) = (len * 7 % 64, len * 13 % 64);
            let result = check(copy, dst, src, len);
            assert_eq!(result, Ok(()), "{name} of {len} bytes from {src} to {dst}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 8 } else { 4000 }))]

    #[test]
    fn any_length_and_alignment(
        which in 0..COPIES.len(),
        dst in 0..64_usize,
        src in 0..64_usize,
        len in 0..=LONGEST,
    ) {
        let (name, copy) = COPIES[which];
        prop_assert_eq!(check(copy, dst, src, len), Ok(()), "{}", name);
    }
}

/// An aligned shared area of words, written through raw pointers only.
struct Area(Box<[AtomicU64]>);

impl Area {
    fn new(words: usize) -> Self {
        Self((0..words).map(|_| AtomicU64::new(0)).collect())
    }

    fn bytes(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    fn len(&self) -> usize {
        self.0.len() * 8
    }
}

/// Word counts that take each of the paths.
const AREAS: [usize; 5] = [1, 4, 40, 640, 5000];

/// Fewer for larger areas.
fn rounds(words: usize) -> usize {
    if cfg!(miri) {
        3
    } else {
        3000.min(2_000_000 / words)
    }
}

/// Misaligned private copies of words whose 8 bytes are all `value`.
fn private(words: usize, offset: usize, value: u8) -> Vec<u8> {
    vec![value; offset + words * 8]
}

#[test]
fn writes_never_tear_an_aligned_word() {
    for words in AREAS {
        let area = &Area::new(words);
        let over = &AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(move || {
                for round in 0..rounds(words) {
                    let value = if round % 2 == 0 { 0x5A } else { 0xA5 };
                    let source = private(words, round % 8, value);
                    // SAFETY: the source is private, the area is accessed by atomics alone.
                    unsafe {
                        write_shared(area.bytes(), source.as_ptr().add(round % 8), area.len())
                    };
                }
                over.store(true, Ordering::Release);
            });
            while !over.load(Ordering::Acquire) {
                for word in &area.0 {
                    let bytes = word.load(Ordering::Relaxed).to_ne_bytes();
                    assert!(
                        bytes.iter().all(|&byte| byte == bytes[0]),
                        "torn: {bytes:x?}"
                    );
                }
            }
        });
    }
}

#[test]
fn reads_never_tear_an_aligned_word() {
    for words in AREAS {
        let area = &Area::new(words);
        let over = &AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(move || {
                let mut value = 0x5A5A_5A5A_5A5A_5A5A_u64;
                while !over.load(Ordering::Acquire) {
                    for word in &area.0 {
                        word.store(value, Ordering::Relaxed);
                    }
                    value = !value;
                }
            });
            for round in 0..rounds(words) {
                let offset = round % 8;
                let mut target = private(words, offset, 0);
                // SAFETY: the target is private, the area is accessed by atomics alone.
                unsafe { read_shared(target.as_mut_ptr().add(offset), area.bytes(), area.len()) };
                let torn = target[offset..]
                    .chunks(8)
                    .find(|word| word.iter().any(|b| *b != word[0]));
                assert_eq!(torn, None, "in a copy to offset {offset}");
            }
            over.store(true, Ordering::Release);
        });
    }
}

/// A peer replaces every value that a copy stores by a mark, with compare-and-swap. If a copy
/// stored a word twice, the second store would bring back the value after the mark: then the peer
/// could replace the value of one round twice.
#[test]
fn a_successful_compare_and_swap_is_never_undone() {
    const MARK: u64 = u64::MAX;
    for words in AREAS {
        let area = &Area::new(words);
        let over = &AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(move || {
                for round in 1..=rounds(words) {
                    let offset = round % 8;
                    let mut source = private(words, offset, 0);
                    for word in source[offset..].chunks_mut(8) {
                        word.copy_from_slice(&(round as u64).to_ne_bytes());
                    }
                    // SAFETY: the source is private, the area is accessed by atomics alone.
                    unsafe { write_shared(area.bytes(), source.as_ptr().add(offset), area.len()) };
                }
                over.store(true, Ordering::Release);
            });
            let mut replaced = vec![0; words];
            while !over.load(Ordering::Acquire) {
                for (word, last) in area.0.iter().zip(&mut replaced) {
                    let word = word.as_ptr();
                    // SAFETY: an aligned word of the area.
                    let found = unsafe { load_u64(word) };
                    // SAFETY: as above.
                    if found != MARK && unsafe { compare_swap_u64(word, found, MARK) } == found {
                        assert!(found > *last || found == 0, "round {found} came back");
                        *last = found;
                    }
                }
            }
        });
    }
}

#[test]
fn overlapping_ranges_are_copied_to_a_mixture_of_old_bytes() {
    for shift in [0, 1, 8, 24, 100] {
        let area = Area::new(640);
        // SAFETY: all inside the area.
        unsafe { area.bytes().write_bytes(0x11, area.len()) };
        let len = area.len() - shift;
        // SAFETY: both ranges lie inside the area.
        unsafe { copy_shared(area.bytes().add(shift), area.bytes(), len) };
        assert!(
            area.0
                .iter()
                .all(|word| word.load(Ordering::Relaxed) == 0x1111_1111_1111_1111)
        );
    }
}

#[test]
fn atomics_give_the_value_found() {
    let area = Area::new(1);
    let word = area.0[0].as_ptr();
    // SAFETY: an aligned word that only this thread uses, in all calls.
    unsafe {
        assert_eq!(fetch_add_u64(word, 5), 0);
        assert_eq!(compare_swap_u64(word, 4, 9), 5);
        assert_eq!(load_u64(word), 5);
        assert_eq!(compare_swap_u64(word, 5, u64::MAX), 5);
        assert_eq!(fetch_add_u64(word, 2), u64::MAX);
        assert_eq!(load_u64(word), 1);
    }
}

/// Nothing beside either range is touched, not even read: there is no memory.
#[test]
#[cfg(not(miri))]
fn ranges_end_where_memory_does() {
    const PAGES: usize = 4;
    let page = rustix::param::page_size();
    let walled = || {
        let len = (PAGES + 2) * page;
        // SAFETY: a mapping of its own, of which the inner pages are made accessible.
        unsafe {
            use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};
            let base = rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::empty(),
                MapFlags::PRIVATE,
            )
            .unwrap()
            .cast::<u8>();
            let inner = base.add(page);
            let access = MprotectFlags::READ | MprotectFlags::WRITE;
            rustix::mm::mprotect(inner.cast(), PAGES * page, access).unwrap();
            inner
        }
    };
    let (source, target) = (walled(), walled());
    let room = PAGES * page;
    for at in 0..room {
        // SAFETY: inside the mapping.
        unsafe { source.add(at).write((at * 7 + at / 251) as u8 | 1) };
    }
    for (name, copy) in &COPIES[..3] {
        for len in (2040..=2600).chain([4096, 8192, 8193, 9000, 12_301]) {
            // The destination at either end, the source at either end, the other side anywhere.
            for off in [0, 1, 7, 8, 9, 31, 63, 64] {
                for (dst, src) in [
                    (0, room - len),
                    (room - len, 0),
                    (off, room - len),
                    (room - len, off),
                    (0, off),
                    (room - len - off, room - len),
                ] {
                    // SAFETY: both ranges lie inside the mappings.
                    let (copied, expected) = unsafe {
                        copy(target.add(dst), source.add(src), len);
                        (
                            std::slice::from_raw_parts(target.add(dst), len),
                            std::slice::from_raw_parts(source.add(src), len),
                        )
                    };
                    assert!(copied == expected, "{name} of {len} from {src} to {dst}");
                }
            }
        }
    }
}
