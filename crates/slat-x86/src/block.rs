//! One basic block: decoded operations, and the bytes they were decoded from, which are compared with memory.

use crate::heap::{self, OutOfMemory};
use crate::op::Op;
use std::ptr;

/// Operations per block.
pub(crate) const MAX_OPS: usize = 48;
/// Bytes per block after which no other instruction is added: offsets fit into a byte.
pub(crate) const MAX_BYTES: usize = 200;
/// Bytes of the longest block: its last instruction starts before [`MAX_BYTES`].
pub(crate) const LONGEST: usize = MAX_BYTES + 16;
/// Operations of one instruction: its own and a check.
const PER_INSTRUCTION: usize = 2;

/// A block's look-up key: what its operations depend on besides its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key {
    /// The linear address.
    pub lin: u64,
    pub rip: u64,
    /// See [`crate::cpu::mode`].
    pub mode: u8,
}

/// One comparison of a block's bytes with memory.
#[derive(Clone, Copy)]
struct Check {
    /// Relative to the block's first byte; the eight bytes from there lie in one page.
    offset: i64,
    expected: u64,
    mask: u64,
}

/// Replaces `checks` by the comparisons for `bytes`, which start at offset `at` in their page.
fn put_checks(checks: &mut Vec<Check>, bytes: &[u8], at: usize) {
    let len = bytes.len();
    checks.clear();
    if len >= 8 {
        // The last word overlaps the one before.
        let starts = (0..len - 8).step_by(8).chain([len - 8]);
        let word = |start: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&bytes[start..start + 8]);
            Check {
                offset: start as i64,
                expected: u64::from_le_bytes(word),
                mask: u64::MAX,
            }
        };
        checks.extend(starts.map(word));
        return;
    }
    let mut word = [0; 8];
    word[..len].copy_from_slice(bytes);
    let word = u64::from_le_bytes(word);
    let mask = (1 << (8 * len)) - 1;
    checks.push(if at + 8 <= 0x1000 {
        Check {
            offset: 0,
            expected: word,
            mask,
        }
    } else {
        // At the end of the page the word includes the bytes before.
        let shift = 64 - 8 * len;
        Check {
            offset: len as i64 - 8,
            expected: word << shift,
            mask: mask << shift,
        }
    });
}

/// Host addresses of a block's code, as looked up in one generation of translations.
#[derive(Clone, Copy)]
pub(crate) struct Hosts {
    /// [`crate::Cpu::generation`] at the look-up.
    pub generation: u64,
    /// Host address of the first byte.
    pub first: *mut u8,
    /// Host address of the second page's bytes, for an instruction that crosses into a second page; else null.
    pub second: *mut u8,
}

/// A decoded basic block.
pub(crate) struct Block {
    pub(crate) key: Key,
    pub(crate) hosts: Hosts,
    /// Bytes in the first page.
    split: usize,
    bytes: Vec<u8>,
    /// Comparisons of a block in one page.
    checks: Vec<Check>,
    /// Empty in a block that holds nothing (yet).
    pub(crate) ops: Vec<Op>,
    /// Instructions in `ops`.
    pub(crate) count: u64,
}

impl Block {
    fn empty() -> Self {
        Self {
            key: Key {
                lin: 0,
                rip: 0,
                mode: 0,
            },
            hosts: Hosts {
                generation: 0,
                first: ptr::null_mut(),
                second: ptr::null_mut(),
            },
            split: 0,
            bytes: Vec::new(),
            checks: Vec::new(),
            ops: Vec::new(),
            count: 0,
        }
    }

    /// Makes an empty block into which `max_ops` operations can be decoded without allocating.
    pub(crate) fn with_room(max_ops: usize) -> Result<Self, OutOfMemory> {
        let longest = LONGEST.min(16 * max_ops);
        let mut block = Self::empty();
        // The last instruction may be more than one operation.
        block.ops = heap::vec(max_ops - 1 + PER_INSTRUCTION)?;
        block.bytes = heap::vec(longest)?;
        block.checks = heap::vec(longest.div_ceil(8) + 1)?;
        Ok(block)
    }

