//! The tracepoints. Those of the systems `kvm` and `kvmmmu` have Linux's names and fields, for people who know Linux's
//! (include/trace/events/kvm.h, arch/x86/kvm/trace.h and arch/x86/kvm/mmu/mmutrace.h of Linux 6.12, and for tracepoints
//! of arm64 alone arch/arm64/kvm/trace_arm.h and trace_handle_exit.h). Fields that have no meaning in slat are missing,
//! such as the kernel address of an entry. The tracepoints of the system `slat` are slat's own.
//!
//! Module `arch` has the tracepoints of a single architecture. A test compares the tracepoints of `kvm` and `kvmmmu`
//! with a table for each architecture, and `conformance/tracepoints` compares the tables with a kernel's source.

use std::mem::offset_of;

/// A field of a tracepoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// The field's name.
    pub name: &'static str,
    /// The field's offset from the start of the values.
    pub offset: usize,
    /// The field's size: 1, 4 or 8 bytes.
    pub size: usize,
}

/// Describes a tracepoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Description {
    /// The system to which the tracepoint belongs: `kvm`, `kvmmmu` or `slat`.
    pub system: &'static str,
    /// The tracepoint's name. No other tracepoint of any system has this name.
    pub name: &'static str,
    /// The tracepoint's fields.
    pub fields: &'static [Field],
}

/// The values that a tracepoint records: a structure with one field for each of the tracepoint's fields.
pub trait Point: Copy {
    /// The tracepoint's number: an index into [`POINTS`].
    const ID: usize;
}

