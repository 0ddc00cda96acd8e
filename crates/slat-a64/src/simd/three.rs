//! Advanced SIMD instructions on three registers (C4.1.97.25 and the groups around it).

use super::arithmetic::Extreme;
use super::compute::{Bitwise, Float, Op, Widening};
use super::form::Form;
use super::integer::Integer;
use super::{Input, Simd};
use crate::bits::{field, flag};

/// Decodes instructions on three registers of the same type.
pub(super) fn same(form: Form) -> Option<Simd> {
    let opcode = field(form.word, 15, 11);
    if opcode >= 0b11000 {
        let size = 2 + (form.size() & 1);
        return float(form, opcode, size).filter(|_| form.fits(size));
    }
    let (u, size) = (form.u(), form.size());
    let inputs = [form.rn(), form.rm(), form.rd()];
    if opcode == 0b00011 {
        let op = Op::Bitwise(bitwise(u, size));
        return form
            .compute(form.function(op, 0), inputs)
            .filter(|_| !form.is_scalar);
    }
    let op = same_integer(opcode, u)?;
    // The allowed values of the field `size` (0: byte, 3: doubleword), for the vector form and for the scalar form.
    let (vectors, scalars): (_, &[u8]) = match op {
        Integer::SaturatingAdd | Integer::SaturatingSub => (0..=3, &[0, 1, 2, 3]),
        Integer::ShiftBy {
            saturates: true, ..
        } => (0..=3, &[0, 1, 2, 3]),
        Integer::Greater | Integer::GreaterEqual | Integer::Equal | Integer::Test => (0..=3, &[3]),
        Integer::ShiftBy { .. } => (0..=3, &[3]),
        Integer::Add | Integer::Sub if opcode == 0b10000 => (0..=3, &[3]),
        Integer::Add => (0..=3, &[]),
        Integer::DoublingMulHigh { .. } => (1..=2, &[1, 2]),
        Integer::PolynomialMul => (0..=0, &[]),
        _ => (0..=2, &[]),
    };
    let exists = match form.is_scalar {
        true => scalars.contains(&size),
        false => vectors.contains(&size) && form.fits(size),
    };
    let is_pairwise = matches!(opcode, 0b10100 | 0b10101 | 0b10111);
    let op = if is_pairwise {
        Op::Pairs(op)
    } else {
        Op::Lanes(op)
    };
    let mut function = form.function(op, size);
    function.is_signed |= matches!(opcode, 0b10110);
    form.compute(function, inputs).filter(|_| exists)
}

fn bitwise(u: bool, size: u8) -> Bitwise {
    match (u, size) {
        (false, 0) => Bitwise::And,
        (false, 1) => Bitwise::Bic,
        (false, 2) => Bitwise::Orr,
        (false, _) => Bitwise::Orn,
        (true, 0) => Bitwise::Eor,
        (true, 1) => Bitwise::Select,
        (true, 2) => Bitwise::InsertIf { ones: true },
        (true, _) => Bitwise::InsertIf { ones: false },
    }
}

fn same_integer(opcode: u32, u: bool) -> Option<Integer> {
    Some(match opcode {
        0b00000 => Integer::HalvingAdd { rounds: false },
        0b00001 => Integer::SaturatingAdd,
        0b00010 => Integer::HalvingAdd { rounds: true },
        0b00100 => Integer::HalvingSub,
        0b00101 => Integer::SaturatingSub,
        0b00110 => Integer::Greater,
        0b00111 => Integer::GreaterEqual,
        0b01000..=0b01011 => Integer::ShiftBy {
            rounds: opcode & 2 != 0,
            saturates: opcode & 1 != 0,
        },
        0b01100 | 0b10100 => Integer::Max,
        0b01101 | 0b10101 => Integer::Min,
        0b01110 => Integer::Difference,
        0b01111 => Integer::DifferenceAdd,
        0b10000 if u => Integer::Sub,
        0b10000 => Integer::Add,
        0b10001 if u => Integer::Equal,
        0b10001 => Integer::Test,
        0b10010 if u => Integer::MulSub,
        0b10010 => Integer::MulAdd,
        0b10011 if u => Integer::PolynomialMul,
        0b10011 => Integer::Mul,
        0b10110 => Integer::DoublingMulHigh { rounds: u },
        0b10111 if !u => Integer::Add,
        _ => return None,
    })
}

