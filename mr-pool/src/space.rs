//! Regions, spans and carving: which bytes of which registration belong to which class.
//!
//! A region is one registration, divided into pages of 64 KiB. A span is a run of pages given to
//! one class; its blocks are carved one after the other as they are first asked for, and it goes
//! back to its region when all of them are free. All of this runs under the pool's lock, away
//! from the path of a steady state; only the table of [`SpanKeys`] is read outside it.

use std::ptr::NonNull;

use crate::class::{self, CLASSES};
use crate::free_list::Block;
use crate::segmented::Segmented;
use crate::source::Registration;
use crate::sync::{AtomicPtr, AtomicU64, Ordering};

/// Unit in which a region is divided among the classes, in bytes.
pub(crate) const PAGE: usize = if cfg!(loom) { 128 } else { 64 << 10 };

/// What a taker needs of a span, read without the lock.
///
/// Written under the lock before the first block of the span is passed on; whoever holds a block
/// got it through a chain of releases and acquires that starts there.
#[derive(Debug, Default)]
pub(crate) struct SpanKeys {
    base: AtomicPtr<u8>,
    /// rkey above lkey.
    keys: AtomicU64,
}

impl SpanKeys {
    /// Address and keys of the block at `place`.
    #[inline]
    pub(crate) fn block(&self, class: usize, place: u32) -> (NonNull<u8>, u64) {
        let base = self.base.load(Ordering::Relaxed);
        let addr = NonNull::new(base.wrapping_add(place as usize * class::size(class)))
            .expect("the span of a free block has its address");
        (addr, self.keys.load(Ordering::Relaxed))
    }
}

#[derive(Debug)]
struct Region {
    registration: Box<dyn Registration>,
    /// Whether each page belongs to a span.
    used: Vec<bool>,
}

impl Region {
    fn is_free(&self) -> bool {
        !self.used.contains(&true)
    }

    /// The first run of `pages` unused pages.
    fn run(&self, pages: usize) -> Option<usize> {
        let mut start = 0;
        for (page, &used) in self.used.iter().enumerate() {
            if used {
                start = page + 1;
            } else if page + 1 - start == pages {
                return Some(start);
            }
        }
        None
    }
}

#[derive(Clone, Copy, Debug)]
struct Span {
    region: usize,
    first_page: usize,
    pages: usize,
    /// Blocks it holds when carved to its end; 0 for a number out of use.
    blocks: u32,
}

/// The span a class carves from, and how far it has come.
#[derive(Clone, Copy, Debug)]
struct Carving {
    span: u32,
    next: u32,
}

/// All registered memory of a pool that is divided into classes.
#[derive(Debug)]
pub(crate) struct Space {
    regions: Vec<Option<Region>>,
    spans: Vec<Span>,
    unused_spans: Vec<u32>,
    carving: [Option<Carving>; CLASSES],
}

impl Space {
    pub(crate) fn new() -> Self {
        Self {
            regions: Vec::new(),
            spans: Vec::new(),
            unused_spans: Vec::new(),
            carving: [None; CLASSES],
        }
    }

    /// Up to a batch of blocks of `class` that were never handed out; empty when its span is
    /// carved to the end.
    pub(crate) fn carve(
        &mut self,
        class: usize,
    ) -> impl ExactSizeIterator<Item = Block> + DoubleEndedIterator + use<> {
        let (mut span, mut places) = (0, 0..0);
        if let Some(carving) = &mut self.carving[class] {
            let end = self.spans[carving.span as usize].blocks;
            span = carving.span;
            places = carving.next..end.min(carving.next + class::batch(class) as u32);
            carving.next = places.end;
        }
        places.map(move |place| Block::new(class, span, place))
    }

