//! Guest memory as the oracle knows it: memslots, and every value that each word has had since the last flushes.
//!
//! A page-table entry at a guest-physical address without a memslot reads as 0, so it is not present: KVM injects a
//! page fault for a table that is in no memslot. So deleting or creating a memslot counts as a store to every word of
//! the slot that is not 0.

use std::collections::HashMap;

use slat::{Access, Gpa, Granule, PAGE_SIZE, Region};

use super::mmu::Outcome;
use super::ram::{GuestMachine, WORDS, entry_in};
use crate::host::HostMemory;
use crate::model::{Expected, GuestModel, ModelSlot};

/// A moment, as the number of the last operation before it.
pub(super) type Time = u64;

/// The number of guest frames that the engine's tables can map.
const CAPACITY: u64 = 1 << 36;

/// An earlier value of a word, and the moment at which the value was replaced.
#[derive(Clone, Copy, Debug)]
struct Past {
    value: u64,
    until: Time,
    read_only: bool,
}

/// A value of a page-table entry, and the moments at which a processor could read that value: `from..until`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Version {
    pub value: u64,
    pub from: Time,
    pub until: Time,
    /// The entry was in a read-only memslot, where no processor sets its flags.
    pub read_only: bool,
}

pub(super) struct Memory {
    pub machine: GuestMachine,
    /// The memslots and their dirty logs.
    pub model: GuestModel,
    /// The earlier values of the word at each address, oldest first. Each value begins when the previous value ends.
    past: HashMap<u64, Vec<Past>>,
}

impl Memory {
    pub fn new(machine: GuestMachine) -> Self {
        Memory {
            machine,
            model: GuestModel::new(Granule::Kib4, CAPACITY),
            past: HashMap::new(),
        }
    }

    /// Returns the word at `gpa`, a multiple of 8, and whether it is in a read-only slot.
    fn word(&self, gpa: u64) -> (u64, bool) {
        match self.model.slot_at(gpa >> 12) {
            Some((_, slot)) => {
                let page = slot.host_page(gpa >> 12);
                let word = self.machine.ram.word(page, gpa % PAGE_SIZE / 8);
                (word, is_read_only(slot))
            }
            None => (0, false),
        }
    }

    /// Returns the entry of `size` bytes at `gpa`, a multiple of `size`.
    pub fn entry(&self, gpa: u64, size: usize) -> u64 {
        entry_in(self.word(gpa & !7).0, 8 * (gpa % 8), size)
    }

    /// Returns the values of the entry of `size` bytes at `gpa`, newest first. Two consecutive values may be equal.
    pub fn versions(&self, gpa: u64, size: usize) -> impl Iterator<Item = Version> {
        let past = self.past.get(&(gpa & !7)).map_or(&[][..], |past| past);
        let (value, read_only) = self.word(gpa & !7);
        let now = Past {
            value,
            until: Time::MAX,
            read_only,
        };
        let newest_first = std::iter::once(now).chain(past.iter().rev().copied());
        let starts = past.iter().rev().map(|past| past.until);
        let starts = starts.chain(std::iter::once(0));
        newest_first.zip(starts).map(move |(past, from)| Version {
            value: entry_in(past.value, 8 * (gpa % 8), size),
            from,
            until: past.until,
            read_only: past.read_only,
        })
    }

    /// Records that the word at `gpa` had the value `value` until `now`.
    fn note(&mut self, now: Time, gpa: u64, value: u64, read_only: bool) {
        let past = self.past.entry(gpa).or_default();
        if past.last().is_none_or(|last| last.until < now) {
            past.push(Past {
                value,
                until: now,
                read_only,
            });
        }
    }

    /// Records that the MMU has changed the word at `gpa`, whose value was `old`.
    pub fn marked(&mut self, now: Time, gpa: u64, old: u64) {
        self.note(now, gpa, old, false);
        self.model.note_write(gpa >> 12);
    }

