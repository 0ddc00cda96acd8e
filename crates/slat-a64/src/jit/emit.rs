//! The tier that emits code. It represents each of the guest's values by a Cranelift `Value`.

use super::helpers::{Request, helper};
use super::translator::Translator;
use super::truth::Truth;
use super::uses::{FLAGS, Interpret, SP};
use super::vectors::Vector;
use crate::insn::{AtomicOp, Hint, SystemName};
use crate::simd::Function;
use crate::tier::{Access, Exception, Tier};
use cranelift_codegen::ir::condcodes::IntCC;
use cranelift_codegen::ir::types::{I8X16, I64};
use cranelift_codegen::ir::{InstBuilder, Value};

/// The logarithm of the size of a vector in bytes.
const VECTOR: u8 = 4;

/// Defines functions that each emit one instruction of Cranelift's.
macro_rules! emits {
    ($($name:ident($($argument:ident),*) = $emit:ident;)*) => {
        $(
            fn $name(&mut self, $($argument: Value),*) -> Value {
                self.v.b.ins().$emit($($argument),*)
            }
        )*
    };
}

/// Defines the functions that translate instructions which are not compiled: each function leaves its instruction to
/// the interpreter.
macro_rules! interpreted {
    ($($name:ident($($type:ty),*) -> $result:ty;)*) => {
        $(
            fn $name(&mut self, $(_: $type),*) -> Result<$result, Interpret> {
                Err(Interpret)
            }
        )*
    };
}

