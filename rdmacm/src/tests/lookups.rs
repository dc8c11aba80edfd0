//! Addresses, options, and datagram services.

use core::ffi::c_int;
use core::ptr;
use std::net::SocketAddr;

use rustix::io::Errno;
use verbs_sys::ffi::*;

use super::world::*;
use crate::abi::*;
use crate::calls::testing::*;
use crate::dial::Dial;
use crate::endpoint::Phase;
use crate::fake;
use crate::message::{
    Message, SIDR_REJECT, SIDR_REP_PRIVATE, SIDR_REQ_PRIVATE, SIDR_UNSUPPORTED, Service,
};
use crate::shared::Shared;

#[test]
fn a_datagram_service_is_looked_up() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_UDP, 0);
    let active = asking.id(RDMA_PS_UDP);
    active.prepare(&asking, &listener);
    let way = [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS];
    assert_eq!(fake::states(active.get().qp), way);
    assert_eq!(fake::moves(active.get().qp)[0].0.qkey, RDMA_UDP_QKEY);
    let long = [1; SIDR_REQ_PRIVATE + 1];
    let question = |private| Param {
        private,
        ..Param::default()
    };
    assert_eq!(active.connect(&question(&long)), Err(Errno::INVAL));
    active.connect(&question(b"where")).unwrap();
    let request = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(request.private().len(), SIDR_REQ_PRIVATE);
    assert!(request.private().starts_with(b"where\0"));
    let passive = request.id();
    passive.create_qp(IBV_QPT_UD);
    passive.accept(&question(b"here")).unwrap();
    drop(request);
    let established = asking.expect(RDMA_CM_EVENT_ESTABLISHED);
    let ud = established.ud();
    // SAFETY: alive.
    assert_eq!(ud.qp_num, unsafe { (*passive.get().qp).qp_num });
    assert_eq!(
        (ud.qkey, ud.ah_attr.is_global, ud.ah_attr.port_num),
        (RDMA_UDP_QKEY, 1, 1)
    );
    assert_eq!(established.private().len(), SIDR_REP_PRIVATE);
    assert!(established.private().starts_with(b"here\0"));
    assert!(listening.is_empty());
}

#[test]
fn a_datagram_service_can_be_refused_or_missing() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_UDP, 0);
    let active = asking.id(RDMA_PS_UDP);
    active.prepare(&asking, &listener);
    active.connect(&Param::default()).unwrap();
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.reject(b"no").unwrap();
    let refused = asking.expect(RDMA_CM_EVENT_UNREACHABLE);
    assert_eq!(refused.status(), c_int::from(SIDR_REJECT));
    assert!(refused.private().starts_with(b"no\0"));
    let second = asking.id(RDMA_PS_UDP);
    second.prepare(&asking, &listener);
    drop((passive, listener));
    second.connect(&Param::default()).unwrap();
    let missing = asking.expect(RDMA_CM_EVENT_UNREACHABLE);
    assert_eq!(missing.status(), c_int::from(SIDR_UNSUPPORTED));
}

#[test]
fn a_service_of_another_port_space_is_none() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_UDP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(&asking, &listener);
    active.connect(&Param::default()).unwrap();
    assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 8);
    assert!(listening.is_empty());
}

#[test]
fn an_unspecified_address_stands_for_all() {
    let (asking, listening) = (Channel::new(), Channel::new());
    for (any, one) in [
        ("0.0.0.0:0", "127.0.0.1"),
        ("0.0.0.0:0", "127.0.0.2"),
        ("[::]:0", "127.0.0.1"),
        ("[::]:0", "::1"),
    ] {
        let listener = listening.id(RDMA_PS_TCP);
        listener.bind(any).unwrap();
        assert!(listener.get().verbs.is_null());
        // SAFETY: alive.
        assert_eq!(unsafe { rdma_listen(listener.0, 0) }, 0);
        let active = asking.id(RDMA_PS_TCP);
        let at = SocketAddr::new(one.parse().unwrap(), listener.local().port());
        active.resolve(at).unwrap();
        asking.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        // SAFETY: alive.
        assert_eq!(unsafe { rdma_resolve_route(active.0, 0) }, 0);
        asking.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
        active.create_qp(IBV_QPT_RC);
        active.connect(&Param::default()).unwrap();
        let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
        assert_eq!(passive.local(), at);
        assert!(!passive.get().verbs.is_null());
        passive.reject(b"").unwrap();
        asking.expect(RDMA_CM_EVENT_REJECTED);
    }
}

