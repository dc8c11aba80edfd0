//! The table of what is run.

mod crates;
mod ibverbs_utils;
mod libfabric;
mod librdmacm_dev;
mod perftest;
mod perftest_cm;
pub mod pyverbs;
mod rdmacm_utils;
mod ucx;

use super::case::Case;

/// Every case, in the order in which they are run.
pub fn all() -> Vec<Case> {
    [
        ibverbs_utils::cases(),
        pyverbs::cases(),
        rdmacm_utils::cases(),
        librdmacm_dev::cases(),
        perftest_cm::cases(),
        libfabric::cases(),
        crates::cases(),
        perftest::cases(),
        ucx::cases(),
    ]
    .concat()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    #[test]
    fn names_are_of_one_case_each() {
        let mut seen = HashSet::new();
        for case in super::all() {
            assert!(
                seen.insert(case.name.clone()),
                "{} is there twice",
                case.name
            );
        }
    }
}
