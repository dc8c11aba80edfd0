//! Which tests are skipped on `soft0`, and why: the table that runs are held to, and that the record shows.

use std::fmt::Write as _;

use anyhow::{Result, bail};

use super::MODULES;
use super::output::Skip;

/// Tests that are skipped for one reason.
struct Known {
    /// What the tests ask for.
    what: &'static str,
    /// Why it is not there.
    why: &'static str,
    /// Part of what each says.
    says: &'static str,
    tests: &'static [&'static str],
}

const TABLE: &[Known] = &[
    Known {
        what: "packets as they are, and flow steering and receive-side scaling, which are about them",
        why: "a device in user space has no port whose frames it could hand out: `IBV_QPT_RAW_PACKET` gives `EOPNOTSUPP`",
        says: "is not supported",
        tests: &[
            "test_flow.FlowTest.test_eth_spec_flow_traffic",
            "test_flow.FlowTest.test_ipv4_spec_flow_traffic",
            "test_flow.FlowTest.test_ipv6_spec_flow_traffic",
            "test_flow.FlowTest.test_tcp_spec_flow_traffic",
            "test_flow.FlowTest.test_udp_spec_flow_traffic",
            "test_qp.QPTest.test_create_raw_qp_ex_no_attr",
            "test_qp.QPTest.test_create_raw_qp_ex_with_attr",
            "test_qp.QPTest.test_create_raw_qp_no_attr",
            "test_qp.QPTest.test_create_raw_qp_with_attr",
            "test_qp.QPTest.test_query_raw_qp",
            "test_rss_traffic.RSSTrafficTest.test_rss_traffic",
        ],
    },
    Known {
        what: "memory of a graphics card (dma-buf)",
        why: "`ibv_reg_dmabuf_mr` gives `EOPNOTSUPP`; without a card the tests do not come so far",
        says: "is not supported",
        tests: &[
            "test_mr.DmaBufMRTest.test_dmabuf_dereg_mr",
            "test_mr.DmaBufMRTest.test_dmabuf_dereg_mr_twice",
            "test_mr.DmaBufMRTest.test_dmabuf_lkey",
            "test_mr.DmaBufMRTest.test_dmabuf_read",
            "test_mr.DmaBufMRTest.test_dmabuf_reg_mr",
            "test_mr.DmaBufMRTest.test_dmabuf_reg_mr_bad_flags",
            "test_mr.DmaBufMRTest.test_dmabuf_rkey",
            "test_mr.DmaBufMRTest.test_dmabuf_write",
            "test_mr.DmaBufTestCase.test_dmabuf_rc_traffic",
            "test_mr.DmaBufTestCase.test_dmabuf_rdma_traffic",
        ],
    },
    Known {
        what: "tag matching",
        why: "not implemented; the test takes the answer for one about completion queues",
        says: "Extended CQ is not supported",
        tests: &[
            "test_tag_matching.TMTest.test_tm_no_tag",
            "test_tag_matching.TMTest.test_tm_rndv",
            "test_tag_matching.TMTest.test_tm_traffic",
            "test_tag_matching.TMTest.test_tm_unexpected_tag",
        ],
    },
    Known {
        what: "multicast",
        why: "not implemented: `rdma_join_multicast` gives `EOPNOTSUPP`",
        says: "Multicast is not supported",
        tests: &[
            "test_rdmacm.CMTestCase.test_rdmacm_async_ex_leave_multicast_traffic",
            "test_rdmacm.CMTestCase.test_rdmacm_async_ex_multicast_traffic",
            "test_rdmacm.CMTestCase.test_rdmacm_async_multicast_traffic",
        ],
    },
    Known {
        what: "huge pages",
        why: "the machine has none unless its administrator sets some aside; where there are, the tests run",
        says: "There are no huge pages",
        tests: &[
            "test_odp.OdpTestCase.test_odp_rc_huge_traffic",
            "test_odp.OdpTestCase.test_odp_rc_huge_user_addr_traffic",
            "test_parent_domain.ParentDomainTrafficTest.test_huge_page_traffic",
        ],
    },
    Known {
        what: "an empty entry of the GID table",
        why: "`soft0`'s table has none",
        says: "All gid indices populated",
        tests: &["test_device.DeviceTest.test_query_gid_ex_bad_flow"],
    },
];

/// Fails if a test was skipped that should not be, or for another reason.
pub fn check(skips: &[Skip]) -> Result<()> {
    for Skip { test, said } in skips {
        let known = |known: &&Known| known.tests.iter().any(|known| test == known);
        let Some(known) = TABLE.iter().find(known) else {
            bail!("{test} was skipped, which is not known: {said}");
        };
        if !said.contains(known.says) {
            bail!("{test} was skipped for a reason that is not known: {said}");
        }
    }
    Ok(())
}

/// The section of the record.
pub fn render() -> String {
    let passed: usize = MODULES.iter().map(|module| module.passes).sum();
    let skipped: usize = TABLE.iter().map(|known| known.tests.len()).sum();
    // Writing to a string does not fail.
    let mut text = format!(
        include_str!("head.md"),
        modules = MODULES.len(),
        all = passed + skipped,
        passed = passed,
        skipped = skipped,
    );
    for known in TABLE {
        let mut tests: Vec<&str> = Vec::new();
        for test in known.tests {
            tests.push(test.rsplit('.').next().unwrap_or(test));
        }
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            known.what,
            known.tests.len(),
            known.why,
            tests.join(", ")
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn skip(test: &str, said: &str) -> Skip {
        Skip {
            test: test.into(),
            said: said.into(),
        }
    }

    #[test]
    fn a_skip_needs_its_own_reason() {
        let test = "test_tag_matching.TMTest.test_tm_rndv";
        check(&[skip(test, "Extended CQ is not supported")]).unwrap();
        check(&[skip(test, "there is no device")]).unwrap_err();
        check(&[skip(
            "test_tag_matching.TMTest.test_tm_other",
            "Extended CQ is not supported",
        )])
        .unwrap_err();
    }

    #[test]
    fn the_record_has_the_table_as_it_is() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/conformance.md");
        let record = std::fs::read_to_string(path).unwrap();
        assert!(record.contains(&render()), "{}", render());
    }
}
