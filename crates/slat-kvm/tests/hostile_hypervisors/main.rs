//! Tests random hypervisors with random clients. The control blocks, nested tables and code are random, and may be in
//! one another's pages. The memory may be read-only, mapped twice, or missing, and memslots come and go. The
//! hypervisor and its guest run in all modes. The test checks that each run ends, that the engine's tables pass their
//! audit, and that the process does not grow.
//!
//! `cargo test -p slat-kvm --release --test hostile_hypervisors`, with SLAT_TEST_ROUNDS=…, SLAT_SEED=… and SLAT_MMU=…
//! for another number of rounds on each MMU, another seed, and one MMU.
#![cfg(target_arch = "x86_64")]

#[path = "../common/mod.rs"]
mod common;
mod layout;
mod watch;

use common::hypervisors::{chosen_mmus, number, packed};
use common::{Memory, resident, set_msr, tell_features};
use kvm_bindings::*;
use layout::*;
use slat::MmuKind;
use slat_kvm::{Kvm, KvmNestedStateBuffer, VcpuExit, VcpuFd, VmFd};
use slat_model::Rng;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use watch::watch;

const VM_CR: u32 = 0xc001_0114;
const VM_HSAVE_PA: u32 = 0xc001_0117;
/// An exit code that no processor stores.
const NO_EXIT: u64 = 0x5a5a;
/// The number of rounds of one VM.
const ROUNDS: u64 = 500;
/// The largest number of bytes by which the process may grow from its second VM to its last. In a million rounds it
/// grew by 6 to 23 MiB.
const GROWTH: usize = 48 << 20;

/// A VM with two vCPUs, each of which runs a hypervisor.
struct Machine {
    vcpus: Vec<VcpuFd>,
    vm: VmFd,
    memory: Memory,
    random: Rng,
    /// Whether each slot exists.
    slots: [bool; SLOTS.len()],
    /// Whether a vCPU has had an SMI. If SMRAM is not in a memslot, an SMI ends the VM.
    had_smi: bool,
    is_lost: bool,
}

impl Machine {
    fn new(mmu: MmuKind, seed: u64) -> Self {
        let vm = Kvm::new().unwrap().with_mmu(mmu).create_vm().unwrap();
        let vcpus: Vec<_> = (0..2).map(|id| vm.create_vcpu(id).unwrap()).collect();
        vcpus.iter().for_each(tell_features);
        let mut machine = Machine {
            vcpus,
            vm,
            memory: Memory::new(MEMORY as usize),
            random: Rng::new(seed),
            slots: [false; SLOTS.len()],
            had_smi: false,
            is_lost: false,
        };
        for slot in 0..SLOTS.len() {
            machine.change_slot(slot);
        }
        machine
    }

    /// Creates a slot, deletes it, or starts or stops its dirty logging.
    fn change_slot(&mut self, slot: usize) {
        let (number, gpa, bytes, at) = SLOTS[slot];
        let deletes = self.slots[slot] && self.random.one_in(2);
        let mut flags = if gpa == READ_ONLY {
            KVM_MEM_READONLY
        } else {
            0
        };
        if self.random.one_in(2) {
            flags |= KVM_MEM_LOG_DIRTY_PAGES;
        }
        let region = kvm_userspace_memory_region {
            slot: number,
            flags,
            guest_phys_addr: gpa,
            memory_size: if deletes { 0 } else { bytes },
            userspace_addr: self.memory.start as u64 + at,
        };
        // SAFETY: the memory belongs to the test, and outlives the VM's use of it.
        unsafe { self.vm.set_user_memory_region(region) }.unwrap();
        self.slots[slot] = !deletes;
    }

    fn put(&self, at: u64, value: u64) {
        self.memory.write(at, &value.to_le_bytes());
    }

    fn get(&self, at: u64) -> u64 {
        let mut bytes = [0; 8];
        self.memory.read(at, &mut bytes);
        u64::from_le_bytes(bytes)
    }

