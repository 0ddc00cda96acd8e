//! Collects dirty logs of both kinds, bitmaps and rings, and compares them with the model.

use std::ops::Range;

use slat::{Access, Format, Stats, Translation};

use super::Runner;
use crate::machine::Machine;
use crate::rings::{DirtyPage, RingClient};

impl<M: Machine, F: Format> Runner<M, F> {
    /// Whether the policy `dirty_log_reads` is on.
    pub(super) fn logs_reads(&self) -> bool {
        match self.policies.get("dirty_log_reads") {
            None | Some(&"auto") => F::LOGS_READS,
            Some(choice) => *choice == "on",
        }
    }

    /// Records in the model that the guest has made an access, or may make it now. If the access is a write, or a read
    /// that is logged, checks that a bitmap contains its page. `did` has the counts of engine events during the access.
    pub(super) fn note_access(
        &mut self,
        i: usize,
        gfn: u64,
        access: Access,
        did: &Stats,
        translation: &Translation,
    ) {
        let (reads, saving) = (self.logs_reads(), self.is_saving());
        let model = &mut self.models[self.cpus[i].space];
        let Some((_, slot)) = model.slot_at(gfn).filter(|(_, slot)| slot.logs()) else {
            return;
        };
        // If the log is a ring, the vCPU has pushed one ring entry for the page.
        let to_ring = model.mode.rings;
        let faulted = did.pf_fixed + did.pf_spurious > 0;
        if access != Access::Write {
            let installed = did.pages_4k == 1 && did.splits == 0;
            let page = self.machine.page(slot.host_page(gfn));
            let own = !self.machine.is_shared(slot.host_page(gfn));
            let writable = slot.is_writable() && own && page.is_some_and(|page| page.writable);
            if installed && !to_ring {
                let wanted = reads && writable && !saving;
                assert_eq!(
                    translation.write, wanted,
                    "{access:?} at frame {gfn:#x} of a slot that logs: {translation:?}"
                );
            }
            if installed && writable && reads {
                self.tally.count("read logged");
            }
        }
        if !to_ring && (access == Access::Write || faulted && translation.write) {
            model.note_write(gfn);
        }
    }

    /// Collects the logs, and makes the model equal to them. Call after writes that may or may not have been recorded.
    pub(super) fn uncertain_writes(&mut self, space: usize, gfns: Range<u64>) {
        let model = &self.models[space];
        if model.mode.rings {
            return;
        }
        let slots = model.slots.iter().filter(|(_, slot)| slot.logs());
        let slots: Vec<_> = slots.map(|(id, slot)| (*id, *slot)).collect();
        for (id, slot) in slots {
            let part = gfns.start.max(slot.base)..gfns.end.min(slot.base + slot.pages);
            if part.is_empty() {
                continue;
            }
            let mut words = self.engine_log(space, id).expect("it logs");
            let model = &mut self.models[space];
            let mut expected = model.dirty_log(id).expect("it logs");
            for gfn in part {
                let page = gfn - slot.base;
                let (word, bit) = (page as usize / 64, 1 << (page % 64));
                if words[word] & bit != 0 && model.mode.manual {
                    // The page stays in the log.
                    model.note_write(gfn);
                }
                words[word] &= !bit;
                expected[word] &= !bit;
            }
            self.compare_logs(space, id, Ok(words), Ok(expected));
        }
    }

    fn engine_log(&self, space: usize, id: u32) -> Result<Vec<u64>, i32> {
        let words = self.vm.dirty_log_words(space, id);
        let mut words = words
            .map(|n| vec![u64::MAX; n])
            .map_err(|error| error.errno())?;
        let taken = self.vm.get_dirty_log(space, id, &mut words);
        taken.map_err(|error| error.errno())?;
        Ok(words)
    }

    fn compare_logs(
        &mut self,
        space: usize,
        id: u32,
        log: Result<Vec<u64>, i32>,
        expected: Result<Vec<u64>, i32>,
    ) {
        let loose = self.models[space].is_loose(id);
        let same = match (&log, &expected) {
            (Ok(log), Ok(expected)) if loose => {
                log.iter().zip(expected).all(|(log, e)| e & !log == 0)
            }
            _ => log == expected,
        };
        assert!(
            same,
            "dirty log of slot {id} in space {space}: {log:x?}, expected {expected:x?}"
        );
        self.tally.count(match expected {
            Ok(_) => "log taken",
            Err(_) => "log refused",
        });
    }

