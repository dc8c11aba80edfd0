//! The end of a program that destroys nothing: what it has received, its peers shall not be told to have failed.
//!
//! A poll leaves acknowledgements to the answer or to the next poll, neither of which may come any more. A program that
//! is killed cannot be helped.

use std::sync::Once;

use super::process::Process;

/// From now on exit(3) pays what is owed.
pub(super) fn watch() {
    static WATCHED: Once = Once::new();
    // SAFETY: the function takes no lock that it would have to wait for, and does not unwind.
    WATCHED.call_once(|| match unsafe { libc::atexit(acknowledge) } {
        0 => {}
        error => tracing::warn!(error, "atexit: messages that are taken last may seem lost"),
    });
}

/// Other threads may run, and the one that ends may have been interrupted anywhere.
extern "C" fn acknowledge() {
    let Some(process) = Process::current() else {
        return;
    };
    if let Some(qps) = process.try_qps() {
        for qp in qps.values() {
            qp.acknowledge_at_exit();
        }
    }
}
