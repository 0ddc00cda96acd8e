//! Selects and emits the host's instructions for an instruction of the intermediate language.
//!
//! If a value is narrower than its register, the upper bits of the register are undefined.

use super::edges::Moves;
use super::encode::{Alu, Count, Place, Shift, Unary};
use super::places::{ARGUMENTS, RAX, RCX, RDX};
use super::{Generator, Reg, Result, Unknown};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8, I16, I32, I64};
use cranelift_codegen::ir::{Block, BlockCall, Inst, InstructionData, MemFlags, Opcode, Value};

/// Conditions, with their numbers in the host's instructions.
const EQUAL: u8 = 4;
const NOT_EQUAL: u8 = 5;
const SIGN: u8 = 8;

fn condition(cc: IntCC) -> u8 {
    match cc {
        IntCC::UnsignedLessThan => 2,
        IntCC::UnsignedGreaterThanOrEqual => 3,
        IntCC::Equal => EQUAL,
        IntCC::NotEqual => NOT_EQUAL,
        IntCC::UnsignedLessThanOrEqual => 6,
        IntCC::UnsignedGreaterThan => 7,
        IntCC::SignedLessThan => 12,
        IntCC::SignedGreaterThanOrEqual => 13,
        IntCC::SignedLessThanOrEqual => 14,
        IntCC::SignedGreaterThan => 15,
    }
}

/// An operand that an instruction only reads.
#[derive(Clone, Copy)]
enum Operand {
    Value(Value),
    Immediate(i64),
}

/// Returns the lowest 1 << `size` bytes of a number, sign-extended.
fn truncate(value: i64, size: u8) -> i64 {
    let unused = 64 - (8 << size);
    value << unused >> unused
}

