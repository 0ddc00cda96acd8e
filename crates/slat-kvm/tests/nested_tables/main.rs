//! A hypervisor whose nested tables, and whose guest's tables, are random, and change at random: all that is between them and the host's
//! memory runs, the CPU with its TLB, the walk in two dimensions, and the engine's shadow of the nested tables.
//!
//! Two vCPUs share memory. The hypervisor and its guest store to the tables of both dimensions, some of which are one another's; they flush,
//! by TLB_CONTROL, INVLPGA, INVLPG and MOV to CR3, or they do not; memslots come, go, and become read-only. Each access of the guest comes
//! to what the manual allows (`oracle`), and sets the flags that it has to, and no others without reason.
//!
//! `cargo test -p slat-kvm --release --test nested_tables`, with SLAT_STEPS=…, SLAT_SEED=… and SLAT_MMU=… for another number of accesses,
//! other seeds, and one MMU.

#[path = "../common/mod.rs"]
mod common;
mod layout;
mod oracle;

use common::{Memory, set_msr, tell_features};
use kvm_bindings::*;
use layout::*;
use oracle::{Access, Kind, Marks, Outcome, Since, Tables, Time};
use slat::MmuKind;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::collections::{BTreeSet, HashMap};

const CPUS: usize = 2;
/// The ASIDs that guests have.
const ASIDS: u64 = 3;
/// Accesses of a run.
const RUN: u64 = 20_000;

const VM_HSAVE_PA: u32 = 0xc001_0117;
const EFER: u64 = 1 << 12 | 1 << 11 | 1 << 10 | 1 << 8;
const CR0: u64 = 1 << 31 | 1 << 4 | 1;
const CR0_WP: u64 = 1 << 16;
const CR4_PAE: u64 = 1 << 5;

/// Exit codes.
const PAGE_FAULT: u64 = 0x4e;
const VMMCALL: u64 = 0x81;
const NESTED_FAULT: u64 = 0x400;

/// When a vCPU has flushed an ASID last.
#[derive(Clone, Default)]
struct Flushed {
    all: Time,
    /// The guest's own translations, but not those of nested tables.
    guest: Time,
    /// Of single pages: the guest's own, and both.
    guest_page: HashMap<u64, Time>,
    page: HashMap<u64, Time>,
}

impl Flushed {
    fn since(&self, address: u64) -> Since {
        let of = |pages: &HashMap<u64, Time>| *pages.get(&(address / PAGE)).unwrap_or(&0);
        let nested = self.all.max(of(&self.page));
        Since {
            guest: nested.max(self.guest).max(of(&self.guest_page)),
            nested,
        }
    }

    fn all(now: Time) -> Self {
        Flushed {
            all: now,
            ..Flushed::default()
        }
    }
}

struct Machine {
    vcpus: Vec<VcpuFd>,
    vm: VmFd,
    memory: Memory,
    random: Random,
    tables: Tables,
    now: Time,
    flushed: Vec<Vec<Flushed>>,
    /// Pages that the guest has accessed lately.
    recent: [u64; 4],
    /// The entries that the last access may have used.
    used: Vec<u64>,
    /// What entries are in memory.
    copies: HashMap<u64, u64>,
    counts: HashMap<&'static str, u64>,
}

fn segment(code: bool, user: bool) -> kvm_segment {
    kvm_segment {
        selector: if user { 11 } else { 8 },
        limit: u32::MAX,
        type_: if code { 11 } else { 3 },
        present: 1,
        dpl: if user { 3 } else { 0 },
        s: 1,
        l: code.into(),
        db: (!code).into(),
        g: 1,
        ..Default::default()
    }
}

/// Returns the first word of a segment in a control block.
fn packed(segment: &kvm_segment) -> u64 {
    let attributes = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7
        | u64::from(segment.l) << 9
        | u64::from(segment.db) << 10
        | u64::from(segment.g) << 11;
    u64::from(segment.selector) | attributes << 16 | u64::from(segment.limit) << 32
}

