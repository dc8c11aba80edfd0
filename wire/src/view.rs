//! Reading a message in place.

use rkyv::api::low;

use crate::archive::{Cause, View};
use crate::header::Frame;

/// Why the archive of a message is not what was expected.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "view: message of kind {kind} with {len} bytes of archive is not a valid {expected}: {cause}"
)]
pub struct ViewError {
    /// The message's kind.
    pub kind: u16,
    /// Length of its archive in bytes.
    pub len: usize,
    /// The type that was asked for.
    pub expected: &'static str,
    /// What the validator said.
    #[source]
    pub cause: Cause,
}

/// The value in `frame`, in place.
///
/// Everything is validated first, whoever sent it: for plain fields and byte slices that costs a
/// few nanoseconds whatever their length. The bytes must stay as they are while the view lives,
/// which holds for a received message: nobody has a key to write into its buffer.
///
/// # Errors
///
/// [`ViewError`] where the bytes are not an archive of `T`, or are not aligned for it.
pub fn view<'a, T: View>(frame: &Frame<'a>) -> Result<&'a T::Archived, ViewError> {
    view_bytes::<T>(frame.archive()).map_err(|cause| ViewError {
        kind: frame.header().kind,
        len: frame.archive().len(),
        expected: std::any::type_name::<T>(),
        cause,
    })
}

/// The value archived in `bytes`, in place: for archives that do not come in a frame of their own.
///
/// The root stands at the end of an archive, so `bytes` must be exactly as long as what was
/// written.
///
/// # Errors
///
/// [`Cause`] where the bytes are not an archive of `T`, or are not aligned for it.
pub fn view_bytes<T: View>(bytes: &[u8]) -> Result<&T::Archived, Cause> {
    low::access::<T::Archived, Cause>(bytes)
}
