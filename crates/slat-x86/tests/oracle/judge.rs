//! Compares the states that the two CPUs have left.

use iced_x86::{
    Decoder, DecoderOptions, FastFormatter, Instruction, Mnemonic, OpCodeOperandKind, OpKind,
    RflagsBits,
};

use crate::forms::Case;
use crate::memory;
use crate::native::{Arena, DATA, DATA_LEN, Fault, Regs, STACK, STACK_LEN};
use crate::vendor;

#[derive(Clone)]
pub struct Result {
    pub regs: Regs,
    pub fault: Option<Fault>,
    pub data: Vec<u8>,
    pub stack: Vec<u8>,
}

impl Result {
    pub fn new(
        arena: &Arena,
        instruction: &Instruction,
        regs: Regs,
        fault: Option<Fault>,
    ) -> Result {
        Result {
            regs,
            fault: fault.map(|mut f| {
                if f.vector == 14 {
                    // Outside the arena, memory of the host may be present.
                    f.error &= !1;
                    if accesses_in_parts(instruction) {
                        f.cr2 &= !0xfff;
                    }
                } else {
                    // Other faults do not set CR2.
                    f.cr2 = 0;
                }
                f
            }),
            data: arena.bytes(DATA, DATA_LEN).to_vec(),
            stack: arena.bytes(STACK, STACK_LEN).to_vec(),
        }
    }

    /// Returns the state at the start of the case, with `fault`.
    pub fn unchanged(case: &Case, fault: Option<Fault>) -> Result {
        Result {
            regs: case.regs.clone(),
            fault,
            data: case.data.clone(),
            stack: case.stack.clone(),
        }
    }

    /// Copies the data at offsets `from` to `to` from `other`, except those beyond the end.
    pub fn take_data(&mut self, other: &Result, from: usize, to: usize) {
        if let (Some(mine), Some(theirs)) = (self.data.get_mut(from..to), other.data.get(from..to))
        {
            mine.copy_from_slice(theirs);
        }
    }
}

pub fn set_memory(arena: &Arena, case: &Case) {
    arena.bytes_mut(DATA, DATA_LEN).copy_from_slice(&case.data);
    arena
        .bytes_mut(STACK, STACK_LEN)
        .copy_from_slice(&case.stack);
}

/// Whether the host makes the access in parts: it stores an environment field by field, and masked bytes in an order
/// of its own. Then CR2 is some address in the page, which may differ.
fn accesses_in_parts(instruction: &Instruction) -> bool {
    let size = instruction.memory_size().size();
    size > 16 || matches!(size, 10 | 14) || is_masked(instruction) || memory::is_gather(instruction)
}

/// Whether a mask selects the bytes that an instruction stores.
fn is_masked(instruction: &Instruction) -> bool {
    use Mnemonic as M;
    matches!(
        instruction.mnemonic(),
        M::Maskmovdqu
            | M::Maskmovq
            | M::Vmaskmovdqu
            | M::Vmaskmovps
            | M::Vmaskmovpd
            | M::Vpmaskmovd
            | M::Vpmaskmovq
    )
}

const NAMES: [&str; 16] = [
    "rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi", "r8", "r9", "r10", "r11", "r12", "r13",
    "r14", "r15",
];

