//! Branches, exception generation and system instructions (C4.1.94).

use crate::bits::{field, flag, register, signed_field};
use crate::insn::{Barrier, Call, Hint, Insn, SystemName};
use crate::width::Width;

pub(super) fn decode(word: u32) -> Option<Insn> {
    let rt = register(word, 0);
    match field(word, 31, 29) {
        0b000 | 0b100 => Some(Insn::Branch {
            links: flag(word, 31),
            offset: signed_field(word, 25, 0) << 2,
        }),
        0b001 | 0b101 => Some(match flag(word, 25) {
            false => Insn::CompareBranch {
                width: Width::of(flag(word, 31)),
                if_zero: !flag(word, 24),
                rt,
                offset: signed_field(word, 23, 5) << 2,
            },
            true => Insn::TestBranch {
                bit: (field(word, 31, 31) << 5 | field(word, 23, 19)) as u8,
                if_zero: !flag(word, 24),
                rt,
                offset: signed_field(word, 18, 5) << 2,
            },
        }),
        // Bit 4 set is BC.cond of FEAT_HBC, which this processor lacks.
        0b010 if field(word, 25, 24) == 0 && !flag(word, 4) => Some(Insn::BranchIf {
            condition: field(word, 3, 0) as u8,
            offset: signed_field(word, 23, 5) << 2,
        }),
        0b110 => match field(word, 25, 24) {
            0b00 => exception(word),
            0b01 => system(word),
            _ => branch_register(word),
        },
        _ => None,
    }
}

fn exception(word: u32) -> Option<Insn> {
    let call = match (field(word, 23, 21), field(word, 4, 0)) {
        (0, 1) => Call::Svc,
        (0, 2) => Call::Hvc,
        (0, 3) => Call::Smc,
        (1, 0) => Call::Brk,
        (2, 0) => Call::Hlt,
        (5, 1..=3) => Call::Dcps,
        _ => return None,
    };
    Some(Insn::Call {
        call,
        immediate: field(word, 20, 5) as u16,
    })
}

fn branch_register(word: u32) -> Option<Insn> {
    let rn = register(word, 5);
    if field(word, 20, 16) != 31 || field(word, 15, 10) != 0 || field(word, 4, 0) != 0 {
        return None;
    }
    match field(word, 24, 21) {
        0b0000 | 0b0010 => Some(Insn::BranchRegister { links: false, rn }),
        0b0001 => Some(Insn::BranchRegister { links: true, rn }),
        0b0100 if rn == 31 => Some(Insn::Eret),
        // DRPS (0b0101) is UNDEFINED outside of debug state.
        _ => None,
    }
}

fn system(word: u32) -> Option<Insn> {
    let (op1, crn, crm, op2) = (
        field(word, 18, 16),
        field(word, 15, 12),
        field(word, 11, 8),
        field(word, 7, 5),
    );
    let rt = register(word, 0);
    let reads = flag(word, 21);
    if field(word, 24, 22) != 0b100 {
        return None;
    }
    let name = SystemName(field(word, 20, 5) as u16);
    match (field(word, 20, 19), reads) {
        (0, false) if rt == 31 => match (op1, crn) {
            (3, 2) => Some(hint(crm << 3 | op2)),
            (3, 3) => barrier(crm, op2),
            (0, 4) if op2 == 0 && crm == 0 => Some(Insn::InvertCarry),
            (0, 4) if op2 == 1 && crm == 0 => Some(Insn::ConvertFlags { to_arm: true }),
            (0, 4) if op2 == 2 && crm == 0 => Some(Insn::ConvertFlags { to_arm: false }),
            (op1, 4) => {
                let (op1, op2, value) = (op1 as u8, op2 as u8, crm as u8);
                // The immediate form exists for UAO, PAN, SPSel, SSBS, DIT, DAIFSet and DAIFClr.
                let is_field = matches!((op1, op2), (0, 3..=5) | (3, 1 | 2 | 6 | 7));
                is_field.then_some(Insn::SetPstate { op1, op2, value })
            }
            _ => None,
        },
        (1, _) => Some(Insn::SystemInstruction { name, rt, reads }),
        (2 | 3, true) => Some(Insn::ReadSystem { name, rt }),
        (2 | 3, false) => Some(Insn::WriteSystem { name, rt }),
        _ => None,
    }
}

/// Decodes a hint. Hints of extensions that this processor lacks, such as pointer authentication, are NOPs.
fn hint(number: u32) -> Insn {
    match number {
        1 => Insn::Hint(Hint::Yield),
        2 => Insn::Hint(Hint::Wfe),
        3 => Insn::Hint(Hint::Wfi),
        4 => Insn::Hint(Hint::Sev),
        5 => Insn::Hint(Hint::Sevl),
        _ => Insn::Nop,
    }
}

fn barrier(crm: u32, op2: u32) -> Option<Insn> {
    match op2 {
        2 => Some(Insn::ClearExclusive),
        4 | 5 => Some(Insn::Barrier(Barrier::Memory)),
        6 => Some(Insn::Barrier(Barrier::Isb)),
        7 if crm == 0 => Some(Insn::Barrier(Barrier::Speculation)),
        _ => None,
    }
}
