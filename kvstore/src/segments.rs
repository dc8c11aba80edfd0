//! Dividing a long READ or WRITE: a device carries only so many bytes in one message.

use std::ops::Range;

use verbs_sys::RemoteAddr;

/// The longest operation that is posted, in bytes. Every known device takes it (`max_msg_sz` of `ibv_query_port(3)`; the
/// smallest is 8 MiB, of the kernel's software devices).
pub const LONGEST: usize = 8 << 20;

/// Most operations that one value and its header are divided into.
pub const MOST: usize = crate::limits::MAX_VALUE / LONGEST + 1;

/// The operations that move `range` of a local buffer from or to `remote`, in order. An empty range is one empty
/// operation, so that there always is a completion.
pub fn of(
    range: Range<usize>,
    remote: RemoteAddr,
) -> impl Iterator<Item = (Range<usize>, RemoteAddr)> {
    let count = range.len().div_ceil(LONGEST).max(1);
    (0..count).map(move |index| {
        let start = range.start + index * LONGEST;
        let end = range.end.min(start + LONGEST);
        // The peer has given the address: one that has no end is for the device to refuse.
        let addr = remote.addr.wrapping_add((start - range.start) as u64);
        (start..end, RemoteAddr { addr, ..remote })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const REMOTE: RemoteAddr = RemoteAddr {
        addr: 0x10_0000,
        rkey: 9,
    };

    #[test]
    fn segments_cover_the_range_in_order() {
        for length in [1, LONGEST - 1, LONGEST, LONGEST + 1, crate::MAX_VALUE] {
            let chain: Vec<_> = of(32..32 + length, REMOTE).collect();
            let mut at = 32;
            for (range, remote) in &chain {
                assert_eq!(range.start, at);
                assert!(range.len() <= LONGEST && !range.is_empty());
                assert_eq!(remote.addr, REMOTE.addr + (at - 32) as u64);
                assert_eq!(remote.rkey, 9);
                at = range.end;
            }
            assert_eq!(at, 32 + length);
            assert!(chain.len() < MOST);
        }
    }

    #[test]
    fn an_address_that_a_peer_made_up_is_no_panic() {
        let addr = u64::MAX - 1;
        let chain: Vec<_> = of(0..LONGEST + 1, RemoteAddr { addr, rkey: 9 }).collect();
        assert_eq!(chain[1].1.addr, addr.wrapping_add(LONGEST as u64));
    }

    #[test]
    fn nothing_is_one_empty_operation() {
        let chain: Vec<_> = of(32..32, REMOTE).collect();
        assert_eq!(chain, [(32..32, REMOTE)]);
    }
}
