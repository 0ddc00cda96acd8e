//! String instructions: MOVS STOS LODS SCAS CMPS, with REP.
//!
//! An instruction can be interrupted between two iterations: registers always describe the rest. A repeated instruction
//! therefore stops after a bounded number of iterations and starts again at its own RIP; so do iterations that access MMIO,
//! each of which is a whole instruction to the device model.

use crate::Cpu;
use crate::int::{Int, by_size};
use crate::op::{Break, Flow, Handler, Op};
use crate::state::flags::{DF, RF};
use iced_x86::{Instruction, Mnemonic};

/// Iterations between checks of `attention`.
const BATCH: u64 = 4096;
/// Bytes that a bulk step buffers.
const BULK: usize = 4096;

/// The bytes of a bulk step. Aligned to a cache line: otherwise a copy takes up to a sixth longer.
#[repr(align(64))]
struct Buffer([u8; BULK]);

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

    /// Returns the linear address that `register` points to in segment `seg`.
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

    /// Moves RSI or RDI by one element of `bytes` in the direction of DF.
    pub(crate) fn advance_string(&mut self, register: usize, address_size: u8, bytes: u8) {
        self.advance_by(register, address_size, u64::from(bytes));
    }

    fn advance_by(&mut self, register: usize, address_size: u8, bytes: u64) {
        let by = if self.state.rflags & DF != 0 {
            bytes.wrapping_neg()
        } else {
            bytes
        };
        let v = self
            .string_register(register, address_size)
            .wrapping_add(by);
        self.set_string_register(register, address_size, v);
    }

    /// Leaves a repeated instruction before its last iteration. RF keeps an instruction breakpoint from being hit again (SDM
    /// volume 3, "Instruction-Breakpoint Exception Condition").
    fn iterate_later(&mut self, op: &Op) -> Flow {
        self.state.rflags |= RF;
        self.slow = true;
        let rip = self.rip_of(op);
        self.jump(rip)
    }

    /// Returns the number of elements of `bytes` between `lin` and the end of its page.
    fn elements_in_page(lin: u64, bytes: u64) -> u64 {
        (0x1000 - (lin & 0xfff)) / bytes
    }
}

/// Runs `once` as often as the prefix says, or until `once` returns `false`.
#[inline(always)]
fn repeat<T: Int>(
    cpu: &mut Cpu,
    op: &Op,
    mut once: impl FnMut(&mut Cpu) -> Result<bool, Break>,
) -> Flow {
    if op.rep == 0 {
        once(cpu)?;
        return cpu.stored();
    }
    let address_size = op.address_size;
    for done in 0.. {
        let left = cpu.string_count(address_size);
        if left == 0 {
            return cpu.stored();
        }
        let ends = done == BATCH || cpu.stop || cpu.has_answers() || cpu.traps_after_iteration();
        if done > 0 && ends {
            break;
        }
        match once(cpu) {
            Ok(goes_on) => {
                cpu.set_string_register(1, address_size, left - 1);
                if !goes_on {
                    return cpu.stored();
                }
            }
            // Finished iterations count; the rest starts as an instruction of its own and fails there.
            Err(_) if done > 0 => break,
            Err(why) => return Err(why),
        }
    }
    cpu.iterate_later(op)
}

fn movs<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    if op.rep != 0
        && let Some(flow) = movs_bulk::<T>(cpu, op)?
    {
        return flow;
    }
    repeat::<T>(cpu, op, |cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let v = cpu.load::<T>(source)?;
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        cpu.store::<T>(destination, v)?;
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(true)
    })
}

