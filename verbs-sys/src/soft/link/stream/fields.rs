//! Fields of a fixed layout, one after the other.

/// Reads fields. Beyond the end there are zeros: whoever reads has checked the length.
pub(super) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(super) fn bytes<const N: usize>(&mut self) -> [u8; N] {
        let Some((field, rest)) = self.0.split_first_chunk() else {
            debug_assert!(false, "a field of {N} bytes beyond the end");
            return [0; N];
        };
        self.0 = rest;
        *field
    }

    pub(super) fn u8(&mut self) -> u8 {
        u8::from_be_bytes(self.bytes())
    }

    pub(super) fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.bytes())
    }

    pub(super) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.bytes())
    }

    pub(super) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.bytes())
    }
}

/// Writes fields into `N` bytes.
pub(super) struct Layout<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Layout<N> {
    pub(super) fn new() -> Self {
        Self {
            bytes: [0; N],
            len: 0,
        }
    }

    pub(super) fn bytes<const M: usize>(mut self, field: [u8; M]) -> Self {
        let end = self.len + M;
        match self.bytes.get_mut(self.len..end) {
            Some(place) => place.copy_from_slice(&field),
            None => debug_assert!(false, "a field up to byte {end} of {N}"),
        }
        self.len = end;
        self
    }

    pub(super) fn u8(self, field: u8) -> Self {
        self.bytes(field.to_be_bytes())
    }

    pub(super) fn u16(self, field: u16) -> Self {
        self.bytes(field.to_be_bytes())
    }

    pub(super) fn u32(self, field: u32) -> Self {
        self.bytes(field.to_be_bytes())
    }

    pub(super) fn u64(self, field: u64) -> Self {
        self.bytes(field.to_be_bytes())
    }

    /// The bytes, of which all have been written.
    pub(super) fn done(self) -> [u8; N] {
        debug_assert_eq!(self.len, N, "all fields");
        self.bytes
    }
}