impl Machine {
    fn new(mmu: MmuKind, seed: u64) -> Self {
        let vm = Kvm::new().unwrap().with_mmu(mmu).create_vm().unwrap();
        let memory = Memory::new((POOL + POOL_PAGES * PAGE) as usize);
        let vcpus = (0..CPUS as u64).map(|id| vm.create_vcpu(id).unwrap());
        let mut machine = Machine {
            vcpus: vcpus.collect(),
            vm,
            memory,
            random: Random(seed | 1 << 63),
            tables: Tables::default(),
            now: 0,
            flushed: vec![vec![Flushed::default(); ASIDS as usize + 1]; CPUS],
            recent: [1 << 39; 4],
            used: Vec::new(),
            copies: HashMap::new(),
            counts: HashMap::new(),
        };
        machine.fill();
        machine.set_slot(0, 0, SYSTEM_BYTES, 0);
        (0..machine.tables.slots.len()).for_each(|slot| machine.create(slot, false));
        for vcpu in &machine.vcpus {
            tell_features(vcpu);
            let mut sregs = vcpu.get_sregs().unwrap();
            (sregs.cr0, sregs.cr3, sregs.cr4) = (CR0 | CR0_WP, OWN, CR4_PAE);
            sregs.efer = EFER;
            sregs.cs = segment(true, false);
            let data = segment(false, false);
            (sregs.ds, sregs.es, sregs.ss) = (data, data, data);
            vcpu.set_sregs(&sregs).unwrap();
            assert!(set_msr(vcpu, VM_HSAVE_PA, HOST_SAVE));
        }
        machine
    }

    /// Writes memory before the vCPUs run.
    fn fill(&mut self) {
        for (at, code) in [
            (VMRUN, &b"\x0f\x01\xd8\xf4"[..]),
            (INVLPGA, b"\x0f\x01\xdf\xf4"),
            (STORE, b"\x48\x89\x37\xf4"),
            (LOAD, b"\x48\x8b\x07\x0f\x01\xd9"),
            (NESTED_STORE, b"\x48\x89\x37\x0f\x01\xd9"),
            (JUMP, b"\xff\xe7"),
            (INVLPG, b"\x0f\x01\x3f\x0f\x01\xd9"),
            (LOAD_CR3, b"\x0f\x20\xd8\x0f\x22\xd8\x0f\x01\xd9"),
        ] {
            self.memory.write(at, code);
        }
        let own = P | RW | A | D;
        self.put(OWN, (OWN + PAGE) | own);
        self.put(OWN + PAGE, (OWN + 2 * PAGE) | own);
        for n in 0..2 {
            self.put(OWN + 2 * PAGE + 8 * n, n << 21 | PS | own);
        }
        for root in [GUEST_ROOT, NESTED_ROOT] {
            for level in 0..3 {
                self.set_entry(root + level * PAGE, (root + (level + 1) * PAGE) | US | own);
            }
        }
        self.set_entry(GUEST_ROOT + 3 * PAGE + 8 * (LOAD / PAGE), LOAD | US | own);
        for page in (LOAD..GUEST_ROOT + 4 * PAGE).step_by(PAGE as usize) {
            self.set_entry(NESTED_ROOT + 3 * PAGE + 8 * (page / PAGE), page | US | own);
        }
        for page in reached() {
            let name = (page / PAGE) as u32;
            self.memory.write(page + CODE_AT, &[0xb8]);
            (self.memory).write(page + CODE_AT + 1, &name.to_le_bytes());
            self.memory.write(page + CODE_AT + 5, b"\x0f\x01\xd9");
            self.put(page + NAME_AT, name.into());
        }
        for at in entries().filter(|at| changes(*at)) {
            let entry = match at {
                0..LOAD => 0,
                _ => self.random.entry(at),
            };
            self.set_entry(at, entry);
        }
        for at in entries() {
            self.copies.insert(at, self.get(at));
        }
    }

