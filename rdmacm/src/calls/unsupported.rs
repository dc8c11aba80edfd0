//! What is there because programs name it: multicast, and sockets over RDMA. It does nothing, and says so.

use core::ffi::{c_int, c_void};

use rustix::io::Errno;

use super::failed;

/// Calls that give -1 and `EOPNOTSUPP`.
macro_rules! not_supported {
    ($($name:ident -> $result:ty,)+) => {$(
        /// Not supported: -1 and `EOPNOTSUPP`.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> $result {
            <$result>::from(failed(Errno::OPNOTSUPP))
        }
    )+};
}

not_supported! {
    rdma_join_multicast -> c_int,
    rdma_join_multicast_ex -> c_int,
    rdma_leave_multicast -> c_int,
    raccept -> c_int,
    rbind -> c_int,
    rclose -> c_int,
    rconnect -> c_int,
    rfcntl -> c_int,
    rgetpeername -> c_int,
    rgetsockname -> c_int,
    rgetsockopt -> c_int,
    riomap -> i64,
    riounmap -> c_int,
    rlisten -> c_int,
    rpoll -> c_int,
    rread -> i64,
    rreadv -> i64,
    rrecv -> i64,
    rrecvfrom -> i64,
    rrecvmsg -> i64,
    rselect -> c_int,
    rsend -> i64,
    rsendmsg -> i64,
    rsendto -> i64,
    rsetsockopt -> c_int,
    rshutdown -> c_int,
    rsocket -> c_int,
    rwrite -> i64,
    rwritev -> i64,
}

/// Not supported: nothing is written, and `EOPNOTSUPP`.
#[unsafe(no_mangle)]
pub extern "C" fn riowrite(
    _socket: c_int,
    _buffer: *const c_void,
    _count: usize,
    _offset: i64,
    _flags: c_int,
) -> usize {
    failed(Errno::OPNOTSUPP);
    0
}
