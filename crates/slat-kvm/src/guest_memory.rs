//! Guest-physical memory, as one vCPU accesses it: the engine's vCPU, and a small cache of translations.
//!
//! The CPU of a vCPU keeps the translations of its data in a TLB of its own. The pages that this module keeps are those
//! that the machine around the CPU accesses: the tables of the guest, and structures that the guest shares with its
//! host. They become invalid together with the CPU's translations.

use crate::engine::{EngineVcpu, EngineVm};
use crate::entered::outside;
use crate::exit::MemoryFault;
use crate::messages;
use crate::thread::bits;
use slat::{Access, Gpa, Hva, ResolveError, Stop};
use slat_host::page_size;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// A translation of a guest-physical page to its host page.
#[derive(Clone, Copy)]
pub(crate) struct Page {
    pub(crate) gpa: u64,
    pub(crate) host: NonNull<u8>,
    pub(crate) write: bool,
    /// Whether a store to the page must be reported to the engine. Used only in translations for a write.
    pub(crate) tracked: bool,
}

// SAFETY: the pointer points into guest memory, which belongs to no thread and is accessed by guarded accesses only.
unsafe impl Send for Page {}

/// The reason why guest-physical memory cannot be accessed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unreachable {
    /// MMIO: no memslot has the address, or a write is to a read-only memslot.
    NotMemory,
    /// The caller has to handle the attention bits, and then make the access again.
    Retry,
    /// The client's memory is not accessible, or the client has to provide it first.
    BadAddress,
    /// No memory could be allocated for a second-level page table.
    OutOfMemory,
}

/// The guest-physical memory of a vCPU.
pub(crate) struct GuestMemory {
    pub(crate) engine: EngineVcpu,
    vm: Arc<EngineVm>,
    /// The translations that were used last. A page's index is its page number modulo the number of elements.
    pages: [Option<Page>; Self::PAGES],
    /// The number of times that all translations were dropped. Wraps around. A machine that keeps translations of its
    /// own drops them when the number has changed.
    pub(crate) flushes: u32,
    /// The fault of the last access in this run that stopped because of a memory fault.
    pub(crate) memory_fault: Option<MemoryFault>,
    /// Whether a signal interrupted an access in this run, while the access waited for the host to provide memory.
    pub(crate) is_interrupted: bool,
}

impl GuestMemory {
    const PAGES: usize = 64;

    /// Makes the guest-physical memory of `vm`, as its vCPU `engine` accesses it.
    pub(crate) fn new(engine: EngineVcpu, vm: Arc<EngineVm>) -> Self {
        GuestMemory {
            engine,
            vm,
            pages: [None; Self::PAGES],
            flushes: 0,
            memory_fault: None,
            is_interrupted: false,
        }
    }

    /// Forgets the memory fault and the interruption of the last execution of guest code. Call before the next
    /// execution.
    pub(crate) fn begin_execution(&mut self) {
        (self.memory_fault, self.is_interrupted) = (None, false);
    }

    /// Drops all translations. Call when the host flushes the TLB of the CPU, or the client sets registers.
    pub(crate) fn flush(&mut self) {
        self.pages.fill(None);
        self.flushes = self.flushes.wrapping_add(1);
    }

    /// Translates a guest-physical page to its host page, and keeps the translation. Used for pages of the guest's
    /// tables and for a device's accesses.
    #[inline]
    pub(crate) fn page(&mut self, gpa: u64, access: Access) -> Result<Page, Unreachable> {
        let size = page_size() as u64;
        let gpa = gpa & !(size - 1);
        let write = access == Access::Write;
        let index = (gpa / size) as usize % Self::PAGES;
        if let Some(page) = self.pages[index]
            && page.gpa == gpa
            && (page.write || !write)
        {
            return Ok(page);
        }
        let page = self.data_page(gpa, access)?;
        self.pages[index] = Some(page);
        Ok(page)
    }

    /// Translates a guest-physical page to its host page. This vCPU does not keep the translation, because the CPU's
    /// TLB does. So the translation displaces no translation of a page-table page.
    #[inline]
    pub(crate) fn data_page(&mut self, gpa: u64, access: Access) -> Result<Page, Unreachable> {
        let found = self
            .engine
            .translate(Gpa(gpa), access)
            .map_err(|stop| self.unreachable(stop))?;
        let host = NonNull::new(found.host.0 as *mut u8).ok_or(Unreachable::BadAddress)?;
        Ok(Page {
            gpa,
            host,
            write: found.write,
            tracked: found.tracked,
        })
    }

