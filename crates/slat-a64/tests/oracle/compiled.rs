//! Executes cases with compiled code: a processor with translation tables, whose memory is the host's, at EL0.

use crate::common;
use crate::guest::LIMIT;
use crate::host::{Memory, Refusal};
use crate::qemu::{CASES, RIGHTS, Record, WINDOW, WORDS, border, code};
use crate::rng::Rng;
use slat_a64::{Cpu, Leave, State, SystemName};

const PAGE: u64 = 4096;
/// The size of a level 1 block, and the size of all of them.
const BLOCK: u64 = 1 << 30;
const SPACE: u64 = 512 * BLOCK;
/// The tables are where the guest has no addresses.
const TABLES: u64 = 2 * SPACE;
/// EL1's vectors, which EL0 cannot access.
const VECTORS: u64 = 0x60_0000_0000;

const SCTLR: SystemName = SystemName::new(3, 0, 1, 0, 0);
const TTBR0: SystemName = SystemName::new(3, 0, 2, 0, 0);
const TCR: SystemName = SystemName::new(3, 0, 2, 0, 2);
const MAIR: SystemName = SystemName::new(3, 0, 10, 2, 0);
const VBAR: SystemName = SystemName::new(3, 0, 12, 0, 0);
const SPSR: SystemName = SystemName::new(3, 0, 4, 0, 0);
const ELR: SystemName = SystemName::new(3, 0, 4, 0, 1);
const ESR: SystemName = SystemName::new(3, 0, 5, 2, 0);

/// Bits of descriptors: a block with its access flag, inner shareable; EL0's.
const VALID: u64 = 1 | 1 << 10 | 3 << 8;
const EL0: u64 = 1 << 6;
/// 48 bits, 4 KiB, no upper half, tags, 48 bits of physical addresses.
const TRANSLATION: u64 = 16 | 1 << 23 | 1 << 37 | 5 << 32;
const ENABLED: u64 = 1;

/// HVC #0.
const CALL: u32 = 0xd400_0002;

pub struct Guest {
    cpu: Cpu,
    memory: Memory,
}

impl Guest {
    pub fn new() -> Self {
        let mut memory = Memory::new();
        memory.add(TABLES, 2, [true; 2]);
        memory.put(TABLES, TABLES + PAGE + 3);
        for n in 0..512 {
            let block = n * BLOCK;
            let for_el0 = if block == VECTORS { 0 } else { EL0 };
            memory.put(TABLES + PAGE + 8 * n, block | VALID | for_el0);
        }
        memory.add(VECTORS, 1, [true; 2]);
        for vector in (0..0x800).step_by(0x80) {
            memory.put(VECTORS + vector, CALL.into());
        }
        memory.add(code(0), CASES * WORDS * 4 / PAGE as usize, [true; 2]);
        for (set, rights) in RIGHTS.iter().enumerate() {
            for (n, rights) in [-1, 0].into_iter().zip(rights) {
                let page = border(set as u32).wrapping_add_signed(n * PAGE as i64);
                memory.add(page, 1, *rights);
            }
        }
        let mut state = State::default();
        let enabled = state.system(SCTLR).unwrap() | ENABLED;
        let settings = [
            (MAIR, 0xff),
            (TTBR0, TABLES),
            (TCR, TRANSLATION),
            (VBAR, VECTORS),
            (SCTLR, enabled),
        ];
        for (name, value) in settings {
            assert!(state.set_system(name, value));
        }
        let mut cpu = Cpu::new(state);
        common::always(&mut cpu);
        // SAFETY: the pages are mappings of the memory, which only guarded accesses and raw pointers reach.
        // `Memory::new` has installed the handlers.
        unsafe { cpu.access_directly() };
        Self { cpu, memory }
    }

    /// Returns the number of instructions that compiled code has executed.
    pub fn instructions(&self) -> u64 {
        self.cpu.compiled_instructions()
    }

