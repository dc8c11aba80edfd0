//! What is known to differ in random programs, and who is right.

use std::fmt::Write as _;

/// A known difference: steps, and what each device says there that the other does not.
pub struct Known {
    /// Steps, by what the programs call them. `*` stands for any text and `?` for a character, here
    /// and below.
    kinds: &'static [&'static str],
    /// Every line that only `soft0` has is one of these.
    soft0: &'static [&'static str],
    /// Every line that only `rxe0` has is one of these.
    rxe0: &'static [&'static str],
    /// In words.
    pub what: &'static str,
    /// What `soft0` does, in words.
    soft0_does: &'static str,
    /// What `rxe0` does, in words.
    rxe0_does: &'static str,
    /// Who is right, by which page or section.
    right: &'static str,
}

/// A send completion flushed, or a receive.
const FLUSHED: &str = " ?? * WrFlushErr";
const STATE: &str = " state *";
const MEMORY: &str = " memory *";

/// The table. The man pages are rdma-core's; the standard is the InfiniBand Architecture
/// Specification, volume 1.
const TABLE: &[Known] = &[
    Known {
        kinds: &[
            "Local* ?? WRITE*",
            "Local* ?? SEND*",
            "StaleLocal* ?c *",
            "Local* Rc READ",
            "window as lkey *",
        ],
        soft0: &[" ?s * LocProtErr"],
        rxe0: &[" ?s * LocQpOpErr", MEMORY],
        what: "a local buffer that is not registered as it should be",
        soft0_does: "`LOC_PROT_ERR`, nothing is sent",
        rxe0_does: "`LOC_QP_OP_ERR` of what is sent; some packets may have gone",
        right: "ibv_poll_cq(3) has `LOC_PROT_ERR` for it; how much was sent before is left open",
    },
    Known {
        kinds: &[
            "Local* Rc CMP_SWAP",
            "Local* Rc FETCH_ADD",
            "StaleLocal* Rc CMP_SWAP",
            "StaleLocal* Rc FETCH_ADD",
            "window as lkey CMP_SWAP",
            "window as lkey FETCH_ADD",
        ],
        soft0: &[],
        rxe0: &[MEMORY],
        what: "an atomic whose result has no place to go",
        soft0_does: "is not executed",
        rxe0_does: "is executed, then fails",
        right: "either: the status is the same, and the standard leaves open what was done",
    },
    Known {
        kinds: &["ReceiveKey *", "ReceiveRange *", "ReceiveReadOnly *"],
        soft0: &[" ?r * LocProtErr"],
        rxe0: &[" ?r * LocQpOpErr", MEMORY],
        what: "a receive whose buffer cannot be written",
        soft0_does: "`LOC_PROT_ERR` at the receiver, nothing is written",
        rxe0_does: "`LOC_QP_OP_ERR`; good elements in front may be written",
        right: "ibv_poll_cq(3) has `LOC_PROT_ERR` for it",
    },
    Known {
        kinds: &["ShortReceive *"],
        soft0: &[" ?r * LocLenErr", " ?s * RemInvReqErr"],
        rxe0: &[" ?r * LocQpOpErr", " ?s * RemOpErr", MEMORY],
        what: "a message longer than its receive",
        soft0_does: "`LOC_LEN_ERR` at the receiver, `REM_INV_REQ_ERR` at the sender",
        rxe0_does: "`LOC_QP_OP_ERR` and `REM_OP_ERR`",
        right: "ibv_poll_cq(3): a local length error is the receiver's, an invalid request the sender's",
    },
    Known {
        kinds: &["Misaligned *"],
        soft0: &[" ?s * RemInvReqErr", FLUSHED, " state Err Err"],
        rxe0: &[" post EINVAL at ?"],
        what: "a misaligned atomic",
        soft0_does: "`REM_INV_REQ_ERR`, found by the responder",
        rxe0_does: "`EINVAL` from ibv_post_send",
        right: "the standard gives it to the responder; either keeps the memory as it was",
    },
    Known {
        kinds: &["AtomicLength *"],
        soft0: &[" ?s * LocLenErr", FLUSHED, STATE],
        rxe0: &[" post EINVAL at ?", " ?s * ok *", MEMORY],
        what: "an atomic whose element has not 8 bytes",
        soft0_does: "`LOC_LEN_ERR`",
        rxe0_does: "`EINVAL` from ibv_post_send for fewer, and takes more",
        right: "the standard has atomics of 8 bytes only, and the length error for others",
    },
    Known {
        kinds: &["InlineRead *"],
        soft0: &[" post EINVAL at ?"],
        rxe0: &[" ?s * LocProtErr", FLUSHED, STATE, MEMORY],
        what: "an inline READ or atomic",
        soft0_does: "`EINVAL` from ibv_post_send",
        rxe0_does: "takes it and fails with `LOC_PROT_ERR`; an atomic is executed",
        right: "ibv_post_send(3): inline is valid for SEND and WRITE only",
    },
    Known {
        kinds: &["LongDatagram *"],
        soft0: &[" ?s * LocLenErr", FLUSHED, STATE],
        rxe0: &[" ?s * ok Send"],
        what: "a datagram longer than a packet",
        soft0_does: "`LOC_LEN_ERR`",
        rxe0_does: "succeeds, and nothing is sent",
        right: "open: ibv_poll_cq(3) has the length error; the kernel's source cites C10-93.1.1 of the \
                standard for no error",
    },
    Known {
        kinds: &["WrongType *"],
        soft0: &[" post EINVAL at ?"],
        rxe0: &[" ?s * LocQpOpErr", FLUSHED, STATE],
        what: "an operation that an unreliable connection or a datagram does not have",
        soft0_does: "`EINVAL` from ibv_post_send",
        rxe0_does: "`LOC_QP_OP_ERR`",
        right: "the table of ibv_post_send(3) does not have it; either refuses",
    },
    Known {
        kinds: &["LocalInvalidate *"],
        soft0: &[" ?s * MwBindErr"],
        rxe0: &[" ?s * LocQpOpErr"],
        what: "the local invalidation of a key that is no window's",
        soft0_does: "`MW_BIND_ERR`",
        rxe0_does: "`LOC_QP_OP_ERR`",
        right: "the standard's memory management operation error, which the verbs call `MW_BIND_ERR`",
    },
    Known {
        kinds: &["RemoteInvalidate *"],
        soft0: &[" ?s * RemAccessErr", FLUSHED, " state Err Err"],
        rxe0: &[" ?s * ok Send", FLUSHED, STATE, " ?r * *Err", MEMORY],
        what: "a SEND that invalidates a key that is no window's",
        soft0_does: "is refused: `REM_ACCESS_ERR`",
        rxe0_does: "succeeds at the sender; the receiver goes to ERR",
        right: "open: rdma-core's pages do not say whether the sender learns of it; the receiver does \
                at either",
    },
    Known {
        kinds: &[
            "Remote* Rc WRITE_IMM",
            "StaleRemote* Rc WRITE_IMM",
            "*window* WRITE_IMM",
            "former key WRITE_IMM",
        ],
        soft0: &[" ?r * WrFlushErr"],
        rxe0: &[" ?r * RemAccessErr"],
        what: "the receive of a WRITE with immediate that is refused",
        soft0_does: "is flushed like the others",
        rxe0_does: "ends with `REM_ACCESS_ERR`",
        right: "ibv_poll_cq(3) has that status for the requester; no receive was taken yet",
    },
    Known {
        kinds: &["beyond window *"],
        soft0: &[" ?s * RemAccessErr", FLUSHED, " state Err Err"],
        rxe0: &[" ?? * ok *", MEMORY],
        what: "access beyond a memory window, within its region",
        soft0_does: "`REM_ACCESS_ERR`",
        rxe0_does: "is executed",
        right: "ibv_bind_mw(3): the window is from `addr` for `length` bytes",
    },
    Known {
        kinds: &["bind to foreign region Type1"],
        soft0: &[" bind EPERM"],
        rxe0: &[" ?s * MwBindErr", FLUSHED, STATE],
        what: "binding a window of type 1 to a region of another protection domain",
        soft0_does: "`EPERM` from ibv_bind_mw, as rdma-core's other providers",
        rxe0_does: "`MW_BIND_ERR`",
        right: "either: ibv_bind_mw(3) has both ways to fail",
    },
    Known {
        kinds: &["* with an unchecked value *"],
        soft0: &[" modify EINVAL", " now *", STATE],
        rxe0: &[" now *", STATE],
        what: "a `pkey_index`, `path_mtu`, `is_global`, `dest_qp_num`, timer or count that is out of range",
        soft0_does: "`EINVAL` from ibv_modify_qp",
        rxe0_does: "takes it",
        right: "the standard has ibv_modify_qp refuse what is out of range",
    },
    Known {
        kinds: &["change * and of the address Uc"],
        soft0: &[],
        rxe0: &[" modify EINVAL"],
        what: "another address for an unreliable connection in SQD",
        soft0_does: "is taken",
        rxe0_does: "`EINVAL`: the kernel adds the port, which only a reliable one may change there",
        right: "the kernel's own table of transitions has it",
    },
    Known {
        kinds: &["early send", "early receive"],
        soft0: &[" post EINVAL at 0"],
        rxe0: &[" post EINVAL"],
        what: "a request in a state that does not take it",
        soft0_does: "`EINVAL`, and `bad_wr` names it",
        rxe0_does: "`EINVAL`, and `bad_wr` is not set",
        right: "ibv_post_send(3), ibv_post_recv(3): `bad_wr` points at the request that failed",
    },
    Known {
        kinds: &["receive in error"],
        soft0: &[" ?r * WrFlushErr"],
        rxe0: &[],
        what: "a receive posted to a queue pair in ERR",
        soft0_does: "comes back flushed",
        rxe0_does: "only when something else happens to the queue pair",
        right: "ibv_modify_qp(3) and the standard: in ERR what is posted is flushed",
    },
    Known {
        kinds: &["resumed alone"],
        soft0: &[" ?? * ok *"],
        rxe0: &[],
        what: "requests that wait in SQD, after a change to RTS",
        soft0_does: "are executed",
        rxe0_does: "wait until another request is posted",
        right: "the standard: in RTS requests are processed",
    },
];

