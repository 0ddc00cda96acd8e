//! Translates vector instructions that become instructions of Cranelift: moves, and the operations that string
//! functions use. Each of these operations computes each element separately, and elements have at most 64 bits. So an
//! operation on 256 bits becomes two operations on 128 bits. Cranelift has no wider vectors on this host.

use super::kept::{Place, Vectors};
use super::translate::Translator;
use crate::Cpu;
use crate::mode;
use crate::op::{MEM, Op, bytes_of};
use crate::simd::{self, Each, Elements};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{F32X4, F64X2, I8X16, I16X8, I32X4, I64, I64X2};
use cranelift_codegen::ir::{Endianness, InstBuilder, MemFlags, Type, Value};
use cranelift_frontend::FuncInstBuilder;
use iced_x86::{EncodingKind, Instruction, Mnemonic, OpKind, Register};
use std::mem::offset_of;

/// A function that emits an operation on corresponding elements, or only on the lowest ones.
pub(super) type Operate = for<'a, 'f> fn(FuncInstBuilder<'a, 'f>, Value, Value) -> Value;

/// Returns the numbers of the operands that are an instruction's two sources. Without VEX, the destination is the first
/// source.
pub(super) fn sources(insn: &Instruction) -> [usize; 2] {
    match insn.encoding() == EncodingKind::VEX {
        true => [1, 2],
        false => [0, 1],
    }
}

/// Returns the type of a vector with these elements.
pub(super) fn type_of(elements: Elements) -> Type {
    match elements {
        Elements::Bytes => I8X16,
        Elements::Words => I16X8,
        Elements::Doublewords => I32X4,
        Elements::Quadwords => I64X2,
        Elements::Singles | Elements::Single => F32X4,
        Elements::Doubles | Elements::Double => F64X2,
    }
}

/// Returns the element type and the operation of an instruction with two sources of integer elements.
fn operation(mnemonic: Mnemonic) -> Option<(Type, Operate)> {
    let (each, elements) = simd::meaning(mnemonic)?;
    let ty = type_of(elements);
    let operate: Operate = match each {
        _ if ty.lane_type().is_float() => return None,
        Each::And => |ins, a, b| ins.band(a, b),
        Each::AndNot => |ins, a, b| ins.band_not(b, a),
        Each::Or => |ins, a, b| ins.bor(a, b),
        Each::Xor => |ins, a, b| ins.bxor(a, b),
        Each::Equal => |ins, a, b| ins.icmp(IntCC::Equal, a, b),
        Each::Greater => |ins, a, b| ins.icmp(IntCC::SignedGreaterThan, a, b),
        Each::Add => |ins, a, b| ins.iadd(a, b),
        Each::Subtract => |ins, a, b| ins.isub(a, b),
        Each::Multiply => |ins, a, b| ins.imul(a, b),
        Each::Min => |ins, a, b| ins.smin(a, b),
        Each::Max => |ins, a, b| ins.smax(a, b),
        Each::MinUnsigned => |ins, a, b| ins.umin(a, b),
        Each::MaxUnsigned => |ins, a, b| ins.umax(a, b),
        _ => return None,
    };
    Some((ty, operate))
}

/// If an instruction moves a whole register, returns whether its memory operand must be aligned. `None`: the
/// instruction does not move a whole register.
fn whole_move(mnemonic: Mnemonic) -> Option<bool> {
    use Mnemonic::*;
    match mnemonic {
        Movaps | Movapd | Movdqa | Movntdq | Movntps | Movntpd | Movntdqa => Some(true),
        Vmovaps | Vmovapd | Vmovdqa | Vmovntdq | Vmovntps | Vmovntpd | Vmovntdqa => Some(true),
        Movups | Movupd | Movdqu | Lddqu | Vmovups | Vmovupd | Vmovdqu | Vlddqu => Some(false),
        _ => None,
    }
}

