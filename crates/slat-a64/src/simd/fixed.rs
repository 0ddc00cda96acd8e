//! Advanced SIMD shifts by an immediate.

use super::compute::{Float, Function, Narrowing, Op, Widening};
use super::float::Rounding;
use super::form::Form;
use super::integer::Integer;
use super::{Input, Simd};
use crate::bits::field;

/// Makes SSHLL, USHLL, or SHLL.
pub(super) fn shift_left_long(form: Form, size: u8, count: u32) -> Option<Simd> {
    let widening = Widening {
        upper: form.full(),
        first_is_wide: false,
    };
    let function = Function {
        bytes: 16,
        immediate: count as u8,
        ..form.function(Op::Widen(Integer::ShiftLeft, widening), size)
    };
    form.compute(function, [form.rn(), Input::Zero, Input::Zero])
}

/// Decodes shifts by an immediate, and conversions from and to fixed-point numbers.
pub(super) fn decode(form: Form) -> Option<Simd> {
    let (u, opcode) = (form.u(), field(form.word, 15, 11));
    let (immh, both) = (field(form.word, 22, 19), field(form.word, 22, 16));
    let size = immh.ilog2() as u8;
    let (right, left) = ((16 << size) - both, both - (8 << size));
    let (rn, rd) = (form.rn(), form.rd());
    let plain = |op, count: u32, exists: bool| {
        let function = Function {
            immediate: count as u8,
            ..form.function(Op::Lanes(op), size)
        };
        let exists = exists && form.fits(size);
        form.compute(function, [rn, Input::Zero, rd])
            .filter(|_| exists)
    };
    // Of the shifts that do not saturate, only those of doublewords have a scalar form.
    let usual = !form.is_scalar || size == 3;
    let narrow = |kind, rounds, is_signed, of_scalars: bool| {
        let op = Op::Narrow {
            kind,
            rounds,
            upper: form.full(),
        };
        let mut function = Function {
            immediate: right as u8,
            is_signed,
            ..form.function(op, size)
        };
        if !form.is_scalar {
            function.bytes = 16;
        }
        let exists = size < 3 && (of_scalars || !form.is_scalar);
        form.compute(function, [rn, Input::Zero, rd])
            .filter(|_| exists)
    };
    let convert = |op| {
        let function = Function {
            immediate: right as u8,
            ..form.function(Op::Float(op), size)
        };
        let exists = size > 0 && form.fits(size);
        form.compute(function, [rn, Input::Zero, Input::Zero])
            .filter(|_| exists)
    };
    match (opcode, u) {
        (0b00000 | 0b00010 | 0b00100 | 0b00110, _) => {
            let op = Integer::ShiftRight {
                rounds: opcode & 4 != 0,
                adds: opcode & 2 != 0,
            };
            plain(op, right, usual)
        }
        (0b01000, true) => plain(Integer::InsertRight, right, usual),
        (0b01010, false) => plain(Integer::ShiftLeft, left, usual),
        (0b01010, true) => plain(Integer::InsertLeft, left, usual),
        (0b01100, true) => {
            let op = Op::Lanes(Integer::SaturatingShiftLeft { to_unsigned: true });
            let function = Function {
                immediate: left as u8,
                is_signed: true,
                ..form.function(op, size)
            };
            form.compute(function, [rn, Input::Zero, rd])
                .filter(|_| form.fits(size))
        }
        (0b01110, _) => plain(
            Integer::SaturatingShiftLeft { to_unsigned: false },
            left,
            true,
        ),
        (0b10000 | 0b10001, false) => narrow(Narrowing::Plain, opcode & 1 != 0, false, false),
        (0b10000 | 0b10001, true) => narrow(Narrowing::ToUnsigned, opcode & 1 != 0, true, true),
        (0b10010 | 0b10011, _) => narrow(Narrowing::Saturating, opcode & 1 != 0, !u, true),
        (0b10100, _) if size < 3 && !form.is_scalar => shift_left_long(form, size, left),
        (0b11100, _) => convert(Float::FromFixed),
        (0b11111, _) => convert(Float::ToFixed {
            mode: Rounding::Zero,
        }),
        _ => None,
    }
}
