//! Address handles: where a datagram goes.

use rustix::io::Errno;

use super::process::Process;
#[cfg(any(feature = "drop-in", test))]
use crate::ffi::{IBV_WC_GRH, ibv_gid, ibv_grh, ibv_wc};
use crate::ffi::{ibv_ah, ibv_ah_attr, ibv_context, ibv_pd};

/// Next header of a GRH before an IBA transport header.
const NEXT_HEADER_IBA: u8 = 0x1b;
/// Protocol number of UDP, in which RoCE v2 travels.
const UDP: u8 = 17;
/// In the kind of a header.
const OVER_UDP: u32 = 8;
/// Bytes of UDP, transport and datagram headers and the check behind the payload.
const AROUND_PAYLOAD: usize = 8 + 12 + 8 + 4;

/// An address handle. The C structure comes first: its address is the handle.
#[repr(C)]
pub(super) struct Ah {
    ah: ibv_ah,
    route: Route,
}

/// The way between two ports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Route {
    pub traffic_class: u8,
    pub hop_limit: u8,
    pub sgid: [u8; 16],
    pub dgid: [u8; 16],
}

impl Ah {
    pub(super) fn new(
        process: &Process,
        context: *mut ibv_context,
        pd: *mut ibv_pd,
        attr: &ibv_ah_attr,
    ) -> Result<Box<Self>, Errno> {
        // As on every RoCE port, a destination is a GID.
        let sgid = process.gids.get(usize::from(attr.grh.sgid_index));
        let sgid = sgid.filter(|_| attr.is_global != 0 && attr.port_num == 1);
        // SAFETY: both members of the union are plain bytes.
        let dgid = unsafe { attr.grh.dgid.raw };
        let route = Route {
            traffic_class: attr.grh.traffic_class,
            hop_limit: attr.grh.hop_limit,
            sgid: *sgid.ok_or(Errno::INVAL)?,
            dgid,
        };
        if dgid == [0; 16] {
            return Err(Errno::INVAL);
        }
        let ah = ibv_ah {
            context,
            pd,
            handle: 0,
        };
        Ok(Box::new(Self { ah, route }))
    }

    /// The route of a handle.
    ///
    /// # Safety
    ///
    /// `ah` was made by `ibv_create_ah` on this device and is not destroyed yet.
    pub(super) unsafe fn route(ah: *const ibv_ah) -> Route {
        // SAFETY: by the caller's promise; the C structure is the first field of an `Ah`.
        unsafe { (*ah.cast::<Self>()).route }
    }

    pub(super) fn domain(&self) -> *mut ibv_pd {
        self.ah.pd
    }
}

impl Route {
    /// What a completion says in place of a service level, of which Ethernet has none: the kind of header in front of a
    /// datagram, as Mellanox's devices number them. UCX looks there for where the addresses are.
    pub(super) fn kind(&self) -> u32 {
        let version = match (ipv4(&self.sgid), ipv4(&self.dgid)) {
            (Some(_), Some(_)) => 2,
            _ => 1,
        };
        OVER_UDP | version
    }

    /// What stands before a received payload of so many bytes: an IPv6-like header, or for IPv4
    /// addresses 20 undefined bytes (here zero) and an IPv4 header.
    pub(super) fn grh(&self, payload: usize) -> [u8; 40] {
        let mut grh = [0; 40];
        let (Some(from), Some(to)) = (ipv4(&self.sgid), ipv4(&self.dgid)) else {
            let first = 6 << 28 | u32::from(self.traffic_class) << 20;
            grh[..4].copy_from_slice(&first.to_be_bytes());
            let length = (payload + AROUND_PAYLOAD) as u16;
            grh[4..6].copy_from_slice(&length.to_be_bytes());
            grh[6] = NEXT_HEADER_IBA;
            grh[7] = self.hop_limit;
            grh[8..24].copy_from_slice(&self.sgid);
            grh[24..].copy_from_slice(&self.dgid);
            return grh;
        };
        let header = &mut grh[20..];
        header[0] = 0x45;
        header[1] = self.traffic_class;
        let length = (20 + payload + AROUND_PAYLOAD) as u16;
        header[2..4].copy_from_slice(&length.to_be_bytes());
        // Do not fragment.
        header[6] = 0x40;
        header[8] = self.hop_limit.max(1);
        header[9] = UDP;
        header[12..16].copy_from_slice(&from);
        header[16..].copy_from_slice(&to);
        let sum = checksum(header);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        grh
    }
}

