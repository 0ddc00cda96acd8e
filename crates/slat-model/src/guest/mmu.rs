//! The trait that an MMU under test implements.

use std::ops::Range;

use slat::guest_walk::GuestPaging;
use slat::{Access, Gfn, Gpa, Hpa, Hva, Pfn, Region};

use super::registers::Registers;

/// The outcome of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The access reaches memory.
    Page {
        /// The first byte of the 4 KiB host page.
        host: Hpa,
        /// Whether the MMU tracks writes to the page, so that a store through this translation must be reported
        /// ([`GuestMmu::stored`]). Meaningful for stores only.
        tracked: bool,
    },
    /// The guest gets a page fault (#PF) with this error code.
    PageFault {
        /// The bits of the code, as in [`slat::guest_walk::error_code`].
        code: u32,
    },
    /// No memslot contains the address, or the access is a write to a read-only memslot.
    Mmio {
        /// The guest-physical address, exact to the byte.
        gpa: Gpa,
    },
    /// The access is a fetch from a memslot without the right to execute.
    NoExecute {
        /// The guest-physical address, exact to the byte.
        gpa: Gpa,
    },
    /// The backing of the page does not allow the access, or is not present yet. KVM_RUN returns EFAULT.
    BadAddress {
        /// The address of the data in the page, or of a page-table entry in the page whose flags cannot be set.
        gpa: Gpa,
    },
}

/// A part of a store: the bytes in one page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The first guest-physical address of the part of a store.
    pub gpa: Gpa,
    /// The number of bytes in the part.
    pub bytes: usize,
}

/// The kind of a guest store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreKind {
    /// A store without a LOCK prefix, like MOV.
    Plain,
    /// A store of an instruction with a LOCK prefix.
    Locked,
}

/// The register that an instruction has written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegisterWrite {
    /// MOV to CR0. If CR0.PG changes, EFER.LMA may change, too.
    Cr0,
    /// MOV to CR3.
    Cr3 {
        /// Bit 63 of the operand, if CR4.PCIDE is set. If this bit is set, the MMU need not invalidate anything.
        keep: bool,
    },
    /// MOV to CR4.
    Cr4,
    /// WRMSR to IA32_EFER.
    Efer,
}

/// An INVPCID instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invpcid {
    /// INVPCID of type 0: invalidates one address.
    Address {
        /// The PCID in the descriptor.
        pcid: u16,
        /// The address in the descriptor.
        gva: u64,
    },
    /// INVPCID of type 1: invalidates one PCID.
    Context {
        /// The PCID in the descriptor.
        pcid: u16,
    },
    /// INVPCID of type 2: invalidates all PCIDs, including global translations.
    All,
    /// INVPCID of type 3: invalidates all PCIDs, except global translations.
    AllButGlobal,
}

/// An MMU under test. The MMU translates for [`CPUS`](super::CPUS) vCPUs of one VM with one address space.
///
/// All methods are called from one thread. `cpu` is the number of the vCPU that executes the instruction.
///
/// # What is checked
/// * Each [`Outcome`] is allowed by the SDM: the address, the host page and the error code.
/// * The accessed and dirty flags in [`GuestRam`](super::GuestRam): the MMU sets the flags that a translation needs
///   and no others, and writes nothing else.
/// * Each dirty log contains the pages that were written, and no others.
pub trait GuestMmu {
    /// Accesses `gva`. `paging` is the current paging state. `None`: paging is off, and `gva` is a guest-physical
    /// address.
    ///
    /// Before a vCPU's first access, [`Self::written`] reports the loading of its registers.
    fn access(
        &mut self,
        cpu: usize,
        gva: u64,
        access: Access,
        paging: Option<&GuestPaging>,
    ) -> Outcome;

    /// Accesses a guest-physical address for the vCPU, which the guest's tables do not translate, as for an emulated
    /// instruction. Never returns a page fault.
    fn access_physical(&mut self, cpu: usize, gpa: Gpa, access: Access) -> Outcome;

    /// Called after the guest has completed a store of one to eight bytes, in one or two pages. Not called if
    /// [`Self::access`] has translated every part of the store to a page that is not tracked.
    fn stored(&mut self, cpu: usize, kind: StoreKind, parts: &[Part]);

    /// Called after the VMM has written guest memory. An MMU does not track such stores. So the VMM afterwards sets the
    /// registers of all vCPUs to their current values (KVM_SET_SREGS), which flushes.
    fn client_stored(&mut self);

    /// Called after an instruction has written a register. `new` includes the PDPTEs that the instruction has loaded.
    fn written(&mut self, cpu: usize, write: RegisterWrite, old: &Registers, new: &Registers);

    /// Executes INVLPG.
    fn invlpg(&mut self, cpu: usize, gva: u64);

    /// Executes INVPCID.
    fn invpcid(&mut self, cpu: usize, invpcid: Invpcid);

    /// Executes KVM_SET_USER_MEMORY_REGION with valid arguments.
    fn set_region(&mut self, region: &Region);

    /// Runs `change` within an invalidation of `range`. `change` replaces the host pages of `range`, or changes their
    /// rights. The contents stay.
    fn invalidate(&mut self, range: Range<Hva>, change: &mut dyn FnMut());

    /// Executes KVM_GET_DIRTY_LOG for a slot with dirty logging.
    fn dirty_log(&mut self, slot: u32, bitmap: &mut [u64]);

    /// Returns the host frame to which a guest frame is mapped ([`slat::Vm::lookup`]). The outer `None`: the MMU cannot
    /// tell.
    fn frame_of(&self, gfn: Gfn) -> Option<Option<Pfn>> {
        let _ = gfn;
        None
    }

    /// Returns whether a dirty log may contain pages that were only read. KVM logs such a page if it maps the page
    /// writable for the read ([`slat::DirtyLogReads`]).
    fn logs_reads(&self) -> bool {
        false
    }

    /// Checks the MMU's own invariants.
    ///
    /// # Errors
    /// A description of the first invariant that does not hold.
    fn audit(&mut self) -> Result<(), String> {
        Ok(())
    }
}
