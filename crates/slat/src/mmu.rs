//! The MMUs that an address space can have. vCPUs use every MMU through one interface, and operations on ranges of gfns
//! use every MMU through another. The code selects the MMU once for each walk or install, not at each step.

use alloc::string::String;
use alloc::sync::Arc;

use crate::addr::{Gfn, Level, Pfn};
use crate::format::{Format, Leaf, can_shadow};
use crate::heap::{OutOfMemory, Shared};
use crate::platform::Platform;
use crate::shadow::trail::Target;
use crate::shadow::{Budget, ShadowMmu};
use crate::table::{
    Aged, At, ByGfn, Collapse, Cursor, Detached, Flushed, Flushes, FrameCache, Installed, Key,
    Path, Reached, Retry, Root, Show, Split, TableFrames, Tree, Visit, Walk,
};

/// The MMU that makes the tables of a VM ([`Config::mmu`](crate::Config)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MmuKind {
    /// A tree of tables for a second-level page walker (KVM: `tdp_mmu=1`). Faults run in parallel.
    #[default]
    Tdp,
    /// Shadow pages for a second-level walker (KVM: `tdp_mmu=0`): a reverse map finds the leaves of a guest frame, and
    /// the number of tables is limited. For formats without break-before-make.
    Direct,
    /// Shadow pages for the page walker of a CPU without a second level (KVM: `ept=0`, `npt=0`). These tables translate
    /// guest-virtual addresses to host frames, and are made from the guest's tables
    /// ([`Vcpu::translate_virtual`](crate::Vcpu)). For x86's tables of five levels ([`X86<5>`](crate::format::X86)).
    Shadow,
}

impl MmuKind {
    /// All kinds of MMU.
    pub const ALL: &[MmuKind] = &[MmuKind::Tdp, MmuKind::Direct, MmuKind::Shadow];

    /// Returns the name of the kind, as in `slat run --mmu`.
    pub const fn name(self) -> &'static str {
        match self {
            MmuKind::Tdp => "tdp",
            MmuKind::Direct => "direct",
            MmuKind::Shadow => "shadow",
        }
    }

    /// Returns whether format `F` has this kind of MMU.
    pub const fn serves<F: Format>(self) -> bool {
        match self {
            MmuKind::Tdp => true,
            MmuKind::Direct => can_shadow::<F>() && !F::SHADOWS,
            MmuKind::Shadow => can_shadow::<F>() && F::SHADOWS,
        }
    }

    /// Returns whether format `F` has this kind of MMU, able to shadow nested tables
    /// ([`Config::nested`](crate::Config)).
    pub const fn nests<F: Format>(self) -> bool {
        self.serves::<F>() && can_shadow::<F>()
    }
}

/// The MMU of one address space.
#[expect(
    clippy::large_enum_variant,
    reason = "there is one for each address space"
)]
pub(crate) enum Mmu<P: Platform, F: Format> {
    /// A tree of tables, without shadow pages.
    Tdp(Tree<P, F>),
    /// Shadow pages, alone or beside a tree.
    Shadow(ShadowMmu<P, F>),
}

/// Evaluates the first expression with the tree, or the second with the shadow pages. For a format that cannot have
/// shadow pages, the second expression, a quarter of the engine's code, is not compiled.
macro_rules! by_kind {
    ($on:expr, $tree:ident => $tdp:expr, $mmu:ident => $shadow:expr) => {
        match $on {
            Mmu::Tdp($tree) => $tdp,
            Mmu::Shadow(_) if const { !can_shadow::<F>() } => {
                unreachable!("made by `Mmu::new` only")
            }
            Mmu::Shadow($mmu) => $shadow,
        }
    };
}

macro_rules! either {
    ($on:expr, $mmu:ident => $then:expr) => {
        by_kind!($on, $mmu => $then, $mmu => $then)
    };
}

