//! String instructions: MOVS, STOS, LODS, SCAS and CMPS, with REP.
//!
//! An instruction can be interrupted between two iterations, because the registers always describe the remaining
//! iterations. So a repeated instruction stops after a bounded number of iterations and starts again at its own RIP. It
//! also stops after each iteration that accesses MMIO, so the device model sees each such iteration as a separate
//! instruction.
//!
//! If there are no watchpoints and no alignment checks, a repeated instruction handles many elements of a page at once
//! ([`stretch`]).

mod stretch;

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Break, Flow, Handler, Op, Row, rows};
use crate::state::flags::{DF, RF};
use iced_x86::Instruction;
use stretch::{Left, Stretch, Then};

/// The number of iterations between two checks of `attention`. In a stretch, [`AT_ONCE`] bytes count as one iteration.
const BATCH: u64 = 4096;
const AT_ONCE: u64 = 16;

impl Cpu {
    pub(crate) fn string_mask(address_size: u8) -> u64 {
        match address_size {
            2 => 0xffff,
            4 => 0xffff_ffff,
            _ => u64::MAX,
        }
    }

    /// Returns RSI (6), RDI (7) or RCX (1) in the width of the address size.
    pub(crate) fn string_register(&self, register: usize, address_size: u8) -> u64 {
        self.state.gpr[register] & Self::string_mask(address_size)
    }

    pub(crate) fn set_string_register(&mut self, register: usize, address_size: u8, v: u64) {
        let reg = &mut self.state.gpr[register];
        *reg = match address_size {
            2 => *reg & !0xffff | v & 0xffff,
            4 => v & 0xffff_ffff,
            _ => v,
        };
    }

    pub(crate) fn string_count(&self, address_size: u8) -> u64 {
        self.string_register(1, address_size)
    }

    /// Returns the linear address of `bytes` bytes in segment `seg` at the offset in `register`.
    pub(crate) fn string_address(
        &mut self,
        seg: u8,
        register: usize,
        address_size: u8,
        bytes: u32,
    ) -> Result<u64, Break> {
        let offset = self.string_register(register, address_size);
        self.segmented(seg, offset, bytes)
    }

    /// Whether DF is set: the instruction proceeds to lower addresses.
    fn is_descending(&self) -> bool {
        self.state.rflags & DF != 0
    }

    /// Moves RSI or RDI by one element of `bytes` in the direction of DF.
    pub(crate) fn advance_string(&mut self, register: usize, address_size: u8, bytes: u8) {
        self.advance_by(register, address_size, u64::from(bytes));
    }

    fn advance_by(&mut self, register: usize, address_size: u8, bytes: u64) {
        let by = if self.is_descending() {
            bytes.wrapping_neg()
        } else {
            bytes
        };
        let v = self
            .string_register(register, address_size)
            .wrapping_add(by);
        self.set_string_register(register, address_size, v);
    }

    /// Stops a repeated instruction before its last iteration; the rest is executed as a new instruction. Sets RF, so
    /// that the rest does not hit an instruction breakpoint (SDM volume 3, "Instruction-Breakpoint Exception
    /// Condition").
    fn iterate_later(&mut self, op: &Op) -> Flow {
        self.state.rflags |= RF;
        self.slow = true;
        let rip = self.rip_of(op);
        self.jump(rip)
    }
}

