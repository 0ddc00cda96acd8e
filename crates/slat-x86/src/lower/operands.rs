//! Fills in the operands of an operation.

use crate::mode;
use crate::op::{MEM, NONE, Op, form, segment};
use iced_x86::{Instruction, OpKind, Register};

/// What an operation needs to know about a register.
#[derive(Clone, Copy)]
struct Known {
    /// The register's number among the registers of its kind. AH, CH, DH and BH have the numbers 16 to 19. [`NONE`] for
    /// RIP and EIP.
    number: u8,
    bytes: u8,
    /// The logarithm of the register's size in bytes; 3 for more than 8 bytes, too.
    size: u8,
    /// The segment of an address that has this base register and no segment prefix: 2 (SS) or 3 (DS).
    seg: u8,
}

/// What an operation needs to know about each register, indexed by iced's number. One table is faster than iced's own
/// functions, which read a separate table for each property.
static REGISTERS: [Known; 256] = {
    use Register::*;
    // For each kind of register: iced's first register, the number of registers, the number that we give to the first
    // one, and the registers' size.
    let files = [
        (AL, 4, 0, 1),
        (AH, 4, 16, 1),
        (SPL, 12, 4, 1),
        (AX, 16, 0, 2),
        (EAX, 16, 0, 4),
        (RAX, 16, 0, 8),
        (ES, 6, 0, 2),
        (CR0, 16, 0, 8),
        (DR0, 16, 0, 8),
        (ST0, 8, 0, 10),
        (MM0, 8, 0, 8),
        (XMM0, 32, 0, 16),
        (YMM0, 32, 0, 32),
        (EIP, 1, NONE, 4),
        (RIP, 1, NONE, 8),
    ];
    let unknown = Known {
        number: NONE,
        bytes: 0,
        size: 0,
        seg: 3,
    };
    let mut registers = [unknown; 256];
    let mut file = 0;
    while file < files.len() {
        let (first, count, number, bytes) = files[file];
        let mut n = 0;
        while n < count {
            registers[first as usize + n as usize] = Known {
                number: number + n,
                bytes,
                size: size_index(bytes),
                seg: 3,
            };
            n += 1;
        }
        file += 1;
    }
    let of_stack = [BP, ESP, EBP, RSP, RBP];
    let mut n = 0;
    while n < of_stack.len() {
        registers[of_stack[n] as usize].seg = 2;
        n += 1;
    }
    registers
};

/// Returns the logarithm of an operand size in bytes: 3 for more than 8 bytes, 0 for no bytes.
const fn size_index(bytes: u8) -> u8 {
    match bytes {
        0 | 1 => 0,
        2 => 1,
        4 => 2,
        _ => 3,
    }
}

#[inline(always)]
fn known(r: Register) -> Known {
    REGISTERS[usize::from(r as u8)]
}

/// Fills in the fields that all instructions have. Functions that are not inlined handle rare kinds of operands:
/// otherwise the loop would be slower, because it would prepare for every kind first.
#[inline(always)]
pub(super) fn fill_in(insn: &Instruction, mode: u8, op: &mut Op) {
    if insn.has_lock_prefix() || insn.has_repe_prefix() || insn.has_repne_prefix() {
        op.lock = insn.has_lock_prefix();
        op.rep = match insn.has_repe_prefix() {
            true => 1,
            false => 2 * u8::from(insn.has_repne_prefix()),
        };
    }
    for k in 0..op.r.len() {
        match insn.op_kind(k as u32) {
            // iced-x86 returns the register `None` after the last operand.
            OpKind::Register if insn.op_register(k as u32) == Register::None => break,
            OpKind::Register => op.r[k] = known(insn.op_register(k as u32)).number,
            OpKind::Memory => {
                op.r[k] = MEM;
                memory(insn, mode, op);
            }
            kind => other(insn, kind, op),
        }
    }
    op.size = match insn.op0_kind() {
        OpKind::Register => known(insn.op0_register()).size,
        OpKind::Memory => size_index(insn.memory_size().size() as u8),
        _ => 3,
    };
}

