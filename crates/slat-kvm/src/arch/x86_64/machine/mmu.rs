//! Translates guest-virtual addresses to host pages, for misses of the software CPU's TLB.
//!
//! Two translations follow one another: by the guest's tables ([`slat::guest_walk`]), and by the engine's second level.
//! The walk of the guest's tables needs a second-level translation for each table. A small cache holds the last of
//! these translations. The cache is flushed together with the software TLB.
//!
//! With the shadow MMU there is only one translation, by the engine's shadow of the guest's tables. The engine itself
//! walks the guest's tables where necessary. This module reports to the engine stores to these tables, and translations
//! that the guest invalidates. The nested tables of a guest that is a hypervisor are also shadowed with a second level
//! ([`super::nested_paging`]).

use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::table_cache::DevicePage;
use crate::engine::EngineVcpu;
use crate::entered::Entered;
use crate::guest_memory::Unreachable;
use slat::guest_walk::{GuestPage, GuestPaging, GuestTables, Mode, WalkError, walk};
use slat::{Gpa, HostWords, Hpa, Stop, VirtualStop};
use slat_x86::state::control;
use slat_x86::{Access, CodePages, Cpu, Fault, GuestFlush, HostPage, Mmu, NestedPaging, Paging};
use std::ptr::NonNull;

const PAGE: u64 = 4096;

impl From<Unreachable> for Fault {
    /// Returns the CPU's fault for memory that cannot be accessed. The caller has handled MMIO addresses.
    fn from(why: Unreachable) -> Fault {
        match why {
            Unreachable::Retry => Fault::Retry,
            Unreachable::OutOfMemory => Fault::OutOfMemory,
            Unreachable::BadAddress => Fault::BadAddress,
            Unreachable::NotMemory => unreachable!("the caller handles MMIO"),
        }
    }
}

impl AsMut<EngineVcpu> for VcpuMachine {
    fn as_mut(&mut self) -> &mut EngineVcpu {
        &mut self.memory.engine
    }
}

impl VcpuMachine {
    /// Reads guest-physical memory of the vCPU's address space. Returns `false` if the address is not memory, or not
    /// accessible. Call inside the engine's reader section.
    pub(crate) fn read_here(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.memory.read(gpa, bytes)
    }

    /// Writes guest-physical memory of the vCPU's address space, and marks the pages in the dirty log. Returns `false`
    /// if the address is not memory, or not accessible. Call inside the engine's reader section.
    pub(crate) fn write_here(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        let code = &self.vm.arch.code;
        self.memory.write(gpa, bytes, |host| {
            code.stored(host);
        })
    }

    /// Makes the engine compare its shadow tables with the guest's tables, because the client may have written to guest
    /// memory since the last run. Call inside the engine's reader section, when the CPU has no translations.
    pub(crate) fn follow_client(&mut self) {
        if std::mem::take(&mut self.memory_restored) {
            self.vm.engine.guest_memory_changed();
            self.memory
                .engine
                .flush_guest(&mut Words(&self.vm.arch.code));
            self.memory.request_retry();
        }
    }

    /// If the engine shadows the guest's tables, makes the engine compare its shadow tables with the guest's tables.
    /// Returns whether the engine shadows the guest's tables. If so, all translations are invalid now. Call inside the
    /// engine's reader section.
    pub(crate) fn flush_shadowed(&mut self) -> bool {
        if self.shadows {
            self.memory
                .engine
                .flush_guest(&mut Words(&self.vm.arch.code));
        }
        self.shadows
    }

    /// Reads an aligned word of guest-physical memory of the vCPU's address space. `None`: `gpa` is not memory, or not
    /// accessible. Call inside the engine's reader section.
    pub(super) fn read_word_here(&mut self, gpa: u64) -> Option<u64> {
        loop {
            match self.word(Gpa(gpa), size_of::<u64>()) {
                Ok(word) => return Some(word),
                Err(Unreachable::Retry) if self.memory.may_try_again() => {}
                Err(_) => return None,
            }
        }
    }

