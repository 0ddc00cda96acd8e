//! The interpreter's tier: values are numbers, and each function computes its result at once.

use crate::bits;
use crate::crc::crc;
use crate::insn::{AtomicOp, Hint, SystemName};
use crate::memory::Machine;
use crate::registers::{SCTLR, SCTLR_NTWE, SCTLR_NTWI, SCTLR_SA, SCTLR_SA0};
use crate::simd::Function;
use crate::simd::float::Env;
use crate::state::{Exclusive, State};
use crate::system::{self, Refused, ZERO_BLOCK_BYTES};
use crate::tier::{Access, Exception, Kind, Tier};
use core::sync::atomic::{Ordering, fence};

/// Why an instruction ended early. Such an instruction has changed nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop<F> {
    /// The instruction raises an exception.
    Exception(Exception),
    /// An access to memory failed.
    Memory(F),
}

impl<F> From<Exception> for Stop<F> {
    fn from(exception: Exception) -> Self {
        Stop::Exception(exception)
    }
}

/// A processor's state and its machine during the execution of an instruction.
pub(crate) struct Now<'a, M> {
    pub(crate) state: &'a mut State,
    pub(crate) machine: &'a mut M,
    /// The guest address of the current instruction.
    pub(crate) pc: u64,
}

/// Returns the way in which an instruction ends if its access to a system register is refused.
fn refusal<F>(refused: Refused<F>, name: SystemName, rt: u8, reads: bool) -> Stop<F> {
    Stop::Exception(match refused {
        Refused::Undefined => Exception::Undefined,
        Refused::Trapped => Exception::SystemTrap { name, rt, reads },
        Refused::VectorTrap => Exception::VectorTrap,
        Refused::Memory(fault) => return Stop::Memory(fault),
    })
}

/// Defines functions of [`crate::tier::Tier`] whose result is one expression of their arguments.
macro_rules! functions {
    ($($name:ident($($argument:ident: $type:ty),*) -> $result:ty { $value:expr })*) => {
        $(
            #[inline(always)]
            fn $name(&mut self, $($argument: $type),*) -> $result {
                $value
            }
        )*
    };
}

