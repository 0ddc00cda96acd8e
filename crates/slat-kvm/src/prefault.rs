//! `KVM_PRE_FAULT_MEMORY`: maps guest memory before the guest uses it.

use crate::entered::Entered;
use crate::errno::{Error, Result, fail};
use crate::exit::{self, MemoryFault};
use crate::thread::{self, bits};
use crate::vcpu::{Inner, VcpuObject};
use kvm_bindings::kvm_pre_fault_memory;
use slat::{Gpa, MmuKind, ResolveError, Stop};
use slat_host::page_size;
use std::sync::atomic::Ordering;

/// The number of bytes that are mapped between two checks for signals: as many as one table of 4 KiB leaves maps.
const STRETCH: u64 = 2 << 20;

impl VcpuObject {
    /// Carries out `KVM_PRE_FAULT_MEMORY`. Sets `range` to the part that is not mapped yet.
    ///
    /// # Errors
    /// `EINVAL` for flags, and for a range that is empty or not of whole pages. If no page was mapped, also: `ENOENT`
    /// without a memory slot, `EINTR` for a signal, `EFAULT` if the memory that backs the slot is unmapped or a private
    /// page has no private memory, `ENOMEM`. With the shadow MMU `EOPNOTSUPP`, as in KVM without a second level.
    pub fn pre_fault(&self, range: &mut kvm_pre_fault_memory) -> Result<()> {
        let end = range.gpa.checked_add(range.size);
        let pages = range.gpa.is_multiple_of(page_size() as u64)
            && range.size.is_multiple_of(page_size() as u64);
        if range.flags != 0 || !pages || end.is_none_or(|end| end <= range.gpa) {
            return fail(libc::EINVAL);
        }
        if self.vm.engine.mmu() == MmuKind::Shadow {
            return fail(libc::EOPNOTSUPP);
        }
        let mut inner = self.lock()?;
        let attention = self.common().attention.clone();
        let _guards = thread::begin(&attention);
        let whole = range.size;
        let mut inner = Entered::enter(&mut *inner);
        let mut result = Ok(());
        while range.size != 0 && result.is_ok() {
            result = self.pre_fault_some(&mut inner, range);
        }
        if range.size == whole { result } else { Ok(()) }
    }

    fn pre_fault_some(&self, inner: &mut Inner, range: &mut kvm_pre_fault_memory) -> Result<()> {
        let raised = self.common().attention.flag().load(Ordering::SeqCst);
        if raised & bits::SIGNAL != 0 {
            return fail(libc::EINTR);
        }
        self.vm.still_alive()?;
        if raised & slat::Attention::FLUSH != 0 {
            give_way(inner);
        }
        let end = (range.gpa / STRETCH + 1).saturating_mul(STRETCH);
        let end = end.min(range.gpa + range.size);
        let done = match inner.as_mut().prefault(Gpa(range.gpa)..Gpa(end)) {
            Ok(done) => done,
            Err(Stop::Retry) => {
                give_way(inner);
                return Ok(());
            }
            Err(stop) => {
                // As in KVM, stores the exit in `kvm_run`, although this call is not `KVM_RUN`.
                if let Some(fault) = MemoryFault::of(&stop) {
                    exit::memory_fault(&self.page, fault);
                }
                return Err(Error::new(errno(&stop)));
            }
        };
        range.gpa += done;
        range.size -= done;
        Ok(())
    }
}

/// Drops all translations and acknowledges flushes. Call during a long operation, because other threads wait for the
/// acknowledgement.
fn give_way(inner: &mut Inner) {
    inner.flush_translations();
    inner.as_mut().quiesce();
}

fn errno(stop: &Stop) -> i32 {
    match stop {
        Stop::Mmio { .. } => libc::ENOENT,
        Stop::OutOfMemory { .. } => libc::ENOMEM,
        Stop::BadAddress {
            error: ResolveError::Interrupted,
            ..
        } => libc::EINTR,
        // `Retry` does not reach this code, because the caller handles it. A full dirty ring stops only writes, and
        // this call does not write.
        Stop::Retry | Stop::DirtyRingFull => libc::EAGAIN,
        // The remaining stops are `BadAddress` and `MemoryFault`.
        _ => libc::EFAULT,
    }
}