    /// Reads a word of `size` (4 or 8) bytes at `gpa`, a multiple of `size`.
    fn word(&mut self, gpa: Gpa, size: usize) -> Result<u64, Unreachable> {
        assert!(gpa.0.is_multiple_of(size as u64), "a word in one page");
        let page = self.memory.page(gpa.0, slat::Access::Read)?;
        let word = Hpa(page.host.as_ptr() as u64 + gpa.0 % PAGE);
        // A read does not change code, so the walk fails only because the memory is not accessible.
        self.read_entry(word, size).map_err(|_| Unreachable::Retry)
    }

    /// Reads a word of guest memory. `word` is the word's host address, from a translation.
    #[inline]
    pub(super) fn read_entry(&mut self, word: Hpa, size: usize) -> Result<u64, Fault> {
        Words(&self.vm.arch.code)
            .read(word, size)
            .map_err(|why| self.again(why))
    }

    /// Replaces a word of guest memory by `new` if the word still is `old`. `word` is the word's host address, from a
    /// translation for a write. Returns whether the word was replaced.
    pub(super) fn exchange_entry(
        &mut self,
        word: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Fault> {
        let exchanged = Words(&self.vm.arch.code).compare_exchange(word, size, old, new);
        exchanged.map_err(|why| self.again(why))
    }

    /// Returns the fault for a walk that has to begin again. If host memory was not accessible, drops the translations
    /// of this memory.
    #[cold]
    fn again(&mut self, why: Again) -> Fault {
        match why {
            Again::Gone(host) => {
                self.memory.forget(host);
                Fault::Retry
            }
            Again::CodeChanged => Fault::CodeChanged,
        }
    }

    /// Whether a signal or a full dirty ring ends the run. If so, the access that has failed is made again in the next
    /// run.
    pub(crate) fn is_called_out(&self) -> bool {
        self.memory.is_called_out()
    }

    /// Reads the page-directory-pointer entries at `cr3`, as a load of CR3 does. `None`: the entries cannot be read.
    pub(crate) fn read_pdptes(&mut self, cr3: u64) -> Option<[u64; 4]> {
        let mut entered = Entered::enter(self);
        entered.forget_pages();
        entered.pdptes(cr3)
    }

    /// Reads the PDPTEs like [`read_pdptes`](Self::read_pdptes). Call only while the vCPU is in the engine's reader
    /// section.
    pub(crate) fn pdptes(&mut self, cr3: u64) -> Option<[u64; 4]> {
        let mut pdptes = [0; 4];
        for (i, pdpte) in pdptes.iter_mut().enumerate() {
            *pdpte = self.read_word_here((cr3 & 0xffff_ffe0) + 8 * i as u64)?;
        }
        Some(pdptes)
    }

    /// Carries out `KVM_TRANSLATE`: walks the guest's tables as for a read in supervisor mode.
    pub(crate) fn translate_for_client(&mut self, cpu: &Cpu, gva: u64) -> Option<u64> {
        let paging = cpu.client_paging();
        if paging.cr0 & control::CR0_PG == 0 && paging.nested.is_none() {
            // Without paging, the address is its own translation. As in KVM, the address is not masked, and u64::MAX
            // means "no address".
            return Some(gva).filter(|gpa| *gpa != u64::MAX);
        }
        let mut entered = Entered::enter(self);
        // The pages that were cached in the last run may be stale. The CPU's own TLB is flushed later, because of the
        // attention word.
        entered.forget_pages();
        loop {
            match entered.walk_guest(gva, slat::Access::Read, &paging) {
                Ok(page) => return Some(page.gpa.0 | (gva % PAGE)),
                Err(Fault::CodeChanged) => {}
                Err(Fault::Retry) if entered.memory.may_try_again() => {}
                Err(_) => return None,
            }
        }
    }
}

/// Returns the translation of an address while paging is off.
pub(super) fn unpaged(gva: u64) -> GuestPage {
    GuestPage {
        gpa: Gpa(gva & 0xffff_f000),
        bits: PAGE.trailing_zeros(),
        read: true,
        write: true,
        execute: true,
        global: false,
    }
}

/// Returns the fault of a walk of the guest's own tables.
pub(super) fn own_fault(error: WalkError<Fault>) -> Fault {
    match error {
        WalkError::PageFault { code } => Fault::Page { error_code: code },
        WalkError::Memory(fault) => fault,
    }
}

pub(super) fn guest_paging(paging: &Paging, physical_bits: u32) -> GuestPaging {
    let cr4 = |bit: u64| paging.cr4 & bit != 0;
    let mode = if paging.efer & control::EFER_LMA != 0 {
        if cr4(control::CR4_LA57) {
            Mode::Level5
        } else {
            Mode::Level4
        }
    } else if cr4(control::CR4_PAE) {
        Mode::Pae
    } else {
        Mode::Bits32 {
            pse: cr4(control::CR4_PSE),
        }
    };
    GuestPaging {
        cr3: paging.cr3,
        mode,
        user: paging.user,
        write_protect: paging.cr0 & control::CR0_WP != 0,
        no_execute: paging.efer & control::EFER_NXE != 0,
        smep: cr4(control::CR4_SMEP),
        smap: cr4(control::CR4_SMAP) && !paging.ac,
        pkru: match cr4(control::CR4_PKE) {
            true => paging.pkru,
            false => 0,
        },
        pdptes: Some(paging.pdptes),
        physical_bits,
        reserves_table_global: false,
    }
}

pub(super) fn slat_access(access: Access) -> slat::Access {
    match access {
        Access::Read => slat::Access::Read,
        Access::Write => slat::Access::Write,
        Access::Execute => slat::Access::Execute,
    }
}

/// Guest memory for a walk of the guest's tables, at host addresses. The walk sets bits in table entries. [`CodePages`]
/// is needed because the guest may also execute the page of a table.
struct Words<'a>(&'a CodePages);

