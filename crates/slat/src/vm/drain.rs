//! Dirty logs by buffers that page walkers fill (policy `dirty_log=buffer`): Intel's page-modification log (PML), Arm's
//! hardware dirty state tracking structure (HDBSS), and the equivalent for software CPUs.
//!
//! A logged slot is mapped by 4 KiB leaves that are writable, with the dirty bit clear. A walker that sets a dirty bit
//! writes the page's address to the buffer of its CPU. A harvest *drains* the buffers of all CPUs, which marks their
//! pages in the bitmap. Then the harvest removes the marks from the bitmap, clears the dirty bits of these pages'
//! leaves, and flushes TLBs. So a write to a mapped page costs no fault, and a harvest reads only the leaves of written
//! pages, not all leaves.
//!
//! # Why no write is lost
//! The invariant is: **each dirty leaf of a logged slot has a record**. A record is a mark of its page in the bitmap,
//! or an entry in a buffer, or an entry that the walker that sets the bit is about to write. Whatever sets a dirty bit,
//! a walker or a fault, also makes the record. A harvest that removes a record then clears the dirty bit, and flushes.
//! In detail:
//!
//! * *A walker in hardware* sets the bit and writes the buffer entry in one operation (Intel SDM, volume 3, 29.3.6: if
//!   the buffer is full, the CPU sets no dirty bit, and exits instead). If a CPU is interrupted, it has done both or
//!   neither. So at its beginning a harvest drains the buffers by [`Platform::drain`], which interrupts the CPUs that
//!   are in the guest.
//! * *The walker of a software CPU* ([`Vcpu::mark_logged`](crate::vcpu)) sets the dirty bit and writes the buffer entry
//!   under the lock of its buffer, which a harvest takes, too. Without the lock, a second CPU could see the bit and
//!   write to the page before the buffer entry is written, and a harvest after that write would not find the entry.
//!   (The bit is set with `Release`, so a thread that has seen the bit finds that the lock is held, and waits.) If the
//!   buffer is full, its CPU drains it, under the same lock, before it sets the bit.
//! * *A fault* that installs a dirty leaf marks the page itself, under the lock of the table, because no walker will
//!   write a buffer entry for a leaf that is already dirty.
//!
//! If a buffer entry is drained after its dirty bit was cleared, it marks a page that was not written since then. This
//! is allowed. But a buffer entry from before must not count when a slot begins to log. So buffers are drained before
//! such a slot is made.
//!
//! * *A harvest* removes a page's mark and *then* clears the dirty bit. If a walker sets the bit again before the
//!   flush, its buffer entry is in the next log. A CPU that still uses a dirty translation from its TLB can do so only
//!   until the flush: such a write is before the harvest returns.
//! * *A vCPU that is dropped*: the buffer of a software CPU belongs to its reader, which the VM keeps, with the
//!   buffer's contents. A hypervisor drains a hardware buffer at every exit of the vCPU.
//! * *Zaps* of leaves move dirty bits to the bitmap, as in a log by dirty bits. So when a slot moves, buffer entries
//!   that name its old frames are not needed. A drain ignores an entry whose frame has no slot, or whose slot does not
//!   log by buffers.
//! * *A slot is replaced by a slot with another log* ([`super::region`]): the marks are copied. But a harvest of the
//!   old log may have removed some marks, and has not yet cleared the dirty bits of these pages. So the change clears
//!   the dirty bits of unmarked pages.
//! * *Dirty logging starts*: earlier a walker may have set dirty bits without a record, and a drain that used the old
//!   slots may have ignored buffer entries. Both happen only in reader sections that began before the slots with the
//!   log were published. So the change waits for these sections, and then clears all dirty bits ([`super::departure`]).
//!   When dirty logging stops, dirty bits stay set, and the next log clears them when it starts.
//! * *Huge leaves*: a walker records only the accessed page, and sets the dirty bit of a huge leaf only once for all
//!   its pages. So faults map logged slots by 4 KiB leaves. When logging starts, existing huge leaves are split, or
//!   write-protected until the first write splits them. (With KVM_DIRTY_LOG_INITIALLY_SET, a huge leaf stays writable
//!   as long as all its pages are marked.)
//! * *Shadow pages* of nested tables: a walker does not know the guest frame of such a leaf. So writes through these
//!   leaves are found by write protection, as in [`LogKind::Bitmap`]: a fault makes the leaf writable and dirty, and
//!   marks the page.

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
    /// Marks the pages `entries` in the dirty logs: the page walker of a CPU in address space `space` has written them
    /// to its buffer. Call this with the whole contents of the buffer after each exit from the guest, before the CPU
    /// enters the guest again. Any thread may call it. Ignores frames whose memslot does not log by buffers.
    ///
    /// The iterator `entries` runs in a reader section: it must not call the engine, and must not wait.
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
    /// // Intel's PML at an exit: `index`, a VMCS field, is the next free entry, and counts down from 511.
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
        // The number of pages that are marked in one reader section.
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
    /// marked in the logs. The caller is in no reader section and holds no lock.
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

    /// Drains the buffers if a change of a slot to `region` may start dirty logging by buffers. Call before the slot
    /// changes: the present buffer entries are about the old slots, and would mark pages in the new slot's log.
    pub(super) fn drain_before(&self, region: &Region) {
        let logs =
            region.flags.has(SlotFlags::LOG_DIRTY_PAGES) || self.log_mode.readers.load(SeqCst);
        let by_buffers = self.policy.dirty_log() == DirtyLogMethod::Buffer;
        if logs && (by_buffers || self.has_walker_buffers()) {
            self.drain_walkers();
        }
    }

    /// Empties the buffer `pages` of a software CPU. Returns the number of pages marked in logs.
    pub(crate) fn note_written(&self, pages: &mut WrittenPages, section: InSection<'_>) -> u64 {
        let noted = |(space, gfn): &(usize, Gfn)| {
            let slots = self.spaces[*space].slots.current(section);
            note(slots, *gfn)
        };
        pages.take().filter(noted).count() as u64
    }

    /// Whether page walkers of software CPUs write to buffers.
    #[inline]
    pub(crate) fn has_walker_buffers(&self) -> bool {
        self.log_mode.buffers.load(Relaxed)
    }

    /// Whether a new log can be of the kind [`LogKind::Buffers`]. If so, software CPUs write to their buffers from now
    /// on. Call before publishing the slot that has the log.
    ///
    /// Returns `false` if the format has no dirty bits, or if walkers may write other addresses than guest frames to
    /// buffers: with the shadow MMU, and with the direct MMU if it also shadows nested tables.
    pub(super) fn may_use_walker_buffers(&self) -> bool {
        let may = F::SETS_DIRTY && (self.mmu == MmuKind::Tdp || !self.shadows_nested());
        if may {
            self.log_mode.buffers.store(true, SeqCst);
        }
        may
    }
}

/// Marks `gfn` in the log of its slot, if that log is of the kind [`LogKind::Buffers`]. Returns whether `gfn` was
/// marked.
fn note(slots: &SlotSet, gfn: Gfn) -> bool {
    let Some(slot) = slots.find(gfn) else {
        return false;
    };
    let log = slot.log().filter(|log| log.kind() == LogKind::Buffers);
    log.inspect(|log| log.mark(gfn.0 - slot.base().0)).is_some()
}
