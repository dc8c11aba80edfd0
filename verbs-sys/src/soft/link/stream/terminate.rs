//! Why a connection ends (RFC 5040, section 4.8).

use super::FrameError;
use super::fields::{Fields, Layout};
use crate::ffi::{
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
    ibv_wc_status,
};

/// The control word of a TERMINATE message. What else may follow, the headers of the segment in
/// question, is neither sent nor read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Terminate {
    /// 0 is RDMAP, 1 DDP, 2 what is below; 4 bits.
    pub layer: u8,
    /// The kind of error, 4 bits.
    pub etype: u8,
    pub code: u8,
}

impl Terminate {
    pub(in crate::soft) const LEN: usize = 4;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        let kind = self.layer << 4 | self.etype & 0x0f;
        Layout::new().u8(kind).u8(self.code).u16(0).done()
    }

    pub(in crate::soft) fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        if payload.len() < Self::LEN {
            return Err(FrameError::Length {
                part: "a TERMINATE's payload",
                found: payload.len(),
                expected: Self::LEN,
            });
        }
        let mut fields = Fields::new(payload);
        let kind = fields.u8();
        Ok(Self {
            layer: kind >> 4,
            etype: kind & 0x0f,
            code: fields.u8(),
        })
    }

    /// What a request that the peer refused so ends with.
    pub(in crate::soft) fn status(&self) -> ibv_wc_status {
        match (self.layer, self.etype, self.code) {
            // RDMAP's protection errors, and those of DDP's tagged buffers.
            (0, 1, _) | (1, 1, 0..=3) => IBV_WC_REM_ACCESS_ERR,
            // An unexpected opcode; a message too long for its buffer.
            (0, 2, 6) | (1, 2, 5) => IBV_WC_REM_INV_REQ_ERR,
            // No buffer for a message.
            (1, 2, 2) => IBV_WC_RNR_RETRY_EXC_ERR,
            _ => IBV_WC_REM_OP_ERR,
        }
    }

    /// How to tell a peer that its request ends with a status.
    pub(in crate::soft) fn of(status: ibv_wc_status) -> Self {
        let (layer, etype, code) = match status {
            // An access rights violation.
            IBV_WC_REM_ACCESS_ERR => (0, 1, 2),
            IBV_WC_REM_INV_REQ_ERR => (0, 2, 6),
            IBV_WC_RNR_RETRY_EXC_ERR => (1, 2, 2),
            // A catastrophe of this connection only.
            _ => (0, 2, 7),
        };
        Self { layer, etype, code }
    }

    /// How to tell a peer that what it sent is no frame that can come now.
    pub(in crate::soft) fn of_error(error: &FrameError) -> Self {
        let (layer, etype, code) = match error {
            FrameError::Crc { .. } => (2, 0, 2),
            FrameError::Queue { .. } => (1, 2, 1),
            FrameError::Sequence { .. } => (1, 2, 3),
            FrameError::Version {
                protocol: "DDP", ..
            } => (1, 2, 6),
            FrameError::Version { .. } => (0, 2, 5),
            // Unspecified.
            _ => (0, 2, 0xff),
        };
        Self { layer, etype, code }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::ffi::IBV_WC_LOC_PROT_ERR;

    proptest! {
        #[test]
        fn control_words_round_trip(layer in 0u8..16, etype in 0u8..16, code: u8) {
            let terminate = Terminate { layer, etype, code };
            prop_assert_eq!(Terminate::decode(&terminate.encode()), Ok(terminate));
        }
    }

    #[test]
    fn a_control_word_looks_as_the_standard_draws_it() {
        let terminate = Terminate {
            layer: 1,
            etype: 2,
            code: 5,
        };
        let mut bytes = terminate.encode().to_vec();
        assert_eq!(bytes, [0x12, 5, 0, 0]);
        for len in 0..4 {
            assert!(matches!(
                Terminate::decode(&bytes[..len]),
                Err(FrameError::Length { found, .. }) if found == len
            ));
        }
        bytes[2] = 0xe0;
        bytes.extend([0; 20]);
        assert_eq!(Terminate::decode(&bytes), Ok(terminate), "with headers");
    }

    #[test]
    fn statuses_survive_the_way() {
        for status in [
            IBV_WC_REM_ACCESS_ERR,
            IBV_WC_REM_INV_REQ_ERR,
            IBV_WC_RNR_RETRY_EXC_ERR,
            IBV_WC_REM_OP_ERR,
        ] {
            assert_eq!(Terminate::of(status).status(), status);
        }
        assert_eq!(
            Terminate::of(IBV_WC_LOC_PROT_ERR).status(),
            IBV_WC_REM_OP_ERR
        );
    }

    #[test]
    fn what_other_devices_send_has_a_status() {
        let table = [
            // Invalid STag, bounds, rights, foreign STag, wrap, and not to be invalidated.
            (0, 1, &[0, 1, 2, 3, 4, 9, 0xff][..], IBV_WC_REM_ACCESS_ERR),
            (1, 1, &[0, 1, 2, 3], IBV_WC_REM_ACCESS_ERR),
            (1, 1, &[4], IBV_WC_REM_OP_ERR),
            (0, 2, &[6], IBV_WC_REM_INV_REQ_ERR),
            (0, 2, &[5, 7, 8, 9, 0xff], IBV_WC_REM_OP_ERR),
            (1, 2, &[5], IBV_WC_REM_INV_REQ_ERR),
            (1, 2, &[2], IBV_WC_RNR_RETRY_EXC_ERR),
            (1, 2, &[1, 3, 4, 6], IBV_WC_REM_OP_ERR),
            // The CRC, and local catastrophes.
            (2, 0, &[2], IBV_WC_REM_OP_ERR),
            (0, 0, &[0], IBV_WC_REM_OP_ERR),
            (1, 0, &[0], IBV_WC_REM_OP_ERR),
        ];
        for (layer, etype, codes, status) in table {
            for &code in codes {
                let terminate = Terminate { layer, etype, code };
                assert_eq!(terminate.status(), status, "{terminate:?}");
            }
        }
    }
}
