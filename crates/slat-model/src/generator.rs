//! Generates operations: mostly valid, some invalid. All operations use few addresses, so that slots overlap, share
//! host memory, and cross the borders of tables.

use slat::{Access, Change, Gfn, Granule, Level, MAX_SLOTS, MemoryType, Region, Rights, SlotFlags};

use crate::host::{HostChange, HostMemory, PageKind};
use crate::model::{GuestModel, ModelSlot};
use crate::ops::{Kind, Op, POLICIES};
use crate::rng::Rng;
use crate::setup::{MOST_VMS, SPACES, Setup, VCPUS, first_space_of};

/// The kinds of access to choose from. Writes are more frequent, because most of the engine's records (dirty logs, for
/// example) concern writes.
const ACCESSES: [Access; 4] = [Access::Read, Access::Write, Access::Write, Access::Execute];
/// The rights of slots to choose from. The engine allows more combinations than KVM's memslots have.
const RIGHTS: [Rights; 4] = [
    Rights::ALL,
    Rights::ALL.with_execute(false),
    Rights::ALL.with_write(false),
    Rights::READ,
];
const MEMORY: [MemoryType; 3] = [
    MemoryType::WriteBack,
    MemoryType::WriteCombining,
    MemoryType::Device,
];
/// The number of slot ids that most runs use.
const IDS: u64 = 16;
/// The number of slot ids, and of slots, in runs with many slots.
const MANY_IDS: u64 = 200;
const MANY: usize = 50;

/// Generates operations.
pub struct Generator {
    rng: Rng,
    setup: Setup,
    granule: Granule,
    /// The number of entries in a table.
    entries: u64,
    capacity: u64,
    /// The address space that each vCPU uses. A vCPU that switches to another VM keeps its address space.
    spaces: [usize; VCPUS],
    /// Slot ids are below this number.
    ids: u64,
    /// Guest frames around which operations are generated: the first frame, the first borders of levels 2 and 3, the
    /// borders between tables of levels 3 and 4 (also between the tables of a concatenated root), and the last frame.
    places: Vec<u64>,
    /// Frames of the last accesses. The next accesses are often near them.
    recent: Vec<u64>,
}

impl Generator {
    /// Makes a generator for tables of `granule` that map `capacity` frames.
    pub fn new(rng: Rng, setup: Setup, granule: Granule, capacity: u64) -> Self {
        let n = granule.entries() as u64;
        let places = [
            0,
            n * 3,
            n * n - n,
            n * n,
            n.pow(3) - 2 * n,
            n.pow(4) - 2 * n,
            capacity - 4 * n,
        ];
        Generator {
            rng,
            setup,
            granule,
            entries: n,
            capacity,
            spaces: std::array::from_fn(first_space_of),
            ids: if setup.many_slots { MANY_IDS } else { IDS },
            places: places.into_iter().filter(|p| *p < capacity).collect(),
            recent: vec![0],
        }
    }

    /// Whether the bytes that decide the operations have run out.
    pub fn is_exhausted(&self) -> bool {
        self.rng.is_exhausted()
    }

