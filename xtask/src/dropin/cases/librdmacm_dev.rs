//! Programs of our own, compiled against the C library's headers.

use super::super::case::{ADDRESS, Case, Holds, PORT};

const PACKAGE: &str = "librdmacm-dev";

/// Connections by the thousand, which leave nothing behind; every way in which one does not come about, or ends; peers
/// that die at each moment of it; many threads; forked children; threads that are
/// cancelled; and calls in any order.
pub fn cases() -> Vec<Case> {
    let side = |who| [who, ADDRESS, PORT, "1000"];
    let (server, client) = (side("server"), side("client"));
    let program = "rdmacm/programs/cycles.c";
    let cycles = Case::sides(PACKAGE, program, &[], [&server, &client])
        .named("cycles.c 1000")
        .holds(Holds::Says("1000 cycles"));
    let alone = [
        ("rdmacm/programs/endings.c", &[][..], "every ending"),
        ("rdmacm/programs/moments.c", &[], "every death"),
        ("rdmacm/programs/threads.c", &["16", "200"], "3200 "),
        ("rdmacm/programs/cancel.c", &[], "all were cancelled"),
        ("rdmacm/programs/forks.c", &[], "children and parents"),
        (
            "rdmacm/programs/chaos.c",
            &["1", "30000"],
            "nothing is left",
        ),
    ]
    .map(|(program, arguments, words)| {
        Case::alone(PACKAGE, program, arguments).holds(Holds::Says(words))
    });
    let mut cases = vec![cycles.clone(), cycles.between_hosts()];
    cases.extend(alone);
    cases
}
