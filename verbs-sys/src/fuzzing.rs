//! Parsers of bytes that a peer controls, for a fuzzer. No part of the API: it is there only with
//! `--cfg fuzzing`, and in this crate's own tests.

#[path = "../../fuzz/target.rs"]
mod target;

pub use target::Target;

use crate::{Gid, QueuePairEndpoint};

/// All of them.
pub fn targets() -> Vec<Target> {
    let text = Target {
        name: "endpoint",
        run: endpoint,
        seeds: endpoints,
    };
    crate::soft::fuzzing::TARGETS
        .iter()
        .copied()
        .chain([text])
        .collect()
}

/// The text form of what two sides tell each other.
fn endpoint(bytes: &[u8]) -> bool {
    let Ok(text) = str::from_utf8(bytes) else {
        return false;
    };
    match text.parse::<QueuePairEndpoint>() {
        Ok(endpoint) => {
            assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
            true
        }
        Err(error) => {
            assert!(error.to_string().len() < 1000, "an error of bounded length");
            false
        }
    }
}

fn endpoints() -> Vec<Vec<u8>> {
    let endpoint = QueuePairEndpoint {
        qp_num: 0x11,
        psn: 0xff_fff0,
        gid: Gid([0xfe; 16]),
        lid: 7,
        mtu: 5,
    };
    vec![endpoint.to_string().into_bytes(), b"0:0:0:0:1".to_vec()]
}

#[test]
fn parsers_stand_what_is_near_to_good_bytes() {
    target::try_near_the_seeds(&targets());
}
