//! Generates operations on a guest. The operations use few tables and few addresses, so that most operations interact.

mod entries;

use std::ops::Range;

use slat::guest_walk::Mode;
use slat::{Access, Gpa, Level, MemoryType, Rights, SlotFlags};

use super::CPUS;
use super::entry::{A, D, P, RW, US};
use super::layout::*;
use super::mmu::Invpcid;
use super::ops::{Control, GuestOp, How, Target};
use super::registers::{CR4_PCIDE, Privilege};
use super::runner::Runner;
use crate::host::{HostChange, PageKind};
use crate::rng::Rng;

const ACCESSES: [Access; 5] = [
    Access::Read,
    Access::Read,
    Access::Write,
    Access::Write,
    Access::Execute,
];

/// The values of PKRU. The first two values forbid nothing. The third value forbids all accesses for odd keys. The
/// fourth value forbids writes for all keys except key 0.
const KEYS: [u32; 4] = [0, 0, 0x4444_4444, 0xaaaa_aaa8];

/// Chooses operations that fit the current state of a run.
pub(super) struct Generator {
    rng: Rng,
    /// Whether the VMM, too, writes guest memory.
    client: bool,
    /// The addresses in use, as indices at levels 5 to 1.
    addresses: Vec<[u64; 5]>,
    /// The number of address spaces.
    spaces: u64,
    /// The next operations, in reverse order.
    planned: Vec<GuestOp>,
}

impl Generator {
    pub fn new(mut rng: Rng, client: bool) -> Self {
        let addresses = (0..ADDRESSES).map(|_| indices(&mut rng)).collect();
        let spaces = 2 + rng.below(SPACES - 1);
        let mut generator = Generator {
            rng,
            client,
            addresses,
            spaces,
            planned: Vec::new(),
        };
        generator.plan_start();
        generator
    }

    /// Plans the first operations: the creation of slots, stores that fill the tables, and changes to the first paging
    /// modes.
    fn plan_start(&mut self) {
        for cpu in 0..CPUS {
            let mode = self.set_mode(cpu);
            self.planned.push(mode);
        }
        // The tables in this slot are written before the slot becomes read-only.
        let read_only = region(READ_ONLY, 0);
        self.planned.push(GuestOp::SetRegion(read_only));
        let deleted = read_only.with_size(0);
        self.planned.push(GuestOp::SetRegion(deleted));
        let tables = (0..POINTERS + 1).chain(frames_of(READ_ONLY).take(2));
        for frame in tables {
            for index in indices_in(frame) {
                let (gpa, operand) = self.entries(frame, *index, 0);
                self.planned.push(GuestOp::Store {
                    cpu: 0,
                    target: Target::Physical(gpa),
                    how: How::Mov,
                    operand,
                    bytes: 8,
                });
            }
        }
        for slot in 0..SLOTS.len() {
            let writable = region(slot, 0).with_flags(SlotFlags(0));
            self.planned.push(GuestOp::SetRegion(writable));
        }
    }

    /// Returns the next operation.
    pub fn next_op(&mut self, runner: &Runner) -> GuestOp {
        if let Some(op) = self.planned.pop() {
            return op;
        }
        if self.rng.one_in(40) {
            let i = self.rng.below(ADDRESSES as u64) as usize;
            self.addresses[i] = indices(&mut self.rng);
        }
        let cpu = self.rng.below(CPUS as u64) as usize;
        match self.rng.below(1000) {
            0..480 => self.access(cpu, runner),
            480..700 => self.store(cpu, runner),
            700..770 => self.stale_use(cpu, runner),
            770..830 => GuestOp::Invlpg {
                cpu,
                gva: self.gva(cpu, runner),
            },
            830..860 => self.invpcid(cpu, runner),
            860..930 => self.load_cr3(cpu, runner),
            930..955 => self.toggle(cpu),
            955..962 => self.set_mode(cpu),
            962..975 => self.slot_change(runner),
            975..985 => self.host_change(runner),
            985..990 => GuestOp::DirtyLog {
                slot: self.rng.below(SLOTS.len() as u64) as u32,
            },
            990..998 => self.client_store(cpu, runner),
            _ => GuestOp::Audit,
        }
    }

