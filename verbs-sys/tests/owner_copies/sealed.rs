//! Requests of a thread that the kernel ends at its first system call.

use verbs_sys::WcStatus;

use crate::node::{Pair, Request, wait};

/// How often each request is done.
pub const ROUNDS: u64 = 5000;

/// What the process ends with if it cannot be sealed.
pub const CANNOT: i32 = 77;

/// What waiting for another process takes: the processor, and after many polls in vain the timer of the
/// device; now and then the lock of a completion queue; and the clock, on machines where the kernel is asked.
const PERMITTED: [libc::c_long; 5] = [
    libc::SYS_timerfd_settime,
    libc::SYS_sched_yield,
    libc::SYS_membarrier,
    libc::SYS_clock_gettime,
    libc::SYS_exit_group,
];

/// Does the requests, and ends the process.
pub fn run(pair: &Pair, list: &[Request]) -> ! {
    if !seal() {
        // SAFETY: ends the process at once.
        unsafe { libc::_exit(CANNOT) };
    }
    let mut code = 0;
    for round in 0..ROUNDS {
        for request in list {
            pair.post_simple(round, *request);
            let done = wait(&pair.send_cq);
            if done.status() != WcStatus::Success || done.wr_id() != round {
                code = 1;
            }
        }
    }
    // SAFETY: ends the process at once.
    unsafe { libc::_exit(code) }
}

/// From now on another system call of this thread ends the process with SIGSYS; seccomp(2).
fn seal() -> bool {
    let statement = |code: u32, jt, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf: 0,
        k,
    };
    // The number of the call is the first word of what the filter looks at.
    let mut program = vec![statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (index, number) in PERMITTED.iter().enumerate() {
        let to_permission = (PERMITTED.len() - index) as u8;
        let compare = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
        program.push(statement(compare, to_permission, *number as u32));
    }
    let answer = libc::BPF_RET | libc::BPF_K;
    program.push(statement(answer, 0, libc::SECCOMP_RET_KILL_PROCESS));
    program.push(statement(answer, 0, libc::SECCOMP_RET_ALLOW));
    let program = libc::sock_fprog {
        len: program.len() as u16,
        filter: program.as_mut_ptr(),
    };
    // SAFETY: the program and its statements live through the call, which copies them.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(
                libc::PR_SET_SECCOMP,
                libc::SECCOMP_MODE_FILTER,
                &raw const program,
            ) == 0
    }
}
