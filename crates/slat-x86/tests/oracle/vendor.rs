//! Where AMD's CPUs differ from Intel's. The software CPU behaves like Intel's, whichever vendor its guest sees. On an
//! AMD host the judge has to know what the host does instead.
//!
//! A rule takes the software CPU's result, checks that it is what the rule expects of Intel's CPUs, and rewrites it to
//! what the rule expects of AMD's. The judge compares the rewritten result with the host's like any other. So a
//! difference that is not in the rule is still found.
//!
//! APM: AMD64 Architecture Programmer's Manual. SDM: Intel 64 and IA-32 Architectures Software Developer's Manual.

use std::arch::x86_64::{__cpuid, _fxsave64};

use iced_x86::{Code, Decoder, DecoderOptions, Instruction, Mnemonic, OpKind};

use crate::forms::Case;
use crate::judge::{self, Result};
use crate::memory;
use crate::native::{AT, BRANCH_TARGET, DATA, Fault, PAGE, Regs};

fn vendor() -> [u8; 4] {
    __cpuid(0).ebx.to_le_bytes()
}

/// Returns the bits that exist in the host's MXCSR, as FXSAVE reports them: AMD's CPUs have MM, for misaligned
/// operands, and Intel's do not (APM volume 1, section 4.2.2; SDM volume 1, section 10.2.3).
pub fn host_mxcsr_mask() -> u32 {
    #[repr(align(16))]
    struct Image([u8; 512]);
    let mut image = Image([0; 512]);
    // SAFETY: the image has 512 bytes and is aligned to 16, and every x86-64 CPU has the instruction.
    unsafe { _fxsave64(image.0.as_mut_ptr()) };
    u32::from_le_bytes([image.0[28], image.0[29], image.0[30], image.0[31]])
}

/// Whether the host's CPU is Intel's.
pub fn is_intel() -> bool {
    &vendor() == b"Genu"
}

/// Whether the host's CPU is AMD's, or Hygon's, which are AMD's designs.
fn is_amd() -> bool {
    matches!(&vendor(), b"Auth" | b"Hygo")
}

/// The positions that an instruction may have in a sequence, if a rule applies to it.
#[derive(PartialEq, Eq)]
enum InSequences {
    /// The instruction may be in no sequence. On AMD's CPUs the rest of the sequence would start from another state, or
    /// not run.
    Nowhere,
    /// The instruction may only be at the end. The rest of the sequence could read the bytes that differ.
    AtTheEnd,
    /// The instruction may be anywhere in a sequence, because no sequence has operands for which the vendors differ.
    Anywhere,
}

struct Rule {
    name: &'static str,
    in_sequences: InSequences,
    applies: fn(&Instruction, &Regs) -> bool,
    /// Rewrites the last argument, the software CPU's result. The third argument is the host's result. `None`: the
    /// software CPU's result is not that of Intel's CPUs.
    rewrite: fn(&Instruction, &Case, &Result, Result) -> Option<Result>,
}