    pub(super) fn dirty_log(&mut self, space: usize, id: u32) {
        let log = self.engine_log(space, id);
        let expected = self.models[space].dirty_log(id);
        self.compare_logs(space, id, log, expected);
    }

    pub(super) fn clear_log(
        &mut self,
        space: usize,
        id: u32,
        first: u64,
        pages: u64,
        pattern: u64,
    ) {
        let model = &self.models[space];
        let base = model.slots.get(&id).map_or(0, |slot| slot.base);
        // A range beyond all slots is refused in any case, so a shorter bitmap suffices.
        let words = pages.div_ceil(64).min(1 << 13) as usize;
        let bitmap = vec![pattern; words];
        let mut kept = Vec::new();
        if let Some(end) = base.checked_add(first).and_then(|b| b.checked_add(pages)) {
            kept = self.mapped(space, base + first..end);
        }
        let answer = self.vm.clear_dirty_log(space, id, first, pages, &bitmap);
        let errno = answer.map_err(|error| error.errno());
        let expected = self.models[space].clear_dirty_log(id, first, pages, &bitmap);
        assert_eq!(
            errno, expected,
            "clearing {pages} pages from {first} of slot {id} in space {space}"
        );
        if errno.is_ok() {
            self.check_still_mapped(&kept, true);
            self.check_split(space, base + first..base + first + pages);
            self.tally.count("log cleared");
        } else {
            self.tally.count("clear refused");
        }
    }

    /// Whether the vCPU's ring is full, so that it must not push more ring entries.
    pub(super) fn is_ring_full(&self, i: usize) -> bool {
        let ring = self.rings.get(self.cpus[i].ring);
        ring.is_some_and(|ring| ring.in_use() >= RingClient::SOFT_LIMIT)
    }

    /// Checks that the ring entries that a vCPU has pushed during an access to `gfns` are for pages of `gfns`. Returns
    /// the number of these ring entries.
    pub(super) fn note_pushes(
        &mut self,
        i: usize,
        gfns: Range<u64>,
        access: Access,
        was_full: bool,
    ) -> usize {
        let space = self.cpus[i].space;
        let logged = access == Access::Write || self.logs_reads();
        let Some(ring) = self.rings.get_mut(self.cpus[i].ring) else {
            return 0;
        };
        let mut pushed = 0;
        while let Some(entry) = ring.look() {
            let slot = self.models[space].slots.get(&entry.slot);
            let gfn = slot.expect("a pushed page is in a slot").base + entry.page;
            assert!(
                entry.space == space && gfns.contains(&gfn) && logged,
                "{access:?} of {gfns:x?}: {entry:?} was pushed"
            );
            assert!(!was_full, "{entry:?} was pushed to a full ring");
            self.models[space].note_write(gfn);
            self.tally.count("ring pushed");
            pushed += 1;
        }
        pushed
    }

    pub(super) fn collect(&mut self, i: usize, entries: u32) {
        let ring = self.cpus[i].ring;
        let Some(client) = self.rings.get_mut(ring) else {
            return;
        };
        for _ in 0..entries {
            match client.collect() {
                Some(page) => self.collected.push((ring, page)),
                None => break,
            }
        }
    }

    /// Records that the vCPU of `ring` was deleted. The ring will not be reset any more, so the next write to each of
    /// its pages is recorded again.
    pub(super) fn ring_left(&mut self, ring: usize) {
        let Some(client) = self.rings.get_mut(ring) else {
            return;
        };
        for DirtyPage { space, slot, page } in client.left() {
            self.models[space].reset(slot, page);
            self.tally.count("ring left with pages");
        }
        self.collected.retain(|(other, _)| *other != ring);
    }

    pub(super) fn reset_rings(&mut self) {
        let reset = self.vm.reset_dirty_rings();
        assert_eq!(reset, self.collected.len() as u64, "entries reset");
        for (ring, DirtyPage { space, slot, page }) in self.collected.drain(..) {
            self.rings[ring].note_reset();
            self.models[space].reset(slot, page);
            self.tally.count("ring reset");
        }
    }
}
