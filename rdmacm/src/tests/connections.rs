//! Connections as they should go.

use core::ptr;

use rustix::io::Errno;
use verbs_sys::ffi::*;

use super::world::*;
use crate::abi::*;
use crate::calls::testing::*;
use crate::fake::{self, MAX_RD_ATOMIC};
use crate::message::{REP_PRIVATE, REQ_PRIVATE};

#[test]
fn both_sides_agree_on_everything() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(&asking, &listener);
    assert_eq!(active.remote(), listener.local());
    assert!(!active.get().verbs.is_null() && !active.get().pd.is_null());
    assert_eq!(
        (active.get().port_num, active.get().route.num_paths),
        (1, 1)
    );
    let asked = Param {
        private: b"question",
        responder_resources: 3,
        initiator_depth: 5,
        retry: 6,
        rnr_retry: 2,
        qp_num: 0,
    };
    active.connect(&asked).unwrap();

    let request = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(request.get().listen_id, listener.0);
    let passive = request.id();
    assert_eq!(passive.remote(), active.local());
    assert_eq!(passive.local(), listener.local());
    assert_eq!(passive.get().channel, listening.0);
    // Each side's resources are the other side's depth.
    let conn = request.conn();
    assert_eq!((conn.responder_resources, conn.initiator_depth), (5, 3));
    assert_eq!((conn.retry_count, conn.rnr_retry_count), (6, 2));
    // SAFETY: alive.
    let (active_qp, active_number) = unsafe { (active.get().qp, (*active.get().qp).qp_num) };
    assert_eq!(conn.qp_num, active_number);
    assert_eq!(request.private().len(), REQ_PRIVATE);
    assert!(request.private().starts_with(b"question\0"));
    passive.create_qp(IBV_QPT_RC);
    let answer = Param {
        private: b"answer",
        responder_resources: 4,
        initiator_depth: 2,
        rnr_retry: 7,
        ..Param::default()
    };
    passive.accept(&answer).unwrap();
    drop(request);

    let established = asking.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(established.get().id, active.0);
    assert_eq!(established.private().len(), REP_PRIVATE);
    assert!(established.private().starts_with(b"answer\0"));
    let conn = established.conn();
    assert_eq!((conn.responder_resources, conn.initiator_depth), (2, 4));
    assert_eq!(
        listening.expect(RDMA_CM_EVENT_ESTABLISHED).get().id,
        passive.0
    );

    let passive_qp = passive.get().qp;
    let way = [IBV_QPS_INIT, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS];
    assert_eq!(fake::states(active_qp), way);
    assert_eq!(fake::states(passive_qp), way);
    let (active_moves, passive_moves) = (fake::moves(active_qp), fake::moves(passive_qp));
    let [(_, a0), (a1, _), (a2, _), (a3, _)] = &active_moves[..] else {
        panic!("four states");
    };
    let [_, (p1, _), (p2, _), (p3, _)] = &passive_moves[..] else {
        panic!("four states");
    };
    assert_eq!(
        *a0,
        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS
    );
    assert_eq!(active_moves[0].0.qp_access_flags, 0);
    let all = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC;
    assert_eq!((a1.qp_access_flags, p1.qp_access_flags), (all, all));
    // Each has what the other said.
    assert_eq!(p2.dest_qp_num, active_number);
    // SAFETY: alive.
    assert_eq!(a2.dest_qp_num, unsafe { (*passive_qp).qp_num });
    assert_eq!((a2.rq_psn, p2.rq_psn), (p3.sq_psn, a3.sq_psn));
    assert_eq!((a2.path_mtu, p2.path_mtu), (IBV_MTU_2048, IBV_MTU_2048));
    assert_eq!((a2.max_dest_rd_atomic, a3.max_rd_atomic), (2, 4));
    assert_eq!((p2.max_dest_rd_atomic, p3.max_rd_atomic), (4, 2));
    assert_eq!((a3.retry_cnt, p3.retry_cnt), (6, 6));
    assert_eq!((a3.rnr_retry, p3.rnr_retry), (7, 2));
    // SAFETY: plain bytes in either form.
    let dgid = unsafe { a2.ah_attr.grh.dgid.raw };
    assert_eq!(dgid[10..], [0xff, 0xff, 127, 0, 0, 1]);

    active.disconnect().unwrap();
    assert_eq!(asking.expect(RDMA_CM_EVENT_DISCONNECTED).get().id, active.0);
    assert_eq!(
        listening.expect(RDMA_CM_EVENT_DISCONNECTED).get().id,
        passive.0
    );
    passive.disconnect().unwrap();
    assert_eq!(fake::states(active_qp).last(), Some(&IBV_QPS_ERR));
    assert_eq!(fake::states(passive_qp).last(), Some(&IBV_QPS_ERR));
    assert_eq!(
        asking.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT).get().id,
        active.0
    );
    assert_eq!(
        listening.expect(RDMA_CM_EVENT_TIMEWAIT_EXIT).get().id,
        passive.0
    );
    assert!(asking.is_empty() && listening.is_empty());
}