const RULES: &[Rule] = &[
    // APM volume 1, section 3.7.9, table "Near Branches in 64-Bit Mode": a prefix can override the operand size to 16
    // bits. It is the number of bits popped, and RIP is truncated to it.
    // SDM volume 2, appendix A, "Superscripts Utilized in Opcode Tables", f64: prefixes that change the operand size
    // are ignored in 64-bit mode.
    Rule {
        name: "RET with an operand-size prefix",
        in_sequences: InSequences::Nowhere,
        applies: |instruction, _| matches!(instruction.code(), Code::Retnw | Code::Retnw_imm16),
        rewrite: near_return,
    },
    // AMD's 3DNow! Technology Manual (21928), "PREFETCH/PREFETCHW", and APM volume 3, "PREFETCH": #UD if the
    // operand is a register.
    // SDM volume 2, appendix A, opcode map of 0F 0D (group P): nothing but forms on memory; with a register
    // Intel's CPUs execute a NOP.
    Rule {
        name: "0F 0D with a register",
        in_sequences: InSequences::Nowhere,
        applies: |instruction, _| {
            matches!(
                instruction.code(),
                Code::Reservednop_rm16_r16_0F0D
                    | Code::Reservednop_rm32_r32_0F0D
                    | Code::Reservednop_rm64_r64_0F0D
            ) && instruction.op0_kind() == OpKind::Register
        },
        rewrite: prefetch_of_a_register,
    },
    // APM volume 3, section 2.5.7 ("NOP in 64-Bit Mode"): only 90 without REX.B is a NOP; with REX.B, F3 has no
    // meaning. SDM volume 2, "PAUSE": F3 90, without mentioning REX; XED, Intel's decoder, decodes PAUSE in all cases.
    Rule {
        name: "XCHG of R8 with F3",
        in_sequences: InSequences::Nowhere,
        applies: |instruction, _| {
            is_xchg_with_accumulator(instruction.code()) && instruction.has_rep_prefix()
        },
        rewrite: xchg_with_f3,
    },
    // SDM volume 2, "SHA1RNDS4" and the other six: exceptions of type 4, so #GP if the operand is not aligned to 16
    // bytes.
    // AMD's CPUs do not check the alignment for these instructions, though they do for other SSE instructions:
    // measured on family 19h.
    Rule {
        name: "SHA on memory that is not aligned",
        in_sequences: InSequences::Nowhere,
        applies: |instruction, regs| {
            is_sha(instruction.mnemonic())
                && instruction.memory_size().size() == 16
                && !memory::address(instruction, regs).is_multiple_of(16)
        },
        rewrite: sha_not_aligned,
    },
    // APM volume 3, appendix A, opcode map of 63: MOVSXD Gv, Ed; so the source has 32 bits for every operand size. SDM
    // volume 2, "MOVSX/MOVSXD": MOVSXD r16, r/m16.
    Rule {
        name: "MOVSXD r16 at the end of memory",
        in_sequences: InSequences::Anywhere,
        applies: |instruction, regs| {
            instruction.code() == Code::Movsxd_r16_rm16
                && instruction.op1_kind() == OpKind::Memory
                && (PAGE as u64 - 3..PAGE as u64 - 1)
                    .contains(&(memory::address(instruction, regs) % PAGE as u64))
        },
        rewrite: movsxd_at_the_end,
    },
    // An unmasked exception prevents an x87 store. AMD's CPUs translate the address first; Intel's do not translate it
    // at all. Neither APM volume 2, section 8.5 ("Priorities"), nor SDM volume 3, "Prioritization of Concurrent
    // Events", orders #PF relative to the exceptions of the x87 unit.
    Rule {
        name: "x87 store to memory that is missing, with an unmasked exception",
        in_sequences: InSequences::Anywhere,
        applies: |instruction, _| is_x87_store(instruction.mnemonic()),
        rewrite: store_with_exception,
    },
    // Here, too, AMD's CPUs translate the address first, and then no exception is visible. Intel's set the flags in
    // MXCSR, or raise #XM, before they store. Measured on family 19h.
    Rule {
        name: "VCVTPS2PH to memory that is missing",
        in_sequences: InSequences::Anywhere,
        applies: |instruction, _| instruction.mnemonic() == Mnemonic::Vcvtps2ph,
        rewrite: conversion_not_stored,
    },
    // SDM volume 2, "VPGATHERDD/VPGATHERQD", operation: before anything is loaded, each element of the mask is filled
    // with its sign, and the bits above 128 of shorter operands are cleared.
    // AMD's CPUs clear the mask's elements up to the one that faults, and change no others: measured on family 19h.
    Rule {
        name: "gather whose element faults",
        in_sequences: InSequences::Anywhere,
        applies: |instruction, _| memory::is_gather(instruction),
        rewrite: gathered_in_part,
    },
    // FOP, FIP, FDP: APM volume 5, "FXSAVE": saved only if ES is set, otherwise zero or left alone, depending on the
    // model; SDM volume 1, section 8.1.8: saved always.
    Rule {
        name: "FXSAVE: the x87 pointers",
        in_sequences: InSequences::AtTheEnd,
        applies: |instruction, _| {
            matches!(
                instruction.mnemonic(),
                Mnemonic::Fxsave | Mnemonic::Fxsave64
            )
        },
        rewrite: fxsave_fields,
    },
    // APM volume 2, section 11.4.4, the images of the environment: the selectors of the last instruction and its
    // operand. SDM volume 1, section 8.1.8: deprecated, saved as zero.
    Rule {
        name: "FNSAVE, FNSTENV: FCS and FDS",
        in_sequences: InSequences::AtTheEnd,
        applies: |instruction, _| {
            matches!(instruction.mnemonic(), Mnemonic::Fnsave | Mnemonic::Fnstenv)
        },
        rewrite: environment_selectors,
    },
];