/// Decodes floating-point instructions on three registers of the same type.
fn float(form: Form, opcode: u32, size: u8) -> Option<Simd> {
    let (u, a) = (form.u(), flag(form.word, 23));
    let mul_add = |negates_product| Float::MulAdd {
        negates_product,
        negates_addend: false,
    };
    let extreme = |maximum, minimum| Float::Extreme(if a { minimum } else { maximum });
    let numbers = extreme(Extreme::MaxNumber, Extreme::MinNumber);
    let numbers_or_nans = extreme(Extreme::Max, Extreme::Min);
    // Columns: the operation, and whether it has a scalar form.
    let (op, of_scalars) = match (opcode & 7, u, a) {
        (0, false, _) => (Op::Float(numbers), false),
        (0, true, _) => (Op::FloatPairs(numbers), false),
        (1, false, _) => (Op::Float(mul_add(a)), false),
        (2, false, false) => (Op::Float(Float::Add), false),
        (2, false, true) => (Op::Float(Float::Sub), false),
        (2, true, false) => (Op::FloatPairs(Float::Add), false),
        (2, true, true) => (Op::Float(Float::Difference), true),
        (3, false, false) => (Op::Float(Float::Mul { extended: true }), true),
        (3, true, false) => (Op::Float(Float::Mul { extended: false }), false),
        (4, false, false) => (Op::Float(Float::Equal { absolute: false }), true),
        (4, true, false) => (Op::Float(Float::GreaterEqual { absolute: false }), true),
        (4, true, true) => (Op::Float(Float::Greater { absolute: false }), true),
        (5, true, false) => (Op::Float(Float::GreaterEqual { absolute: true }), true),
        (5, true, true) => (Op::Float(Float::Greater { absolute: true }), true),
        (6, false, _) => (Op::Float(numbers_or_nans), false),
        (6, true, _) => (Op::FloatPairs(numbers_or_nans), false),
        (7, false, root) => (Op::Float(Float::Step { root }), true),
        (7, true, false) => (Op::Float(Float::Div), false),
        _ => return None,
    };
    let inputs = [form.rn(), form.rm(), form.rd()];
    form.compute(form.function(op, size), inputs)
        .filter(|_| of_scalars || !form.is_scalar)
}

/// Decodes instructions on three registers of half precision.
pub(super) fn same_half(form: Form) -> Option<Simd> {
    float(form, field(form.word, 13, 11), 1)
}

/// Decodes SQRDMLAH, SQRDMLSH, SDOT and UDOT.
pub(super) fn extra(form: Form) -> Option<Simd> {
    let (u, size) = (form.u(), form.size());
    let inputs = [form.rn(), form.rm(), form.rd()];
    match field(form.word, 14, 11) {
        opcode @ (0b0000 | 0b0001) if u && matches!(size, 1 | 2) => {
            let op = Integer::DoublingMulAddHigh {
                subtracts: opcode == 1,
            };
            let mut function = form.function(Op::Lanes(op), size);
            function.is_signed = true;
            form.compute(function, inputs)
        }
        0b0010 if size == 2 && !form.is_scalar => form.compute(form.function(Op::Dot, 2), inputs),
        _ => None,
    }
}

/// Makes a widening instruction. Its operands are a scalar each, or half a register.
fn widen(form: Form, op: Integer, size: u8, first_is_wide: bool, second: Input) -> Option<Simd> {
    let widening = Widening {
        upper: form.full(),
        first_is_wide,
    };
    let mut function = form.function(Op::Widen(op, widening), size);
    function.bytes = if form.is_scalar { 2 << size } else { 16 };
    form.compute(function, [form.rn(), second, form.rd()])
}

