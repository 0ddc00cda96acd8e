//! Translates vector instructions that the interpreter executes by stubs (`simd`): the code puts the operands into the
//! registers in which the stub expects them, and calls the stub.

use super::translate::Translator;
use crate::op::{MEM, Op};
use crate::simd::{self, Plain};
use cranelift_codegen::ir::types::{I8X16, I64, I64X2};
use cranelift_codegen::ir::{AbiParam, InstBuilder, Signature, Value};
use cranelift_codegen::isa::CallConv;
use iced_x86::Instruction;

impl Translator<'_> {
    /// Translates an instruction whose operands and result are vectors to a call of its stub. Returns `None` without
    /// effect for other instructions.
    pub(super) fn stub_instruction(
        &mut self,
        insn: &Instruction,
        op: &Op,
        halves: usize,
    ) -> Option<()> {
        let plain = simd::plain(insn, halves == 2)?;
        let bytes = insn.memory_size().size();
        let is_small = op.r.contains(&MEM) && bytes != 16 * halves;
        if op.r[0] == MEM || is_small && (halves > 1 || !(2..=8).contains(&bytes)) {
            return None;
        }
        if plain.is_float {
            self.begin_floats();
        }
        // For each register that the stub reads, the halves of its operand.
        let mut registers: Vec<Vec<Value>> = Vec::new();
        for k in plain.first..=plain.last {
            let values = match op.r[k] {
                MEM if is_small => vec![self.small_operand(op, k, bytes)],
                _ => self.vector(op, k, halves, plain.is_aligned),
            };
            if registers.is_empty() {
                // The stub does not read the registers before the first operand, so any values will do.
                registers.resize(plain.first, values.clone());
            }
            registers.push(values);
        }
        if plain.reads_xmm0 {
            registers.push(vec![self.half(0, 0)]);
        }
        if plain.shifts_by_immediate {
            let count = self.constant(op.aux.into());
            let count = self.b.ins().scalar_to_vector(I64X2, count);
            registers.push(vec![self.as_elements(count, I8X16); halves]);
        }
        let values: Vec<_> = (0..halves)
            .map(|half| {
                let vectors: Vec<_> = registers.iter().map(|values| values[half]).collect();
                self.call_stub(&plain, op.aux, &vectors)
            })
            .collect();
        self.set_vector(insn, op.r[0], &values);
        Some(())
    }

    /// Reads a memory operand of 2 to 8 bytes, as a vector whose other bytes are 0.
    fn small_operand(&mut self, op: &Op, k: usize, bytes: usize) -> Value {
        let value = self.operand(op, k, bytes.trailing_zeros() as u8);
        let value = self.wide(value);
        let value = self.b.ins().scalar_to_vector(I64X2, value);
        self.as_elements(value, I8X16)
    }

    /// Emits a call of a stub. The vectors are passed in XMM0 and the registers after it. The immediate is passed in
    /// RCX, the register of the fourth integer argument.
    fn call_stub(&mut self, plain: &Plain, immediate: u8, vectors: &[Value]) -> Value {
        let integers = if plain.has_immediate { 4 } else { 0 };
        let kind = (vectors.len(), integers);
        let signature = *(self.stubs.entry(kind)).or_insert_with(|| {
            let mut signature = Signature::new(CallConv::SystemV);
            signature.params = vec![AbiParam::new(I8X16); vectors.len()];
            (signature.params).resize(vectors.len() + integers, AbiParam::new(I64));
            signature.returns = vec![AbiParam::new(I8X16)];
            self.b.import_signature(signature)
        });
        let function = self.constant(plain.stub as i64);
        let mut all = vectors.to_vec();
        if plain.has_immediate {
            let immediate = self.constant(immediate.into());
            all.extend([immediate; 4]);
        }
        let call = self.b.ins().call_indirect(signature, function, &all);
        self.b.inst_results(call)[0]
    }
}