impl<M: Machine> Tier for Now<'_, M> {
    type Value = u64;
    type Bool = bool;
    type Vector = u128;
    type Stop = Stop<M::Fault>;

    #[inline(always)]
    fn pc(&self) -> u64 {
        self.pc
    }
    #[inline(always)]
    fn x(&mut self, r: u8) -> u64 {
        self.state.x[usize::from(r)]
    }
    #[inline(always)]
    fn set_x(&mut self, r: u8, value: u64) {
        self.state.x[usize::from(r)] = value;
    }
    #[inline(always)]
    fn sp(&mut self) -> u64 {
        self.state.sp
    }
    #[inline(always)]
    fn set_sp(&mut self, value: u64) {
        self.state.sp = value;
    }
    #[inline(always)]
    fn v(&mut self, r: u8) -> u128 {
        self.state.v[usize::from(r & 31)]
    }
    #[inline(always)]
    fn set_v(&mut self, r: u8, value: u128) {
        self.state.v[usize::from(r & 31)] = value;
    }
    #[inline(always)]
    fn flags(&mut self) -> [bool; 4] {
        self.state.flags
    }
    #[inline(always)]
    fn set_flags(&mut self, nzcv: [bool; 4]) {
        self.state.flags = nzcv;
    }

    functions! {
        number(n: u64) -> u64 { n }
        truth(is: bool) -> bool { is }
        add(a: u64, b: u64) -> u64 { a.wrapping_add(b) }
        sub(a: u64, b: u64) -> u64 { a.wrapping_sub(b) }
        mul(a: u64, b: u64) -> u64 { a.wrapping_mul(b) }
        and(a: u64, b: u64) -> u64 { a & b }
        or(a: u64, b: u64) -> u64 { a | b }
        xor(a: u64, b: u64) -> u64 { a ^ b }
        not(a: u64) -> u64 { !a }
        shl(a: u64, count: u64) -> u64 { a << (count & 63) }
        shr(a: u64, count: u64) -> u64 { a >> (count & 63) }
        sar(a: u64, count: u64) -> u64 { (a as i64 >> (count & 63)) as u64 }
        ror(a: u64, count: u64) -> u64 { a.rotate_right(count as u32) }
        zero_extend(a: u64, bits: u32) -> u64 { bits::zero_extend(a, bits) }
        sign_extend(a: u64, bits: u32) -> u64 { bits::sign_extend(a, bits) }
        leading_zeros(a: u64) -> u64 { a.leading_zeros().into() }
        reverse_bits(a: u64) -> u64 { a.reverse_bits() }
        swap_bytes(a: u64) -> u64 { a.swap_bytes() }
        crc(old: u64, value: u64, bits: u32, castagnoli: bool) -> u64 {
            crc(old as u32, value, bits, castagnoli).into()
        }
        is_zero(a: u64) -> bool { a == 0 }
        is_less(a: u64, b: u64) -> bool { a < b }
        bit(a: u64, n: u32) -> bool { a >> n & 1 != 0 }
        both(a: bool, b: bool) -> bool { a & b }
        either(a: bool, b: bool) -> bool { a | b }
        differ(a: bool, b: bool) -> bool { a ^ b }
        opposite(a: bool) -> bool { !a }
        widened(a: bool) -> u64 { a.into() }
        select(which: bool, a: u64, b: u64) -> u64 { if which { a } else { b } }
        select_bool(which: bool, a: bool, b: bool) -> bool { if which { a } else { b } }
        vector(low: u64, high: u64) -> u128 { u128::from(low) | u128::from(high) << 64 }
        low(v: u128) -> u64 { v as u64 }
        high(v: u128) -> u64 { (v >> 64) as u64 }
        fence() -> () { fence(Ordering::SeqCst) }
    }

    #[inline(always)]
    fn mul_high(&mut self, a: u64, b: u64, is_signed: bool) -> u64 {
        let product = match is_signed {
            true => (i128::from(a as i64) * i128::from(b as i64)) as u128,
            false => u128::from(a) * u128::from(b),
        };
        (product >> 64) as u64
    }
    #[inline(always)]
    fn div(&mut self, a: u64, b: u64, is_signed: bool) -> u64 {
        match (b, is_signed) {
            (0, _) => 0,
            (_, true) => (a as i64).wrapping_div(b as i64) as u64,
            (_, false) => a / b,
        }
    }

    fn compute(&mut self, function: Function, operands: [u128; 3]) -> u128 {
        let mut env = Env {
            fpcr: self.state.fpcr,
            fpsr: self.state.fpsr,
        };
        let result = function.compute(operands, &mut env);
        self.state.fpsr = env.fpsr;
        result
    }

    #[inline(always)]
    fn load(&mut self, address: u64, size: u8, access: Access) -> Result<u64, Self::Stop> {
        let loaded = self.machine.load(self.state, address, size, access);
        loaded.map_err(Stop::Memory)
    }
    #[inline(always)]
    fn store(
        &mut self,
        address: u64,
        size: u8,
        value: u64,
        access: Access,
    ) -> Result<(), Self::Stop> {
        let stored = self.machine.store(self.state, address, size, value, access);
        stored.map_err(Stop::Memory)
    }
    #[inline(always)]
    fn load_vector(&mut self, address: u64, access: Access) -> Result<u128, Self::Stop> {
        let loaded = self.machine.load_wide(self.state, address, access);
        loaded.map_err(Stop::Memory)
    }
    #[inline(always)]
    fn store_vector(
        &mut self,
        address: u64,
        value: u128,
        access: Access,
    ) -> Result<(), Self::Stop> {
        let stored = self.machine.store_wide(self.state, address, value, access);
        stored.map_err(Stop::Memory)
    }
    fn prepare_stores(
        &mut self,
        address: u64,
        bytes: u32,
        access: Access,
    ) -> Result<(), Self::Stop> {
        let prepared = self
            .machine
            .prepare_stores(self.state, address, bytes, access);
        prepared.map_err(Stop::Memory)
    }
    fn zero_block(&mut self, address: u64) -> Result<(), Self::Stop> {
        let access = Access {
            kind: Kind::ZeroBlock(address),
            ..Access::default()
        };
        let start = address & !u64::from(ZERO_BLOCK_BYTES - 1);
        self.prepare_stores(start, ZERO_BLOCK_BYTES, access)?;
        for offset in (0..ZERO_BLOCK_BYTES).step_by(16) {
            self.store_vector(start + u64::from(offset), 0, access)?;
        }
        Ok(())
    }
    #[inline(always)]
    fn check_stack(&mut self) -> Result<(), Self::Stop> {
        let check = match self.state.pstate.el1 {
            true => SCTLR_SA,
            false => SCTLR_SA0,
        };
        match self.state.sp & 15 != 0 && self.state.system.get(SCTLR) & check != 0 {
            true => Err(Exception::StackAlignment.into()),
            false => Ok(()),
        }
    }
    #[inline(always)]
    fn check_alignment(
        &mut self,
        address: u64,
        bytes: u32,
        is_write: bool,
    ) -> Result<(), Self::Stop> {
        match address & u64::from(bytes - 1) {
            0 => Ok(()),
            _ => Err(Exception::Alignment { address, is_write }.into()),
        }
    }
    fn atomic(
        &mut self,
        op: AtomicOp,
        address: u64,
        size: u8,
        operand: u64,
        access: Access,
    ) -> Result<u64, Self::Stop> {
        let old = self
            .machine
            .atomic(self.state, op, address, size, operand, access);
        old.map_err(Stop::Memory)
    }
    fn compare_exchange(
        &mut self,
        address: u64,
        size: u8,
        values: [u128; 2],
        access: Access,
    ) -> Result<u128, Self::Stop> {
        let found = self
            .machine
            .compare_exchange(self.state, address, size, values, access);
        found.map_err(Stop::Memory)
    }
    fn clear_exclusive(&mut self) {
        self.state.exclusive = None;
    }
    fn mark_exclusive(&mut self, address: u64, size: u8, value: u128) {
        self.state.exclusive = Some(Exclusive {
            address,
            size,
            value,
        });
    }
    fn store_exclusive(
        &mut self,
        address: u64,
        size: u8,
        value: u128,
        access: Access,
    ) -> Result<bool, Self::Stop> {
        let stored = match self.state.exclusive {
            Some(mark) if (mark.address, mark.size) == (address, size) => {
                let found = self.compare_exchange(address, size, [mark.value, value], access)?;
                found == mark.value
            }
            _ => false,
        };
        self.state.exclusive = None;
        Ok(stored)
    }

    fn raise(&mut self, exception: Exception) -> Self::Stop {
        exception.into()
    }
    #[inline(always)]
    fn check_vectors(&mut self) -> Result<(), Self::Stop> {
        match system::vectors_are_trapped(self.state) {
            true => Err(Exception::VectorTrap.into()),
            false => Ok(()),
        }
    }
    fn check_hint(&mut self, hint: Hint) -> Result<(), Self::Stop> {
        let permission = match hint {
            Hint::Wfi => SCTLR_NTWI,
            Hint::Wfe => SCTLR_NTWE,
            _ => return Ok(()),
        };
        match system::is_trapped(self.state, permission) {
            true => Err(Exception::WaitTrap(hint).into()),
            false => Ok(()),
        }
    }
    fn check_zero_block(&mut self, name: SystemName, rt: u8) -> Result<(), Self::Stop> {
        system::check_zero_block(self.state).map_err(|refused| refusal(refused, name, rt, false))
    }
    fn read_system(&mut self, name: SystemName, rt: u8) -> Result<u64, Self::Stop> {
        let value = system::read(self.state, self.machine, name);
        value.map_err(|refused| refusal(refused, name, rt, true))
    }
    fn write_system(&mut self, name: SystemName, rt: u8, value: u64) -> Result<(), Self::Stop> {
        let done = system::write(self.state, self.machine, name, value);
        done.map_err(|refused| refusal(refused, name, rt, false))
    }
    fn set_pstate(&mut self, op1: u8, op2: u8, value: u8) -> Result<(), Self::Stop> {
        let done = system::set_field(self.state, op1, op2, value);
        let [op1, op2, value] = [op1, op2, value].map(u16::from);
        let name = SystemName::new(0, op1, 4, value, op2);
        done.map_err(|refused| refusal(refused, name, 31, false))
    }
    fn system_instruction(
        &mut self,
        name: SystemName,
        rt: u8,
        reads: bool,
        value: u64,
    ) -> Result<u64, Self::Stop> {
        let result = system::instruction(self.state, self.machine, name, value);
        result.map_err(|refused| refusal(refused, name, rt, reads))
    }
    fn exception_return(&mut self) -> Result<u64, Self::Stop> {
        match self.state.pstate().el1 {
            true => Ok(self.state.exception_return()),
            false => Err(Exception::Undefined.into()),
        }
    }
}