    /// Returns a virtual address for the paging mode of the vCPU: mostly one of the addresses in use.
    fn gva(&mut self, cpu: usize, runner: &Runner) -> u64 {
        let offset = self.rng.pick(&[0, 0, 0x18, 0xff4, 0xff8]) + self.rng.below(8);
        let [i5, i4, i3, i2, i1] = self.rng.pick(&self.addresses);
        match runner.registers(cpu).mode() {
            // Without paging, the address is physical: in the frame of a table, or in another frame.
            None => self.rng.below(64) << 12 | offset,
            Some(Mode::Bits32 { .. }) => {
                let at = |i: u64| INDICES_OF_4[(i % 7) as usize];
                at(i3 + i2) << 22 | at(i1) << 12 | offset
            }
            Some(Mode::Pae) => (i3 & 3) << 30 | i2 << 21 | i1 << 12 | offset,
            Some(_) => i5 << 48 | i4 << 39 | i3 << 30 | i2 << 21 | i1 << 12 | offset,
        }
    }

    fn privilege(&mut self) -> Privilege {
        Privilege {
            user: self.rng.one_in(2),
            ac: self.rng.one_in(2),
            pkru: self.rng.pick(&KEYS),
        }
    }

    fn access(&mut self, cpu: usize, runner: &Runner) -> GuestOp {
        GuestOp::Access {
            cpu,
            gva: self.gva(cpu, runner),
            access: self.rng.pick(&ACCESSES),
            privilege: self.privilege(),
        }
    }

    /// Returns a store: to an entry of a table, or to the page to which an address is mapped.
    fn store(&mut self, cpu: usize, runner: &Runner) -> GuestOp {
        let (frame, page) = match self.rng.one_in(2) {
            true => (self.table(runner, cpu), None),
            false => {
                let gva = self.gva(cpu, runner);
                let frame = runner.frame_at(cpu, gva).unwrap_or(gva >> 12);
                (frame, Some(gva & !0xfff))
            }
        };
        let index = self.rng.pick(indices_in(frame));
        // Mostly, whole entries are stored. Otherwise, a part of one entry, or parts of two entries.
        let (offset, bytes) = match self.rng.below(8) {
            0..4 => (0, 8),
            4 => (0, 4),
            5 => (self.rng.below(8), 1 + self.rng.below(8)),
            6 => (self.rng.pick(&[0, 7]), 1),
            _ => (self.rng.pick(&[2, 4, 6]), 8),
        };
        let how = self.rng.pick(&[
            How::Mov,
            How::Mov,
            How::CompareExchange,
            How::CompareExchange,
            How::FailedCompareExchange,
            How::LockedOr,
        ]);
        let (gpa, mut operand) = self.entries(frame, index, offset);
        if how == How::LockedOr {
            operand = self.rng.pick(&[P, RW, US, A, D, A | D]).to_le_bytes();
        }
        let target = match page {
            None => Target::Physical(gpa),
            Some(page) => Target::Virtual(page | gpa & 0xfff, self.privilege()),
        };
        GuestOp::Store {
            cpu,
            target,
            how,
            operand,
            bytes: bytes as usize,
        }
    }

    /// Plans accesses to one address before and after a store to an entry that translates the address. There may be a
    /// flush after the store.
    fn stale_use(&mut self, cpu: usize, runner: &Runner) -> GuestOp {
        let gva = self.gva(cpu, runner);
        let path = runner.path_to(cpu, gva);
        if path.is_empty() {
            return self.access(cpu, runner);
        }
        let gpa = self.rng.pick(&path);
        let privilege = self.privilege();
        let access = |access| GuestOp::Access {
            cpu,
            gva,
            access,
            privilege,
        };
        for _ in 0..2 {
            let kind = self.rng.pick(&ACCESSES);
            self.planned.push(access(kind));
        }
        match self.rng.below(8) {
            0 => self.planned.push(GuestOp::Invlpg { cpu, gva }),
            1 => {
                let other = self.gva(cpu, runner);
                self.planned.push(GuestOp::Invlpg { cpu, gva: other });
            }
            2 => {
                let pcid = runner.registers(cpu).pcid();
                let invpcid = Invpcid::Address { pcid, gva };
                self.planned.push(GuestOp::Invpcid { cpu, invpcid });
            }
            3 => {
                let invpcid = self.invpcid(cpu, runner);
                self.planned.push(invpcid);
            }
            4 => {
                let load = self.load_cr3(cpu, runner);
                self.planned.push(load);
            }
            5 => {
                let toggle = self.toggle(cpu);
                self.planned.push(toggle);
            }
            _ => {}
        }
        let frame = gpa >> 12;
        let (_, operand) = self.entries(frame, 0, 0);
        self.planned.push(GuestOp::Store {
            cpu: self.rng.below(CPUS as u64) as usize,
            target: Target::Physical(gpa),
            how: How::Mov,
            operand,
            bytes: entry_size(frame),
        });
        let first = self.rng.pick(&ACCESSES);
        access(first)
    }

