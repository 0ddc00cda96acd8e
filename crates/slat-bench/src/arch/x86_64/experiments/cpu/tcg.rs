//! Runs the experiment's programs on QEMU's own software CPU (TCG).
//!
//! QEMU starts with a ROM instead of a BIOS. The ROM copies the guest's tables and programs to the addresses that
//! [`guest::load`] uses, enters long mode, and jumps to the program with its initial registers. The program ends with
//! HLT.

use std::io::Read;
use std::process::Command;
use std::time::Duration;

use kvm_bindings::kvm_regs;

use crate::arch::x86_64::machine::guest::{self, DATA, PAGE, PAGE_DIRECTORIES};
use crate::arch::x86_64::machine::{Failure, Program};
use crate::arch::x86_64::qemu::{self, Qemu, TemporaryFile};
use crate::memory_file::MemoryFile;

pub const NAME: &str = "tcg";

/// The size of the ROM, which ends at 4 GiB, and the offset of each of its parts.
const ROM: usize = 128 << 10;
const LOW: std::ops::Range<usize> = 0x1000..0x1_0000;
const REGISTERS: usize = 0x1_e000;
const CODE: usize = 0x1_f000;
const RESET: usize = 0x1_fff0;

// These bytes are data for the guest, which this process never executes. Their addresses are right after the ROM has
// copied them to CODE.
std::arch::global_asm!(
    ".pushsection .rodata.slat_bench_rom, \"a\", @progbits",
    ".globl slat_bench_rom, slat_bench_rom_end",
    "slat_bench_rom:",
    // This is 16-bit code with CS.base 0xffff0000: lgdt, set CR0.PE, far jump.
    ".byte 0x66, 0x2e, 0x0f, 0x01, 0x16",
    ".short 0xf000 + (4f - slat_bench_rom)",
    ".byte 0x0f, 0x20, 0xc0, 0x0c, 0x01, 0x0f, 0x22, 0xc0",
    ".byte 0x66, 0xea",
    ".long 0xfffff000 + (2f - slat_bench_rom)",
    ".short 8",
    ".code32",
    "2:",
    "mov eax, 16",
    "mov ds, eax",
    "mov es, eax",
    "mov ss, eax",
    "cld",
    "mov esi, 0xfffe0000",
    "mov edi, {low}",
    "mov ecx, {low_bytes}",
    "rep movsb",
    "mov edi, {directories}",
    "mov ecx, {directory_bytes}",
    "rep movsb",
    "mov eax, cr4",
    "or eax, 0x220", // PAE, OSFXSR
    "mov cr4, eax",
    "mov eax, {pml4}",
    "mov cr3, eax",
    "mov ecx, 0xc0000080", // EFER.LME
    "rdmsr",
    "or eax, 0x100",
    "wrmsr",
    "mov eax, cr0",
    "or eax, 0x80010000", // PG, WP
    "mov cr0, eax",
    ".byte 0xea",
    ".long 0xfffff000 + (3f - slat_bench_rom)",
    ".short 24",
    ".code64",
    "3:",
    "mov esp, 0xffffe000", // REGISTERS, a kvm_regs
    "pop rax",
    "pop rbx",
    "pop rcx",
    "pop rdx",
    "pop rsi",
    "pop rdi",
    "add rsp, 8",
    "pop rbp",
    "pop r8",
    "pop r9",
    "pop r10",
    "pop r11",
    "pop r12",
    "pop r13",
    "pop r14",
    "pop r15",
    "mov r15, [rsp]",      // RIP: the programs do not use R15
    "mov rsp, [rsp - 80]", // RSP
    "jmp r15",
    "4:",
    ".short 31",
    ".long 0xfffff000 + (5f - slat_bench_rom)",
    ".balign 8",
    "5:", // code of 32 bits, data, code of 64 bits
    ".quad 0, 0x00cf9b000000ffff, 0x00cf93000000ffff, 0x00af9b000000ffff",
    "slat_bench_rom_end:",
    ".popsection",
    low = const LOW.start,
    low_bytes = const LOW.end - LOW.start,
    directories = const PAGE_DIRECTORIES,
    directory_bytes = const DIRECTORIES,
    pml4 = const guest::PML4,
);

unsafe extern "C" {
    static slat_bench_rom: u8;
    static slat_bench_rom_end: u8;
}