impl Translator<'_> {
    fn vector_offset(n: usize) -> usize {
        match n {
            0..16 => offset_of!(Cpu, state.xmm) + 16 * n,
            _ => offset_of!(Cpu, state.ymm_high) + 16 * (n - 16),
        }
    }

    /// Forgets the values of the vector registers. Call after they were written back.
    pub(super) fn forget_vectors(&mut self) {
        self.now.vectors = Vectors::default();
    }

    /// Emits stores of the changed vector registers to the CPU. Returns whether there were any.
    pub(super) fn write_vectors(&mut self) -> bool {
        let changed = std::mem::take(&mut self.now.vectors.changed);
        self.now.vectors.computed = 0;
        for n in (0..32).filter(|n| changed >> n & 1 != 0) {
            if let Some(value) = self.now.vectors.known[n] {
                self.set_field(Self::vector_offset(n), value);
            }
        }
        changed != 0
    }

    /// Returns a half of a vector register. Half 0 is the lower half.
    pub(super) fn half(&mut self, r: u8, half: usize) -> Value {
        let n = usize::from(r & 15) + 16 * half;
        match self.now.vectors.known[n] {
            Some(value) => value,
            None => {
                let value = self.field(I8X16, Self::vector_offset(n));
                self.now.vectors.known[n] = Some(value);
                value
            }
        }
    }

    fn set_half(&mut self, r: u8, half: usize, value: Value) {
        let n = usize::from(r & 15) + 16 * half;
        let value = self.as_elements(value, I8X16);
        let before = self.now.vectors.known[n].replace(value);
        self.now.vectors.changed |= 1 << n;
        if self.now.vectors.computed >> n & 1 != 0
            && let Some(before) = before
        {
            self.now.vectors.computed &= !(1 << n);
            self.keep_computed(before);
        }
    }

    /// Makes Cranelift compute a value even if nothing uses it: a floating-point computation also sets flags of MXCSR.
    pub(super) fn keep_computed(&mut self, value: Value) {
        self.set_field(offset_of!(Cpu, compiled.unused), value);
    }

    /// Sets a vector register like [`set_vector`](Self::set_vector), but to a floating-point result. `sources` are the
    /// registers from which the result was computed.
    pub(super) fn set_computed(
        &mut self,
        insn: &Instruction,
        r: u8,
        sources: &[u8],
        halves: &[Value],
    ) {
        let bits = |r: u8| (if halves.len() > 1 { 0x1_0001 } else { 1 }) << (r & 15);
        for source in sources.iter().filter(|source| **source != MEM) {
            self.now.vectors.computed &= !bits(*source);
        }
        self.set_vector(insn, r, halves);
        self.now.vectors.computed |= bits(r);
    }

    /// Writes the lower half, or both halves, of a vector register. If a VEX-encoded instruction writes only the lower
    /// half, clears the upper half.
    pub(super) fn set_vector(&mut self, insn: &Instruction, r: u8, halves: &[Value]) {
        for (half, value) in halves.iter().enumerate() {
            self.set_half(r, half, *value);
        }
        if halves.len() == 1 && insn.encoding() == EncodingKind::VEX {
            let zero = self.zeroes();
            self.set_half(r, 1, zero);
        }
    }

    /// Returns a vector of zeroes.
    pub(super) fn zeroes(&mut self) -> Value {
        let zero = self.constant(0);
        self.b.ins().scalar_to_vector(I64X2, zero)
    }

    /// Returns the bits of `value` as a vector with another type of elements.
    pub(super) fn as_elements(&mut self, value: Value, ty: Type) -> Value {
        match self.b.func.dfg.value_type(value) == ty {
            true => value,
            false => {
                let flags = MemFlags::new().with_endianness(Endianness::Little);
                self.b.ins().bitcast(ty, flags, value)
            }
        }
    }

    /// Returns the lower 64 bits of a vector register.
    pub(super) fn low_of(&mut self, r: u8) -> Value {
        let value = self.half(r, 0);
        let value = self.as_elements(value, I64X2);
        self.b.ins().extractlane(value, 0)
    }

    /// Returns the linear address of a memory operand of `halves` halves, and the logarithm of its size. If it must be
    /// aligned and is not, the code leaves the instruction to the interpreter, which raises #GP.
    fn vector_in_memory(&mut self, op: &Op, halves: usize, is_aligned: bool) -> (Value, u8) {
        let lin = self.lin(op);
        let bytes = 16 * halves;
        if is_aligned {
            let rest = self.b.ins().band_imm(lin, bytes as i64 - 1);
            self.interpret_if(rest);
        }
        (lin, bytes.trailing_zeros() as u8)
    }

    /// Reads operand `k`, a register or memory, as `halves` halves.
    pub(super) fn vector(
        &mut self,
        op: &Op,
        k: usize,
        halves: usize,
        is_aligned: bool,
    ) -> Vec<Value> {
        if op.r[k] != MEM {
            return (0..halves).map(|half| self.half(op.r[k], half)).collect();
        }
        let (lin, size) = self.vector_in_memory(op, halves, is_aligned);
        let Place { host, offset } = self.place_to_load(lin, size);
        (0..halves as i32)
            .map(|half| {
                let flags = Self::guarded();
                self.b.ins().load(I8X16, flags, host, offset + 16 * half)
            })
            .collect()
    }

    fn store_vector(&mut self, op: &Op, values: &[Value], is_aligned: bool) {
        let (lin, size) = self.vector_in_memory(op, values.len(), is_aligned);
        if values.len() > 1 {
            // The store of the second half may fail after that of the first half. Then the interpreter must not repeat
            // loads from before this instruction.
            self.set_checkpoint();
        }
        let Place { host, offset } = self.place_to_store(lin, size);
        for (half, value) in values.iter().enumerate() {
            let flags = Self::guarded();
            let at = offset + 16 * half as i32;
            self.b.ins().store(flags, *value, host, at);
        }
        self.now.has_changed = true;
    }

    /// Translates a vector instruction. Returns `None` without effect if there is no translation.
    pub(super) fn vector_instruction(&mut self, insn: &Instruction, op: &Op) -> Option<()> {
        use Mnemonic::*;
        let vex = insn.encoding() == EncodingKind::VEX;
        let off = if vex { mode::NO_AVX } else { mode::NO_SSE };
        let registers = (0..insn.op_count())
            .filter(|k| insn.op_kind(*k) == OpKind::Register)
            .map(|k| insn.op_register(k));
        let is_wide = registers.clone().any(Register::is_ymm);
        let are_ours = |r: Register| r.is_xmm() || r.is_ymm() || r.is_gpr();
        let is_on = self.mode & (off | mode::TASK_SWITCHED) == 0;
        if !is_on || !registers.clone().all(are_ours) || !simd::is_offered(insn) {
            return None;
        }
        let halves = if is_wide { 2 } else { 1 };
        if let Some(is_aligned) = whole_move(insn.mnemonic()) {
            let values = self.vector(op, 1, halves, is_aligned);
            match op.r[0] {
                MEM => self.store_vector(op, &values, is_aligned),
                r => self.set_vector(insn, r, &values),
            }
            return Some(());
        }
        if let Some((ty, operate)) = operation(insn.mnemonic()) {
            self.operate(insn, op, halves, ty, operate);
            return Some(());
        }
        match insn.mnemonic() {
            Pmovmskb | Vpmovmskb => {
                let values = self.vector(op, 1, halves, false);
                let mut signs = self.b.ins().vhigh_bits(I64, values[0]);
                if let Some(high) = values.get(1) {
                    let high = self.b.ins().vhigh_bits(I64, *high);
                    let high = self.b.ins().ishl_imm(high, 16);
                    signs = self.b.ins().bor(signs, high);
                }
                self.set(op.r[0], 3, signs);
            }
            Movd | Movq | Vmovd | Vmovq => self.move_low(insn, op),
            Vpbroadcastb => self.broadcast(insn, op, 0, halves),
            Vpbroadcastw => self.broadcast(insn, op, 1, halves),
            Vpbroadcastd => self.broadcast(insn, op, 2, halves),
            Vpbroadcastq => self.broadcast(insn, op, 3, halves),
            Vzeroupper => {
                let zero = self.zeroes();
                (0..16).for_each(|r| self.set_half(r, 1, zero));
            }
            _ => {
                return (self.element_instruction(insn, op, halves))
                    .or_else(|| self.float_instruction(insn, op, halves))
                    .or_else(|| self.stub_instruction(insn, op, halves));
            }
        }
        Some(())
    }

    /// Writes the result of an operation on two sources to the first operand.
    pub(super) fn operate(
        &mut self,
        insn: &Instruction,
        op: &Op,
        halves: usize,
        ty: Type,
        operate: Operate,
    ) {
        let [first, second] = sources(insn);
        let is_aligned = insn.encoding() != EncodingKind::VEX;
        let b = self.vector(op, second, halves, is_aligned);
        let a = self.vector(op, first, halves, false);
        let values: Vec<_> = (a.into_iter().zip(b))
            .map(|(a, b)| {
                let (a, b) = (self.as_elements(a, ty), self.as_elements(b, ty));
                operate(self.b.ins(), a, b)
            })
            .collect();
        match ty.lane_type().is_float() {
            true => self.set_computed(insn, op.r[0], &[op.r[first], op.r[second]], &values),
            false => self.set_vector(insn, op.r[0], &values),
        }
    }

    /// Translates MOVD and MOVQ between a vector register and a general register or memory. The upper bits of a vector
    /// register become 0.
    fn move_low(&mut self, insn: &Instruction, op: &Op) {
        let is_vector = |k| insn.op_kind(k) == OpKind::Register && insn.op_register(k).is_xmm();
        let bytes = match (0..2).find(|k| !is_vector(*k)) {
            Some(k) => bytes_of(insn, k as usize),
            None => 8,
        };
        let size = bytes.trailing_zeros() as u8;
        let value = if is_vector(1) {
            let low = self.low_of(op.r[1]);
            self.narrow(low, size)
        } else {
            self.operand(op, 1, size)
        };
        if is_vector(0) {
            let low = self.wide(value);
            let value = self.b.ins().scalar_to_vector(I64X2, low);
            self.set_vector(insn, op.r[0], &[value]);
        } else if op.r[0] == MEM {
            let lin = self.lin(op);
            self.store(lin, size, value);
        } else {
            self.set(op.r[0], size, value);
        }
    }

    /// Fills all elements of a register with the lowest element of the source.
    fn broadcast(&mut self, insn: &Instruction, op: &Op, size: u8, halves: usize) {
        let element = match op.r[1] {
            MEM => self.operand(op, 1, size),
            r => {
                let low = self.low_of(r);
                self.narrow(low, size)
            }
        };
        let element = self.wide(element);
        let ones = u64::MAX / (u64::MAX >> (64 - (8 << size)));
        let all = self.b.ins().imul_imm(element, ones as i64);
        let value = self.b.ins().splat(I64X2, all);
        self.set_vector(insn, op.r[0], &vec![value; halves]);
    }
}
