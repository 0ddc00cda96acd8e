//! The command's parts for AArch64.

pub mod gdb;
pub mod host;
pub mod processors;
pub mod program;