/// Describes all differences.
pub fn differences(case: &Case, expected: &Result, actual: &Result) -> Vec<String> {
    let masked = matches!(
        case.instruction.mnemonic(),
        Mnemonic::Maskmovdqu | Mnemonic::Maskmovq | Mnemonic::Vmaskmovdqu
    );
    if masked && expected.fault.is_some_and(|f| f.vector == 14) && actual.fault.is_none() {
        // Whether bytes that the mask does not select can fault depends on the implementation.
        return vec![];
    }
    let mut found = Differences(vec![]);
    let (e, a) = (&expected.regs, &actual.regs);
    if expected.fault != actual.fault {
        found.0.push(format!(
            "fault: host {:x?}, here {:x?}",
            expected.fault, actual.fault
        ));
    }
    found.number("rip", e.rip, a.rip);
    for (n, name) in NAMES.iter().enumerate() {
        found.number(name, e.gpr[n], a.gpr[n]);
    }
    let page_fault = expected.fault.is_some_and(|f| f.vector == 14);
    let flags = match page_fault
        && case.instruction.has_repe_prefix() | case.instruction.has_repne_prefix()
    {
        // If a repeated comparison faults in the middle, the host restores the flags of its start.
        true => 0,
        false => compared_flags(case, expected.fault.is_some()),
    };
    found.number("rflags", e.rflags & flags, a.rflags & flags);
    let mxcsr_compared = !unmodelled_mxcsr(case, e);
    found.number(
        "mxcsr",
        u64::from(mxcsr(e) & mxcsr_compared),
        u64::from(mxcsr(a) & mxcsr_compared),
    );
    // The host switches to MMX state before it stores, and then finds the page missing. The software CPU changes
    // nothing in this case.
    let half_done = page_fault && uses_mmx(&case.instruction);
    if !half_done {
        // Vendors differ in which instructions set the pointers, and in when FXSAVE writes them.
        let compared = if vendor::is_intel() {
            FX_FIELDS.len()
        } else {
            3
        };
        for (name, at, len) in FX_FIELDS.into_iter().take(compared) {
            found.bytes(name, &e.fx[at..at + len], &a.fx[at..at + len]);
        }
        for (n, name) in ST.iter().enumerate() {
            let at = 32 + 16 * n;
            found.bytes(name, &e.fx[at..at + 10], &a.fx[at..at + 10]);
        }
    }
    for (n, name) in XMM.iter().enumerate() {
        let at = 160 + 16 * n;
        found.bytes(name, &e.fx[at..at + 16], &a.fx[at..at + 16]);
    }
    for (n, name) in XMM.iter().enumerate() {
        let at = 16 * n;
        found.bytes(
            &format!("{name} above 127"),
            &e.high[at..at + 16],
            &a.high[at..at + 16],
        );
    }
    // Nor does the host undo the first part of a store if the second page is missing.
    if !(page_fault && accesses_in_parts(&case.instruction)) {
        found.memory("data", &expected.data, &actual.data);
        found.memory("stack", &expected.stack, &actual.stack);
    }
    found.0
}

struct Differences(Vec<String>);

impl Differences {
    fn number(&mut self, name: &str, expected: u64, actual: u64) {
        if expected != actual {
            self.0
                .push(format!("{name}: host {expected:#x}, here {actual:#x}"));
        }
    }
    fn bytes(&mut self, name: &str, expected: &[u8], actual: &[u8]) {
        if expected != actual {
            self.0.push(format!(
                "{name}: host {}, here {}",
                hex(expected),
                hex(actual)
            ));
        }
    }
    fn memory(&mut self, name: &str, expected: &[u8], actual: &[u8]) {
        if expected != actual {
            let at = (0..expected.len())
                .find(|&n| expected[n] != actual[n])
                .unwrap_or(0);
            let end = (at + 16).min(expected.len());
            self.bytes(
                &format!("{name}+{at:#x}"),
                &expected[at..end],
                &actual[at..end],
            );
        }
    }
}

/// Fields of an FXSAVE image besides the registers: name, offset, length.
const FX_FIELDS: [(&str, usize, usize); 6] = [
    ("fcw", 0, 2),
    ("fsw", 2, 2),
    ("ftw", 4, 1),
    ("fop", 6, 2),
    ("fip", 8, 8),
    ("fdp", 16, 8),
];

const ST: [&str; 8] = ["st0", "st1", "st2", "st3", "st4", "st5", "st6", "st7"];
const XMM: [&str; 16] = [
    "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10",
    "xmm11", "xmm12", "xmm13", "xmm14", "xmm15",
];

fn mxcsr(regs: &Regs) -> u32 {
    u32::from_le_bytes(regs.fx[24..28].try_into().unwrap())
}

fn uses_mmx(instruction: &Instruction) -> bool {
    use OpCodeOperandKind as K;
    instruction
        .op_code()
        .op_kinds()
        .iter()
        .any(|kind| matches!(kind, K::mm_reg | K::mm_rm | K::mm_or_mem))
}

