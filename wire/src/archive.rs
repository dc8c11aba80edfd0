//! What the rkyv serializer and validator are set up with, and the reason they give when they
//! refuse.

use std::fmt::{self, Write as _};

use rkyv::api::low::{LowSerializer, LowValidator};
use rkyv::bytecheck::CheckBytes;
use rkyv::rancor::{Source, Trace};
use rkyv::ser::allocator::SubAllocator;
use rkyv::ser::writer::Buffer;
use rkyv::{Archive, Portable, Serialize};

/// The serializer that messages are written with: into a borrowed slice, with scratch on the stack.
pub type Encoder<'a> = LowSerializer<Buffer<'a>, SubAllocator<'a>, Cause>;

/// The validator that messages are read with.
pub type Decoder<'a> = LowValidator<'a, Cause>;

/// A type that can be written as a message: anything that derives `rkyv::Serialize` and has no
/// shared pointers.
pub trait Encode: for<'a> Serialize<Encoder<'a>> {}

impl<T: for<'a> Serialize<Encoder<'a>> + ?Sized> Encode for T {}

/// A type whose archive can be viewed in place after validation: anything that derives
/// `rkyv::Archive`.
pub trait View: Archive<Archived: Portable + for<'a> CheckBytes<Decoder<'a>>> {}

impl<T: Archive<Archived: Portable + for<'a> CheckBytes<Decoder<'a>>>> View for T {}

/// Longest text kept of a reason, in bytes.
const TEXT_LEN: usize = 79;

/// Why rkyv refused, as text in a fixed array: making one allocates nothing, so a peer that sends
/// rubbish costs no memory.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    text: [u8; TEXT_LEN],
    len: u8,
}

impl Cause {
    /// What rkyv said, cut to 79 bytes.
    pub fn as_str(&self) -> &str {
        self.text
            .get(..usize::from(self.len))
            .and_then(|text| std::str::from_utf8(text).ok())
            .unwrap_or_default()
    }
}

impl fmt::Write for Cause {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for c in text.chars() {
            let start = usize::from(self.len);
            let Some(room) = self.text.get_mut(start..start + c.len_utf8()) else {
                return Err(fmt::Error);
            };
            c.encode_utf8(room);
            self.len += c.len_utf8() as u8;
        }
        Ok(())
    }
}

impl fmt::Debug for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Cause").field(&self.as_str()).finish()
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::error::Error for Cause {}

impl Trace for Cause {
    fn trace<R>(self, _trace: R) -> Self
    where
        R: fmt::Debug + fmt::Display + Send + Sync + 'static,
    {
        self
    }
}

impl Source for Cause {
    fn new<T: std::error::Error + Send + Sync + 'static>(source: T) -> Self {
        let mut cause = Self {
            text: [0; TEXT_LEN],
            len: 0,
        };
        // A text that does not fit is cut; there is nothing else that could fail.
        let _ = write!(cause, "{source}");
        cause
    }
}
