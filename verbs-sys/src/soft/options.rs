//! How the software device is opened.

use std::time::Duration;

/// What registering memory shall cost on the software device, beside the work it does anyway: a
/// model of a device whose registrations are dear, for comparisons. Off by default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistrationCost {
    /// Of each registration.
    pub base: Duration,
    /// Of each page of 4 KiB in it.
    pub per_page: Duration,
}

impl RegistrationCost {
    /// About 50 us for one page of 4 KiB, as KRCore (USENIX ATC 2022) reports for a ConnectX-4 class
    /// RNIC; the share of each page is that of pinning it with `mlock`, about half a microsecond.
    pub const PUBLISHED: Self = Self {
        base: Duration::from_nanos(49_500),
        per_page: Duration::from_nanos(500),
    };

    /// The time a registration of `len` bytes shall take at least.
    #[must_use]
    pub fn of(&self, len: usize) -> Duration {
        let pages = u32::try_from(len.div_ceil(4096)).unwrap_or(u32::MAX);
        self.base
            .saturating_add(self.per_page.saturating_mul(pages))
    }

    /// Reads the environment's form: `published`, or `BASE_NS,PER_PAGE_NS`.
    fn parse(text: &str) -> Option<Self> {
        if text == "published" {
            return Some(Self::PUBLISHED);
        }
        let (base, per_page) = text.split_once(',')?;
        let nanos = |text: &str| Some(Duration::from_nanos(text.trim().parse().ok()?));
        Some(Self {
            base: nanos(base)?,
            per_page: nanos(per_page)?,
        })
    }
}

/// How to open the software device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Charge this for each registration; `None` for nothing.
    pub registration_cost: Option<RegistrationCost>,
}

impl Options {
    /// The variable that sets [`registration_cost`](Self::registration_cost): `published`, or two
    /// numbers of nanoseconds, `BASE,PER_PAGE`.
    pub const REGISTRATION_COST_VARIABLE: &'static str = "VERBS_SOFT_REGISTRATION_COST";

    /// The options that the environment asks for. A value that cannot be read is reported to the log
    /// and ignored.
    #[must_use]
    pub fn from_env() -> Self {
        let mut options = Self::default();
        if let Ok(text) = std::env::var(Self::REGISTRATION_COST_VARIABLE) {
            options.registration_cost = RegistrationCost::parse(&text);
            if options.registration_cost.is_none() {
                let variable = Self::REGISTRATION_COST_VARIABLE;
                tracing::error!(
                    variable,
                    value = text,
                    "not `published` nor `BASE_NS,PER_PAGE_NS`"
                );
            }
        }
        options
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cost_is_read_and_computed() {
        assert_eq!(
            RegistrationCost::parse("published"),
            Some(RegistrationCost::PUBLISHED)
        );
        let cost = RegistrationCost::parse("1000, 20").unwrap();
        assert_eq!(cost.of(4096), Duration::from_nanos(1020));
        assert_eq!(cost.of(4097), Duration::from_nanos(1040));
        assert_eq!(RegistrationCost::PUBLISHED.of(1), Duration::from_micros(50));
        for bad in ["", "1000", "a,b", "1,2,3", "-1,2"] {
            assert_eq!(RegistrationCost::parse(bad), None, "{bad}");
        }
    }
}
