//! The control connection between two processes of a host.
//!
//! Each process listens on the abstract socket of its slot. A peer connects once and asks: for the
//! memory files (`Hello`), for what wakes the queues of a queue pair (`Pair`), for an arena
//! (`Arena`). One datagram each way, file descriptors beside it. An answer has the number of its request,
//! as one that nobody waits for any more may still come. The connection's end is how either side learns
//! that the other has died.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

/// Bumped with every change of messages or of the shared layout.
const PROTOCOL: u32 = 7;
const WORDS: usize = 4;
const BYTES: usize = WORDS * 8;
const MAX_FDS: usize = 3;
/// Errors have numbers up to this one; no more fit into an [`Errno`].
const MAX_ERRNO: u64 = 4095;

/// What a peer may ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Request {
    /// The info file, the mailbox file and the eventfd that wakes the upkeep thread.
    Hello { slot: u32 },
    /// What wakes the completion queues of a queue pair.
    Pair { qpn: u32 },
    /// The memory file of an arena.
    Arena { id: u32 },
}

/// The completion queues of a queue pair, each with its index and its channel's eventfd, where it has
/// a channel.
#[derive(Debug, Default)]
pub(in crate::soft) struct Bells {
    pub send: Option<(u32, OwnedFd)>,
    pub recv: Option<(u32, OwnedFd)>,
}

/// A datagram: words and descriptors. The first word of an answer is 0 or an errno value, the last word
/// of any the number of the request.
#[derive(Debug)]
pub(in crate::soft) struct Datagram {
    pub words: [u64; WORDS],
    pub fds: Vec<OwnedFd>,
}

impl Request {
    pub(in crate::soft) fn encode(self, number: u64) -> [u64; WORDS] {
        let (kind, argument) = match self {
            Self::Hello { slot } => (1, slot),
            Self::Pair { qpn } => (2, qpn),
            Self::Arena { id } => (3, id),
        };
        [u64::from(PROTOCOL), kind, u64::from(argument), number]
    }

    pub(in crate::soft) fn decode(words: [u64; WORDS]) -> Result<Self, Errno> {
        let [version, kind, argument, _] = words;
        if version != u64::from(PROTOCOL) {
            return Err(Errno::PROTONOSUPPORT);
        }
        let argument = u32::try_from(argument).map_err(|_| Errno::PROTO)?;
        match kind {
            1 => Ok(Self::Hello { slot: argument }),
            2 => Ok(Self::Pair { qpn: argument }),
            3 => Ok(Self::Arena { id: argument }),
            _ => Err(Errno::PROTO),
        }
    }
}

impl Datagram {
    /// Which request this is, or answers.
    pub(in crate::soft) fn number(&self) -> u64 {
        self.words[WORDS - 1]
    }
}

/// Asks, and waits for the answer as long as the socket's time-out says.
pub(in crate::soft) fn ask(
    socket: BorrowedFd<'_>,
    request: Request,
    number: u64,
) -> Result<Datagram, Errno> {
    send(socket, request.encode(number), &[], SendFlags::empty())?;
    loop {
        let answer = receive(socket, RecvFlags::empty())?.ok_or(Errno::CONNRESET)?;
        if answer.number() == number {
            return answered(answer);
        }
    }
}

/// An answer, unless it is an error.
pub(in crate::soft) fn answered(answer: Datagram) -> Result<Datagram, Errno> {
    match answer.words[0] {
        0 => Ok(answer),
        code @ 1..=MAX_ERRNO => Err(Errno::from_raw_os_error(code as i32)),
        _ => Err(Errno::PROTO),
    }
}

pub(in crate::soft) fn send(
    socket: BorrowedFd<'_>,
    words: [u64; WORDS],
    fds: &[BorrowedFd<'_>],
    flags: SendFlags,
) -> Result<(), Errno> {
    let mut bytes = [0; BYTES];
    for (chunk, word) in bytes.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_ne_bytes());
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !ancillary.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(Errno::TOOBIG);
    }
    let flags = flags | SendFlags::NOSIGNAL;
    retry(|| rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut ancillary, flags))?;
    Ok(())
}

/// The next datagram, `None` at the end of the connection.
pub(in crate::soft) fn receive(
    socket: BorrowedFd<'_>,
    flags: RecvFlags,
) -> Result<Option<Datagram>, Errno> {
    let mut bytes = [0; BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let flags = flags | RecvFlags::CMSG_CLOEXEC;
    let received = retry(|| {
        rustix::net::recvmsg(
            socket,
            &mut [IoSliceMut::new(&mut bytes)],
            &mut ancillary,
            flags,
        )
    })?;
    let mut fds = Vec::new();
    for message in ancillary.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    if received.bytes != BYTES {
        return Err(Errno::PROTO);
    }
    let mut words = [0; WORDS];
    for (word, chunk) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_ne_bytes(chunk.try_into().unwrap_or_default());
    }
    Ok(Some(Datagram { words, fds }))
}