/// Copies whole stretches forward within a page on both sides. `None`: copy one by one.
fn movs_bulk<T: Int>(cpu: &mut Cpu, op: &Op) -> Result<Option<Flow>, Break> {
    let alone = cpu.watch.steps || cpu.watch.data;
    if cpu.state.rflags & DF != 0 || !cpu.is_64() || op.address_size != 8 || alone {
        return Ok(None);
    }
    let mut copied = 0;
    loop {
        let left = cpu.state.gpr[1];
        if left == 0 {
            return Ok(Some(cpu.stored()));
        }
        let source = cpu.string_address(op.seg, 6, 8, T::BYTES as u32)?;
        let destination = cpu.string_address(0, 7, 8, T::BYTES as u32)?;
        let n = left
            .min(Cpu::elements_in_page(source, T::BYTES))
            .min(Cpu::elements_in_page(destination, T::BYTES));
        let bytes = (n * T::BYTES) as usize;
        // A copy to overlapping higher addresses repeats a pattern: only element by element is right.
        let overlaps = destination.wrapping_sub(source) < bytes as u64;
        if n < 2 || overlaps || copied >= 16 * BULK {
            if copied == 0 {
                return Ok(None);
            }
            return Ok(Some(cpu.iterate_later(op)));
        }
        let step = |cpu: &mut Cpu| -> Result<bool, Break> {
            let Some(from) = cpu.read_place(source, bytes)? else {
                return Ok(false);
            };
            let Some(to) = cpu.write_place(destination, bytes)? else {
                return Ok(false);
            };
            let mut buffer = Buffer([0; BULK]);
            let buffer = &mut buffer.0[..bytes];
            // SAFETY: a translation of guest memory, which is accessed guarded only.
            if unsafe { slat_guard::copy_in(buffer, from) }.is_err() {
                cpu.gone(source, from, crate::Access::Read)?;
                return Err(Break::Retry);
            }
            // SAFETY: as above. Bytes copied before the memory was gone are copied again.
            let copied = cpu.write_to(to, |to| unsafe { slat_guard::copy_out(to, buffer) })?;
            copied.map(|()| true).ok_or(Break::Retry)
        };
        match step(cpu) {
            Ok(true) => {
                cpu.state.gpr[6] = cpu.state.gpr[6].wrapping_add(bytes as u64);
                cpu.state.gpr[7] = cpu.state.gpr[7].wrapping_add(bytes as u64);
                cpu.state.gpr[1] = left - n;
                copied += bytes;
                if cpu.stop && cpu.state.gpr[1] != 0 {
                    return Ok(Some(cpu.iterate_later(op)));
                }
            }
            Ok(false) if copied == 0 => return Ok(None),
            Ok(false) => return Ok(Some(cpu.iterate_later(op))),
            Err(_) if copied > 0 => return Ok(Some(cpu.iterate_later(op))),
            Err(why) => return Err(why),
        }
    }
}

fn stos<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    if op.rep != 0
        && let Some(flow) = stos_bulk::<T>(cpu, op)?
    {
        return flow;
    }
    repeat::<T>(cpu, op, |cpu| {
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let v = T::get(cpu, 0);
        cpu.store::<T>(destination, v)?;
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(true)
    })
}

/// Fills whole stretches forward within a page. `None`: fill one by one.
fn stos_bulk<T: Int>(cpu: &mut Cpu, op: &Op) -> Result<Option<Flow>, Break> {
    let alone = cpu.watch.steps || cpu.watch.data;
    if cpu.state.rflags & DF != 0 || !cpu.is_64() || op.address_size != 8 || alone {
        return Ok(None);
    }
    let value = T::get(cpu, 0).zx().to_le_bytes();
    let mut pattern = [0; BULK];
    for part in pattern.chunks_exact_mut(T::BYTES as usize) {
        part.copy_from_slice(&value[..T::BYTES as usize]);
    }
    let mut filled = 0;
    loop {
        let left = cpu.state.gpr[1];
        if left == 0 {
            return Ok(Some(cpu.stored()));
        }
        let destination = cpu.string_address(0, 7, 8, T::BYTES as u32)?;
        let n = left.min(Cpu::elements_in_page(destination, T::BYTES));
        let bytes = (n * T::BYTES) as usize;
        if n < 2 || filled >= 16 * BULK {
            if filled == 0 {
                return Ok(None);
            }
            return Ok(Some(cpu.iterate_later(op)));
        }
        let step = |cpu: &mut Cpu| -> Result<bool, Break> {
            let Some(to) = cpu.write_place(destination, bytes)? else {
                return Ok(false);
            };
            // SAFETY: a translation of guest memory, which is accessed guarded only. Bytes written before the memory was gone
            // are written again.
            let write = |to: *mut u8| unsafe { slat_guard::copy_out(to, &pattern[..bytes]) };
            cpu.write_to(to, write)?.map(|()| true).ok_or(Break::Retry)
        };
        match step(cpu) {
            Ok(true) => {
                cpu.state.gpr[7] = cpu.state.gpr[7].wrapping_add(bytes as u64);
                cpu.state.gpr[1] = left - n;
                filled += bytes;
                if cpu.stop && cpu.state.gpr[1] != 0 {
                    return Ok(Some(cpu.iterate_later(op)));
                }
            }
            Ok(false) if filled == 0 => return Ok(None),
            Err(why) if filled == 0 => return Err(why),
            Ok(false) | Err(_) => return Ok(Some(cpu.iterate_later(op))),
        }
    }
}

