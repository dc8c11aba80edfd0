//! UCX, the communication layer below MPI libraries, on its transports for verbs.

use super::super::case::{ADDRESS, Case, Holds, PORT};

const PACKAGE: &str = "ucx-utils";

/// No other transport than these, which need datagrams for their beginning.
const CONNECTED: (&str, &str) = ("UCX_TLS", "rc_verbs,ud_verbs,self");
const DATAGRAMS: (&str, &str) = ("UCX_TLS", "ud_verbs,self");
const DEVICE: (&str, &str) = ("UCX_NET_DEVICES", "soft0:1");

/// Each kind of operation of its protocol layer, short and long, on connections and on datagrams; and of the transports
/// themselves.
pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for test in [
        "tag_lat",
        "tag_bw",
        "ucp_put_lat",
        "ucp_put_bw",
        "ucp_get",
        "ucp_am_lat",
        "ucp_am_bw",
        "stream_lat",
        "stream_bw",
    ] {
        for size in ["64", "65536"] {
            cases.push(case(CONNECTED, &format!("-t {test} -s {size}")));
        }
    }
    for test in ["ucp_add", "ucp_fadd", "ucp_cswap"] {
        cases.push(case(CONNECTED, &format!("-t {test} -s 8")));
    }
    for test in [
        "tag_lat -s 64",
        "tag_bw -s 16384",
        "ucp_am_bw -s 64",
        "stream_bw -s 4096",
    ] {
        cases.push(case(DATAGRAMS, &format!("-t {test}")));
    }
    for test in [
        "am_lat -s 8",
        "am_bw -s 8192 -D zcopy",
        "put_lat -s 8",
        "put_bw -s 65536 -D zcopy",
        "get -s 65536 -D zcopy",
        "add_mr -s 8",
        "fadd -s 8",
        "cswap -s 8",
    ] {
        cases.push(case(
            CONNECTED,
            &format!("-x rc_verbs -d soft0:1 -t {test}"),
        ));
    }
    for test in ["am_lat -s 8", "am_bw -s 2048 -D bcopy"] {
        cases.push(case(
            DATAGRAMS,
            &format!("-x ud_verbs -d soft0:1 -t {test}"),
        ));
    }
    cases
}

/// One test. It looks for the device's file.
fn case(transports: (&'static str, &'static str), test: &str) -> Case {
    let arguments: Vec<&str> = [ADDRESS, "-n", "1000"]
        .into_iter()
        .chain(test.split(' '))
        .collect();
    let kind = if transports == CONNECTED { "rc" } else { "ud" };
    let sides: [&[&str]; 2] = [&[], &arguments];
    let case = Case::sides(PACKAGE, "ucx_perftest", &["-p", PORT], sides)
        .named(&format!("ucx_perftest {test}, {kind}"))
        .with_scenery()
        .holds(Holds::ClientSays("Final:"));
    [transports, DEVICE]
        .into_iter()
        .fold(case, |case, (name, value)| {
            case.with_environment(name, value)
        })
}
