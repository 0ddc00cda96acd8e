//! Decides which leaf a page of a memslot gets: its rights, and the largest level that is possible.

use core::ops::Range;

use super::Vm;
use crate::addr::{Access, Gfn, Level, Pfn};
use crate::format::{Format, Leaf, MemoryType, Privilege};
use crate::platform::{HostPage, Platform};
use crate::slots::Limits;

/// Returns the leaf that maps the page `host` of a slot with `limits`, for `access`. The leaf has the rights, accessed
/// and dirty bits that KVM would give it. If `protects`, the slot's log works by write protection, so the leaf is
/// writable only if `access` is a write. This function makes all leaves of slots, so no leaf exceeds the limits of its
/// slot. Later changes of a leaf add only rights that the leaf allows ([`Leaf::may_write`], [`Leaf::may_execute`]).
#[inline]
pub(crate) fn leaf_of(host: &HostPage, limits: Limits, protects: bool, access: Access) -> Leaf {
    let allowed = host.writable && limits.rights.write;
    let write = allowed && (!protects || access == Access::Write);
    Leaf {
        pfn: host.pfn,
        write,
        // The slot's memory type need not be checked: slots of other types than write-back do not have the right to
        // execute.
        execute: limits.rights.execute && is_executable(host),
        may_write: allowed && !write,
        may_execute: false,
        accessed: true,
        dirty: write && access == Access::Write,
        memory: host.memory.combined(limits.memory),
        privilege: Privilege::USER,
    }
}

/// Whether the host lets the guest execute the page.
#[inline]
pub(crate) fn is_executable(host: &HostPage) -> bool {
    host.execute && host.memory == MemoryType::WriteBack
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Returns the largest level at which a leaf may map `gfn` to `pfn`. A leaf may map only the frames `gfns`, and the
    /// host maps `pfn` at level `host`.
    pub(crate) fn fitting_level(
        &self,
        gfns: &Range<Gfn>,
        gfn: Gfn,
        pfn: Pfn,
        host: Level,
    ) -> Level {
        if !self.policy.huge_pages().is_on() {
            return Level::PAGE;
        }
        let mut level = host.min(F::MAX_LEAF);
        while level > Level::PAGE {
            let block = F::GRANULE.block(gfn, level);
            let inside = gfns.start <= block.start && block.end <= gfns.end;
            let congruent = (gfn.0 ^ pfn.0) & (F::GRANULE.pages(level) - 1) == 0;
            if inside && congruent {
                break;
            }
            level = level.below();
        }
        level
    }

    /// Returns the leaf of `level` that maps the page of `leaf`, which is of level 1, and the pages around it. With the
    /// policy `nx_huge_pages`, a huge leaf is not executable.
    #[inline]
    pub(crate) fn leaf_at(&self, leaf: Leaf, level: Level) -> Leaf {
        let nx = level > Level::PAGE && self.policy.nx_huge_pages().is_on();
        Leaf {
            pfn: Pfn(leaf.pfn.0 & !(F::GRANULE.pages(level) - 1)),
            execute: leaf.execute && !nx,
            may_execute: leaf.execute && nx,
            ..leaf
        }
    }
}
