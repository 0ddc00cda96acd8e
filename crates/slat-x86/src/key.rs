//! The key by which a block is found.

#[cfg(feature = "jit")]
use crate::mode;

/// The key by which a block is found: address and decoding mode. The block's operations depend only on the key and on
/// the code's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub(crate) struct Key {
    /// The linear address of the block's first instruction.
    pub lin: u64,
    pub rip: u64,
    /// The decoding mode: see [`crate::mode`].
    pub mode: u8,
}

#[cfg(feature = "jit")]
impl Key {
    /// Returns the key of the code at `rip`. The code's linear address is `base` plus `rip`.
    pub(crate) fn new(base: u64, rip: u64, mode: u8) -> Self {
        let lin = base.wrapping_add(rip) & mode::linear(mode);
        Self { lin, rip, mode }
    }

    /// Returns the base of the code segment: the linear address minus RIP.
    pub(crate) fn base(&self) -> u64 {
        self.lin.wrapping_sub(self.rip) & mode::linear(self.mode)
    }
}
