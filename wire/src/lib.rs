//! Zero-copy messages in registered memory, and the connections that carry them.
#![forbid(unsafe_code)]

mod archive;
mod encode;
mod header;
mod view;

pub use archive::{Cause, Decoder, Encode, Encoder, View};
pub use encode::{EncodeError, encode, encode_raw, encode_with_body};
pub use header::{
    BODY_ALIGN, FIRST_RESERVED_KIND, Frame, FrameError, HEADER_LEN, Header, MAGIC, VERSION,
};
pub use view::{ViewError, view, view_bytes};
