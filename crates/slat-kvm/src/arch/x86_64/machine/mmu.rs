//! Translates guest-virtual addresses to host pages, for misses of the software CPU's TLB.
//!
//! Two translations follow one another: by the guest's tables ([`slat::guest_walk`]), and by the engine's second level.
//! The walk of the guest's tables needs a second-level translation for each table. A small cache holds most of these
//! translations, and no other translations. The cache is flushed together with the software TLB.
//!
//! With the shadow MMU there is only one translation: the engine shadows the guest's tables, and walks them itself
//! where necessary. This module tells the engine of stores to the tables, and of the translations that the guest
//! invalidates. The nested tables of a guest that is a hypervisor are also shadowed with a second level
//! ([`super::nested_paging`]).

use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::page_cache::{DevicePage, Page};
use crate::engine::EngineVcpu;
use crate::entered::{Entered, outside};
use crate::exit::MemoryFault;
use crate::thread::bits;
use slat::guest_walk::{GuestPage, GuestPaging, GuestTables, Mode, WalkError, walk};
use slat::{Gpa, HostWords, Hpa, Hva, ResolveError, Stop, VirtualStop};
use slat_x86::state::control;
use slat_x86::{Access, CodePages, Cpu, Fault, GuestFlush, HostPage, Mmu, NestedPaging, Paging};
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::Ordering;

const PAGE: u64 = 4096;

/// Why guest-physical memory cannot be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreachable {
    /// MMIO: no memslot has the address, or a write is to a read-only memslot.
    NotMemory,

    /// Any other reason.
    Fault(Fault),
}

impl AsMut<EngineVcpu> for VcpuMachine {
    fn as_mut(&mut self) -> &mut EngineVcpu {
        &mut self.engine
    }
}

impl VcpuMachine {
    /// Translates a guest-physical page to its host page, and keeps the translation. Used for pages of the guest's
    /// tables and for a device's accesses.
    fn page(&mut self, gpa: u64, access: slat::Access) -> Result<Page, Unreachable> {
        let gpa = gpa & !(PAGE - 1);
        let write = access == slat::Access::Write;
        if let Some(page) = *self.pages.slot(gpa)
            && page.gpa == gpa
            && (page.write || !write)
        {
            return Ok(page);
        }
        let page = self.data_page(gpa, access)?;
        *self.pages.slot(gpa) = Some(page);
        Ok(page)
    }

    /// Translates a guest-physical page to its host page. The cache of this vCPU does not keep the translation, because
    /// the CPU's TLB does. So the translation displaces no translation of a page-table page.
    fn data_page(&mut self, gpa: u64, access: slat::Access) -> Result<Page, Unreachable> {
        let found = self
            .engine
            .translate(Gpa(gpa), access)
            .map_err(|stop| self.unreachable(stop))?;
        let host =
            NonNull::new(found.host.0 as *mut u8).ok_or(Unreachable::Fault(Fault::BadAddress))?;
        Ok(Page {
            gpa,
            host,
            write: found.write,
            tracked: found.tracked,
        })
    }

    #[cold]
    fn unreachable(&mut self, stop: Stop) -> Unreachable {
        match stop {
            Stop::Mmio { .. } => Unreachable::NotMemory,
            Stop::DirtyRingFull => {
                self.common.attention.raise(bits::RING_FULL);
                self.request_retry();
                Unreachable::Fault(Fault::Retry)
            }
            Stop::Retry
            | Stop::BadAddress {
                error: ResolveError::Interrupted,
                ..
            } => {
                self.is_interrupted |= slat_guard::was_kicked();
                self.request_retry();
                Unreachable::Fault(Fault::Retry)
            }
            Stop::MemoryFault { .. } => {
                self.memory_fault = MemoryFault::of(&stop);
                Unreachable::Fault(Fault::BadAddress)
            }
            Stop::OutOfMemory { .. } => {
                crate::messages::explain(&stop);
                Unreachable::Fault(Fault::OutOfMemory)
            }
            // The remaining error is `BadAddress`.
            _ => {
                crate::messages::explain(&stop);
                Unreachable::Fault(Fault::BadAddress)
            }
        }
    }

