//! x87 instructions that the host executes with only their operands, without loading the whole x87 state.
//!
//! In the usual state, all exceptions are masked and none is pending. Also, the registers that an instruction reads are
//! usually full, and a register that it pushes is empty. Then the host's CPU needs only the operands, the guest's
//! control word and the instruction. This module itself updates TOP, the tags and the sticky flags. Instructions that
//! only move or free registers need no instruction of the host.
//!
//! In any other state, a handler of this module calls the instruction's handler in the parent module, which is called
//! the *reference*. Both handlers have the same results.
//!
//! | file | idea |
//! |---|---|
//! | `plan` | what a handler has to know about its instruction |
//! | `host` | executes an instruction of the host on the guest's registers |
//! | `handlers` | the handlers |

mod handlers;
mod host;
mod plan;

use super::{Stub, own_stub};
use crate::op::{Handler, Op};
use handlers::*;
use plan::{Plan, touched};

#[cfg(test)]
pub(super) use handlers::LEFT;

/// Returns the quick handler of an x87 instruction, and stores the handler's [`Plan`] in `op`. `None`: the instruction
/// has no quick handler.
pub(super) fn lower(opcode: u8, modrm: u8, op: &mut Op) -> Option<Handler> {
    let (reg, i) = (modrm >> 3 & 7, modrm & 7);
    let own = own_stub(op);
    let stub = Stub::on_registers;
    let mut plan = Plan {
        stub: own,
        touches: 0,
        conditions: 0,
        other: i,
        destination: 0,
        pops: 0,
    };
    let handler: Handler = if own.is_on_memory() {
        match (opcode, reg) {
            (0xd8 | 0xda | 0xdc | 0xde, 2 | 3) => {
                // The stub of FCOM and FICOM with memory operands:
                plan.stub = Stub::on_memory(opcode, 2 << 3);
                plan.pops = reg & 1;
                examine_memory
            }
            (0xd8 | 0xda | 0xdc | 0xde, _) => calculate_memory,
            (0xd9 | 0xdb | 0xdd | 0xdf, 0) | (0xdf, 5) => load_memory,
            (0xd9 | 0xdb | 0xdd | 0xdf, 2) => {
                plan.stub = Stub::on_memory(opcode, 3 << 3);
                store_memory
            }
            (0xd9 | 0xdb | 0xdd | 0xdf, 3) | (0xdb | 0xdd | 0xdf, 1) | (0xdf, 7) => {
                plan.pops = 1;
                store_memory
            }
            (0xd9, 5) => load_control,
            (0xd9, 7) => store_control,
            (0xdb, 5) => load_extended,
            (0xdb, 7) => store_extended,
            (0xdd, 7) => store_status,
            _ => return None,
        }
    } else {
        match (opcode, reg, i) {
            (0xd8, 2 | 3, _) => {
                plan.stub = stub(0xde, 0xd9); // FCOMPP
                plan.pops = reg & 1;
                compare
            }
            (0xd8 | 0xdc | 0xde, 0 | 1 | 4.., _) => {
                // Use the stub of FADDP ST(1), ST(0) or a similar instruction, after which one register remains on the
                // host's stack. All three opcodes have the operands of a subtraction in the same order.
                plan.stub = stub(0xde, 0xc1 | reg << 3);
                if opcode != 0xd8 {
                    plan.destination = i;
                }
                plan.pops = (opcode == 0xde).into();
                calculate
            }
            (0xd9, 0, _) => load_register,
            (0xd9, 1, _) => exchange,
            (0xd9, 2, 0) => nothing,
            (0xd9, 4, 0) => change_sign,
            (0xd9, 4, 1) => absolute,
            (0xd9, 4, 4 | 5) => examine, // FTST, FXAM
            (0xd9, 5, 0..=6) => load_constant,
            (0xd9, 6, 1 | 3) | (0xd9, 7, 1) => {
                // For FYL2X, FPATAN and FYL2XP1:
                (plan.other, plan.destination, plan.pops) = (1, 1, 1);
                calculate
            }
            (0xd9, 6, 5) | (0xd9, 7, 0 | 5) => {
                // For FPREM1, FPREM and FSCALE:
                plan.other = 1;
                reduce
            }
            (0xd9, 6, 6 | 7) => rotate,
            // For F2XM1, FSQRT, FRNDINT, FSIN and FCOS:
            (0xd9, 6, 0) | (0xd9, 7, 2 | 4 | 6 | 7) => calculate_alone,
            (0xda | 0xdb, 0..=3, _) => move_if,
            (0xda, 5, 1) | (0xde, 3, 1) => {
                // For FUCOMPP and FCOMPP:
                plan.pops = 2;
                compare
            }
            (0xdb, 4, 2) => clear_exceptions,
            (0xdb | 0xdf, 5 | 6, _) => {
                // For FUCOMI and FCOMI:
                plan.stub = stub(0xdf, 0xc1 | reg << 3);
                plan.pops = (opcode == 0xdf).into();
                compare_to_flags
            }
            (0xdd, 0, _) => free,
            (0xdd, 2 | 3, _) => {
                (plan.destination, plan.pops) = (i, reg & 1);
                store_register
            }
            (0xdd, 4 | 5, _) => {
                plan.stub = stub(0xda, 0xe9); // FUCOMPP
                plan.pops = reg & 1;
                compare
            }
            _ => return None,
        }
    };
    (plan.touches, plan.conditions) = touched(own);
    op.imm |= plan.pack();
    Some(handler)
}
