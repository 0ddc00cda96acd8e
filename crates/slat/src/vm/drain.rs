//! Dirty logs by buffers that page walkers fill (policy `dirty_log=buffer`): Intel's page-modification log (PML), Arm's
//! hardware dirty state tracking structure (HDBSS), and what the software CPU does in their place.
//!
//! A logged slot is mapped by 4 KiB leaves that are writable, with the dirty bit clear. A walker that sets a dirty bit
//! writes the page to the buffer of its CPU. A harvest *drains* the buffers of all CPUs, which marks these pages in the
//! bitmap; takes the bits; clears the dirty bits of the pages it found; and flushes. So a write to a mapped page costs
//! no fault, as with dirty bits, and a harvest looks at the pages that were written, not at all leaves.
//!
//! # Why no write is lost
//! There is one invariant: **a leaf of a logged slot that is dirty has a record**. Its page is marked in the bitmap, or
//! is in a buffer, or is about to be by the walker that sets the bit. Who sets a dirty bit makes the record; who takes
//! the record clears the dirty bit next, and flushes:
//!
//! * *A walker in hardware* sets the bit and writes the entry in one operation (Intel SDM, volume 3, 29.3.6: with no
//!   space in the buffer, it sets no bit, and exits instead). A CPU that was interrupted has done both or none. So what
//!   a harvest could miss is drained first: [`Platform::drain`] interrupts the CPUs that are in the guest.
//! * *The walker of a software CPU* ([`Vcpu::mark_logged`](crate::vcpu)) sets the bit and writes the entry under the
//!   lock of its buffer, which a harvest takes, too. Without the lock, a second CPU could see the bit and write to the
//!   page, and a harvest that begins after that write would not find the entry yet. (So the bit is set with `Release`:
//!   a thread that has seen the bit finds the lock taken, and waits.) A full buffer is drained by its CPU, under the
//!   same lock, before the bit is set.
//! * *A fault* that installs a dirty leaf marks the page itself, under the lock of the table, because no walker writes
//!   an entry for it.
//!
//! An entry that is drained after its dirty bit was cleared marks a page that was not written since then. That is
//! allowed. But an old entry must not count for a slot that begins to log: so buffers are drained before such a slot is
//! made.
//!
//! * *A harvest* takes a page's mark and *then* clears the dirty bit. If a walker sets it again before the flush, its
//!   entry is in the next log. If a CPU uses a translation from before, it writes before the harvest returns.
//! * *A CPU that is dropped, or moves to another thread*: the buffer of a software CPU belongs to its reader, which
//!   stays with the VM, with what is in it. A hypervisor drains a hardware buffer before it gives it to another
//!   CPU, as at any exit.
//! * *Zaps* of leaves move dirty bits to the bitmap as with dirty bits. So when a slot moves, entries with
//!   frames of before are not needed. One for a frame without a slot, or with one that logs otherwise or not at
//!   all, is passed over.
//! * *A slot is replaced by one with another log* ([`super::region`]): the marks are copied. But a harvest of the
//!   old log may have taken some, and finds no slot any more whose dirty bits it could clear. So those of
//!   unmarked pages are cleared.
//! * *A log begins*: a walker may have set dirty bits without a record, and a drain that has looked the old slots up
//!   passed over entries. Both were in reader sections that began before the slots with the log were published. So the
//!   change waits for these sections, and then clears all dirty bits ([`super::departure`]). Bits of the log's end
//!   stay, and the next log clears them.
//! * *Huge leaves*: a walker names the page that was accessed, and sets the bit of a huge leaf once for all its pages.
//!   So faults map logged slots at 4 KiB; what was huge before is split when the log begins, or is write-protected, and
//!   the first write splits it. (With *initially set* it stays writable as long as all its pages are marked.)
//! * *Shadow pages* of nested tables: a walker that comes to a leaf of theirs does not know its frame. So there writes
//!   are found by write protection, as in a log that is a bitmap alone: a leaf becomes writable, and dirty, by a fault,
//!   which marks the page.

use crate::sync::atomic::Ordering::*;

use super::{LogKind, Vm};
use crate::addr::Gfn;
use crate::format::Format;
use crate::mmu::MmuKind;
use crate::platform::Platform;
use crate::policy::DirtyLogMethod;
use crate::slots::{Region, SlotFlags, SlotSet};
use crate::sync::InSection;
use crate::sync::walker_buffer::WrittenPages;