    fn put(&self, at: u64, value: u64) {
        self.memory.write(at, &value.to_le_bytes());
    }

    fn get(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn set_entry(&mut self, at: u64, entry: u64) {
        self.put(at, entry);
        self.tables.store(0, at, entry);
    }

    fn set_slot(&self, slot: u32, gpa: u64, size: u64, flags: u32) {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: gpa,
            memory_size: size,
            userspace_addr: self.memory.start as u64 + gpa,
        };
        // SAFETY: memory of the test, which outlives the VM's use of it.
        unsafe { self.vm.set_user_memory_region(region) }.unwrap();
    }

    fn create(&mut self, slot: usize, is_read_only: bool) {
        let gpa = POOL + slot as u64 * SLOT_PAGES * PAGE;
        let flags = if is_read_only { KVM_MEM_READONLY } else { 0 };
        self.set_slot(slot as u32 + 1, gpa, SLOT_PAGES * PAGE, flags);
        self.tables.slots[slot] = Some(is_read_only);
    }

    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Runs the hypervisor from `rip` to its HLT. Returns the address of the device access on the way.
    fn run(&mut self, cpu: usize, rip: u64, registers: kvm_regs) -> Option<u64> {
        let vcpu = &mut self.vcpus[cpu];
        let regs = kvm_regs {
            rip,
            rflags: 2,
            ..registers
        };
        vcpu.set_regs(&regs).unwrap();
        let mut device = None;
        loop {
            match vcpu.run().unwrap() {
                VcpuExit::Hlt => return device,
                VcpuExit::MmioRead(at, data) => {
                    data.fill(0);
                    device = Some(at);
                }
                VcpuExit::MmioWrite(at, _) => device = Some(at),
                other => panic!("{other:?}"),
            }
        }
    }

    /// Has the guest run from `rip` on, with `value` in RSI and the address in RDI. Returns the exit code, the two words of information,
    /// and RAX; and the address of a device access.
    fn run_guest(
        &mut self,
        cpu: usize,
        asid: u64,
        rip: u64,
        access: &Access,
        value: u64,
    ) -> ([u64; 4], Option<u64>) {
        let vmcb = VMCB + cpu as u64 * PAGE;
        let tlb_control = match self.random.below(12) {
            0 => 1,
            1 => 3,
            2 => 7,
            _ => 0,
        };
        self.now += 1;
        match tlb_control {
            0 => {}
            1 => self.flushed[cpu].fill(Flushed::all(self.now)),
            _ => self.flushed[cpu][asid as usize] = Flushed::all(self.now),
        }
        let (code, data) = (segment(true, access.user), segment(false, access.user));
        self.memory.write(vmcb, &[0; PAGE as usize]);
        let wp = if access.write_protect { CR0_WP } else { 0 };
        for (at, word) in [
            (8, 1 << 14),
            (0x10, 3),
            (0x58, asid | tlb_control << 32),
            (0x90, 1),
            (0xb0, NESTED_ROOT),
            (0x400, packed(&data)),
            (0x410, packed(&code)),
            (0x420, packed(&data)),
            (0x430, packed(&data)),
            (0x4c8, if access.user { 3 << 24 } else { 0 }),
            (0x4d0, EFER),
            (0x548, CR4_PAE),
            (0x550, GUEST_ROOT),
            (0x558, CR0 | wp),
            (0x560, 0x400),
            (0x568, 0xffff_0ff0),
            (0x570, 2),
            (0x578, rip),
            (0x668, 0x0007_0406_0007_0406),
        ] {
            self.put(vmcb + at, word);
        }
        let registers = kvm_regs {
            rax: vmcb,
            rdi: access.address,
            rsi: value,
            ..Default::default()
        };
        let device = self.run(cpu, VMRUN, registers);
        (
            [0x70, 0x78, 0x80, 0x5f8].map(|at| self.get(vmcb + at)),
            device,
        )
    }