    /// Returns a frame that serves as a table in the vCPU's paging mode.
    fn table(&mut self, runner: &Runner, cpu: usize) -> u64 {
        match runner.registers(cpu).mode() {
            _ if self.rng.one_in(16) => self.rng.below(64),
            Some(Mode::Pae) if self.rng.one_in(8) => POINTERS,
            Some(Mode::Bits32 { .. }) => in_range(&mut self.rng, &TABLES_OF_4.all()),
            _ => in_range(&mut self.rng, &TABLES_OF_8.all()),
        }
    }

    fn invpcid(&mut self, cpu: usize, runner: &Runner) -> GuestOp {
        let pcid = self.rng.below(self.spaces) as u16;
        let invpcid = match self.rng.below(16) {
            0..8 => Invpcid::Address {
                pcid,
                gva: self.gva(cpu, runner),
            },
            8..12 => Invpcid::Context { pcid },
            12..14 => Invpcid::AllButGlobal,
            _ => Invpcid::All,
        };
        GuestOp::Invpcid { cpu, invpcid }
    }

    /// Returns a root for `mode`, with a PCID, which is the number of the address space. Two address spaces may have
    /// the same root, and sometimes a PCID gets another root.
    fn cr3(&mut self, mode: Mode, pcids: bool) -> u64 {
        let space = self.rng.below(self.spaces);
        let root = match self.rng.one_in(16) {
            true => self.rng.below(SPACES),
            false => space,
        };
        let among = |frames: Range<u64>| frames.start + root % (frames.end - frames.start);
        match mode {
            Mode::Bits32 { .. } => among(TABLES_OF_4.directories) << 12,
            Mode::Pae => POINTERS << 12 | (root & 3) << 5,
            Mode::Level4 | Mode::Level5 => {
                among(TABLES_OF_8.roots) << 12 | if pcids { space } else { 0 }
            }
        }
    }

    fn load_cr3(&mut self, cpu: usize, runner: &Runner) -> GuestOp {
        let registers = runner.registers(cpu);
        let pcids = registers.cr4 & CR4_PCIDE != 0;
        // Without PCIDs, bits 3 and 4 of CR3 (PWT and PCD) are not part of the address, so they may be set.
        let ignored = match !pcids && self.rng.one_in(8) {
            true => 0x18,
            false => 0,
        };
        GuestOp::LoadCr3 {
            cpu,
            cr3: self.cr3(registers.mode().unwrap_or(Mode::Level4), pcids) | ignored,
            keep: !self.rng.one_in(3),
        }
    }

    fn toggle(&mut self, cpu: usize) -> GuestOp {
        let control = self.rng.pick(&[
            Control::WriteProtect,
            Control::WriteProtect,
            Control::GlobalPages,
            Control::Pcids,
            Control::Pcids,
            Control::Smep,
            Control::Smep,
            Control::Smap,
            Control::Smap,
            Control::ProtectionKeys,
            Control::ProtectionKeys,
            Control::NoExecute,
        ]);
        GuestOp::Toggle { cpu, control }
    }

    fn set_mode(&mut self, cpu: usize) -> GuestOp {
        let mode = self.rng.pick(&[
            None,
            Some(Mode::Bits32 { pse: false }),
            Some(Mode::Bits32 { pse: true }),
            Some(Mode::Bits32 { pse: true }),
            Some(Mode::Pae),
            Some(Mode::Pae),
            Some(Mode::Level4),
            Some(Mode::Level4),
            Some(Mode::Level4),
            Some(Mode::Level5),
            Some(Mode::Level5),
        ]);
        let cr3 = self.cr3(mode.unwrap_or(Mode::Level4), false);
        if let Some(mode) = mode
            && matches!(mode, Mode::Level4 | Mode::Level5)
            && self.rng.one_in(2)
        {
            let control = Control::Pcids;
            self.planned.push(GuestOp::Toggle { cpu, control });
        }
        GuestOp::SetMode { cpu, mode, cr3 }
    }

