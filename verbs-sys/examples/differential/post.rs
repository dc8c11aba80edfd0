//! Posting: a program's requests in the form that C wants.

use std::fmt::Write as _;

use verbs_sys::{QpType, ffi};

use crate::connect::QKEY;
use crate::end::{End, Refused};
use crate::program::{Key, Place, Recv, Request, Side};
use crate::run::World;

impl World<'_> {
    fn sge(&self, pair: usize, place: &Place) -> ffi::ibv_sge {
        let region = &self.memories[place.region].region;
        ffi::ibv_sge {
            addr: region.addr().wrapping_add_signed(place.offset),
            length: place.len,
            lkey: match place.key {
                Key::Good => region.lkey(),
                Key::Flipped => region.lkey() ^ 1 << 8,
                Key::Stale => self.stale.0,
                Key::Window => self.window_key(pair),
                Key::FormerWindow => self.former_window_key(pair),
            },
        }
    }

    fn target(&self, pair: usize, place: &Place) -> (u64, u32) {
        let region = &self.memories[place.region].region;
        let rkey = match place.key {
            Key::Good => region.rkey(),
            Key::Flipped => region.rkey() ^ 1 << 8,
            Key::Stale => self.stale.1,
            Key::Window => self.window_key(pair),
            Key::FormerWindow => self.former_window_key(pair),
        };
        (region.addr().wrapping_add_signed(place.offset), rkey)
    }

    pub fn post_recv(&mut self, pair: usize, side: Side, list: &[Recv], trace: &mut String) {
        let mut elements: Vec<Vec<ffi::ibv_sge>> =
            list.iter().map(|recv| self.sges(pair, recv)).collect();
        let mut wrs: Vec<ffi::ibv_recv_wr> = list
            .iter()
            .zip(&mut elements)
            .map(|(recv, elements)| ffi::ibv_recv_wr {
                wr_id: recv.id,
                sg_list: elements.as_mut_ptr(),
                num_sge: elements.len() as i32,
                ..ffi::ibv_recv_wr::zeroed()
            })
            .collect();
        write_posted(trace, self.end(pair, side).post_recv(&mut wrs));
    }

    fn sges(&self, pair: usize, recv: &Recv) -> Vec<ffi::ibv_sge> {
        let header = recv.header.then(|| ffi::ibv_sge {
            addr: self.headers.region.addr(),
            length: 40,
            lkey: self.headers.region.lkey(),
        });
        let places = recv.places.iter().map(|place| self.sge(pair, place));
        header.into_iter().chain(places).collect()
    }

    pub fn post_send(&mut self, pair: usize, side: Side, list: &[Request], trace: &mut String) {
        let peer = self.end(pair, side.other()).qp.qp_num();
        let is_ud = self.end(pair, side).qp.qp_type() == QpType::Ud;
        let mut elements: Vec<Vec<ffi::ibv_sge>> = list
            .iter()
            .map(|request| {
                request
                    .places
                    .iter()
                    .map(|place| self.sge(pair, place))
                    .collect()
            })
            .collect();
        let mut wrs: Vec<ffi::ibv_send_wr> = list
            .iter()
            .zip(&mut elements)
            .map(|(request, elements)| self.send_wr(pair, request, elements, is_ud.then_some(peer)))
            .collect();
        write_posted(trace, self.end(pair, side).post_send(&mut wrs));
    }

    fn send_wr(
        &self,
        pair: usize,
        request: &Request,
        elements: &mut [ffi::ibv_sge],
        datagram_to: Option<u32>,
    ) -> ffi::ibv_send_wr {
        let mut wr = ffi::ibv_send_wr {
            wr_id: request.id,
            sg_list: elements.as_mut_ptr(),
            num_sge: elements.len() as i32,
            opcode: request.opcode,
            send_flags: request.flags,
            imm_data: request.imm.to_be(),
            ..ffi::ibv_send_wr::zeroed()
        };
        let (remote_addr, rkey) = request
            .target
            .as_ref()
            .map_or((0, 0), |target| self.target(pair, target));
        match request.opcode {
            ffi::IBV_WR_LOCAL_INV | ffi::IBV_WR_SEND_WITH_INV => wr.imm_data = rkey,
            ffi::IBV_WR_SEND | ffi::IBV_WR_SEND_WITH_IMM => {}
            ffi::IBV_WR_ATOMIC_CMP_AND_SWP | ffi::IBV_WR_ATOMIC_FETCH_AND_ADD => {
                wr.wr.atomic = ffi::ibv_send_wr_atomic {
                    remote_addr,
                    compare_add: request.compare_add,
                    swap: request.swap,
                    rkey,
                };
            }
            _ => wr.wr.rdma = ffi::ibv_send_wr_rdma { remote_addr, rkey },
        }
        if let Some(remote_qpn) = datagram_to {
            wr.wr.ud = ffi::ibv_send_wr_ud {
                ah: self.ah.as_raw(),
                remote_qpn,
                remote_qkey: QKEY ^ u32::from(request.wrong_qkey),
            };
        }
        wr
    }

    /// Posts until the queue, in which so many are already, is full.
    pub fn fill(
        &mut self,
        pair: usize,
        side: Side,
        there: u32,
        post: impl Fn(&mut End) -> Result<(), Refused>,
        trace: &mut String,
    ) {
        let asked = self.program.pairs[pair].max_wr;
        let end = self.end(pair, side);
        let mut count = there;
        // A device may give more than was asked for, but not without end.
        let refused = loop {
            if count > 8 * asked {
                break "nothing".to_owned();
            }
            match post(end) {
                Ok(()) => count += 1,
                Err(refused) => break refused.error,
            }
        };
        let enough = count >= asked;
        let _ = writeln!(trace, " full {refused} enough {enough}");
    }
}

pub fn write_posted(trace: &mut String, result: Result<(), Refused>) {
    if let Err(Refused { error, index }) = result {
        let _ = match index {
            Some(index) => writeln!(trace, " post {error} at {index}"),
            None => writeln!(trace, " post {error}"),
        };
    }
}
