//! Runs the same bytes on the software CPU, in 64-bit mode, with guest memory at the host's own addresses. HLT
//! follows the bytes, and the handler of each exception is a HLT. Meanwhile other events may happen ([`Beside`]),
//! which must not change the result.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::{Duration, Instant};

use slat_x86::state::{MXCSR_MM, xcr0};
use slat_x86::{
    Access, CodePages, Executor, Exit, Features, HostPage, HypercallOutcome, Machine, Mmu,
    MsrFault, Paging, Segment, State, Table,
};

use crate::native::{ARENA_LEN, Arena, Fault, GS_BASE, HOLE, PAGE, Placed, Regs, SYSTEM};
use crate::vendor;

/// Offsets in the system pages.
const IDT: usize = SYSTEM;
/// The offset of the counter of interrupts.
const TAKEN: usize = SYSTEM + 0x300;
const TSS: usize = SYSTEM + 0x400;
const GDT: usize = SYSTEM + 0x800;
const HANDLERS: usize = SYSTEM + PAGE;
const FAULT_STACK: usize = SYSTEM + 3 * PAGE;

const CODE_SELECTOR: u16 = 8;
const DATA_SELECTOR: u16 = 16;
const TSS_SELECTOR: u16 = 24;

/// The vector of the interrupt: the first vector that is not an exception's.
const INTERRUPT: u8 = 32;
const VECTORS: usize = INTERRUPT as usize + 1;

/// The other events that happen while the bytes are executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Beside {
    Nothing,
    /// Every few microseconds the run ends, and is continued.
    Kicks,
    /// Every few microseconds an interrupt is delivered, whose handler returns.
    Interrupts,
    /// Every few microseconds all pages become read-only: the next store to each page has to be translated again, as
    /// after a dirty log was read.
    Protection,
    /// A debugger stops after each instruction.
    Steps,
}

