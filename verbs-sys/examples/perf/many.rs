//! Many queue pairs between two processes, of which one is busy.

use std::fs;
use std::time::Duration;

use verbs_sys::PreparedSend;
use verbs_sys::ffi;

use crate::endpoint::{Options, request};
use crate::peer::Pair;
use crate::rounds::alternate;
use crate::{Figures, Result};

/// Bytes of this process's share of its memory, as the kernel counts it.
fn memory(pid: u32) -> Result<f64> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let line = text.lines().find(|line| line.starts_with("Pss:"));
    let kib = line.and_then(|line| line.split_whitespace().nth(1));
    Ok(kib.ok_or("no Pss in smaps_rollup")?.parse::<f64>()? * 1024.0)
}

/// One WRITE of a word at a time, through the first queue pair of a few and of many.
pub fn many(qps: usize, budget: Duration) -> Result<Figures> {
    let me = std::process::id();
    let before = memory(me)?;
    let few = Pair::start(Options::PLAIN)?;
    let between = memory(me)?;
    let many = Pair::start(Options {
        qps,
        ..Options::PLAIN
    })?;
    let after = memory(me)?;
    let (first, second) = (memory(few.pid())?, memory(many.pid())?);
    let here = ((after - between) - (between - before)) / (qps as f64 - 1.0);
    let there = (second - first) / (qps as f64 - 1.0);

    let send = |pair: &Pair| {
        let request = request(ffi::IBV_WR_RDMA_WRITE, pair.there);
        PreparedSend::new(&[(request, &[pair.here.element(0, 8)])])
    };
    let (mut one, mut of_many) = (send(&few), send(&many));
    let run = |pair: &Pair, send: &mut PreparedSend, count| {
        (0..count).try_for_each(|_| {
            pair.here.post(0, send)?;
            pair.here.complete()?;
            Ok(())
        })
    };
    let [alone, among] = alternate(
        budget,
        [&mut |count| run(&few, &mut one, count), &mut |count| {
            run(&many, &mut of_many, count)
        }],
    )?;
    Ok(Figures::from([
        ("one_ns", alone),
        ("of_many_ns", among),
        ("memory_bytes", here + there),
    ]))
}
