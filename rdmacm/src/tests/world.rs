//! What every test needs: channels and identifiers that go with their owner, and events.

use core::ffi::{c_int, c_void};
use core::ptr;
use std::net::SocketAddr;

use rustix::io::Errno;
use verbs_sys::ffi::{ibv_qp_init_attr, ibv_qp_type};

use crate::abi::*;
use crate::address::{read, to_c};
use crate::calls::testing::*;
use crate::endpoint::Phase;
use crate::message::Message;
use crate::ports;
use crate::shared::{Key, Shared};

/// How long something that must happen may take on a busy machine.
const PATIENCE_MS: c_int = 60_000;

/// A channel.
pub struct Channel(pub *mut rdma_event_channel);

impl Channel {
    pub fn new() -> Self {
        let channel = rdma_create_event_channel();
        assert!(!channel.is_null());
        Self(channel)
    }

    /// A new identifier of it.
    pub fn id(&self, space: rdma_port_space) -> Id {
        let mut id = ptr::null_mut();
        // SAFETY: the channel is alive, and there is a place for the result.
        let code = unsafe { rdma_create_id(self.0, &mut id, ptr::null_mut(), space) };
        assert_eq!(code, 0);
        Id(id)
    }

    /// One that listens at a free port.
    pub fn listener(&self, space: rdma_port_space, backlog: c_int) -> Id {
        let id = self.id(space);
        assert_eq!(id.bind("127.0.0.1:0"), Ok(()));
        // SAFETY: alive.
        assert_eq!(unsafe { rdma_listen(id.0, backlog) }, 0);
        id
    }

    /// The next event, which must be of a kind.
    pub fn expect(&self, kind: rdma_cm_event_type) -> Event {
        self.wait();
        let mut event = ptr::null_mut();
        // SAFETY: alive, and a place for the result.
        let code = unsafe { rdma_get_cm_event(self.0, &mut event) };
        assert_eq!(code, 0);
        let event = Event(event);
        assert_eq!(event.get().event, kind, "status {}", event.get().status);
        event
    }

    /// Waits until an event can be had.
    pub fn wait(&self) {
        // SAFETY: alive.
        let fd = unsafe { (*self.0).fd };
        let mut wanted = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one structure.
        let ready = unsafe { libc::poll(&mut wanted, 1, PATIENCE_MS) };
        assert_eq!(ready, 1, "an event comes");
    }

    /// Whether an event can be had.
    pub fn is_empty(&self) -> bool {
        // SAFETY: alive.
        let fd = unsafe { (*self.0).fd };
        let mut wanted = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one structure.
        unsafe { libc::poll(&mut wanted, 1, 0) == 0 }
    }
}

impl Drop for Channel {
    fn drop(&mut self) {
        // SAFETY: the test's identifiers were declared later, and so are gone.
        unsafe { rdma_destroy_event_channel(self.0) };
    }
}

/// An identifier.
pub struct Id(pub *mut rdma_cm_id);

impl Id {
    pub fn get(&self) -> &rdma_cm_id {
        // SAFETY: alive.
        unsafe { &*self.0 }
    }

    pub fn key(&self) -> Key {
        // SAFETY: alive.
        unsafe { crate::id::Id::key(self.0) }.unwrap()
    }

    pub fn bind(&self, address: &str) -> Result<(), Errno> {
        let (storage, _) = to_c(address.parse().unwrap());
        // SAFETY: alive, and a whole address.
        result(unsafe { rdma_bind_addr(self.0, (&raw const storage).cast_mut().cast()) })
    }

    pub fn resolve(&self, address: SocketAddr) -> Result<(), Errno> {
        let (storage, _) = to_c(address);
        let to = (&raw const storage).cast_mut().cast();
        // SAFETY: alive, and a whole address.
        result(unsafe { rdma_resolve_addr(self.0, ptr::null_mut(), to, 1000) })
    }

    /// Where it is bound.
    pub fn local(&self) -> SocketAddr {
        // SAFETY: a whole address.
        unsafe { read((&raw const self.get().route.addr.src_addr).cast()) }.unwrap()
    }

    /// Where its peer is.
    pub fn remote(&self) -> SocketAddr {
        // SAFETY: a whole address.
        unsafe { read((&raw const self.get().route.addr.dst_addr).cast()) }.unwrap()
    }

    pub fn create_qp(&self, qp_type: ibv_qp_type) {
        let mut init = ibv_qp_init_attr::zeroed();
        init.qp_type = qp_type;
        // SAFETY: alive, and a readable structure.
        let code = unsafe { rdma_create_qp(self.0, ptr::null_mut(), &mut init) };
        assert_eq!(code, 0);
    }

    /// Resolves the way to who listens, and makes a queue pair.
    pub fn prepare(&self, channel: &Channel, to: &Self) {
        self.resolve(to.local()).unwrap();
        channel.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
        // SAFETY: alive.
        assert_eq!(unsafe { rdma_resolve_route(self.0, 1000) }, 0);
        channel.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
        self.create_qp(self.get().qp_type);
    }

