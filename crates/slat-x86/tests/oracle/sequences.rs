//! Short sequences of instructions. A single instruction starts with plain flags. Only in a sequence do lazily computed
//! flags, fused operations and forwarded results interact.

use iced_x86::{Code, CpuidFeature, FlowControl, Instruction, Mnemonic, OpKind, Register};

use crate::forms::{self, Case};
use crate::judge;
use crate::memory;
use crate::native::{AT, BRANCH_TARGET, DATA, DATA_LEN};
use crate::rng::Rng;
use crate::vendor;

/// The forms that sequences are made of.
pub struct Pool {
    /// Integer instructions.
    pub integer: Vec<Code>,
    /// All forms that continue with the next instruction.
    pub any: Vec<Code>,
    /// Conditional branches.
    pub branches: Vec<Code>,
}

impl Pool {
    pub fn new() -> Pool {
        let fits =
            |code: &Code| !NEEDS_TAMING.contains(&code.mnemonic()) && !code.is_string_instruction();
        let all: Vec<Code> = forms::all().into_iter().filter(fits).collect();
        let with = |flow| {
            all.iter()
                .copied()
                .filter(move |code| flow_of(*code) == flow)
        };
        let integer = |code: &Code| {
            use CpuidFeature as F;
            code.cpuid_features().iter().all(|f| {
                matches!(
                    f,
                    F::INTEL8086
                        | F::INTEL186
                        | F::INTEL386
                        | F::INTEL486
                        | F::X64
                        | F::CMOV
                        | F::ADX
                )
            })
        };
        Pool {
            integer: with(FlowControl::Next).filter(integer).collect(),
            any: with(FlowControl::Next).collect(),
            branches: with(FlowControl::ConditionalBranch).collect(),
        }
    }

    /// Makes a case of a few instructions, often with a conditional branch at the end.
    pub fn random(&self, base: usize, rng: &mut Rng) -> Option<Case> {
        const ROOM: usize = BRANCH_TARGET - AT - 16;
        let mut case = Case::start(base, rng);
        // Masks exceptions: single instructions test unmasked ones.
        case.regs.fx[24] |= 0x80;
        case.regs.fx[25] |= 0x1f;
        let length = 2 + rng.below(5);
        while case.bytes.len() < ROOM - 15 {
            let of = if rng.one_in(4) {
                &self.any
            } else {
                &self.integer
            };
            if let Some(instruction) = plain(of[rng.below(of.len())], base, rng)
                && vendor::allowed_in_sequences(&instruction, &case.regs)
            {
                case.push(&instruction)?;
                if vendor::ends_sequence(&instruction, &case.regs) {
                    break;
                }
            }
            if rng.one_in(length) {
                break;
            }
        }
        if rng.one_in(2) {
            let (branch, _) =
                forms::operands(self.branches[rng.below(self.branches.len())], base, rng)?;
            case.push(&branch)?;
        }
        (case.bytes.len() <= ROOM).then_some(case)
    }
}

fn flow_of(code: Code) -> FlowControl {
    let mut instruction = Instruction::new();
    instruction.set_code(code);
    instruction.flow_control()
}

/// Like [`placed`], but returns only an instruction that leaves no flag undefined.
fn plain(code: Code, base: usize, rng: &mut Rng) -> Option<Instruction> {
    placed(code, base, rng).filter(|instruction| judge::undefined_flags(instruction) == 0)
}

/// Returns an instruction with its memory operand at a fixed address, which does not use RSP.
pub fn placed(code: Code, base: usize, rng: &mut Rng) -> Option<Instruction> {
    let (mut instruction, memory) = forms::operands(code, base, rng)?;
    if let Some(n) = memory {
        if memory::is_gather(&instruction) {
            return None;
        }
        instruction.set_op_kind(n, OpKind::Memory);
        instruction.set_memory_base(Register::RIP);
        instruction.set_memory_displ_size(8);
        // There are few addresses, so that written data is also read.
        let at = base
            + DATA
            + 0x40
            + 16 * rng.below(4)
            + if rng.one_in(8) {
                rng.below(DATA_LEN / 2)
            } else {
                0
            };
        instruction.set_memory_displacement64(at as u64);
    }
    let rsp = (0..instruction.op_count()).any(|n| {
        instruction.op_kind(n) == OpKind::Register
            && instruction.op_register(n).full_register() == Register::RSP
    });
    (!rsp).then_some(instruction)
}

/// Instructions whose registers, memory or counts must be prepared.
pub const NEEDS_TAMING: &[Mnemonic] = &[
    Mnemonic::Bt,
    Mnemonic::Bts,
    Mnemonic::Btr,
    Mnemonic::Btc,
    Mnemonic::Bsf,
    Mnemonic::Bsr,
    Mnemonic::Shld,
    Mnemonic::Shrd,
    Mnemonic::Xlatb,
    Mnemonic::Maskmovdqu,
    Mnemonic::Maskmovq,
    Mnemonic::Vmaskmovdqu,
    Mnemonic::Enter,
    Mnemonic::Leave,
    Mnemonic::Popf,
    Mnemonic::Popfq,
    Mnemonic::Ldmxcsr,
    Mnemonic::Vldmxcsr,
    Mnemonic::Fxrstor,
    Mnemonic::Fxrstor64,
];