impl Tier for Translator<'_> {
    type Value = Value;
    type Bool = Truth;
    type Vector = Vector;
    type Stop = Interpret;

    fn pc(&self) -> u64 {
        self.now.pc
    }
    fn x(&mut self, r: u8) -> Value {
        self.register(r.into())
    }
    fn set_x(&mut self, r: u8, value: Value) {
        self.set_register(r.into(), value);
    }
    fn sp(&mut self) -> Value {
        self.register(SP)
    }
    fn set_sp(&mut self, value: Value) {
        self.set_register(SP, value);
    }
    fn v(&mut self, r: u8) -> Vector {
        Vector::Register(r)
    }
    fn set_v(&mut self, r: u8, value: Vector) {
        self.set_vector(r, value);
    }
    fn flags(&mut self) -> [Truth; 4] {
        self.current_flags()
    }
    fn set_flags(&mut self, nzcv: [Truth; 4]) {
        self.now.flags = Some(nzcv);
        self.now.has_saved_flags = false;
        self.now.dirty |= 1 << FLAGS;
    }

    fn number(&mut self, n: u64) -> Value {
        self.v.constant(n as i64)
    }
    fn truth(&mut self, is: bool) -> Truth {
        Truth::Constant(is)
    }

    emits! {
        add(a, b) = iadd;
        sub(a, b) = isub;
        mul(a, b) = imul;
        and(a, b) = band;
        or(a, b) = bor;
        xor(a, b) = bxor;
        not(a) = bnot;
        shl(a, count) = ishl;
        shr(a, count) = ushr;
        sar(a, count) = sshr;
        ror(a, count) = rotr;
        leading_zeros(a) = clz;
        reverse_bits(a) = bitrev;
        swap_bytes(a) = bswap;
    }

    fn mul_high(&mut self, a: Value, b: Value, is_signed: bool) -> Value {
        match is_signed {
            true => self.v.b.ins().smulhi(a, b),
            false => self.v.b.ins().umulhi(a, b),
        }
    }
    fn div(&mut self, a: Value, b: Value, is_signed: bool) -> Value {
        self.v.divide(a, b, is_signed)
    }
    fn zero_extend(&mut self, a: Value, bits: u32) -> Value {
        self.v.zero_extend(a, bits)
    }
    fn sign_extend(&mut self, a: Value, bits: u32) -> Value {
        self.v.sign_extend(a, bits)
    }
    fn crc(&mut self, crc: Value, value: Value, bits: u32, castagnoli: bool) -> Value {
        let kind = self
            .v
            .constant(i64::from(bits) | i64::from(castagnoli) << 8);
        self.v.call(helper!(crc), &[crc, value, kind], 1)[0]
    }

    fn is_zero(&mut self, a: Value) -> Truth {
        Truth::Zero { value: a, is: true }
    }
    fn is_less(&mut self, a: Value, b: Value) -> Truth {
        Truth::Compare(IntCC::UnsignedLessThan, a, b)
    }
    fn bit(&mut self, a: Value, n: u32) -> Truth {
        Truth::Bit {
            value: a,
            n,
            set: true,
        }
    }
    fn both(&mut self, a: Truth, b: Truth) -> Truth {
        a.both(b, &mut self.v)
    }
    fn either(&mut self, a: Truth, b: Truth) -> Truth {
        a.either(b, &mut self.v)
    }
    fn differ(&mut self, a: Truth, b: Truth) -> Truth {
        a.differ(b, &mut self.v)
    }
    fn opposite(&mut self, a: Truth) -> Truth {
        a.opposite(&mut self.v)
    }
    fn widened(&mut self, a: Truth) -> Value {
        let value = a.value(&mut self.v);
        self.v.b.ins().uextend(I64, value)
    }
    fn select(&mut self, which: Truth, a: Value, b: Value) -> Value {
        let which = which.condition(&mut self.v);
        self.v.b.ins().select(which, a, b)
    }
    fn select_bool(&mut self, which: Truth, a: Truth, b: Truth) -> Truth {
        let which = which.condition(&mut self.v);
        let [a, b] = [a, b].map(|truth| truth.value(&mut self.v));
        Truth::Is(self.v.b.ins().select(which, a, b))
    }

    fn vector(&mut self, low: Value, high: Value) -> Vector {
        Vector::Halves([low, high])
    }
    fn low(&mut self, v: Vector) -> Value {
        self.half(v, 0)
    }
    fn high(&mut self, v: Vector) -> Value {
        self.half(v, 1)
    }
    fn compute(&mut self, function: Function, operands: [Vector; 3]) -> Vector {
        let emitted = match function.is_float() {
            true => self.float_function(&function, operands),
            false => self.integer_function(&function, operands),
        };
        emitted.unwrap_or_else(|| {
            self.call_function(&function, operands);
            Vector::Whole(self.result(I8X16))
        })
    }
    fn compare(&mut self, function: Function, operands: [Vector; 3]) -> [Truth; 4] {
        match self.compare_on_host(&function, operands) {
            Some(flags) => flags,
            None => {
                let bits = self.compute(function, operands);
                self.flags_of(bits)
            }
        }
    }

    fn load(&mut self, address: Value, size: u8, access: Access) -> Result<Value, Interpret> {
        Ok(self.load_at(address, size, access))
    }
    fn store(
        &mut self,
        address: Value,
        size: u8,
        value: Value,
        access: Access,
    ) -> Result<(), Interpret> {
        self.store_at(address, size, value, access);
        Ok(())
    }
    fn load_vector(&mut self, address: Value, access: Access) -> Result<Vector, Interpret> {
        Ok(Vector::Whole(self.load_at(address, VECTOR, access)))
    }
    fn store_vector(
        &mut self,
        address: Value,
        value: Vector,
        access: Access,
    ) -> Result<(), Interpret> {
        let value = self.whole(value);
        self.store_at(address, VECTOR, value, access);
        Ok(())
    }
    fn load_pair(
        &mut self,
        address: Value,
        size: u8,
        access: Access,
    ) -> Result<[Value; 2], Interpret> {
        Ok(self.load_pair_at(address, size, access))
    }
    fn store_pair(
        &mut self,
        address: Value,
        size: u8,
        values: [Value; 2],
        access: Access,
    ) -> Result<(), Interpret> {
        self.store_pair_at(address, size, values, access);
        Ok(())
    }
    fn load_vector_pair(
        &mut self,
        address: Value,
        size: u8,
        access: Access,
    ) -> Result<[Vector; 2], Interpret> {
        let parts = self.load_pair_at(address, size, access);
        Ok(parts.map(|part| match size {
            VECTOR => Vector::Whole(part),
            _ => Vector::Halves([part, self.v.constant(0)]),
        }))
    }
    fn store_vector_pair(
        &mut self,
        address: Value,
        size: u8,
        values: [Vector; 2],
        access: Access,
    ) -> Result<(), Interpret> {
        let parts = values.map(|value| match size {
            VECTOR => self.whole(value),
            _ => self.half(value, 0),
        });
        self.store_pair_at(address, size, parts, access);
        Ok(())
    }
    fn prepare_stores(
        &mut self,
        address: Value,
        bytes: u32,
        access: Access,
    ) -> Result<(), Interpret> {
        self.prepare_stores_at(address, bytes, access);
        Ok(())
    }
    fn zero_block(&mut self, address: Value) -> Result<(), Interpret> {
        let failed = self.v.call(helper!(zero_block), &[address], 1)[0];
        self.leave_if(failed);
        Ok(())
    }
    fn check_stack(&mut self) -> Result<(), Interpret> {
        if self.context.checks_stack {
            let sp = self.register(SP);
            let wrong = self.v.b.ins().band_imm(sp, 15);
            self.leave_if(wrong);
        }
        Ok(())
    }
    fn check_alignment(&mut self, address: Value, bytes: u32, _: bool) -> Result<(), Interpret> {
        if bytes > 1 {
            let wrong = self.v.b.ins().band_imm(address, i64::from(bytes) - 1);
            self.leave_if(wrong);
        }
        Ok(())
    }
    fn atomic(
        &mut self,
        op: AtomicOp,
        address: Value,
        size: u8,
        operand: Value,
        access: Access,
    ) -> Result<Value, Interpret> {
        let request = Request {
            op,
            ..Request::new(access, size)
        };
        let request = self.v.constant(request.bits());
        let failed = self
            .v
            .call(helper!(atomic), &[address, operand, request], 1)[0];
        self.leave_if(failed);
        Ok(self.result(I64))
    }
    fn compare_exchange(
        &mut self,
        address: Value,
        size: u8,
        values: [Vector; 2],
        access: Access,
    ) -> Result<Vector, Interpret> {
        self.give(&values);
        let request = self.v.constant(Request::new(access, size).bits());
        let failed = self
            .v
            .call(helper!(compare_exchange), &[address, request], 1)[0];
        self.leave_if(failed);
        Ok(Vector::Whole(self.result(I8X16)))
    }
    fn mark_exclusive(&mut self, address: Value, size: u8, value: Vector) {
        self.give(&[value]);
        let size = self.v.constant(size.into());
        self.v.call(helper!(mark_exclusive), &[address, size], 0);
    }
    fn store_exclusive(
        &mut self,
        address: Value,
        size: u8,
        value: Vector,
        access: Access,
    ) -> Result<Truth, Interpret> {
        self.give(&[value]);
        let request = self.v.constant(Request::new(access, size).bits());
        let failed = self
            .v
            .call(helper!(store_exclusive), &[address, request], 1)[0];
        self.leave_if(failed);
        let value = self.result(I64);
        Ok(Truth::Zero { value, is: false })
    }
    fn clear_exclusive(&mut self) {
        self.v.call(helper!(clear_exclusive), &[], 0);
    }
    fn fence(&mut self) {
        self.v.b.ins().fence();
    }

    fn raise(&mut self, _: Exception) -> Interpret {
        Interpret
    }
    fn check_vectors(&mut self) -> Result<(), Interpret> {
        match self.context.traps_vectors {
            true => Err(Interpret),
            false => Ok(()),
        }
    }
    fn check_zero_block(&mut self, name: SystemName, rt: u8) -> Result<(), Interpret> {
        let [name, rt] = [i64::from(name.0), i64::from(rt)].map(|n| self.v.constant(n));
        let failed = self.v.call(helper!(check_zero_block), &[name, rt], 1)[0];
        self.leave_if(failed);
        Ok(())
    }
    fn read_system(&mut self, name: SystemName, rt: u8) -> Result<Value, Interpret> {
        let [name, rt] = [i64::from(name.0), i64::from(rt)].map(|n| self.v.constant(n));
        let failed = self.v.call(helper!(read_system), &[name, rt], 1)[0];
        self.leave_if(failed);
        Ok(self.result(I64))
    }

    interpreted! {
        check_hint(Hint) -> ();
        write_system(SystemName, u8, Value) -> ();
        set_pstate(u8, u8, u8) -> ();
        system_instruction(SystemName, u8, bool, Value) -> Value;
        exception_return() -> Value;
    }
}