    /// Returns why a guest-physical page cannot be accessed. `stop` is the reason why its translation has failed.
    #[cold]
    pub(crate) fn unreachable(&mut self, stop: Stop) -> Unreachable {
        match stop {
            Stop::Mmio { .. } => Unreachable::NotMemory,
            Stop::DirtyRingFull => {
                self.engine.attention().raise(bits::RING_FULL);
                self.request_retry();
                Unreachable::Retry
            }
            Stop::Retry
            | Stop::BadAddress {
                error: ResolveError::Interrupted,
                ..
            } => {
                self.is_interrupted |= slat_guard::was_kicked();
                self.request_retry();
                Unreachable::Retry
            }
            Stop::MemoryFault { .. } => {
                self.memory_fault = MemoryFault::of(&stop);
                Unreachable::BadAddress
            }
            Stop::OutOfMemory { .. } => {
                messages::explain(&stop);
                Unreachable::OutOfMemory
            }
            // For any other reason, the client's memory is not accessible.
            _ => {
                messages::explain(&stop);
                Unreachable::BadAddress
            }
        }
    }

    /// Drops cached translations. The run loop then passes a quiescent point of the engine before the guest executes
    /// again.
    pub(crate) fn request_retry(&mut self) {
        self.flush();
        self.engine.attention().raise(bits::RETRY);
    }

    /// Handles the failure of a guarded access at `host`. Either another thread has raised an attention bit, or the
    /// client has changed the mapping without an invalidation. In the second case, the engine drops the page and asks
    /// the host again.
    pub(crate) fn forget(&mut self, host: *const u8) {
        if self.engine.attention().flag().load(Ordering::SeqCst) == 0 {
            let size = page_size() as u64;
            let first = host as u64 & !(size - 1);
            let vm = &self.vm;
            outside(&mut self.engine, || {
                drop(vm.invalidate(Hva(first)..Hva(first + size)));
            });
        }
        self.request_retry();
    }

    /// Reads guest-physical memory of the vCPU's address space. Returns `false` if the address is not memory, or not
    /// accessible. Call inside the engine's reader section.
    pub(crate) fn read(&mut self, gpa: u64, bytes: &mut [u8]) -> bool {
        self.access(gpa, bytes.len(), Access::Read, |host, part| {
            // SAFETY: `host` is in guest memory: the engine translated the page, which the client gave to the guest.
            // The copy is guarded.
            unsafe { slat_guard::copy_in(&mut bytes[part], host) }
        })
    }

    /// Writes guest-physical memory of the vCPU's address space, and marks the pages in the dirty log. Call inside the
    /// engine's reader section. Calls `stored` with the host address of each page's part after the store. Returns
    /// `false` if the address is not memory, or not accessible.
    pub(crate) fn write(&mut self, gpa: u64, bytes: &[u8], stored: impl Fn(*mut u8)) -> bool {
        self.access(gpa, bytes.len(), Access::Write, |host, part| {
            // SAFETY: `host` is in guest memory: the engine translated the page, which the client gave to the guest.
            // The copy is guarded.
            let copied = unsafe { slat_guard::copy_out(host, &bytes[part]) };
            stored(host);
            copied
        })
    }

    /// Accesses `len` bytes of guest-physical memory, page by page. `copy` gets the host address of each page's part,
    /// and the part's range among the bytes. Returns `false` if an address is not memory, or not accessible.
    fn access<E>(
        &mut self,
        gpa: u64,
        len: usize,
        access: Access,
        mut copy: impl FnMut(*mut u8, Range<usize>) -> Result<(), E>,
    ) -> bool {
        let size = page_size() as u64;
        let mut done = 0;
        while done < len {
            let at = gpa.wrapping_add(done as u64);
            let part = (len - done).min((size - at % size) as usize);
            let page = match self.page(at, access) {
                Ok(page) => page,
                Err(Unreachable::Retry) if self.may_try_again() => continue,
                Err(_) => return false,
            };
            let host = page.host.as_ptr().wrapping_add((at % size) as usize);
            match copy(host, done..done + part) {
                Ok(()) => {
                    if page.tracked && access == Access::Write {
                        let _every_caller_drops_them = self.stored(at, part);
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
    #[inline]
    pub(crate) fn stored(&mut self, gpa: u64, bytes: usize) -> bool {
        let void = self.engine.stored(Gpa(gpa), bytes as u64);
        if void {
            self.request_retry();
        }
        void
    }

    /// Acknowledges the engine's flushes outside the CPU's loop. The CPU drops its own cached translations before it
    /// uses any of them again. Returns `false` if a signal or a full dirty ring ends the run.
    pub(crate) fn may_try_again(&mut self) -> bool {
        self.request_retry();
        self.engine.quiesce();
        !self.is_called_out()
    }

    /// Whether a signal or a full dirty ring ends the run. If so, the access that has failed is made again in the next
    /// run.
    pub(crate) fn is_called_out(&self) -> bool {
        let raised = self.engine.attention().flag().load(Ordering::SeqCst);
        raised & (bits::SIGNAL | bits::RING_FULL) != 0
    }
}
