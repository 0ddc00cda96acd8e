//! Floating-point instructions on scalars (C4.1.97.37 and the groups after that).

use super::arithmetic::Extreme;
use super::compute::{Float, Function, Op};
use super::float::Rounding;
use super::form::expanded;
use super::{Change, Input, Output, Simd};
use crate::bits::{field, flag, register};
use crate::width::Width;

fn function(op: Op, size: u8) -> Function {
    Function {
        op,
        size,
        bytes: 1 << size,
        is_signed: true,
        immediate: 0,
    }
}

fn to_vector(word: u32, function: Function, inputs: [Input; 3]) -> Option<Simd> {
    Some(Simd::Compute {
        function,
        inputs,
        output: Output::V(register(word, 0)),
    })
}

pub(super) fn decode(word: u32) -> Option<Simd> {
    let size = match field(word, 23, 22) {
        0 => 2,
        1 => 3,
        2 => return top_half(word),
        _ => 1,
    };
    let is_narrow = !flag(word, 31);
    let of_registers = match (flag(word, 24), flag(word, 21)) {
        (true, _) => return multiply_add(word, size).filter(|_| is_narrow),
        (false, false) => return fixed_point(word, size),
        (false, true) => field(word, 15, 10),
    };
    if of_registers == 0 {
        return integer(word, size);
    }
    let simd = match of_registers & 0b1111 {
        0b0000 | 0b1000 if of_registers & 0b11111 == 0b10000 => one_source(word, size),
        0b1000 if of_registers == 0b001000 => compare(word, size),
        0b0100 | 0b1100 if of_registers & 0b111 == 0b100 => immediate(word, size),
        low => match low & 3 {
            0b01 => Some(Simd::ConditionalCompare {
                size,
                signals: flag(word, 4),
                condition: field(word, 15, 12) as u8,
                nzcv: field(word, 3, 0) as u8,
                rn: register(word, 5),
                rm: register(word, 16),
            }),
            0b10 => two_sources(word, size),
            0b11 => Some(Simd::Select {
                size,
                condition: field(word, 15, 12) as u8,
                rd: register(word, 0),
                rn: register(word, 5),
                rm: register(word, 16),
            }),
            _ => None,
        },
    };
    simd.filter(|_| is_narrow)
}

/// Decodes FMOV between a general register and the upper half of a vector register: the only instruction with type 2.
fn top_half(word: u32) -> Option<Simd> {
    let (rd, rn) = (register(word, 0), register(word, 5));
    let function = |op| Function {
        immediate: 1,
        is_signed: false,
        ..function(op, 3)
    };
    match word >> 10 & 0x3f_ffff {
        // The fields sf 0 0 11110 10 1 01 110 000000.
        0b10_0111_1010_1011_1000_0000 => Some(Simd::Compute {
            function: function(Op::Element),
            inputs: [Input::V(rn), Input::Zero, Input::Zero],
            output: Output::X(rd, Width::X),
        }),
        0b10_0111_1010_1011_1100_0000 => {
            let inputs = [Input::X(rn), Input::Zero, Input::V(rd)];
            to_vector(word, function(Op::Insert), inputs)
        }
        _ => None,
    }
}

fn multiply_add(word: u32, size: u8) -> Option<Simd> {
    let (o1, o0) = (flag(word, 21), flag(word, 15));
    let op = Float::MulAdd {
        negates_product: o1 != o0,
        negates_addend: o1,
    };
    let [rn, rm, ra] = [5, 16, 10].map(|low| Input::V(register(word, low)));
    to_vector(word, function(Op::Float(op), size), [rn, rm, ra])
}

/// Makes a conversion between a floating-point number and an integer in a general register.
fn conversion(word: u32, size: u8, to: Option<Rounding>, fraction: u32) -> Option<Simd> {
    let width = Width::of(flag(word, 31));
    let bits = width.bits() as u8;
    let (rd, rn) = (register(word, 0), register(word, 5));
    let op = match to {
        Some(mode) => Op::ToGeneral { mode, bits },
        None => Op::FromGeneral { bits },
    };
    let (input, output) = match to {
        Some(_) => (Input::V(rn), Output::X(rd, width)),
        None => (Input::X(rn), Output::V(rd)),
    };
    let is_signed = !flag(word, 16);
    let function = Function {
        is_signed,
        immediate: fraction as u8,
        ..function(op, size)
    };
    Some(Simd::Compute {
        function,
        inputs: [input, Input::Zero, Input::Zero],
        output,
    })
}