/// The number of bytes of the page directories. The page directories map the 4 GiB below the guest's data, and the GiB
/// that begins with the data.
const DIRECTORIES: usize = (DATA as usize >> 30) * PAGE as usize + PAGE as usize;

fn code() -> &'static [u8] {
    let begin = &raw const slat_bench_rom;
    let end = &raw const slat_bench_rom_end;
    // SAFETY: both labels are in the same section. The second follows the first, with only initialised constants
    // between them.
    unsafe { std::slice::from_raw_parts(begin, end.offset_from(begin) as usize) }
}

/// Returns the ROM that runs `program`.
fn rom(program: &Program) -> Vec<u8> {
    let mut system = vec![0; guest::SYSTEM_SIZE];
    guest::load(&mut system, DATA + 1);
    let mut rom = vec![0; ROM];
    let (low, rest) = rom.split_at_mut(LOW.len());
    low.copy_from_slice(&system[LOW]);
    rest[..DIRECTORIES].copy_from_slice(&system[PAGE_DIRECTORIES as usize..][..DIRECTORIES]);
    let r = program.registers(0);
    let registers = [
        r.rax, r.rbx, r.rcx, r.rdx, r.rsi, r.rdi, r.rsp, r.rbp, r.r8, r.r9, r.r10, r.r11, r.r12,
        r.r13, r.r14, r.r15, r.rip,
    ];
    for (at, register) in (REGISTERS..).step_by(8).zip(registers) {
        rom[at..at + 8].copy_from_slice(&register.to_le_bytes());
    }
    rom[CODE..][..code().len()].copy_from_slice(code());
    // The reset vector has a jump to CODE, which is within the last 64 KiB below 4 GiB.
    let distance = (CODE as i64 - (RESET as i64 + 3)) as i16;
    rom[RESET] = 0xe9;
    rom[RESET + 1..RESET + 3].copy_from_slice(&distance.to_le_bytes());
    rom
}

/// The result of a program.
pub struct Ran {
    /// The registers in which programs leave results.
    pub registers: kvm_regs,
    /// The contents of memory from [`DATA`] on at the end of the program.
    pub data: Vec<u8>,
    /// The processor time, including the time of QEMU's start.
    pub cpu: Duration,
}

/// Runs a program that uses `bytes` of data, at most 1 GiB.
pub fn run(program: &Program, bytes: usize) -> Result<Ran, Failure> {
    let file = TemporaryFile::new("rom")?;
    std::fs::write(&file.0, rom(program))?;
    let mut command = Command::new(qemu::PROGRAM);
    // The PC has 16 MiB of memory at low addresses, and the data's memory at 4 GiB. The host touches all of this memory
    // before the guest does.
    let memory = 16 + bytes.div_ceil(1 << 20).next_multiple_of(16);
    let machine = format!(
        "-accel tcg -cpu max -M pc,max-ram-below-4g=16M -m {memory}M -mem-prealloc -nodefaults -no-user-config -display none -no-reboot -monitor stdio"
    );
    command.args(machine.split(' ')).arg("-bios").arg(&file.0);
    let mut qemu = Qemu::spawn(command)?;
    let state = loop {
        let state = qemu.ask("info registers")?;
        if state.contains("HLT=1") {
            break state;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    let cpu = qemu.cpu_time()?;
    let register = |name: &str| {
        let digits = state.split_once(name).and_then(|(_, rest)| rest.get(..16));
        digits
            .and_then(|digits| u64::from_str_radix(digits, 16).ok())
            .ok_or_else(|| Failure::from(format!("QEMU's registers have no {name}: {state}")))
    };
    let registers = kvm_regs {
        rax: register("RAX=")?,
        rcx: register("RCX=")?,
        rsi: register("RSI=")?,
        rdi: register("RDI=")?,
        r10: register("R10=")?,
        r11: register("R11=")?,
        ..Default::default()
    };
    // QEMU saves its memory to a file in memory, because a directory for temporary files may have too little space.
    let mut saved = MemoryFile::new()?;
    let path = saved.path();
    qemu.ask(&format!("pmemsave {DATA:#x} {bytes} \"{path}\""))?;
    let mut data = Vec::new();
    saved.0.read_to_end(&mut data)?;
    if data.len() != bytes {
        return Err(format!("QEMU has saved {} of {bytes} bytes of memory", data.len()).into());
    }
    Ok(Ran {
        registers,
        data,
        cpu,
    })
}
