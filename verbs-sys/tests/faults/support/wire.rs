//! Frames as a peer of the device writes them, or one that lies: MPA (RFC 5044 and 6581), DDP (RFC 5041),
//! RDMAP (RFC 5040 and 7306) and what the device adds. Nothing of the device's own is used.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream,
    time::Duration,
};

pub const WRITE: u8 = 0;
pub const READ_REQUEST: u8 = 1;
pub const READ_RESPONSE: u8 = 2;
pub const SEND: u8 = 3;
pub const SEND_INVALIDATE: u8 = 4;
pub const TERMINATE: u8 = 7;
pub const ATOMIC_REQUEST: u8 = 10;
pub const ATOMIC_RESPONSE: u8 = 11;
pub const ACKNOWLEDGE: u8 = 14;
pub const ANNOUNCE: u8 = 15;

const REQUEST: &[u8; 16] = b"MPA ID Req Frame";
const REPLY: &[u8; 16] = b"MPA ID Rep Frame";
/// CRC, enhanced set-up, revision 2.
const FLAGS: u16 = 0x5002;
const REJECTED: u16 = 0x2000;
/// READs either way.
const DEPTHS: [u8; 4] = [0, 16, 0, 16];
/// What is private to the device, and its version.
const OWN: &[u8; 6] = b"vbsS\0\x03";
const REQUEST_LEN: usize = 20 + 4 + 6 + 26;
const REPLY_LEN: usize = 20 + 4 + 6 + 10;
/// Longer than the device needs to say or end anything.
const PATIENCE: Duration = Duration::from_secs(60);

/// A DDP segment, every field of which can be a lie.
#[derive(Clone, Debug)]
pub struct Segment {
    pub opcode: u8,
    pub tagged: bool,
    pub last: bool,
    pub ddp_version: u8,
    pub rdmap_version: u8,
    /// Of a tagged one the key, of others the field that the opcode has.
    pub field: u32,
    pub queue: u32,
    pub msn: u32,
    pub offset: u64,
    pub payload: Vec<u8>,
}

impl Segment {
    /// On its proper queue.
    pub fn untagged(opcode: u8, msn: u32, payload: &[u8]) -> Self {
        let queue = match opcode {
            READ_REQUEST | ATOMIC_REQUEST | ANNOUNCE => 1,
            TERMINATE => 2,
            ATOMIC_RESPONSE => 3,
            ACKNOWLEDGE => 4,
            _ => 0,
        };
        Self {
            opcode,
            tagged: false,
            last: true,
            ddp_version: 1,
            rdmap_version: 1,
            field: 0,
            queue,
            msn,
            offset: 0,
            payload: payload.to_vec(),
        }
    }

    pub fn tagged(opcode: u8, key: u32, offset: u64, payload: &[u8]) -> Self {
        Self {
            tagged: true,
            field: key,
            offset,
            ..Self::untagged(opcode, 0, payload)
        }
    }

    pub fn acknowledge(count: u32) -> Self {
        Self {
            field: count,
            ..Self::untagged(ACKNOWLEDGE, 1, &[])
        }
    }

    pub fn ulpdu(&self) -> Vec<u8> {
        let control = u8::from(self.tagged) << 7 | u8::from(self.last) << 6 | self.ddp_version;
        let mut bytes = vec![control, self.rdmap_version << 6 | self.opcode];
        bytes.extend(self.field.to_be_bytes());
        if self.tagged {
            bytes.extend(self.offset.to_be_bytes());
        } else {
            bytes.extend(self.queue.to_be_bytes());
            bytes.extend(self.msn.to_be_bytes());
            bytes.extend((self.offset as u32).to_be_bytes());
        }
        bytes.extend(&self.payload);
        bytes
    }

    pub fn frame(&self) -> Vec<u8> {
        frame(&self.ulpdu())
    }
}

/// A frame around a segment, with its good CRC.
pub fn frame(ulpdu: &[u8]) -> Vec<u8> {
    let mut bytes = (ulpdu.len() as u16).to_be_bytes().to_vec();
    bytes.extend(ulpdu);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes.extend(crc_fast::crc32_iscsi(&bytes).to_le_bytes());
    bytes
}

