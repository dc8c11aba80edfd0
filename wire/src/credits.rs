//! Credits: how a sender knows that its peer has a receive posted for the next message.
//!
//! Each side starts with one credit per receive that its peer keeps posted, spends one per message,
//! and gets them back in the headers of the messages that come the other way. The last credit is
//! kept for a message that only returns credits, and such a message is only sent once half of the
//! receives are owed; so two sides that both wait for credits cannot both be without one, and
//! messages about credits do not answer each other for ever.

/// The credits of one side of a connection.
#[derive(Debug)]
pub(crate) struct Credits {
    /// Receives the peer has posted for us and we have not used.
    available: u32,
    /// Receives we posted again and the peer does not know of.
    owed: u32,
    /// Receives that each side keeps posted.
    depth: u32,
}

impl Credits {
    /// Both sides keep `depth` receives posted, at least 4 and less than 65,536.
    pub(crate) fn new(depth: u32) -> Self {
        Self {
            available: depth,
            owed: 0,
            depth,
        }
    }

    /// Spends a credit for a message, if there is more than the last one.
    pub(crate) fn spend(&mut self) -> bool {
        let may = self.available > 1;
        self.available -= u32::from(may);
        may
    }

    /// Spends a credit for a message that only returns credits, if one is due and there is one.
    pub(crate) fn spend_for_return(&mut self) -> bool {
        let may = self.return_is_due() && self.available > 0;
        self.available -= u32::from(may);
        may
    }

    /// Whether [`spend`](Self::spend) would succeed.
    pub(crate) fn has_credit(&self) -> bool {
        self.available > 1
    }

    /// Takes what the next message tells the peer.
    pub(crate) fn take_owed(&mut self) -> u16 {
        let told = self.owed.min(u32::from(u16::MAX));
        self.owed -= told;
        told as u16
    }

    /// A receive that the peer's message used has been posted again.
    pub(crate) fn posted_again(&mut self) {
        self.owed += 1;
    }

    /// Whether enough is owed to be worth a message of its own.
    pub(crate) fn return_is_due(&self) -> bool {
        self.owed >= self.depth / 2
    }

    /// The peer's message returned `credits`. `false` where that is more than it ever got: it does
    /// not keep the rules.
    #[must_use]
    pub(crate) fn returned(&mut self, credits: u16) -> bool {
        self.available += u32::from(credits);
        self.available <= self.depth
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    /// Two sides and the messages between them, in order and without loss, as a reliable connection
    /// carries them.
    struct Pair {
        sides: [Credits; 2],
        /// Messages on their way to each side: the credits that each returns.
        wires: [VecDeque<u16>; 2],
        /// Receives each side has posted.
        posted: [u32; 2],
        /// Receives used and not posted again yet: the pool had none.
        unposted: [u32; 2],
    }

    impl Pair {
        fn new(depth: u32) -> Self {
            let sides = [Credits::new(depth), Credits::new(depth)];
            Self {
                sides,
                wires: Default::default(),
                posted: [depth; 2],
                unposted: [0; 2],
            }
        }

        fn push(&mut self, from: usize) {
            let credits = self.sides[from].take_owed();
            self.wires[1 - from].push_back(credits);
            assert!(
                self.wires[1 - from].len() as u32 <= self.posted[1 - from],
                "receiver overrun"
            );
        }

        fn send(&mut self, from: usize) -> bool {
            let sent = self.sides[from].spend();
            if sent {
                self.push(from);
            }
            sent
        }

        fn deliver(&mut self, to: usize) -> bool {
            let Some(credits) = self.wires[to].pop_front() else {
                return false;
            };
            self.posted[to] -= 1;
            self.unposted[to] += 1;
            assert!(
                self.sides[to].returned(credits),
                "more credits than receives"
            );
            true
        }

        fn post_again(&mut self, side: usize) {
            for _ in 0..std::mem::take(&mut self.unposted[side]) {
                self.posted[side] += 1;
                self.sides[side].posted_again();
            }
        }

        fn return_credits(&mut self, side: usize) -> bool {
            let sent = self.sides[side].spend_for_return();
            if sent {
                self.push(side);
            }
            sent
        }

        /// Lets everything happen that happens without a message of a caller.
        fn settle(&mut self) {
            let mut rounds = 0;
            loop {
                let mut moved = false;
                for side in [0, 1] {
                    while self.deliver(side) {
                        moved = true;
                    }
                    self.post_again(side);
                    moved |= self.return_credits(side);
                }
                if !moved {
                    return;
                }
                rounds += 1;
                assert!(rounds < 64, "messages about credits answer each other");
            }
        }
    }

    proptest! {
        #[test]
        fn never_overrun_never_stuck(
            depth in 4u32..40, steps in prop::collection::vec((0usize..2, 0u8..4), 0..400),
        ) {
            let mut pair = Pair::new(depth);
            for (side, step) in steps {
                match step {
                    0 => drop(pair.send(side)),
                    1 => drop(pair.deliver(side)),
                    2 => pair.post_again(side),
                    _ => drop(pair.return_credits(side)),
                }
            }
            pair.settle();
            for side in [0, 1] {
                prop_assert!(pair.send(side), "side {} cannot send in a settled connection", side);
                pair.settle();
            }
        }

        /// One side only sends, the other only receives: everything arrives, by way of returned credits.
        #[test]
        fn a_stream_of_one_direction_goes_on(depth in 4u32..40, messages in 1u32..500) {
            let mut pair = Pair::new(depth);
            for _ in 0..messages {
                if !pair.send(0) {
                    pair.settle();
                    prop_assert!(pair.send(0));
                }
            }
        }
    }

    #[test]
    fn the_last_credit_is_kept() {
        let mut credits = Credits::new(4);
        assert_eq!((0..10).filter(|_| credits.spend()).count(), 3);
        assert!(!credits.spend_for_return(), "nothing is owed");
        credits.posted_again();
        assert!(!credits.spend_for_return(), "less than half is owed");
        credits.posted_again();
        assert!(credits.spend_for_return());
        assert!(!credits.spend_for_return(), "none is left");
    }

    #[test]
    fn more_than_was_lent_is_noticed() {
        let mut credits = Credits::new(4);
        assert!(credits.spend());
        assert!(credits.returned(1));
        assert!(!credits.returned(1));
    }
}