#[test]
fn ipv6_only_is_ipv6_only() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.id(RDMA_PS_TCP);
    let mut yes: c_int = 1;
    let value = (&raw mut yes).cast();
    let (level, option) = (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY);
    // SAFETY: alive, and four bytes.
    let code = unsafe { rdma_set_option(listener.0, level, option, value, 4) };
    assert_eq!(code, 0);
    listener.bind("[::]:0").unwrap();
    // SAFETY: alive.
    assert_eq!(unsafe { rdma_listen(listener.0, 0) }, 0);
    let active = asking.id(RDMA_PS_TCP);
    let port = listener.local().port();
    active
        .resolve(SocketAddr::from(([127, 0, 0, 1], port)))
        .unwrap();
    asking.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    // SAFETY: alive.
    assert_eq!(unsafe { rdma_resolve_route(active.0, 0) }, 0);
    asking.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
    active.create_qp(IBV_QPT_RC);
    active.connect(&Param::default()).unwrap();
    assert_eq!(asking.expect(RDMA_CM_EVENT_REJECTED).status(), 8);
}

#[test]
fn addresses_that_cannot_be_are_refused() {
    let channel = Channel::new();
    let (first, second) = (channel.id(RDMA_PS_TCP), channel.id(RDMA_PS_TCP));
    first.bind("127.0.0.1:0").unwrap();
    assert_ne!(first.local().port(), 0);
    assert_eq!(first.bind("127.0.0.1:0"), Err(Errno::INVAL));
    let taken = first.local().to_string();
    assert_eq!(second.bind(&taken), Err(Errno::ADDRINUSE));
    // RFC 5737: an address that no host has.
    assert_eq!(second.bind("203.0.113.9:0"), Err(Errno::ADDRNOTAVAIL));
    // SAFETY: alive, and a null pointer for the address.
    let code = unsafe { rdma_bind_addr(second.0, ptr::null_mut()) };
    assert_eq!(result(code), Err(Errno::INVAL));
    drop(first);
    assert_eq!(second.bind(&taken), Ok(()));
    // SAFETY: alive.
    let code = unsafe { rdma_resolve_route(second.0, 0) };
    assert_eq!(result(code), Err(Errno::INVAL));
    assert_eq!(second.connect(&Param::default()), Err(Errno::INVAL));
    assert_eq!(second.accept(&Param::default()), Err(Errno::INVAL));
    assert_eq!(second.reject(b""), Err(Errno::INVAL));
    assert_eq!(second.disconnect(), Err(Errno::INVAL));
    // SAFETY: alive.
    let port = unsafe { rdma_get_src_port(second.0) };
    assert_eq!(u16::from_be(port), second.local().port());
    // SAFETY: alive.
    assert_eq!(unsafe { rdma_get_dst_port(second.0) }, 0);
}

#[test]
fn options_have_their_sizes_and_reach_the_queue_pair() {
    let channel = Channel::new();
    let id = channel.id(RDMA_PS_TCP);
    let set = |level, option, len, value: c_int| {
        let mut value = value;
        // SAFETY: alive, and four bytes.
        result(unsafe { rdma_set_option(id.0, level, option, (&raw mut value).cast(), len) })
    };
    assert_eq!(set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 1, 0x20), Ok(()));
    assert_eq!(
        set(RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 4, 0x20),
        Err(Errno::INVAL)
    );
    assert_eq!(
        set(RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1, 20),
        Ok(())
    );
    assert_eq!(
        set(RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1, 32),
        Err(Errno::INVAL)
    );
    assert_eq!(set(RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 4, 1), Ok(()));
    assert_eq!(set(RDMA_OPTION_ID, 99, 4, 1), Err(Errno::INVAL));
    assert_eq!(set(RDMA_OPTION_IB, 1, 72, 1), Err(Errno::OPNOTSUPP));
    assert_eq!(set(7, 0, 1, 1), Err(Errno::NOSYS));
    let listening = Channel::new();
    let listener = listening.listener(RDMA_PS_TCP, 0);
    id.prepare(&channel, &listener);
    id.connect(&Param::default()).unwrap();
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.create_qp(IBV_QPT_RC);
    passive.accept(&Param::default()).unwrap();
    channel.expect(RDMA_CM_EVENT_ESTABLISHED);
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
    let moves = fake::moves(id.get().qp);
    assert_eq!(moves[2].0.ah_attr.grh.traffic_class, 0x20);
    assert_eq!(moves[3].0.timeout, 20);
}

