//! Numbers for people.

/// Three digits, with `k`, `M` or `G` from a thousand on.
pub fn short(value: f64) -> String {
    let (scaled, unit) = match value.abs() {
        magnitude if magnitude >= 999.5e6 => (value / 1e9, " G"),
        magnitude if magnitude >= 999.5e3 => (value / 1e6, " M"),
        magnitude if magnitude >= 9995.0 => (value / 1e3, " k"),
        _ => (value, ""),
    };
    format!("{}{unit}", digits(scaled))
}

/// Three digits, at least one, without an exponent.
pub fn digits(value: f64) -> String {
    if !value.is_finite() {
        return "-".to_owned();
    }
    match value.abs() {
        0.0 => "0".to_owned(),
        magnitude if magnitude >= 99.95 => format!("{value:.0}"),
        magnitude if magnitude >= 9.995 => format!("{value:.1}"),
        magnitude if magnitude >= 0.0995 => format!("{value:.2}"),
        magnitude if magnitude >= 0.0005 => format!("{value:.3}"),
        _ => format!("{value:.1e}"),
    }
}

/// A time in the unit in which it has at most four digits before the point.
pub fn time(nanoseconds: f64) -> String {
    match nanoseconds.abs() {
        magnitude if magnitude >= 9.9995e6 => format!("{} ms", digits(nanoseconds / 1e6)),
        magnitude if magnitude >= 9999.5 => format!("{} us", digits(nanoseconds / 1e3)),
        _ => format!("{} ns", digits(nanoseconds)),
    }
}

/// A ratio, as `3.2x`, or nothing.
pub fn times(ratio: Option<f64>) -> String {
    ratio.map_or_else(String::new, |ratio| format!("{}x", digits(ratio)))
}

/// A number of bytes, in binary units where they are whole.
pub fn bytes(size: usize) -> String {
    match size {
        size if size >= 1 << 20 && size % (1 << 20) == 0 => format!("{} MiB", size >> 20),
        size if size >= 1 << 10 && size % (1 << 10) == 0 => format!("{} KiB", size >> 10),
        size => format!("{size} B"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_three_digits() {
        let shown = [
            0.0,
            0.000_1,
            0.001,
            0.123_4,
            7.456,
            99.94,
            123.4,
            9994.0,
            12_345.0,
            2_134_567.0,
            3e9,
        ];
        let expected = [
            "0", "1.0e-4", "0.001", "0.12", "7.46", "99.9", "123", "9994", "12.3 k", "2.13 M",
            "3.00 G",
        ];
        assert_eq!(shown.map(short), expected);
        assert_eq!(digits(f64::NAN), "-");
    }

    #[test]
    fn times_keep_to_few_digits() {
        let shown = [2.68, 9999.0, 12_345.0, 531_153.0, 12.0e6];
        let expected = ["2.68 ns", "9999 ns", "12.3 us", "531 us", "12.0 ms"];
        assert_eq!(shown.map(time), expected);
        assert_eq!(time(f64::NAN), "- ns");
    }

    #[test]
    fn ratios_and_sizes() {
        assert_eq!(times(Some(3.21)), "3.21x");
        assert_eq!(times(None), "");
        assert_eq!(
            [128, 4096, 51_200, 1 << 20, 1025].map(bytes),
            ["128 B", "4 KiB", "50 KiB", "1 MiB", "1025 B"]
        );
    }
}
