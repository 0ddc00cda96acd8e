//! Nested paging of a guest that is a hypervisor (AMD64 volume 2, 15.25): the second stage of the guest's own guest.
//!
//! A translation for the nested guest (L2) has three steps. L2's tables translate the linear address to L2's physical
//! address. The nested tables of the hypervisor (L1) translate that address to L1's physical address. Then the engine's
//! second level follows, as for any address of L1. Each entry of L2's tables is at an L2-physical address, so each step
//! of the walk of L2's tables includes a walk of L1's tables.
//!
//! The engine shadows L1's nested tables and translates L2-physical addresses by the shadow ([`Shadowed`]). With the
//! shadow MMU the shadow is like that of any table of the guest; with other MMUs it exists beside L1's second level. So
//! each step is one walk of the shadow table, which leads to the host page. L1's tables are read only at a fault. A
//! table format with break-before-make cannot shadow L1's tables. With such a format, L1's tables are walked
//! ([`Walked`]), and the result is kept until L1 flushes it, as on a processor. L1's tables are also walked for a
//! client's `KVM_TRANSLATE`.

use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::machine::mmu::{guest_paging, own_fault, slat_access, unpaged};
use slat::guest_walk::{GuestPage, GuestPaging, GuestTables, WalkError, walk};
use slat::{Gpa, Hpa};
use slat_x86::state::control;
use slat_x86::{Access, Fault, HostPage, Mmu, NestedPaging, Paging};

const PAGE: u64 = 4096;

/// Bits of EXITINFO1: the fault was at the page itself, or at one of L2's tables (15.25.6).
const AT_PAGE: u64 = 1 << 32;
const AT_TABLE: u64 = 1 << 33;

/// Returns a page fault of the nested tables at the L2-physical address `gpa`. `place` is the bit of EXITINFO1 that
/// says which page the fault was at.
fn nested_fault(gpa: u64, code: u32, place: u64) -> Fault {
    Fault::NestedPage {
        error_code: place | u64::from(code),
        gpa,
    }
}

/// Checks that the L2-physical address `gpa` is not too wide for the `nested` tables. `place` is the bit of EXITINFO1
/// for the fault.
fn check_width(
    nested: &GuestPaging,
    gpa: u64,
    access: slat::Access,
    place: u64,
) -> Result<(), Fault> {
    match gpa >> nested.translated_bits() {
        0 => Ok(()),
        _ => Err(nested_fault(gpa, nested.access_code(access), place)),
    }
}

/// Guest memory at L2's physical addresses: L1's tables are walked.
struct Walked<'a> {
    machine: &'a mut VcpuMachine,
    /// The state of the nested tables, as the CPU describes it. `nested` is the same state, for a walk.
    of: &'a NestedPaging,
    nested: &'a GuestPaging,
}

impl Walked<'_> {
    /// Returns the cached translation of the L2-physical address `gpa`, if there is one and it allows `access`.
    fn known(&mut self, gpa: u64, access: slat::Access) -> Option<GuestPage> {
        let flushes = self.machine.memory.flushes;
        (self.machine.tables).nested(flushes, self.of, gpa, access)
    }

    /// Walks the nested tables for `access` to the L2-physical address `gpa`.
    fn page(&mut self, gpa: u64, access: slat::Access, place: u64) -> Result<GuestPage, Fault> {
        check_width(self.nested, gpa, access, place)?;
        if let Some(known) = self.known(gpa, access) {
            return Ok(known);
        }
        let page = walk(self.machine, self.nested, gpa, access).map_err(|error| match error {
            WalkError::PageFault { code } => nested_fault(gpa, code, place),
            WalkError::Memory(fault) => fault,
        })?;
        let machine = &mut *self.machine;
        let flushes = machine.memory.flushes;
        machine.tables.keep_nested(flushes, gpa, page);
        Ok(page)
    }

    /// Returns L1's address of an entry of L2's tables. The entry's page has to be writable, because the walk may have
    /// to set the entry's flags (15.25.5).
    fn entry(&mut self, gpa: Gpa) -> Result<Gpa, Fault> {
        let page = self.page(gpa.0, slat::Access::Write, AT_TABLE)?;
        Ok(Gpa(page.gpa.0 | (gpa.0 % PAGE)))
    }
}

impl GuestTables for Walked<'_> {
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

/// Guest memory at L2's physical addresses: the engine shadows L1's tables.
struct Shadowed<'a> {
    machine: &'a mut VcpuMachine,
    /// The parameters for a walk of the nested tables.
    nested: &'a GuestPaging,
}

impl Shadowed<'_> {
    /// Translates the L2-physical address `gpa` for `access`.
    fn page(&mut self, gpa: u64, access: slat::Access, place: u64) -> Result<HostPage, Fault> {
        check_width(self.nested, gpa, access, place)?;
        let page = self.machine.translate_shadowed(gpa, access, self.nested);
        page.map_err(|fault| match fault {
            Fault::Page { error_code } => nested_fault(gpa, error_code, place),
            fault => fault,
        })
    }

    /// Returns the location of an entry of L2's tables. As in [`Walked`], L1's tables must allow writes to the page.
    /// The memslot may be read-only.
    fn entry(&mut self, gpa: Gpa) -> Result<EntryIn, Fault> {
        match self.page(gpa.0, slat::Access::Write, AT_TABLE) {
            Ok(page) => Ok(EntryIn::Memory(Hpa(
                page.base.as_ptr() as u64 + gpa.0 % PAGE
            ))),
            Err(Fault::Mmio { gpa }) => Ok(EntryIn::NotWritable(Gpa(gpa))),
            Err(fault) => Err(fault),
        }
    }
}