    /// Restores the page tables, the descriptor tables and the permission maps to their valid contents.
    fn repair(&mut self) {
        for at in [OWN, GUESTS, NESTED] {
            self.memory.write(at, &hierarchy(at));
        }
        self.memory.write(STAGED, &hierarchy(NESTED));
        self.memory.write(IO_MAP, &[0; 0x3000]);
        self.memory.write(MSR_MAP, &[0; 0x2000]);
        for (selector, segment) in [(8, 0x00cf_9b00), (16, 0x00cf_9300), (24, 0x00af_9b00)] {
            self.put(GDT + selector, segment << 32 | 0xffff);
        }
        // Each entry is an interrupt gate of 32-bit mode. In 64-bit mode, a gate has 16 bytes, so two entries make
        // one gate.
        for vector in 0..256 {
            self.put(IDT + 8 * vector, 0x8e00 << 32 | 8 << 16 | L2);
        }
    }

    /// Writes a control block at `vmcb`, with a guest that runs in `mode` and a hypervisor that runs in `own`. Then
    /// changes some fields at random.
    fn fill(&mut self, vmcb: u64, own: Mode, mode: Mode) {
        self.memory.write(vmcb, &[0; PAGE as usize]);
        let random = &mut self.random;
        let is_nested = !random.one_in(4);
        let (code, data) = (packed(&mode.segment(true)), packed(&mode.segment(false)));
        // The nested tables have the paging mode of the hypervisor, so usually choose its own mode.
        let tables = match random.one_in(4) {
            true => random.pick(&Mode::ALL),
            false => own,
        };
        let fields = [
            (8, random.word() & random.word() & random.word()),
            // The intercepts: always VMRUN, VMMCALL, HLT and shutdown, and random others.
            (0xc, 1 << 24 | 1 << 31 | 3 << 32 | random.below(1 << 24)),
            (0x40, IO_MAP),
            (0x48, MSR_MAP),
            (
                0x58,
                random.pick(&[1, 2, 3]) | random.pick(&[0, 1, 3, 7]) << 32,
            ),
            (0x70, NO_EXIT),
            (0x90, is_nested.into()),
            (0xb0, tables.root(NESTED)),
            (0x400, data),
            (0x410, code),
            (0x420, data),
            (0x430, data),
            (0x464, 0xfff),
            (0x468, GDT),
            (0x484, 0xfff),
            (0x488, if mode == Mode::Real { 0 } else { IDT }),
            (0x4d0, mode.efer()),
            (0x548, mode.cr4()),
            (0x550, mode.root(GUESTS)),
            (0x558, mode.cr0()),
            (0x560, 0x400),
            (0x568, 0xffff_0ff0),
            (0x570, 2),
            (0x578, L2),
            (0x5d8, STACK),
            (0x668, 0x0007_0406_0007_0406),
        ];
        for (at, value) in fields {
            self.put(vmcb + at, value);
        }
        for _ in 0..self.random.below(4) {
            // Most changes are to fields that the processor uses.
            let at = match self.random.below(4) {
                0 => self.random.pick(&fields).0,
                1 => self.random.below(0x100),
                2 => 0x400 + self.random.below(0x2a0),
                _ => self.random.below(PAGE - 7),
            };
            let old = self.get(vmcb + at);
            let new = value(&mut self.random, old);
            self.put(vmcb + at, new);
        }
    }

    /// Returns registers whose addresses are random places, with the control block in RAX.
    fn registers(&mut self, vmcb: u64) -> kvm_regs {
        let random = &mut self.random;
        let leads_to = place(random) | random.pick(&[0x67, 0x67, 0xe7, 0x65, 5, 1]);
        // The source, destination and length of REP MOVSB: all nested tables; or one entry of them, which leads to a
        // random place; or random addresses.
        let (rsi, rdi, rcx) = match random.below(3) {
            0 => (STAGED, NESTED, HIERARCHY_PAGES * PAGE),
            1 => {
                let at = random.below(HIERARCHY_PAGES) * PAGE + 8 * random.below(MEMORY / PAGE);
                self.put(STAGED + at, leads_to);
                (STAGED + at, NESTED + at, 8)
            }
            _ => (place(random), place(random), random.below(3 * PAGE)),
        };
        kvm_regs {
            rip: CODE,
            rsp: STACK,
            rflags: 2,
            rax: vmcb,
            rcx,
            rsi,
            rdi,
            rbx: self.random.word(),
            rdx: self.random.word(),
            ..Default::default()
        }
    }