fn lods<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    repeat::<T>(cpu, op, |cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let v = cpu.load::<T>(source)?;
        T::set(cpu, 0, v);
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        Ok(true)
    })
}

/// Whether REPE or REPNE continues after a comparison.
fn goes_on(cpu: &Cpu, op: &Op) -> bool {
    cpu.zf() == (op.rep == 1)
}

fn scas<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    repeat::<T>(cpu, op, |cpu| {
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let b = cpu.load::<T>(destination)?;
        let a = T::get(cpu, 0);
        cpu.note_sub(a, b);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(goes_on(cpu, op))
    })
}

fn cmps<T: Int>(cpu: &mut Cpu, op: &Op) -> Flow {
    repeat::<T>(cpu, op, |cpu| {
        let source = cpu.string_address(op.seg, 6, op.address_size, T::BYTES as u32)?;
        let a = cpu.load::<T>(source)?;
        let destination = cpu.string_address(0, 7, op.address_size, T::BYTES as u32)?;
        let b = cpu.load::<T>(destination)?;
        cpu.note_sub(a, b);
        cpu.advance_string(6, op.address_size, T::BYTES as u8);
        cpu.advance_string(7, op.address_size, T::BYTES as u8);
        Ok(goes_on(cpu, op))
    })
}

pub(crate) fn lower(insn: &Instruction, op: &mut Op) -> Option<Handler> {
    if !insn.is_string_instruction() {
        return None;
    }
    let size = match insn.mnemonic() {
        Mnemonic::Movsb | Mnemonic::Stosb | Mnemonic::Lodsb | Mnemonic::Scasb | Mnemonic::Cmpsb => {
            0
        }
        Mnemonic::Movsw | Mnemonic::Stosw | Mnemonic::Lodsw | Mnemonic::Scasw | Mnemonic::Cmpsw => {
            1
        }
        Mnemonic::Movsd | Mnemonic::Stosd | Mnemonic::Lodsd | Mnemonic::Scasd | Mnemonic::Cmpsd => {
            2
        }
        Mnemonic::Movsq | Mnemonic::Stosq | Mnemonic::Lodsq | Mnemonic::Scasq | Mnemonic::Cmpsq => {
            3
        }
        _ => return None,
    };
    op.size = size;
    Some(match insn.mnemonic() {
        Mnemonic::Movsb | Mnemonic::Movsw | Mnemonic::Movsd | Mnemonic::Movsq => {
            by_size!(size, movs)
        }
        Mnemonic::Stosb | Mnemonic::Stosw | Mnemonic::Stosd | Mnemonic::Stosq => {
            by_size!(size, stos)
        }
        Mnemonic::Lodsb | Mnemonic::Lodsw | Mnemonic::Lodsd | Mnemonic::Lodsq => {
            by_size!(size, lods)
        }
        Mnemonic::Scasb | Mnemonic::Scasw | Mnemonic::Scasd | Mnemonic::Scasq => {
            by_size!(size, scas)
        }
        _ => by_size!(size, cmps),
    })
}