    /// Stores `bytes` at `gpa`, within one page. Does nothing if no memslot contains the page.
    pub fn store(&mut self, now: Time, gpa: u64, bytes: &[u8]) {
        let Some((_, slot)) = self.model.slot_at(gpa >> 12) else {
            return;
        };
        let (page, read_only) = (slot.host_page(gpa >> 12), is_read_only(slot));
        let mut at = gpa & !7;
        while at < gpa + bytes.len() as u64 {
            let word = at % PAGE_SIZE / 8;
            let old = self.machine.ram.word(page, word);
            let mut new = old.to_le_bytes();
            for (i, byte) in bytes.iter().enumerate() {
                if let Some(to) = (gpa + i as u64).checked_sub(at)
                    && to < 8
                {
                    new[to as usize] = *byte;
                }
            }
            let new = u64::from_le_bytes(new);
            if new != old {
                self.machine.ram.set_word(page, word, new);
                self.note(now, at, old, read_only);
            }
            at += 8;
        }
    }

    /// Returns whether KVM_SET_USER_MEMORY_REGION would accept `region`. Also refuses slots that share host memory,
    /// because KVM does not track a write to a table that is made through another slot.
    pub fn accepts(&self, region: &Region) -> bool {
        let mut model = self.model.clone();
        let pages = |slot: &ModelSlot| slot.backing..slot.backing + (slot.pages << 12);
        let shares = model.slots.iter().any(|(id, slot)| {
            let (a, b) = (
                pages(slot),
                region.backing.0..region.backing.0 + region.size,
            );
            *id != region.slot && a.start < b.end && b.start < a.end
        });
        !shares && model.set_region(region).is_ok()
    }

    /// Changes a memslot.
    pub fn set_region(&mut self, now: Time, region: &Region) {
        let old = self.model.slots.get(&region.slot).copied();
        if let Some(slot) = &old {
            for (gpa, word) in self.contents(slot) {
                self.note(now, gpa, word, is_read_only(slot));
            }
        }
        let done = self.model.set_region(region);
        assert_eq!(done, Ok(()), "a region that was accepted");
        if let Some(slot) = self.model.slots.get(&region.slot).copied() {
            for (gpa, _) in self.contents(&slot) {
                self.note(now, gpa, 0, false);
            }
        }
    }

    /// Returns the words of a slot that are not 0, with their addresses.
    fn contents(&self, slot: &ModelSlot) -> Vec<(u64, u64)> {
        let words = (0..slot.pages * WORDS).map(|i| {
            let page = slot.host_page(slot.base + i / WORDS);
            let word = self.machine.ram.word(page, i % WORDS);
            ((slot.base << 12) + 8 * i, word)
        });
        words.filter(|(_, word)| *word != 0).collect()
    }

    /// Returns the guest frame that a page of host memory backs.
    pub fn gfn_of(&self, page: u64) -> Option<u64> {
        let first = |slot: &ModelSlot| (slot.backing - HostMemory::BASE.0) >> 12;
        let mut slots = self.model.slots.values();
        let slot = slots.find(|slot| (first(slot)..first(slot) + slot.pages).contains(&page))?;
        Some(slot.base + page - first(slot))
    }

    /// Returns whether there is a read-only memslot at `gpa`.
    pub fn is_read_only(&self, gpa: u64) -> bool {
        let slot = self.model.slot_at(gpa >> 12);
        slot.is_some_and(|(_, slot)| is_read_only(slot))
    }

    /// Returns the outcome of an access to a guest-physical address.
    pub fn access(&self, gpa: u64, access: Access) -> Outcome {
        let sim = self.machine.ram.sim();
        match self.model.expect(&**sim, gpa >> 12, access) {
            Expected::Page(page) => Outcome::Page {
                host: page.pfn.hpa(),
                tracked: false,
            },
            Expected::Mmio => Outcome::Mmio { gpa: Gpa(gpa) },
            Expected::BadAddress | Expected::Absent | Expected::Private => {
                Outcome::BadAddress { gpa: Gpa(gpa) }
            }
            Expected::NoExecute => Outcome::NoExecute { gpa: Gpa(gpa) },
        }
    }

    /// Forgets the values that were replaced at or before `time`.
    pub fn forget_before(&mut self, time: Time) {
        self.past.retain(|_, past| {
            past.retain(|past| past.until > time);
            !past.is_empty()
        });
    }
}

fn is_read_only(slot: &ModelSlot) -> bool {
    !slot.is_writable()
}