    /// Returns an address for the guest: half of them are pages that it has accessed lately, and of which something may be kept.
    fn address(&mut self) -> u64 {
        match self.random.one_in(2) {
            true => self.recent[self.random.below(4) as usize],
            false => self.random.address(),
        }
    }

    /// Returns all that an access of the guest with `asid` may come to.
    fn outcomes(&self, cpu: usize, asid: u64, access: &Access) -> BTreeSet<Outcome> {
        let since = self.flushed[cpu][asid as usize].since(access.address);
        self.tables.outcomes(access, since).0
    }

    /// Has the guest make a random access, and judges what comes of it.
    fn access(&mut self, cpu: usize) {
        let address = self.address();
        let random = &mut self.random;
        let asid = match random.below(3) {
            0 => 1 + random.below(ASIDS),
            _ => 1,
        };
        let mut access = Access {
            address,
            kind: [Kind::Read, Kind::Write, Kind::Execute][random.below(3) as usize],
            user: random.one_in(3),
            write_protect: random.one_in(2),
        };
        // Most addresses lead to no page: a few are tried.
        let mut all = self.outcomes(cpu, asid, &access);
        for _ in 0..self.random.below(12) {
            if (all.iter()).any(|outcome| matches!(outcome, Outcome::Page(_) | Outcome::Mmio(_))) {
                break;
            }
            access.address = self.random.address();
            all = self.outcomes(cpu, asid, &access);
        }
        let replaced = self.random.below(4) as usize;
        self.recent[replaced] = access.address;
        if (all.iter()).any(|outcome| matches!(outcome, Outcome::Mmio(_)))
            && access.kind == Kind::Execute
        {
            // No instruction is fetched from a device.
            access.kind = Kind::Read;
        }
        let random = &mut self.random;
        let is_entry = access.kind == Kind::Write && random.one_in(2);
        let (rip, offset) = match access.kind {
            Kind::Read => (LOAD, NAME_AT),
            Kind::Execute => (JUMP, CODE_AT),
            Kind::Write if is_entry => (NESTED_STORE, 8 * random.below(USED)),
            Kind::Write => (NESTED_STORE, DATA_AT),
        };
        access.address |= offset;
        let value = match is_entry {
            true => {
                let like = random.entry_address();
                random.entry(like)
            }
            false => random.next(),
        };
        let before: Vec<u64> = reached().map(|page| self.get(page + DATA_AT)).collect();
        let ([code, info_1, info_2, rax], device) = self.run_guest(cpu, asid, rip, &access, value);
        let since = self.flushed[cpu][asid as usize].since(access.address);
        let (allowed, marks) = self.tables.outcomes(&access, since);
        self.used = marks.keys().copied().filter(|at| changes(*at)).collect();
        let is_flushed = since.nested == self.now;
        let written = self.look_at_entries(&marks, (offset, value), &allowed, is_entry);
        let outcome = match (code, access.kind) {
            (VMMCALL, _) if device.is_some() => Outcome::Mmio(device.unwrap()),
            (VMMCALL, Kind::Write) if is_entry => Outcome::Page(written.expect("a store")),
            (VMMCALL, Kind::Write) => {
                let changed = reached().zip(before);
                let mut changed = changed.filter(|(page, old)| self.get(page + DATA_AT) != *old);
                let (page, _) = changed.next().expect("a store");
                assert!(changed.next().is_none() && self.get(page + DATA_AT) == value);
                Outcome::Page(page / PAGE)
            }
            (VMMCALL, _) => Outcome::Page(rax),
            (PAGE_FAULT, _) => {
                assert_eq!(info_2, access.address);
                Outcome::PageFault(info_1)
            }
            (NESTED_FAULT, _) => Outcome::NestedFault(info_1, info_2),
            _ => panic!("exit code {code:#x}: {info_1:#x}, {info_2:#x}"),
        };
        assert!(
            allowed.contains(&outcome),
            "vCPU {cpu}, {access:x?}: {outcome:x?}, allowed: {allowed:x?}; {:x?}",
            self.path(access.address)
        );
        if is_flushed && !is_entry && matches!(outcome, Outcome::Page(_)) {
            self.check_flags(&marks);
        }
        self.count("access");
        self.count(match outcome {
            Outcome::Page(_) => "page",
            Outcome::Mmio(_) => "device",
            Outcome::PageFault(_) => "page fault",
            Outcome::NestedFault(info, _) if info >> 33 != 0 => "nested fault at a table",
            Outcome::NestedFault(..) => "nested fault at a page",
        });
        if allowed.len() > 1 {
            self.count("several outcomes");
        }
    }