    /// Executes a case that can be compared, and writes the result into the record.
    pub fn execute(&mut self, case: usize, record: &mut Record) {
        self.begin(case, record);
        let leave = self.cpu.run(&mut self.memory, LIMIT);
        self.end(&leave, record);
    }

    /// Like [`execute`](Self::execute), but in runs of a few instructions, between which the host takes pages of the
    /// window away. The access that fails then is repeated after the host has given the page back.
    pub fn execute_in_parts(&mut self, case: usize, record: &mut Record, rng: &mut Rng) {
        self.begin(case, record);
        let leave = loop {
            let pages = [border(record.set) - 1, border(record.set)];
            if rng.one_in(3) {
                self.memory.protect(rng.pick(&pages), true);
            }
            let leave = self.cpu.run(&mut self.memory, 1 + rng.below(12) as u64);
            for page in pages {
                self.memory.protect(page, false);
            }
            match &leave {
                Leave::Limit => {}
                Leave::Stage2 { fault, .. } if fault.reason == Refusal::Gone => {}
                _ => break leave,
            }
        };
        self.end(&leave, record);
    }

    /// Returns the number of accesses that have failed because the host had taken a page away.
    pub fn gone(&self) -> u32 {
        self.memory.gone.get()
    }

    /// Makes memory and registers those before a case.
    fn begin(&mut self, case: usize, record: &Record) {
        let before = &record.before;
        let window = border(record.set) - WINDOW as u64 / 2;
        for (n, words) in record.code.chunks(2).enumerate() {
            let word = u64::from(words[0]) | u64::from(words[1]) << 32;
            self.memory.put(code(case) + 8 * n as u64, word);
        }
        for (n, bytes) in record.memory.chunks(8).enumerate() {
            let word = u64::from_le_bytes(bytes.try_into().unwrap());
            self.memory.put(window + 8 * n as u64, word);
        }
        self.cpu.forget_pages();
        let base = State::default();
        let state = &mut self.cpu.state;
        state.set_pstate(base.pstate());
        state.set_stack_pointer(false, before.sp);
        state.x = before.x;
        state.pc = code(case) + 4 * u64::from(record.start);
        state.v = before
            .v
            .map(|[low, high]| u128::from(low) | u128::from(high) << 64);
        state.set_fpcr(before.fpcr);
        state.set_fpsr(before.fpsr);
        state.set_nzcv(before.pstate as u32);
        state.exclusive = None;
    }

    /// Writes the result of a case into the record.
    fn end(&self, leave: &Leave<Refusal>, record: &mut Record) {
        let window = border(record.set) - WINDOW as u64 / 2;
        let state = &self.cpu.state;
        let system = |name| state.system(name).unwrap();
        let (signal, pc, nzcv) = match leave {
            Leave::Hvc(0) => {
                let signal = match system(ESR) >> 26 {
                    0x3c => libc::SIGTRAP,
                    0x22 => libc::SIGBUS,
                    0 => libc::SIGILL,
                    0x20 | 0x24 => libc::SIGSEGV,
                    class => panic!("exception {class:x}"),
                };
                (signal, system(ELR), system(SPSR) >> 28 << 28)
            }
            Leave::Stage2 { .. } => (libc::SIGSEGV, state.pc, state.nzcv().into()),
            leave => panic!("{leave:?}"),
        };
        let after = &mut record.after;
        after.signal = signal as u32;
        after.x = state.x;
        after.sp = state.stack_pointer(false);
        after.pc = pc;
        after.pstate = nzcv;
        after.fpcr = state.fpcr;
        after.fpsr = state.fpsr;
        after.v = state.v.map(|v| [v as u64, (v >> 64) as u64]);
        for (n, bytes) in record.memory_after.chunks_mut(8).enumerate() {
            let word = self.memory.get(window + 8 * n as u64);
            bytes.copy_from_slice(&word.to_le_bytes());
        }
    }
}