    /// Makes an empty block with exactly the memory that a copy of `block` needs.
    pub(crate) fn with_room_for(block: &Block) -> Result<Self, OutOfMemory> {
        let mut new = Self::empty();
        new.reserve(block)?;
        Ok(new)
    }

    /// Makes sure that [`copy`](Self::copy) of `from` does not allocate. Leaves this block as it is.
    pub(crate) fn reserve(&mut self, from: &Block) -> Result<(), OutOfMemory> {
        heap::reserve(&mut self.ops, from.ops.len())?;
        heap::reserve(&mut self.bytes, from.bytes.len())?;
        heap::reserve(&mut self.checks, from.checks.len())
    }

    /// Copies `from`, for which memory was [reserved](Self::reserve).
    pub(crate) fn copy(&mut self, from: &Block) {
        fn replace<T: Copy>(vec: &mut Vec<T>, with: &[T]) {
            vec.clear();
            vec.extend_from_slice(with);
        }
        replace(&mut self.ops, &from.ops);
        replace(&mut self.bytes, &from.bytes);
        replace(&mut self.checks, &from.checks);
        (self.key, self.hosts) = (from.key, from.hosts);
        (self.split, self.count) = (from.split, from.count);
    }

    /// Returns the heap bytes of a block whose vectors are at their largest.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of::<Block>()
            + self.ops.capacity() * size_of::<Op>()
            + self.bytes.capacity()
            + self.checks.capacity() * size_of::<Check>()
    }

    /// Empties the block, until [`fill`](Self::fill). Its `ops` can be appended to.
    pub(crate) fn clear(&mut self, key: Key) {
        self.key = key;
        self.ops.clear();
        self.bytes.clear();
    }

    /// Stores the bytes that `ops` were decoded from: `bytes`, found at `hosts`, the first `split` of them in the first page.
    pub(crate) fn fill(&mut self, bytes: &[u8], split: usize, hosts: Hosts) {
        self.hosts = hosts;
        self.split = split;
        self.count = self.ops.iter().map(|op| u64::from(op.count)).sum();
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
        let at = (self.key.lin & 0xfff) as usize;
        put_checks(&mut self.checks, &bytes[..split], at);
    }

    /// Whether the block has no bytes in a second page.
    pub(crate) fn is_in_one_page(&self) -> bool {
        self.split == self.bytes.len()
    }

    /// Returns the bytes in the first page, and those in the second.
    pub(crate) fn parts(&self) -> (&[u8], &[u8]) {
        self.bytes.split_at(self.split)
    }

    /// Returns the number of code bytes.
    pub(crate) fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Returns the host page of the first byte.
    #[inline(always)]
    pub(crate) fn page(&self) -> usize {
        self.hosts.first as usize & !0xfff
    }

    /// Whether the block lies in one page, translated in `generation`, and memory holds its bytes.
    #[inline(always)]
    pub(crate) fn is_fresh(&self, generation: u64) -> bool {
        if self.hosts.generation != generation || !self.hosts.second.is_null() {
            return false;
        }
        let mut differ = 0;
        for check in &self.checks {
            let at = self.hosts.first.wrapping_offset(check.offset as isize);
            // SAFETY: within the page of `first`, a translation of the current generation; the access is guarded.
            match unsafe { slat_guard::load(at.cast::<u64>()) } {
                Ok(word) => differ |= (word ^ check.expected) & check.mask,
                Err(_) => return false,
            }
        }
        differ == 0
    }

    /// Returns the bytes of `op`.
    pub(crate) fn op_bytes(&self, op: &Op) -> &[u8] {
        let at = usize::from(op.offset);
        self.bytes.get(at..at + usize::from(op.len)).unwrap_or(&[])
    }
}
