//! Compares the results of a case.

use crate::case::BRK;
use crate::qemu::{Record, Registers, WINDOW};

/// Signals of faults: the instruction at the program counter has not been executed.
const FAULTS: [u32; 3] = [
    libc::SIGBUS as u32,
    libc::SIGSEGV as u32,
    libc::SIGILL as u32,
];

/// The bits of FPSR and FPCR that A64 has. qemu also keeps the bits of AArch32.
const FPSR: u32 = 0x0800_009f;
const FPCR: u32 = 0x07c8_0000;

/// Returns the differences between two results. If the last instruction has faulted, the interpreter must have kept
/// the state before this instruction, but qemu may have executed some of the instruction's accesses.
pub fn differences(ours: &Record, theirs: &Record) -> Vec<String> {
    let mut found = vec![];
    let (a, b) = (&ours.after, &theirs.after);
    if a.signal != b.signal {
        found.push(format!("signal {} instead of {}", a.signal, b.signal));
    }
    if a.pc != b.pc {
        found.push(format!("pc {:x} instead of {:x}", a.pc, b.pc));
    }
    let words = ours.code.iter().filter(|word| **word != BRK).count();
    let was_executed = words > 1 || a.pc != start_of(ours);
    if FAULTS.contains(&a.signal) && !was_executed {
        registers(a, &ours.before, &mut found);
        memory(&ours.memory_after, &ours.memory, &mut found);
        return found;
    }
    let (mut theirs_after, mut memory_after) = (*b, theirs.memory_after);
    if FAULTS.contains(&a.signal) {
        forget_parts(ours, &mut theirs_after, &mut memory_after);
    }
    registers(a, &theirs_after, &mut found);
    memory(&ours.memory_after, &memory_after, &mut found);
    found
}

/// Removes effects that the last instruction of a program may have had in qemu before it faulted: it may have loaded
/// its first vector registers, or stored before the border of the pages.
fn forget_parts(ours: &Record, registers: &mut Registers, memory: &mut [u8; WINDOW]) {
    let at = (ours.after.pc / 4) as usize % ours.code.len();
    let word = ours.code[at];
    let first = word & 31;
    for r in [first, first + 1, first + 2, first + 3, word >> 10 & 31] {
        let r = r as usize % 32;
        registers.v[r] = ours.after.v[r];
    }
    let near = WINDOW / 2 - 64..WINDOW / 2 + 64;
    memory[near.clone()].copy_from_slice(&ours.memory_after[near]);
}

/// Returns the address of the only instruction of a case, computed from the program counter at the end of the case.
fn start_of(record: &Record) -> u64 {
    let slot = record.after.pc & !(4 * record.code.len() as u64 - 1);
    slot + 4 * u64::from(record.start)
}

fn registers(a: &Registers, b: &Registers, found: &mut Vec<String>) {
    for (n, (a, b)) in a.x.iter().zip(&b.x).enumerate() {
        if a != b {
            found.push(format!("x{n} {a:x} instead of {b:x}"));
        }
    }
    if a.sp != b.sp {
        found.push(format!("sp {:x} instead of {:x}", a.sp, b.sp));
    }
    if (a.pstate ^ b.pstate) >> 28 != 0 {
        found.push(format!(
            "nzcv {:x} instead of {:x}",
            a.pstate >> 28,
            b.pstate >> 28
        ));
    }
    for (name, a, b, mask) in [
        ("fpcr", a.fpcr, b.fpcr, FPCR),
        ("fpsr", a.fpsr, b.fpsr, FPSR),
    ] {
        if (a ^ b) & mask != 0 {
            found.push(format!("{name} {a:x} instead of {b:x}"));
        }
    }
    for (n, (a, b)) in a.v.iter().zip(&b.v).enumerate() {
        if a != b {
            found.push(format!(
                "v{n} {:016x}_{:016x} instead of {:016x}_{:016x}",
                a[1], a[0], b[1], b[0]
            ));
        }
    }
}

fn memory(a: &[u8], b: &[u8], found: &mut Vec<String>) {
    if let Some(at) = a.iter().zip(b).position(|(a, b)| a != b) {
        let end = (at + 16).min(a.len());
        found.push(format!(
            "memory at {at}: {:x?} instead of {:x?}",
            &a[at..end],
            &b[at..end]
        ));
    }
}

/// Describes a case: its code, the registers that its first instruction may name, and the differences.
pub fn describe(record: &Record, differences: &[String]) -> String {
    let words = record.code.iter().filter(|word| **word != BRK);
    let words: Vec<String> = words.map(|word| format!("{word:08x}")).collect();
    let word = record.code[record.start as usize];
    let before = &record.before;
    let mut text = format!("  code {}\n", words.join(" "));
    for low in [0, 5, 10, 16] {
        let r = (word >> low & 31) as usize;
        let x = before.x.get(r).copied().unwrap_or(before.sp);
        text += &format!(
            "  {r}: {x:x}, v {:016x}_{:016x}\n",
            before.v[r][1], before.v[r][0]
        );
    }
    text += &format!(
        "  nzcv {:x} fpcr {:x} set {}\n  {}",
        before.pstate >> 28,
        before.fpcr,
        record.set,
        differences[..differences.len().min(6)].join("\n  ")
    );
    text
}