    /// Checks that the flags of `marks` are set, those of an access that has reached a page with nothing known from before.
    fn check_flags(&mut self, marks: &Marks) {
        for (at, flags) in marks {
            let entry = self.get(*at);
            assert!(
                entry & flags == *flags || self.tables.memory(*at) == Some(true),
                "the entry at {at:#x} is {entry:#x}, without {flags:#x}"
            );
        }
        self.count("flags checked");
    }

    /// Returns the entries of the guest's tables for `address`, as far as their tables are where they would be without nested tables.
    fn path(&self, address: u64) -> Vec<(u64, u64)> {
        let mut table = GUEST_ROOT;
        let mut path = Vec::new();
        for level in (1..=4).rev() {
            let at = table + 8 * (address >> (12 + 9 * (level - 1)) & 511);
            if at >= self.memory.len as u64 {
                break;
            }
            let entry = self.get(at);
            path.push((at, entry));
            table = entry & ADDRESS;
        }
        path
    }

    /// Looks which entries have changed: flags of those in `marks`, and one that a store has written. Returns the page of that.
    fn look_at_entries(
        &mut self,
        marks: &Marks,
        (offset, value): (u64, u64),
        allowed: &BTreeSet<Outcome>,
        is_entry: bool,
    ) -> Option<u64> {
        let can_store = |at: u64| {
            is_entry && at % PAGE == offset && allowed.contains(&Outcome::Page(at / PAGE))
        };
        let mut written = None;
        let mut same = None;
        self.now += 1;
        for at in entries() {
            let (old, new) = (self.copies[&at], self.get(at));
            if new == value && can_store(at) {
                match new == old {
                    true => same = Some(at),
                    false => {
                        self.tables.store(self.now, at, value);
                        // Of another one that has this value now, only flags have changed.
                        if written.is_none() || (new ^ old) & !(A | D) != 0 {
                            written = Some(at);
                        }
                    }
                }
            } else if new != old {
                let marked = (new ^ old) & !(A | D) == 0 && new & old == old;
                assert!(
                    marked && marks.contains_key(&at),
                    "the entry at {at:#x} was {old:#x} and is {new:#x}; stored: {value:#x}, allowed: {allowed:x?}"
                );
                let is_read_only = self.tables.memory(at) == Some(true);
                assert!(!is_read_only, "{at:#x} is in a read-only slot");
            }
            self.copies.insert(at, new);
        }
        written.or(same).map(|at| at / PAGE)
    }

    /// Has the hypervisor store to an entry.
    fn store(&mut self, cpu: usize) {
        let at = match self.used.len() as u64 {
            n if n > 0 && self.random.one_in(2) => self.used[self.random.below(n) as usize],
            _ => self.random.entry_address(),
        };
        if self.tables.memory(at) != Some(false) {
            return;
        }
        let value = self.random.entry(at);
        let registers = kvm_regs {
            rdi: at,
            rsi: value,
            ..Default::default()
        };
        assert_eq!(self.run(cpu, STORE, registers), None);
        assert_eq!(self.get(at), value);
        self.now += 1;
        self.tables.store(self.now, at, value);
        self.copies.insert(at, value);
        self.count("store");
    }