    /// Runs a hypervisor once, and counts the exits in `counts`.
    fn round(&mut self, counts: &mut BTreeMap<String, u64>) {
        let cpu = self.random.below(2) as usize;
        // Creates missing slots again soon.
        let slot = match self.slots.iter().position(|is_there| !is_there) {
            Some(gone) => self.random.one_in(4).then_some(gone),
            None => {
                (self.random.one_in(32)).then(|| self.random.below(SLOTS.len() as u64) as usize)
            }
        };
        if let Some(slot) = slot {
            self.change_slot(slot);
        }
        self.repair();
        let own = Mode::random(&mut self.random);
        let guests = Mode::random(&mut self.random);
        let at = self.random.pick(&[VMCB, VMCB, VMCB, VMCB_AGAIN]);
        self.fill(at, own, guests);
        let at = match self.random.below(4) {
            0 => place(&mut self.random),
            1 => AGAIN + at,
            _ => at,
        };
        // If the control block would be in a page of nested tables, writes one there, in half of the cases.
        if (NESTED..NESTED + HIERARCHY_PAGES * PAGE).contains(&at) && self.random.one_in(2) {
            self.fill(at & !0xfff, own, guests);
        }
        let code = self.random.pick(&HYPERVISORS);
        self.memory.write(CODE, code);
        let code = self.random.pick(&MANAGERS);
        self.memory.write(MANAGEMENT, code);
        let code = guest_code(&mut self.random);
        self.memory.write(L2, &code);
        let registers = self.registers(at);
        self.start(cpu, own, &registers);
        self.meddle(cpu);
        for _ in 0..6 {
            let what = self.run(cpu);
            let ends = matches!(what, "HLT" | "shutdown" | "interrupted" | "lost");
            *counts.entry(what.to_owned()).or_default() += 1;
            if ends {
                break;
            }
            if self.random.one_in(16) {
                self.meddle(cpu);
            }
        }
        for vmcb in [VMCB, VMCB_AGAIN] {
            match self.get(vmcb + 0x70) {
                NO_EXIT => {}
                code @ (0x400 | u64::MAX) => {
                    *counts.entry(format!("exit {code:#x}")).or_default() += 1
                }
                _ => *counts.entry("another exit".to_owned()).or_default() += 1,
            }
            self.put(vmcb + 0x70, NO_EXIT);
        }
    }

    /// Resets a vCPU to the state of a hypervisor that has not run yet.
    fn start(&mut self, cpu: usize, mode: Mode, registers: &kvm_regs) {
        let (vcpu, random) = (&self.vcpus[cpu], &mut self.random);
        let mut none = KvmNestedStateBuffer::empty();
        (none.format, none.size) = (KVM_STATE_NESTED_FORMAT_SVM as u16, 128);
        none.flags = random.pick(&[0, 1, 1, 1]) * KVM_STATE_NESTED_GIF_SET as u16;
        vcpu.set_nested_state(&none).unwrap();
        let events = kvm_vcpu_events {
            flags: KVM_VCPUEVENT_VALID_NMI_PENDING
                | KVM_VCPUEVENT_VALID_SHADOW
                | KVM_VCPUEVENT_VALID_SMM,
            ..Default::default()
        };
        vcpu.set_vcpu_events(&events).unwrap();
        let mut sregs = vcpu.get_sregs().unwrap();
        mode.set(&mut sregs);
        sregs.interrupt_bitmap = [0; 4];
        vcpu.set_sregs(&sregs).unwrap();
        // Sometimes the client sets a state that is probably invalid.
        if random.one_in(8) {
            match random.below(5) {
                0 => sregs.efer ^= 1 << random.below(16),
                1 => sregs.cr0 ^= 1 << random.below(32),
                2 => sregs.cr4 ^= 1 << random.below(24),
                3 => sregs.cr3 = place(random),
                _ => (sregs.cs.dpl, sregs.ss.dpl) = (3, 3),
            }
            let _refused = vcpu.set_sregs(&sregs);
        }
        vcpu.set_regs(registers).unwrap();
        assert!(set_msr(vcpu, VM_CR, 0) && set_msr(vcpu, VM_HSAVE_PA, HOST_SAVE));
    }

