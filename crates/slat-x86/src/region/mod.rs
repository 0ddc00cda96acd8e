//! The code of a region: the guest code that a CPU collects ([`Source`]), and the compiled code that the compiler makes
//! ([`Region`]).
//!
//! Addresses of code are stored relative to a base: the beginning of the code's page in compiled code that is the same
//! for any page ([`is_movable`]), 0 in other compiled code. Such a relative address is called a *place*.

pub(crate) mod memory;

use crate::key::Key;
use crate::mode;
use crate::op::Op;
use memory::Chunk;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The number of entries of a block after which the block is compiled.
pub(crate) const WARM: u32 = 512;

/// The way in which code is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Compiled in one pass (`jit::baseline`), for warm code, of which there is much.
    Baseline,
    /// Compiled by Cranelift, which takes ten times as long and makes faster code.
    Full,
}

/// The compiled code of a block: its region, and the address at which the block is entered.
#[derive(Clone)]
pub(crate) struct Entrance {
    pub(crate) region: Arc<Region>,
    pub(crate) code: *const u8,
}

/// The kind of a block's code. Compiled code depends on the kind, besides the places and bytes of blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub(crate) mode: u8,
    /// Whether compiled code is the same for all pages ([`is_movable`]).
    pub(crate) is_movable: bool,
    /// The distance from addresses of code to linear addresses: CS's base outside 64-bit mode.
    pub(crate) base: u64,
}

impl Kind {
    /// Returns the kind of a block's code for a tier, and the address from which its places count.
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
    /// The operand size of the stack pointer.
    pub(crate) stack: u8,
    /// The blocks' places ([`page_of`]) and bytes.
    pub(crate) blocks: Vec<(u64, Vec<u8>)>,
}

/// Whether a tier makes code that is the same for all pages, so that processes can share it that map a program or a
/// library at different addresses. The baseline tier does so in 64-bit mode, because most code of short programs is of
/// this tier. Cranelift makes code for one page. Hot code stays at its address, and computing addresses at run time
/// made hot loops a fifth slower.
fn is_movable(mode: u8, tier: Tier) -> bool {
    tier == Tier::Baseline && mode & mode::BITS == mode::BITS_64
}

/// Returns the base of the places of code at `rip`: the code's page if `is_movable`, otherwise 0.
fn page_of(rip: u64, is_movable: bool) -> u64 {
    if is_movable { rip & !0xfff } else { 0 }
}

impl Source {
    /// Returns the key of the block at a place in a page.
    pub(crate) fn key(&self, page: u64, place: u64) -> Key {
        let Kind { mode, base, .. } = self.kind;
        Key::new(base, page.wrapping_add(place), mode)
    }
}

/// The code of a region, for profilers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledCode<'a> {
    /// The host's instructions, at the address where they are executed.
    pub code: &'a [u8],
    /// The guest address of the first block for which the code was compiled.
    pub rip: u64,
}

/// An instruction of a region.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    /// The instruction's place ([`page_of`]).
    pub(crate) rip: u64,
    /// Whether `rip` is relative to the instruction's page; and whether the displacement and the immediate of the
    /// operation are relative to that page.
    pub(crate) is_movable: bool,
    pub(crate) moves_displacement: bool,
    pub(crate) moves_immediate: bool,
    pub(crate) op: Op,
    pub(crate) bytes: [u8; 15],
    /// The number of instructions before this one in its path.
    pub(crate) before: u8,
}

impl Step {
    /// Returns the instruction as it is in the page of `rip`: its places are replaced by addresses.
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

/// Guarded accesses: their offsets, ascending, and the index of the step that each belongs to.
pub(crate) type Guarded = Box<[(u32, u32)]>;

/// Compiled code.
pub(crate) struct Region {
    pub(crate) chunk: Chunk,
    pub(crate) source: Source,
    /// The page for which the code was compiled.
    pub(crate) page: u64,
    pub(crate) tier: Tier,
    /// Whether this region was sampled before.
    pub(crate) is_sampled: AtomicBool,
    /// The steps of the region's instructions, to which the code has pointers.
    pub(crate) steps: Box<[Step]>,
    pub(crate) guarded: Guarded,
    /// For each block, the offset at which the region is entered there. `None` if it cannot be.
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

    /// Returns the guest code that was compiled: pairs of address and bytes. Only the offset in the page of each
    /// address is meaningful.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let blocks = self.source.blocks.iter();
        blocks.map(|(place, bytes)| (self.source.key(0, *place).lin, &**bytes))
    }

    /// Returns, for each block at which the region can be entered, the address of the compiled code, and the block.
    pub(crate) fn entered(&self) -> impl Iterator<Item = (*const u8, &(u64, Vec<u8>))> {
        let blocks = self.entries.iter().zip(&self.source.blocks);
        blocks.filter_map(|(offset, block)| {
            let code = self.chunk.start().wrapping_add((*offset)? as usize);
            Some((code, block))
        })
    }

    /// If a host address is in this region, returns the instruction whose guarded access is at the address.
    pub(crate) fn step_at(&self, address: usize) -> Option<*const Step> {
        let offset = self.chunk.offset_of(address)?;
        let found = self
            .guarded
            .binary_search_by_key(&offset, |access| access.0);
        let (_, step) = self.guarded[found.ok()?];
        Some(&raw const self.steps[step as usize])
    }
}