    /// Gives `class` a span of `pages` pages from the first region that has them in a row.
    pub(crate) fn place(&mut self, keys: &Segmented<SpanKeys>, class: usize, pages: usize) -> bool {
        let found = self
            .regions
            .iter()
            .enumerate()
            .find_map(|(index, region)| Some((index, region.as_ref()?.run(pages)?)));
        let Some((index, first_page)) = found else {
            return false;
        };
        let Some(region) = &mut self.regions[index] else {
            return false;
        };
        region.used[first_page..first_page + pages].fill(true);

        let blocks = (pages * PAGE / class::size(class)) as u32;
        let span = Span {
            region: index,
            first_page,
            pages,
            blocks,
        };
        let number = match self.unused_spans.pop() {
            Some(number) => {
                self.spans[number as usize] = span;
                number
            }
            None => {
                self.spans.push(span);
                (self.spans.len() - 1) as u32
            }
        };
        let base = region
            .registration
            .addr()
            .as_ptr()
            .wrapping_add(first_page * PAGE);
        let (lkey, rkey) = (region.registration.lkey(), region.registration.rkey());
        let slot = keys.get(number);
        slot.base.store(base, Ordering::Relaxed);
        slot.keys
            .store(u64::from(rkey) << 32 | u64::from(lkey), Ordering::Relaxed);
        self.carving[class] = Some(Carving {
            span: number,
            next: 0,
        });
        true
    }

    /// Takes in a region. What exceeds whole pages is left unused.
    pub(crate) fn add(&mut self, registration: Box<dyn Registration>) {
        let used = vec![false; registration.len() / PAGE];
        let region = Some(Region { registration, used });
        match self.regions.iter_mut().find(|region| region.is_none()) {
            Some(vacant) => *vacant = region,
            None => self.regions.push(region),
        }
    }

    /// Removes from `free` the blocks of every span of which each carved block is in `free`, and
    /// gives those spans back to their regions. `free` must hold no block twice.
    pub(crate) fn release_whole(&mut self, free: &mut Vec<Block>) {
        let mut counts = vec![0; self.spans.len()];
        for block in &*free {
            counts[block.span() as usize] += 1;
        }
        let mut carved: Vec<u32> = self.spans.iter().map(|span| span.blocks).collect();
        for carving in self.carving.iter().flatten() {
            carved[carving.span as usize] = carving.next;
        }
        let whole: Vec<bool> = counts
            .iter()
            .zip(&carved)
            .map(|(free, carved)| free == carved)
            .collect();
        free.retain(|block| !whole[block.span() as usize]);

        for carving in &mut self.carving {
            carving.take_if(|carving| whole[carving.span as usize]);
        }
        for (number, span) in self.spans.iter_mut().enumerate() {
            if !whole[number] || span.blocks == 0 {
                continue;
            }
            if let Some(region) = &mut self.regions[span.region] {
                region.used[span.first_page..span.first_page + span.pages].fill(false);
            }
            span.blocks = 0;
            self.unused_spans.push(number as u32);
        }
    }

    /// Removes a region of which no page is used, the latest first: the earlier ones fill first.
    pub(crate) fn remove_free(&mut self) -> Option<Box<dyn Registration>> {
        let is_free = |region: &Option<Region>| region.as_ref().is_some_and(Region::is_free);
        let index = self.regions.iter().rposition(is_free)?;
        self.regions[index].take().map(|region| region.registration)
    }

    /// Removes every region, used or not: for the end of the pool, when no buffer is left.
    pub(crate) fn remove_all(&mut self) -> Vec<Box<dyn Registration>> {
        *self = Self {
            regions: std::mem::take(&mut self.regions),
            ..Self::new()
        };
        self.regions
            .drain(..)
            .flatten()
            .map(|region| region.registration)
            .collect()
    }
}

/// Pages of a span of `class`: what it should have (at most a sixteenth lost at the end), and the
/// least that holds a block.
pub(crate) fn span_pages(class: usize) -> (usize, usize) {
    let size = class::size(class);
    let least = size.div_ceil(PAGE);
    let fits = |&pages: &usize| (pages * PAGE % size) * 16 <= pages * PAGE;
    // Ends by `size` pages, which hold whole blocks exactly.
    let pages = (least..=size).find(fits).unwrap_or(least);
    (pages, least)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::class::LARGEST;

    #[test]
    fn spans_waste_at_most_a_sixteenth_and_stay_short() {
        for class in 0..CLASSES {
            let (pages, least) = span_pages(class);
            let (bytes, size) = (pages * PAGE, class::size(class));
            assert!(least * PAGE >= size && (least - 1) * PAGE < size);
            assert!(bytes % size * 16 <= bytes, "class of {size}: {pages} pages");
            assert!(
                bytes <= LARGEST && (bytes <= 7 * PAGE || bytes < 2 * size),
                "class of {size}"
            );
        }
    }
}