/// Numbers one behind the other.
pub fn fields(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

pub fn announcement(key: u32, addr: u64, len: u32) -> Vec<u8> {
    fields(&[&key.to_be_bytes(), &addr.to_be_bytes(), &len.to_be_bytes()])
}

pub fn read_request(sink: u32, len: u32, key: u32, addr: u64) -> Vec<u8> {
    fields(&[
        &sink.to_be_bytes(),
        &[0; 8],
        &len.to_be_bytes(),
        &key.to_be_bytes(),
        &addr.to_be_bytes(),
    ])
}

/// An addition of 1.
pub fn fetch_add(id: u32, key: u32, addr: u64) -> Vec<u8> {
    fields(&[
        &[0; 4],
        &id.to_be_bytes(),
        &key.to_be_bytes(),
        &addr.to_be_bytes(),
        &1u64.to_be_bytes(),
        &[0; 24],
    ])
}

pub fn atomic_response(id: u32, original: u64) -> Vec<u8> {
    fields(&[&id.to_be_bytes(), &original.to_be_bytes()])
}

/// What two queue pairs say of themselves when they connect.
#[derive(Clone, Copy, Debug)]
pub struct Hello {
    pub source_qpn: u32,
    pub dest_qpn: u32,
    pub psn: u32,
    /// Messages that were executed another way before.
    pub executed: u32,
}

fn greeting(key: &[u8; 16], flags: u16, own: &[u8]) -> Vec<u8> {
    let len = (DEPTHS.len() + OWN.len() + own.len()) as u16;
    fields(&[
        key,
        &flags.to_be_bytes(),
        &len.to_be_bytes(),
        &DEPTHS,
        OWN,
        own,
    ])
}

/// Greets the device; whether it takes the connection.
pub fn greet(stream: &mut TcpStream, hello: Hello) -> bool {
    let own = fields(&[
        &7u16.to_be_bytes(),
        &hello.source_qpn.to_be_bytes(),
        &hello.dest_qpn.to_be_bytes(),
        &hello.psn.to_be_bytes(),
        &1u32.to_be_bytes(),
        &1000u32.to_be_bytes(),
        &hello.executed.to_be_bytes(),
    ]);
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("no time-out");
    let mut reply = [0; REPLY_LEN];
    let sent = stream.write_all(&greeting(REQUEST, FLAGS, &own));
    sent.and_then(|()| stream.read_exact(&mut reply))
        .expect("no reply");
    assert_eq!(&reply[..16], REPLY);
    reply[30..32] == [0, 0]
}

/// Takes the device's greeting and accepts it, or refuses it for a reason.
pub fn answer(stream: &mut TcpStream, refuse: Option<u16>) -> Hello {
    stream
        .set_read_timeout(Some(PATIENCE))
        .expect("no time-out");
    let mut request = [0; REQUEST_LEN];
    stream.read_exact(&mut request).expect("no greeting");
    assert_eq!(&request[..16], REQUEST);
    let word = |at: usize| u32::from_be_bytes(request[at..][..4].try_into().expect("4 bytes"));
    let hello = Hello {
        source_qpn: word(32),
        dest_qpn: word(36),
        psn: word(40),
        executed: word(52),
    };
    let rejected = if refuse.is_some() { REJECTED } else { 0 };
    let result = refuse.unwrap_or(0);
    let own = fields(&[&result.to_be_bytes(), &[0; 4], &[0, 0, 0, 1]]);
    // It may have gone already.
    let _ = stream.write_all(&greeting(REPLY, FLAGS | rejected, &own));
    hello
}

/// The next segment; `None` at the end of the connection.
pub fn receive(stream: &mut TcpStream) -> Option<Vec<u8>> {
    let mut exactly = |len: usize| {
        let mut bytes = vec![0; len];
        match stream.read_exact(&mut bytes) {
            Ok(()) => Some(bytes),
            Err(error) => {
                let hangs = matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut);
                assert!(!hangs, "the device neither says anything nor ends");
                None
            }
        }
    };
    let length = exactly(2)?;
    let len = usize::from(u16::from_be_bytes([length[0], length[1]]));
    let rest = exactly((2 + len).next_multiple_of(4) + 4 - 2)?;
    let (covered, crc) = rest.split_at(rest.len() - 4);
    let whole = fields(&[&length, covered]);
    assert_eq!(
        crc,
        crc_fast::crc32_iscsi(&whole).to_le_bytes(),
        "a CRC of the device"
    );
    Some(whole[2..2 + len].to_vec())
}

/// What the device sends until the connection ends: the opcodes, and the error of a TERMINATE.
pub fn end(stream: &mut TcpStream) -> (Vec<u8>, Option<[u8; 2]>) {
    let (mut opcodes, mut error) = (Vec::new(), None);
    while let Some(segment) = receive(stream) {
        let opcode = segment[1] & 0x0f;
        if opcode == TERMINATE {
            error = Some([segment[18], segment[19]]);
        }
        opcodes.push(opcode);
    }
    (opcodes, error)
}
