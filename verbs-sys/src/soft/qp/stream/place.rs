//! Walking through scatter/gather lists from the middle.

use crate::copy;
use crate::ffi::ibv_sge;

/// The pieces of a list that hold `len` bytes from `offset` on.
pub(in crate::soft::qp) fn pieces(
    sges: impl Iterator<Item = ibv_sge>,
    offset: u64,
    len: usize,
) -> impl Iterator<Item = (*mut u8, usize)> {
    let (mut skip, mut left) = (offset, len);
    sges.filter_map(move |sge| {
        let length = u64::from(sge.length);
        if skip >= length {
            skip -= length;
            return None;
        }
        let piece = ((length - skip) as usize).min(left);
        let at = sge.addr.wrapping_add(skip) as usize as *mut u8;
        (skip, left) = (0, left - piece);
        (piece > 0).then_some((at, piece))
    })
}

/// Copies received bytes to the place that they have in a list.
///
/// # Safety
///
/// The elements that the bytes go to were checked under the lock that is held.
pub(super) unsafe fn scatter(sges: impl Iterator<Item = ibv_sge>, offset: u64, mut bytes: &[u8]) {
    for (to, len) in pieces(sges, offset, bytes.len()) {
        let (now, rest) = bytes.split_at(len);
        // SAFETY: by the caller's promise.
        unsafe { copy::write_shared(to, now.as_ptr(), len) };
        bytes = rest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_entered_in_the_middle() {
        let mut memory = [0u8; 10];
        let base = memory.as_mut_ptr() as u64;
        let sge = |addr, length| ibv_sge {
            addr: base + addr,
            length,
            lkey: 0,
        };
        let list = [sge(0, 3), sge(0, 0), sge(5, 2), sge(8, 2)];
        // SAFETY: the elements lie in `memory`.
        unsafe { scatter(list.iter().copied(), 2, &[1, 2, 3, 4]) };
        assert_eq!(memory, [0, 0, 1, 0, 0, 2, 3, 0, 4, 0]);
        assert_eq!(pieces(list.iter().copied(), 7, 5).count(), 0);
    }
}
