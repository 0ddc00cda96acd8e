//! The machine: two vCPUs of a hypervisor, its memory with the code and the tables, and the functions that run the
//! hypervisor and its guest.

use crate::common::hypervisors::packed;
use crate::common::{Memory, set_msr, tell_features};
use crate::layout::*;
use crate::oracle::{Access, Since, Tables, Time};
use kvm_bindings::*;
use slat::MmuKind;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::collections::HashMap;

pub const CPUS: usize = 2;
/// The number of ASIDs that guests use.
pub const ASIDS: u64 = 3;

const VM_HSAVE_PA: u32 = 0xc001_0117;
const EFER: u64 = 1 << 12 | 1 << 11 | 1 << 10 | 1 << 8;
const CR0: u64 = 1 << 31 | 1 << 4 | 1;
const CR0_WP: u64 = 1 << 16;
const CR4_PAE: u64 = 1 << 5;

/// The times at which a vCPU has last flushed an ASID.
#[derive(Clone, Default)]
pub struct Flushed {
    pub all: Time,
    /// The time of the last flush of the guest's own translations, but not of those of nested tables.
    pub guest: Time,
    /// The time of the last flush of each page: of the guest's own translations. `page` is for flushes of both kinds.
    pub guest_page: HashMap<u64, Time>,
    pub page: HashMap<u64, Time>,
}

impl Flushed {
    pub fn since(&self, address: u64) -> Since {
        let of = |pages: &HashMap<u64, Time>| *pages.get(&(address / PAGE)).unwrap_or(&0);
        let nested = self.all.max(of(&self.page));
        Since {
            guest: nested.max(self.guest).max(of(&self.guest_page)),
            nested,
        }
    }

    pub fn all(now: Time) -> Self {
        Flushed {
            all: now,
            ..Flushed::default()
        }
    }
}

pub struct Machine {
    pub vcpus: Vec<VcpuFd>,
    pub vm: VmFd,
    pub memory: Memory,
    pub random: Random,
    pub tables: Tables,
    pub now: Time,
    pub flushed: Vec<Vec<Flushed>>,
    /// The pages that the guest has accessed recently.
    pub recent: [u64; 4],
    /// The entries that the last access may have used.
    pub used: Vec<u64>,
    /// The values of the entries in memory when the test last checked them.
    pub copies: HashMap<u64, u64>,
    pub counts: HashMap<&'static str, u64>,
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

impl Machine {
    pub fn new(mmu: MmuKind, seed: u64) -> Self {
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

    /// Fills the memory before the vCPUs run.
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

    pub fn put(&self, at: u64, value: u64) {
        self.memory.write(at, &value.to_le_bytes());
    }

    pub fn get(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    fn set_entry(&mut self, at: u64, entry: u64) {
        self.put(at, entry);
        self.tables.store(0, at, entry);
    }

    pub fn set_slot(&self, slot: u32, gpa: u64, size: u64, flags: u32) {
        let region = kvm_userspace_memory_region {
            slot,
            flags,
            guest_phys_addr: gpa,
            memory_size: size,
            userspace_addr: self.memory.start as u64 + gpa,
        };
        // SAFETY: the memory belongs to the test, and outlives the VM's use of it.
        unsafe { self.vm.set_user_memory_region(region) }.unwrap();
    }

    pub fn create(&mut self, slot: usize, is_read_only: bool) {
        let gpa = POOL + slot as u64 * SLOT_PAGES * PAGE;
        let flags = if is_read_only { KVM_MEM_READONLY } else { 0 };
        self.set_slot(slot as u32 + 1, gpa, SLOT_PAGES * PAGE, flags);
        self.tables.slots[slot] = Some(is_read_only);
    }

    pub fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    /// Runs the hypervisor from `rip` to its HLT. Returns the address of the device that it has accessed, if it has.
    pub fn run(&mut self, cpu: usize, rip: u64, registers: kvm_regs) -> Option<u64> {
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

    /// Makes the guest run from `rip` on, with `value` in RSI and the address in RDI. Returns the exit code, the two
    /// words of exit information, and RAX, and also the address of a device access.
    pub fn run_guest(
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
}