impl Generator<'_> {
    /// Returns the logarithm of a value's size in bytes.
    pub(super) fn size(&self, value: Value) -> Result<u8> {
        match self.func.dfg.value_type(value) {
            I8 => Ok(0),
            I16 => Ok(1),
            I32 => Ok(2),
            I64 => Ok(3),
            _ => Err(Unknown),
        }
    }

    /// Emits the code of the instruction `inst`, and counts its uses.
    pub(super) fn select(&mut self, inst: Inst, next: Option<Block>) -> Result {
        use Opcode::*;
        let data = &self.func.dfg.insts[inst];
        let result = self.func.dfg.inst_results(inst).first().copied();
        let result = |_: &Self| result.ok_or(Unknown);
        match *data {
            InstructionData::NullAry {
                opcode: GetPinnedReg,
            } => self.done(),
            InstructionData::UnaryImm { opcode: Iconst, .. } => self.done(),
            InstructionData::Binary {
                opcode,
                args: [a, b],
            } => {
                self.binary(opcode, result(self)?, a, Operand::Value(b))?;
            }
            InstructionData::BinaryImm64 { opcode, arg, imm } => {
                let opcode = match opcode {
                    IaddImm => Iadd,
                    ImulImm => Imul,
                    BandImm => Band,
                    BorImm => Bor,
                    BxorImm => Bxor,
                    RotlImm => Rotl,
                    RotrImm => Rotr,
                    IshlImm => Ishl,
                    UshrImm => Ushr,
                    SshrImm => Sshr,
                    _ => return Err(Unknown),
                };
                self.binary(opcode, result(self)?, arg, Operand::Immediate(imm.bits()))?;
            }
            InstructionData::Unary { opcode, arg } => self.unary(opcode, result(self)?, arg)?,
            InstructionData::IntCompare { .. } | InstructionData::IntCompareImm { .. } => {
                let condition = self.compare(inst)?;
                let register = self.free(false);
                self.asm.set(condition, register);
                self.finish(result(self)?, register);
            }
            InstructionData::Ternary {
                opcode: Select,
                args,
            } => self.choose(result(self)?, args)?,
            InstructionData::Load {
                opcode: Load,
                arg,
                flags,
                offset,
            } => {
                self.load(result(self)?, arg, flags, offset.into())?;
            }
            InstructionData::LoadNoOffset {
                opcode: AtomicLoad,
                arg,
                flags,
            } => {
                self.load(result(self)?, arg, flags, 0)?;
            }
            InstructionData::Store {
                opcode: Store,
                args: [value, address],
                flags,
                offset,
            } => {
                self.store(value, address, flags, offset.into())?;
            }
            InstructionData::AtomicCas {
                args: [address, old, new],
                flags,
                ..
            } => {
                self.size(old)?;
                self.take(RAX);
                let (address, new) = (self.get(address), self.get(new));
                self.copy(old, RAX);
                self.guard(flags);
                self.asm.compare_exchange(self.size(old)?, address, new);
                self.finish(result(self)?, RAX);
            }
            InstructionData::CallIndirect { .. } => self.call(inst)?,
            InstructionData::Jump { destination, .. } => self.jump(&destination, next)?,
            InstructionData::Brif { arg, blocks, .. } => self.fork(arg, &blocks, next)?,
            InstructionData::MultiAry { opcode: Return, .. } => {
                let value = self.func.dfg.inst_args(inst)[0];
                self.copy(value, RAX);
                self.asm.leave();
                self.done();
            }
            _ => return Err(Unknown),
        }
        Ok(())
    }

    /// Ends an instruction that leaves no result in a register.
    fn done(&mut self) {
        self.count_uses();
        self.places.unlock();
    }

    fn binary(&mut self, opcode: Opcode, result: Value, a: Value, b: Operand) -> Result {
        use Opcode::*;
        let size = self.size(result)?;
        let alu = match opcode {
            Iadd => Alu::Add,
            Isub => Alu::Sub,
            Band => Alu::And,
            Bor => Alu::Or,
            Bxor => Alu::Xor,
            BandNot => {
                let Operand::Value(b) = b else {
                    return Err(Unknown);
                };
                let other = self.get(a);
                let register = self.change(b);
                self.asm.unary(Unary::Not, size, register);
                self.asm.alu(Alu::And, size, register, other);
                self.finish(result, register);
                return Ok(());
            }
            Imul => return self.multiply(size, result, a, b),
            Umulhi | Smulhi | Udiv => return self.wide(opcode, size, result, a, b),
            Ishl => return self.shift(Shift::Shl, size, result, a, b),
            Ushr => return self.shift(Shift::Shr, size, result, a, b),
            Sshr => return self.shift(Shift::Sar, size, result, a, b),
            Rotl => return self.shift(Shift::Rol, size, result, a, b),
            Rotr => return self.shift(Shift::Ror, size, result, a, b),
            _ => return Err(Unknown),
        };
        match self.immediate(b, size) {
            Some(value) if alu == Alu::Add && size == 3 && self.is_kept_after(a) => {
                let from = self.get(a);
                let register = self.free(self.is_long(result));
                self.asm.address(register, Place::Memory(from, value));
                self.finish(result, register);
            }
            Some(-1) if alu == Alu::Xor => {
                let register = self.change(a);
                self.asm.unary(Unary::Not, size, register);
                self.finish(result, register);
            }
            Some(value) => {
                let register = self.change(a);
                self.asm.alu_immediate(alu, size, register, value);
                self.finish(result, register);
            }
            None if alu == Alu::And
                && size == 3
                && matches!(b, Operand::Immediate(0xffff_ffff)) =>
            {
                let from = self.get(a);
                let register = self.free(self.is_long(result));
                self.asm.zero_extend(2, register, Place::Register(from));
                self.finish(result, register);
            }
            None => {
                let other = self.operand(b);
                let is_added = alu == Alu::Add && size == 3 && self.is_kept_after(a);
                if is_added && other != Reg(4) {
                    let from = self.get(a);
                    let register = self.free(self.is_long(result));
                    self.asm.address(register, Place::Sum(from, other, 0));
                    self.finish(result, register);
                } else {
                    let register = self.change(a);
                    self.asm.alu(alu, size, register, other);
                    self.finish(result, register);
                }
            }
        }
        Ok(())
    }

    /// Whether the current instruction must not overwrite a value's register: the value is used again, or is the
    /// address of `Cpu`.
    fn is_kept_after(&self, value: Value) -> bool {
        self.is_cpu(value) || self.places.register(value).is_some() && self.places.left(value) > 1
    }

    /// Returns an operand as an immediate, if it is a constant that fits into the instruction.
    fn immediate(&self, operand: Operand, size: u8) -> Option<i32> {
        let value = match operand {
            Operand::Immediate(value) => value,
            Operand::Value(value) => self.constant(value)?,
        };
        truncate(value, size).try_into().ok()
    }

    /// Returns a register that holds an operand, and locks it.
    fn operand(&mut self, operand: Operand) -> Reg {
        match operand {
            Operand::Value(value) => self.get(value),
            Operand::Immediate(value) => {
                let register = self.free(false);
                self.asm.constant(register, value);
                register
            }
        }
    }

    fn multiply(&mut self, size: u8, result: Value, a: Value, b: Operand) -> Result {
        let other = self.operand(b);
        let register = self.change(a);
        self.asm.imul(size.max(2), register, other);
        self.finish(result, register);
        Ok(())
    }

    /// Emits the computation of the upper half of a product, or of a quotient.
    fn wide(&mut self, opcode: Opcode, size: u8, result: Value, a: Value, b: Operand) -> Result {
        if size < 2 {
            return Err(Unknown);
        }
        self.take(RAX);
        self.take(RDX);
        let other = self.operand(b);
        self.copy(a, RAX);
        let (unary, register) = match opcode {
            Opcode::Umulhi => (Unary::Mul, RDX),
            Opcode::Smulhi => (Unary::Imul, RDX),
            _ => {
                self.asm.constant(RDX, 0);
                (Unary::Div, RAX)
            }
        };
        self.asm.unary(unary, size, other);
        self.finish(result, register);
        Ok(())
    }

    fn shift(&mut self, shift: Shift, size: u8, result: Value, a: Value, by: Operand) -> Result {
        let bits = 8u8 << size;
        match (self.immediate(by, 3), by) {
            (Some(by), _) => {
                let register = self.change(a);
                let by = by as u8 & (bits - 1);
                if by != 0 {
                    self.asm.shift(shift, size, register, by);
                }
                self.finish(result, register);
            }
            (None, Operand::Immediate(_)) => return Err(Unknown),
            (None, Operand::Value(by)) => {
                self.take(RCX);
                self.copy(by, RCX);
                // The host's shifts use at least the low five bits of the count. So for 8 and 16 bits, the count must
                // be masked.
                if size < 2 {
                    self.asm
                        .alu_immediate(Alu::And, 2, RCX, i32::from(bits) - 1);
                }
                let register = self.change(a);
                self.asm.shift_by_cl(shift, size, register);
                self.finish(result, register);
            }
        }
        Ok(())
    }

    fn unary(&mut self, opcode: Opcode, result: Value, a: Value) -> Result {
        use Opcode::*;
        let (size, from) = (self.size(result)?, self.size(a)?);
        let register = match opcode {
            Ireduce => self.change(a),
            Uextend | Sextend => {
                let other = self.get(a);
                let register = self.free(self.is_long(result));
                match opcode {
                    Uextend => self.asm.zero_extend(from, register, Place::Register(other)),
                    _ => self.asm.sign_extend(from, register, other),
                }
                register
            }
            Ineg | Bnot => {
                let register = self.change(a);
                let unary = if opcode == Ineg {
                    Unary::Neg
                } else {
                    Unary::Not
                };
                self.asm.unary(unary, size, register);
                register
            }
            Iabs if size >= 2 => {
                let other = self.get(a);
                let register = self.free(false);
                self.asm.mov(register, other);
                self.asm.unary(Unary::Neg, size, register);
                self.asm.mov_if(SIGN, size, register, other);
                register
            }
            Bswap if size >= 2 => {
                let register = self.change(a);
                self.asm.swap_bytes(size, register);
                register
            }
            Bswap if size == 1 => {
                let register = self.change(a);
                self.asm.shift(Shift::Rol, 1, register, 8);
                register
            }
            Popcnt | Ctz | Clz if size >= 1 => {
                let (count, is_there) = match opcode {
                    Popcnt => (Count::Ones, is_x86_feature_detected!("popcnt")),
                    Ctz => (Count::TrailingZeros, is_x86_feature_detected!("bmi1")),
                    _ => (Count::LeadingZeros, is_x86_feature_detected!("lzcnt")),
                };
                if !is_there {
                    return Err(Unknown);
                }
                let other = self.get(a);
                let register = self.free(false);
                self.asm.count(count, size, register, other);
                register
            }
            _ => return Err(Unknown),
        };
        self.finish(result, register);
        Ok(())
    }

    /// Emits the comparison `inst`. Returns the condition that holds if the result of `inst` is 1.
    fn compare(&mut self, inst: Inst) -> Result<u8> {
        let (a, b, cc) = match self.func.dfg.insts[inst] {
            InstructionData::IntCompare {
                args: [a, b], cond, ..
            } => (a, Operand::Value(b), cond),
            InstructionData::IntCompareImm { arg, cond, imm, .. } => {
                (arg, Operand::Immediate(imm.bits()), cond)
            }
            _ => return Err(Unknown),
        };
        let size = self.size(a)?;
        let first = self.get(a);
        match self.immediate(b, size) {
            Some(0) => self.asm.test(size, first),
            Some(value) => self.asm.alu_immediate(Alu::Cmp, size, first, value),
            None => {
                let fused = match b {
                    Operand::Value(b) => self.fused_load(b),
                    _ => None,
                };
                if let Some((load, address, offset)) = fused {
                    let field = self.place(address, offset);
                    self.asm.alu_with(Alu::Cmp, size, first, field);
                    self.count_uses_by(load);
                } else {
                    let other = self.operand(b);
                    self.asm.alu(Alu::Cmp, size, first, other);
                }
            }
        }
        Ok(condition(cc))
    }

    /// Sets the host's flags by `value`. Returns the condition that holds if `value` is not 0. If `value` is the result
    /// of a comparison that was not emitted yet, emits the comparison to set the flags.
    fn test(&mut self, value: Value) -> Result<u8> {
        let dfg = &self.func.dfg;
        let made = dfg.value_def(value).inst();
        if let Some(inst) = made
            && self.places.register(value).is_none()
            && self.places.saved(value).is_none()
            && matches!(dfg.insts[inst].opcode(), Opcode::Icmp | Opcode::IcmpImm)
        {
            let condition = self.compare(inst)?;
            self.count_uses_by(inst);
            return Ok(condition);
        }
        let size = self.size(value)?;
        let register = self.get(value);
        self.asm.test(size, register);
        Ok(NOT_EQUAL)
    }

    fn choose(&mut self, result: Value, [holds, a, b]: [Value; 3]) -> Result {
        let size = self.size(result)?.max(2);
        let first = self.get(a);
        let register = self.change(b);
        let condition = self.test(holds)?;
        self.asm.mov_if(condition, size, register, first);
        self.finish(result, register);
        Ok(())
    }

    fn fork(&mut self, holds: Value, blocks: &[BlockCall; 2], next: Option<Block>) -> Result {
        let condition = self.test(holds)?;
        self.places.unlock();
        self.branch(condition, [&blocks[0], &blocks[1]], next)
    }

    /// If `flags` are those of a guarded access, records that the next instruction makes a guarded access.
    fn guard(&mut self, flags: MemFlags) {
        if flags.trap_code() == Some(slat_jit::GUARDED)
            && let Some(inst) = self.inst
        {
            let step = self.func.srcloc(inst).bits();
            self.guarded.push((self.asm.at(), step));
        }
    }

    /// Returns the memory operand for an address, and locks its registers.
    fn place(&mut self, address: Value, offset: i32) -> Place {
        match self.fused_sum(address) {
            Some((sum, [a, b])) => {
                let place = Place::Sum(self.get(a), self.get(b), offset);
                self.count_uses_by(sum);
                place
            }
            None => Place::Memory(self.get(address), offset),
        }
    }

    fn load(&mut self, result: Value, address: Value, flags: MemFlags, offset: i32) -> Result {
        let size = self.size(result)?;
        let place = self.place(address, offset);
        let register = self.free(self.is_long(result));
        self.guard(flags);
        self.asm.zero_extend(size, register, place);
        self.finish(result, register);
        Ok(())
    }

    fn store(&mut self, value: Value, address: Value, flags: MemFlags, offset: i32) -> Result {
        let size = self.size(value)?;
        let place = self.place(address, offset);
        match self.immediate(Operand::Value(value), size) {
            Some(value) => {
                self.guard(flags);
                self.asm.store_immediate(size, place, value);
            }
            None => {
                let value = self.get(value);
                self.guard(flags);
                self.asm.store(size, place, value);
            }
        }
        self.done();
        Ok(())
    }

    fn call(&mut self, inst: Inst) -> Result {
        let dfg = &self.func.dfg;
        let [function, arguments @ ..] = dfg.inst_args(inst) else {
            return Err(Unknown);
        };
        let function = self.constant(*function).ok_or(Unknown)?;
        let results = dfg.inst_results(inst);
        for &value in arguments.iter().chain(results) {
            self.size(value)?;
        }
        if arguments.len() > ARGUMENTS.len() || results.len() > 2 {
            return Err(Unknown);
        }
        self.save_for_call();
        let mut moves = Moves::default();
        for (&value, to) in arguments.iter().zip(ARGUMENTS) {
            self.give(&mut moves, to, value);
        }
        self.make(moves);
        self.asm.constant(RAX, function);
        self.asm.call(RAX);
        self.drop_for_call();
        self.count_uses();
        for (&value, register) in results.iter().zip([RAX, RDX]) {
            if self.places.left(value) > 0 {
                self.places.put(register, value);
            }
        }
        self.places.unlock();
        Ok(())
    }
}