/// The reason why a walk has to begin again.
enum Again {
    /// The host memory at this address is not accessible.
    Gone(*mut u8),

    /// The walk has set a bit in a page that also has code ([`Fault::CodeChanged`]). The next walk finds the bit set,
    /// and succeeds.
    CodeChanged,
}

impl HostWords for Words<'_> {
    type Error = Again;

    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Again> {
        let word = host.0 as *mut u8;
        // SAFETY: the word is within a page of guest memory that the engine has translated. The access is guarded.
        let value = unsafe {
            if size == 4 {
                slat_guard::load(word.cast::<u32>()).map(u64::from)
            } else {
                slat_guard::load(word.cast::<u64>())
            }
        };
        value.map_err(|_| Again::Gone(word))
    }

    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Again> {
        let word = host.0 as *mut u8;
        // SAFETY: the word is within a page of guest memory that the engine has translated for a write. The access is
        // guarded.
        let swapped = unsafe {
            if size == 4 {
                slat_guard::compare_exchange(word.cast::<u32>(), old as u32, new as u32)
                    .map(|result| result.is_ok())
            } else {
                slat_guard::compare_exchange(word.cast::<u64>(), old, new)
                    .map(|result| result.is_ok())
            }
        };
        let swapped = swapped.map_err(|_| Again::Gone(word))?;
        if swapped && self.0.stored(word) {
            return Err(Again::CodeChanged);
        }
        Ok(swapped)
    }
}

impl VcpuMachine {
    /// Translates by the engine's shadow MMU.
    pub(super) fn translate_shadowed(
        &mut self,
        gva: u64,
        access: slat::Access,
        paging: &GuestPaging,
    ) -> Result<HostPage, Fault> {
        let stop = match (self.memory.engine).translate_virtual(
            gva,
            access,
            paging,
            &mut Words(&self.vm.arch.code),
        ) {
            Ok(page) => {
                let base = NonNull::new(page.host.0 as *mut u8).ok_or(Fault::BadAddress)?;
                return Ok(HostPage {
                    base,
                    read: page.read,
                    write: page.write,
                    execute: page.execute,
                    tracked: page.tracked.map(|gpa| gpa.0),
                    bits: page.bits,
                    // The translation need not be global, because every flush by the guest drops all translations.
                    global: false,
                });
            }
            Err(VirtualStop::PageFault { code }) => {
                return Err(Fault::Page { error_code: code });
            }
            Err(VirtualStop::Memory(why)) => return Err(self.again(why)),
            Err(VirtualStop::Stop(stop)) => stop,
        };
        if let Stop::Mmio { gpa } = stop {
            return Err(Fault::Mmio { gpa: gpa.0 });
        }
        Err(self.memory.unreachable(stop).into())
    }
}

