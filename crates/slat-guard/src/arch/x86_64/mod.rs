//! x86-64.

mod access;
pub(crate) mod bulk;
pub(crate) mod entries;
mod table;