    /// Drops cached translations; the run loop quiesces before the guest executes again.
    fn request_retry(&mut self) {
        self.pages.flush();
        self.common.attention.raise(bits::RETRY);
    }

    /// Call after a guarded access at `host` failed. Either another thread raised an attention bit, or the client
    /// changed the mapping without an invalidation. In the second case the engine drops the page and asks the host
    /// again.
    fn forget(&mut self, host: *const u8) {
        if self.common.attention.flag().load(Ordering::SeqCst) == 0 {
            let first = host as u64 & !(PAGE - 1);
            outside(&mut self.engine, || {
                drop(self.vm.engine.invalidate(Hva(first)..Hva(first + PAGE)));
            });
        }
        self.request_retry();
    }

    /// Reads guest-physical memory of the vCPU's address space; the vCPU is entered. Returns `false` if the address is
    /// not memory, or not accessible.
    pub(crate) fn read_here(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.access_here(gpa, bytes.len(), slat::Access::Read, |_, host, part| {
            // SAFETY: `host` is in guest memory: the engine translated the page, which the client gave to the guest.
            // The copy is guarded.
            unsafe { slat_guard::copy_in(&mut bytes[part], host) }
        })
    }

    /// Writes guest-physical memory of the vCPU's address space; marks the pages in the dirty log. The vCPU is entered.
    /// Returns `false` if the address is not memory, or not accessible.
    pub(crate) fn write_here(&mut self, gpa: u64, bytes: &[u8]) -> bool {
        self.access_here(
            gpa,
            bytes.len(),
            slat::Access::Write,
            |machine, host, part| {
                // SAFETY: `host` is in guest memory: the engine translated the page, which the client gave to the
                // guest. The copy is guarded.
                let copied = unsafe { slat_guard::copy_out(host, &bytes[part]) };
                machine.vm.arch.code.stored(host);
                copied
            },
        )
    }

    /// Accesses `len` bytes of guest-physical memory, page by page. `copy` gets the host address of each page's part,
    /// and the part's range among the bytes. Returns `false` if an address is not memory, or not accessible.
    fn access_here<E>(
        &mut self,
        gpa: u64,
        len: usize,
        access: slat::Access,
        mut copy: impl FnMut(&Self, *mut u8, Range<usize>) -> Result<(), E>,
    ) -> bool {
        let mut done = 0;
        while done < len {
            let at = gpa.wrapping_add(done as u64);
            let part = (len - done).min((PAGE - at % PAGE) as usize);
            let page = match self.page(at, access) {
                Ok(page) => page,
                Err(Unreachable::Fault(Fault::Retry)) if self.may_try_again() => continue,
                Err(_) => return false,
            };
            let host = page.host.as_ptr().wrapping_add((at % PAGE) as usize);
            match copy(self, host, done..done + part) {
                Ok(()) => {
                    if page.tracked && access == slat::Access::Write {
                        let _every_caller_drops_them = self.engine_stored(at, part);
                    }
                    done += part;
                }
                Err(_) => {
                    self.forget(page.host.as_ptr());
                    if !self.may_try_again() {
                        return false;
                    }
                }
            }
        }
        true
    }

    /// Tells the engine of a store to a tracked page. Returns whether all translations are invalid now; then the CPU's
    /// attention word has a bit raised, too.
    fn engine_stored(&mut self, gpa: u64, bytes: usize) -> bool {
        let void = self.engine.stored(Gpa(gpa), bytes as u64);
        if void {
            self.request_retry();
        }
        void
    }

    /// Makes the engine compare its shadow tables with the guest's tables, because the client may have written to guest
    /// memory since the last run. The vCPU is entered, and its CPU has no translations.
    pub(crate) fn follow_client(&mut self) {
        if std::mem::take(&mut self.memory_restored) {
            self.vm.engine.guest_memory_changed();
            self.engine.flush_guest(&mut Words(&self.vm.arch.code));
            self.request_retry();
        }
    }

