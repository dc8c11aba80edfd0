//! Faults on purpose, so that programs can test what they do about them.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Which faults the software device makes: what a network or a peer does to a program sooner or later, at a
/// time of one's own choosing. None by default, and then they cost nothing.
///
/// Requests are counted in the process, over all its queue pairs, in the order in which they are executed.
/// Binding and invalidating memory windows is local, and none of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct FaultInjection {
    /// A request and all its repetitions are lost. On a reliable connection it ends as if the peer were
    /// silent, with `IBV_WC_RETRY_EXC_ERR` after the time that the queue pair's `timeout` and `retry_cnt`
    /// say, or half a second if that is less; otherwise it seems to succeed.
    pub drop: Option<Hits>,
    /// A request, and those behind it, begin so much later. A program that sleeps meanwhile may wait for up
    /// to twice as long.
    pub delay: Option<(Hits, Duration)>,
    /// One bit of a request's data is changed on the way, and no check sum notices. Only those that carry
    /// data are counted, and no atomic operations.
    pub corrupt: Option<Hits>,
    /// The peer has no receive for a SEND, or a WRITE with immediate data, however often it is repeated:
    /// `IBV_WC_RNR_RETRY_EXC_ERR`. Nothing happens where `rnr_retry` is 7, which is without end. Only such
    /// requests on reliable connections are counted.
    pub rnr: Option<Hits>,
    /// A memory registration fails with `ENOMEM`.
    pub reg_mr: Option<Hits>,
}

/// Which of the operations that a fault can hit it does hit; they are counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hits {
    /// Each that is a multiple of this.
    Every(NonZeroU64),
    /// This one alone.
    Only(NonZeroU64),
}

impl Hits {
    fn parse(text: &str) -> Option<Self> {
        match text.strip_prefix('@') {
            Some(text) => text.parse().ok().map(Self::Only),
            None => text.parse().ok().map(Self::Every),
        }
    }
}

impl FaultInjection {
    /// Reads the environment's form: `KIND=HITS` for one or more kinds, between commas. HITS is `N` for each
    /// Nth, or `@N` for the Nth alone; for `delay`, with `:MICROSECONDS` behind it.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut faults = Self::default();
        for part in text.split(',') {
            let (kind, value) = part.trim().split_once('=')?;
            let wanted = match kind {
                "drop" => &mut faults.drop,
                "corrupt" => &mut faults.corrupt,
                "rnr" => &mut faults.rnr,
                "reg_mr" => &mut faults.reg_mr,
                "delay" => {
                    let (hits, micros) = value.split_once(':')?;
                    let by = Duration::from_micros(micros.parse().ok()?);
                    faults.delay = Some((Hits::parse(hits)?, by));
                    continue;
                }
                _ => return None,
            };
            *wanted = Some(Hits::parse(value)?);
        }
        Some(faults)
    }
}

/// A fault, and how many operations it could have hit.
#[derive(Debug)]
struct Rule {
    hits: Hits,
    count: AtomicU64,
}

impl Rule {
    fn new(hits: Hits) -> Self {
        Self {
            hits,
            count: AtomicU64::new(0),
        }
    }

    fn strikes(&self) -> bool {
        let number = self.count.fetch_add(1, Ordering::Relaxed) + 1;
        match self.hits {
            Hits::Every(each) => number.is_multiple_of(each.get()),
            Hits::Only(one) => number == one.get(),
        }
    }
}

fn strikes(rule: &Option<Rule>) -> bool {
    rule.as_ref().is_some_and(Rule::strikes)
}

/// The faults of a process.
#[derive(Debug)]
pub(super) struct Injector {
    drop: Option<Rule>,
    delay: Option<(Rule, Duration)>,
    corrupt: Option<Rule>,
    rnr: Option<Rule>,
    reg_mr: Option<Rule>,
}

/// What becomes of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Fate {
    pub is_lost: bool,
    pub delay: Option<Duration>,
    pub is_corrupted: bool,
    pub finds_no_receive: bool,
}

impl Injector {
    pub(super) fn new(wanted: &FaultInjection) -> Self {
        Self {
            drop: wanted.drop.map(Rule::new),
            delay: wanted.delay.map(|(hits, by)| (Rule::new(hits), by)),
            corrupt: wanted.corrupt.map(Rule::new),
            rnr: wanted.rnr.map(Rule::new),
            reg_mr: wanted.reg_mr.map(Rule::new),
        }
    }

    /// Of the next request: whether it carries data that can be changed, and whether it needs a receive.
    pub(super) fn next_request(&self, has_data: bool, needs_receive: bool) -> Fate {
        Fate {
            is_lost: strikes(&self.drop),
            delay: self
                .delay
                .as_ref()
                .and_then(|(rule, by)| rule.strikes().then_some(*by)),
            is_corrupted: has_data && strikes(&self.corrupt),
            finds_no_receive: needs_receive && strikes(&self.rnr),
        }
    }

    /// Whether the next registration fails.
    pub(super) fn fails_registration(&self) -> bool {
        strikes(&self.reg_mr)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(number: u64) -> NonZeroU64 {
        NonZeroU64::new(number).unwrap()
    }

    #[test]
    fn what_is_wanted_is_read() {
        let faults = FaultInjection::parse("drop=100, delay=@2:50,corrupt=@3,rnr=7,reg_mr=@1");
        let expected = FaultInjection {
            drop: Some(Hits::Every(number(100))),
            delay: Some((Hits::Only(number(2)), Duration::from_micros(50))),
            corrupt: Some(Hits::Only(number(3))),
            rnr: Some(Hits::Every(number(7))),
            reg_mr: Some(Hits::Only(number(1))),
        };
        assert_eq!(faults, Some(expected));
        for bad in [
            "",
            "drop",
            "drop=",
            "drop=0",
            "drop=@0",
            "drop=-1",
            "delay=3",
            "delay=3:",
            "lose=1",
            "drop=1;rnr=2",
            "drop=1,",
        ] {
            assert_eq!(FaultInjection::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_what_a_fault_can_hit_is_counted() {
        let injector = Injector::new(&FaultInjection {
            drop: Some(Hits::Every(number(3))),
            corrupt: Some(Hits::Only(number(2))),
            rnr: Some(Hits::Every(number(2))),
            ..FaultInjection::default()
        });
        let requests = [
            (true, true),
            (false, true),
            (true, false),
            (true, false),
            (true, true),
            (true, true),
        ];
        let fates = requests.map(|(data, receive)| injector.next_request(data, receive));
        assert_eq!(
            fates.map(|fate| fate.is_lost),
            [false, false, true, false, false, true]
        );
        assert_eq!(
            fates.map(|fate| fate.is_corrupted),
            [false, false, true, false, false, false]
        );
        assert_eq!(
            fates.map(|fate| fate.finds_no_receive),
            [false, true, false, false, false, true]
        );
        assert!(!injector.fails_registration());
    }
}