    pub fn connect(&self, param: &Param<'_>) -> Result<(), Errno> {
        let mut param = param.to_c();
        // SAFETY: alive, and readable.
        result(unsafe { rdma_connect(self.0, &mut param) })
    }

    pub fn accept(&self, param: &Param<'_>) -> Result<(), Errno> {
        let mut param = param.to_c();
        // SAFETY: alive, and readable.
        result(unsafe { rdma_accept(self.0, &mut param) })
    }

    pub fn reject(&self, private: &[u8]) -> Result<(), Errno> {
        let len = private.len() as u8;
        // SAFETY: alive, and readable.
        result(unsafe { rdma_reject(self.0, private.as_ptr().cast(), len) })
    }

    pub fn disconnect(&self) -> Result<(), Errno> {
        // SAFETY: alive.
        result(unsafe { rdma_disconnect(self.0) })
    }

    /// Waits until the thread, or another, has brought it to a phase.
    pub fn until(&self, phase: Phase) {
        until(self.key(), phase);
    }

    /// Has its time come.
    pub fn time_out(&self) {
        Shared::get().lock().endpoint_timed_out(self.key());
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: alive, and a failing test has no more use for it.
        unsafe {
            rdma_destroy_qp(self.0);
            if !std::thread::panicking() {
                assert_eq!(rdma_destroy_id(self.0), 0);
            }
        }
    }
}

/// Parameters of a connection.
#[derive(Clone, Copy, Debug, Default)]
pub struct Param<'a> {
    pub private: &'a [u8],
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub retry: u8,
    pub rnr_retry: u8,
    pub qp_num: u32,
}

impl Param<'_> {
    fn to_c(self) -> rdma_conn_param {
        rdma_conn_param {
            private_data: self.private.as_ptr().cast::<c_void>(),
            private_data_len: self.private.len() as u8,
            responder_resources: self.responder_resources,
            initiator_depth: self.initiator_depth,
            flow_control: 0,
            retry_count: self.retry,
            rnr_retry_count: self.rnr_retry,
            srq: 0,
            qp_num: self.qp_num,
        }
    }
}

/// An event; dropping it acknowledges it.
pub struct Event(*mut rdma_cm_event);

// SAFETY: events may be acknowledged by any thread.
unsafe impl Send for Event {}

impl Event {
    pub fn get(&self) -> &rdma_cm_event {
        // SAFETY: alive.
        unsafe { &*self.0 }
    }

    pub fn status(&self) -> c_int {
        self.get().status
    }

    /// The identifier that a request has made.
    pub fn id(&self) -> Id {
        Id(self.get().id)
    }

    pub fn conn(&self) -> rdma_conn_param {
        // SAFETY: plain data in either form.
        unsafe { self.get().param.conn }
    }

    pub fn ud(&self) -> rdma_ud_param {
        // SAFETY: plain data in either form.
        unsafe { self.get().param.ud }
    }

    pub fn private(&self) -> &[u8] {
        let conn = self.conn();
        if conn.private_data.is_null() {
            return &[];
        }
        // SAFETY: the event has so many bytes as long as it lives.
        unsafe {
            std::slice::from_raw_parts(conn.private_data.cast(), conn.private_data_len.into())
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: got once, and acknowledged once.
        assert_eq!(unsafe { rdma_ack_cm_event(self.0) }, 0);
    }
}

/// As [`Id::until`].
pub fn until(key: Key, phase: Phase) {
    while Shared::get().lock().endpoint(key).unwrap().phase != phase {
        std::thread::yield_now();
    }
}

/// Two connected identifiers: who asked, and who accepted.
pub fn connected(channels: [&Channel; 2], listener: &Id) -> (Id, Id) {
    let [asking, listening] = channels;
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(asking, listener);
    active.connect(&Param::default()).unwrap();
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.create_qp(passive.get().qp_type);
    passive.accept(&Param::default()).unwrap();
    asking.expect(RDMA_CM_EVENT_ESTABLISHED);
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
    (active, passive)
}

/// A stranger's connection to who listens.
pub fn dial(listener: &Id) -> std::os::unix::net::UnixStream {
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    );
    let socket = socket.unwrap();
    let name = ports::name(listener.get().ps, listener.local()).unwrap();
    rustix::net::connect(&socket, &name).unwrap();
    let stream = std::os::unix::net::UnixStream::from(socket);
    let patience = std::time::Duration::from_millis(PATIENCE_MS as u64);
    stream.set_read_timeout(Some(patience)).unwrap();
    stream
}

/// The next message that comes through; `None` at the end.
pub fn hear(stream: &mut impl std::io::Read) -> Option<Message> {
    let mut bytes = Vec::new();
    loop {
        if let Some((message, len)) = Message::decode(&bytes).unwrap() {
            assert_eq!(len, bytes.len());
            return Some(message);
        }
        let mut byte = [0];
        match stream.read(&mut byte) {
            Ok(1) => bytes.extend(byte),
            // A reset is an end, too.
            Ok(_) | Err(_) => return None,
        }
    }
}

/// What a call says.
pub fn result(code: c_int) -> Result<(), Errno> {
    match code {
        0 => Ok(()),
        _ => Err(crate::address::errno(std::io::Error::last_os_error())),
    }
}