impl<P: Platform, F: Format> Mmu<P, F> {
    /// Makes an MMU of `kind` that maps nothing. Its tables' frames come from `frames`. If `nested`, it also shadows
    /// nested tables.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub(crate) fn new(
        (kind, nested): (MmuKind, bool),
        platform: Arc<P>,
        frames: Shared<TableFrames>,
        flushes: Shared<Flushes>,
        budget: Shared<Budget>,
    ) -> Result<Self, OutOfMemory> {
        if const { !can_shadow::<F>() } {
            return Tree::new(platform, frames, flushes).map(Mmu::Tdp);
        }
        if kind != MmuKind::Tdp {
            let shadows = nested || kind == MmuKind::Shadow;
            let mmu = ShadowMmu::new(platform, frames, flushes, budget, shadows);
            return mmu.map(Mmu::Shadow);
        }
        let tree = Tree::new(platform.clone(), frames.clone(), flushes.clone())?;
        match nested {
            true => ShadowMmu::with_tree(tree, platform, frames, flushes, budget).map(Mmu::Shadow),
            false => Ok(Mmu::Tdp(tree)),
        }
    }

    /// Returns the root from which walks by guest-physical addresses start.
    pub(crate) fn context(&self) -> Root {
        either!(self, mmu => mmu.context())
    }

    /// Returns this MMU if it shadows the guest's tables.
    #[inline]
    pub(crate) fn shadow(&self) -> Option<&ShadowMmu<P, F>> {
        match self {
            Mmu::Shadow(mmu) if const { can_shadow::<F>() } && mmu.shadows() => Some(mmu),
            _ => None,
        }
    }

    /// Returns the MMU if it shadows the tables that translate all accesses of the guest. Then the leaves for these
    /// accesses are only in shadow pages.
    #[inline]
    pub(crate) fn shadow_of_all(&self) -> Option<&ShadowMmu<P, F>> {
        (self.shadow()).filter(|mmu| F::SHADOWS && mmu.tree().is_none())
    }

    /// Returns the tree, if there is one.
    pub(crate) fn tree_mut(&mut self) -> Option<&mut Tree<P, F>> {
        by_kind!(self, tree => Some(tree), mmu => mmu.tree_mut())
    }

    /// Returns how many times the MMU has begun to track a guest table. A caller reads this number, then a [mappable
    /// level](Self::mappable_level). If the number is the same later, under the lock of the table that receives the
    /// leaf, then that level is still mappable.
    #[inline]
    pub(crate) fn tracking_begun(&self) -> u64 {
        self.shadow().map_or(0, ShadowMmu::tracking_begun)
    }

    /// Allocates, in `frames` and in the MMU, the memory that an install of up to `tables` new tables needs.
    ///
    /// # Errors
    /// [`OutOfMemory`]; memory that was already allocated is kept.
    #[inline]
    pub(crate) fn prepare(
        &self,
        frames: &mut FrameCache,
        tables: usize,
    ) -> Result<(), OutOfMemory> {
        by_kind!(
            self,
            tree => frames.fill(tree.platform(), tables),
            mmu => mmu.prepare(frames, tables)
        )
    }
}

impl<P: Platform, F: Format> ByGfn for Mmu<P, F> {
    type Format = F;

    fn walk(&self, walk: &mut Walk, show: Show, visit: &mut impl Visit) {
        either!(self, mmu => mmu.walk(walk, show, visit));
    }

    fn age(&self, walk: &mut Walk, clear: bool, seen: &mut impl FnMut(Aged)) {
        either!(self, mmu => mmu.age(walk, clear, seen));
    }

    #[inline]
    fn zap(&self, at: &At<'_>) {
        either!(self, mmu => mmu.zap(at));
    }

    #[inline]
    fn take(&self, at: &At<'_>) -> u64 {
        either!(self, mmu => mmu.take(at))
    }

    #[inline]
    fn detach(&self, at: &At<'_>, lower: Pfn, detached: &mut Detached) {
        either!(self, mmu => mmu.detach(at, lower, detached));
    }

    fn split(&self, at: &At<'_>, path: &mut Path<'_>) -> Split {
        either!(self, mmu => mmu.split(at, path))
    }

    fn mend(&self, gfn: Gfn, level: Level, path: &mut Path<'_>) -> bool {
        either!(self, mmu => mmu.mend(gfn, level, path))
    }

    fn collapse(&self, at: &At<'_>, lower: Pfn, leaf: Leaf, detached: &mut Detached) -> Collapse {
        either!(self, mmu => mmu.collapse(at, lower, leaf, detached))
    }

    fn restore(&self, gfn: Gfn, level: Level, own: &Flushed) -> bool {
        either!(self, mmu => mmu.restore(gfn, level, own))
    }

