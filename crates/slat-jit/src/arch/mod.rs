//! What depends on the host's processor. Each architecture has a file, and all files define the same names.
//!
//! | name | idea |
//! |---|---|
//! | `TARGET`, `features` | Cranelift's names for the architecture, and for the features of the processor |
//! | `HELPERS`, `helper` | the calling convention of helpers |
//! | `has_fused_multiply_add` | whether the processor multiplies and adds with one rounding |
//! | `begin_floats`, `end_floats` | the code of [`crate::floats`] |
//! | `enter`, `failed_access` | the code of [`crate::entry`] |
//! | `prepare`, `publish` | make all threads see new code |

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
