//! The verbs ABI in Rust: the structures and constants of `infiniband/verbs.h`, by their C names.
//!
//! Every structure is `#[repr(C)]` and has the layout of rdma-core on the same platform (checked at
//! compile time in `layout.rs` for 64-bit x86). Enumerations are `c_uint` aliases, because C gives
//! no guarantee that a value is one of the named ones. Where C has a union of two fields of one
//! type, there is one field here with both meanings in its description.
//!
//! Fields that start with an underscore are never used by anybody and only hold their place.

#![allow(non_camel_case_types, non_snake_case)] // C names are kept

/// Defines a C enumeration: an alias and one documented constant for each value.
macro_rules! c_enum {
    ($(#[$meta:meta])* $name:ident: $repr:ty { $($(#[$doc:meta])* $value:ident = $number:expr,)+ }) => {
        $(#[$meta])*
        pub type $name = $repr;
        $(
            $(#[$doc])*
            #[doc = concat!("(a value of [`", stringify!($name), "`])")]
            pub const $value: $name = $number;
        )+
    };
}

/// `Default` as all bytes zero, which is how C programs start these structures.
macro_rules! zero_default {
    ($($name:ident),+ $(,)?) => {$(
        impl $name {
            /// All bytes zero: null pointers, zero numbers, the first variant of each union.
            #[must_use]
            pub const fn zeroed() -> Self {
                // SAFETY: the structure consists of integers, raw pointers, optional function
                // pointers, libc's plain C structures and unions of those; all of them are valid
                // with every byte zero.
                unsafe { core::mem::MaybeUninit::zeroed().assume_init() }
            }
        }

        impl Default for $name {
            fn default() -> Self {
                Self::zeroed()
            }
        }
    )+};
}

mod attr;
mod completion;
mod context;
mod extended;
mod layout;
mod memory;
mod qp;
mod work;

pub use attr::*;
pub use completion::*;
pub use context::*;
pub use extended::*;
pub use memory::*;
pub use qp::*;
pub use work::*;
