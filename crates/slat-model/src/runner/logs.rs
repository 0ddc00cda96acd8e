//! Dirty logs of both kinds, bitmaps and rings, taken and compared.

use slat::{Access, Format};

use super::{Runner, space_of};
use crate::rings::{DirtyPage, RingClient};

impl<F: Format> Runner<F> {
    /// The guest has written, or may write now: a bitmap must tell.
    pub(super) fn note_write(&mut self, i: usize, gfn: u64, access: Access) {
        let model = &mut self.models[space_of(i)];
        // A ring tells itself, by its entry.
        if access == Access::Write && !model.mode.rings {
            model.note_write(gfn);
        }
    }

    /// A write that may have been noted, or not: the log is taken, and the model believes it.
    pub(super) fn uncertain_write(&mut self, space: usize, gfn: u64) {
        let model = &self.models[space];
        let Some((id, slot)) = model.slot_at(gfn) else {
            return;
        };
        if !slot.logs() || model.mode.rings {
            return;
        }
        let page = gfn - slot.base;
        let (word, bit) = (page as usize / 64, 1 << (page % 64));
        let mut words = self.engine_log(space, id).expect("it logs");
        let model = &mut self.models[space];
        let mut expected = model.dirty_log(id).expect("it logs");
        if words[word] & bit != 0 && model.mode.manual {
            // It is in the log still.
            model.note_write(gfn);
        }
        words[word] &= !bit;
        expected[word] &= !bit;
        self.compare_logs(space, id, Ok(words), Ok(expected));
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
        // A range beyond all slots is refused, whatever the bitmap.
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

    /// Whether the vCPU must not push any more.
    pub(super) fn is_ring_full(&self, i: usize) -> bool {
        let ring = self.rings.get(self.cpus[i].ring);
        ring.is_some_and(|ring| ring.in_use() >= RingClient::SOFT_LIMIT)
    }

    /// What a vCPU has pushed during an access must be that access. Returns how many entries.
    pub(super) fn note_pushes(
        &mut self,
        i: usize,
        gfn: u64,
        access: Access,
        was_full: bool,
    ) -> usize {
        let space = space_of(i);
        let Some(ring) = self.rings.get_mut(self.cpus[i].ring) else {
            return 0;
        };
        let mut pushed = 0;
        while let Some(entry) = ring.look() {
            let expected = self.models[space].slot_at(gfn).map(|(slot, s)| DirtyPage {
                space,
                slot,
                page: gfn - s.base,
            });
            assert_eq!((Some(entry), access), (expected, Access::Write), "pushed");
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