impl VcpuMachine {
    /// Walks the guest's tables. In a nested guest with nested paging, also walks the nested tables of the guest's
    /// hypervisor.
    #[inline]
    fn walk_guest(
        &mut self,
        gva: u64,
        access: slat::Access,
        paging: &Paging,
    ) -> Result<GuestPage, Fault> {
        if let Some(nested) = &paging.nested {
            return self.walk_nested(gva, access, paging, nested);
        }
        let guest = guest_paging(paging, self.physical_bits);
        walk(self, &guest, gva, access).map_err(own_fault)
    }
}

impl GuestTables for VcpuMachine {
    type Error = Fault;

    // Always inlined, because a walk of the guest's tables usually calls this method four times.
    #[inline(always)]
    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Fault> {
        match self.word(gpa, size) {
            Ok(entry) => {
                self.memory.engine.count_guest_pte_read();
                Ok(entry)
            }
            // A table that is not in memory maps nothing.
            Err(Unreachable::NotMemory) => Ok(0),
            Err(why) => Err(why.into()),
        }
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Fault> {
        let page = match self.memory.page(gpa.0, slat::Access::Write) {
            // As on a processor, the walk continues although the accessed and dirty flags in a table in read-only
            // memory cannot be set.
            Err(Unreachable::NotMemory) => return Ok(true),
            Err(why) => return Err(why.into()),
            Ok(page) => page,
        };
        let word = Hpa(page.host.as_ptr() as u64 + gpa.0 % PAGE);
        self.exchange_entry(word, size, old, new)
    }
}

impl Mmu for VcpuMachine {
    fn translate(&mut self, gva: u64, kind: Access, paging: &Paging) -> Result<HostPage, Fault> {
        let access = slat_access(kind);
        let linear = gva & !(PAGE - 1);
        let device = (self.tables).device(self.memory.flushes, linear, kind, paging);
        let page = if let Some(page) = device {
            page
        } else if paging.cr0 & control::CR0_PG == 0 && paging.nested.is_none() {
            unpaged(gva)
        } else if let Some(nested) = paging.nested.as_ref().filter(|_| self.shadows_nested) {
            return self.translate_nested(gva, access, paging, nested);
        } else if self.shadows {
            let paging = guest_paging(paging, self.physical_bits);
            return self.translate_shadowed(gva, access, &paging);
        } else {
            self.walk_guest(gva, access, paging)?
        };
        let gpa = page.gpa.0;
        match self.memory.data_page(gpa, access) {
            Ok(host) => Ok(HostPage {
                base: host.host,
                read: page.read,
                write: page.write && host.write,
                execute: page.execute,
                tracked: host.tracked.then_some(gpa),
                bits: page.bits,
                global: page.global && paging.cr4 & control::CR4_PGE != 0,
            }),
            Err(Unreachable::NotMemory) => {
                // Keeps the translation, because accesses to devices are frequent and the CPU's TLB does not hold pages
                // of devices (KVM: `vcpu_cache_mmio_info`).
                let known = DevicePage {
                    gva: linear,
                    access: kind,
                    paging: *paging,
                    page,
                };
                self.tables.keep_device(self.memory.flushes, known);
                Err(Fault::Mmio {
                    gpa: gpa | (gva % PAGE),
                })
            }
            Err(why) => Err(why.into()),
        }
    }

