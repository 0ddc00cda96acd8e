//! Nested paging of a guest that is a hypervisor (AMD64 volume 2, 15.25): the second stage of the guest's own.
//!
//! A translation of its guest's (L2) goes from the linear address to L2's physical address by L2's tables, and from there to the
//! hypervisor's (L1) by L1's nested tables; then the engine's second level follows, as for any address of L1's. Each entry of L2's tables
//! is at a physical address of L2's, so the walk of L2's tables has a walk of L1's at each step.
//!
//! It is walked anew at each miss of the CPU's TLB: the engine knows nothing of L1's nested tables.

use crate::machine::VcpuMachine;
use crate::machine::mmu::{guest_paging, own_fault, unpaged};
use slat::Gpa;
use slat::guest_walk::{GuestPage, GuestPaging, GuestTables, WalkError, walk};
use slat_x86::state::control;
use slat_x86::{Fault, NestedPaging, Paging};

const PAGE: u64 = 4096;

/// Bits of EXITINFO1: the fault was at the page itself, or at a table of L2's (15.25.6).
const AT_PAGE: u64 = 1 << 32;
const AT_TABLE: u64 = 1 << 33;

/// Guest memory at L2's physical addresses.
struct SecondStage<'a> {
    machine: &'a mut VcpuMachine,
    /// The state of the nested tables.
    paging: &'a GuestPaging,
}

impl SecondStage<'_> {
    /// Walks the nested tables for `access` to `gpa`, an address of L2's; `place` is a bit of EXITINFO1.
    fn page(&mut self, gpa: u64, access: slat::Access, place: u64) -> Result<GuestPage, Fault> {
        let fault = |code: u32| Fault::NestedPage {
            error_code: place | u64::from(code),
            gpa,
        };
        if gpa >> self.paging.translated_bits() != 0 {
            // No table has an entry for it.
            return Err(fault(self.paging.access_code(access)));
        }
        walk(self.machine, self.paging, gpa, access).map_err(|error| match error {
            WalkError::PageFault { code } => fault(code),
            WalkError::Memory(fault) => fault,
        })
    }

    /// Returns L1's address of an entry of L2's tables. Its page has to be writable, as the entry's flags may have to be set (15.25.5).
    fn entry(&mut self, gpa: Gpa) -> Result<Gpa, Fault> {
        let page = self.page(gpa.0, slat::Access::Write, AT_TABLE)?;
        Ok(Gpa(page.gpa.0 | (gpa.0 % PAGE)))
    }
}

impl GuestTables for SecondStage<'_> {
    type Error = Fault;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Fault> {
        let gpa = self.entry(gpa)?;
        self.machine.read(gpa, size)
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Fault> {
        let gpa = self.entry(gpa)?;
        self.machine.compare_exchange(gpa, size, old, new)
    }
}

/// Returns the state of nested tables (AMD64 volume 2, 15.25.5 and 15.25.10): walked as by a user, in the paging mode of the hypervisor,
/// whose page-directory-pointer entries no register holds. Its CR4.SMEP only makes faults report fetches.
fn second_stage(nested: &NestedPaging, physical_bits: u32) -> GuestPaging {
    let paging = Paging {
        cr3: nested.cr3,
        cr4: nested.cr4 & !(control::CR4_SMAP | control::CR4_PKE),
        efer: nested.efer,
        user: true,
        ..Paging::OFF
    };
    GuestPaging {
        pdptes: None,
        reserves_table_global: true,
        ..guest_paging(&paging, physical_bits)
    }
}

impl VcpuMachine {
    /// Walks L2's tables, if its paging is on, and for the page that they lead to the `nested` ones. Returns the page of L1's, with the
    /// rights that both grant.
    ///
    /// # Errors
    /// A page fault of L2's, or [`Fault::NestedPage`].
    #[cold]
    pub(super) fn walk_nested(
        &mut self,
        gva: u64,
        access: slat::Access,
        paging: &Paging,
        nested: &NestedPaging,
    ) -> Result<GuestPage, Fault> {
        let bits = self.physical_bits;
        let mut stage = SecondStage {
            machine: self,
            paging: &second_stage(nested, bits),
        };
        let first = match paging.cr0 & control::CR0_PG {
            0 => unpaged(gva),
            _ => {
                let guest = GuestPaging {
                    pdptes: None,
                    ..guest_paging(paging, bits)
                };
                walk(&mut stage, &guest, gva, access).map_err(own_fault)?
            }
        };
        let second = stage.page(first.gpa.0 | (gva % PAGE), access, AT_PAGE)?;
        Ok(GuestPage {
            gpa: second.gpa,
            read: first.read && second.read,
            write: first.write && second.write,
            execute: first.execute && second.execute,
            ..first
        })
    }
}