#[test]
fn resources_are_what_the_device_has_where_nobody_says() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(&asking, &listener);
    let beyond = Param {
        responder_resources: MAX_RD_ATOMIC + 1,
        ..Param::default()
    };
    assert_eq!(active.connect(&beyond), Err(Errno::INVAL));
    let beyond = Param {
        initiator_depth: MAX_RD_ATOMIC + 1,
        ..Param::default()
    };
    assert_eq!(active.connect(&beyond), Err(Errno::INVAL));
    // SAFETY: alive, and no parameters are given.
    assert_eq!(unsafe { rdma_connect(active.0, ptr::null_mut()) }, 0);
    let request = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    let conn = request.conn();
    let most = (MAX_RD_ATOMIC, MAX_RD_ATOMIC);
    assert_eq!((conn.responder_resources, conn.initiator_depth), most);
    assert_eq!((conn.retry_count, conn.rnr_retry_count), (7, 7));
    let passive = request.id();
    drop(request);
    passive.create_qp(IBV_QPT_RC);
    // SAFETY: alive, and no parameters are given.
    assert_eq!(unsafe { rdma_accept(passive.0, ptr::null_mut()) }, 0);
    let established = asking.expect(RDMA_CM_EVENT_ESTABLISHED);
    let conn = established.conn();
    assert_eq!((conn.responder_resources, conn.initiator_depth), most);
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
}

#[test]
fn queue_pairs_of_the_application_are_connected_by_itself() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.resolve(listener.local()).unwrap();
    asking.expect(RDMA_CM_EVENT_ADDR_RESOLVED);
    // SAFETY: alive.
    assert_eq!(unsafe { rdma_resolve_route(active.0, 0) }, 0);
    asking.expect(RDMA_CM_EVENT_ROUTE_RESOLVED);
    // SAFETY: alive, and no parameters are given.
    let nothing = result(unsafe { rdma_connect(active.0, ptr::null_mut()) });
    assert_eq!(nothing, Err(Errno::INVAL));
    let number = |qp_num| Param {
        qp_num,
        responder_resources: 1,
        initiator_depth: 1,
        ..Param::default()
    };
    active.connect(&number(0xabc)).unwrap();
    let request = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    assert_eq!(request.conn().qp_num, 0xabc);
    let passive = request.id();
    assert_eq!(attributes(&passive, IBV_QPS_RTR).dest_qp_num, 0xabc);
    passive.accept(&number(0xdef)).unwrap();
    drop(request);
    let response = asking.expect(RDMA_CM_EVENT_CONNECT_RESPONSE);
    assert_eq!(response.conn().qp_num, 0xdef);
    assert_eq!(attributes(&active, IBV_QPS_RTR).dest_qp_num, 0xdef);
    assert_eq!(attributes(&active, IBV_QPS_RTS).max_rd_atomic, 1);
    assert!(listening.is_empty());
    // SAFETY: alive.
    assert_eq!(unsafe { rdma_establish(active.0) }, 0);
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
    // SAFETY: alive.
    let again = result(unsafe { rdma_establish(active.0) });
    assert_eq!(again, Err(Errno::INVAL));
}

fn attributes(id: &Id, state: ibv_qp_state) -> ibv_qp_attr {
    let mut attr = ibv_qp_attr::zeroed();
    attr.qp_state = state;
    let mut mask = 0;
    // SAFETY: alive, and places for the results.
    assert_eq!(unsafe { rdma_init_qp_attr(id.0, &mut attr, &mut mask) }, 0);
    assert_ne!(mask as u32 & IBV_QP_STATE, 0);
    attr
}

