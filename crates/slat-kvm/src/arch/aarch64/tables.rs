//! Guest memory as the interrupt controllers access it: the tables of LPIs, and the tables and commands of an ITS.
//!
//! The controllers find memory by the memslots, without the second level. A thread that accesses memory this way has
//! entered the engine, as a vCPU in `KVM_RUN` or as a [`Visitor`]. A call that removes a memslot waits for all threads
//! that have entered. So no thread accesses memory after the client has removed its memslot.
//!
//! Writes are recorded in dirty bitmaps at once. A dirty ring belongs to a vCPU, so the vCPU whose access has made the
//! controllers write records the pages in its ring after this access ([`Tables::take_unlogged`]).

use crate::engine::{EngineVcpu, EngineVm};
use crate::errno::{Result, no_memory};
use slat::{Gfn, SlotFlags};
use slat_gic::memory::{Fault, Memory};
use slat_host::page_size;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Guest memory, as the interrupt controllers access it.
pub(crate) struct Tables {
    vm: Arc<EngineVm>,
    /// The pages, by their first guest-physical address, that were written and are in no dirty ring yet.
    unlogged: Mutex<BTreeSet<u64>>,
    has_unlogged: AtomicBool,
}

/// A temporary vCPU of the engine, which is no vCPU of the VM. A call of the client uses it to enter the engine and
/// access guest memory.
pub(crate) struct Visitor(EngineVcpu);

impl AsMut<EngineVcpu> for Visitor {
    fn as_mut(&mut self) -> &mut EngineVcpu {
        &mut self.0
    }
}

impl Tables {
    pub(crate) fn new(engine: Arc<EngineVm>) -> Self {
        Tables {
            vm: engine,
            unlogged: Mutex::default(),
            has_unlogged: AtomicBool::new(false),
        }
    }

    /// Creates a visitor. [`Entered`](crate::entered::Entered) makes the visitor enter the engine.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn visitor(&self) -> Result<Visitor> {
        self.vm.create_vcpu().map(Visitor).map_err(no_memory)
    }

    fn change_unlogged<R>(&self, change: impl FnOnce(&mut BTreeSet<u64>) -> R) -> R {
        let mut unlogged = self.unlogged.lock().unwrap_or_else(PoisonError::into_inner);
        let result = change(&mut unlogged);
        self.has_unlogged
            .store(!unlogged.is_empty(), Ordering::Relaxed);
        result
    }

    /// Removes and returns a page that was written while dirty rings are enabled, for the caller's vCPU to record in
    /// its ring. If a call of the client has written the page, the next vCPU that runs records it. So a client that
    /// saves tables while no vCPU runs has to copy the memory of the tables afterwards.
    pub(crate) fn take_unlogged(&self) -> Option<u64> {
        let has_some = self.has_unlogged.load(Ordering::Relaxed);
        has_some
            .then(|| self.change_unlogged(BTreeSet::pop_first))
            .flatten()
    }

    /// Adds a page again that the caller could not record in its dirty ring.
    pub(crate) fn put_unlogged(&self, gpa: u64) {
        self.change_unlogged(|unlogged| unlogged.insert(gpa));
    }

    /// Returns the host address of a guest-physical address, and the number of bytes from this address to the end of
    /// the memslot. `None`: there is no memslot, or a write is to a read-only memslot.
    fn place(&self, gpa: u64, write: bool) -> Option<(*mut u8, u64)> {
        let slot = self.vm.memslot_from(0, gfn(gpa))?;
        let offset = gpa.checked_sub(slot.gpa.0)?;
        let is_refused = write && slot.flags.has(SlotFlags::READONLY);
        (offset < slot.size && !is_refused)
            .then(|| ((slot.backing.0 + offset) as *mut u8, slot.size - offset))
    }

    /// Accesses `len` bytes, memslot by memslot. `copy` gets the host address of each part, and the part's range among
    /// the bytes. If the signal of a kick interrupts the access to a part, that access is repeated.
    fn access<E>(
        &self,
        gpa: u64,
        len: usize,
        write: bool,
        mut copy: impl FnMut(*mut u8, Range<usize>) -> std::result::Result<(), E>,
    ) -> std::result::Result<(), Fault> {
        let mut done = 0;
        while done < len {
            let at = gpa.checked_add(done as u64).ok_or(Fault)?;
            let (host, left) = self.place(at, write).ok_or(Fault)?;
            let part = (len - done).min(usize::try_from(left).unwrap_or(usize::MAX));
            slat_guard::forget_kick();
            match copy(host, done..done + part) {
                Ok(()) => done += part,
                Err(_) if slat_guard::was_kicked() => {}
                Err(_) => return Err(Fault),
            }
        }
        Ok(())
    }
}

/// Returns the frame of an address. The engine's frames have the size of the host's pages.
fn gfn(gpa: u64) -> Gfn {
    Gfn(gpa / page_size() as u64)
}

impl Memory for Tables {
    fn read(&self, gpa: u64, bytes: &mut [u8]) -> std::result::Result<(), Fault> {
        self.access(gpa, bytes.len(), false, |host, part| {
            // SAFETY: `host` is in a memslot, whose memory the client has given to the guest. The memslot is not
            // removed while this thread is entered. The copy is guarded.
            unsafe { slat_guard::copy_in(&mut bytes[part], host) }
        })
    }

    fn write(&self, gpa: u64, bytes: &[u8]) -> std::result::Result<(), Fault> {
        self.access(gpa, bytes.len(), true, |host, part| {
            // SAFETY: as in `read`, `host` is in a memslot, whose memory the client has given to the guest. The memslot
            // is not removed while this thread is entered. The copy is guarded.
            unsafe { slat_guard::copy_out(host, &bytes[part]) }
        })?;
        let last = gpa + (bytes.len() as u64).saturating_sub(1);
        let (first, last) = (gfn(gpa), gfn(last));
        if self.vm.mark_dirty(0, first..last.add(1)).is_err() {
            let pages = [first, last].map(|gfn| gfn.0 * page_size() as u64);
            self.change_unlogged(|unlogged| unlogged.extend(pages));
        }
        Ok(())
    }

    fn has(&self, gpa: u64) -> bool {
        self.place(gpa, false).is_some()
    }
}
