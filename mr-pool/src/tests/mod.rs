//! Tests of the whole pool over a source of memory that needs no device.

mod fake;

#[cfg(not(loom))]
mod ceiling;
#[cfg(loom)]
mod loom;
#[cfg(not(loom))]
mod model;
#[cfg(not(loom))]
mod pool;
#[cfg(not(loom))]
mod steady;
#[cfg(not(loom))]
mod threads;

use std::time::Duration;

use crate::engine::Limits;
use crate::grow::HUGE_PAGE;
use crate::{Kind, Pool, Private};
use fake::Fake;

/// Limits that nothing in a test reaches.
const ROOMY: Limits = Limits {
    ceiling: 1 << 30,
    high_water: usize::MAX,
    region_size: HUGE_PAGE,
    wait: None,
    unpooled: false,
};

/// Longer than any test: a wait that ends by it shows as a test that hangs.
const FOREVER: Duration = Duration::MAX;

fn pool(fake: &Fake, limits: Limits) -> Pool<Private> {
    pool_of(fake, limits)
}

fn pool_of<K: Kind>(fake: &Fake, limits: Limits) -> Pool<K> {
    Pool::from_source(Box::new(fake.source()), limits)
}
