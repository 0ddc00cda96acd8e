//! Fusion: finds instructions of Cranelift's intermediate language that one instruction of the host executes together.

use super::Generator;
use cranelift_codegen::ir::{Inst, InstructionData, MemFlags, Opcode, Value};

/// Three instructions: a load of a field of the CPU, an addition to the loaded value, and a store to the field.
pub(super) struct Addition {
    size: u8,
    address: Value,
    offset: i32,
    number: i32,
    insts: [Inst; 3],
}

impl Generator<'_> {
    /// Whether an instruction is emitted together with the only instruction that uses its result:
    ///
    /// - a comparison, with the branch at the end of the block, or with the next instruction if that is a select with
    ///   the result as its condition;
    /// - a load, with the next instruction if that is a comparison that is itself fused;
    /// - a sum, with the next instruction if that is an access to this address.
    pub(super) fn is_fused(&self, inst: Inst) -> bool {
        let layout = &self.func.layout;
        match self.func.dfg.insts[inst].opcode() {
            Opcode::Icmp | Opcode::IcmpImm => {
                let is_last_used = layout
                    .inst_block(inst)
                    .and_then(|block| layout.last_inst(block))
                    .is_some_and(|last| self.is_condition_of(inst, last));
                is_last_used
                    || layout
                        .next_inst(inst)
                        .is_some_and(|next| self.is_condition_of(inst, next))
            }
            Opcode::Load => layout.next_inst(inst).is_some_and(|next| {
                self.is_compared_by(inst, next)
                    && (layout.next_inst(next)).is_some_and(|user| self.is_condition_of(next, user))
            }),
            Opcode::Iadd => layout
                .next_inst(inst)
                .is_some_and(|next| self.is_address_of(inst, next)),
            _ => false,
        }
    }

    /// Whether `user` accesses the address that `inst` computes, and nothing else uses this address.
    fn is_address_of(&self, inst: Inst, user: Inst) -> bool {
        let dfg = &self.func.dfg;
        let sum = dfg.first_result(inst);
        let address = match dfg.insts[user] {
            InstructionData::Load { arg, .. } => Some(arg),
            InstructionData::Store { args, .. } => Some(args[1]),
            _ => None,
        };
        address == Some(sum) && self.places.left(sum) == 1
    }

    /// If `address` is a sum that is computed as a part of the access, returns the addition and its operands.
    pub(super) fn fused_sum(&self, address: Value) -> Option<(Inst, [Value; 2])> {
        let inst = self.func.dfg.value_def(address).inst()?;
        match self.func.dfg.insts[inst] {
            InstructionData::Binary {
                opcode: Opcode::Iadd,
                args,
            } if !self.is_made(address) => Some((inst, args)),
            _ => None,
        }
    }

    /// Whether a value was computed already, so that it is in a register or a slot.
    fn is_made(&self, value: Value) -> bool {
        self.places.register(value).is_some() || self.places.saved(value).is_some()
    }

    /// Whether `user` is a branch or a select whose condition is the result of `inst`, and nothing else uses this
    /// result.
    fn is_condition_of(&self, inst: Inst, user: Inst) -> bool {
        let dfg = &self.func.dfg;
        matches!(dfg.insts[user].opcode(), Opcode::Brif | Opcode::Select)
            && dfg.inst_args(user)[0] == dfg.first_result(inst)
            && self.places.left(dfg.first_result(inst)) == 1
    }

    /// Whether `inst` loads a field, `user` compares with the loaded value, and nothing else uses this value.
    fn is_compared_by(&self, inst: Inst, user: Inst) -> bool {
        let dfg = &self.func.dfg;
        let InstructionData::IntCompare { args: [_, b], .. } = dfg.insts[user] else {
            return false;
        };
        self.field(inst).is_some() && b == dfg.first_result(inst) && self.places.left(b) == 1
    }

    /// If `inst` is a load that is not guarded, returns its address and offset.
    fn field(&self, inst: Inst) -> Option<(Value, i32)> {
        let is_plain = |flags: MemFlags| flags.trap_code() != Some(slat_jit::GUARDED);
        match self.func.dfg.insts[inst] {
            InstructionData::Load {
                opcode: Opcode::Load,
                arg,
                flags,
                offset,
            } if is_plain(flags) => Some((arg, offset.into())),
            _ => None,
        }
    }

    /// If `value` is the result of a load that is emitted as a part of the instruction that uses it, returns the load,
    /// and its address and offset.
    pub(super) fn fused_load(&self, value: Value) -> Option<(Inst, Value, i32)> {
        let inst = self.func.dfg.value_def(value).inst()?;
        let (address, offset) = self.field(inst).filter(|_| !self.is_made(value))?;
        Some((inst, address, offset))
    }

    /// If `load` and the two instructions after it are an addition to a field, returns the addition.
    pub(super) fn addition(&self, load: Inst) -> Option<Addition> {
        let (dfg, layout) = (&self.func.dfg, &self.func.layout);
        let (address, offset) = self.field(load)?;
        let add = layout.next_inst(load)?;
        let store = layout.next_inst(add)?;
        let InstructionData::BinaryImm64 {
            opcode: Opcode::IaddImm,
            arg,
            imm,
        } = dfg.insts[add]
        else {
            return None;
        };
        let InstructionData::Store {
            opcode: Opcode::Store,
            args: [value, to],
            offset: at,
            ..
        } = dfg.insts[store]
        else {
            return None;
        };
        let [old, new] = [load, add].map(|inst| dfg.first_result(inst));
        let is_one = arg == old && value == new && (to, at.into()) == (address, offset);
        let are_used_once = [old, new].iter().all(|&value| self.places.left(value) == 1);
        (is_one && are_used_once).then_some(Addition {
            size: self.size(new).ok()?,
            address,
            offset,
            number: imm.bits().try_into().ok()?,
            insts: [load, add, store],
        })
    }

    /// Emits an addition to a field as one instruction with a memory operand.
    pub(super) fn add_in_place(&mut self, addition: Addition) {
        let Addition {
            size,
            address,
            offset,
            number,
            insts,
        } = addition;
        let base = self.get(address);
        self.asm.add_to_memory(size, base, offset, number);
        for inst in insts {
            self.inst = Some(inst);
            self.count_uses();
        }
        self.places.unlock();
    }
}
