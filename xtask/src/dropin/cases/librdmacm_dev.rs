//! Programs of our own, compiled against the C library's headers.

use super::super::case::{ADDRESS, Case, Holds, PORT};

const PACKAGE: &str = "librdmacm-dev";

/// Connections by the thousand, which leave nothing behind; and every way in which one does not come about, or ends.
pub fn cases() -> Vec<Case> {
    let side = |who| [who, ADDRESS, PORT, "1000"];
    let (server, client) = (side("server"), side("client"));
    let program = "rdmacm/programs/cycles.c";
    let cycles = Case::sides(PACKAGE, program, &[], [&server, &client])
        .named("cycles.c 1000")
        .holds(Holds::Says("1000 cycles"));
    let endings = Case::alone(PACKAGE, "rdmacm/programs/endings.c", &[]);
    vec![
        cycles.clone(),
        cycles.between_hosts(),
        endings.holds(Holds::Says("every ending")),
    ]
}
