//! Advanced SIMD and floating-point instructions (DDI 0487, C4.1.97 and C7.2).
//!
//! A vector instruction is a [`Function`] of at most three operands, which computes a whole register. Its result
//! depends only on the operands, FPCR and FPSR. The interpreter calls [`Function::compute`]; compiled code may call it,
//! too. If an operand is one lane of a register, the function gets a register with a copy of this lane in every lane.
//! So instructions "by element" need no functions of their own.

pub(crate) mod arithmetic;
pub(crate) mod compute;
mod decode;
mod fixed;
pub(crate) mod float;
mod form;
mod integer;
mod misc;
mod scalar;
mod three;

pub(crate) use compute::{Function, Op};
pub(crate) use decode::decode;
pub(crate) use integer::Integer;

use crate::width::Width;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    Zero,
    V(u8),
    /// One lane of 1 << `size` bytes, copied to all lanes.
    Lane {
        r: u8,
        size: u8,
        lane: u8,
    },
    /// A general register.
    X(u8),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    V(u8),
    X(u8, Width),
    Flags,
}

/// The way in which an immediate changes a vector register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    Set,
    Or,
    Clear,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Simd {
    Compute {
        function: Function,
        inputs: [Input; 3],
        output: Output,
    },
    /// MOVI and similar instructions. If `full`, they write both halves of the register.
    Immediate {
        rd: u8,
        value: u64,
        full: bool,
        change: Change,
    },
    /// FCSEL.
    Select {
        size: u8,
        condition: u8,
        rd: u8,
        rn: u8,
        rm: u8,
    },
    /// FCCMP, FCCMPE.
    ConditionalCompare {
        size: u8,
        signals: bool,
        condition: u8,
        nzcv: u8,
        rn: u8,
        rm: u8,
    },
    /// TBL, or TBX if `keeps`: bytes with an index outside of the table stay unchanged.
    Table {
        full: bool,
        registers: u8,
        keeps: bool,
        rd: u8,
        rn: u8,
        rm: u8,
    },
}