    /// Returns the next operation. `models` are the models of the address spaces, with their slots.
    pub fn next_op(&mut self, models: &[GuestModel]) -> Op {
        let vcpu = self.rng.below(VCPUS as u64) as usize;
        let space = self.rng.pick(&[0, 0, 0, 1, 1]);
        let seen = &models[self.spaces[vcpu]];
        match self.setup.mix.pick(&mut self.rng) {
            Kind::Region => {
                let region = self.region(&models[space]);
                // One of 64 operations has the number of an address space that does not exist.
                let space = if self.rng.one_in(64) { SPACES } else { space };
                Op::SetRegion { space, region }
            }
            Kind::Regions => {
                let mut changes = self.regions(&models[space]);
                if self.rng.one_in(32) {
                    // The change removes a slot that may not exist, or that another change also names.
                    changes.push(Change::Remove(self.rng.below(self.ids) as u32));
                }
                Op::SetRegions { space, changes }
            }
            Kind::FindSlot => {
                let gpa = self.gfn(seen) << self.granule.shift();
                Op::FindSlot { vcpu, gpa }
            }
            Kind::Fail if self.setup.failures => Op::FailAllocation(self.rng.below(6)),
            Kind::Translate | Kind::Fail => {
                let (gpa, access) = self.access(seen);
                Op::Translate { vcpu, gpa, access }
            }
            Kind::Walk => {
                let gpa = self.gpa(seen);
                Op::Walk { vcpu, gpa }
            }
            Kind::Prefault => {
                let gpa = self.gpa(seen);
                let bytes = self.rng.pick(&[1, 4096, 9, 512, 1100, 5000]);
                let bytes = bytes << self.rng.pick(&[0, self.granule.shift()]);
                Op::Prefault { vcpu, gpa, bytes }
            }
            Kind::Convert => self.convert(seen),
            Kind::Invalidate => self.invalidate(models),
            Kind::DirtyLog => {
                let id = self.log(&models[space]);
                Op::DirtyLog { space, id }
            }
            Kind::ClearLog => self.clear_log(space, &models[space]),
            Kind::ManualLog => Op::ManualLog {
                manual: self.rng.one_in(2),
                initially_set: self.rng.one_in(2),
            },
            Kind::Collect => {
                let entries = self.rng.pick(&[1, 5, 32, 64, 64]);
                Op::Collect { vcpu, entries }
            }
            Kind::ResetRings => Op::ResetRings,
            Kind::Policy => {
                let (name, values) = self.rng.pick(&POLICIES);
                Op::Policy(name, self.rng.pick(values))
            }
            Kind::RecoverNx => Op::RecoverNx,
            Kind::Age => {
                let (gpa, access) = self.access(seen);
                Op::Age { vcpu, gpa, access }
            }
            Kind::Cold => Op::Cold,
            Kind::Promote => Op::Promote(self.rng.pick(&[1, 2, 5, 64, usize::MAX])),
            Kind::Quiesce => Op::Quiesce(vcpu),
            Kind::Replace => {
                self.spaces[vcpu] = first_space_of(vcpu);
                Op::Replace(vcpu)
            }
            Kind::Snapshot => self.snapshot(),
            Kind::Fork => Op::Fork,
            Kind::Turn => Op::Turn(self.rng.below(MOST_VMS as u64) as usize),
            Kind::End => Op::End,
            Kind::UseSpace => {
                self.spaces[vcpu] = space;
                Op::UseSpace { vcpu, space }
            }
        }
    }

    fn snapshot(&mut self) -> Op {
        match self.rng.below(6) {
            0 | 1 => Op::BeginSnapshot,
            2 => Op::EndSnapshot {
                whole: !self.rng.one_in(3),
            },
            _ => Op::KeepNext(self.rng.pick(&[1, 2, 63, 64, 512, 5000])),
        }
    }

    fn access(&mut self, model: &GuestModel) -> (u64, Access) {
        (self.gpa(model), self.rng.pick(&ACCESSES))
    }

    fn gpa(&mut self, model: &GuestModel) -> u64 {
        self.gfn(model) << self.granule.shift() | self.rng.below(self.granule.bytes())
    }

