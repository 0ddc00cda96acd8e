//! Random operations: mostly sensible, some wrong, all of them crowded into few places, so that slots
//! collide, share backing, and lie across the borders of tables.

use std::ops::Range;

use slat::{Access, Gpa, Hva, Level, MAX_SLOTS, Region, SlotFlags};

use crate::host::{HostChange, HostMemory};
use crate::model::{CAPACITY, GuestModel};
use crate::rng::Rng;

/// One operation on a VM.
#[derive(Clone, Debug)]
pub enum Op {
    /// KVM_SET_USER_MEMORY_REGION, valid or not.
    SetRegion(Region),
    /// An access by a vCPU.
    Translate {
        /// Which one.
        vcpu: usize,
        /// Address.
        gpa: u64,
        /// Kind.
        access: Access,
    },
    /// The host mapping of some pages changes, inside an invalidation.
    Invalidate {
        /// Pages of host memory.
        pages: Range<u64>,
        /// What becomes of them.
        change: HostChange,
        /// Accesses by a vCPU meanwhile, to these frames, before and after the change.
        during: Vec<(u64, Access)>,
    },
    /// KVM_GET_DIRTY_LOG.
    DirtyLog(u32),
    /// A policy is set.
    Policy(&'static str, &'static str),
    /// Some of the tables that NX has split are taken away.
    RecoverNx,
    /// Pages of host memory are looked at for use.
    Age(Range<u64>),
    /// A vCPU forgets its translations and says so.
    Quiesce(usize),
    /// A vCPU goes away, another one comes.
    Replace(usize),
    /// The allocation that many ahead fails.
    FailAllocation(u64),
}

const ACCESSES: [Access; 3] = [Access::Read, Access::Write, Access::Execute];
/// Policies with their values; what stands first is the most frequent.
const POLICIES: [(&str, &[&str]); 9] = [
    ("mmio_caching", &["on", "off"]),
    ("huge_pages", &["on", "on", "off"]),
    ("eager_page_split", &["on", "off"]),
    ("nx_huge_pages", &["off", "off", "on"]),
    ("nx_huge_pages_split", &["on", "on", "off"]),
    ("nx_huge_pages_recovery_ratio", &["1", "3"]),
    ("prefetch", &["8", "64", "adaptive", "off"]),
    ("split_walk", &["default", "skip-last-level", "full-walk"]),
    ("dirty_log", &["write-protect", "dirty-bit"]),
];

/// Guest frames around which everything happens: the begin, the first 2 MiB and 1 GiB borders, the
/// border of a table of level 3, the end.
const PLACES: [u64; 6] = [
    0,
    512 * 3,
    (1 << 18) - 512,
    1 << 18,
    (1 << 27) - 1024,
    CAPACITY - 2048,
];

const SIZES: [u64; 10] = [1, 2, 7, 64, 511, 512, 513, 1024, 1500, 2048];

/// Generates operations.
pub struct Generator {
    rng: Rng,
    host_pages: u64,
    vcpus: usize,
    slots: u64,
    failures: bool,
    /// Where the last accesses were: the next ones are likely to be near.
    recent: Vec<u64>,
}

impl Generator {
    /// For a host of `host_pages` pages and that many vCPUs. With `failures`, allocations fail at times.
    pub fn new(seed: u64, host_pages: u64, vcpus: usize, failures: bool) -> Self {
        Generator {
            rng: Rng::new(seed),
            host_pages,
            vcpus,
            slots: 24,
            failures,
            recent: vec![0],
        }
    }

    /// The next operation, chosen with a look at what there is.
    pub fn next_op(&mut self, model: &GuestModel) -> Op {
        let vcpu = self.rng.below(self.vcpus as u64) as usize;
        match self.rng.below(1000) {
            0..80 => Op::SetRegion(self.region(model)),
            80..150 => self.invalidate(model),
            150..190 => Op::DirtyLog(self.rng.below(self.slots) as u32),
            190..195 => {
                let (name, values) = self.rng.pick(&POLICIES);
                Op::Policy(name, self.rng.pick(values))
            }
            195..197 => Op::RecoverNx,
            197..199 => {
                let start = self.rng.below(self.host_pages);
                Op::Age(start..(start + 512).min(self.host_pages))
            }
            199..203 => Op::Quiesce(vcpu),
            203..205 => Op::Replace(vcpu),
            205..215 if self.failures => Op::FailAllocation(self.rng.below(6)),
            _ => {
                let gpa = self.gfn(model) << 12 | self.rng.below(4096);
                let access = self.rng.pick(&ACCESSES);
                Op::Translate { vcpu, gpa, access }
            }
        }
    }

    /// A frame worth an access: often near an earlier one, mostly in a slot or just beside one.
    fn gfn(&mut self, model: &GuestModel) -> u64 {
        let gfn = if self.rng.one_in(2) {
            let near = self.recent[self.rng.below(self.recent.len() as u64) as usize];
            near.wrapping_add(self.rng.below(9)).wrapping_sub(4)
        } else if let Some(slot) = self.some_slot(model)
            && !self.rng.one_in(8)
        {
            let slot = model.slots[&slot];
            (slot.base + self.rng.below(slot.pages + 2)).wrapping_sub(1)
        } else {
            self.rng.pick(&PLACES) + self.rng.below(4096)
        };
        // Beyond the tables, too, but not beyond 64 bits of address.
        let gfn = gfn & ((1 << 40) - 1);
        if self.recent.len() < 16 {
            self.recent.push(gfn);
        } else {
            let i = self.rng.below(16) as usize;
            self.recent[i] = gfn;
        }
        gfn
    }