/// The row for a step of this kind, in which each device has these lines alone.
pub fn find(kind: &str, soft0: &[&str], rxe0: &[&str]) -> Option<&'static Known> {
    let all = |lines: &[&str], patterns: &[&str]| {
        let known = |line: &&str| patterns.iter().any(|pattern| matches(pattern, line));
        lines.iter().all(known)
    };
    TABLE.iter().find(|known| {
        known.kinds.iter().any(|pattern| matches(pattern, kind))
            && all(soft0, known.soft0)
            && all(rxe0, known.rxe0)
    })
}

/// The section of the conformance document.
pub fn render() -> String {
    let mut text = include_str!("head.md").to_owned();
    for known in TABLE {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} |",
            known.what, known.soft0_does, known.rxe0_does, known.right
        );
    }
    text
}

/// Whether `*`, any text, and `?`, any character, can be such that the pattern is the text.
fn matches(pattern: &str, text: &str) -> bool {
    let mut rest = pattern.chars();
    match rest.next() {
        None => text.is_empty(),
        Some('*') => {
            let ends = text.char_indices().map(|(at, _)| at).chain([text.len()]);
            ends.into_iter()
                .any(|at| matches(rest.as_str(), &text[at..]))
        }
        Some(wanted) => {
            let mut text = text.chars();
            let found = text.next();
            found.is_some_and(|found| wanted == '?' || wanted == found)
                && matches(rest.as_str(), text.as_str())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_match_whole_texts() {
        assert!(matches("a*c", "abbc") && matches("a*c", "ac") && matches("?b*", "ab"));
        assert!(!matches("a*c", "abcd") && !matches("?", "") && !matches("a", "ab"));
        assert!(matches("", "") && matches("*", ""));
    }

    #[test]
    fn a_row_is_for_its_steps_and_its_lines_alone() {
        let found = |kind, soft0: &[&str], rxe0: &[&str]| find(kind, soft0, rxe0).is_some();
        let (prot, op) = (" as 1 LocProtErr", " as 1 LocQpOpErr");
        assert!(found("LocalKey Rc WRITE", &[prot], &[op]));
        assert!(!found("exchange", &[prot], &[op]));
        assert!(!found("LocalKey Rc WRITE", &[prot], &[op, " as 2 ok Send"]));
        assert!(!found("LocalKey Rc WRITE", &[prot], &[op, " stuck"]));
    }

    /// The document is written with the suite's results, which takes long: a new row goes there by
    /// hand.
    #[test]
    fn the_document_has_the_table() {
        let document = include_str!("../../../docs/conformance.md");
        assert!(
            document.contains(&render()),
            "put this there:\n{}",
            render()
        );
    }
}
