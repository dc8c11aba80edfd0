//! One end, in the process where it lives.

mod windows;
mod workers;

use std::{
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;
use verbs_sys::{
    AccessFlags, AddressHandle, AsyncEventKind, CompletionChannel, CompletionQueue, Context,
    MemoryWindow, PathOptions, ProtectionDomain, QpAttrMask, QpState, QpType, QueuePair,
    QueuePairEndpoint, QueuePairInit, SharedReceiveQueue, WcStatus, WorkCompletion, ffi,
    find_device,
};

use super::{
    command::{
        Address, AsyncEvent, Bytes, Command, Completion, MemoryKind, Qp, QpSetup, Queue, Region,
        Request, Srq, Target,
    },
    memory::Memory,
    post::{post_recv, post_send, with_recvs},
};

/// How long to wait for what must come. An emulated machine is a hundred times slower than a real
/// one; nothing that works waits for so long.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// The objects of one end. Fields in the order in which they go.
pub struct Side {
    qps: Vec<Option<Pair>>,
    ahs: Vec<AddressHandle>,
    windows: Vec<Option<MemoryWindow>>,
    srqs: Vec<SharedReceiveQueue>,
    memories: Vec<Memory>,
    pds: Vec<ProtectionDomain>,
    channel: CompletionChannel,
    context: Context,
    memory: MemoryKind,
    gid_index: u8,
}

/// A queue pair with its own completion queues.
struct Pair {
    qp: QueuePair,
    send_cq: CompletionQueue,
    recv_cq: CompletionQueue,
    setup: QpSetup,
    psn: u32,
}

impl Pair {
    fn cq(&self, queue: Queue) -> &CompletionQueue {
        match queue {
            Queue::Send => &self.send_cq,
            Queue::Recv => &self.recv_cq,
        }
    }
}

impl Side {
    pub fn open(memory: MemoryKind) -> Self {
        let device = find_device(None).expect("no device");
        let context = device.open().expect("the device does not open");
        let (gid_index, _) = context.choose_gid(1).expect("no address");
        Self {
            qps: Vec::new(),
            ahs: Vec::new(),
            windows: Vec::new(),
            srqs: Vec::new(),
            memories: Vec::new(),
            pds: vec![context.alloc_pd().expect("no protection domain")],
            channel: context.create_comp_channel().expect("no channel"),
            context,
            memory,
            gid_index,
        }
    }

    /// Does what it is told and gives the answer that the command's description says.
    pub fn execute(&mut self, command: Command) -> Value {
        match command {
            Command::Open { .. } => panic!("already open"),
            Command::IsSoftware => return json(self.context.device().is_software()),
            Command::AllocPd => {
                self.pds.push(self.context.alloc_pd().expect("no domain"));
                return json(self.pds.len() - 1);
            }
            Command::Register { pd, len, access } => return json(self.register(pd, len, access)),
            Command::Deregister { region } => self.memories[region].deregister(),
            Command::TryDeregister { region } => {
                return json(self.memories[region].try_deregister());
            }
            Command::Rereg {
                region,
                len,
                pd,
                access,
            } => return json(self.rereg(region, len, pd, access)),
            Command::LoadFormer {
                region,
                offset,
                len,
            } => return json(Bytes(self.memories[region].load_former(offset, len))),
            Command::Capabilities => return json(self.capabilities()),
            Command::AllocMw { pd, kind } => return json(self.alloc_mw(pd, kind)),
            Command::BindMw { qp, window, bind } => return json(self.bind_mw(qp, window, bind)),
            Command::PostBind {
                qp,
                window,
                rkey,
                bind,
            } => return json(self.post_bind(qp, window, rkey, bind)),
            Command::DeallocMw { window } => drop(self.windows[window].take()),
            Command::Batter {
                qps,
                sources,
                target,
                len,
            } => return json(self.batter(&qps, &sources, target, len)),
            Command::Digest { region } => return json(self.digest(region)),
            Command::Store {
                region,
                offset,
                bytes,
            } => self.memories[region].store(offset, &bytes.0),
            Command::Fill { region, byte } => self.memories[region].fill(byte),
            Command::Load {
                region,
                offset,
                len,
            } => return json(Bytes(self.memories[region].load(offset, len))),
            Command::CreateQp { setup } => return json(self.create_qp(setup)),
            Command::Init { qp } => {
                let pair = self.pair(qp);
                let access = AccessFlags::from_bits_retain(pair.setup.access);
                pair.qp.to_init(access, 1).expect("no way to INIT");
            }
            Command::Endpoint { qp } => return json(self.endpoint(qp)),
            Command::ToRtr { qp, remote } => {
                let pair = self.pair(qp);
                let path = pair.setup.path(self.gid_index);
                let remote = remote.parse().expect("no endpoint");
                let result = pair.qp.to_rtr(&remote, &path);
                result.expect("no way to RTR");
            }
            Command::StartDatagrams { qp, qkey } => {
                let pair = self.pair(qp);
                let result = pair.qp.start_datagrams(1, qkey, pair.psn);
                result.expect("no way to RTS");
            }
            Command::CreateAh { remote } => return json(self.create_ah(&remote)),
            Command::ToRts { qp } => {
                let pair = self.pair(qp);
                let path = pair.setup.path(self.gid_index);
                pair.qp.to_rts(pair.psn, &path).expect("no way to RTS");
            }
            Command::ToSqd { qp } => self.change_state(qp, ffi::IBV_QPS_SQD),
            Command::ToSqdWithEvent { qp } => {
                let attr = ffi::ibv_qp_attr {
                    qp_state: ffi::IBV_QPS_SQD,
                    en_sqd_async_notify: 1,
                    ..ffi::ibv_qp_attr::zeroed()
                };
                let mask = QpAttrMask::STATE | QpAttrMask::EN_SQD_ASYNC_NOTIFY;
                self.qp(qp).modify(&attr, mask).expect("no way to SQD");
            }
            Command::Resume { qp } => self.change_state(qp, ffi::IBV_QPS_RTS),
            Command::ToErr { qp } => self.qp(qp).to_err().expect("no way to ERR"),
            Command::ToReset { qp } => self.change_state(qp, ffi::IBV_QPS_RESET),
            Command::DestroyQp { qp } => drop(self.qps[qp].take()),
            Command::State { qp } => return json(self.state(qp)),
            Command::PostSend { qp, list } => {
                return json(post_send(self.qp(qp), &self.ahs, &list));
            }
            Command::PostRecv { qp, list } => return json(post_recv(self.qp(qp), &list)),
            Command::Poll { qp, queue } => return json(poll(self.pair(qp).cq(queue))),
            Command::Wait { qp, queue } => return json(wait(self.pair(qp).cq(queue))),
            Command::TryPoll { qp, queue } => {
                let polled: Vec<_> = try_poll(self.pair(qp).cq(queue)).into_iter().collect();
                return json(polled);
            }
            Command::Capacity { qp, queue } => return json(self.pair(qp).cq(queue).capacity()),
            Command::ResizeCq { qp, queue, cqe } => {
                let resized = self.pair(qp).cq(queue).resize(cqe);
                return json(resized.map_err(|error| error.source.raw_os_error().unwrap_or(0)));
            }
            Command::Arm {
                qp,
                queue,
                solicited_only,
            } => {
                let result = self.pair(qp).cq(queue).req_notify(solicited_only);
                result.expect("cannot arm");
            }
            Command::Event { wait } => return json(self.event(wait)),
            Command::CreateSrq {
                pd,
                max_wr,
                max_sge,
            } => {
                let srq = self.pds[pd].create_srq(max_wr, max_sge);
                let srq = srq.expect("no shared receive queue");
                let (max_wr, max_sge, id) = (srq.max_wr(), srq.max_sge(), self.srqs.len());
                self.srqs.push(srq);
                return json(Srq {
                    id,
                    max_wr,
                    max_sge,
                });
            }
            Command::PostSrqRecv { srq, list } => {
                let srq = &self.srqs[srq];
                // SAFETY: `with_recvs` gives a valid list; for the memory see `post_recv`.
                return json(with_recvs(&list, |first| unsafe { srq.post_recv(first) }));
            }
            Command::ModifySrq {
                srq,
                max_wr,
                limit,
                mask,
            } => {
                let attr = ffi::ibv_srq_attr {
                    max_wr,
                    srq_limit: limit,
                    ..ffi::ibv_srq_attr::default()
                };
                return json(self.srqs[srq].modify(&attr, mask).is_ok());
            }
            Command::SrqLimit { srq } => {
                let attr = self.srqs[srq].query().expect("no attributes");
                return json(attr.srq_limit);
            }
            Command::SrqSize { srq } => {
                let attr = self.srqs[srq].query().expect("no attributes");
                // rdma_rxe tells of no more than was asked for when one is made.
                assert!(attr.max_wr >= self.srqs[srq].max_wr());
                return json(attr.max_wr);
            }
            Command::AsyncEvent { wait } => return json(self.async_event(wait)),
            Command::ReceiveAsleep { qp, count } => self.receive_asleep(qp, count),
            Command::ReceiveByEvents { qp, count } => {
                return json(self.receive_by_events(qp, count));
            }
            Command::FetchAdds {
                qps,
                results,
                target,
                count,
            } => return json(self.fetch_adds(&qps, results, target, count)),
            Command::CompareSwaps {
                qps,
                results,
                target,
                count,
            } => self.compare_swaps(&qps, results, target, count),
            Command::WriteUntilRefused { qp, source, target } => {
                return json(self.write_until_refused(qp, source, target));
            }
        }
        Value::Null
    }

    fn pair(&self, qp: usize) -> &Pair {
        self.qps[qp].as_ref().expect("the queue pair is destroyed")
    }

    fn qp(&self, qp: usize) -> &QueuePair {
        &self.pair(qp).qp
    }

    fn register(&mut self, pd: usize, len: usize, access: u32) -> Region {
        let access = AccessFlags::from_bits_retain(access);
        let memory =
            Memory::register(&self.pds[pd], self.memory, len, access).expect("registering failed");
        let region = memory.region();
        let answer = Region {
            id: self.memories.len(),
            addr: region.addr(),
            len,
            lkey: region.lkey(),
            rkey: region.rkey(),
        };
        self.memories.push(memory);
        answer
    }

    fn create_qp(&mut self, setup: QpSetup) -> Qp {
        let make = || {
            self.context
                .create_cq(setup.cqe, Some(&self.channel))
                .expect("no completion queue")
        };
        let send_cq = make();
        let recv_cq = if setup.one_cq {
            send_cq.clone()
        } else {
            make()
        };
        let init = QueuePairInit {
            srq: setup.srq.map(|srq| &self.srqs[srq]),
            max_send_wr: setup.max_send_wr,
            max_recv_wr: setup.max_recv_wr,
            max_send_sge: setup.max_sge,
            max_recv_sge: setup.max_sge,
            max_inline_data: setup.max_inline_data,
            sq_sig_all: setup.sq_sig_all,
            qp_type: match setup.qp_type {
                ffi::IBV_QPT_UC => QpType::Uc,
                ffi::IBV_QPT_UD => QpType::Ud,
                _ => QpType::Rc,
            },
            ..QueuePairInit::new(&send_cq, &recv_cq)
        };
        let qp = self.pds[setup.pd].create_qp(&init).expect("no queue pair");
        let (num, cap, id) = (qp.qp_num(), qp.cap(), self.qps.len());
        self.qps.push(Some(Pair {
            qp,
            send_cq,
            recv_cq,
            setup,
            // Anything: near the end, so that it wraps.
            psn: 0xff_fff0 + id as u32 % 16,
        }));
        Qp {
            id,
            num,
            max_send_wr: cap.max_send_wr as usize,
            max_recv_wr: cap.max_recv_wr as usize,
            max_send_sge: cap.max_send_sge as usize,
            max_recv_sge: cap.max_recv_sge as usize,
            max_inline_data: cap.max_inline_data as usize,
        }
    }

    fn create_ah(&mut self, remote: &str) -> usize {
        let remote: QueuePairEndpoint = remote.parse().expect("no endpoint");
        let path = PathOptions {
            gid_index: self.gid_index,
            ..PathOptions::default()
        };
        let ah = self.pds[0].create_ah(remote.gid, remote.lid, &path);
        self.ahs.push(ah.expect("no address handle"));
        self.ahs.len() - 1
    }

    fn endpoint(&self, qp: usize) -> Address {
        let pair = self.pair(qp);
        let path = pair.setup.path(self.gid_index);
        let endpoint = pair.qp.endpoint(&path, pair.psn).expect("no endpoint");
        endpoint.to_string()
    }

    fn change_state(&self, qp: usize, state: ffi::ibv_qp_state) {
        let attr = ffi::ibv_qp_attr {
            qp_state: state,
            ..ffi::ibv_qp_attr::zeroed()
        };
        let result = self.qp(qp).modify(&attr, QpAttrMask::STATE);
        result.expect("no such transition");
    }

    fn state(&self, qp: usize) -> u32 {
        let attr = self.qp(qp).query(QpAttrMask::STATE);
        attr.expect("no state").qp_state
    }

    fn event(&self, wait: bool) -> Option<(u32, Queue)> {
        let event = if wait {
            self.channel.wait_timeout(PATIENCE)
        } else {
            self.channel.try_get_event()
        };
        let event = event.expect("no event")?;
        Some(self.queue_of(event.queue()))
    }

    /// A completion queue as the number of its queue pair and which of its queues it is.
    fn queue_of(&self, cq: &CompletionQueue) -> (u32, Queue) {
        let of = |pair: &Pair| {
            let queue = [Queue::Send, Queue::Recv]
                .into_iter()
                .find(|queue| pair.cq(*queue) == cq)?;
            Some((pair.qp.qp_num(), queue))
        };
        let found = self.qps.iter().flatten().find_map(of);
        found.expect("a stray event")
    }

    fn async_event(&self, wait: bool) -> Option<AsyncEvent> {
        let event = if wait {
            self.context.next_async_event_timeout(PATIENCE)
        } else {
            self.context.try_get_async_event()
        };
        let event = event.expect("no event")?;
        let srq = match event.kind() {
            AsyncEventKind::SrqLimitReached(srq) => {
                let known = self.srqs.iter().position(|known| known == srq);
                Some(known.expect("a stray event"))
            }
            _ => None,
        };
        let cq = match event.kind() {
            AsyncEventKind::CqErr(cq) => Some(self.queue_of(cq)),
            _ => None,
        };
        let qp_num = match *event.kind() {
            AsyncEventKind::QpFatal(num)
            | AsyncEventKind::QpReqErr(num)
            | AsyncEventKind::QpAccessErr(num)
            | AsyncEventKind::CommEst(num)
            | AsyncEventKind::SqDrained(num)
            | AsyncEventKind::QpLastWqeReached(num) => {
                let of = |pair: &&Pair| event.is_of(&pair.qp);
                let pair = self.qps.iter().flatten().find(of).expect("a stray event");
                assert_eq!(pair.qp.qp_num(), num);
                Some(num)
            }
            _ => None,
        };
        Some(AsyncEvent {
            event_type: event.event_type(),
            qp_num,
            srq,
            cq,
        })
    }
}

fn json(answer: impl serde::Serialize) -> Value {
    serde_json::to_value(answer).expect("an answer that cannot travel")
}

/// A local element in a side's own memory.
fn element(memory: &Memory, offset: usize, len: u32) -> super::command::Element {
    super::command::Element {
        addr: memory.region().addr() + offset as u64,
        len,
        lkey: memory.region().lkey(),
    }
}

fn word(memory: &Memory, offset: usize) -> u64 {
    let bytes = memory.load(offset, 8);
    u64::from_ne_bytes(bytes.try_into().expect("8 bytes"))
}

/// Posts one request and waits for its success.
fn transfer(pair: &Pair, request: &Request) {
    post_send(&pair.qp, &[], std::slice::from_ref(request)).expect("cannot post");
    assert_eq!(wait(&pair.send_cq).status(), WcStatus::Success);
}

fn poll(cq: &CompletionQueue) -> Option<Completion> {
    try_poll(cq).expect("cannot poll")
}

fn try_poll(cq: &CompletionQueue) -> Option<Option<Completion>> {
    let mut completions = [WorkCompletion::default()];
    let count = cq.poll(&mut completions).ok()?;
    Some((count > 0).then(|| Completion::from(&completions[0])))
}

fn wait(cq: &CompletionQueue) -> Completion {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(completion) = poll(cq) {
            return completion;
        }
        assert!(Instant::now() < deadline, "no completion came");
        // Others may need this processor to get there.
        thread::yield_now();
    }
}

/// The state that a number stands for.
pub fn state(number: u32) -> QpState {
    number.into()
}