    fn some_slot(&mut self, model: &GuestModel) -> Option<u32> {
        let n = model.slots.len() as u64;
        let skip = if n == 0 { 0 } else { self.rng.below(n) };
        model.slots.keys().nth(skip as usize).copied()
    }

    fn region(&mut self, model: &GuestModel) -> Region {
        let existing = self.some_slot(model);
        let region = match (self.rng.below(10), existing) {
            (0..3, Some(id)) => self.existing(model, id, |region, _| region.size = 0),
            (3..5, Some(id)) => self.existing(model, id, |region, rng| {
                let by = rng.pick(&[1, 2, 512, 700, 1 << 18]) << 12;
                let up = rng.one_in(2);
                let gpa = region.gpa.0;
                region.gpa.0 = if up { gpa + by } else { gpa.saturating_sub(by) };
            }),
            (5..8, Some(id)) => self.existing(model, id, |region, rng| {
                region.flags.0 ^= rng.pick(&[1, 1, 1, 1, 2, 3, 0]);
            }),
            _ => self.fresh(),
        };
        if self.rng.one_in(12) {
            self.spoil(region)
        } else {
            region
        }
    }

    fn existing(
        &mut self,
        model: &GuestModel,
        id: u32,
        change: impl FnOnce(&mut Region, &mut Rng),
    ) -> Region {
        let slot = &model.slots[&id];
        let mut region = Region {
            slot: id,
            flags: SlotFlags(slot.flags),
            gpa: Gpa(slot.base << 12),
            size: slot.pages << 12,
            backing: Hva(slot.backing),
            private: None,
        };
        change(&mut region, &mut self.rng);
        region
    }

    fn fresh(&mut self) -> Region {
        let giant = self.host_pages >= 2 << 18 && self.rng.one_in(40);
        let pages = if giant {
            (1 << 18) + self.rng.pick(&[0, 0, 512, 3])
        } else {
            self.rng.pick(&SIZES)
        };
        let base = if giant {
            self.rng.pick(&[1 << 18, (1 << 18) - 512, 2 << 18])
        } else {
            self.rng.pick(&PLACES) + self.rng.pick(&[0, 0, 1, 63, 512, 513, 1024])
        };
        // Mostly congruent to the guest frame, so that huge leaves are possible.
        let room = self.host_pages - pages;
        let skew = if self.rng.one_in(5) { 1 } else { 0 };
        let unit = if giant { 1 << 18 } else { 512 };
        let backing = self.rng.below(room / unit + 1) * unit + base % unit + skew;
        Region {
            slot: self.rng.below(self.slots) as u32,
            flags: SlotFlags(self.rng.pick(&[0, 0, 0, 1, 1, 2, 3])),
            gpa: Gpa(base << 12),
            size: pages << 12,
            backing: HostMemory::hva(backing.min(room)),
            private: None,
        }
    }

    fn spoil(&mut self, mut region: Region) -> Region {
        match self.rng.below(9) {
            0 => region.gpa.0 |= 1 << self.rng.below(12),
            1 => region.size |= 1 << self.rng.below(12),
            2 => region.backing.0 |= 1 << self.rng.below(12),
            3 => region.slot = self.rng.pick(&[MAX_SLOTS, MAX_SLOTS + 1, u32::MAX]),
            4 => region.flags.0 |= 1 << (2 + self.rng.below(30)),
            5 => region.gpa.0 = u64::MAX << 12,
            6 => region.gpa.0 = self.rng.pick(&[CAPACITY, CAPACITY - 1]) << 12,
            7 => region.size = self.rng.pick(&[1u64 << 31, u64::MAX >> 12]) << 12,
            _ => region.backing.0 = u64::MAX << 12,
        }
        region
    }

    fn invalidate(&mut self, model: &GuestModel) -> Op {
        // Where something is mapped, if possible.
        let anchor = match self.some_slot(model) {
            Some(id) => {
                let slot = &model.slots[&id];
                let page = (slot.backing - HostMemory::BASE.0) >> 12;
                page + self.rng.below(slot.pages)
            }
            None => self.rng.below(self.host_pages),
        };
        let (start, pages) = match self.rng.below(8) {
            0..3 => (anchor, self.rng.pick(&[1, 2, 9])),
            3..6 => (anchor & !511, 512 * self.rng.pick(&[1, 2, 4])),
            6 => (anchor & !((1 << 18) - 1), 1 << 18),
            _ => (anchor, self.rng.below(1500) + 1),
        };
        let start = start.min(self.host_pages - 1);
        let pages = start..(start + pages).min(self.host_pages);
        let change = match self.rng.below(12) {
            0 => HostChange::Nothing,
            1 => HostChange::Punch,
            2 => HostChange::Protect {
                writable: self.rng.one_in(2),
            },
            _ => HostChange::Remap {
                level: self.rng.pick(&[Level::PAGE, Level::MEGA, Level::GIGA]),
                writable: !self.rng.one_in(6),
                device: self.rng.one_in(12),
            },
        };
        let during = (0..self.rng.below(4))
            .map(|_| (self.gfn(model), self.rng.pick(&ACCESSES)))
            .collect();
        Op::Invalidate {
            pages,
            change,
            during,
        }
    }
}