/// Returns MXCSR bits that the software CPU does not model: besides an unmasked overflow or underflow, the precision
/// flag follows from another rounding, which the software CPU does not repeat.
fn unmodelled_mxcsr(case: &Case, host: &Regs) -> u32 {
    const OVERFLOW_UNDERFLOW: u32 = 0x18;
    const PRECISION: u32 = 0x20;
    let unmasked = !(mxcsr(&case.regs) >> 7);
    if mxcsr(host) & unmasked & OVERFLOW_UNDERFLOW != 0 {
        PRECISION
    } else {
        0
    }
}

/// Returns bytes in hexadecimal, the most significant byte first, as numbers are written.
fn hex(bytes: &[u8]) -> String {
    bytes.iter().rev().map(|b| format!("{b:02x}")).collect()
}

/// Returns the flags that the instruction leaves undefined, as [`RflagsBits`].
///
/// A rotate through CF by a constant leaves OF undefined unless the count is 0 or 1. The count is meant before it is
/// taken modulo 9 or 17, as in iced-x86: SDM volume 2, "RCL/RCR/ROL/ROR", and APM volume 3, "RCL". If the reduced count
/// is 0, Intel's CPUs do not change OF, AMD's do.
pub fn undefined_flags(instruction: &Instruction) -> u32 {
    let through_carry = matches!(instruction.mnemonic(), Mnemonic::Rcl | Mnemonic::Rcr)
        && instruction.op1_kind() == OpKind::Immediate8;
    let overflow = match through_carry && instruction.immediate8() & 31 > 1 {
        true => RflagsBits::OF,
        false => RflagsBits::NONE,
    };
    instruction.rflags_undefined() | overflow
}

/// Returns the flags to compare: the arithmetic flags and DF, except for those that the instruction leaves undefined. A
/// fault changes none of them, unless it is in the middle of a program.
fn compared_flags(case: &Case, fault: bool) -> u64 {
    const ALL: u64 = 0xcd5;
    if fault && case.program_at.is_none() {
        return ALL;
    }
    let undefined = undefined_flags(&case.instruction);
    let mut ignored = 0;
    for (bit, flag) in [
        (RflagsBits::CF, 1),
        (RflagsBits::PF, 1 << 2),
        (RflagsBits::AF, 1 << 4),
        (RflagsBits::ZF, 1 << 6),
        (RflagsBits::SF, 1 << 7),
        (RflagsBits::OF, 1 << 11),
    ] {
        if undefined & bit != 0 {
            ignored |= flag;
        }
    }
    // With counts above the operand's width, CF is undefined, too.
    if matches!(
        case.instruction.mnemonic(),
        Mnemonic::Shl | Mnemonic::Sal | Mnemonic::Shr | Mnemonic::Sar
    ) && operand_bits(case) < 32
    {
        ignored |= 1;
    }
    ALL & !ignored
}

fn operand_bits(case: &Case) -> usize {
    let register = case.instruction.op0_register().size();
    8 * if register != 0 {
        register
    } else {
        case.instruction.memory_size().size()
    }
}

/// Returns a report from which the case can be repeated by hand.
pub fn describe(case: &Case, differences: &[String]) -> String {
    let mut lines = vec![];
    for instruction in Decoder::with_ip(64, &case.bytes, case.regs.rip, DecoderOptions::NONE).iter()
    {
        let mut text = String::new();
        FastFormatter::new().format(&instruction, &mut text);
        lines.push(format!("  {:x} {text}", instruction.ip()));
    }
    let bytes: String = case.bytes.iter().map(|b| format!("{b:02x} ")).collect();
    lines.push(format!("    bytes: {}", bytes.trim_end()));
    lines.extend(differences.iter().map(|d| format!("    {d}")));
    let gprs: Vec<_> = NAMES
        .iter()
        .zip(case.regs.gpr)
        .map(|(name, v)| format!("{name}={v:x}"))
        .collect();
    lines.push(format!(
        "    from {} rflags={:x} fcw={} fsw={} ftw={} mxcsr={}",
        gprs.join(" "),
        case.regs.rflags,
        hex(&case.regs.fx[..2]),
        hex(&case.regs.fx[2..4]),
        hex(&case.regs.fx[4..5]),
        hex(&case.regs.fx[24..28]),
    ));
    lines.join("\n")
}
