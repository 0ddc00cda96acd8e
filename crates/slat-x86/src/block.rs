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

/// Where a block's code was found, and when it was compared with memory.
#[derive(Clone, Copy)]
pub(crate) struct Found {
    /// [`crate::Cpu::generation`] at the look-up.
    pub generation: u64,
    /// Host address of the first byte.
    pub first: *mut u8,
    /// Host address of the second page's bytes, for an instruction that crosses into a second page; else null.
    pub second: *mut u8,
    /// The version of its pages, the higher one of two (see `code_pages`). `None`: they were not trusted, so the code is compared
    /// again at the next entry.
    pub version: Option<u64>,
    /// [`crate::Cpu::epoch`] at the comparison.
    pub epoch: u64,
}

impl Found {
    /// The look-up that was never made.
    pub(crate) const NOWHERE: Self = Self {
        generation: 0,
        first: ptr::null_mut(),
        second: ptr::null_mut(),
        version: None,
        epoch: 0,
    };
}

/// A decoded basic block.
pub(crate) struct Block {
    pub(crate) key: Key,
    pub(crate) found: Found,
    /// [`crate::Cpu::stamp`] as long as the block may be executed without another look.
    pub(crate) stamp: u64,
    /// Entries until the block is hot.
    #[cfg(feature = "jit")]
    pub(crate) heat: std::cell::Cell<u32>,
    /// Whether the compiler has the block.
    #[cfg(feature = "jit")]
    pub(crate) is_submitted: std::cell::Cell<bool>,
    /// The compiled region that this block is a part of.
    #[cfg(feature = "jit")]
    pub(crate) entrance: Option<crate::jit::Entrance>,
    /// Bytes in the first page.
    split: usize,
    bytes: Vec<u8>,
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
            found: Found::NOWHERE,
            stamp: 0,
            #[cfg(feature = "jit")]
            heat: std::cell::Cell::new(crate::jit::HOT),
            #[cfg(feature = "jit")]
            is_submitted: std::cell::Cell::new(false),
            #[cfg(feature = "jit")]
            entrance: None,
            split: 0,
            bytes: Vec::new(),
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
        heap::reserve(&mut self.bytes, from.bytes.len())
    }

    /// Copies `from`, for which memory was [reserved](Self::reserve).
    pub(crate) fn copy(&mut self, from: &Block) {
        fn replace<T: Copy>(vec: &mut Vec<T>, with: &[T]) {
            vec.clear();
            vec.extend_from_slice(with);
        }
        replace(&mut self.ops, &from.ops);
        replace(&mut self.bytes, &from.bytes);
        (self.key, self.found, self.stamp) = (from.key, from.found, from.stamp);
        self.cool();
        (self.split, self.count) = (from.split, from.count);
    }

    /// Returns the heap bytes of a block whose vectors are at their largest.
    pub(crate) fn heap_bytes(&self) -> usize {
        size_of::<Block>() + self.ops.capacity() * size_of::<Op>() + self.bytes.capacity()
    }

    /// Empties the block, until [`fill`](Self::fill). Its `ops` can be appended to.
    pub(crate) fn clear(&mut self, key: Key) {
        self.key = key;
        self.stamp = 0;
        self.cool();
        self.ops.clear();
        self.bytes.clear();
    }

    /// Makes the block hot.
    pub(crate) fn heat_up(&self) {
        #[cfg(feature = "jit")]
        self.heat.set(0);
    }

    /// Forgets how often the block ran, and its compiled code.
    pub(crate) fn cool(&mut self) {
        #[cfg(feature = "jit")]
        {
            self.heat.set(crate::jit::HOT);
            self.is_submitted.set(false);
            self.entrance = None;
        }
    }

    /// Stores the bytes that `ops` were decoded from: `bytes`, found at `found`, the first `split` of them in the first page.
    pub(crate) fn fill(&mut self, bytes: &[u8], split: usize, found: Found) {
        self.found = found;
        self.split = split;
        self.count = self.ops.iter().map(|op| u64::from(op.count)).sum();
        self.bytes.clear();
        self.bytes.extend_from_slice(bytes);
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
        self.found.first as usize & !0xfff
    }

    /// Returns the bytes of `op`.
    pub(crate) fn op_bytes(&self, op: &Op) -> &[u8] {
        let at = usize::from(op.offset);
        self.bytes.get(at..at + usize::from(op.len)).unwrap_or(&[])
    }
}