#[test]
fn a_message_before_the_last_one_establishes() {
    let (asking, listening) = (Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(&asking, &listener);
    active.connect(&Param::default()).unwrap();
    let passive = listening.expect(RDMA_CM_EVENT_CONNECT_REQUEST).id();
    passive.create_qp(IBV_QPT_RC);
    let notify = |id: &Id| {
        // SAFETY: alive.
        result(unsafe { rdma_notify(id.0, IBV_EVENT_COMM_EST) })
    };
    assert_eq!(notify(&passive), Err(Errno::INVAL));
    passive.accept(&Param::default()).unwrap();
    notify(&passive).unwrap();
    listening.expect(RDMA_CM_EVENT_ESTABLISHED);
    assert_eq!(notify(&passive), Err(Errno::ISCONN));
    // The last message makes no second event.
    asking.expect(RDMA_CM_EVENT_ESTABLISHED);
    active.disconnect().unwrap();
    listening.expect(RDMA_CM_EVENT_DISCONNECTED);
    asking.expect(RDMA_CM_EVENT_DISCONNECTED);
}

#[test]
fn an_identifier_can_change_its_channel() {
    let (asking, listening, third) = (Channel::new(), Channel::new(), Channel::new());
    let listener = listening.listener(RDMA_PS_TCP, 0);
    let active = asking.id(RDMA_PS_TCP);
    active.prepare(&asking, &listener);
    active.connect(&Param::default()).unwrap();
    listening.wait();
    // The request moves, and so does what is requested.
    // SAFETY: alive.
    assert_eq!(unsafe { rdma_migrate_id(listener.0, third.0) }, 0);
    assert!(listening.is_empty());
    let request = third.expect(RDMA_CM_EVENT_CONNECT_REQUEST);
    let passive = request.id();
    assert_eq!(
        (passive.get().channel, listener.get().channel),
        (third.0, third.0)
    );
    drop(request);
    passive.reject(b"").unwrap();
    asking.expect(RDMA_CM_EVENT_REJECTED);
}

#[test]
fn synchronous_calls_wait_for_their_events() {
    let info = |flags, node: &std::ffi::CStr, service: &std::ffi::CStr| {
        // SAFETY: integers and pointers.
        let mut hints: rdma_addrinfo = unsafe { zeroed() };
        hints.ai_flags = flags;
        hints.ai_port_space = RDMA_PS_TCP as i32;
        let mut info = ptr::null_mut();
        // SAFETY: strings, hints, and a place for the result.
        let code = unsafe { rdma_getaddrinfo(node.as_ptr(), service.as_ptr(), &hints, &mut info) };
        assert_eq!(code, 0);
        info
    };
    let mut init = ibv_qp_init_attr::zeroed();
    init.cap.max_send_wr = 4;
    let mut listener = ptr::null_mut();
    let wanted = info(RAI_PASSIVE, c"127.0.0.1", c"0");
    // SAFETY: alive, and places for results.
    unsafe {
        assert_eq!(
            rdma_create_ep(&mut listener, wanted, ptr::null_mut(), &mut init),
            0
        );
        rdma_freeaddrinfo(wanted);
        assert_eq!(rdma_listen(listener, 1), 0);
    }
    let listener = Id(listener);
    let port = std::ffi::CString::new(listener.local().port().to_string()).unwrap();
    std::thread::scope(|scope| {
        let at = listener.0 as usize;
        let server = scope.spawn(move || {
            let mut passive = ptr::null_mut();
            // SAFETY: the listener lives until this thread has ended.
            let code = unsafe { rdma_get_request(at as *mut rdma_cm_id, &mut passive) };
            assert_eq!(code, 0);
            let passive = Id(passive);
            // As its template says.
            assert!(!passive.get().qp.is_null() && !passive.get().event.is_null());
            // SAFETY: alive.
            assert_eq!(unsafe { (*passive.get().send_cq).cqe }, 4);
            assert_eq!(passive.accept(&Param::default()), Ok(()));
            // SAFETY: a synchronous identifier shows its last event.
            let kind = unsafe { (*passive.get().event).event };
            assert_eq!(kind, RDMA_CM_EVENT_ESTABLISHED);
            passive.disconnect().unwrap();
        });
        let wanted = info(0, c"127.0.0.1", &port);
        let mut active = ptr::null_mut();
        let mut init = init;
        // SAFETY: alive, and places for results.
        unsafe {
            assert_eq!(
                rdma_create_ep(&mut active, wanted, ptr::null_mut(), &mut init),
                0
            );
            rdma_freeaddrinfo(wanted);
        }
        let active = Id(active);
        active.connect(&Param::default()).unwrap();
        // SAFETY: a synchronous identifier shows its last event.
        let kind = unsafe { (*active.get().event).event };
        assert_eq!(kind, RDMA_CM_EVENT_ESTABLISHED);
        active.disconnect().unwrap();
        server.join().unwrap();
    });
    let nobody = info(0, c"127.0.0.1", c"1");
    let mut active = ptr::null_mut();
    // SAFETY: alive, and places for results.
    unsafe {
        assert_eq!(
            rdma_create_ep(&mut active, nobody, ptr::null_mut(), &mut init),
            0
        );
        rdma_freeaddrinfo(nobody);
    }
    let active = Id(active);
    assert_eq!(active.connect(&Param::default()), Err(Errno::CONNREFUSED));
}
