//! A decoded operation, as the interpreter executes it.

use crate::Cpu;
pub use crate::flow::{Break, Flow};
use iced_x86::{Instruction, Mnemonic, OpKind, Register};

/// The number of bytes of the longest instruction.
pub(crate) const LONGEST_INSTRUCTION: usize = 15;

/// A function that executes one operation.
pub type Handler = fn(&mut Cpu, &Op) -> Flow;

/// A function that chooses the handler of an instruction. `op` already has the operands; the function fills in the
/// other fields that the handler needs. Returns `None` if this CPU does not have the instruction in this form.
pub(crate) type Lower = fn(&Instruction, &mut Op) -> Option<Handler>;

/// A row of the instruction table (module `lower`): one or more lists of mnemonics, and the function that lowers them.
pub(crate) struct Row {
    pub mnemonics: &'static [&'static [Mnemonic]],
    pub lower: Lower,
}

/// Makes rows of the instruction table, written like a `match`: `mnemonics => handler`. If the handler depends on the
/// instruction, it is an expression that uses `insn` and `op`, the arguments of [`Lower`].
macro_rules! rows {
    (|$insn:ident, $op:ident| $($($mnemonic:ident)|+ => $handler:expr,)+) => {
        &[$($crate::op::Row {
            mnemonics: &[&[$(iced_x86::Mnemonic::$mnemonic),+]],
            #[allow(unused_variables, reason = "many handlers depend on neither")]
            lower: |$insn, $op| Some($handler),
        }),+]
    };
}
pub(crate) use rows;

/// Makes a row for each mnemonic of a family. `$choose` is generic over [`Operation`](crate::sem::Operation), and
/// returns the handler.
macro_rules! family_rows {
    ([$($file:ident::$name:ident)*] $choose:ident) => {
        &[$($crate::op::Row {
            mnemonics: &[&[iced_x86::Mnemonic::$name]],
            lower: |_, op| Some($choose::<$crate::sem::$file::$name>(op)),
        }),*]
    };
    ($family:ident $choose:ident) => {
        $crate::sem::family! { $family family_rows $choose }
    };
}
pub(crate) use family_rows;

/// How a memory operand's linear address is computed.
pub(crate) mod form {
    /// In 64-bit mode: base + displacement, in a flat segment.
    pub const BASE: u8 = 0;
    /// In 64-bit mode: base + index × scale + displacement, in a flat segment.
    pub const INDEX: u8 = 1;
    /// In 64-bit mode: displacement only (also RIP-relative), in a flat segment.
    pub const DISP: u8 = 2;
    /// The form of all other memory operands.
    pub const FULL: u8 = 3;
}

/// The value of [`Op::base`] or [`Op::index`] for an operand without this register.
pub const NONE: u8 = 0xff;
/// The value in [`Op::r`] for an operand in memory.
pub const MEM: u8 = 0xfe;

/// One decoded instruction, or two that were fused.
///
/// All instructions fill in `r`, `imm` and the memory operand before the handler is chosen.
#[derive(Clone, Copy, Debug)]
pub struct Op {
    /// The function that executes the operation.
    pub handler: Handler,
    /// The immediate operand, sign-extended, or the target of a near branch.
    pub imm: u64,
    /// The displacement, sign-extended. For a RIP-relative operand, this is the whole address.
    pub disp: u64,
    /// The registers of the first four operands. A register is given by its number among the registers of its kind; AH,
    /// CH, DH and BH are 16 to 19. [`MEM`] is the memory operand. [`NONE`] is an immediate or an absent operand.
    pub r: [u8; 4],
    /// The base register, or [`NONE`].
    pub base: u8,
    /// The index register, or [`NONE`].
    pub index: u8,
    /// The scale of the index as a shift, 0 to 3.
    pub scale: u8,
    /// The segment of the memory operand: 0 to 5 for ES, CS, SS, DS, FS and GS.
    pub seg: u8,
    /// One of the forms in [`form`].
    pub(crate) form: u8,
    /// The address size in bytes: 2, 4 or 8.
    pub address_size: u8,
    /// The logarithm of the operand size in bytes: 0 to 3 for 1, 2, 4 and 8 bytes.
    pub size: u8,
    /// The length of the instruction in bytes.
    pub len: u8,
    /// The offset of the instruction in its block.
    pub offset: u8,
    /// Another small value that the handler needs, for example a condition.
    pub aux: u8,
    /// Whether the instruction has a LOCK prefix, or is an XCHG.
    pub lock: bool,
    /// The repeat prefix: 0 is none, 1 is REP or REPE, 2 is REPNE.
    pub rep: u8,
    /// The number of instructions that this operation executes: 2 if fused, 0 for a check that lowering added.
    pub count: u8,
    /// The instruction's mnemonic, for handlers and compiled code of several instructions.
    pub(crate) mnemonic: Mnemonic,
}

/// Returns the number of a segment register. `Register::None` counts as DS.
pub(crate) fn segment(r: Register) -> u8 {
    match r {
        Register::None => 3,
        r => r.number() as u8,
    }
}

/// Returns the number of bytes of operand `k`, a register or memory.
pub(crate) fn bytes_of(insn: &Instruction, k: usize) -> usize {
    match insn.op_kind(k as u32) {
        OpKind::Memory => insn.memory_size().size(),
        _ => insn.op_register(k as u32).size(),
    }
}

impl Cpu {
    /// Returns RIP of the instruction after `op`.
    #[inline(always)]
    pub(crate) fn next_rip(&self, op: &Op) -> u64 {
        let next = self
            .code
            .rip
            .wrapping_add(u64::from(op.offset))
            .wrapping_add(u64::from(op.len));
        if self.is_64() {
            next
        } else {
            next & 0xffff_ffff
        }
    }

    /// Returns RIP of `op`.
    pub(crate) fn rip_of(&self, op: &Op) -> u64 {
        self.code.rip.wrapping_add(u64::from(op.offset))
    }

    /// Call when `op` has ended the block for the reason `why`. If a page walk for `op` has set a bit in a page of
    /// decoded code, executes `op` again without fetching it again: the bit may be in the code of `op`, which a
    /// processor would have fetched before the walk. Then the block ends, so that the next instruction is fetched anew.
    /// Returns the reason why the block ends, which is `why` if `op` was not executed again.
    pub(crate) fn finish_fetched(&mut self, op: &Op, mut why: Break) -> Break {
        while matches!(why, Break::Retry) && std::mem::take(&mut self.code.walk_changed) {
            why = match (op.handler)(self, op) {
                Ok(()) => Break::End,
                Err(why) => why,
            };
        }
        why
    }
}
