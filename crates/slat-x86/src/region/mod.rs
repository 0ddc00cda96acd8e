//! The code of a region: the guest code that a CPU collects ([`Source`]), and the compiled code that the compiler makes
//! ([`Region`]).
//!
//! Addresses of guest code are stored relative to a base. If compiled code is the same for all pages ([`is_movable`]),
//! the base is the beginning of the guest code's page. Otherwise the base is 0. Such a relative address is called a
//! *place*.

use crate::key::Key;
use crate::mode;
use crate::op::Op;
use slat_jit::{Chunk, Guarded};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The number of times that a block is entered before it is compiled.
pub(crate) const WARM: u32 = 512;

/// The way in which code is compiled: quickly, or to fast code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Compiled in one pass (`jit::baseline`), for warm code. Most compiled code is warm.
    Baseline,
    /// Compiled by Cranelift, which takes ten times as long and makes faster code, for hot code.
    Full,
}

/// The compiled code of a block: its region, and the address at which the block is entered.
#[derive(Clone)]
pub(crate) struct Entrance {
    pub(crate) region: Arc<Region>,
    pub(crate) code: *const u8,
}

/// The kind of a block's code. Compiled code depends only on the kind and on the places and bytes of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub(crate) mode: u8,
    /// Whether compiled code is the same for all pages ([`is_movable`]).
    pub(crate) is_movable: bool,
    /// The difference between linear addresses and code addresses: outside 64-bit mode, the base of CS.
    pub(crate) base: u64,
}

impl Kind {
    /// Returns the kind of a block's code for a tier, and the base of its places.
    pub(crate) fn of(key: &Key, tier: Tier) -> (Self, u64) {
        let kind = Self {
            mode: key.mode,
            is_movable: is_movable(key.mode, tier),
            base: key.base(),
        };
        (kind, page_of(key.rip, kind.is_movable))
    }
}

/// The guest code from which a region is compiled.
#[derive(PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) kind: Kind,
    /// The index of the stack pointer's size.
    pub(crate) stack: u8,
    /// The place ([`page_of`]) and the bytes of each block.
    pub(crate) blocks: Vec<(u64, Vec<u8>)>,
}

/// Whether a tier makes code that is the same for all pages. Such code can be shared by guest processes that map a
/// program or a library at different addresses. The baseline tier does so in 64-bit mode, because most code of short
/// programs is compiled by this tier. Cranelift makes code for one page, because hot code stays at its address, and
/// computing addresses at run time made hot loops a fifth slower.
fn is_movable(mode: u8, tier: Tier) -> bool {
    tier == Tier::Baseline && mode & mode::BITS == mode::BITS_64
}

/// Returns the base of the places of code at `rip`: the code's page if `is_movable`, otherwise 0.
fn page_of(rip: u64, is_movable: bool) -> u64 {
    if is_movable { rip & !0xfff } else { 0 }
}

impl Source {
    /// Returns the key of the block at `place`. `page` is the base of places.
    pub(crate) fn key(&self, page: u64, place: u64) -> Key {
        let Kind { mode, base, .. } = self.kind;
        Key::new(base, page.wrapping_add(place), mode)
    }
}

/// The compiled code of a region, for profilers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledCode<'a> {
    /// The host's instructions, at the address where they are executed.
    pub code: &'a [u8],
    /// The guest address of the first block for which the code was compiled.
    pub rip: u64,
}

/// An instruction of a region, at which the interpreter can continue.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    /// The instruction's place ([`page_of`]).
    pub(crate) rip: u64,
    /// Whether `rip` is relative to the instruction's page. The next two fields say the same for the displacement and
    /// the immediate of the operation.
    pub(crate) is_movable: bool,
    pub(crate) moves_displacement: bool,
    pub(crate) moves_immediate: bool,
    pub(crate) op: Op,
    pub(crate) bytes: [u8; 15],
    /// The number of instructions in the path before this instruction.
    pub(crate) before: u8,
}

impl Step {
    /// Returns the instruction for the page of `rip`: its places are replaced by addresses.
    pub(crate) fn at(mut self, rip: u64) -> Self {
        let by = |moves| page_of(rip, moves);
        self.op.disp = self.op.disp.wrapping_add(by(self.moves_displacement));
        self.op.imm = self.op.imm.wrapping_add(by(self.moves_immediate));
        self.rip = self.rip_at(rip);
        self
    }

    /// Returns the instruction's address in the page of `rip`.
    pub(crate) fn rip_at(&self, rip: u64) -> u64 {
        self.rip.wrapping_add(page_of(rip, self.is_movable))
    }
}

/// Compiled code.
pub(crate) struct Region {
    pub(crate) chunk: Chunk,
    pub(crate) source: Source,
    /// The page for which the code was compiled.
    pub(crate) page: u64,
    pub(crate) tier: Tier,
    /// Whether this region was already sampled once.
    pub(crate) is_sampled: AtomicBool,
    /// The steps of the region's instructions, to which the code has pointers.
    pub(crate) steps: Box<[Step]>,
    /// The guarded accesses, each with the index in `steps` of its instruction.
    pub(crate) guarded: Guarded,
    /// For each block, the offset at which the region can be entered there; `None` if it cannot be entered there.
    pub(crate) entries: Box<[Option<u32>]>,
}

impl Region {
    pub(crate) fn compiled(&self) -> CompiledCode<'_> {
        CompiledCode {
            code: self.chunk.code(),
            rip: self.rip(),
        }
    }

    /// Returns the guest address for which the region was compiled.
    pub(crate) fn rip(&self) -> u64 {
        let first = self.source.blocks.first();
        first.map_or(self.page, |(place, _)| self.page.wrapping_add(*place))
    }

    /// Returns the guest code that was compiled, as pairs of address and bytes. Of each address, only the offset in the
    /// page has a meaning.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let blocks = self.source.blocks.iter();
        blocks.map(|(place, bytes)| (self.source.key(0, *place).lin, &**bytes))
    }

    /// Returns, for each block at which the region can be entered, the address of the compiled code and the block.
    pub(crate) fn entered(&self) -> impl Iterator<Item = (*const u8, &(u64, Vec<u8>))> {
        let blocks = self.entries.iter().zip(&self.source.blocks);
        blocks.filter_map(|(offset, block)| {
            let code = self.chunk.start().wrapping_add((*offset)? as usize);
            Some((code, block))
        })
    }

    /// If a guarded access of this region is at the host address `address`, returns the access's step.
    pub(crate) fn step_at(&self, address: usize) -> Option<*const Step> {
        let offset = self.chunk.offset_of(address)?;
        let step = self.guarded.find(offset)?;
        Some(&raw const self.steps[step as usize])
    }
}
