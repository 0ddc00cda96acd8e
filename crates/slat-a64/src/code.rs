//! Caches decoded instructions by the address of their word in the machine's memory (see [`Page`](crate::Page)).
//!
//! As with an instruction cache, the guest and the embedder have to invalidate code that they have overwritten (the
//! guest by IC IVAU or IC IALLU).

use crate::insn::Insn;
use alloc::vec::Vec;

/// The number of decoded instructions that are kept: a power of two.
const ENTRIES: usize = 16384;

/// The size of a cache line, in bytes. CTR_EL0.IminLine contains the logarithm of its number of words.
pub(crate) const LINE: u64 = 64;

/// An instruction, or `None` if it is UNDEFINED.
pub(crate) type Decoded = Option<Insn>;

/// The address in an empty entry. No instruction has this address, because the addresses of instructions are multiples
/// of 4.
const NOWHERE: u64 = 1;

/// A decoded instruction, with the address of its word in the machine's memory.
#[derive(Clone, Copy)]
struct Entry {
    at: u64,
    decoded: Decoded,
}

impl Entry {
    const NONE: Entry = Entry {
        at: NOWHERE,
        decoded: None,
    };
}

/// The index of a decoded instruction in [`Code`]. It is valid until an instruction is dropped or entered.
#[derive(Clone, Copy)]
pub(crate) struct Place(usize);

pub(crate) struct Code {
    entries: Vec<Entry>,
}

#[inline(always)]
fn index(at: u64) -> usize {
    (at >> 2 ^ at >> 14) as usize & (ENTRIES - 1)
}

impl Code {
    pub(crate) fn new() -> Self {
        Self {
            entries: alloc::vec![Entry::NONE; ENTRIES],
        }
    }

    /// Returns the index of the decoded instruction whose word is at `at` in the machine's memory, if it is cached.
    #[inline(always)]
    pub(crate) fn find(&self, at: u64) -> Option<Place> {
        let place = index(at);
        (self.entries[place].at == at).then_some(Place(place))
    }

    /// Returns the instruction at `place`. `find` does not return the instruction itself, because that would build an
    /// `Option<Decoded>` field by field for each executed instruction; this copy has the layout of the entry.
    #[inline(always)]
    pub(crate) fn get(&self, place: Place) -> Decoded {
        self.entries[place.0].decoded
    }

    /// Enters an instruction, and returns its index.
    pub(crate) fn enter(&mut self, at: u64, decoded: Decoded) -> Place {
        let place = index(at);
        self.entries[place] = Entry { at, decoded };
        Place(place)
    }

    /// Drops all decoded instructions.
    pub(crate) fn flush(&mut self) {
        self.entries.fill(Entry::NONE);
    }

    /// Drops the decoded instructions of the cache line that contains `at`.
    pub(crate) fn drop_line(&mut self, at: u64) {
        let start = at & !(LINE - 1);
        for at in (start..=start + (LINE - 4)).step_by(4) {
            let entry = &mut self.entries[index(at)];
            if entry.at == at {
                *entry = Entry::NONE;
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
