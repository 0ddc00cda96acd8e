//! Translates floating-point instructions to instructions of the host, which run with the guest's MXCSR.
//!
//! While a CPU's `compiled.floats` is set, the host's MXCSR has the guest's value: its rounding mode, its flags, and
//! all exceptions masked. Floating-point code sets `compiled.floats` if it is clear ([`Translator::begin_floats`]). It
//! stays set from region to region, until the CPU leaves compiled code. While a helper runs that may compute floating
//! point or run code of slat's clients, it is clear, and the host's own MXCSR is restored ([`Cpu::outside_floats`]). If
//! the guest unmasks an exception, its floating-point instructions are interpreted.
//!
//! A computation sets flags of MXCSR. Cranelift does not know that, and would drop a computation whose result nothing
//! uses. So if the guest overwrites a result without using it, the code stores the result in a field of its own
//! ([`Translator::keep_computed`]).

use super::condition::Flags;
use super::helpers;
use super::translate::Translator;
use super::vector::{Operate, sources, type_of};
use crate::Cpu;
use crate::op::{MEM, Op, bytes_of};
use crate::simd::{self, Each, Elements, MXCSR_FLAGS};
use cranelift_codegen::ir::condcodes::{FloatCC, IntCC};
use cranelift_codegen::ir::types::{F32, F32X4, F64, F64X2, I32, I64};
use cranelift_codegen::ir::{InstBuilder, MemFlags, Type, Value};
use iced_x86::{Instruction, Mnemonic};
use std::mem::offset_of;

/// For an arithmetic instruction with two sources, returns the element type, whether it computes only the lowest
/// element, and the operation.
fn arithmetic(mnemonic: Mnemonic) -> Option<(Type, bool, Operate)> {
    let (each, elements) = simd::meaning(mnemonic)?;
    let ty = type_of(elements);
    let is_scalar = matches!(elements, Elements::Single | Elements::Double);
    let operate: Operate = match each {
        _ if !ty.lane_type().is_float() => return None,
        Each::Add => |ins, a, b| ins.fadd(a, b),
        Each::Subtract => |ins, a, b| ins.fsub(a, b),
        Each::Multiply => |ins, a, b| ins.fmul(a, b),
        Each::Divide => |ins, a, b| ins.fdiv(a, b),
        _ => return None,
    };
    Some((ty, is_scalar, operate))
}