/// Rewrites `ours` to the state that an AMD CPU leaves after `case`. Returns it with the rule's name. `None`: the host
/// is not AMD's, or no rule says that the vendors differ here.
pub fn as_amd(case: &Case, host: &Result, ours: &Result) -> Option<(Result, &'static str)> {
    if !is_amd() {
        return None;
    }
    const OPTIONS: u32 = DecoderOptions::AMD | DecoderOptions::NO_PAUSE;
    Decoder::with_ip(64, &case.bytes, case.regs.rip, OPTIONS)
        .iter()
        .find_map(|instruction| {
            let rule = rule_of(&instruction, &case.regs)?;
            let rewritten = (rule.rewrite)(&instruction, case, host, ours.clone())?;
            Some((rewritten, rule.name))
        })
}

/// Whether a sequence may contain `instruction` on this host.
pub fn allowed_in_sequences(instruction: &Instruction, regs: &Regs) -> bool {
    !is_amd()
        || rule_of(instruction, regs).is_none_or(|rule| rule.in_sequences != InSequences::Nowhere)
}

/// Whether only a branch may follow `instruction` in a sequence.
pub fn ends_sequence(instruction: &Instruction, regs: &Regs) -> bool {
    is_amd()
        && rule_of(instruction, regs).is_some_and(|rule| rule.in_sequences == InSequences::AtTheEnd)
}

fn rule_of(instruction: &Instruction, regs: &Regs) -> Option<&'static Rule> {
    RULES.iter().find(|rule| (rule.applies)(instruction, regs))
}

fn is_xchg_with_accumulator(code: Code) -> bool {
    matches!(
        code,
        Code::Xchg_r16_AX | Code::Xchg_r32_EAX | Code::Xchg_r64_RAX
    )
}

fn is_sha(mnemonic: Mnemonic) -> bool {
    matches!(
        mnemonic,
        Mnemonic::Sha1msg1
            | Mnemonic::Sha1msg2
            | Mnemonic::Sha1nexte
            | Mnemonic::Sha1rnds4
            | Mnemonic::Sha256msg1
            | Mnemonic::Sha256msg2
            | Mnemonic::Sha256rnds2
    )
}

fn is_x87_store(mnemonic: Mnemonic) -> bool {
    matches!(
        mnemonic,
        Mnemonic::Fst
            | Mnemonic::Fstp
            | Mnemonic::Fist
            | Mnemonic::Fistp
            | Mnemonic::Fisttp
            | Mnemonic::Fbstp
    )
}

/// Returns `ours` if the software CPU's result was `intel`.
fn checked(case: &Case, intel: &Result, ours: Result) -> Option<Result> {
    judge::differences(case, intel, &ours)
        .is_empty()
        .then_some(ours)
}

/// Returns the state after a NOP.
fn nothing_done(case: &Case) -> Result {
    let mut result = Result::unchanged(case, None);
    result.regs.rip += case.bytes.len() as u64;
    result
}

fn fault(vector: u8, error: u64, cr2: u64) -> Option<Fault> {
    Some(Fault { vector, error, cr2 })
}

const UD: u8 = 6;
const GP: u8 = 13;
const PF: u8 = 14;

fn near_return(_: &Instruction, case: &Case, _: &Result, mut ours: Result) -> Option<Result> {
    const FETCH_BY_USER: u64 = 0x14;
    let (popped_by_intel, popped_by_amd) = (8, 2);
    if ours.regs.rip != case.regs.rip - AT as u64 + BRANCH_TARGET as u64 {
        return None;
    }
    ours.regs.rip &= 0xffff;
    ours.regs.gpr[4] = ours.regs.gpr[4] - popped_by_intel + popped_by_amd;
    ours.fault = fault(PF, FETCH_BY_USER, ours.regs.rip);
    Some(ours)
}

fn prefetch_of_a_register(
    _: &Instruction,
    case: &Case,
    _: &Result,
    ours: Result,
) -> Option<Result> {
    checked(case, &nothing_done(case), ours)?;
    Some(Result::unchanged(case, fault(UD, 0, 0)))
}

