//! The decoded guest instructions of a region, and their uses of registers and flags.

use super::{Source, Step};
use crate::lower;
use crate::mode;
use crate::sem::{FlagUse, by_mnemonic};
use iced_x86::{
    CodeSize, Decoder, DecoderOptions, EncodingKind, Instruction, InstructionInfoFactory, Mnemonic,
    OpAccess, OpKind,
};

/// One decoded guest instruction.
pub(super) struct Guest {
    pub(super) insn: Instruction,
    /// The data that the interpreter needs to continue at the instruction. The number of instructions before the
    /// instruction is counted from the beginning of this block.
    pub(super) step: Step,
}

/// Decodes the region's blocks.
pub(super) fn decode(source: &Source) -> Vec<Vec<Guest>> {
    let mut blocks = Vec::new();
    for (rip, bytes) in &source.blocks {
        let width = mode::width(source.kind.mode);
        let mut decoder = Decoder::with_ip(width, bytes, *rip, DecoderOptions::NONE);
        let mut block = Vec::new();
        while decoder.can_decode() {
            let start = decoder.position();
            let insn = decoder.decode();
            if insn.is_invalid() {
                break;
            }
            let code = &bytes[start..decoder.position()];
            let (op, _) = lower::alone(&insn, code, source.kind.mode, 0, insn.len() as u8);
            let mut bytes = [0; 15];
            bytes[..code.len()].copy_from_slice(code);
            let step = Step {
                rip: insn.ip(),
                op,
                is_movable: source.kind.is_movable,
                moves_displacement: source.kind.is_movable && insn.is_ip_rel_memory_operand(),
                moves_immediate: source.kind.is_movable
                    && insn.op_count() > 0
                    && is_near_branch(insn.op0_kind()),
                bytes,
                before: block.len() as u8,
            };
            block.push(Guest { insn, step });
        }
        blocks.push(block);
    }
    blocks
}

fn is_near_branch(kind: OpKind) -> bool {
    matches!(
        kind,
        OpKind::NearBranch16 | OpKind::NearBranch32 | OpKind::NearBranch64
    )
}

/// Returns the numbers of the general registers that an instruction uses. For each, returns whether it may write the
/// register.
pub(super) fn registers(
    factory: &mut InstructionInfoFactory,
    insn: &Instruction,
) -> impl Iterator<Item = (usize, bool)> {
    let used = factory.info(insn).used_registers().iter();
    used.filter(|used| used.register().is_gpr()).map(|used| {
        let may_write = !matches!(used.access(), OpAccess::Read | OpAccess::CondRead);
        (used.register().full_register().number(), may_write)
    })
}

/// Returns the numbers of the general registers whose bits are set in `registers`.
pub(super) fn numbers(registers: u16) -> impl Iterator<Item = usize> {
    (0..16).filter(move |r| registers >> r & 1 != 0)
}

/// What a block does first with the arithmetic flags.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum FirstUse {
    /// The block sets all flags before it reads any, so their old values do not matter.
    SetsAll,
    /// The block needs the CPU's record of lazy flags, if it needs flags at all.
    Record,
    /// The block first sets only CF or OF (ADCX, ADOX), so it needs the other flags in RFLAGS.
    Rflags,
}

/// Returns the first use that a block makes of the arithmetic flags.
pub(super) fn first_use(guests: &[Guest]) -> FirstUse {
    let uses_flags = |insn: &&Instruction| insn.rflags_read() | insn.rflags_modified() != 0;
    let user = guests.iter().map(|guest| &guest.insn).find(uses_flags);
    match user.map(Instruction::mnemonic) {
        Some(Mnemonic::Adcx | Mnemonic::Adox) => FirstUse::Rflags,
        _ if sets_flags_first(guests) => FirstUse::SetsAll,
        _ => FirstUse::Record,
    }
}

/// Whether a block sets all flags before it reads any and before it may stop: then their old values do not matter.
fn sets_flags_first(guests: &[Guest]) -> bool {
    for Guest { insn, .. } in guests {
        let mut operands = (0..insn.op_count()).map(|k| (insn.op_kind(k), insn.op_register(k)));
        let are_plain = operands.all(|(kind, register)| match kind {
            OpKind::Memory => insn.mnemonic() == Mnemonic::Lea,
            OpKind::Register => register.is_gpr(),
            _ => true,
        });
        // Outside 64-bit code, an instruction with a VEX prefix may be undefined, as in real mode. Then it stops the
        // block.
        let is_plain = are_plain
            && (insn.encoding() != EncodingKind::VEX || insn.code_size() == CodeSize::Code64);
        match flag_use(insn) {
            Some(FlagUse::SetsAll) if is_plain => return true,
            Some(FlagUse::Nothing) if is_plain => {}
            _ => return false,
        }
    }
    false
}

/// Returns how an instruction uses the flags. `None`: the instruction does more than compiled code can do on registers
/// alone, or it may stop the block.
fn flag_use(insn: &Instruction) -> Option<FlagUse> {
    use crate::sem::flag_use as of;
    match insn.mnemonic() {
        Mnemonic::Mov | Mnemonic::Movzx | Mnemonic::Movsx | Mnemonic::Movsxd | Mnemonic::Lea => {
            Some(FlagUse::Nothing)
        }
        mnemonic => by_mnemonic!(mnemonic, binary of())
            .or_else(|| by_mnemonic!(mnemonic, unary of()))
            .or_else(|| by_mnemonic!(mnemonic, sources of())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use iced_x86::{Code, RflagsBits};

    /// The formulas of `sem` agree with iced's tables, in which a flag that becomes undefined counts as modified.
    #[test]
    fn what_an_operation_does_with_the_flags_is_what_iced_says() {
        const ALL: u32 = RflagsBits::OF
            | RflagsBits::SF
            | RflagsBits::ZF
            | RflagsBits::AF
            | RflagsBits::CF
            | RflagsBits::PF;
        let mut of_each = [0; 3];
        for code in Code::values() {
            let mut insn = Instruction::new();
            insn.set_code(code);
            // Leave out MOV of control and debug registers, which makes the flags undefined, because compiled code does
            // not translate it.
            let Some(found) = flag_use(&insn).filter(|_| !insn.is_privileged()) else {
                continue;
            };
            let expected = match (insn.rflags_read() & ALL, insn.rflags_modified() & ALL) {
                (0, 0) => FlagUse::Nothing,
                (0, ALL) => FlagUse::SetsAll,
                _ => FlagUse::Depends,
            };
            assert_eq!(found, expected, "{code:?}");
            of_each[found as usize] += 1;
        }
        assert!(of_each.iter().all(|n| *n > 8), "{of_each:?}");
    }
}