fn retry<T>(mut call: impl FnMut() -> Result<T, Errno>) -> Result<T, Errno> {
    loop {
        match call() {
            Err(Errno::INTR) => {}
            done => return done,
        }
    }
}

/// Who is at the other end of a Unix socket.
#[derive(Clone, Copy, Debug)]
pub(in crate::soft) struct Credentials {
    /// 0 if the process is not visible from this PID namespace.
    pub pid: i32,
    pub uid: u32,
}

pub(in crate::soft) fn credentials(socket: BorrowedFd<'_>) -> Result<Credentials, Errno> {
    let mut cred = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `cred` and `len` are valid places for the result and its size.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut cred).cast(),
            &mut len,
        )
    };
    if result != 0 {
        return Err(Errno::PROTO);
    }
    Ok(Credentials {
        pid: cred.pid,
        uid: cred.uid,
    })
}

/// Protection between processes that share memory is by cooperation, so both must be one user.
pub(in crate::soft) fn check_user(socket: BorrowedFd<'_>) -> Result<Credentials, Errno> {
    let credentials = credentials(socket)?;
    if credentials.uid == rustix::process::geteuid().as_raw() {
        Ok(credentials)
    } else {
        Err(Errno::PERM)
    }
}

/// Describes queues for the answer to [`Request::Pair`].
pub(in crate::soft) fn encode_bells<'a>(
    send: Option<(u32, &'a OwnedFd)>,
    recv: Option<(u32, &'a OwnedFd)>,
) -> ([u64; WORDS], Vec<BorrowedFd<'a>>) {
    let code = |bell: Option<(u32, &OwnedFd)>| bell.map_or(0, |(cq, _)| u64::from(cq) + 1);
    let fds = send
        .into_iter()
        .chain(recv)
        .map(|(_, fd)| fd.as_fd())
        .collect();
    ([0, code(send), code(recv), 0], fds)
}

/// Reads the answer to [`Request::Pair`].
pub(in crate::soft) fn decode_bells(answer: Datagram) -> Result<Bells, Errno> {
    let mut fds = answer.fds.into_iter();
    let mut bell = |code: u64| match code {
        0 => Ok(None),
        code => {
            let cq = u32::try_from(code - 1).map_err(|_| Errno::PROTO)?;
            Ok(Some((cq, fds.next().ok_or(Errno::PROTO)?)))
        }
    };
    Ok(Bells {
        send: bell(answer.words[1])?,
        recv: bell(answer.words[2])?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_round_trip_and_foreign_ones_are_refused() {
        for request in [
            Request::Hello { slot: 7 },
            Request::Pair { qpn: 0xff_ffff },
            Request::Arena { id: u32::MAX },
        ] {
            assert_eq!(Request::decode(request.encode(9)), Ok(request));
        }
        let version = u64::from(PROTOCOL);
        let decode = |words| Request::decode(words);
        assert_eq!(decode([version - 1, 1, 0, 0]), Err(Errno::PROTONOSUPPORT));
        assert_eq!(decode([version, 9, 0, 0]), Err(Errno::PROTO));
        assert_eq!(decode([version, 1, 1 << 32, 0]), Err(Errno::PROTO));
    }

    /// It came when its asker had given the peer up.
    #[test]
    fn an_answer_to_an_earlier_request_is_not_taken_for_this_one() {
        let flags = rustix::net::SocketFlags::CLOEXEC;
        let kind = rustix::net::SocketType::SEQPACKET;
        let family = rustix::net::AddressFamily::UNIX;
        let (ours, theirs) = rustix::net::socketpair(family, kind, flags, None).unwrap();
        for answer in [[0, 11, 0, 1], [2, 0, 0, 2], [0, 33, 0, 3]] {
            send(theirs.as_fd(), answer, &[], SendFlags::empty()).unwrap();
        }
        let answer = ask(ours.as_fd(), Request::Arena { id: 7 }, 3).unwrap();
        assert_eq!(answer.words, [0, 33, 0, 3]);
        let asked = receive(theirs.as_fd(), RecvFlags::DONTWAIT)
            .unwrap()
            .unwrap();
        assert_eq!(asked.number(), 3);
    }

    #[test]
    fn an_answer_is_an_error_of_the_system_or_nonsense() {
        let answer = |first| {
            answered(Datagram {
                words: [first, 0, 0, 0],
                fds: Vec::new(),
            })
        };
        assert!(answer(0).is_ok());
        assert_eq!(answer(2).unwrap_err(), Errno::NOENT);
        for nonsense in [4096, 70_000, 1 << 31, 1 << 32, u64::MAX] {
            assert_eq!(answer(nonsense).unwrap_err(), Errno::PROTO);
        }
    }
}
