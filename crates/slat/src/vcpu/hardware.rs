//! The calls for a hypervisor whose CPU walks the tables itself: faults, and with the shadow MMU also the guest's
//! flushes and the root to load.
//!
//! Each call enters the vCPU only while it runs: the CPU's translations are in a TLB, which [`Platform::flush`]
//! reaches.
//!
//! **Roots of the shadow MMU** are made and zapped like the guest's tables, and their frames are freed after a flush.
//! So a loaded root is valid until the next flush of the VM. `Platform::flush` makes the CPU leave the guest, and the
//! hypervisor asks for the root again before it runs the guest. If a CPU that has asked for the root learns of a flush
//! before it enters the guest, it asks again.

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
    /// is a store to a table by which its own address is translated, or a supervisor's store to a read-only page with
    /// CR0.WP clear.
    Emulate,
}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Call when a hardware CPU has left the guest because its second-level walk did not allow `access` to `gpa`.
    /// Changes the tables so that they allow the access. After `Ok`, run the guest again: it repeats the instruction,
    /// which may fault again. Works for a missing leaf and for an MMIO entry (a reserved bit, a misconfiguration)
    /// alike, because it reads the entry.
    ///
    /// The caller does two things before the guest runs again, because they differ from CPU to CPU. It makes the stores
    /// visible to the walker (AArch64: DSB ISHST; RISC-V: a fence; x86: nothing). If a CPU may cache the entry that
    /// faulted (AArch64 and RISC-V after a fault on rights; RISC-V after any fault), the caller also invalidates that
    /// entry, on this CPU only.
    ///
    /// # Errors
    /// [`Stop`], except [`Stop::Retry`].
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_fault(&mut self, gpa: Gpa, access: Access) -> Result<(), Stop> {
        match self.for_hardware().translate(gpa, access) {
            Ok(_) | Err(Stop::Retry) => Ok(()),
            Err(stop) => Err(stop),
        }
    }

    /// Maps guest memory ahead of its use, for reading, like [`Vcpu::prefault`], for a hardware CPU that is not in the
    /// guest. Returns the number of bytes mapped from `range.start` on: at least a page, or 0 if a flush took place
    /// meanwhile or the wait for a page was interrupted. Call again for the rest. Before the guest runs, the caller
    /// makes the stores visible to the walker, as after [`Vcpu::hardware_fault`].
    ///
    /// The vCPU is entered only during the call, so the caller may use the vCPU, and change slots, while it has the
    /// result:
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
    /// of the guest. Makes the shadow table allow the access; afterwards load the root that [`Vcpu::hardware_root`]
    /// returns. For a store to one of the guest's tables, zaps the shadow page of that table, which is shadowed again
    /// when the guest uses it. If another CPU walks through the table all the time, the table may be shadowed again
    /// before the store is repeated. So after some faults of the same store, keep the VM's other CPUs out of the guest.
    ///
    /// The CPU runs with CR0.PG, CR0.WP and EFER.NXE set, whatever their values in the guest are, and with the guest's
    /// CR4.SMEP, SMAP, PKE and PKRU.
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

    /// Returns the shadow table with which a walk to `gva` begins in the state `paging` of the guest. A hardware CPU
    /// may keep it loaded until the next [`Platform::flush`]. In long mode, the table is for CR3 and has the guest's
    /// number of levels. In the other modes, there is one page directory for each GiB, for an entry of PAE's pointer
    /// table. `None`: nothing there was translated yet. Then call [`Vcpu::hardware_page_fault`] for the fetch of the
    /// next instruction, and call this again.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_root(&mut self, gva: u64, paging: &GuestPaging) -> Option<Hpa> {
        let root = self.for_hardware().guest_root(gva, paging);
        root.map(|root| root.frame().hpa())
    }

    /// Call when the guest of a hardware CPU that walks shadow tables executes INVLPG for `gva`: like [`Vcpu::invlpg`].
    /// The caller invalidates the address on this CPU.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_invlpg<W: HostWords>(&mut self, gva: u64, paging: &GuestPaging, words: &mut W) {
        // The result tells whether other translations are void: `Platform::flush` has dropped these already.
        let _ = self.for_hardware().invlpg(gva, paging, words);
    }

    /// Call when the guest of a hardware CPU that walks shadow tables flushes its TLB: like [`Vcpu::flush_guest`]. The
    /// caller flushes the guest's translations on this CPU.
    ///
    /// # Panics
    /// If the vCPU is entered: in a reader section ([`Vcpu::enter`]).
    pub fn hardware_flush<W: HostWords>(&mut self, words: &mut W) {
        self.for_hardware().flush_guest(words);
    }

    /// Enters the vCPU, which has no translations to drop.
    fn for_hardware(&mut self) -> Entered<'_, P, F> {
        assert!(
            !self.is_entered(),
            "a call for a hardware CPU inside enter/leave"
        );
        let mut entered = self.enter(0);
        // Entering the section has passed a quiescent point. Now acknowledge the flush that was requested meanwhile.
        if entered.attention().flag().load(Relaxed) & Attention::FLUSH != 0 {
            entered.quiesce();
        }
        entered
    }
}