/// Decodes instructions on three registers of different types.
pub(super) fn different(form: Form) -> Option<Simd> {
    let (u, size) = (form.u(), form.size());
    let opcode = field(form.word, 15, 12);
    let is_saturating = matches!(opcode, 0b1001 | 0b1011 | 0b1101);
    let exists = match is_saturating {
        true => !u && matches!(size, 1 | 2),
        false => {
            !form.is_scalar
                && if opcode == 0b1110 {
                    !u && size == 0
                } else {
                    size < 3
                }
        }
    };
    if !exists {
        return None;
    }
    let op = match opcode {
        0b0000 | 0b0001 => Integer::Add,
        0b0010 | 0b0011 => Integer::Sub,
        0b0100 | 0b0110 => {
            let (subtracts, rounds) = (opcode == 0b0110, u);
            let op = Op::NarrowHigh {
                subtracts,
                rounds,
                upper: form.full(),
            };
            return form.compute(form.function(op, size), [form.rn(), form.rm(), form.rd()]);
        }
        0b0101 => Integer::DifferenceAdd,
        0b0111 => Integer::Difference,
        0b1000 => Integer::MulAdd,
        0b1010 => Integer::MulSub,
        0b1100 => Integer::Mul,
        0b1001 => Integer::DoublingMulAdd { subtracts: false },
        0b1011 => Integer::DoublingMulAdd { subtracts: true },
        0b1101 => Integer::DoublingMul,
        0b1110 => {
            // The operands of PMULL are polynomials, which have no sign.
            let Some(Simd::Compute {
                mut function,
                inputs,
                output,
            }) = widen(form, Integer::PolynomialMul, size, false, form.rm())
            else {
                return None;
            };
            function.is_signed = false;
            return Some(Simd::Compute {
                function,
                inputs,
                output,
            });
        }
        _ => return None,
    };
    widen(form, op, size, matches!(opcode, 0b0001 | 0b0011), form.rm())
}

/// Decodes instructions on a vector and an element.
pub(super) fn by_element(form: Form) -> Option<Simd> {
    let word = form.word;
    let (u, opcode) = (form.u(), field(word, 15, 12));
    let (h, l, m) = (
        field(word, 11, 11),
        field(word, 21, 21),
        field(word, 20, 20),
    );
    let is_float = matches!(
        (opcode, u),
        (0b0001 | 0b0101 | 0b1001, false) | (0b1001, true)
    );
    let size = match (is_float, form.size()) {
        (true, 0) => 1,
        (true, 1) => return None,
        (_, size) => size,
    };
    let low = field(word, 19, 16);
    let (lane, r) = match size {
        1 => (h << 2 | l << 1 | m, low),
        2 => (h << 1 | l, m << 4 | low),
        3 if l == 0 => (h, m << 4 | low),
        _ => return None,
    };
    let element = Input::Lane {
        r: r as u8,
        size,
        lane: lane as u8,
    };
    let inputs = [form.rn(), element, form.rd()];
    if is_float {
        let op = match (opcode, u) {
            (0b1001, extended) => Float::Mul { extended },
            _ => Float::MulAdd {
                negates_product: opcode == 0b0101,
                negates_addend: false,
            },
        };
        return form
            .compute(form.function(Op::Float(op), size), inputs)
            .filter(|_| form.fits(size));
    }
    if size > 2 {
        return None;
    }
    // Columns: the operation, whether it widens, and whether it has a scalar form.
    let (op, widens, of_scalars) = match (opcode, u) {
        (0b0000, true) => (Integer::MulAdd, false, false),
        (0b0100, true) => (Integer::MulSub, false, false),
        (0b1000, false) => (Integer::Mul, false, false),
        (0b0010, _) => (Integer::MulAdd, true, false),
        (0b0110, _) => (Integer::MulSub, true, false),
        (0b1010, _) => (Integer::Mul, true, false),
        (0b0011, false) => (Integer::DoublingMulAdd { subtracts: false }, true, true),
        (0b0111, false) => (Integer::DoublingMulAdd { subtracts: true }, true, true),
        (0b1011, false) => (Integer::DoublingMul, true, true),
        (0b1100, false) => (Integer::DoublingMulHigh { rounds: false }, false, true),
        (0b1101, false) => (Integer::DoublingMulHigh { rounds: true }, false, true),
        (0b1101, true) => (
            Integer::DoublingMulAddHigh { subtracts: false },
            false,
            true,
        ),
        (0b1111, true) => (Integer::DoublingMulAddHigh { subtracts: true }, false, true),
        (0b1110, _) if size == 2 && !form.is_scalar => {
            return form.compute(form.function(Op::Dot, 2), inputs);
        }
        _ => return None,
    };
    if form.is_scalar && !of_scalars {
        return None;
    }
    if widens {
        return widen(form, op, size, false, element);
    }
    let mut function = form.function(Op::Lanes(op), size);
    function.is_signed = true;
    form.compute(function, inputs)
}
