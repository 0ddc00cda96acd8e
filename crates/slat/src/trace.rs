//! Events of the engine that a platform may record: KVM's tracepoints, and a few more.
//!
//! The engine reports each event to its platform ([`Platform::trace`](crate::Platform::trace)). Most events happen
//! under locks or in the middle of a fault, so the platform must handle an event quickly. For a platform that ignores
//! events, the calls are compiled away.

use core::fmt;
use core::ops::Range;

use crate::addr::{Access, Gfn, Gpa, Hva, Level, Pfn};

/// An event of the engine. The fields have the names of those of KVM's tracepoint with the same name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// `kvm_page_fault`: an access of the guest finds no entry that allows it. With shadow paging the address is
    /// guest-virtual, otherwise guest-physical. Counted as `pf_taken`.
    PageFault {
        /// The address of the access.
        fault_address: u64,
        /// The kind of access, whose right is missing.
        access: Access,
    },
    /// `kvm_mmu_spte_requested`: a fault is about to install a leaf.
    SpteRequested {
        /// The frame that the guest accesses.
        gfn: Gfn,
        /// The first frame of the leaf.
        pfn: Pfn,
        /// The leaf's level.
        level: Level,
    },
    /// `fast_page_fault`: a fault of the guest was resolved without looking up the memslot or the host's page. Counted
    /// as `pf_fast`.
    FastPageFault {
        /// The guest-physical address of the access.
        gpa: Gpa,
        /// The right that was missing.
        access: Access,
        /// The leaf, as an entry of the tables.
        new_spte: u64,
        /// Whether the leaf already allowed the access.
        spurious: bool,
    },
    /// `mark_mmio_spte`: an MMIO entry was installed, because no memslot contains the frame. Counted as
    /// `pf_mmio_spte_created`.
    MarkMmioSpte {
        /// The guest frame without a memslot.
        gfn: Gfn,
        /// The generation of the memslots.
        generation: u64,
    },
    /// `handle_mmio_page_fault`: an MMIO entry has served an access. Counted as `mmio_cached`.
    HandleMmioPageFault {
        /// The address of the access: a guest-physical address, or with shadow paging a guest-virtual address.
        addr: u64,
        /// The guest frame of the address.
        gfn: Gfn,
    },
    /// `kvm_tdp_mmu_spte_changed`: an entry of the tree of tables was zapped: a leaf, or a table with everything
    /// below it.
    SpteZapped {
        /// The first frame of the entry.
        gfn: Gfn,
        /// The entry's value before the zap.
        old_spte: u64,
        /// The level of the entry.
        level: Level,
    },
    /// `kvm_mmu_split_huge_page`: a huge leaf was split. Counted as `splits`.
    SplitHugePage {
        /// The frame for which the leaf was split.
        gfn: Gfn,
        /// The leaf, as an entry of the tables.
        spte: u64,
        /// The leaf's level.
        level: Level,
    },
    /// `kvm_mmu_get_page`: a shadow page was made (`created`, counted as `mmu_cache_miss`) or found.
    GetPage {
        /// The frame of the guest's table; for a direct page, the first frame that the page maps.
        gfn: Gfn,
        /// The role of the page.
        role: PageRole,
        /// Whether the page was made, not found.
        created: bool,
    },
    /// `kvm_mmu_unsync_page`: a shadow page is not synced with the guest's table any more.
    UnsyncPage {
        /// The frame of the page, as in [`Event::GetPage`].
        gfn: Gfn,
        /// The role of the page, as in [`Event::GetPage`].
        role: PageRole,
    },
    /// `kvm_mmu_prepare_zap_page`: a shadow page is zapped. Counted as `mmu_shadow_zapped`.
    PrepareZapPage {
        /// The frame of the page, as in [`Event::GetPage`].
        gfn: Gfn,
        /// The role of the page, as in [`Event::GetPage`].
        role: PageRole,
    },
    /// `kvm_unmap_hva_range`: an invalidation begins, even if no memslot uses the memory.
    UnmapHvaRange(Range<Hva>),
    /// `kvm_age_hva`: the accessed bits of leaves are read, and perhaps cleared.
    AgeHva(Range<Hva>),
    /// `kvm_dirty_ring_push`: a vCPU pushes a page that it has written.
    DirtyRingPush {
        /// Index after that of the new ring entry. Indices count all entries that were ever pushed (modulo 2^32).
        dirty_index: u32,
        /// Index of the oldest ring entry that is not reset.
        reset_index: u32,
        /// The number of the memslot in bits 0 to 15, and its address space in the bits above.
        slot: u32,
        /// The page's offset in the memslot, in pages.
        offset: u64,
    },
    /// `kvm_dirty_ring_reset`: the engine has reset the entries of a ring that the client had collected.
    DirtyRingReset {
        /// Index after that of the newest ring entry, counted as in [`Event::DirtyRingPush`].
        dirty_index: u32,
        /// Index of the oldest ring entry that is not reset, counted as in [`Event::DirtyRingPush`].
        reset_index: u32,
    },
    /// Specific to the engine: a TLB flush of these frames begins. Counted as `remote_tlb_flush`.
    FlushBegin(Range<Gfn>),
    /// Specific to the engine: a TLB flush of these frames is done.
    FlushEnd(Range<Gfn>),
    /// Specific to the engine: a vCPU has dropped all translations that it held outside the tables.
    Quiesce,
    /// Specific to the engine: a long operation lets other threads continue.
    Yield,
}

impl Event {
    /// Returns the name of the tracepoint: KVM's, or the engine's own.
    pub const fn name(&self) -> &'static str {
        match self {
            Event::PageFault { .. } => "kvm_page_fault",
            Event::SpteRequested { .. } => "kvm_mmu_spte_requested",
            Event::FastPageFault { .. } => "fast_page_fault",
            Event::MarkMmioSpte { .. } => "mark_mmio_spte",
            Event::HandleMmioPageFault { .. } => "handle_mmio_page_fault",
            Event::SpteZapped { .. } => "kvm_tdp_mmu_spte_changed",
            Event::SplitHugePage { .. } => "kvm_mmu_split_huge_page",
            Event::GetPage { .. } => "kvm_mmu_get_page",
            Event::UnsyncPage { .. } => "kvm_mmu_unsync_page",
            Event::PrepareZapPage { .. } => "kvm_mmu_prepare_zap_page",
            Event::UnmapHvaRange(_) => "kvm_unmap_hva_range",
            Event::AgeHva(_) => "kvm_age_hva",
            Event::DirtyRingPush { .. } => "kvm_dirty_ring_push",
            Event::DirtyRingReset { .. } => "kvm_dirty_ring_reset",
            Event::FlushBegin(_) => "flush_begin",
            Event::FlushEnd(_) => "flush_end",
            Event::Quiesce => "quiesce",
            Event::Yield => "yield",
        }
    }
}

/// Writes the name, and the event's fields.
impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {self:?}", self.name())
    }
}

/// The role of a shadow page, in the lower bits of KVM's `kvm_mmu_page_role`: the level in bits 0 to 3, "entries of 4
/// bytes" in bit 4, the quadrant in bits 5 and 6, "direct" in bit 7, and the rights to execute, to write, and of user
/// mode in bits 8 to 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PageRole(pub u32);