    /// Changes a slot, and plans to change it back. In between, the slot is deleted, has other host memory or other
    /// rights, or is at another address. Or its dirty logging starts or stops.
    fn slot_change(&mut self, runner: &Runner) -> GuestOp {
        let slot = self.rng.below(SLOTS.len() as u64) as usize;
        let home = region(slot, 0);
        let found = runner.regions().find(|region| region.slot == slot as u32);
        let Some(region) = found else {
            return GuestOp::SetRegion(home);
        };
        let deleted = region.with_size(0);
        let changes = match self.rng.below(9) {
            0 => vec![deleted, home],
            1 => {
                let other = self::region(slot, SLOTS[slot].pages);
                vec![deleted, other, other.with_size(0), home]
            }
            2 => {
                let toggled = SlotFlags(home.flags.0 ^ SlotFlags::READONLY.0);
                let toggled = home.with_flags(toggled);
                vec![deleted, toggled, toggled.with_size(0), home]
            }
            3 => vec![region.with_gpa(Gpa(region.gpa.0 ^ 1 << 12)), region],
            4 => vec![region.with_gpa(Gpa(ELSEWHERE << 12)), region],
            5 => {
                let rights = Rights::READ.with_write(self.rng.one_in(2));
                let rights = rights.with_execute(self.rng.one_in(4));
                let memory = self
                    .rng
                    .pick(&[MemoryType::WriteBack, MemoryType::WriteCombining]);
                let limited = home.with_rights(rights).with_memory(memory);
                vec![deleted, limited, deleted, home]
            }
            _ => {
                let log = SlotFlags::LOG_DIRTY_PAGES.0;
                vec![region.with_flags(SlotFlags(region.flags.0 ^ log))]
            }
        };
        for region in changes[1..].iter().rev() {
            self.planned.push(GuestOp::SetRegion(*region));
            self.plan_accesses(runner);
        }
        GuestOp::SetRegion(changes[0])
    }

    /// Plans accesses while the slot, or a page of it, is missing.
    fn plan_accesses(&mut self, runner: &Runner) {
        for _ in 0..self.rng.below(12) {
            let cpu = self.rng.below(CPUS as u64) as usize;
            let op = match self.rng.one_in(4) {
                true => self.store(cpu, runner),
                false => self.access(cpu, runner),
            };
            self.planned.push(op);
        }
    }

    fn host_change(&mut self, runner: &Runner) -> GuestOp {
        let first = match self.rng.one_in(2) {
            true => self.rng.below(POINTERS + 1) * 2,
            false => self.rng.below(HOST_PAGES),
        };
        let pages = first..(first + self.rng.pick(&[1, 1, 4, 32])).min(HOST_PAGES);
        let writable = self.rng.one_in(2);
        let change = match self.rng.one_in(3) {
            true => HostChange::Protect { writable },
            false => HostChange::Remap {
                level: Level::PAGE,
                writable,
                kind: PageKind::Ordinary,
            },
        };
        if !writable {
            // The memory becomes writable again soon, because most accesses have to set a flag in an entry.
            let writable = true;
            self.planned.push(GuestOp::Invalidate {
                pages: pages.clone(),
                change: HostChange::Protect { writable },
            });
            self.plan_accesses(runner);
        }
        GuestOp::Invalidate { pages, change }
    }

    fn client_store(&mut self, cpu: usize, runner: &Runner) -> GuestOp {
        match self.store(cpu, runner) {
            GuestOp::Store {
                target: Target::Physical(gpa),
                operand,
                bytes,
                ..
            } if self.client => GuestOp::ClientStore {
                gpa,
                operand,
                bytes,
            },
            store => store,
        }
    }
}

/// Returns the indices of an address, at levels 5 to 1.
fn indices(rng: &mut Rng) -> [u64; 5] {
    [
        rng.pick(&[0, 1, 511]),
        rng.pick(&[0, 1, 2, 511]),
        rng.pick(&INDICES),
        rng.pick(&INDICES),
        rng.pick(&INDICES),
    ]
}
