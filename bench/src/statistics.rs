//! Medians over rounds and quantiles within one.

use hdrhistogram::Histogram;

/// The median, the mean of the middle two for an even count; `None` of nothing.
pub fn median(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let values = sorted(values);
    let middle = values.len() / 2;
    match values.len() {
        0 => None,
        length if length % 2 == 1 => Some(values[middle]),
        _ => Some((values[middle - 1] + values[middle]) / 2.0),
    }
}

/// The value that a fraction `at` of all does not exceed; `None` of nothing.
pub fn quantile(values: impl IntoIterator<Item = f64>, at: f64) -> Option<f64> {
    let values = sorted(values);
    let last = values.len().checked_sub(1)?;
    values.get((last as f64 * at).round() as usize).copied()
}

/// Those that are numbers, from the least on.
fn sorted(values: impl IntoIterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values
        .into_iter()
        .filter(|value| value.is_finite())
        .collect();
    values.sort_unstable_by(f64::total_cmp);
    values
}

/// Latencies of single operations, in nanoseconds, kept to three digits up to 100 s.
#[derive(Clone, Debug)]
pub struct Latencies(Histogram<u64>);

impl Latencies {
    /// No latencies yet.
    pub fn new() -> Self {
        // The bounds are constants that the constructor accepts.
        Self(Histogram::new_with_bounds(1, 100_000_000_000, 3).expect("constant bounds"))
    }

    /// Adds one operation of `nanoseconds`.
    pub fn record(&mut self, nanoseconds: u64) {
        self.0.saturating_record(nanoseconds.max(1));
    }

    /// Operations recorded.
    pub fn len(&self) -> u64 {
        self.0.len()
    }

    /// Whether nothing was recorded.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The latency that a fraction `quantile` of all operations did not exceed, in microseconds.
    pub fn quantile_us(&self, quantile: f64) -> f64 {
        self.0.value_at_quantile(quantile) as f64 / 1e3
    }
}

impl Default for Latencies {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        let values = || (1..=21).rev().map(f64::from);
        assert_eq!(quantile(values(), 0.1), Some(3.0));
        assert_eq!(quantile(values(), 1.0), Some(21.0));
        assert_eq!(quantile([f64::NAN], 0.1), None);
    }

    #[test]
    fn medians() {
        assert_eq!(median([]), None);
        assert_eq!(median([3.0]), Some(3.0));
        assert_eq!(median([9.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median([4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(median([f64::NAN, 1.0]), Some(1.0));
    }

    #[test]
    fn quantiles_are_in_microseconds() {
        let mut latencies = Latencies::new();
        for microsecond in 1..=100 {
            latencies.record(microsecond * 1000);
        }
        assert_eq!(latencies.len(), 100);
        assert!((latencies.quantile_us(0.50) - 50.0).abs() < 0.1);
        assert!((latencies.quantile_us(0.99) - 99.0).abs() < 0.2);
    }

    #[test]
    fn latencies_out_of_range_are_kept_at_the_edge() {
        let mut latencies = Latencies::new();
        latencies.record(0);
        latencies.record(u64::MAX);
        assert_eq!(latencies.len(), 2);
        assert!(latencies.quantile_us(1.0) >= 99e6);
    }
}