fn fixed_point(word: u32, size: u8) -> Option<Simd> {
    let scale = field(word, 15, 10);
    if !flag(word, 31) && scale < 32 {
        return None;
    }
    match (field(word, 20, 19), field(word, 18, 16)) {
        (3, 0 | 1) => conversion(word, size, Some(Rounding::Zero), 64 - scale),
        (0, 2 | 3) => conversion(word, size, None, 64 - scale),
        _ => None,
    }
}

fn integer(word: u32, size: u8) -> Option<Simd> {
    let mode = field(word, 20, 19);
    let (rd, rn) = (register(word, 0), register(word, 5));
    let is_x = flag(word, 31);
    // FMOV needs registers of the same size, except for half precision.
    let moves = mode == 0 && (size == 1 || is_x == (size == 3));
    let element = Function {
        is_signed: false,
        ..function(Op::Element, size)
    };
    match field(word, 18, 16) {
        0 | 1 => conversion(word, size, Some(Rounding::of(mode)), 0),
        2 | 3 if mode == 0 => conversion(word, size, None, 0),
        4 | 5 if mode == 0 => conversion(word, size, Some(Rounding::Away), 0),
        6 if moves => Some(Simd::Compute {
            function: element,
            inputs: [Input::V(rn), Input::Zero, Input::Zero],
            output: Output::X(rd, Width::of(is_x)),
        }),
        7 if moves => to_vector(word, element, [Input::X(rn), Input::Zero, Input::Zero]),
        _ => None,
    }
}

fn one_source(word: u32, size: u8) -> Option<Simd> {
    let opcode = field(word, 20, 15);
    let round = |mode, exact| Float::Round { mode, exact };
    let float = match opcode {
        0 => {
            let element = Function {
                is_signed: false,
                ..function(Op::Element, size)
            };
            let inputs = [Input::V(register(word, 5)), Input::Zero, Input::Zero];
            return to_vector(word, element, inputs);
        }
        1 => Float::Abs,
        2 => Float::Neg,
        3 => Float::Sqrt,
        4 | 5 | 7 => {
            let to = [2, 3, 0, 1][(opcode & 3) as usize];
            let inputs = [Input::V(register(word, 5)), Input::Zero, Input::Zero];
            let function = function(Op::Convert { from: size }, to);
            return to_vector(word, function, inputs).filter(|_| to != size);
        }
        8 => round(Some(Rounding::Nearest), false),
        9 => round(Some(Rounding::Up), false),
        10 => round(Some(Rounding::Down), false),
        11 => round(Some(Rounding::Zero), false),
        12 => round(Some(Rounding::Away), false),
        14 => round(None, true),
        15 => round(None, false),
        16..=19 if size != 1 => Float::RoundToBits {
            mode: (opcode & 1 == 0).then_some(Rounding::Zero),
            bits: if opcode < 18 { 32 } else { 64 },
        },
        _ => return None,
    };
    let inputs = [Input::V(register(word, 5)), Input::Zero, Input::Zero];
    to_vector(word, function(Op::Float(float), size), inputs)
}

fn compare(word: u32, size: u8) -> Option<Simd> {
    if field(word, 2, 0) != 0 {
        return None;
    }
    let second = match flag(word, 3) {
        true => Input::Zero,
        false => Input::V(register(word, 16)),
    };
    let op = Op::Compare {
        signals: flag(word, 4),
        conditional: false,
    };
    let inputs = [Input::V(register(word, 5)), second, Input::Zero];
    Some(Simd::Compute {
        function: function(op, size),
        inputs,
        output: Output::Flags,
    })
}

fn immediate(word: u32, size: u8) -> Option<Simd> {
    let value = expanded(field(word, 20, 13), size);
    let rd = register(word, 0);
    (field(word, 9, 5) == 0).then_some(Simd::Immediate {
        rd,
        value,
        full: false,
        change: Change::Set,
    })
}

fn two_sources(word: u32, size: u8) -> Option<Simd> {
    let op = match field(word, 15, 12) {
        0 => Float::Mul { extended: false },
        1 => Float::Div,
        2 => Float::Add,
        3 => Float::Sub,
        4 => Float::Extreme(Extreme::Max),
        5 => Float::Extreme(Extreme::Min),
        6 => Float::Extreme(Extreme::MaxNumber),
        7 => Float::Extreme(Extreme::MinNumber),
        8 => Float::NegatedMul,
        _ => return None,
    };
    let [rn, rm] = [5, 16].map(|low| Input::V(register(word, low)));
    to_vector(word, function(Op::Float(op), size), [rn, rm, Input::Zero])
}
