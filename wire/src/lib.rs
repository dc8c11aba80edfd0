#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod archive;
mod bring_up;
mod config;
mod credits;
mod encode;
mod endpoint;
mod error;
mod event;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod greeting;
mod header;
mod listener;
mod message;
mod shared;
mod talk;
mod view;

/// The layers below and the serializer, of which this crate's API has types and traits.
pub use {mr_pool, rkyv, verbs_sys};

pub use archive::{Cause, Decoder, Encode, Encoder, View};
pub use config::{Config, ConfigError};
pub use encode::{EncodeError, encode, encode_raw, encode_with_body};
pub use endpoint::{Endpoint, EndpointStats, WaitError};
pub use error::{AcceptError, BindError, ConnectError, DeviceFailure, EndpointError};
pub use event::{
    ConnectionId, DisconnectCause, Event, OperationError, OperationErrorKind, SendError,
    SendErrorKind,
};
pub use greeting::{GREETING_VERSION, GreetingError, RejectReason};
pub use header::{
    BODY_ALIGN, FIRST_RESERVED_KIND, Frame, FrameError, HEADER_LEN, Header, MAGIC, VERSION,
};
pub use listener::{Listener, Stopper};
pub use message::{OutgoingMessage, Received};
pub use shared::{Acceptor, Established, Waker};
pub use verbs_sys::{RemoteAddr, WcStatus};
pub use view::{ViewError, view, view_bytes};
