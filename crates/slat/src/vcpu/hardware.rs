//! The calls for a hypervisor whose CPU walks the tables itself: faults, and, with the shadow MMU, the guest's TLB
//! flushes and the root to load.
//!
//! The vCPU is entered only during each of these calls. In between it need not be, because the CPU's translations are
//! in a TLB, which [`Platform::flush`] flushes.
//!
//! **Roots of the shadow MMU** are made and zapped like all shadow pages, and the frame of a zapped root is freed after
//! a flush. So a loaded root is valid until the next flush of the VM. `Platform::flush` must make the CPU leave the
//! guest, and before the hypervisor runs the guest again, it must ask for the root again. The same is true if a flush
//! is requested after a CPU has asked for the root and before it enters the guest.

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
    /// Run the guest again, which repeats the instruction.
    Run,
    /// Emulate the instruction, with [`Vcpu::translate_virtual`] and [`Vcpu::stored`]. No leaf can allow the access: it
    /// is either a store to a table that translates the store's own address, or a supervisor's store to a read-only
    /// page with CR0.WP clear.
    Emulate,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Call when a hardware CPU has left the guest because its second-level walk did not allow `access` to `gpa`.
    /// Changes the tables so that they allow the access. After `Ok`, run the guest again: it repeats the instruction,
    /// which may fault again. The function reads the entry that faulted. So it serves both for a missing leaf or right
    /// and for an MMIO entry (which a CPU reports as a reserved bit or a misconfiguration).
    ///
    /// Before the guest runs again, the caller must do two things that differ between architectures. It makes the
    /// stores visible to the page walker (AArch64: DSB ISHST; RISC-V: a fence; x86: nothing). And if the CPU may have
    /// cached the entry that faulted (AArch64: after a permission fault; RISC-V: after any fault), the caller
    /// invalidates that entry on this CPU.
    ///
    /// # Errors
    /// [`Stop`], except [`Stop::Retry`].
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_fault(&mut self, gpa: Gpa, access: Access) -> Result<(), Stop> {
        let missed = self.missed();
        let answer = self.for_hardware().translate(gpa, access);
        match answer {
            Ok(_) => Ok(()),
            Err(Stop::Retry) => self.fault_again(missed, gpa, access),
            Err(stop) => Err(stop),
        }
    }

    /// Handles the fault of [`Self::hardware_fault`] once more if it was not handled because a flush took place since
    /// `missed` was read, for example because the platform has copied a shared page for this write. The CPU remembers no
    /// translation that it would have to drop. Without this, the guest would fault again.
    #[cold]
    #[inline(never)]
    fn fault_again(&mut self, missed: u64, gpa: Gpa, access: Access) -> Result<(), Stop> {
        let is_kicked = self.attention().flag().load(Relaxed) & !Attention::FLUSH != 0;
        if self.missed() == missed || is_kicked {
            return Ok(());
        }
        match self.for_hardware().translate(gpa, access) {
            Ok(_) | Err(Stop::Retry) => Ok(()),
            Err(stop) => Err(stop),
        }
    }

    /// Maps guest memory ahead of its use, for reading, like [`Vcpu::prefault`], but for a hardware CPU that is not in
    /// the guest. Returns the number of bytes mapped from `range.start` on: at least a page, or 0 if a TLB flush took
    /// place during the call or a signal interrupted the wait for a page. Call again for the rest. Before the guest
    /// runs, the caller must make the stores visible to the page walker, as after [`Vcpu::hardware_fault`].
    ///
    /// The vCPU is entered only during the call. So the caller may change slots, and call this again, while it handles
    /// the result:
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
    /// [`Stop`], except [`Stop::Retry`], if not even the first page could be mapped.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_prefault(&mut self, range: Range<Gpa>) -> Result<u64, Stop> {
        match self.for_hardware().prefault(range) {
            Err(Stop::Retry) => Ok(0),
            mapped => mapped,
        }
    }

    /// Call when a hardware CPU that walks shadow tables has a page fault, at `gva` for `access`, in the state `paging`
    /// of the guest. Makes the shadow tables allow the access. Afterwards load the root that [`Vcpu::hardware_root`]
    /// returns. For a store to one of the guest's tables, zaps the shadow page of that table, and the engine shadows
    /// the table again when the guest next uses it. If another CPU walks through the table all the time, this may
    /// happen before the store is repeated, which then faults again. So after some faults of the same store, let only
    /// this CPU run the guest.
    ///
    /// The CPU must run the guest with CR0.PG, CR0.WP and EFER.NXE set, even if the guest has cleared them, and with
    /// the guest's values of CR4.SMEP, SMAP, PKE and of PKRU.
    ///
    /// # Errors
    /// [`VirtualStop`], except [`Stop::Retry`]. Inject [`VirtualStop::PageFault`] into the guest.
    ///
    /// # Panics
    /// If the vCPU is entered ([`Vcpu::enter`]), or the VM shadows no tables ([`Vcpu::translate_virtual`]).
    pub fn hardware_page_fault<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
    ) -> Result<AfterPageFault, VirtualStop<W::Error>> {
        let mut vcpu = self.for_hardware();
        // The CPU always runs with CR0.WP set, so the shadow leaf must allow the access under this condition.
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

    /// Returns the shadow table with which a walk to `gva` begins in the state `paging` of the guest. A hardware CPU
    /// may keep it loaded until the next [`Platform::flush`]. In long mode, the table is the value for CR3 and has the
    /// guest's number of levels. In other modes, it is a page directory that translates 1 GiB, for the PAE
    /// page-directory-pointer entry of `gva`. `None`: no address below this table was translated yet. Then call
    /// [`Vcpu::hardware_page_fault`] for the fetch of the next instruction, and call `hardware_root` again.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_root(&mut self, gva: u64, paging: &GuestPaging) -> Option<Hpa> {
        let root = self.for_hardware().guest_root(gva, paging);
        root.map(|root| root.frame().hpa())
    }

    /// Call when the guest of a hardware CPU that walks shadow tables executes INVLPG for `gva`. Like [`Vcpu::invlpg`],
    /// but the caller must invalidate the address in this CPU's TLB.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_invlpg<W: HostWords>(&mut self, gva: u64, paging: &GuestPaging, words: &mut W) {
        // The result tells whether other translations are void. It is not needed: `Platform::flush` has already flushed
        // them.
        let _ = self.for_hardware().invlpg(gva, paging, words);
    }

    /// Call when the guest of a hardware CPU that walks shadow tables flushes its TLB. Like [`Vcpu::flush_guest`], but
    /// the caller must flush the guest's translations from this CPU's TLB.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_flush<W: HostWords>(&mut self, words: &mut W) {
        self.for_hardware().flush_guest(words);
    }

    /// Enters the vCPU of a hardware CPU. It remembers no translations that it would have to drop first.
    fn for_hardware(&mut self) -> Entered<'_, P, F> {
        assert!(
            !self.is_entered(),
            "a call for a hardware CPU inside enter/leave"
        );
        let mut entered = self.enter(0);
        // Entering the section was a quiescent point. If a flush was requested before, acknowledge it now.
        if entered.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            entered.quiesce();
        }
        entered
    }
}