fn xchg_with_f3(
    instruction: &Instruction,
    case: &Case,
    _: &Result,
    ours: Result,
) -> Option<Result> {
    let mut swapped = checked(case, &nothing_done(case), ours)?;
    let gpr = &mut swapped.regs.gpr;
    let (a, b) = (gpr[0], gpr[8]);
    (gpr[0], gpr[8]) = match instruction.op0_register().size() {
        2 => (a & !0xffff | b & 0xffff, b & !0xffff | a & 0xffff),
        4 => (b & 0xffff_ffff, a & 0xffff_ffff),
        _ => (b, a),
    };
    Some(swapped)
}

fn sha_not_aligned(_: &Instruction, case: &Case, host: &Result, ours: Result) -> Option<Result> {
    checked(case, &Result::unchanged(case, fault(GP, 0, 0)), ours)?;
    // Cases with an aligned operand test the result of the instruction, so this takes the host's result.
    Some(host.clone())
}

fn movsxd_at_the_end(
    instruction: &Instruction,
    case: &Case,
    host: &Result,
    ours: Result,
) -> Option<Result> {
    const READ_BY_USER: u64 = 4;
    let last = memory::address(instruction, &case.regs) + 3;
    let missing = fault(PF, READ_BY_USER, last & !(PAGE as u64 - 1));
    (ours.fault.is_none() && host.fault == missing).then(|| Result::unchanged(case, missing))
}

fn store_with_exception(
    _: &Instruction,
    case: &Case,
    host: &Result,
    ours: Result,
) -> Option<Result> {
    const ERROR_SUMMARY: u8 = 0x80;
    let stopped = ours.fault.is_none()
        && ours.regs.fx[2] & ERROR_SUMMARY != 0
        && ours.data == case.data
        && host.fault.is_some_and(|f| f.vector == PF);
    stopped.then(|| Result::unchanged(case, host.fault))
}

fn conversion_not_stored(
    _: &Instruction,
    case: &Case,
    host: &Result,
    mut ours: Result,
) -> Option<Result> {
    const XM: u8 = 19;
    let missing = host.fault.filter(|f| f.vector == PF);
    if missing.is_none() || ours.fault != missing && ours.fault != fault(XM, 0, 0) {
        return None;
    }
    // Only the flags have changed.
    let before = Result::unchanged(case, missing);
    ours.regs.fx[MXCSR].copy_from_slice(&before.regs.fx[MXCSR]);
    ours.fault = missing;
    checked(case, &before, ours)
}

fn gathered_in_part(
    instruction: &Instruction,
    case: &Case,
    host: &Result,
    mut ours: Result,
) -> Option<Result> {
    if ours.fault.is_none() || ours.fault != host.fault {
        return None;
    }
    let (mask, to) = (instruction.op2_register(), instruction.op0_register());
    let element = instruction.memory_size().element_size();
    let mut start = case.regs.clone();
    // The elements before the faulting element are loaded.
    let mut is_done = true;
    for (now, before) in std::iter::zip(
        ours.regs.ymm_mut(mask.number()),
        start.ymm_mut(mask.number()),
    ) {
        for (now, before) in now.chunks_mut(element).zip(before.chunks(element)) {
            is_done &= now[element - 1] & 0x80 == 0;
            match is_done {
                true => now.fill(0),
                false => now.copy_from_slice(before),
            }
        }
    }
    if to.is_xmm() {
        let [_, high] = ours.regs.ymm_mut(to.number());
        high.copy_from_slice(start.ymm_mut(to.number())[1]);
    }
    Some(ours)
}

/// The offset of MXCSR in an FXSAVE image.
const MXCSR: std::ops::Range<usize> = 24..28;

fn fxsave_fields(
    instruction: &Instruction,
    case: &Case,
    host: &Result,
    mut ours: Result,
) -> Option<Result> {
    let at = in_data(instruction, case);
    ours.take_data(host, at + 6, at + 24);
    Some(ours)
}

fn environment_selectors(
    instruction: &Instruction,
    case: &Case,
    host: &Result,
    mut ours: Result,
) -> Option<Result> {
    let at = in_data(instruction, case);
    let (fcs, fds) = match instruction.memory_size().size() {
        14 | 94 => (8, 12),
        _ => (16, 24),
    };
    ours.take_data(host, at + fcs, at + fcs + 2);
    ours.take_data(host, at + fds, at + fds + 2);
    Some(ours)
}

/// Returns the offset of the memory operand in the case's data.
fn in_data(instruction: &Instruction, case: &Case) -> usize {
    let start = case.regs.rip - AT as u64 + DATA as u64;
    memory::address(instruction, &case.regs).wrapping_sub(start) as usize
}