/// The location of an entry of L2's tables.
enum EntryIn {
    /// The entry is in writable memory, at this host address.
    Memory(Hpa),
    /// The entry is in read-only memory or outside memory, at this L1-physical address.
    NotWritable(Gpa),
}

impl GuestTables for Shadowed<'_> {
    type Error = Fault;

    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Fault> {
        match self.entry(gpa)? {
            EntryIn::Memory(word) => self.machine.read_entry(word, size),
            // Reads at the L1-physical address that the translation for a write has found. A second translation, for a
            // read, could find another page: the shadow may still have an older read-only entry of L1 that L1 has not
            // flushed yet.
            EntryIn::NotWritable(gpa) => self.machine.read(gpa, size),
        }
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Fault> {
        match self.entry(gpa)? {
            EntryIn::Memory(word) => self.machine.exchange_entry(word, size, old, new),
            // As on a processor, the walk continues although the accessed and dirty flags in a table in read-only
            // memory cannot be set.
            EntryIn::NotWritable(_) => Ok(true),
        }
    }
}

/// Returns the parameters for a walk of nested tables (AMD64 volume 2, 15.25.5 and 15.25.10). The walk makes user
/// accesses, in the hypervisor's paging mode. It reads page-directory-pointer entries from memory, because no register
/// holds them. The hypervisor's CR4.SMEP has one effect: the error code of a fault reports instruction fetches.
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

/// Walks L2's own tables, if L2's paging is on. `memory` is memory at L2-physical addresses. Returns L2's page.
fn first_stage(
    memory: &mut impl GuestTables<Error = Fault>,
    gva: u64,
    access: slat::Access,
    paging: &Paging,
    physical_bits: u32,
) -> Result<GuestPage, Fault> {
    if paging.cr0 & control::CR0_PG == 0 {
        return Ok(unpaged(gva));
    }
    let guest = GuestPaging {
        pdptes: None,
        ..guest_paging(paging, physical_bits)
    };
    walk(memory, &guest, gva, access).map_err(own_fault)
}

impl VcpuMachine {
    /// Walks L2's tables, if L2's paging is on, and then the `nested` tables for the resulting page. Returns L1's page,
    /// with the rights that both grant.
    ///
    /// # Errors
    /// One of L2's page faults, or [`Fault::NestedPage`].
    #[cold]
    pub(super) fn walk_nested(
        &mut self,
        gva: u64,
        access: slat::Access,
        paging: &Paging,
        nested: &NestedPaging,
    ) -> Result<GuestPage, Fault> {
        let bits = self.physical_bits;
        let mut memory = Walked {
            machine: self,
            of: nested,
            nested: &second_stage(nested, bits),
        };
        let first = first_stage(&mut memory, gva, access, paging, bits)?;
        let second = memory.page(first.gpa.0 | (gva % PAGE), access, AT_PAGE)?;
        Ok(GuestPage {
            gpa: second.gpa,
            read: first.read && second.read,
            write: first.write && second.write,
            execute: first.execute && second.execute,
            ..first
        })
    }

    /// Translates by L2's tables, if L2's paging is on, and by the engine's shadow of the `nested` tables.
    ///
    /// # Errors
    /// The errors of [`Self::walk_nested`], and those of an access.
    pub(super) fn translate_nested(
        &mut self,
        gva: u64,
        access: slat::Access,
        paging: &Paging,
        nested: &NestedPaging,
    ) -> Result<HostPage, Fault> {
        let bits = self.physical_bits;
        let mut memory = Shadowed {
            machine: self,
            nested: &second_stage(nested, bits),
        };
        let first = first_stage(&mut memory, gva, access, paging, bits)?;
        let second = memory.page(first.gpa.0 | (gva % PAGE), access, AT_PAGE)?;
        Ok(HostPage {
            read: first.read && second.read,
            write: first.write && second.write,
            execute: first.execute && second.execute,
            bits: first.bits,
            ..second
        })
    }

    /// Translates an L2-physical address by the `nested` tables, for an access that the CPU makes to a structure at
    /// that address.
    ///
    /// # Errors
    /// [`Fault::NestedPage`], and the errors of an access.
    pub(super) fn translate_second_stage(
        &mut self,
        gpa: u64,
        access: Access,
        nested: &NestedPaging,
    ) -> Result<HostPage, Fault> {
        let stage = &second_stage(nested, self.physical_bits);
        if self.shadows_nested {
            let mut memory = Shadowed {
                machine: self,
                nested: stage,
            };
            return memory.page(gpa, slat_access(access), AT_PAGE);
        }
        let mut memory = Walked {
            machine: self,
            of: nested,
            nested: stage,
        };
        let page = memory.page(gpa, slat_access(access), AT_PAGE)?;
        self.translate_physical(page.gpa.0, access)
    }
}