/// Returns `name` without `r#`, the mark of a raw identifier. Some names are keywords of Rust.
const fn plain(name: &'static str) -> &'static str {
    match name.as_bytes() {
        [b'r', b'#', ..] => name.split_at(2).1,
        _ => name,
    }
}

/// The number of bytes in a record for the values of a tracepoint.
pub(crate) const VALUES: usize = 48;

macro_rules! points {
    ($($(#[$doc:meta])* $system:ident $name:ident: $type:ident { $($field:ident: $kind:ty),* })*) => {
        $(
            $(#[$doc])*
            #[allow(missing_docs, reason = "the names of the fields are all there is to say")]
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub struct $type {
                $(pub $field: $kind,)*
            }

            impl Point for $type {
                const ID: usize = Id::$type as usize;
            }

            const _: () = assert!(size_of::<$type>() <= VALUES);
        )*

        enum Id {
            $($type,)*
        }

        /// All tracepoints, in the order of their numbers in a file.
        pub const POINTS: &[Description] = &[
            $(Description {
                system: stringify!($system),
                name: plain(stringify!($name)),
                fields: &[$(Field {
                    name: plain(stringify!($field)),
                    offset: offset_of!($type, $field),
                    size: size_of::<$kind>(),
                }),*],
            },)*
        ];
    };
}

crate::arch::with_own_points! { points:
    /// `KVM_RUN` returns. `reason` is the number of `KVM_EXIT_*`. `errno` is negative if `KVM_RUN` fails.
    kvm kvm_userspace_exit: UserspaceExit { reason: u32, errno: i32 }
    /// A vCPU accesses a device in memory. `type` has the values of [`mmio`].
    kvm kvm_mmio: Mmio { r#type: u32, len: u32, gpa: u64, val: u64 }
    /// A write of a vCPU to memory has only signalled an eventfd. The write is also recorded as a `kvm_mmio`.
    kvm kvm_fast_mmio: FastMmio { gpa: u64 }
    /// A second-level page fault; with shadow paging, `fault_address` is a guest-virtual address. `error_code` has two
    /// bits of x86's page-fault error code: bit 1 for writes, and bit 4 for fetches. KVM's `guest_rip` is missing,
    /// because the CPU does not know it in the middle of a translated block.
    kvm kvm_page_fault: PageFault { vcpu_id: u32, fault_address: u64, error_code: u64 }
    /// Host memory is about to be unmapped, or changed.
    kvm kvm_unmap_hva_range: UnmapHvaRange { start: u64, end: u64 }
    /// The accessed bits of leaves are read, and perhaps cleared.
    kvm kvm_age_hva: AgeHva { start: u64, end: u64 }
    /// A page was written, and is now in the dirty ring for the VMM. The upper half of `slot` is the address space.
    kvm kvm_dirty_ring_push: DirtyRingPush { dirty_index: u32, reset_index: u32, slot: u32, offset: u64 }
    /// A dirty ring was searched for pages that the VMM has collected.
    kvm kvm_dirty_ring_reset: DirtyRingReset { dirty_index: u32, reset_index: u32 }
    /// `KVM_RUN` returns because the dirty ring of the vCPU is full.
    kvm kvm_dirty_ring_exit: DirtyRingExit { vcpu_id: u32 }

    /// A fault is about to install a leaf entry. `level` 1 is 4 KiB.
    kvmmmu kvm_mmu_spte_requested: SpteRequested { gfn: u64, pfn: u64, level: u8 }
    /// A fault was resolved without looking up the memslot and the host page. `ret` is `RET_PF_FIXED` (3) or
    /// `RET_PF_SPURIOUS` (4).
    kvmmmu fast_page_fault: FastPageFault { vcpu_id: i32, cr2_or_gpa: u64, error_code: u32, new_spte: u64, ret: i32 }
    /// An entry is changed to an MMIO entry.
    kvmmmu mark_mmio_spte: MarkMmioSpte { gfn: u64, r#gen: u32 }
    /// An MMIO entry has resolved a fault, without a memslot look-up.
    kvmmmu handle_mmio_page_fault: HandleMmioPageFault { addr: u64, gfn: u64 }
    /// A leaf of the TDP MMU, or an entry for a table with all entries below, was zapped. `new_spte` is 0.
    kvmmmu kvm_tdp_mmu_spte_changed: TdpMmuSpteChanged { gfn: u64, old_spte: u64, new_spte: u64, level: u8 }
    /// A huge leaf of `level` was split.
    kvmmmu kvm_mmu_split_huge_page: SplitHugePage { gfn: u64, spte: u64, level: i32, errno: i32 }
    /// A shadow page was made, or found.
    kvmmmu kvm_mmu_get_page: GetPage { gfn: u64, role: u32, created: u8 }
    /// A shadow page becomes unsync: it no longer follows the guest's table.
    kvmmmu kvm_mmu_unsync_page: UnsyncPage { gfn: u64, role: u32 }
    /// A shadow page is zapped.
    kvmmmu kvm_mmu_prepare_zap_page: PrepareZapPage { gfn: u64, role: u32 }

    /// A memslot was created, moved or deleted, or its flags have changed. `npages` 0 means deleted.
    slat memslot: MemslotChange { vm: u32, as_id: u32, slot: u32, base_gfn: u64, npages: u64, userspace_addr: u64, flags: u32 }
    /// A flush of the guest frames from `start` to before `end` begins: it waits for vCPUs.
    slat flush_begin: FlushBegin { start: u64, end: u64 }
    /// The flush of the guest frames from `start` to before `end` is done.
    slat flush_end: FlushEnd { start: u64, end: u64 }
    /// A vCPU has dropped its translations, for a flush.
    slat quiesce: Quiesce {}
    /// A long operation yields to other threads.
    slat r#yield: Yield {}
    /// A region of guest code that begins at `rip` was compiled: quickly (`tier` 0), or by Cranelift (`tier` 1).
    slat compile: CompileRegion { rip: u64, tier: u32 }
    /// A store to the address `hva` has made the decoded and compiled code of the address's page invalid.
    slat code_invalidated: CodeInvalidated { hva: u64 }
}

const _: () = assert!(POINTS.len() <= u64::BITS as usize);

/// Values of `type` of `kvm_mmio`: KVM_TRACE_MMIO_* of Linux.
pub mod mmio {
    /// A read that the VMM completes.
    pub const READ_UNSATISFIED: u32 = 0;
    /// A read, with its value.
    pub const READ: u32 = 1;
    /// A write.
    pub const WRITE: u32 = 2;
}
