//! Decoded instructions, kept by the machine's address of their word.
//!
//! As with an instruction cache, the guest has to invalidate what it has overwritten (IC IVAU, IC IALLU), and so has
//! the embedder.

use crate::insn::Insn;
use alloc::vec::Vec;

/// A power of two.
const ENTRIES: usize = 4096;

/// Bytes of a line, of which CTR_EL0.IminLine has the logarithm.
pub(crate) const LINE: u64 = 64;

/// An instruction, or `None` if it is UNDEFINED.
pub(crate) type Decoded = Option<Insn>;

pub(crate) struct Code {
    /// The machine's address of an instruction with what it is.
    entries: Vec<Option<(u64, Decoded)>>,
}

#[inline(always)]
fn index(at: u64) -> usize {
    (at >> 2 ^ at >> 14) as usize & (ENTRIES - 1)
}

impl Code {
    pub(crate) fn new() -> Self {
        Self {
            entries: alloc::vec![None; ENTRIES],
        }
    }

    /// Returns the instruction at one of the machine's addresses, if it is known.
    #[inline(always)]
    pub(crate) fn find(&self, at: u64) -> Option<Decoded> {
        match self.entries[index(at)] {
            Some((known, decoded)) if known == at => Some(decoded),
            _ => None,
        }
    }

    pub(crate) fn enter(&mut self, at: u64, decoded: Decoded) {
        self.entries[index(at)] = Some((at, decoded));
    }

    /// Forgets all instructions.
    pub(crate) fn flush(&mut self) {
        self.entries.fill(None);
    }

    /// Forgets the instructions of the line that contains an address.
    pub(crate) fn drop_line(&mut self, at: u64) {
        let start = at & !(LINE - 1);
        for at in (start..=start + (LINE - 4)).step_by(4) {
            let entry = &mut self.entries[index(at)];
            if entry.is_some_and(|(known, _)| known == at) {
                *entry = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_dropped_alone() {
        let mut code = Code::new();
        for n in 0..48 {
            code.enter(4 * n, None);
        }
        code.drop_line(0x7c);
        assert!((0..48).all(|n| code.find(4 * n).is_none() == (16..32).contains(&n)));
        code.flush();
        assert!((0..48).all(|n| code.find(4 * n).is_none()));
    }
}