#[test]
fn names_are_resolved() {
    // SAFETY: integers and pointers.
    let mut hints: rdma_addrinfo = unsafe { zeroed() };
    let ask = |node: Option<&std::ffi::CStr>, hints: &rdma_addrinfo| {
        let node = node.map_or(ptr::null(), std::ffi::CStr::as_ptr);
        let mut info = ptr::null_mut();
        // SAFETY: strings, hints, and a place for the result.
        match unsafe { rdma_getaddrinfo(node, c"7471".as_ptr(), hints, &mut info) } {
            0 => {
                // SAFETY: just made.
                let found = unsafe { *info };
                // SAFETY: addresses, or null.
                let addresses = unsafe {
                    [found.ai_src_addr, found.ai_dst_addr]
                        .map(|address| crate::address::read(address).ok())
                };
                // SAFETY: made above.
                unsafe { rdma_freeaddrinfo(info) };
                Ok((
                    addresses,
                    found.ai_qp_type as u32,
                    found.ai_port_space as u32,
                ))
            }
            code => Err(code),
        }
    };
    let at = |text: &str| Some(text.parse::<SocketAddr>().unwrap());
    hints.ai_flags = RAI_NUMERICHOST;
    let found = ask(Some(c"127.0.0.1"), &hints).unwrap();
    let tcp = (IBV_QPT_RC, RDMA_PS_TCP);
    assert_eq!(
        found,
        ([at("127.0.0.1:0"), at("127.0.0.1:7471")], tcp.0, tcp.1)
    );
    hints.ai_flags = RAI_PASSIVE | RAI_FAMILY;
    hints.ai_family = libc::AF_INET;
    hints.ai_port_space = RDMA_PS_UDP as c_int;
    let udp = (IBV_QPT_UD, RDMA_PS_UDP);
    let found = ask(None, &hints).unwrap();
    assert_eq!(found, ([at("0.0.0.0:7471"), None], udp.0, udp.1));
    hints.ai_family = 27;
    assert_eq!(ask(None, &hints), Err(libc::EAI_FAMILY));
    hints.ai_flags = RAI_NUMERICHOST;
    assert_eq!(ask(Some(c"no number"), &hints), Err(libc::EAI_NONAME));
    let mut info = ptr::null_mut();
    // SAFETY: null pointers, and a place for the result.
    let code = unsafe { rdma_getaddrinfo(ptr::null(), ptr::null(), ptr::null(), &mut info) };
    assert_eq!(code, libc::EAI_NONAME);
}

#[test]
fn two_that_say_so_have_the_same_address() {
    let (channel, listening) = (Channel::new(), Channel::new());
    let shares = || {
        let id = channel.id(RDMA_PS_TCP);
        let (level, option, mut yes) = (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 1);
        let value = (&raw mut yes).cast();
        // SAFETY: alive, and four bytes.
        result(unsafe { rdma_set_option(id.0, level, option, value, 4) }).unwrap();
        id
    };
    let (first, second) = (shares(), shares());
    first.bind("127.0.0.1:0").unwrap();
    let address = first.local().to_string();
    let other = channel.id(RDMA_PS_TCP);
    assert_eq!(other.bind(&address), Err(Errno::ADDRINUSE));
    second.bind(&address).unwrap();
    // SAFETY: alive.
    let listens = || result(unsafe { rdma_listen(second.0, 1) });
    assert_eq!(listens(), Err(Errno::ADDRINUSE));
    // Both can connect from it.
    let listener = listening.listener(RDMA_PS_TCP, 0);
    for id in [&first, &second] {
        id.prepare(&channel, &listener);
        id.connect(&Param::default()).unwrap();
        let request = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
        assert_eq!(request.remote(), first.local());
        drop(request);
        channel.expect(RDMA_CM_EVENT_REJECTED);
    }
}

#[test]
fn who_begins_to_listen_meanwhile_is_found() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let late = listening.id(RDMA_PS_UDP);
    late.bind("127.0.0.1:0").unwrap();
    let active = asking.id(RDMA_PS_UDP);
    active.resolve(late.local()).unwrap();
    asking.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    let service = Service {
        port_space: RDMA_PS_UDP as u16,
        from: active.local(),
        to: late.local(),
    };
    let private = b"early".to_vec();
    // Under one lock, so that the thread looks again when somebody listens.
    let mut state = Shared::get().lock();
    state.endpoint(active.key()).unwrap().phase = Phase::Connecting;
    let dial = Dial::host(late.local(), Message::Lookup { service, private });
    state.start_dial(active.key(), dial);
    state.listen(late.key(), 0).unwrap();
    drop(state);
    let request = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert!(request.private().starts_with(b"early"));
    let passive = request.id();
    drop(request);
    passive.reject(b"").unwrap();
    asking.expect(RDMA_CM_EVENT_UNREACHABLE);
}
