//! The code of a region: the guest code that a CPU collects ([`Source`]), and the compiled code that the compiler makes
//! ([`Region`]).
//!
//! Addresses of guest code are stored relative to a base, and then called *places*. If compiled code is the same
//! whatever the guest code's page is ([`is_movable`]), the base is the beginning of that page. Otherwise the base is 0.

use crate::key::Key;
use crate::mode;
use crate::op::Op;
use slat_jit::{Chunk, Guarded};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// The number of entries after which a block is compiled.
pub(crate) const WARM: u32 = 512;

/// How code is compiled: quickly, or to fast code.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Tier {
    /// Compiled quickly, in one pass over the code (`jit::baseline`), for warm code. Most compiled code is warm.
    Baseline,
    /// Compiled by Cranelift, for hot code. Cranelift takes ten times as long, and makes faster code.
    Full,
}

/// The region of a block, and the address of the compiled code at which the region is entered for this block.
#[derive(Clone)]
pub(crate) struct Entrance {
    pub(crate) region: Arc<Region>,
    pub(crate) code: *const u8,
}

/// What compiled code depends on, besides the places and bytes of its blocks.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Kind {
    pub(crate) mode: u8,
    /// Whether compiled code is the same for all pages of guest code ([`is_movable`]).
    pub(crate) is_movable: bool,
    /// The difference between linear addresses and code offsets: outside 64-bit mode, the base of CS.
    pub(crate) base: u64,
}

impl Kind {
    /// Returns the kind of a block's code for a tier, and the base of places in it.
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
    /// The logarithm of the stack pointer's size in bytes.
    pub(crate) stack: u8,
    /// The place (address relative to the page) and the code bytes of each block.
    pub(crate) blocks: Vec<(u64, Vec<u8>)>,
}

/// Whether a tier makes compiled code that is the same for all pages of guest code. Guest processes can share such code
/// if they map a program or a library at different addresses. The baseline tier does so in 64-bit mode, because it
/// compiles most code of short programs. Cranelift makes code for one page: hot code stays at its address, and
/// computing addresses at run time made hot loops a fifth slower.
fn is_movable(mode: u8, tier: Tier) -> bool {
    tier == Tier::Baseline && mode & mode::BITS == mode::BITS_64
}

/// Returns the base of places for code at `rip`: the code's page if `is_movable`, else 0.
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

/// Compiled code of a region, for profilers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompiledCode<'a> {
    /// The host's instructions, in the memory where they are executed.
    pub code: &'a [u8],
    /// The guest address of the first block that was compiled.
    pub rip: u64,
}

/// An instruction of a region at which the interpreter can continue.
#[derive(Clone, Copy)]
pub(crate) struct Step {
    /// The instruction's place.
    pub(crate) rip: u64,
    /// Whether `rip` is relative to the instruction's page. The next two fields say the same of the operation's
    /// displacement and immediate.
    pub(crate) is_movable: bool,
    pub(crate) moves_displacement: bool,
    pub(crate) moves_immediate: bool,
    pub(crate) op: Op,
    pub(crate) bytes: [u8; 15],
    /// The number of instructions on the compiled path before this instruction.
    pub(crate) before: u8,
}

impl Step {
    /// Returns the instruction as it is in the page of `rip`: with addresses instead of places.
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

/// The compiled code of a region.
pub(crate) struct Region {
    pub(crate) chunk: Chunk,
    pub(crate) source: Source,
    /// The guest page for which the code was compiled.
    pub(crate) page: u64,
    pub(crate) tier: Tier,
    /// Whether this region was sampled before (`Executor::sampled`).
    pub(crate) is_sampled: AtomicBool,
    /// The instructions of the region at which the interpreter can continue. Compiled code has pointers to them.
    pub(crate) steps: Box<[Step]>,
    /// The guarded accesses. The number of each is the index of its instruction in `steps`.
    pub(crate) guarded: Guarded,
    /// For each block, the offset of the code that enters the region at this block. `None`: the region cannot be
    /// entered at this block.
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

    /// Returns the guest code that was compiled, as pairs of linear address and bytes. Only the offset in the page is
    /// meaningful in these addresses.
    pub(crate) fn parts(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let blocks = self.source.blocks.iter();
        blocks.map(|(place, bytes)| (self.source.key(0, *place).lin, &**bytes))
    }

    /// Returns, for each block at which the region can be entered, the address to enter and the block.
    pub(crate) fn entered(&self) -> impl Iterator<Item = (*const u8, &(u64, Vec<u8>))> {
        let blocks = self.entries.iter().zip(&self.source.blocks);
        blocks.filter_map(|(offset, block)| {
            let code = self.chunk.start().wrapping_add((*offset)? as usize);
            Some((code, block))
        })
    }

    /// Returns the step whose guarded access is at the host address `address`, or `None` if this region has no such
    /// access.
    pub(crate) fn step_at(&self, address: usize) -> Option<*const Step> {
        let offset = self.chunk.offset_of(address)?;
        let step = self.guarded.find(offset)?;
        Some(&raw const self.steps[step as usize])
    }
}
