//! An instruction that waits for the data of MMIO reads.

use crate::op::{LONGEST_INSTRUCTION, Op};

/// An instruction that waits for the data of MMIO reads, in its decoded form.
///
/// The instruction is executed again from this copy. It is not fetched again, because the VMM may have patched it
/// meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Reader {
    pub(crate) op: Op,
    /// RIP of the instruction.
    pub(crate) rip: u64,
    pub(crate) bytes: [u8; LONGEST_INSTRUCTION],
}

impl Reader {
    /// Returns the instruction's bytes.
    pub(crate) fn code(&self) -> &[u8] {
        let len = self.bytes.len().min(self.op.len.into());
        &self.bytes[..len]
    }
}
