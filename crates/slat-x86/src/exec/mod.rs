//! The handlers: functions that execute decoded operations. Each file has the handlers of one kind of instruction, and
//! the rows of the instruction table (`lower`) that choose among them.
//!
//! A handler first does everything that can fail (loads, checks, and at most one store), and only then changes
//! registers and flags.

pub(crate) mod alu;
pub(crate) mod atomic;
pub(crate) mod bits;
pub(crate) mod bmi;
pub(crate) mod control;
pub(crate) mod data;
pub(crate) mod decimal;
pub(crate) mod descriptor;
pub(crate) mod far;
pub(crate) mod fpu_state;
mod halves;
pub(crate) mod hypercall;
pub(crate) mod io;
pub(crate) mod msr;
pub(crate) mod muldiv;
pub(crate) mod registers;
pub(crate) mod shift;
pub(crate) mod stack;
pub(crate) mod string;
pub(crate) mod syscall;
pub(crate) mod system;
mod v86;
pub(crate) mod xsave;

use crate::Cpu;
use crate::op::{Break, Op, form};

/// The form of a memory operand's address, as a type: a handler that is compiled for one form computes the address
/// without testing the form.
pub(crate) trait Form: 'static {
    /// Whether the operand is in a flat segment, so that the address needs no check of a segment.
    const FLAT: bool;
    /// Returns the address of the operand. Call only if [`FLAT`](Self::FLAT).
    fn flat(cpu: &Cpu, op: &Op) -> u64;
    /// Returns the linear address of an operand of `bytes` bytes.
    fn lin(cpu: &mut Cpu, op: &Op, bytes: u32) -> Result<u64, Break>;
}

/// Base plus displacement, in a flat segment.
pub(crate) struct Base;
/// Base plus index plus displacement, in a flat segment.
pub(crate) struct Index;
/// An address of any form, in any segment.
pub(crate) struct Full;

impl Form for Base {
    const FLAT: bool = true;
    #[inline(always)]
    fn flat(cpu: &Cpu, op: &Op) -> u64 {
        cpu.ea::<{ form::BASE }>(op)
    }
    #[inline(always)]
    fn lin(cpu: &mut Cpu, op: &Op, _: u32) -> Result<u64, Break> {
        Ok(cpu.ea::<{ form::BASE }>(op))
    }
}
impl Form for Index {
    const FLAT: bool = true;
    #[inline(always)]
    fn flat(cpu: &Cpu, op: &Op) -> u64 {
        cpu.ea::<{ form::INDEX }>(op)
    }
    #[inline(always)]
    fn lin(cpu: &mut Cpu, op: &Op, _: u32) -> Result<u64, Break> {
        Ok(cpu.ea::<{ form::INDEX }>(op))
    }
}
impl Form for Full {
    const FLAT: bool = false;
    fn flat(cpu: &Cpu, op: &Op) -> u64 {
        cpu.offset(op)
    }
    #[inline(always)]
    fn lin(cpu: &mut Cpu, op: &Op, bytes: u32) -> Result<u64, Break> {
        cpu.lin(op, bytes)
    }
}

/// Chooses a handler by operand size and memory form.
macro_rules! by_size_and_form {
    ($op:expr, $f:ident $(, $more:ty)*) => {{
        use crate::exec::{Base, Full, Index};
        match ($op.size, $op.form) {
            (0, 0) => $f::<u8, Base $(, $more)*>,
            (0, 1) => $f::<u8, Index $(, $more)*>,
            (0, _) => $f::<u8, Full $(, $more)*>,
            (1, 0) => $f::<u16, Base $(, $more)*>,
            (1, 1) => $f::<u16, Index $(, $more)*>,
            (1, _) => $f::<u16, Full $(, $more)*>,
            (2, 0) => $f::<u32, Base $(, $more)*>,
            (2, 1) => $f::<u32, Index $(, $more)*>,
            (2, _) => $f::<u32, Full $(, $more)*>,
            (_, 0) => $f::<u64, Base $(, $more)*>,
            (_, 1) => $f::<u64, Index $(, $more)*>,
            (_, _) => $f::<u64, Full $(, $more)*>,
        }
    }};
}
pub(crate) use by_size_and_form;
