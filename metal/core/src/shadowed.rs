//! The work of a hypervisor whose guest has its own tables and whose CPU walks shadow tables: the root to load, page
//! faults, flushes. On other machines these functions do nothing.

use alloc::format;
use alloc::string::String;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, Ordering::*};

use slat::{Access, AfterPageFault, Format, Gpa, Hpa, Stop, VirtualStop};

use crate::bench::flush;
use crate::guest::{CODE, Guest, Tables};
use crate::guest_tables::{NOWHERE, Words};
use crate::{Cause, Machine};

/// The number of faults of one access after which the other CPUs wait. A store to one of the guest's tables faults
/// again if another CPU walks through the table before the store is complete.
const PATIENCE: u32 = 8;

/// Whether one CPU runs its guest alone, and the others wait before they enter the guest.
static ALONE: AtomicBool = AtomicBool::new(false);

/// The right of one CPU to run its guest alone. Dropping it ends this right.
pub(crate) struct Alone;

impl Drop for Alone {
    fn drop(&mut self) {
        ALONE.store(false, SeqCst);
    }
}

impl<M: Machine> Guest<M> {
    /// Whether the guest has its own tables.
    const SHADOWED: bool = Tables::<M>::SHADOWS;

    /// Returns the table that the CPU has to load.
    pub(crate) fn root(&mut self) -> Result<Hpa, String> {
        if !Self::SHADOWED {
            return Ok(self.second_level);
        }
        loop {
            if let Some(root) = self.vcpu.hardware_root(CODE.0, &self.paging) {
                return Ok(root);
            }
            self.fault(CODE, Access::Execute, Cause::NotPresent)?;
        }
    }

    /// Makes the roots of shadow tables, and the leaves for the guest's tables, by a fault at an address without
    /// memory.
    pub(crate) fn prepare(&mut self) -> Result<(), String> {
        // The first calls make the guest's tables read-only.
        while Self::SHADOWED && self.shadow_fault(NOWHERE, Access::Read)?.is_ok() {}
        Ok(())
    }

    /// Handles a fault in a shadow table, at the guest-virtual address `gva`.
    pub(crate) fn shadow_fault(
        &mut self,
        gva: Gpa,
        access: Access,
    ) -> Result<Result<(), Stop>, String> {
        let paging = &self.paging;
        match (self.vcpu).hardware_page_fault(gva.0, access, paging, &mut Words) {
            Ok(AfterPageFault::Run) => Ok(Ok(())),
            Ok(AfterPageFault::Emulate) => Err(no_leaf(gva)),
            Err(VirtualStop::Stop(stop)) => Ok(Err(stop)),
            Err(VirtualStop::PageFault { code }) => Err(page_fault(gva, code)),
            Err(VirtualStop::Memory(never)) => match never {},
        }
    }

    /// Handles INVLPG.
    pub(crate) fn invalidate(&mut self, gva: u64) {
        if Self::SHADOWED {
            (self.vcpu).hardware_invlpg(gva, &self.paging, &mut Words);
        }
    }

    /// Handles a load of CR3.
    pub(crate) fn load_root(&mut self, cr3: u64) {
        if Self::SHADOWED {
            self.paging.cr3 = cr3;
            self.vcpu.hardware_flush(&mut Words);
        }
    }

    /// Waits for this CPU's turn to enter the guest, in which the same access has faulted `faults` times: after many
    /// faults, this CPU runs its guest alone until another exit. `before` is the result of the previous call.
    pub(crate) fn turn(&self, faults: u32, before: Option<Alone>) -> Option<Alone> {
        if !Self::SHADOWED {
            return None;
        }
        let alone = match faults > PATIENCE {
            true => before.or_else(|| self.alone()),
            false => None,
        };
        while alone.is_none() && ALONE.load(SeqCst) {
            spin_loop();
        }
        alone
    }

    /// Makes the other CPUs leave the guest, and wait until the returned guard is dropped. `None`: another CPU is
    /// already alone.
    fn alone(&self) -> Option<Alone> {
        if ALONE.swap(true, SeqCst) {
            return None;
        }
        // A CPU that is about to enter the guest returns instead.
        flush::<M>(self.vcpu.vm().id());
        Some(Alone)
    }
}

/// Returns the error of a guest whose access a monitor without an emulator cannot make.
pub(crate) fn no_leaf(gva: Gpa) -> String {
    format!("the access to {gva} has to be emulated")
}

/// Returns the error of a guest that has caused a guest page fault.
pub(crate) fn page_fault(gva: Gpa, code: u32) -> String {
    format!("#PF at {gva}, error code {code:#x}")
}