/// ibv_init_ah_from_wc(3): the address that a datagram came from.
///
/// # Safety
///
/// The context is open; `grh` is what stands before the datagram, if the completion says that something does.
#[cfg(any(feature = "drop-in", test))]
pub(crate) unsafe fn init_ah_from_wc(
    handle: *mut ibv_context,
    port: u8,
    wc: &ibv_wc,
    grh: *const ibv_grh,
) -> Option<ibv_ah_attr> {
    let mut attr = ibv_ah_attr::zeroed();
    attr.dlid = wc.slid;
    attr.sl = wc.sl;
    attr.src_path_bits = wc.dlid_path_bits;
    attr.port_num = port;
    if wc.wc_flags & IBV_WC_GRH == 0 {
        return Some(attr);
    }
    // SAFETY: by the caller's promise.
    let (context, bytes) = unsafe {
        (
            super::device::context(handle),
            grh.cast::<[u8; 40]>().read(),
        )
    };
    let Came { from, to, class } = Came::by(&bytes)?;
    let gids = &context.process().ok()?.gids;
    let sgid_index = gids.iter().position(|gid| *gid == to)?;
    attr.is_global = 1;
    attr.grh.dgid = ibv_gid { raw: from };
    attr.grh.sgid_index = u8::try_from(sgid_index).ok()?;
    attr.grh.hop_limit = 0xff;
    attr.grh.traffic_class = (class >> 20) as u8;
    attr.grh.flow_label = class & 0xf_ffff;
    Some(attr)
}

/// What a header says.
#[cfg(any(feature = "drop-in", test))]
struct Came {
    from: [u8; 16],
    to: [u8; 16],
    /// Traffic class and flow label, as in an IPv6 header.
    class: u32,
}

#[cfg(any(feature = "drop-in", test))]
impl Came {
    fn by(grh: &[u8; 40]) -> Option<Self> {
        let ipv4 = &grh[20..];
        let gid = |from: usize| grh[from..][..16].try_into().ok();
        let mapped = |at: usize| {
            let octets: [u8; 4] = ipv4[at..][..4].try_into().ok()?;
            Some(std::net::Ipv4Addr::from(octets).to_ipv6_mapped().octets())
        };
        if ipv4[0] == 0x45 && checksum(ipv4) == 0 {
            return Some(Self {
                from: mapped(12)?,
                to: mapped(16)?,
                class: u32::from(ipv4[1]) << 20,
            });
        }
        let first = u32::from_be_bytes(grh[..4].try_into().ok()?);
        (first >> 28 == 6).then_some(Self {
            from: gid(8)?,
            to: gid(24)?,
            class: first & 0xfff_ffff,
        })
    }
}

fn ipv4(gid: &[u8; 16]) -> Option<[u8; 4]> {
    let mapped = std::net::Ipv6Addr::from(*gid).to_ipv4_mapped()?;
    Some(mapped.octets())
}

/// The ones' complement sum of RFC 1071.
fn checksum(header: &[u8]) -> u16 {
    let words = header.chunks_exact(2);
    let sum: u32 = words
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(pair[1]))
        .sum();
    let sum = (sum & 0xffff) + (sum >> 16);
    !((sum & 0xffff) + (sum >> 16)) as u16
}

/// ibv_destroy_ah(3).
///
/// # Safety
///
/// As for `ibv_destroy_ah`; the handle is used no more.
pub(super) unsafe fn destroy(handle: *mut ibv_ah) -> *mut ibv_pd {
    // SAFETY: by the caller's promise, it came from `Ah::new`.
    let ah = unsafe { Box::from_raw(handle.cast::<Ah>()) };
    ah.domain()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(from: &str, to: &str) -> Route {
        let gid = |text: &str| match text.parse().unwrap() {
            std::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(v6) => v6.octets(),
        };
        Route {
            traffic_class: 0,
            hop_limit: 64,
            sgid: gid(from),
            dgid: gid(to),
        }
    }

    #[test]
    fn an_ipv4_route_has_a_valid_ipv4_header() {
        let grh = route("10.0.0.1", "10.0.0.2").grh(100);
        assert_eq!(grh[20], 0x45);
        assert_eq!(grh[32..36], [10, 0, 0, 1]);
        assert_eq!(grh[36..40], [10, 0, 0, 2]);
        // A header with its checksum in place sums up to nothing.
        assert_eq!(checksum(&grh[20..]), 0);
    }

    #[test]
    fn a_header_tells_where_a_datagram_came_from() {
        for mut route in [route("10.0.0.1", "10.0.0.2"), route("fe80::1", "fe80::2")] {
            route.traffic_class = 5;
            let came = Came::by(&route.grh(100)).unwrap();
            assert_eq!((came.from, came.to), (route.sgid, route.dgid));
            assert_eq!(came.class, 5 << 20);
        }
        assert!(Came::by(&[0; 40]).is_none());
    }

    #[test]
    fn an_ipv6_route_has_both_addresses() {
        let route = route("fe80::1", "fe80::2");
        let grh = route.grh(100);
        assert_eq!((grh[0] >> 4, grh[6]), (6, NEXT_HEADER_IBA));
        assert_eq!(
            (&grh[8..24], &grh[24..]),
            (&route.sgid[..], &route.dgid[..])
        );
    }
}
