//! The host's processor. Each architecture has a file, and all files define the same names.
//!
//! | name | idea |
//! |---|---|
//! | `TARGET`, `features` | Cranelift's names for the host, and for what its processor has |
//! | `HELPERS`, `helper` | the convention for calls of helpers |
//! | `has_fused_multiply_add` | whether its processor multiplies and adds with one rounding |
//! | `begin_floats`, `end_floats` | the code of [`crate::floats`] |
//! | `enter`, `failed_access` | the code of [`crate::entry`] |
//! | `prepare`, `publish` | makes all threads see new code |

#[cfg(target_arch = "aarch64")]
mod aarch64;
#[cfg(target_arch = "x86_64")]
mod x86_64;

#[cfg(target_arch = "aarch64")]
pub(crate) use aarch64::*;
#[cfg(target_arch = "x86_64")]
pub(crate) use x86_64::*;