    fn translate_physical(&mut self, gpa: u64, access: Access) -> Result<HostPage, Fault> {
        match self
            .memory
            .data_page(gpa & !(PAGE - 1), slat_access(access))
        {
            Ok(host) => Ok(HostPage {
                base: host.host,
                read: true,
                write: host.write,
                execute: true,
                tracked: host.tracked.then_some(host.gpa),
                bits: PAGE.trailing_zeros(),
                global: false,
            }),
            Err(Unreachable::NotMemory) => Err(Fault::Mmio { gpa }),
            Err(why) => Err(why.into()),
        }
    }

    fn translate_nested_physical(
        &mut self,
        gpa: u64,
        access: Access,
        nested: &NestedPaging,
    ) -> Result<HostPage, Fault> {
        self.translate_second_stage(gpa & !(PAGE - 1), access, nested)
    }

    fn recheck(&mut self, host: *mut u8, _access: Access) -> Result<(), Fault> {
        // A kick may interrupt any access. Only an access to memory that is not resident waits for the host.
        self.memory.is_interrupted |=
            slat_guard::was_kicked() && !slat_host::is_resident(host as usize);
        self.memory.forget(host);
        Err(Fault::Retry)
    }

    fn stored(&mut self, gpa: u64, bytes: usize) -> bool {
        self.memory.stored(gpa, bytes)
    }

    fn flush_guest(&mut self, what: GuestFlush, paging: &Paging) -> bool {
        self.tables.flush_devices();
        let void = match what {
            GuestFlush::Nested => {
                self.tables.flush_nested();
                if self.shadows_nested {
                    self.memory
                        .engine
                        .flush_guest(&mut Words(&self.vm.arch.code));
                }
                self.shadows_nested
            }
            // The engine does not shadow a nested guest's own tables.
            _ if paging.nested.is_some() => false,
            GuestFlush::Page(gva) if self.shadows && paging.cr0 & control::CR0_PG != 0 => {
                let paging = guest_paging(paging, self.physical_bits);
                (self.memory.engine).invlpg(gva, &paging, &mut Words(&self.vm.arch.code))
            }
            GuestFlush::Page(_) => false,
            GuestFlush::All => self.flush_shadowed(),
        };
        if void {
            self.memory.flush();
        }
        void
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vcpu::Inner;
    use crate::vm::VmObject;
    use kvm_bindings::kvm_userspace_memory_region;
    use slat::guest_walk::error_code::{FETCH, USER, WRITE};

    /// A page fault for a table outside memory has the same error code as a page fault for an entry that is not
    /// present.
    #[test]
    fn a_table_outside_memory_maps_nothing() {
        const PRESENT: u64 = 7;
        let mut memory = vec![0u64; 1024];
        let root = memory.as_ptr().align_offset(PAGE as usize);
        // The first entry of the root refers to a table at 1 GiB, where the VM has no memory.
        memory[root] = 1 << 30 | PRESENT;
        let vm = VmObject::new(Default::default(), None, Default::default()).unwrap();
        vm.set_user_memory_region(&kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: PAGE,
            userspace_addr: &raw const memory[root] as u64,
        })
        .unwrap();
        let (vcpu, _fd) = vm.create_vcpu(0).unwrap();
        let mut inner = vcpu.lock().unwrap();
        let Inner { machine, .. } = &mut *inner;
        let mut machine = Entered::enter(machine);
        let paging = |user| Paging {
            cr0: control::CR0_PG,
            cr3: 0,
            pdptes: [0; 4],
            cr4: control::CR4_PAE,
            efer: control::EFER_LMA | control::EFER_NXE,
            pkru: 0,
            user,
            ac: false,
            nested: None,
        };
        let mut code = |access, user| loop {
            match machine.translate(0x1000, access, &paging(user)) {
                Err(Fault::Page { error_code }) => break error_code,
                Err(Fault::Retry) => assert!(machine.memory.may_try_again()),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(code(Access::Read, false), 0);
        assert_eq!(code(Access::Write, true), WRITE | USER);
        assert_eq!(code(Access::Execute, true), FETCH | USER);
    }
}