/// A machine that has only the arena's memory, at the host's own addresses.
struct Flat {
    base: u64,
    /// Whether each page is protected and has not been written since.
    protected: [bool; ARENA_LEN / PAGE],
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
            // The error code is as the host reports it. On the host, the access is a user access.
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
        let protected = &mut self.protected[(page - self.base) as usize / PAGE];
        *protected &= access != Access::Write;
        Ok(HostPage {
            base: NonNull::new(page as *mut u8).unwrap(),
            read: true,
            write: !*protected,
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

/// Returns the features of the software CPU: all of them, but MXCSR has the same bits as the host's,
/// whatever the vendor is.
fn features() -> Features {
    const MISALIGNED_SSE: u32 = 1 << 7;
    let missing = match vendor::host_mxcsr_mask() & MXCSR_MM {
        0 => MISALIGNED_SSE,
        _ => 0,
    };
    Features::from_cpuid(|leaf, subleaf| match (leaf, subleaf) {
        (0, _) => [0xd, 0, 0, 0],
        (0x8000_0000, _) => [0x8000_000a, 0, 0, 0],
        (0x8000_0001, _) => [!0, !0, !missing, !0],
        (0x8000_0008, _) => [0x3030, !0, 0, 0],
        _ => [!0; 4],
    })
}

/// The software CPU, which is set up once for all cases.
pub struct Guest {
    cpu: Executor,
    flat: Flat,
}

/// The outcome of a run.
pub enum Outcome {
    Done(Box<Regs>, Option<Fault>),
    /// The CPU reports that it does not implement this instruction.
    Unimplemented(&'static str),
    /// Any other exit, which is a bug.
    Strange(String),
}

impl Guest {
    pub fn new(arena: &Arena) -> Guest {
        slat_guard::install().expect("signal handlers");
        let base = arena.base as u64;
        let idt = arena.bytes_mut(IDT, VECTORS * 16);
        for (vector, gate) in idt.chunks_exact_mut(16).enumerate() {
            let handler = base + HANDLERS as u64 + 4 * vector as u64;
            gate[..2].copy_from_slice(&(handler as u16).to_le_bytes());
            gate[2..4].copy_from_slice(&CODE_SELECTOR.to_le_bytes());
            gate[4] = 1; // the first stack of the interrupt stack table
            gate[5] = 0x8e; // present interrupt gate
            gate[6..12].copy_from_slice(&(handler >> 16).to_le_bytes()[..6]);
        }
        let handlers = arena.bytes_mut(HANDLERS, PAGE);
        handlers.fill(HLT);
        // inc qword [rip + TAKEN]; iretq
        let handler = 4 * usize::from(INTERRUPT);
        let distance = TAKEN as i32 - (HANDLERS + handler + 7) as i32;
        handlers[handler..][..3].copy_from_slice(&[0x48, 0xff, 0x05]);
        handlers[handler + 3..][..4].copy_from_slice(&distance.to_le_bytes());
        handlers[handler + 7..][..2].copy_from_slice(&[0x48, 0xcf]);
        arena
            .bytes_mut(TSS + 0x24, 8)
            .copy_from_slice(&(base + FAULT_STACK as u64).to_le_bytes());
        let gdt = arena.bytes_mut(GDT, 24);
        gdt[8..16].copy_from_slice(&0x00af_9b00_0000_ffffu64.to_le_bytes());
        gdt[16..24].copy_from_slice(&0x00cf_9300_0000_ffffu64.to_le_bytes());

        let mut cpu = Executor::try_new(CodePages::try_new().unwrap()).unwrap();
        crate::compiled::compile(&mut cpu);
        cpu.set_features(features());
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
            limit: VECTORS as u16 * 16 - 1,
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
            flat: Flat {
                base,
                protected: [false; _],
            },
        }
    }

    /// Executes `code`, beginning with `regs`, like [`Arena::run`].
    pub fn run(&mut self, arena: &Arena, code: Placed<'_>, regs: &Regs, beside: Beside) -> Outcome {
        let pages = arena.place(code);
        for end in code.ends {
            pages[end] = HLT;
        }

        let state = &mut self.cpu.state;
        state.gpr = regs.gpr;
        state.rflags = regs.rflags;
        state.rip = regs.rip;
        state.set_fxsave(&regs.fx);
        for (half, bytes) in state.ymm_high.iter_mut().zip(regs.high.chunks_exact(16)) {
            *half = u128::from_le_bytes(bytes.try_into().unwrap());
        }
        match self.run_beside(code, beside) {
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
        // The handler ran in the same segments; the next run needs those of the start.
        let state = &mut self.cpu.state;
        state.ss = state.ds;
        Outcome::Done(after, Some(Fault { vector, error, cr2 }))
    }

    /// Runs until the bytes end, with the events `beside`.
    fn run_beside(&mut self, code: Placed<'_>, beside: Beside) -> Exit {
        const BETWEEN: Duration = Duration::from_micros(2);
        let (attention, over) = (AtomicU32::new(0), AtomicBool::new(false));
        self.cpu.requests.debugger.single_step = beside == Beside::Steps;
        if matches!(beside, Beside::Nothing | Beside::Steps) {
            return self.run_on(code, &attention, beside);
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut last = Instant::now();
                while !over.load(Ordering::Relaxed) {
                    if attention.load(Ordering::Relaxed) & 1 != 0 {
                        last = Instant::now();
                    } else if last.elapsed() > BETWEEN {
                        attention.fetch_or(1, Ordering::Relaxed);
                    }
                }
            });
            let exit = self.run_on(code, &attention, beside);
            over.store(true, Ordering::Relaxed);
            exit
        })
    }

    fn run_on(&mut self, code: Placed<'_>, attention: &AtomicU32, beside: Beside) -> Exit {
        loop {
            match self.cpu.run(&mut self.flat, attention) {
                // The trap of HLT ends the halt.
                Exit::Debug { .. } if self.is_behind_halt(code) => return Exit::Hlt,
                Exit::Debug { .. } => {}
                Exit::Attention => {
                    attention.fetch_and(!1, Ordering::Relaxed);
                    match beside {
                        Beside::Interrupts if self.cpu.can_take_interrupt() => {
                            self.cpu.inject_interrupt(INTERRUPT);
                        }
                        Beside::Protection => {
                            self.flat.protected = [true; _];
                            self.cpu.flush_tlb();
                        }
                        _ => {}
                    }
                }
                exit => return exit,
            }
        }
    }

    fn is_behind_halt(&self, code: Placed<'_>) -> bool {
        let at = self.cpu.state.rip.wrapping_sub(self.flat.base + 1) as usize;
        code.ends.contains(&at) || (HANDLERS..HANDLERS + PAGE).contains(&at)
    }

    /// Returns the number of interrupts that were taken.
    pub fn interrupts(arena: &Arena) -> u64 {
        u64::from_le_bytes(arena.bytes(TAKEN, 8).try_into().unwrap())
    }
}

const HLT: u8 = 0xf4;