impl Translator<'_> {
    /// Call before a floating-point instruction. Emits code that makes sure that the host's MXCSR has the guest's
    /// value. MXCSR keeps the guest's value to the end of the block, unless a handler is called.
    pub(super) fn begin_floats(&mut self) {
        if std::mem::replace(&mut self.now.has_floats, true) {
            return;
        }
        self.prepare_stop();
        let on = self.field(I32, offset_of!(Cpu, compiled.floats));
        self.unless(on, |translator| {
            translator.call_or_stop(helpers::BEGIN_FLOATS, &[]);
        });
    }

    /// Translates a floating-point instruction. Returns `None` without effect if there is no translation.
    pub(super) fn float_instruction(
        &mut self,
        insn: &Instruction,
        op: &Op,
        halves: usize,
    ) -> Option<()> {
        use Mnemonic::*;
        let [first, second] = sources(insn);
        if let Some((ty, is_scalar, operate)) = arithmetic(insn.mnemonic()) {
            self.begin_floats();
            if !is_scalar {
                self.operate(insn, op, halves, ty, operate);
            } else {
                let b = self.scalar(op, second, ty);
                let a = self.half(op.r[first], 0);
                let a = self.as_elements(a, ty);
                let low = self.b.ins().extractlane(a, 0);
                let result = operate(self.b.ins(), low, b);
                let result = self.b.ins().insertlane(a, result, 0);
                self.set_computed(insn, op.r[0], &[op.r[first], op.r[second]], &[result]);
            }
            return Some(());
        }
        match insn.mnemonic() {
            Ucomiss | Vucomiss => self.compare(op, F32X4, false),
            Ucomisd | Vucomisd => self.compare(op, F64X2, false),
            Comiss | Vcomiss => self.compare(op, F32X4, true),
            Comisd | Vcomisd => self.compare(op, F64X2, true),
            Cvtsi2ss | Vcvtsi2ss => self.convert_integer(insn, op, second, F32X4),
            Cvtsi2sd | Vcvtsi2sd => self.convert_integer(insn, op, second, F64X2),
            Cvttss2si | Vcvttss2si => self.truncate(insn, op, F32X4),
            Cvttsd2si | Vcvttsd2si => self.truncate(insn, op, F64X2),
            _ => return None,
        }
        Some(())
    }

    /// Reads operand `k`, memory or the lowest element of a register, as a float.
    fn scalar(&mut self, op: &Op, k: usize, ty: Type) -> Value {
        let element = ty.lane_type();
        if op.r[k] != MEM {
            let value = self.half(op.r[k], 0);
            let value = self.as_elements(value, ty);
            return self.b.ins().extractlane(value, 0);
        }
        let value = self.operand(op, k, element.bytes().trailing_zeros() as u8);
        self.b.ins().bitcast(element, MemFlags::new(), value)
    }

    /// Translates COMISD, UCOMISD, COMISS and UCOMISS. COMISD and COMISS raise an exception even for a quiet NaN: then
    /// the interpreter executes them.
    fn compare(&mut self, op: &Op, ty: Type, signals: bool) {
        self.begin_floats();
        let b = self.scalar(op, 1, ty);
        let a = self.scalar(op, 0, ty);
        let is = |this: &mut Self, cc| this.b.ins().fcmp(cc, a, b);
        let parity = is(self, FloatCC::Unordered);
        if signals {
            self.interpret_if(parity);
        }
        let carry = is(self, FloatCC::UnorderedOrLessThan);
        let zero = is(self, FloatCC::UnorderedOrEqual);
        self.set_flags(Flags::Compared {
            carry,
            zero,
            parity,
        });
    }

    /// Translates CVTSI2SD and CVTSI2SS.
    fn convert_integer(&mut self, insn: &Instruction, op: &Op, k: usize, ty: Type) {
        self.begin_floats();
        let size = bytes_of(insn, k).trailing_zeros() as u8;
        let value = self.operand(op, k, size);
        let value = self.b.ins().fcvt_from_sint(ty.lane_type(), value);
        let rest = if k == 2 { op.r[1] } else { op.r[0] };
        let rest = self.half(rest, 0);
        let rest = self.as_elements(rest, ty);
        let value = self.b.ins().insertlane(rest, value, 0);
        self.set_computed(insn, op.r[0], &[], &[value]);
    }

    /// Translates CVTTSD2SI and CVTTSS2SI. If the value does not fit, or is a NaN, the interpreter executes the
    /// instruction.
    fn truncate(&mut self, insn: &Instruction, op: &Op, ty: Type) {
        self.begin_floats();
        let value = self.scalar(op, 1, ty);
        let size = insn.op0_register().size().trailing_zeros() as u8;
        // Compare the exponent as an integer, because a comparison of floats could raise exceptions.
        let (bits, fraction, bias) = match ty {
            F64X2 => (I64, 52, 1023),
            _ => (I32, 23, 127),
        };
        let exponent = self.b.ins().bitcast(bits, MemFlags::new(), value);
        let exponent = self.b.ins().ushr_imm(exponent, fraction);
        let exponent = self.b.ins().band_imm(exponent, 2 * bias + 1);
        let limit = bias + (8 << size) - 1;
        let is_large = (self.b.ins()).icmp_imm(IntCC::UnsignedGreaterThanOrEqual, exponent, limit);
        self.interpret_if(is_large);
        let to = if size == 3 { I64 } else { I32 };
        debug_assert!([F32, F64].contains(&self.b.func.dfg.value_type(value)));
        let value = self.b.ins().fcvt_to_sint_sat(to, value);
        self.keep_computed(value);
        self.set(op.r[0], size, value);
    }
}

impl Cpu {
    /// Sets the host's MXCSR to the guest's value. Returns `false`, without effect, if that value does not mask all
    /// exceptions.
    pub(super) fn begin_floats(&mut self) -> bool {
        if !simd::runs_on_host(self.state.mxcsr) {
            return false;
        }
        // SAFETY: the guest's MXCSR masks all exceptions, as checked above, and has only bits that the host's MXCSR
        // has. Until `end_floats`, only compiled code runs, and helpers that do not compute floating point or use
        // `outside_floats`.
        self.compiled.host_mxcsr = unsafe { simd::exchange_mxcsr(self.state.mxcsr) };
        self.compiled.floats = 1;
        true
    }

    /// Restores the host's own MXCSR. Returns whether MXCSR had the guest's value.
    pub(crate) fn end_floats(&mut self) -> bool {
        let was = std::mem::take(&mut self.compiled.floats) != 0;
        if was {
            // No code uses the flags of the host's own MXCSR, so clear them. The guest's flags are kept in the guest's
            // MXCSR.
            let host = self.compiled.host_mxcsr & !MXCSR_FLAGS;
            // SAFETY: this is the MXCSR with which Rust code ran before. `begin_floats` has saved it.
            self.state.mxcsr = unsafe { simd::exchange_mxcsr(host) };
        }
        was
    }

    /// Calls a function that may compute floating point, or may read or change the guest's MXCSR. Afterwards, compiled
    /// code must check whether the host's MXCSR still has the guest's value.
    pub(super) fn outside_floats<T>(&mut self, then: impl FnOnce(&mut Self) -> T) -> T {
        let was = self.end_floats();
        let result = then(self);
        if was {
            self.begin_floats();
        }
        result
    }
}
