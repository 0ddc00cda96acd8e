//! What a hypervisor calls whose CPU walks the tables itself: faults, and with the shadow MMU the guest's flushes and
//! the root to load.
//!
//! Each call enters the vCPU for its own duration: the CPU's translations are in a TLB, which
//! [`Platform::flush`] reaches.
//!
//! **Roots of the shadow MMU** come and go with the guest's tables, and their frames are freed after a flush. So a root
//! may be loaded, and may stay loaded, until the next flush of the VM: `Platform::flush` makes the CPU leave the guest,
//! and before the guest runs again the hypervisor asks for the root again. A CPU that learns of a flush on its way into
//! the guest, after it has asked, turns back and asks again.

use core::ops::Range;

use super::{Entered, HostWords, Stop, Vcpu, VirtualStop};
use crate::addr::{Access, Gpa, Hpa};
use crate::format::Format;
use crate::guest_walk::GuestPaging;
use crate::platform::Platform;
use crate::sync::atomic::Ordering::Relaxed;
use crate::sync::quiesce::Attention;

/// The hypervisor's next step after a page fault of a hardware CPU that walks shadow tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum AfterPageFault {
    /// Run the guest again: it repeats the instruction.
    Run,
    /// It emulates the instruction, with [`Vcpu::translate_virtual`] and [`Vcpu::stored`]. No leaf can allow the
    /// access: it is a store to a table with which its own address is translated, or a supervisor's to a read-only
    /// page with CR0.WP clear.
    Emulate,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Call when a hardware CPU has left the guest because its second-level walk did not allow `access` to
    /// `gpa`: brings the tables to where they allow it. `Ok`: run the guest again, which executes the instruction
    /// again, and faults again if there was more to it. Whether the walker reported a missing leaf or an MMIO entry (a
    /// reserved bit, a misconfiguration) makes no difference: this reads the entry.
    ///
    /// The caller does two things before the guest runs again, because they differ from CPU to CPU. It makes the stores
    /// visible to the walker (AArch64: DSB ISHST; RISC-V: a fence; x86: nothing). And where a CPU may cache the entry
    /// that faulted (AArch64 and RISC-V, after a fault on rights; RISC-V, after any), it invalidates that on this CPU;
    /// on no other.
    ///
    /// # Errors
    /// [`Stop`], but for [`Stop::Retry`].
    ///
    /// # Panics
    /// If the vCPU was entered.
    pub fn hardware_fault(&mut self, gpa: Gpa, access: Access) -> Result<(), Stop> {
        match self.for_hardware().translate(gpa, access) {
            Ok(_) | Err(Stop::Retry) => Ok(()),
            Err(stop) => Err(stop),
        }
    }

    /// Maps guest memory ahead of its use, for reading, like [`Vcpu::prefault`], for a hardware CPU that is not in the
    /// guest. Returns the bytes mapped, from `range.start` on: a page at least, or 0 if a flush went by or the wait for
    /// a page was interrupted. Call again for the rest. Before the guest runs, the caller makes the stores visible to
    /// the walker as after [`Vcpu::hardware_fault`].
    ///
    /// The vCPU is entered for the duration of the call only, so the caller may use it, and change
    /// slots, with the result:
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Access, Config, Ept, Gpa, Region, Stop, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// # let region = Region::new(0, Gpa(0), 0x10_0000, backing);
    /// # let mut vcpu = vm.create_vcpu()?;
    /// let memory = Gpa(0)..Gpa(0x10_0000);
    /// match vcpu.hardware_prefault(memory.clone()) {
    ///     Err(Stop::Mmio { .. }) => {
    ///         vm.set_memory_region(0, &region)?;
    ///         assert_eq!(vcpu.hardware_prefault(memory), Ok(0x10_0000));
    ///     }
    ///     other => panic!("there was no memory: {other:?}"),
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`Stop`], but for [`Stop::Retry`], if not even the first page could be mapped.
    ///
    /// # Panics
    /// If the vCPU was entered.
    pub fn hardware_prefault(&mut self, range: Range<Gpa>) -> Result<u64, Stop> {
        match self.for_hardware().prefault(range) {
            Err(Stop::Retry) => Ok(0),
            mapped => mapped,
        }
    }

    /// Call when a hardware CPU that walks shadow tables has a page fault, at `gva` for `access`, in the state `paging`
    /// of the guest. Makes the shadow table allow the access; load the root that [`Vcpu::hardware_root`] returns
    /// afterwards. For a store to one of the guest's tables, zaps the shadow page of the table; the table is shadowed
    /// again when the guest uses it. If another CPU walks through the table all the time, that may happen before the
    /// store is repeated: after some faults of the same store, keep the VM's other CPUs out of the guest.
    ///
    /// The CPU runs with CR0.PG, CR0.WP and EFER.NXE set, whatever the guest's are, and with the guest's
    /// CR4.SMEP, SMAP, PKE and PKRU.
    ///
    /// # Errors
    /// [`VirtualStop`], but for [`Stop::Retry`]. [`VirtualStop::PageFault`] is to be injected into the guest.
    ///
    /// # Panics
    /// If the vCPU was entered, or the VM shadows no tables ([`Vcpu::translate_virtual`]).
    pub fn hardware_page_fault<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
    ) -> Result<AfterPageFault, VirtualStop<W::Error>> {
        let mut vcpu = self.for_hardware();
        // A leaf can allow only the accesses that a CPU with CR0.WP set allows.
        let strict = paging.strict();
        match vcpu.translate_virtual(gva, access, &strict, words) {
            Ok(page) => Ok(match page.tracked.map(Gpa::gfn) {
                None => AfterPageFault::Run,
                Some(table) if vcpu.walks_with(gva, access, &strict, words, table) => {
                    AfterPageFault::Emulate
                }
                Some(table) => {
                    vcpu.forget_table(table);
                    AfterPageFault::Run
                }
            }),
            Err(VirtualStop::Stop(Stop::Retry)) => Ok(AfterPageFault::Run),
            Err(VirtualStop::PageFault { .. }) if !paging.write_protect => {
                match vcpu.translate_virtual(gva, access, paging, words) {
                    Ok(_) => Ok(AfterPageFault::Emulate),
                    Err(VirtualStop::Stop(Stop::Retry)) => Ok(AfterPageFault::Run),
                    Err(stop) => Err(stop),
                }
            }
            Err(stop) => Err(stop),
        }
    }

    /// Returns the shadow table with which a walk to `gva` begins in the state `paging` of the guest, for a
    /// hardware CPU to load until the next [`Platform::flush`]. In long mode it is one table of the guest's number
    /// of levels, for CR3, in the other modes one page directory for each GiB, for an entry of PAE's pointer table.
    /// `None`: nothing there was translated yet; call [`Vcpu::hardware_page_fault`] for the fetch of the next
    /// instruction, and ask again.
    ///
    /// # Panics
    /// If the vCPU was entered.
    pub fn hardware_root(&mut self, gva: u64, paging: &GuestPaging) -> Option<Hpa> {
        let root = self.for_hardware().guest_root(gva, paging);
        root.map(|root| root.frame().hpa())
    }

    /// Call when the guest of a hardware CPU that walks shadow tables executes INVLPG for `gva`: like [`Vcpu::invlpg`].
    /// The caller invalidates the address on this CPU.
    ///
    /// # Panics
    /// If the vCPU was entered.
    pub fn hardware_invlpg<W: HostWords>(&mut self, gva: u64, paging: &GuestPaging, words: &mut W) {
        // The result is about translations that `Platform::flush` has voided already.
        let _ = self.for_hardware().invlpg(gva, paging, words);
    }

    /// Call when the guest of a hardware CPU that walks shadow tables flushes its TLB: like [`Vcpu::flush_guest`]. The
    /// caller flushes on this CPU what was of the guest.
    ///
    /// # Panics
    /// If the vCPU was entered.
    pub fn hardware_flush<W: HostWords>(&mut self, words: &mut W) {
        self.for_hardware().flush_guest(words);
    }

    /// Enters, with no translation to drop.
    fn for_hardware(&mut self) -> Entered<'_, P, F> {
        assert!(
            !self.is_entered(),
            "a call for a hardware CPU inside enter/leave"
        );
        let mut entered = self.enter(0);
        // To enter is to pass a quiescent point. What is left is to acknowledge the flushes that it reports.
        if entered.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            entered.quiesce();
        }
        entered
    }
}
