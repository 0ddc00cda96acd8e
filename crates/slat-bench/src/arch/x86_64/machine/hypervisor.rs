//! A guest that is a hypervisor (L1). By SVM (AMD64 volume 2, chapter 15 and appendix B), it runs programs in a guest
//! of its own (L2).
//!
//! L2 has page tables like L1's, and nested tables that map addresses one to one: memory from [`DATA`] on by pages of 4
//! KiB, all other memory by pages of 2 MiB. All these tables are in the system slot.

use std::sync::atomic::Ordering::Relaxed;

use kvm_bindings::{kvm_segment, kvm_sregs};

use super::guest::{self, DATA, PAGE, PAGE_DIRECTORIES, SYSTEM_SIZE};
use super::{Api, Device, Failure, Machine, Program, Ran, no_device};
use slat_demo::for_other_crates::long_mode::{PRESENT_WRITABLE, identity_map};

const VMCB: u64 = 3 << 20;
const HOST_SAVE: u64 = VMCB + PAGE;
/// The address of L2's own tables: first the root, then the table below the root, then the directories.
const OWN: u64 = HOST_SAVE + PAGE;
/// The address of the nested tables: first the root, then the table below the root, the directories, and the tables of
/// level 1.
const NESTED: u64 = OWN + (2 + GIBS) * PAGE;
const NESTED_TABLES: u64 = NESTED + (2 + GIBS) * PAGE;
/// The number of GiB that the tables map: all GiB below [`DATA`], and the first GiB of the data.
const GIBS: u64 = (DATA >> 30) + 1;
/// The maximum number of bytes from [`DATA`] on that L2 can use.
pub const MOST_DATA: u64 = (SYSTEM_SIZE as u64 - NESTED_TABLES) / PAGE * LARGE;
const LARGE: u64 = 2 << 20;
/// The flags of entries in nested tables: present, writable, user, accessed, dirty.
const FLAGS: u64 = PRESENT_WRITABLE | 1 << 2 | 1 << 5 | 1 << 6;

/// The exit codes of SVM that this hypervisor uses.
const HLT: u64 = 0x78;
const SHUTDOWN: u64 = 0x7f;
const VMRUN: u64 = 0x80;
const VMMCALL: u64 = 0x81;

/// Offsets in the virtual machine control block (VMCB).
mod at {
    pub const ASID: u64 = 0x58;
    pub const EXIT_CODE: u64 = 0x70;
    pub const NESTED_PAGING: u64 = 0x90;
    pub const NESTED_CR3: u64 = 0xb0;
    pub const SEGMENTS: u64 = 0x400;
    pub const EFER: u64 = SEGMENTS + 0xd0;
    pub const CR4: u64 = SEGMENTS + 0x148;
    pub const CR3: u64 = SEGMENTS + 0x150;
    pub const CR0: u64 = SEGMENTS + 0x158;
    pub const DR7: u64 = SEGMENTS + 0x160;
    pub const DR6: u64 = SEGMENTS + 0x168;
    pub const RFLAGS: u64 = SEGMENTS + 0x170;
    pub const RIP: u64 = SEGMENTS + 0x178;
    pub const RSP: u64 = SEGMENTS + 0x1d8;
    pub const RAX: u64 = SEGMENTS + 0x1f8;
    pub const PAT: u64 = SEGMENTS + 0x268;
}

impl<A: Api> Machine<'_, A> {
    /// Makes the first vCPU's guest a hypervisor.
    ///
    /// # Errors
    /// KVM's errors.
    pub fn begin_hypervisor(&mut self) -> Result<(), Failure> {
        const {
            assert!(
                PAGE_DIRECTORIES + GIBS * PAGE <= VMCB,
                "behind L1's own tables"
            )
        };
        for (tables, flags) in [(OWN, PRESENT_WRITABLE), (NESTED, FLAGS)] {
            let (below, directories) = (tables + PAGE, tables + 2 * PAGE);
            let memory = self.system.bytes();
            identity_map(memory, flags, tables, below, directories, GIBS);
        }
        let directory = NESTED_TABLES - PAGE;
        for table in 0..MOST_DATA / LARGE {
            let at = NESTED_TABLES + table * PAGE;
            self.put(directory + 8 * table, at | FLAGS);
            for page in 0..512 {
                let gpa = DATA + table * LARGE + page * PAGE;
                self.put(at + 8 * page, gpa | FLAGS);
            }
        }
        self.run(&[Program::begin_svm(HOST_SAVE)], &no_device)?;
        Ok(())
    }

    /// Runs `program` in L2 on the first vCPU. The returned registers are those of L2, except RAX and RSP, which are
    /// L1's.
    ///
    /// # Errors
    /// KVM's errors and the errors of `device`. It is also an error if L2 does not end with HLT.
    pub fn run_nested(&mut self, program: &Program, device: &Device<'_>) -> Result<Ran, Failure> {
        let registers = program.registers(0);
        let special = guest::special_registers(kvm_sregs::default());
        for word in (0..PAGE).step_by(8) {
            self.put(VMCB + word, 0);
        }
        for code in [HLT, SHUTDOWN, VMRUN, VMMCALL] {
            let at = VMCB + code / 64 * 8;
            let word = self.system.words()[at as usize / 8].load(Relaxed);
            self.put(at, word | 1 << (code % 64));
        }
        for (index, segment) in (0..).zip([special.es, special.cs, special.ss, special.ds]) {
            let [first, second] = packed(&segment);
            self.put(VMCB + at::SEGMENTS + 16 * index, first);
            self.put(VMCB + at::SEGMENTS + 16 * index + 8, second);
        }
        for (at, value) in [
            (at::ASID, 1),
            (at::NESTED_PAGING, 1),
            (at::NESTED_CR3, NESTED),
            (at::EFER, special.efer | 1 << 12),
            (at::CR4, special.cr4),
            (at::CR3, OWN),
            (at::CR0, special.cr0),
            (at::DR7, 0x400),
            (at::DR6, 0xffff_0ff0),
            (at::RFLAGS, registers.rflags),
            (at::RIP, registers.rip),
            (at::RSP, registers.rsp),
            (at::RAX, registers.rax),
            (at::PAT, 0x0007_0406_0007_0406),
        ] {
            self.put(VMCB + at, value);
        }
        let ran = self.run(&[Program::hypervisor(program, VMCB)], device)?;
        match self.system.words()[(VMCB + at::EXIT_CODE) as usize / 8].load(Relaxed) {
            HLT => Ok(ran),
            code => Err(format!("the nested guest ended with exit code {code:#x}").into()),
        }
    }

    /// Stores a value in the word at address `at` of the system slot.
    fn put(&self, at: u64, value: u64) {
        self.system.words()[at as usize / 8].store(value, Relaxed);
    }
}

/// Returns a segment in the format of the control block: one word with selector, attributes and limit, and one word
/// with the base.
fn packed(segment: &kvm_segment) -> [u64; 2] {
    let attributes = u64::from(segment.type_)
        | u64::from(segment.s) << 4
        | u64::from(segment.dpl) << 5
        | u64::from(segment.present) << 7
        | u64::from(segment.l) << 9
        | u64::from(segment.db) << 10
        | u64::from(segment.g) << 11;
    let limit = u64::from(segment.limit) << 32;
    [
        u64::from(segment.selector) | attributes << 16 | limit,
        segment.base,
    ]
}