    /// Has the hypervisor or its guest drop translations of a page, or the guest all of its own.
    fn flush(&mut self, cpu: usize) {
        let asid = 1 + self.random.below(ASIDS);
        let address = self.address();
        self.now += 1;
        let now = self.now;
        match self.random.below(3) {
            0 => {
                let registers = kvm_regs {
                    rax: address,
                    rcx: asid,
                    ..Default::default()
                };
                self.run(cpu, INVLPGA, registers);
                self.flushed[cpu][asid as usize]
                    .page
                    .insert(address / PAGE, now);
            }
            how => {
                let access = Access {
                    address,
                    kind: Kind::Read,
                    user: false,
                    write_protect: false,
                };
                let rip = if how == 1 { INVLPG } else { LOAD_CR3 };
                let ([code, ..], _) = self.run_guest(cpu, asid, rip, &access, 0);
                assert_eq!(code, VMMCALL);
                let flushed = &mut self.flushed[cpu][asid as usize];
                match how {
                    1 => drop(flushed.guest_page.insert(address / PAGE, now)),
                    _ => flushed.guest = now,
                }
            }
        }
        self.count("flush");
    }

    /// Deletes a memslot, or creates it anew.
    fn change_slot(&mut self) {
        let slot = self.random.below(self.tables.slots.len() as u64) as usize;
        let old = self.tables.slots[slot].take();
        if old.is_some() {
            let gpa = POOL + slot as u64 * SLOT_PAGES * PAGE;
            self.set_slot(slot as u32 + 1, gpa, 0, 0);
        }
        if old.is_none() || self.random.one_in(2) {
            let is_read_only = self.random.one_in(4);
            self.create(slot, is_read_only);
        }
        self.count("slot changed");
    }

    fn step(&mut self) {
        let cpu = self.random.below(CPUS as u64) as usize;
        match self.random.below(64) {
            0..40 => self.access(cpu),
            40..58 => self.store(cpu),
            58..62 => self.flush(cpu),
            // More often there than not.
            62 if self.tables.slots.iter().all(Option::is_some) => self.change_slot(),
            _ => {
                let gone = self.tables.slots.iter().position(Option::is_none);
                if let Some(slot) = gone {
                    self.create(slot, false);
                }
                let oldest = self.flushed.iter().flatten().map(|flushed| flushed.all);
                self.tables.forget(oldest.min().unwrap_or(0));
            }
        }
    }
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn a_nested_guest_reaches_what_the_tables_say() {
    let accesses = number("SLAT_STEPS", 3 * RUN);
    let first = number("SLAT_SEED", 1);
    let runs = accesses.div_ceil(MmuKind::ALL.len() as u64 * RUN);
    let only = std::env::var("SLAT_MMU").ok();
    for mmu in MmuKind::ALL {
        if only.as_ref().is_some_and(|name| *name != mmu.name()) {
            continue;
        }
        let mut counts = HashMap::<_, u64>::new();
        for seed in first..first + runs {
            let mut machine = Machine::new(*mmu, seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
            println!("{mmu:?}, seed {seed}");
            while machine.counts.get("access").is_none_or(|n| *n < RUN) {
                machine.step();
            }
            for (what, n) in machine.counts {
                *counts.entry(what).or_default() += n;
            }
        }
        println!("{mmu:?}: {counts:?}");
        for what in [
            "page",
            "device",
            "page fault",
            "nested fault at a table",
            "nested fault at a page",
            "several outcomes",
            "flags checked",
        ] {
            assert!(
                counts.get(what).is_some_and(|n| *n > RUN / 100),
                "{mmu:?}: {what}"
            );
        }
    }
}