    /// If the engine shadows the guest's tables, makes the engine compare its shadow tables with the guest's tables.
    /// Returns whether the engine shadows tables; if so, all translations are invalid now. The vCPU is entered.
    pub(crate) fn flush_shadowed(&mut self) -> bool {
        if self.shadows {
            self.engine.flush_guest(&mut Words(&self.vm.arch.code));
        }
        self.shadows
    }

    /// Reads an aligned word of guest-physical memory of the vCPU's address space; the vCPU is entered. `None`: `gpa`
    /// is not memory, or not accessible.
    pub(super) fn read_word_here(&mut self, gpa: u64) -> Option<u64> {
        loop {
            match self.word(Gpa(gpa), size_of::<u64>()) {
                Ok(word) => return Some(word),
                Err(Unreachable::Fault(Fault::Retry)) if self.may_try_again() => {}
                Err(_) => return None,
            }
        }
    }

    /// Reads a word of `size` (4 or 8) bytes at `gpa`, a multiple of `size`.
    fn word(&mut self, gpa: Gpa, size: usize) -> Result<u64, Unreachable> {
        assert!(gpa.0.is_multiple_of(size as u64), "a word in one page");
        let page = self.page(gpa.0, slat::Access::Read)?;
        let word = Hpa(page.host.as_ptr() as u64 + gpa.0 % PAGE);
        self.read_entry(word, size).map_err(Unreachable::Fault)
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

    /// Returns the fault of a walk that has to begin again. If host memory was not accessible, its translations are
    /// dropped.
    #[cold]
    fn again(&mut self, why: Again) -> Fault {
        match why {
            Again::Gone(host) => {
                self.forget(host);
                Fault::Retry
            }
            Again::CodeChanged => Fault::CodeChanged,
        }
    }

    /// Acknowledges the engine's flushes outside the CPU's loop. The CPU drops its translations before it uses a
    /// translation again. Returns `false` if a signal or a full dirty ring ends the run.
    fn may_try_again(&mut self) -> bool {
        self.request_retry();
        self.engine.quiesce();
        !self.is_called_out()
    }

    /// Whether a signal or a full dirty ring ends the run. Then an access that has failed may succeed in the next run.
    pub(crate) fn is_called_out(&self) -> bool {
        self.common.attention.flag().load(Ordering::SeqCst) & (bits::SIGNAL | bits::RING_FULL) != 0
    }

    /// Reads the page-directory-pointer entries at `cr3`, as a load of CR3 does. `None`: the entries cannot be read.
    pub(crate) fn read_pdptes(&mut self, cr3: u64) -> Option<[u64; 4]> {
        let mut entered = Entered::enter(self);
        entered.pages.flush();
        entered.pdptes(cr3)
    }

    /// Like [`read_pdptes`](Self::read_pdptes), but for a vCPU that is entered.
    pub(crate) fn pdptes(&mut self, cr3: u64) -> Option<[u64; 4]> {
        let mut pdptes = [0; 4];
        for (i, pdpte) in pdptes.iter_mut().enumerate() {
            *pdpte = self.read_word_here((cr3 & 0xffff_ffe0) + 8 * i as u64)?;
        }
        Some(pdptes)
    }

    /// Carries out `KVM_TRANSLATE`: walks the guest's tables as a supervisor's read would.
    pub(crate) fn translate_for_client(&mut self, cpu: &Cpu, gva: u64) -> Option<u64> {
        let paging = cpu.client_paging();
        if paging.cr0 & control::CR0_PG == 0 && paging.nested.is_none() {
            // As in KVM, the address is not masked. u64::MAX is KVM's value for "no address".
            return Some(gva).filter(|gpa| *gpa != u64::MAX);
        }
        let mut entered = Entered::enter(self);
        // Pages cached in the last run may be stale. The attention word makes the CPU flush its own TLB.
        entered.pages.flush();
        loop {
            match entered.walk_guest(gva, slat::Access::Read, &paging) {
                Ok(page) => return Some(page.gpa.0 | (gva % PAGE)),
                Err(Fault::CodeChanged) => {}
                Err(Fault::Retry) if entered.may_try_again() => {}
                Err(_) => return None,
            }
        }
    }
}

/// Returns the page of an address while paging is off.
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

/// Guest memory, at the host addresses to which the engine translates. A walk of the guest's tables sets bits in this
/// memory, and the guest may also execute the page of a table.
struct Words<'a>(&'a CodePages);

