//! Translates general instructions: near branches, moves, integer arithmetic, and the stack.

use super::Tier;
use super::condition::Flags;
use super::translate::{TYPES, Translator};
use crate::exec::control::condition_number;
use crate::op::{MEM, NONE, Op, bytes_of};
use crate::sem::{Bits, Compute, Operation, alu, by_mnemonic, moves, shift};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::{InstBuilder, Value};
use iced_x86::{ConditionCode, Instruction, Mnemonic, OpKind, Register};

/// Whether an operand is a general register of this size.
fn is_word(register: Register, size: u8) -> bool {
    register.is_gpr() && register.size() == 1 << size
}

impl Translator<'_> {
    /// Translates a near branch. For another instruction that ends a block, leaves the region before the instruction.
    pub(super) fn branch(&mut self, insn: &Instruction, op: &Op) {
        let next = insn.next_ip();
        let (code, size) = (insn.code(), op.size);
        if code.is_jcc_short_or_near() {
            let taken = self.condition(condition_number(insn.condition_code()));
            self.fork(taken, op.imm, next);
        } else if code.is_loop() || code.is_loopcc() || code.is_jcx_short() {
            self.branch_by_count(insn, op);
        } else if code.is_jmp_short_or_near() {
            self.goto(op.imm);
        } else if !self.is_on_stack(size) {
            self.leave_to_interpreter();
        } else if code.is_call_near() {
            let back = self.address(next as i64);
            let back = self.narrow(back, size);
            self.push(size, back);
            self.goto(op.imm);
        } else if insn.mnemonic() == Mnemonic::Ret {
            self.ret(op);
        } else if code.is_jmp_near_indirect() {
            let target = self.operand(op, 0, size);
            let target = self.target(target);
            self.leave_for(target);
        } else if code.is_call_near_indirect() {
            let target = self.operand(op, 0, size);
            let target = self.target(target);
            let back = self.address(next as i64);
            let back = self.narrow(back, size);
            self.push(size, back);
            self.leave_for(target);
        } else {
            self.leave_to_interpreter();
        }
    }

    /// Emits a branch: continues at `target` if `taken` is not 0, else at `next`.
    fn fork(&mut self, taken: Value, target: u64, next: u64) {
        if !self.keeps_values(target) && !self.keeps_values(next) {
            self.write_registers();
        }
        let (jump, fall) = (self.b.create_block(), self.b.create_block());
        self.b.ins().brif(taken, jump, &[], fall, &[]);
        let now = self.now.clone();
        self.b.switch_to_block(jump);
        self.goto(target);
        self.resume(fall, now);
        self.goto(next);
    }

    /// Translates RET. If RET returns to the instruction after a CALL of the path, the path continues with that
    /// instruction.
    fn ret(&mut self, op: &Op) {
        let bytes = 1 << op.size;
        let rsp = self.stack_at(0, bytes);
        let found = self.load(rsp, op.size);
        let target = self.target(found);
        self.move_stack(bytes + op.imm as i64);
        let back = self.paths.back(self.now.node);
        // A RET with a smaller operand size cannot return to that address.
        let Some(back) = back.filter(|back| *back <= u64::MAX >> (64 - 8 * bytes)) else {
            return self.leave_for(target);
        };
        let expected = self.address(back as i64);
        let expected = self.narrow(expected, op.size);
        let as_called = self.is_equal(found, expected);
        let (elsewhere, on) = (self.cold(), self.b.create_block());
        self.b.ins().brif(as_called, on, &[], elsewhere, &[]);
        let now = self.now.clone();
        self.b.switch_to_block(elsewhere);
        self.leave_for(target);
        self.resume(on, now);
        self.goto(back);
    }

    /// Translates LOOP, LOOPE, LOOPNE, JCXZ, JECXZ and JRCXZ. They do not change the flags.
    fn branch_by_count(&mut self, insn: &Instruction, op: &Op) {
        let size = op.address_size.trailing_zeros() as u8;
        let count = self.get(1, size);
        let taken = match insn.mnemonic() {
            Mnemonic::Jrcxz | Mnemonic::Jecxz | Mnemonic::Jcxz => {
                self.b.ins().icmp_imm(IntCC::Equal, count, 0)
            }
            mnemonic => {
                let count = self.b.ins().iadd_imm(count, -1);
                let more = self.b.ins().icmp_imm(IntCC::NotEqual, count, 0);
                let taken = match mnemonic {
                    Mnemonic::Loop => more,
                    _ => {
                        let holds = self.condition(condition_number(insn.condition_code()));
                        self.b.ins().band(more, holds)
                    }
                };
                self.set(1, size, count);
                taken
            }
        };
        self.fork(taken, op.imm, insn.next_ip());
    }

    /// Returns the target of an indirect branch as a 64-bit value. The code leaves the instruction to the interpreter
    /// if the target may not be canonical.
    fn target(&mut self, target: Value) -> Value {
        if !self.is_64() {
            return self.wide(target);
        }
        let high = self.b.ins().sshr_imm(target, 47);
        let high = self.b.ins().iadd_imm(high, 1);
        // The upper bits of a canonical address are all 0 or all 1.
        let strange = self.b.ins().icmp_imm(IntCC::UnsignedGreaterThan, high, 1);
        self.interpret_if(strange);
        target
    }

    /// The emitted code leaves the instruction to the interpreter if `condition` is not 0.
    pub(super) fn interpret_if(&mut self, condition: Value) {
        self.prepare_stop();
        let (bail, fine) = (self.cold(), self.b.create_block());
        self.b.ins().brif(condition, bail, &[], fine, &[]);
        self.b.switch_to_block(bail);
        self.stop_for_interpreter();
        self.b.switch_to_block(fine);
    }

    /// Translates an instruction that does not end the block. Returns `None` without effect if there is no translation.
    pub(super) fn inline(&mut self, insn: &Instruction, op: &Op) -> Option<()> {
        use Mnemonic::*;
        let size = op.size;
        let has_segment = (0..insn.op_count()).any(|k| insn.op_register(k).is_segment_register());
        match insn.mnemonic() {
            Lds | Les | Lfs | Lgs => return self.segment_instruction(insn, op),
            _ if has_segment => return self.segment_instruction(insn, op),
            Nop | Endbr64 | Prefetcht0 | Prefetcht1 | Prefetcht2 | Prefetchnta | Prefetchw => {}
            Mov | Movnti => {
                let general =
                    |k: u32| insn.op_kind(k) != OpKind::Register || insn.op_register(k).is_gpr();
                if !general(0) || !general(1) {
                    return None;
                }
                let value = self.operand(op, 1, size);
                self.write(op, value);
            }
            Movzx | Movsx | Movsxd => {
                let from = bytes_of(insn, 1).trailing_zeros() as u8;
                let value = self.operand(op, 1, from);
                let value = match (from == size, insn.mnemonic()) {
                    (true, _) => value,
                    (_, Movzx) => {
                        let value = self.wide(value);
                        self.narrow(value, size)
                    }
                    _ => self.b.ins().sextend(TYPES[usize::from(size)], value),
                };
                self.set(op.r[0], size, value);
            }
            Lea => {
                let value = self.offset(op);
                let value = self.narrow(value, size);
                self.set(op.r[0], size, value);
            }
            Imul if insn.op_count() == 2 => self.binary::<alu::Imul>(op),
            Imul if insn.op_count() == 3 => self.sources::<alu::Imul>(op),
            Mul | Imul if size >= 2 => self.multiply_wide(op),
            Push => {
                let is_plain = [NONE, MEM].contains(&op.r[0]) || is_word(insn.op0_register(), size);
                if !self.is_on_stack(size) || !is_plain {
                    return None;
                }
                let value = self.operand(op, 0, size);
                self.push(size, value);
            }
            Pop if is_word(insn.op0_register(), size) && self.is_on_stack(size) => {
                let value = self.pop(size);
                self.set(op.r[0], size, value);
            }
            Leave if self.is_on_stack(size) => self.leave_frame(size),
            Cbw | Cwde | Cdqe => self.sources::<moves::Extend>(op),
            Cwd | Cdq | Cqo => self.sources::<moves::Spread>(op),
            Xchg => self.exchange(op),
            Xadd => self.exchange_and_add(op),
            // CMPXCHG is translated only with memory as the destination: the comparison decides which part of a
            // register is written.
            Cmpxchg if op.r[0] == MEM => self.compare_and_exchange(op),
            _ if insn.condition_code() != ConditionCode::None => {
                let condition = condition_number(insn.condition_code());
                if op.r[0] != MEM && insn.op_count() == 2 {
                    let source = self.operand(op, 1, size);
                    let old = self.get(op.r[0], size);
                    let holds = self.condition(condition);
                    let (value, _) = moves::Cmov::apply(self, old, source, holds);
                    self.set(op.r[0], size, value);
                } else if insn.op_count() == 1 {
                    let holds = self.condition(condition);
                    let (value, _) = moves::Setcc::apply(self, holds, holds, holds);
                    self.write(op, value);
                } else {
                    return None;
                }
            }
            mnemonic => {
                return by_mnemonic!(mnemonic, binary self.binary(op))
                    .or_else(|| by_mnemonic!(mnemonic, unary self.unary(op)))
                    .or_else(|| by_mnemonic!(mnemonic, shift self.shift(op))?)
                    .or_else(|| self.bit_instruction(insn, op))
                    .or_else(|| match self.tier {
                        Tier::Baseline => None,
                        Tier::Full => self.vector_instruction(insn, op),
                    });
            }
        }
        Some(())
    }

    /// Writes `value` to the instruction's first operand.
    pub(super) fn write(&mut self, op: &Op, value: Value) {
        match op.r[0] {
            MEM => {
                let lin = self.lin(op);
                self.store(lin, op.size, value);
            }
            r => self.set(r, op.size, value),
        }
    }

    /// Replaces the first operand, a register or memory, by a value that `change` computes from it. Returns the old and
    /// the new value.
    pub(super) fn change(
        &mut self,
        op: &Op,
        change: impl FnOnce(&mut Self, Value) -> Value,
    ) -> (Value, Value) {
        match op.r[0] {
            MEM => {
                let lin = self.lin(op);
                self.update(lin, op, change)
            }
            r => {
                let old = self.get(r, op.size);
                let new = change(self, old);
                self.set(r, op.size, new);
                (old, new)
            }
        }
    }

    /// Translates XCHG.
    fn exchange(&mut self, op: &Op) {
        let value = self.get(op.r[1], op.size);
        let (old, _) = self.change(op, |_, _| value);
        self.set(op.r[1], op.size, old);
    }

    /// Translates XADD.
    fn exchange_and_add(&mut self, op: &Op) {
        let (other, size) = (op.r[1], op.size);
        let (value, no) = (self.get(other, size), self.no());
        let mut flags = Flags::InCpu;
        let (old, new) = self.change(op, |this, old| {
            let (result, of_result) = alu::Add::apply(this, old, value, no);
            flags = of_result;
            result
        });
        self.set(other, size, old);
        if op.r[0] != MEM {
            // Write the sum last: source and destination may be the same register.
            self.set(op.r[0], size, new);
        }
        self.set_flags(flags);
    }

    /// Translates CMPXCHG.
    fn compare_and_exchange(&mut self, op: &Op) {
        let size = op.size;
        let (value, expected) = (self.get(op.r[1], size), self.get(0, size));
        let (old, _) = self.change(op, |this, old| {
            let is_equal = this.is_equal(old, expected);
            this.select(is_equal, value, old)
        });
        // If the comparison succeeds, all of RAX stays unchanged.
        let kept = self.get(0, 3);
        self.set(0, size, old);
        let loaded = self.get(0, 3);
        let is_equal = self.is_equal(old, expected);
        let value = self.select(is_equal, kept, loaded);
        self.set(0, 3, value);
        let no = self.no();
        let flags = alu::Cmp::apply(self, expected, old, no).1;
        self.set_flags(flags);
    }

    /// Returns the flag or condition that operation `A` needs as an input.
    fn input_of<A: Operation>(&mut self) -> Value {
        match A::READS {
            Some(cc) => self.condition(cc),
            None => self.no(),
        }
    }

    /// Replaces the first operand by the result of operation `A` on it and `b`. For CMP and TEST, only sets the flags.
    pub(super) fn modify<A: Operation>(&mut self, op: &Op, b: Value) {
        let input = self.input_of::<A>();
        let flags = if A::WRITES {
            let mut flags = Flags::InCpu;
            self.change(op, |this, a| {
                let (result, of_result) = A::apply(this, a, b, input);
                flags = of_result;
                result
            });
            flags
        } else {
            let a = self.operand(op, 0, op.size);
            A::apply(self, a, b, input).1
        };
        self.set_flags(flags);
    }

    fn binary<A: Operation>(&mut self, op: &Op) {
        let b = self.operand(op, 1, op.size);
        self.modify::<A>(op, b);
    }

    fn unary<A: Operation>(&mut self, op: &Op) {
        let none = self.no();
        self.modify::<A>(op, none);
    }

    fn shift<A: Operation>(&mut self, op: &Op) -> Option<()> {
        match op.r[1] {
            NONE => self.shift_by_immediate::<A>(op),
            _ => self.shift_by_cl::<A>(op),
        }
    }

    /// Translates shifts and rotates by an immediate count that is not 0 and less than the operand's width.
    fn shift_by_immediate<A: Operation>(&mut self, op: &Op) -> Option<()> {
        let size = op.size;
        let count = shift::count::<A>(op.imm, 8 << size);
        if count == 0 || count >= 8 << size {
            return None;
        }
        let count = self.immediate(size, count);
        self.modify::<A>(op, count);
        Some(())
    }

    /// Translates shifts and rotates of a register of 4 or 8 bytes by CL, except rotates through CF. With a count of 0
    /// they leave the flags unchanged.
    fn shift_by_cl<A: Operation>(&mut self, op: &Op) -> Option<()> {
        let size = op.size;
        if op.r[0] == MEM || size < 2 || A::READS.is_some() {
            return None;
        }
        self.record_flags();
        let count = self.get(1, size);
        let last = shift::last_count(8 << size);
        let count = self.b.ins().band_imm(count, last as i64);
        let a = self.get(op.r[0], size);
        let no = self.no();
        // Cranelift uses the count modulo the width, as the guest's processor does.
        let (result, flags) = A::apply(self, a, count, no);
        self.set(op.r[0], size, result);
        let (shifted, on) = (self.b.create_block(), self.b.create_block());
        self.b.ins().brif(count, shifted, &[], on, &[]);
        self.b.switch_to_block(shifted);
        let flags = self.completed(flags);
        self.record(flags);
        self.b.ins().jump(on, &[]);
        self.b.switch_to_block(on);
        self.now.flags = Flags::InCpu;
        Some(())
    }

    /// Writes the result of operation `A` on the second and the third operand to the first operand.
    pub(super) fn sources<A: Operation>(&mut self, op: &Op) {
        let (a, b) = (self.operand(op, 1, op.size), self.operand(op, 2, op.size));
        let input = self.input_of::<A>();
        let (result, flags) = A::apply(self, a, b, input);
        self.set(op.r[0], op.size, result);
        self.set_flags(flags);
    }

    /// Translates MUL and IMUL with one operand, whose product goes to DX:AX, EDX:EAX or RDX:RAX.
    fn multiply_wide(&mut self, op: &Op) {
        let is_signed = op.mnemonic == Mnemonic::Imul;
        let b = self.operand(op, 0, op.size);
        let a = self.get(0, op.size);
        let (low, high) = self.halves(a, b, is_signed);
        let flags = alu::multiplied(self, (low, high), is_signed);
        self.set(0, op.size, low);
        self.set(2, op.size, high);
        self.set_flags(flags);
    }
}
