//! Runs the same bytes on the software CPU, in 64-bit mode with memory at the host's own addresses. The instruction is
//! followed by HLT; every exception vector leads to a HLT of its own.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU32;

use slat_x86::state::xcr0;
use slat_x86::{
    Access, CodePages, Cpu, Exit, HostPage, HypercallOutcome, Machine, Mmu, MsrFault, Paging,
    Segment, State, Table,
};

use crate::native::{
    ARENA_LEN, AT, Arena, BRANCH_TARGET, Fault, GS_BASE, HOLE, PAGE, Regs, SYSTEM,
};

/// Where things are in the system pages.
const IDT: usize = SYSTEM;
const TSS: usize = SYSTEM + 0x400;
const GDT: usize = SYSTEM + 0x800;
const HANDLERS: usize = SYSTEM + PAGE;
const FAULT_STACK: usize = SYSTEM + 3 * PAGE;

const CODE_SELECTOR: u16 = 8;
const DATA_SELECTOR: u16 = 16;
const TSS_SELECTOR: u16 = 24;

/// Memory at the host's own addresses, and nothing else.
struct Flat {
    base: u64,
}

impl Mmu for Flat {
    fn translate(
        &mut self,
        gva: u64,
        access: Access,
        _: &Paging,
    ) -> Result<HostPage, slat_x86::Fault> {
        let page = gva & !(PAGE as u64 - 1);
        let inside = page >= self.base && page < self.base + ARENA_LEN as u64;
        if !inside || page == self.base + HOLE as u64 {
            // As the host reports it, where the same access is a user's.
            const USER: u32 = 4;
            const WRITE: u32 = 2;
            const FETCH: u32 = 16;
            let error_code = USER
                | match access {
                    Access::Read => 0,
                    Access::Write => WRITE,
                    Access::Execute => FETCH,
                };
            return Err(slat_x86::Fault::Page { error_code });
        }
        Ok(HostPage {
            base: NonNull::new(page as *mut u8).unwrap(),
            read: true,
            write: true,
            execute: true,
            bits: 12,
            tracked: None,
            global: false,
        })
    }

    fn recheck(&mut self, _: *mut u8, _: Access) -> Result<(), slat_x86::Fault> {
        Err(slat_x86::Fault::BadAddress)
    }
}

impl Machine for Flat {
    fn cpuid(&mut self, _: u32, _: u32) -> [u32; 4] {
        [0; 4]
    }
    fn rdmsr(&mut self, _: u32) -> Result<u64, MsrFault> {
        Err(MsrFault::Unknown)
    }
    fn wrmsr(&mut self, _: u32, _: u64) -> Result<(), MsrFault> {
        Err(MsrFault::Unknown)
    }
    fn tsc(&mut self) -> u64 {
        0
    }
    fn hypercall(&mut self, _: &mut State, _: u8, _: bool) -> HypercallOutcome {
        HypercallOutcome::Done
    }
}

/// The software CPU, set up once.
pub struct Guest {
    cpu: Cpu,
    flat: Flat,
}