    /// Returns a frame to access. The frame is often near an earlier one, and mostly in a slot or next to one.
    fn gfn(&mut self, model: &GuestModel) -> u64 {
        let gfn = if self.rng.one_in(3) {
            let near = self.recent[self.rng.below(self.recent.len() as u64) as usize];
            near.wrapping_add(self.rng.below(9)).wrapping_sub(4)
        } else if let Some(slot) = self.some_slot(model)
            && !self.rng.one_in(8)
        {
            let slot = model.slots[&slot];
            (slot.base + self.rng.below(slot.pages + 2)).wrapping_sub(1)
        } else {
            self.rng.pick(&self.places) + self.rng.below(8 * self.entries)
        };
        // The frame may be beyond the tables' capacity, but its address must fit into 64 bits.
        let gfn = gfn & (u64::MAX >> self.granule.shift());
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

    /// Returns the id of a slot whose dirty log to read. In most cases, the slot exists.
    fn log(&mut self, model: &GuestModel) -> u32 {
        match self.some_slot(model) {
            Some(id) if !self.rng.one_in(8) => id,
            _ => self.rng.below(self.ids) as u32,
        }
    }

    fn clear_log(&mut self, space: usize, model: &GuestModel) -> Op {
        let id = self.log(model);
        let all = model.slots.get(&id).map_or(100, |slot| slot.pages);
        let first = self.rng.below(all.div_ceil(64)) * 64;
        let (mut first, mut pages) = match self.rng.below(4) {
            0 => (0, all),
            1 => (first, all - first),
            _ => (first, (64 * (1 + self.rng.below(9))).min(all - first)),
        };
        if self.rng.one_in(12) {
            first = first.wrapping_add(self.rng.pick(&[1, 64, 0]));
            pages = pages.wrapping_add(self.rng.pick(&[1, 64, u64::MAX]));
        }
        let pattern = match self.rng.below(3) {
            0 => u64::MAX,
            1 => self.rng.word(),
            _ => 1 << self.rng.below(64),
        };
        Op::ClearLog {
            space,
            id,
            first,
            pages,
            pattern,
        }
    }

    fn region(&mut self, model: &GuestModel) -> Region {
        let (n, shift) = (self.entries, self.granule.shift());
        let existing = self.some_slot(model);
        let missing = self.setup.many_slots && model.slots.len() < MANY;
        let region = match (self.rng.below(10), existing) {
            (0..9, _) if missing => self.fresh(),
            (0..2, Some(id)) => self.existing(model, id, |region, _| region.size = 0),
            (2..4, Some(id)) => self.existing(model, id, |region, rng| {
                let by = rng.pick(&[1, 2, n, n + 188, n * n]) << shift;
                let up = rng.one_in(2);
                let gpa = region.gpa.0;
                region.gpa.0 = if up { gpa + by } else { gpa.saturating_sub(by) };
            }),
            (4..7, Some(id)) => self.existing(model, id, |region, rng| {
                region.flags.0 ^= rng.pick(&[1, 1, 1, 1, 2, 3, 0]);
                if rng.one_in(24) {
                    region.rights = rng.pick(&RIGHTS);
                }
                if rng.one_in(24) {
                    region.memory = rng.pick(&MEMORY);
                }
            }),
            _ => self.fresh(),
        };
        if self.rng.one_in(12) {
            self.spoil(region)
        } else {
            region
        }
    }

    /// Returns changes of several slots at once: combinations that VMMs use, and random ones.
    fn regions(&mut self, model: &GuestModel) -> Vec<Change> {
        let first = self.some_slot(model).map(|id| (id, model.slots[&id]));
        let second = self.some_slot(model).map(|id| (id, model.slots[&id]));
        match (self.rng.below(8), first, second) {
            (0..3, Some((id, slot)), _) if slot.pages > 1 => self.cut(id, slot),
            (3, Some(_), _) => self.join(model),
            (4, Some((id, slot)), Some((other, its))) if id != other => vec![
                self.set(
                    id,
                    ModelSlot {
                        base: its.base,
                        ..slot
                    },
                ),
                self.set(
                    other,
                    ModelSlot {
                        base: slot.base,
                        ..its
                    },
                ),
            ],
            (5, Some((id, slot)), Some((other, its))) if id != other => {
                let by = self.rng.pick(&[1, self.entries, self.entries + 188]);
                vec![
                    self.set(
                        id,
                        ModelSlot {
                            base: slot.base + by,
                            ..slot
                        },
                    ),
                    self.set(
                        other,
                        ModelSlot {
                            base: its.base + by,
                            ..its
                        },
                    ),
                ]
            }
            (6, Some((id, _)), _) => {
                let fresh = Change::Set(self.fresh());
                vec![Change::Remove(id), fresh]
            }
            _ => (0..self.rng.below(4))
                .map(|_| match self.some_slot(model) {
                    Some(id) if self.rng.one_in(3) => Change::Remove(id),
                    _ => Change::Set(self.region(model)),
                })
                .collect(),
        }
    }

    /// Cuts a slot in two, with or without a hole in between; or shortens the slot at one end.
    fn cut(&mut self, id: u32, slot: ModelSlot) -> Vec<Change> {
        let at = 1 + self.rng.below(slot.pages - 1);
        let at = match self.rng.one_in(3) {
            true => at,
            false => (at & !(self.entries - 1)).max(1),
        };
        let hole = self
            .rng
            .pick(&[0, 0, 1, 7, self.entries])
            .min(slot.pages - at);
        let lower = ModelSlot { pages: at, ..slot };
        let upper = ModelSlot {
            base: slot.base + at + hole,
            pages: slot.pages - at - hole,
            backing: slot.backing + ((at + hole) << self.granule.shift()),
            ..slot
        };
        let other = self.rng.below(self.ids) as u32;
        match self.rng.below(4) {
            0 => vec![self.set(id, lower)],
            1 if upper.pages > 0 => vec![self.set(id, upper)],
            _ if upper.pages > 0 => vec![self.set(id, lower), self.set(other, upper)],
            _ => vec![self.set(id, lower)],
        }
    }

    /// Joins two slots that are next to each other and were cut from one slot.
    fn join(&mut self, model: &GuestModel) -> Vec<Change> {
        let mut pairs = Vec::new();
        for (id, slot) in &model.slots {
            let next = model.slot_at(slot.base + slot.pages);
            pairs.extend(next.map(|(other, next)| (*id, slot, other, next)));
        }
        pairs.retain(|(_, slot, _, next)| {
            let limits = |slot: &ModelSlot| (slot.rights, slot.memory);
            next.backing == slot.backing + (slot.pages << slot.granule.shift())
                && limits(slot) == limits(next)
        });
        if pairs.is_empty() {
            return Vec::new();
        }
        let (id, slot, other, next) = pairs[self.rng.below(pairs.len() as u64) as usize];
        let pages = slot.pages + next.pages;
        vec![
            self.set(id, ModelSlot { pages, ..*slot }),
            Change::Remove(other),
        ]
    }

    /// Sets slot `id` to `slot`. Sometimes the change also starts or stops the slot's dirty logging.
    fn set(&mut self, id: u32, mut slot: ModelSlot) -> Change {
        if self.rng.one_in(5) {
            slot.flags ^= SlotFlags::LOG_DIRTY_PAGES.0;
        }
        Change::Set(slot.region(id))
    }

    fn existing(
        &mut self,
        model: &GuestModel,
        id: u32,
        change: impl FnOnce(&mut Region, &mut Rng),
    ) -> Region {
        let mut region = model.slots[&id].region(id);
        change(&mut region, &mut self.rng);
        region
    }

    fn fresh(&mut self) -> Region {
        let n = self.entries;
        let sizes = [1, 2, 7, 64, n - 1, n, n + 1, 2 * n, 3 * n - 36, 4 * n];
        let giant = self.setup.host_pages >= 2 * n * n && self.rng.one_in(40);
        let pages = if giant {
            n * n + self.rng.pick(&[0, 0, n, 3])
        } else if self.setup.many_slots {
            // Chooses a small size, so that many slots fit into memory.
            self.rng.pick(&sizes[..4])
        } else {
            self.rng.pick(&sizes)
        };
        let base = if giant {
            self.rng.pick(&[n * n, n * n - n, 2 * n * n])
        } else if self.setup.many_slots {
            self.rng.pick(&self.places) + self.rng.below(3 * n - 36)
        } else {
            self.rng.pick(&self.places) + self.rng.pick(&[0, 0, 1, 63, n, n + 1, 2 * n])
        };
        // Most slots have the same offset in huge pages as their host memory, so that huge leaves are possible. Other
        // slots' host memory is shifted by a page, or by the pages of a 2 MiB leaf.
        let room = self.setup.host_pages - pages;
        let skew = self.rng.pick(&[1, Level::MEGA.pages() % n, 0, 0, 0]);
        let unit = if giant { n * n } else { n };
        let backing = self.rng.below(room / unit + 1) * unit + base % unit + skew;
        // Most slots allow reads, writes and fetches, as KVM's writable memslots do.
        let rights = match self.rng.one_in(5) {
            true => self.rng.pick(&RIGHTS),
            false => Rights::ALL,
        };
        let memory = match self.rng.one_in(8) {
            true => self.rng.pick(&MEMORY),
            false => MemoryType::WriteBack,
        };
        Region::new(
            self.rng.below(self.ids) as u32,
            self.granule.gpa(Gfn(base)),
            pages << self.granule.shift(),
            self.granule.add_pages(HostMemory::BASE, backing.min(room)),
        )
        .with_flags(SlotFlags(self.rng.pick(&[0, 0, 0, 1, 1, 2, 3])))
        .with_rights(rights)
        .with_memory(memory)
    }

    fn spoil(&mut self, mut region: Region) -> Region {
        let shift = self.granule.shift();
        match self.rng.below(9) {
            0 => region.gpa.0 |= 1 << self.rng.below(shift.into()),
            1 => region.size |= 1 << self.rng.below(shift.into()),
            2 => region.backing.0 |= 1 << self.rng.below(shift.into()),
            3 => region.slot = self.rng.pick(&[MAX_SLOTS, MAX_SLOTS + 1, u32::MAX]),
            4 => region.flags.0 |= 1 << (2 + self.rng.below(30)),
            5 => region.gpa.0 = u64::MAX << shift,
            6 => region.gpa.0 = self.rng.pick(&[self.capacity, self.capacity - 1]) << shift,
            7 => region.size = self.rng.pick(&[1u64 << 31, u64::MAX >> shift]) << shift,
            _ => region.backing.0 = u64::MAX << shift,
        }
        region
    }

    /// Returns a conversion (KVM_SET_MEMORY_ATTRIBUTES): some frames become private or shared, or all frames become
    /// shared again. Otherwise ever more frames would be private, and private frames prevent all other operations.
    fn convert(&mut self, model: &GuestModel) -> Op {
        if self.rng.one_in(4) {
            let (gfn, pages, private) = (0, self.capacity, false);
            return Op::Convert {
                gfn,
                pages,
                private,
            };
        }
        let n = self.entries;
        let align = self.rng.pick(&[1, 1, n]);
        let gfn = self.gfn(model) & !(align - 1);
        let pages = align * self.rng.pick(&[1, 2, 7, 0]);
        let private = !self.rng.one_in(3);
        Op::Convert {
            gfn,
            pages,
            private,
        }
    }

    fn invalidate(&mut self, models: &[GuestModel]) -> Op {
        let model = self.rng.pick(&[&models[0], &models[0], &models[1]]);
        // Chooses mapped memory, if there is any.
        let anchor = match self.some_slot(model) {
            Some(id) => {
                let slot = &model.slots[&id];
                slot.host_page(slot.base) + self.rng.below(slot.pages)
            }
            None => self.rng.below(self.setup.host_pages),
        };
        let n = self.entries;
        let (start, pages) = match self.rng.below(8) {
            0..3 => (anchor, self.rng.pick(&[1, 2, 9])),
            3..6 => (anchor & !(n - 1), n * self.rng.pick(&[1, 2, 4])),
            6 => (anchor & !(n * n - 1), n * n),
            _ => (anchor, self.rng.below(3 * n - 36) + 1),
        };
        let start = start.min(self.setup.host_pages - 1);
        let pages = start..(start + pages).min(self.setup.host_pages);
        let change = match self.rng.below(16) {
            0 => HostChange::Nothing,
            1 => HostChange::Punch,
            2 => HostChange::Await,
            3 => HostChange::Protect {
                writable: self.rng.one_in(2),
            },
            _ => HostChange::Remap {
                level: self.rng.pick(&[Level::PAGE, Level::MEGA, Level::GIGA]),
                writable: !self.rng.one_in(6),
                kind: match self.rng.one_in(8) {
                    true => self.rng.pick(&PageKind::ALL),
                    false => PageKind::Ordinary,
                },
            },
        };
        let during = (0..self.rng.below(4))
            .map(|_| (self.gfn(&models[0]), self.rng.pick(&ACCESSES)))
            .collect();
        Op::Invalidate {
            pages,
            change,
            during,
        }
    }
}