/// Executes a string instruction with its prefix. `stretch` gets the number of remaining elements, and handles many of
/// them at once if it can. If it returns `None`, `once` handles the next element. If `once` returns `false`, the
/// instruction ends.
#[inline(always)]
fn repeat<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    mut stretch: impl FnMut(&mut Cpu, u64) -> Result<Option<Stretch>, Break>,
    mut once: impl FnMut(&mut Cpu) -> Result<bool, Break>,
) -> Flow {
    if op.rep == 0 {
        once(cpu)?;
        return cpu.stored();
    }
    let address_size = op.address_size;
    let alone = cpu.traps() || cpu.watch.data || cpu.checks_alignment();
    let mut done = 0;
    loop {
        let left = cpu.string_count(address_size);
        if left == 0 {
            return cpu.stored();
        }
        let ends = done >= BATCH || cpu.stop || cpu.has_answers() || cpu.traps_after_iteration();
        if done > 0 && ends {
            break;
        }
        let step = match alone {
            true => Ok(None),
            false => stretch(cpu, left),
        };
        let step = step.and_then(|step| match step {
            Some(stretch) => Ok(stretch),
            None => once(cpu).map(|goes_on| Stretch {
                elements: 1,
                then: if goes_on { Then::Continue } else { Then::End },
            }),
        });
        match step {
            Ok(Stretch { elements, then }) => {
                cpu.set_string_register(1, address_size, left - elements);
                done += 1 + elements * T::BYTES / AT_ONCE;
                match then {
                    Then::Continue => {}
                    Then::End => return cpu.stored(),
                    Then::Leave => break,
                }
            }
            // The finished iterations count as executed. The rest starts again as a new instruction, whose first access
            // then fails.
            Err(_) if done > 0 => break,
            Err(why) => return Err(why),
        }
    }
    cpu.iterate_later(op)
}

fn movs<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let v = cpu.load::<T>(source)?;
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        cpu.store::<T>(destination, v)?;
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(true)
    };
    repeat::<T>(cpu, op, |cpu, left| stretch::copy::<T>(cpu, op, left), once)
}

fn stos<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let v = T::get(cpu, 0);
        cpu.store::<T>(destination, v)?;
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(true)
    };
    repeat::<T>(cpu, op, |cpu, left| stretch::fill::<T>(cpu, op, left), once)
}

fn lods<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let v = cpu.load::<T>(source)?;
        T::set(cpu, 0, v);
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        Ok(true)
    };
    repeat::<T>(
        cpu,
        op,
        |cpu, left| stretch::load_last::<T>(cpu, op, left),
        once,
    )
}

/// Whether REPE or REPNE continues after the last comparison.
fn goes_on(cpu: &Cpu, op: &Op) -> bool {
    cpu.zf() == (op.rep == 1)
}

fn scas<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let b = cpu.load::<T>(destination)?;
        let a = T::get(cpu, 0);
        cpu.note_comparison(a, b);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(goes_on(cpu, op))
    };
    let stretch = |cpu: &mut Cpu, left| {
        let a = T::get(cpu, 0);
        stretch::compare::<T>(cpu, op, left, Left::Accumulator(a))
    };
    repeat::<T>(cpu, op, stretch, once)
}

fn cmps<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    let once = |cpu: &mut Cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let a = cpu.load::<T>(source)?;
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let b = cpu.load::<T>(destination)?;
        cpu.note_comparison(a, b);
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(goes_on(cpu, op))
    };
    let stretch = |cpu: &mut Cpu, left| stretch::compare::<T>(cpu, op, left, Left::Source);
    repeat::<T>(cpu, op, stretch, once)
}

/// Stores the size of the elements in `op`, and returns the size.
fn element(insn: &Instruction, op: &mut Op) -> u8 {
    op.size = insn.memory_size().size().trailing_zeros() as u8;
    op.size
}

/// Lowers MOVS.
pub(crate) fn moving(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(by_size!(element(insn, op), movs))
}

/// Lowers CMPS.
pub(crate) fn comparing(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    Some(by_size!(element(insn, op), cmps))
}

/// MOVSD and CMPSD have no rows here, because SSE2 instructions have the same mnemonics. `lower` distinguishes them.
pub(crate) const ROWS: &[Row] = rows! { |insn, op|
    Movsb | Movsw | Movsq => moving(insn, op)?,
    Cmpsb | Cmpsw | Cmpsq => comparing(insn, op)?,
    Stosb | Stosw | Stosd | Stosq => by_size!(element(insn, op), stos),
    Lodsb | Lodsw | Lodsd | Lodsq => by_size!(element(insn, op), lods),
    Scasb | Scasw | Scasd | Scasq => by_size!(element(insn, op), scas),
};