    fn protects_tables(&self) -> bool {
        either!(self, mmu => mmu.protects_tables())
    }

    fn lift(&self, walk: &mut Walk) {
        either!(self, mmu => mmu.lift(walk));
    }

    fn zap_oldest(&self, detached: &mut Detached, zapped: &mut dyn FnMut(Gfn, Level, u64)) -> bool {
        either!(self, mmu => mmu.zap_oldest(detached, zapped))
    }

    fn is_nx_table(&self, frame: Pfn) -> bool {
        either!(self, mmu => mmu.is_nx_table(frame))
    }

    fn check(&self) -> Result<(), String> {
        either!(self, mmu => mmu.check())
    }
}

/// The operations of vCPUs. Every caller is in a reader section.
impl<P: Platform, F: Format> Mmu<P, F> {
    /// Returns a cursor for a walk to `gfn`, which starts at the root for guest-physical addresses.
    #[inline(always)]
    pub(crate) fn cursor(&self, gfn: Gfn) -> Cursor<'_, P, F> {
        let key = Key {
            context: self.context(),
            index: gfn.into(),
        };
        let platform = either!(self, mmu => mmu.platform());
        // SAFETY: the root exists as long as the MMU. Every holder of a reference to the MMU is in a reader section
        // (`Guarded`).
        unsafe { Cursor::new(platform, Reached::nothing::<F>(key)) }
    }

    /// Installs a leaf ([`Tree::map`]).
    ///
    /// # Errors
    /// [`Retry`].
    #[inline(always)]
    pub(crate) fn map(
        &self,
        target: &mut Target<'_, P, F>,
        level: Level,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
        done: impl FnOnce(),
    ) -> Result<Installed, Retry> {
        let (tree, (leaf, begun)) = by_kind!(
            self,
            tree => (tree, (leaf, 0)),
            mmu => match mmu.tree_for(target) {
                Some(tree) => (tree, mmu.leaf_beside(target.gfn(), level, leaf, path)?),
                None => return mmu.map(target, level, leaf, path, valid, done),
            }
        );
        let valid = || valid() && self.tracking_begun() == begun;
        tree.map(&mut target.cursor, level, leaf, path, valid, done)
    }

    /// Installs leaves in absent entries ([`Tree::map_absent`]).
    ///
    /// # Errors
    /// [`Retry`]. The caller may ignore it.
    pub(crate) fn map_absent(
        &self,
        target: &mut Target<'_, P, F>,
        level: Level,
        leaves: u64,
        leaf: Leaf,
        path: &mut Path<'_>,
        valid: impl Fn() -> bool,
    ) -> Result<u64, Retry> {
        let gfn = target.gfn();
        let (tree, (leaf, begun)) = by_kind!(
            self,
            tree => (tree, (leaf, 0)),
            mmu => match mmu.tree_for(target) {
                // A huge leaf may conflict with a tracked table, and only faults check for such a conflict.
                _ if level > Level::PAGE => return Err(Retry::Conflict(level)),
                Some(tree) => (tree, mmu.run_beside(&(gfn..gfn.add(leaves)), leaf)),
                None => return mmu.map_absent(target, leaves, leaf, path, valid),
            }
        );
        let valid = || valid() && self.tracking_begun() == begun;
        tree.map_absent(&mut target.cursor, level, leaves, leaf, path, valid)
    }

    /// Installs an MMIO entry ([`Tree::map_mmio`]). Returns whether the entry was installed; the caller may ignore the
    /// result.
    ///
    /// # Errors
    /// [`Retry`]: the action that the shadow MMU requires.
    pub(crate) fn map_mmio(
        &self,
        target: &mut Target<'_, P, F>,
        generation: u64,
        path: &mut Path<'_>,
    ) -> Result<bool, Retry> {
        let tree = by_kind!(
            self,
            tree => tree,
            mmu => match mmu.tree_for(target) {
                Some(tree) => tree,
                None => return mmu.map_mmio(target, generation, path),
            }
        );
        Ok(tree.map_mmio(&mut target.cursor, generation, path))
    }

    /// Returns the largest level, up to `level`, at which the MMU can map `gfn`.
    #[inline]
    pub(crate) fn mappable_level(&self, gfn: Gfn, level: Level) -> Level {
        by_kind!(self, _tree => level, mmu => mmu.mappable_level(gfn, level))
    }
}
