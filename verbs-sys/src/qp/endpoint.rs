//! What two sides of a connection tell each other.

use std::{fmt, str::FromStr};

use crate::{Gid, ffi::ibv_mtu};

/// What one side of a connection tells the other, by any means.
///
/// As text it is one word of hexadecimal fields between colons: LID, queue pair number, packet
/// sequence number and GID, as the ibv_rc_pingpong(1) program sends them, and the MTU's code.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use verbs_sys::QueuePairEndpoint;
///
/// let text = "0000:000011:fffff0:00000000000000000000ffff7f000001:5";
/// let endpoint: QueuePairEndpoint = text.parse()?;
/// assert_eq!((endpoint.qp_num, endpoint.psn), (0x11, 0xff_fff0));
/// assert!(endpoint.gid.is_ipv4_mapped());
/// assert_eq!(endpoint.to_string(), text);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairEndpoint {
    /// Number of the queue pair, 24 bits.
    pub qp_num: u32,
    /// First packet sequence number it will send, 24 bits.
    pub psn: u32,
    /// Address of its port.
    pub gid: Gid,
    /// Local identifier of its port, 0 on RoCE.
    pub lid: u16,
    /// Largest packet payload its port takes now, as verbs encode it (1 for 256 to 5 for 4096).
    pub mtu: ibv_mtu,
}

impl fmt::Display for QueuePairEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let gid = u128::from_be_bytes(self.gid.0);
        let Self {
            qp_num,
            psn,
            lid,
            mtu,
            ..
        } = self;
        write!(f, "{lid:04x}:{qp_num:06x}:{psn:06x}:{gid:032x}:{mtu:x}")
    }
}

/// A text is no [`QueuePairEndpoint`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no endpoint: {part}; expected LID:QPN:PSN:GID:MTU in hexadecimal")]
pub struct ParseEndpointError {
    text: String,
    part: &'static str,
}

impl FromStr for QueuePairEndpoint {
    type Err = ParseEndpointError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let refused = |part| ParseEndpointError {
            // Enough to see what it was.
            text: text.chars().take(80).collect(),
            part,
        };
        let mut fields = text.split(':');
        let mut field = |most: u128, part| {
            let digits = fields.next().unwrap_or_default();
            // The library's parser takes a sign, too.
            let is_plain = digits.bytes().all(|digit| digit.is_ascii_hexdigit());
            let value = u128::from_str_radix(digits, 16);
            value
                .ok()
                .filter(|value| is_plain && *value <= most)
                .ok_or_else(|| refused(part))
        };
        let lid = field(0xffff, "the LID is not of 16 bits")? as u16;
        let qp_num = field(0xff_ffff, "the queue pair number is not of 24 bits")? as u32;
        let psn = field(0xff_ffff, "the packet sequence number is not of 24 bits")? as u32;
        let gid = Gid(field(u128::MAX, "the GID is not of 128 bits")?.to_be_bytes());
        let mtu = field(5, "the MTU is not 1 to 5")? as ibv_mtu;
        if mtu == 0 {
            return Err(refused("the MTU is not 1 to 5"));
        }
        if fields.next().is_some() {
            return Err(refused("there are more than five fields"));
        }
        Ok(Self {
            qp_num,
            psn,
            gid,
            lid,
            mtu,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn text_round_trips(
            qp_num in 0..1u32 << 24, psn in 0..1u32 << 24, gid: [u8; 16], lid: u16, mtu in 1..=5u32,
        ) {
            let endpoint = QueuePairEndpoint { qp_num, psn, gid: Gid(gid), lid, mtu };
            prop_assert_eq!(endpoint.to_string().parse(), Ok(endpoint));
        }

        #[test]
        fn any_other_text_is_an_error(text in "[0-9a-f:+ ]{0,60}") {
            if let Ok(endpoint) = text.parse::<QueuePairEndpoint>() {
                prop_assert_eq!(text.split(':').count(), 5);
                prop_assert!(endpoint.qp_num < 1 << 24 && endpoint.psn < 1 << 24);
            }
        }
    }

    #[test]
    fn an_error_says_what_is_wrong() {
        let gid = "00000000000000000000ffff7f000001";
        for (text, want) in [
            (String::new(), "LID"),
            (format!("0:1000000:0:{gid}:5"), "queue pair number"),
            (format!("0:1:-1:{gid}:5"), "packet sequence number"),
            (format!("0:1:1:1{gid}:5"), "GID"),
            (format!("0:1:1:{gid}:0"), "MTU"),
            (format!("0:1:1:{gid}:6"), "MTU"),
            (format!("0:1:1:{gid}:5:"), "more than five"),
        ] {
            let error = text.parse::<QueuePairEndpoint>().unwrap_err().to_string();
            assert!(error.contains(want), "{error}");
        }
    }
}
