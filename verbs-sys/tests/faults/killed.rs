//! A process that is killed in the middle of everything.

use verbs_sys::WcStatus;

use crate::support::{
    Host, LinkKind, Process, Random, Record, Setup, assert_works, await_requests, connect, record,
    start_traffic,
};

fn either_end_is_killed(scenario: &'static str, kind: LinkKind) {
    let hosts = Host::two(kind);
    let mut random = Random::new(record::seed());
    let mut record = Record::new(scenario);
    let [mut survivor, mut victim] = hosts.each_ref().map(Process::start);
    let mut of_victim = 1;
    while record.goes_on() {
        // Of several connections that go on at once.
        let links = [(); 3].map(|()| connect(&mut survivor, &mut victim, Setup::default()));
        for link in links {
            start_traffic([&mut survivor, &mut victim], link, &mut random, None);
        }
        let most = if random.below(2) == 0 { 500 } else { 2 };
        let count = random.len(most) as u64;
        await_requests(&mut survivor, links[0].ends[0], count);
        victim.kill();
        let mut left = Vec::new();
        for link in links {
            let id = link.ends[0];
            let report = survivor.outcome(id);
            report.assert_failed("the survivor", &[WcStatus::RetryExcErr]);
            survivor.assert_guards(id);
            record.add(&report);
            left.push(survivor.memory(id));
        }
        victim = Process::start(&hosts[of_victim]);
        let link = assert_works(&mut survivor, &mut victim, &mut random, 50);
        for (link, left) in links.iter().zip(left) {
            let id = link.ends[0];
            assert!(
                survivor.memory(id) == left,
                "a dead process goes on writing"
            );
            survivor.destroy(id);
        }
        survivor.destroy(link.ends[0]);
        victim.destroy(link.ends[1]);
        // The other one next time.
        std::mem::swap(&mut survivor, &mut victim);
        of_victim = 1 - of_victim;
    }
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn killed_while_memory_is_shared() {
    either_end_is_killed("killed, shared memory", LinkKind::Shm);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn killed_while_the_kernel_copies() {
    either_end_is_killed("killed, heap memory", LinkKind::Cma);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn killed_where_owners_copy() {
    either_end_is_killed("killed, owners copy", LinkKind::OwnerCopies);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn killed_in_strict_mode() {
    either_end_is_killed("killed, strict mode", LinkKind::Strict);
}

#[test]
#[ignore = "cargo xtask faults runs it"]
fn killed_on_another_host() {
    either_end_is_killed("killed, TCP", LinkKind::Tcp);
}
