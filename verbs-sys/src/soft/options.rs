//! How the software device is opened.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::injection::FaultInjection;
use super::layout::MAX_SLOT;

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
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Options {
    /// Charge this for each registration; `None` for nothing.
    pub registration_cost: Option<RegistrationCost>,
    /// The owner of memory runs every copy in it and checks every key itself, also for peers of the
    /// same host: an rkey means what it does on a NIC, at the price of a system call and a thread's
    /// wake-up for each operation. It holds for the whole process, from the first context that is
    /// opened with it on, and for connections made afterwards.
    pub strict: bool,
    /// Memory that is not the device's own may be reached by `process_vm_readv(2)` and `writev`, where the
    /// kernel permits it. Otherwise its owner copies: the first request of a queue pair that needs such
    /// memory of the peer, or a message of more than 2 KiB from such memory that the peer cannot fetch,
    /// makes the queue pair's requests go through a socket from then on, at the price that they have in
    /// [strict](Self::strict) mode. Memory from [`Context::alloc_memory`](crate::Context::alloc_memory)
    /// needs none of this. On by default; it holds as strict mode does, and for what this process does:
    /// the peer's has an option of its own.
    pub cma: bool,
    /// Where queue pairs of other hosts may connect to this process, over TCP. `None`: nowhere, and no
    /// socket listens. It holds for the whole process.
    pub listen: Option<Listen>,
    /// Faults to be made on purpose; `None` for none. It holds for the whole process, from the first context
    /// that is opened with some on, and for queue pairs made afterwards, whose requests are then slower.
    pub faults: Option<FaultInjection>,
}

/// Where a process listens for queue pairs of other hosts.
///
/// A queue pair number tells which process of its host it belongs to, by a *slot* from 1 to 1023, and
/// each process listens at the port `base_port` + slot. So the exchange of number, PSN and GID that
/// applications make anyway is all that a peer needs, if both use the same base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listen {
    /// The local address, or the unspecified one for all of them.
    pub address: IpAddr,
    /// The port of slot 0, which is never used.
    pub base_port: u16,
}

impl Listen {
    /// The base port where none is given.
    pub const BASE_PORT: u16 = 18_600;

    /// Reads the environment's form: `ADDRESS`, or `ADDRESS:BASE_PORT`.
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let listen = match text.parse::<SocketAddr>() {
            Ok(at) => Self {
                address: at.ip(),
                base_port: at.port(),
            },
            Err(_) => Self {
                address: text.parse().ok()?,
                base_port: Self::BASE_PORT,
            },
        };
        // Every slot needs its port.
        let highest = u32::from(listen.base_port) + MAX_SLOT - 1;
        (listen.base_port != 0 && highest <= u32::from(u16::MAX)).then_some(listen)
    }

    /// Where the process in a slot listens.
    pub(super) fn port(&self, slot: u32) -> u16 {
        self.base_port.saturating_add(slot as u16)
    }
}

impl Default for Options {
    fn default() -> Self {
        Self {
            registration_cost: None,
            strict: false,
            cma: true,
            listen: None,
            faults: None,
        }
    }
}

impl Options {
    /// The variable that sets [`registration_cost`](Self::registration_cost): `published`, or two
    /// numbers of nanoseconds, `BASE,PER_PAGE`.
    pub const REGISTRATION_COST_VARIABLE: &'static str = "VERBS_SOFT_REGISTRATION_COST";
    /// The variable that sets [`strict`](Self::strict): `1` or `0`.
    pub const STRICT_VARIABLE: &'static str = "VERBS_SOFT_STRICT";
    /// The variable that sets [`cma`](Self::cma): `1` or `0`.
    pub const CMA_VARIABLE: &'static str = "VERBS_SOFT_CMA";
    /// The variable that sets [`listen`](Self::listen): `ADDRESS` or `ADDRESS:BASE_PORT`.
    pub const LISTEN_VARIABLE: &'static str = "VERBS_SOFT_LISTEN";
    /// The variable that sets [`faults`](Self::faults): `KIND=HITS` for each kind, between commas, where HITS is
    /// `N` for each Nth or `@N` for the Nth alone; `delay=HITS:MICROSECONDS`.
    pub const FAULTS_VARIABLE: &'static str = "VERBS_SOFT_FAULTS";

    /// The options that the environment asks for. A value that cannot be read is reported to the log
    /// and ignored.
    #[must_use]
    pub fn from_env() -> Self {
        Self {
            registration_cost: read(
                Self::REGISTRATION_COST_VARIABLE,
                "`published` or `BASE_NS,PER_PAGE_NS`",
                RegistrationCost::parse,
            ),
            strict: read(Self::STRICT_VARIABLE, "`0` or `1`", parse_switch).unwrap_or(false),
            cma: read(Self::CMA_VARIABLE, "`0` or `1`", parse_switch).unwrap_or(true),
            listen: read(
                Self::LISTEN_VARIABLE,
                "`ADDRESS` or `ADDRESS:BASE_PORT`, with 1023 ports above the base",
                Listen::parse,
            ),
            faults: read(
                Self::FAULTS_VARIABLE,
                "`KIND=N` or `KIND=@N` between commas: drop, corrupt, rnr, reg_mr, and delay=N:MICROSECONDS",
                FaultInjection::parse,
            ),
        }
    }
}

fn parse_switch(text: &str) -> Option<bool> {
    match text.trim() {
        "1" => Some(true),
        "0" | "" => Some(false),
        _ => None,
    }
}

/// A switch of the drop-in library's own, if the environment has it.
#[cfg(feature = "drop-in")]
pub(crate) fn switch_of(variable: &'static str) -> Option<bool> {
    read(variable, "`0` or `1`", parse_switch)
}

fn read<T>(
    variable: &'static str,
    wanted: &'static str,
    parse: impl Fn(&str) -> Option<T>,
) -> Option<T> {
    let value = std::env::var(variable).ok()?;
    let parsed = parse(&value);
    if parsed.is_none() {
        tracing::error!(
            variable,
            value,
            wanted,
            "cannot read an option of soft0; it is ignored"
        );
    }
    parsed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn where_to_listen_is_read() {
        let listen = Listen::parse("10.0.0.1").unwrap();
        assert_eq!(listen.base_port, Listen::BASE_PORT);
        assert_eq!(listen.port(1023), Listen::BASE_PORT + 1023);
        assert_eq!(Listen::parse("[::1]:7000").unwrap().base_port, 7000);
        for bad in ["", "host", "10.0.0.1:0", "10.0.0.1:65000", "10.0.0.1:99999"] {
            assert_eq!(Listen::parse(bad), None, "{bad}");
        }
        assert_eq!(parse_switch("1"), Some(true));
        assert_eq!(parse_switch("yes"), None);
    }

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
