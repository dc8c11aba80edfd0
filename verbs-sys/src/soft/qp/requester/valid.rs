//! What can be posted: ibv_post_send(3).

use super::super::Qp;
use super::super::stream::is_answered;
use super::window::Bind;
use super::{Request, list, total};
use crate::ffi::*;

impl Qp {
    /// What a posted request asks for, if it can be posted to this queue pair.
    ///
    /// # Safety
    ///
    /// As for `post_send`, of this one request.
    #[inline]
    pub(in crate::soft::qp) unsafe fn request<'a>(
        &self,
        wr: &'a ibv_send_wr,
    ) -> Result<Request<'a>, i32> {
        let num_sge = u32::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
        if num_sge > self.cap.max_send_sge {
            return Err(libc::EINVAL);
        }
        // SAFETY: the list has `num_sge` elements by the caller's promise.
        let sges = unsafe { list(wr.sg_list, num_sge) };
        let mut request = Request::new(wr, sges);
        if !self.executes(wr.opcode) {
            return Err(libc::EINVAL);
        }
        if self.is_xrc_sender() {
            // SAFETY: the type says that this member is meant; it is a plain integer.
            request.srqn = unsafe { wr.qp_type.xrc.remote_srqn };
        }
        match wr.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM if self.datagrams.is_some() => {
                // SAFETY: the opcode and the queue pair's type say which member is meant.
                let ud = unsafe { wr.wr.ud };
                if ud.ah.is_null() {
                    return Err(libc::EINVAL);
                }
                request.remote_addr = ud.ah as u64;
                request.rkey = ud.remote_qpn;
                request.compare_add = ud.remote_qkey.into();
            }
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV => {}
            IBV_WR_LOCAL_INV => request.sges = &[],
            IBV_WR_BIND_MW => {
                // SAFETY: as above; the window and the region are live by the caller's promise.
                let bind = unsafe { Bind::posted(&wr.extra.bind_mw) }?;
                request = bind.request(wr.send_flags);
            }
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ => {
                // SAFETY: the opcode says which member is meant; all are plain integers.
                let rdma = unsafe { wr.wr.rdma };
                request.remote_addr = rdma.remote_addr;
                request.rkey = rdma.rkey;
            }
            // The man page has no field for what is written atomically: it is here where it comes from
            // ibv_wr_atomic_write.
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD | IBV_WR_ATOMIC_WRITE => {
                // SAFETY: as above.
                let atomic = unsafe { wr.wr.atomic };
                request.remote_addr = atomic.remote_addr;
                request.rkey = atomic.rkey;
                request.compare_add = atomic.compare_add;
                request.swap = atomic.swap;
            }
            _ => return Err(libc::EINVAL),
        }
        if request.is(IBV_SEND_INLINE)
            && (is_answered(wr.opcode) || total(sges) > u64::from(self.cap.max_inline_data))
        {
            return Err(libc::EINVAL);
        }
        Ok(request)
    }

    /// Whether this type of queue pair has an operation; the table of ibv_post_send(3).
    #[inline]
    pub(super) fn executes(&self, opcode: u32) -> bool {
        match self.qp_type {
            IBV_QPT_UD => matches!(opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM),
            IBV_QPT_UC => matches!(
                opcode,
                IBV_WR_SEND
                    | IBV_WR_SEND_WITH_IMM
                    | IBV_WR_SEND_WITH_INV
                    | IBV_WR_RDMA_WRITE
                    | IBV_WR_RDMA_WRITE_WITH_IMM
                    | IBV_WR_BIND_MW
                    | IBV_WR_LOCAL_INV
            ),
            IBV_QPT_XRC_SEND => opcode != IBV_WR_ATOMIC_WRITE,
            IBV_QPT_XRC_RECV => false,
            _ => true,
        }
    }
}