/// What came out of a run.
pub enum Outcome {
    Done(Box<Regs>, Option<Fault>),
    /// The CPU says that it does not have this instruction.
    Unimplemented(&'static str),
    /// Anything else is a bug.
    Strange(String),
}

impl Guest {
    pub fn new(arena: &Arena) -> Guest {
        slat_guard::install().expect("signal handlers");
        let base = arena.base as u64;
        let idt = arena.bytes_mut(IDT, 32 * 16);
        for (vector, gate) in idt.chunks_exact_mut(16).enumerate() {
            let handler = base + HANDLERS as u64 + 4 * vector as u64;
            gate[..2].copy_from_slice(&(handler as u16).to_le_bytes());
            gate[2..4].copy_from_slice(&CODE_SELECTOR.to_le_bytes());
            gate[4] = 1; // the first stack of the interrupt stack table
            gate[5] = 0x8e; // present interrupt gate
            gate[6..12].copy_from_slice(&(handler >> 16).to_le_bytes()[..6]);
        }
        arena.bytes_mut(HANDLERS, PAGE).fill(HLT);
        arena
            .bytes_mut(TSS + 0x24, 8)
            .copy_from_slice(&(base + FAULT_STACK as u64).to_le_bytes());
        let gdt = arena.bytes_mut(GDT, 24);
        gdt[8..16].copy_from_slice(&0x00af_9b00_0000_ffffu64.to_le_bytes());
        gdt[16..24].copy_from_slice(&0x00cf_9300_0000_ffffu64.to_le_bytes());

        let mut cpu = Cpu::try_new(CodePages::try_new().unwrap()).unwrap();
        crate::compiled::compile(&mut cpu);
        let state = &mut cpu.state;
        let segment = |selector, rights| Segment {
            selector,
            base: 0,
            limit: u32::MAX,
            rights,
        };
        state.cs = segment(CODE_SELECTOR, 0xa09b);
        for data in [
            &mut state.ds,
            &mut state.es,
            &mut state.ss,
            &mut state.fs,
            &mut state.gs,
        ] {
            *data = segment(DATA_SELECTOR, 0xc093);
        }
        state.gs.base = GS_BASE;
        state.tr = Segment {
            selector: TSS_SELECTOR,
            base: base + TSS as u64,
            limit: 0x67,
            rights: 0x8b,
        };
        state.idtr = Table {
            base: base + IDT as u64,
            limit: 32 * 16 - 1,
        };
        state.gdtr = Table {
            base: base + GDT as u64,
            limit: 23,
        };
        state.cr0 = 0x8001_0033; // PG WP NE ET MP PE
        state.cr4 = 0x4_0620; // OSXSAVE OSXMMEXCPT OSFXSR PAE
        state.xcr0 = xcr0::X87 | xcr0::SSE;
        if is_x86_feature_detected!("avx") {
            state.xcr0 |= xcr0::AVX;
        }
        state.efer = 0xd01; // NXE LMA LME SCE
        state.cr3 = 0x1000;
        Guest {
            cpu,
            flat: Flat { base },
        }
    }

    pub fn run(&mut self, arena: &Arena, code: &[u8], regs: &Regs) -> Outcome {
        let page = arena.bytes_mut(0, PAGE);
        page.fill(0x90);
        page[AT..AT + code.len()].copy_from_slice(code);
        page[AT + code.len()] = HLT;
        page[BRANCH_TARGET] = HLT;

        let state = &mut self.cpu.state;
        state.gpr = regs.gpr;
        state.rflags = regs.rflags;
        state.rip = regs.rip;
        state.set_fxsave(&regs.fx);
        for (half, bytes) in state.ymm_high.iter_mut().zip(regs.high.chunks_exact(16)) {
            *half = u128::from_le_bytes(bytes.try_into().unwrap());
        }
        let exit = self.cpu.run(&mut self.flat, &AtomicU32::new(0));
        match exit {
            Exit::Hlt => {}
            Exit::Emulation { reason, .. } => return Outcome::Unimplemented(reason),
            other => return Outcome::Strange(format!("{other:?}")),
        }
        let state = &self.cpu.state;
        let mut after = Box::new(Regs {
            fx: state.to_fxsave(),
            high: std::array::from_fn(|n| state.ymm_high[n / 16].to_le_bytes()[n % 16]),
            gpr: state.gpr,
            rflags: state.rflags,
            rip: state.rip - 1,
        });
        let handlers = (arena.base + HANDLERS) as u64;
        if !(handlers..handlers + PAGE as u64).contains(&after.rip) {
            return Outcome::Done(after, None);
        }
        let vector = ((after.rip - handlers) / 4) as u8;
        let mut frame = after.gpr[4] as usize - arena.base;
        let mut pop = || {
            let value = u64::from_le_bytes(arena.bytes(frame, 8).try_into().unwrap());
            frame += 8;
            value
        };
        let error = if matches!(vector, 8 | 10..=14 | 17) {
            pop()
        } else {
            0
        };
        after.rip = pop();
        pop();
        after.rflags = pop();
        after.gpr[4] = pop();
        let cr2 = if vector == 14 { state.cr2 } else { 0 };
        // The handler ran in the same segments; the next run wants those of the start.
        let state = &mut self.cpu.state;
        state.ss = state.ds;
        Outcome::Done(after, Some(Fault { vector, error, cr2 }))
    }
}

const HLT: u8 = 0xf4;
