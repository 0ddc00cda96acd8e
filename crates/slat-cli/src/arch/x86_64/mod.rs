//! The command's parts for x86-64.

pub mod gdb;
pub mod host;
pub mod processors;
pub mod program;