    /// Makes a random call that a client may make between runs.
    fn meddle(&mut self, cpu: usize) {
        let (vcpu, random) = (&self.vcpus[cpu], &mut self.random);
        match random.below(24) {
            0 => _ = vcpu.nmi(),
            1 => {
                vcpu.smi().unwrap();
                self.had_smi = true;
            }
            2 => _ = vcpu.interrupt(random.below(256) as u32),
            3 => {
                // Saves and restores the nested state, with one bit of it changed.
                let mut state = KvmNestedStateBuffer::empty();
                state.size = size_of::<KvmNestedStateBuffer>() as u32;
                vcpu.nested_state(&mut state).unwrap();
                let bytes = (&raw mut state).cast::<u8>();
                let at = match random.below(3) {
                    0 => random.below(16),
                    1 => 128 + random.below(0x700),
                    _ => 128 + random.below(PAGE),
                };
                // SAFETY: the address is within the state, which is plain data.
                unsafe { *bytes.add(at as usize) ^= 1 << random.below(8) };
                _ = vcpu.set_nested_state(&state);
            }
            4 => {
                let mut sregs = vcpu.get_sregs().unwrap();
                sregs.cr0 ^= 1 << random.below(32);
                _ = vcpu.set_sregs(&sregs);
            }
            5 => {
                let mut events = vcpu.get_vcpu_events().unwrap();
                events.exception.injected = 1;
                events.exception.nr = random.below(32) as u8;
                _ = vcpu.set_vcpu_events(&events);
            }
            _ => {}
        }
    }

    fn run(&mut self, cpu: usize) -> &'static str {
        let answer = self.random.word() as u8;
        match self.vcpus[cpu].run() {
            Ok(VcpuExit::MmioRead(_, data) | VcpuExit::IoIn(_, data)) => {
                data.fill(answer);
                "I/O"
            }
            Ok(VcpuExit::MmioWrite(..) | VcpuExit::IoOut(..)) => "I/O",
            Ok(VcpuExit::Hlt) => "HLT",
            Ok(VcpuExit::Shutdown) => "shutdown",
            Ok(VcpuExit::InternalError) => "internal error",
            Ok(_) => "another exit to the client",
            Err(error) if error.errno() == libc::EINTR => "interrupted",
            Err(error) if error.errno() == libc::EIO && self.had_smi => {
                self.is_lost = true;
                "lost"
            }
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn a_hypervisor_that_knows_nothing_does_no_harm() {
    let rounds = number("SLAT_TEST_ROUNDS", 3 * ROUNDS);
    let first = number("SLAT_SEED", 1);
    let progress = Arc::new(AtomicU64::new(0));
    let watcher = watch(&progress);
    for mmu in chosen_mmus() {
        let mut counts = BTreeMap::new();
        let mut before = 0;
        let mut left = rounds;
        for seed in first.. {
            println!("{mmu:?}, seed {seed}");
            let mut machine = Machine::new(mmu, seed);
            for _ in 0..left.min(ROUNDS) {
                progress.fetch_add(1, Relaxed);
                machine.round(&mut counts);
                left -= 1;
                if left.is_multiple_of(100) {
                    machine.vm.engine().audit().unwrap();
                }
                if machine.is_lost {
                    break;
                }
            }
            drop(machine);
            if seed == first + 1 {
                before = resident();
            }
            if left == 0 {
                break;
            }
        }
        let growth = resident().saturating_sub(before);
        println!("{mmu:?}: {counts:?}, {growth} bytes more");
        assert!(growth < GROWTH, "{mmu:?}: {growth}");
        // Checks that guests have run, that some were refused, and that all kinds of exits have occurred.
        for what in [
            "exit 0x400",
            "exit 0xffffffffffffffff",
            "another exit",
            "HLT",
            "I/O",
        ] {
            let seen = counts.get(what).copied().unwrap_or(0);
            assert!(seen >= rounds / 100, "{mmu:?}, {what}: {seen}");
        }
    }
    drop(progress);
    watcher.join().unwrap();
}
