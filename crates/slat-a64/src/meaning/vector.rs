//! Advanced SIMD and floating-point instructions.

use super::control::holds;
use super::{cut, set, x};
use crate::simd::{Change, Function, Input, Op, Output, Simd};
use crate::tier::Tier;

pub(super) fn simd<T: Tier>(t: &mut T, simd: &Simd) {
    match *simd {
        Simd::Compute {
            function,
            inputs,
            output,
        } => compute(t, function, inputs, output),
        Simd::Immediate {
            rd,
            value,
            full,
            change,
        } => {
            let value = t.number(value);
            let zero = t.number(0);
            let mask = if full { value } else { zero };
            let old = t.v(rd);
            let halves = [t.low(old), t.high(old)];
            let mut changed = [value, mask];
            if change != Change::Set {
                for (half, changed) in halves.into_iter().zip(&mut changed) {
                    *changed = match change {
                        Change::Clear => {
                            let kept = t.not(*changed);
                            t.and(half, kept)
                        }
                        _ => t.or(half, *changed),
                    };
                }
                if !full {
                    changed[1] = zero;
                }
            }
            let value = t.vector(changed[0], changed[1]);
            t.set_v(rd, value);
        }
        Simd::Select {
            size,
            condition,
            rd,
            rn,
            rm,
        } => {
            let holds = holds(t, condition);
            let [a, b] = [rn, rm].map(|r| {
                let value = t.v(r);
                let low = t.low(value);
                if size == 3 {
                    low
                } else {
                    t.zero_extend(low, 8 << size)
                }
            });
            let selected = t.select(holds, a, b);
            let zero = t.number(0);
            let value = t.vector(selected, zero);
            t.set_v(rd, value);
        }
        Simd::ConditionalCompare {
            size,
            signals,
            condition,
            nzcv,
            rn,
            rm,
        } => {
            let holds = holds(t, condition);
            let op = Op::Compare {
                signals,
                conditional: true,
            };
            let function = Function {
                op,
                size,
                bytes: 1 << size,
                is_signed: false,
                immediate: 0,
            };
            let otherwise = t.number(nzcv.into());
            let compares = t.number(16);
            let how = t.select(holds, compares, otherwise);
            let zero = t.number(0);
            let how = t.vector(how, zero);
            let inputs = [t.v(rn), t.v(rm), how];
            let flags = t.compare(function, inputs);
            t.set_flags(flags);
        }
        Simd::Table {
            full,
            registers,
            keeps,
            rd,
            rn,
            rm,
        } => {
            let indices = t.v(rm);
            let zero = t.number(0);
            let mut result = match keeps {
                true => t.v(rd),
                false => t.vector(zero, zero),
            };
            for n in 0..registers {
                let bytes = if full { 16 } else { 8 };
                let function = Function {
                    op: Op::Table,
                    size: 0,
                    bytes,
                    is_signed: false,
                    immediate: n,
                };
                let table = t.v((rn + n) % 32);
                result = t.compute(function, [table, indices, result]);
            }
            t.set_v(rd, result);
        }
    }
}

fn input<T: Tier>(t: &mut T, input: Input) -> T::Vector {
    match input {
        Input::Zero => {
            let zero = t.number(0);
            t.vector(zero, zero)
        }
        Input::V(r) => t.v(r),
        Input::X(r) => {
            let (value, zero) = (x(t, r), t.number(0));
            t.vector(value, zero)
        }
        Input::Lane { r, size, lane } => {
            let function = Function {
                op: Op::Duplicate,
                size,
                bytes: 16,
                is_signed: false,
                immediate: lane,
            };
            let value = t.v(r);
            let zero = t.number(0);
            let zeros = t.vector(zero, zero);
            t.compute(function, [value, zeros, zeros])
        }
    }
}

fn compute<T: Tier>(t: &mut T, function: Function, inputs: [Input; 3], output: Output) {
    let operands = inputs.map(|operand| input(t, operand));
    match output {
        Output::V(rd) => {
            let result = t.compute(function, operands);
            t.set_v(rd, result);
        }
        Output::X(rd, width) => {
            let result = t.compute(function, operands);
            let value = t.low(result);
            let value = cut(t, width, value);
            set(t, rd, value);
        }
        Output::Flags => {
            let flags = t.compare(function, operands);
            t.set_flags(flags);
        }
    }
}