/// Fills in an operand that is neither a register nor memory at an address with a base or an index register.
#[inline(never)]
fn other(insn: &Instruction, kind: OpKind, op: &mut Op) {
    match kind {
        OpKind::Register | OpKind::Memory | OpKind::FarBranch16 | OpKind::FarBranch32 => {}
        OpKind::Immediate8 => op.imm = insn.immediate8().into(),
        OpKind::Immediate8_2nd => op.imm = insn.immediate8_2nd().into(),
        OpKind::Immediate8to16 => op.imm = insn.immediate8to16() as u64,
        OpKind::Immediate8to32 => op.imm = insn.immediate8to32() as u64,
        OpKind::Immediate8to64 => op.imm = insn.immediate8to64() as u64,
        OpKind::Immediate16 => op.imm = insn.immediate16().into(),
        OpKind::Immediate32 => op.imm = insn.immediate32().into(),
        OpKind::Immediate32to64 => op.imm = insn.immediate32to64() as u64,
        OpKind::Immediate64 => op.imm = insn.immediate64(),
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64 => {
            op.imm = insn.near_branch_target();
        }
        OpKind::MemorySegSI | OpKind::MemorySegDI | OpKind::MemoryESDI => {
            string_operand(insn, 2, op);
        }
        OpKind::MemorySegESI | OpKind::MemorySegEDI | OpKind::MemoryESEDI => {
            string_operand(insn, 4, op);
        }
        OpKind::MemorySegRSI | OpKind::MemorySegRDI | OpKind::MemoryESRDI => {
            string_operand(insn, 8, op);
        }
    }
}

fn string_operand(insn: &Instruction, address_size: u8, op: &mut Op) {
    op.address_size = address_size;
    op.seg = segment(insn.memory_segment());
}

#[inline(never)]
fn memory(insn: &Instruction, mode: u8, op: &mut Op) {
    let (base, index) = (known(insn.memory_base()), known(insn.memory_index()));
    op.base = base.number;
    op.index = index.number;
    op.scale = insn.memory_index_scale().trailing_zeros() as u8;
    op.disp = insn.memory_displacement64();
    let is_64 = mode & mode::BITS == mode::BITS_64;
    op.seg = match insn.segment_prefix() {
        Register::None => base.seg,
        Register::FS => 4,
        Register::GS => 5,
        // In 64-bit mode, other segment prefixes have no effect: the base register decides whether a bad address raises
        // #SS or #GP.
        _ if is_64 => base.seg,
        prefix => segment(prefix),
    };
    op.address_size = match (insn.memory_base(), insn.memory_index()) {
        // A gather's index is a vector register, which does not tell the address size.
        (Register::None, index) if !index.is_gpr() => insn.memory_displ_size().clamp(2, 8) as u8,
        (Register::None, _) => index.bytes,
        _ => base.bytes,
    };
    let is_flat = is_64 && op.seg < 4 && op.address_size == 8;
    op.form = match (op.base != NONE, op.index != NONE) {
        _ if !is_flat => form::FULL,
        (true, false) => form::BASE,
        (true, true) => form::INDEX,
        (false, false) => form::DISP,
        (false, true) => form::FULL,
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registers_have_iced_s_numbers_and_sizes() {
        let mut files = 0;
        for r in Register::values() {
            let Known {
                number,
                bytes,
                size,
                seg,
            } = known(r);
            let mut insn = Instruction::new();
            insn.set_memory_base(r);
            assert_eq!(seg, segment(insn.memory_segment()), "{r:?}");
            if bytes == 0 {
                let is_ours = r.is_gpr() || r.is_segment_register() || r.is_xmm() || r.is_ymm();
                assert!(!is_ours && !r.is_mm() && !r.is_st() && !r.is_cr() && !r.is_dr());
                continue;
            }
            files += u32::from(number == 0);
            assert_eq!(usize::from(bytes), r.size(), "{r:?}");
            assert_eq!(1 << size, bytes.min(8), "{r:?}");
            let expected = match r {
                Register::EIP | Register::RIP => usize::from(NONE),
                Register::AH | Register::CH | Register::DH | Register::BH => r.number() + 12,
                r if r.is_gpr8() && r.number() >= 8 => r.number() - 4,
                r => r.number(),
            };
            assert_eq!(usize::from(number), expected, "{r:?}");
        }
        assert_eq!(files, 11);
    }
}