/// Why a walk has to begin again.
enum Again {
    /// The host memory at this address is not accessible.
    Gone(*mut u8),

    /// A walk has set a bit in a page with code ([`Fault::CodeChanged`]). The next walk finds the bit set.
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
        let stop = match (self.engine).translate_virtual(
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
                    // Any flush of the guest makes all translations invalid.
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
        match self.unreachable(stop) {
            Unreachable::Fault(fault) => Err(fault),
            Unreachable::NotMemory => unreachable!("MMIO was handled above"),
        }
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

    // This method is always inlined, because most walks of a guest's tables read four entries by this method.
    #[inline(always)]
    fn read(&mut self, gpa: Gpa, size: usize) -> Result<u64, Fault> {
        match self.word(gpa, size) {
            Ok(entry) => {
                self.engine.count_guest_pte_read();
                Ok(entry)
            }
            // A table that is not in memory maps nothing.
            Err(Unreachable::NotMemory) => Ok(0),
            Err(Unreachable::Fault(fault)) => Err(fault),
        }
    }

    fn compare_exchange(
        &mut self,
        gpa: Gpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Fault> {
        let page = match self.page(gpa.0, slat::Access::Write) {
            // The flags of tables in read-only memory do not change.
            Err(Unreachable::NotMemory) => return Ok(true),
            Err(Unreachable::Fault(fault)) => return Err(fault),
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
        let device = self.pages.device(linear, kind, paging);
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
        match self.data_page(gpa, access) {
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
                // Accesses to devices are frequent, and no TLB holds the pages of devices (KVM:
                // `vcpu_cache_mmio_info`).
                self.pages.keep_device(DevicePage {
                    gva: linear,
                    access: kind,
                    paging: *paging,
                    page,
                });
                Err(Fault::Mmio {
                    gpa: gpa | (gva % PAGE),
                })
            }
            Err(Unreachable::Fault(fault)) => Err(fault),
        }
    }

    fn translate_physical(&mut self, gpa: u64, access: Access) -> Result<HostPage, Fault> {
        match self.data_page(gpa & !(PAGE - 1), slat_access(access)) {
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
            Err(Unreachable::Fault(fault)) => Err(fault),
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
        // A kick may interrupt any access, even an access that need not wait.
        self.is_interrupted |= slat_guard::was_kicked() && !slat_host::is_resident(host as usize);
        self.forget(host);
        Err(Fault::Retry)
    }

    fn stored(&mut self, gpa: u64, bytes: usize) -> bool {
        self.engine_stored(gpa, bytes)
    }

    fn flush_guest(&mut self, what: GuestFlush, paging: &Paging) -> bool {
        self.pages.flush_devices();
        let void = match what {
            GuestFlush::Nested => {
                self.pages.flush_nested();
                if self.shadows_nested {
                    self.engine.flush_guest(&mut Words(&self.vm.arch.code));
                }
                self.shadows_nested
            }
            // A nested guest's own tables are not shadowed.
            _ if paging.nested.is_some() => false,
            GuestFlush::Page(gva) if self.shadows && paging.cr0 & control::CR0_PG != 0 => {
                let paging = guest_paging(paging, self.physical_bits);
                self.engine
                    .invlpg(gva, &paging, &mut Words(&self.vm.arch.code))
            }
            GuestFlush::Page(_) => false,
            GuestFlush::All => self.flush_shadowed(),
        };
        if void {
            self.pages.flush();
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
        // The first entry of the root names a table at 1 GiB.
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
                Err(Fault::Retry) => assert!(machine.may_try_again()),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(code(Access::Read, false), 0);
        assert_eq!(code(Access::Write, true), WRITE | USER);
        assert_eq!(code(Access::Execute, true), FETCH | USER);
    }
}
