//! What a key and a value may be, checked at every entry: client calls and server requests.

use std::ops::RangeInclusive;

/// Lengths of a key in bytes. Any byte values are allowed.
pub const KEY_LENGTHS: RangeInclusive<usize> = 1..=1024;

/// The longest value in bytes (256 MiB). The shortest is empty; any byte values are allowed.
pub const MAX_VALUE: usize = 256 << 20;

/// A key or value outside the store's limits.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum LimitError {
    /// The key is empty or too long.
    #[error("key of {length} bytes: a key has 1 to {} bytes; choose another key", KEY_LENGTHS.end())]
    Key {
        /// Length of the key in bytes.
        length: usize,
    },
    /// The value is too long.
    #[error("value of {length} bytes: a value has at most {MAX_VALUE} bytes; split it")]
    Value {
        /// Length of the value in bytes.
        length: usize,
    },
}

/// Checks the length of a key.
///
/// # Errors
/// [`LimitError::Key`] outside [`KEY_LENGTHS`].
pub fn check_key(key: &[u8]) -> Result<(), LimitError> {
    if KEY_LENGTHS.contains(&key.len()) {
        Ok(())
    } else {
        Err(LimitError::Key { length: key.len() })
    }
}

/// Checks the length of a value in bytes.
///
/// # Errors
/// [`LimitError::Value`] above [`MAX_VALUE`].
pub fn check_value(length: usize) -> Result<(), LimitError> {
    if length <= MAX_VALUE {
        Ok(())
    } else {
        Err(LimitError::Value { length })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_inclusive() {
        assert_eq!(check_key(b""), Err(LimitError::Key { length: 0 }));
        assert_eq!(check_key(b"k"), Ok(()));
        assert_eq!(check_key(&[0; 1024]), Ok(()));
        assert_eq!(check_key(&[0; 1025]), Err(LimitError::Key { length: 1025 }));
        assert_eq!(check_value(0), Ok(()));
        assert_eq!(check_value(MAX_VALUE), Ok(()));
        assert_eq!(
            check_value(MAX_VALUE + 1),
            Err(LimitError::Value {
                length: MAX_VALUE + 1
            })
        );
    }

    #[test]
    fn messages_name_the_value_and_the_limit() {
        let text = check_key(&[0; 1025]).unwrap_err().to_string();
        assert!(text.contains("1025") && text.contains("1024"), "{text}");
    }
}