impl<P: Platform, F: Format> Vm<P, F> {
    /// Notes in the dirty logs what the walker of a CPU that uses address space `space` has written to its buffer: the
    /// pages `entries`. Call when the CPU has left the guest, whatever the reason, and before it enters again, for all
    /// that is in the buffer; from any thread. Frames whose memslot does not log by buffers are passed over.
    ///
    /// `entries` is called in a reader section: it does not call the engine, and waits for nothing.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Config, DirtyLogMethod, Ept, Gpa, Region, Setting, SlotFlags, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// vm.set_policy(Setting::DirtyLog(DirtyLogMethod::Buffer));
    /// let logged = Region::new(7, Gpa(0), 0x20_0000, backing).with_flags(SlotFlags::LOG_DIRTY_PAGES);
    /// vm.set_memory_region(0, &logged)?;
    ///
    /// // Intel's PML at an exit: the index, a VMCS field, is that of the next entry, and counts down from 511.
    /// let (mut buffer, mut index) = ([0u64; 512], 511u16);
    /// # (buffer[511], index) = (0x3000, 510);
    /// let first = usize::from(index.wrapping_add(1));
    /// vm.drain(0, buffer[first..].iter().map(|gpa| Gpa(*gpa).gfn()));
    /// index = 511;
    ///
    /// let mut log = [0; 8];
    /// vm.get_dirty_log(0, 7, &mut log)?;
    /// assert_eq!(log[0], 1 << 3);
    /// # let _ = index;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn drain(&self, space: usize, entries: impl IntoIterator<Item = Gfn>) {
        // Pages that are noted in one reader section.
        const SOME: usize = WrittenPages::MOST;
        let Some(space) = self.spaces.get(space) else {
            return;
        };
        let mut entries = entries.into_iter().peekable();
        while entries.peek().is_some() {
            let section = self.section();
            let slots = space.slots.current(section.inside());
            let noted = (entries.by_ref().take(SOME)).filter(|gfn| note(slots, *gfn));
            let noted = noted.count() as u64;
            section.counters().dirty_pages.add(noted);
        }
    }

    /// Drains the buffers of all CPUs. When it returns, all pages whose dirty bits walkers had set before the call are
    /// in the logs. The caller is in no reader section and holds no lock.
    pub(crate) fn drain_walkers(&self) {
        (self.platform).drain(self.id, &mut |space, gfn| self.drain(space, [gfn]));
        for buffer in self
            .readers
            .iter()
            .filter_map(|reader| reader.written.get())
        {
            let section = self.section();
            let mut pages = buffer.lock(self.lock_wait());
            let noted = self.note_written(&mut pages, section.inside());
            section.counters().dirty_pages.add(noted);
        }
    }

    /// Call before a slot becomes `region`: what is in the buffers is of the slots of before. An entry that is left
    /// would mark a page that was not written in that slot.
    pub(super) fn drain_before(&self, region: &Region) {
        let logs = region.flags.has(SlotFlags::LOG_DIRTY_PAGES);
        let by_buffers = self.policy.dirty_log() == DirtyLogMethod::Buffer;
        if logs && (by_buffers || self.has_walker_buffers()) {
            self.drain_walkers();
        }
    }

    /// Empties a buffer of a software CPU. Returns the number of pages that it has noted in logs.
    pub(crate) fn note_written(&self, pages: &mut WrittenPages, section: InSection<'_>) -> u64 {
        let noted = |(space, gfn): &(usize, Gfn)| {
            let slots = self.spaces[*space].slots.current(section);
            note(slots, *gfn)
        };
        pages.take().filter(noted).count() as u64
    }

    /// Whether the walkers of software CPUs fill their buffers.
    #[inline]
    pub(crate) fn has_walker_buffers(&self) -> bool {
        self.log_mode.buffers.load(Relaxed)
    }

    /// Whether a new log can be one of walkers' buffers. If so, software CPUs fill theirs from now on. Call before the
    /// slot that has the log is published.
    ///
    /// Returns `false` where walkers may know other addresses than the guest's frames: with the shadow MMU, and where
    /// direct pages are also parts of the shadow of nested tables.
    pub(super) fn may_use_walker_buffers(&self) -> bool {
        let may = F::SETS_DIRTY && (self.mmu == MmuKind::Tdp || !self.shadows_nested());
        if may {
            self.log_mode.buffers.store(true, SeqCst);
        }
        may
    }
}

/// Marks `gfn` in the log of its slot, if that is one of walkers' buffers. Returns whether it did.
fn note(slots: &SlotSet, gfn: Gfn) -> bool {
    let Some(slot) = slots.find(gfn) else {
        return false;
    };
    let log = slot.log().filter(|log| log.kind() == LogKind::Buffers);
    log.inspect(|log| log.mark(gfn.0 - slot.base().0)).is_some()
}
