//! The code of a region, as a CPU collects it ([`Source`]) and as the compiler makes it ([`Region`]).
//!
//! Compiled code counts the addresses of code from the code's page where it may be any page's ([`is_movable`]), and
//! from 0 where it is for one page: a *place* is such an address.

use super::Tier;
use super::memory::Chunk;
use crate::block::Key;
use crate::cpu::mode;
use crate::op::Op;
use std::sync::atomic::AtomicBool;

/// What kind of code blocks are: what compiled code depends on besides their places and bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Kind {
    pub(super) mode: u8,
    /// Whether it is the same for all pages ([`is_movable`]).
    pub(super) is_movable: bool,
    /// The distance of linear addresses from those of code: CS's base outside 64-bit mode.
    pub(super) base: u64,
}

impl Kind {
    /// Returns of which kind a block's code is for a tier, and the address from which its places count.
    pub(super) fn of(key: &Key, tier: Tier) -> (Self, u64) {
        let kind = Self {
            mode: key.mode,
            is_movable: is_movable(key.mode, tier),
            base: key.base(),
        };
        (kind, page_of(key.rip, kind.is_movable))
    }
}

/// The code of a region-to-be.
#[derive(PartialEq, Eq)]
pub(super) struct Source {
    pub(super) kind: Kind,
    /// The operand size of the stack pointer.
    pub(super) stack: u8,
    /// Their places ([`page_of`]) and bytes.
    pub(super) blocks: Vec<(u64, Vec<u8>)>,
}

/// Whether a tier's code is the same for all pages: wherever a program or a library is in its address space. The
/// baseline tier's is in 64-bit mode: most of the code of short programs is its. Cranelift's is for one page, because
/// what is hot stays where it is: addresses that are computed when it runs made hot loops a fifth slower.
fn is_movable(mode: u8, tier: Tier) -> bool {
    tier == Tier::Baseline && mode & mode::BITS == mode::BITS_64
}

/// Returns the address from which the places of code count. For code that is the same for all pages that is its page.
fn page_of(rip: u64, is_movable: bool) -> u64 {
    if is_movable { rip & !0xfff } else { 0 }
}

impl Source {
    /// Returns the key of the block at a place in a page.
    pub(super) fn key(&self, page: u64, place: u64) -> Key {
        let Kind { mode, base, .. } = self.kind;
        Key::new(base, page.wrapping_add(place), mode)
    }
}

/// The code of a region, for profilers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledCode<'a> {
    /// The host's instructions, where they are executed.
    pub code: &'a [u8],
    /// The guest address of the block for which it was compiled, which is the first one.
    pub rip: u64,
}

/// An instruction of a region.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    /// Its place ([`page_of`]).
    pub(super) rip: u64,
    /// Whether that counts from its page, and whether the displacement and the immediate of its operation do, too.
    pub(super) is_movable: bool,
    pub(super) moves_displacement: bool,
    pub(super) moves_immediate: bool,
    pub(super) op: Op,
    pub(super) bytes: [u8; 15],
    /// Instructions before it in its path.
    pub(super) before: u8,
}

impl Step {
    /// Returns the instruction as it is in the page of `rip`: with addresses for places.
    pub(super) fn at(mut self, rip: u64) -> Self {
        let by = |moves| page_of(rip, moves);
        self.op.disp = self.op.disp.wrapping_add(by(self.moves_displacement));
        self.op.imm = self.op.imm.wrapping_add(by(self.moves_immediate));
        self.rip = self.rip_at(rip);
        self
    }

    /// Returns the address of the instruction if it is in the page of `rip`.
    pub(super) fn rip_at(&self, rip: u64) -> u64 {
        self.rip.wrapping_add(page_of(rip, self.is_movable))
    }
}

/// Guarded accesses: their offsets, ascending, and the index of the step that each belongs to.
pub(super) type Guarded = Box<[(u32, u32)]>;

/// Compiled code.
pub(crate) struct Region {
    pub(super) chunk: Chunk,
    pub(super) source: Source,
    /// Where the code was for which it was compiled.
    pub(super) page: u64,
    pub(crate) tier: Tier,
    /// Whether a sample was of this region.
    pub(super) is_sampled: AtomicBool,
    /// The code has pointers to them.
    pub(super) steps: Box<[Step]>,
    pub(super) guarded: Guarded,
    /// Where the region is entered at each block, if it can: offsets.
    pub(super) entries: Box<[Option<u32>]>,
}

impl Region {
    pub(super) fn compiled(&self) -> CompiledCode<'_> {
        CompiledCode {
            code: self.chunk.code(),
            rip: self.rip(),
        }
    }

    /// Returns the address for which it was compiled.
    pub(super) fn rip(&self) -> u64 {
        let first = self.source.blocks.first();
        first.map_or(self.page, |(place, _)| self.page.wrapping_add(*place))
    }

    /// Returns the code that was compiled: linear addresses, as far as they are in a page, and bytes.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let blocks = self.source.blocks.iter();
        blocks.map(|(place, bytes)| (self.source.key(0, *place).lin, &**bytes))
    }

    /// Returns the address and the bytes of each block that can be entered, and where.
    pub(super) fn entered(&self) -> impl Iterator<Item = (*const u8, &(u64, Vec<u8>))> {
        let blocks = self.entries.iter().zip(&self.source.blocks);
        blocks.filter_map(|(offset, block)| {
            let code = self.chunk.start().wrapping_add((*offset)? as usize);
            Some((code, block))
        })
    }

    /// Returns the instruction with the guarded access at a host address, if that is in this region.
    pub(crate) fn step_at(&self, address: usize) -> Option<*const Step> {
        let offset = self.chunk.offset_of(address)?;
        let found = self
            .guarded
            .binary_search_by_key(&offset, |access| access.0);
        let (_, step) = self.guarded[found.ok()?];
        Some(&raw const self.steps[step as usize])
    }
}
