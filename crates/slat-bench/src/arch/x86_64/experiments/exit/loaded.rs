//! A small statically linked program without a C library. `slat run` has to load this program and to rewrite its call
//! site. The program makes a VM whose guest writes to a device forever, enters the guest `times` times, and reports how
//! long that took.

use std::arch::global_asm;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use slat_kvm::abi::{KVM_CREATE_VCPU, KVM_CREATE_VM, KVM_RUN, KVM_SET_USER_MEMORY_REGION};

use crate::arch::x86_64::machine::Failure;
use crate::memory_file::MemoryFile;

/// The number of calls before the measured calls. During these calls, slat rewrites the call site.
const BEFORE: u32 = 1000;
/// The address at which the program is loaded.
const BASE: u64 = 0x40_0000;
/// The offset in the program's text of the word that holds the number of calls to measure.
const TIMES: usize = 8;

// The program's text, as data of this process. The text begins with the program's first instruction.
global_asm!(
    ".pushsection .rodata.slat_bench_loaded, \"a\", @progbits",
    ".balign 64",
    "slat_bench_loaded:",
    "jmp 8f",
    ".balign 8",
    "7: .quad 0",
    "6: .asciz \"/dev/kvm\"",
    // Ends the process with status 1.
    "3:",
    "mov edi, 1",
    "mov eax, {exit}",
    "syscall",
    // Enters the vCPU RBX times. R12D has the vCPU's descriptor. The call instruction lies within one aligned quadword,
    // because on some processors slat cannot rewrite any other call.
    ".balign 64, 0xcc",
    ".byte 0xcc",
    "4:",
    "mov edi, r12d",
    "mov esi, {run}",
    "xor edx, edx",
    "mov eax, {ioctl}",
    "syscall",
    "test rax, rax",
    "jnz 3b",
    "dec rbx",
    "jnz 4b",
    "ret",
    // These bytes fill the space before the next function, like the padding of compilers.
    ".fill 16, 1, 0xcc",
    ".balign 16, 0xcc",
    // Returns the current time in nanoseconds.
    "5:",
    "sub rsp, 16",
    "mov edi, {clock}",
    "mov rsi, rsp",
    "mov eax, {gettime}",
    "syscall",
    "imul rax, [rsp], 1000000000",
    "add rax, [rsp + 8]",
    "add rsp, 16",
    "ret",
    // Makes an ioctl. On an error, ends the process.
    "9:",
    "mov eax, {ioctl}",
    "syscall",
    "test rax, rax",
    "js 3b",
    "ret",
    "8:",
    "lea rdi, [rip + 6b]",
    "mov esi, {read_write}",
    "mov eax, {open}",
    "syscall",
    "test rax, rax",
    "js 3b",
    "mov edi, eax",
    "mov esi, {create_vm}",
    "xor edx, edx",
    "call 9b",
    "mov r12d, eax",
    "xor edi, edi",
    "mov esi, 4096",
    "mov edx, {access}",
    "mov r10d, {private}",
    "mov r8, -1",
    "xor r9d, r9d",
    "mov eax, {mmap}",
    "syscall",
    // The guest's code at the reset vector, in real mode: mov [0], al; jmp to this mov.
    "mov dword ptr [rax + 0xff0], 0xeb0000a2",
    "mov byte ptr [rax + 0xff4], 0xfb",
    // Pushes the argument of KVM_SET_USER_MEMORY_REGION, for slot 0 without flags.
    "push rax",
    "push 4096",
    "mov ecx, 0xfffff000",
    "push rcx",
    "push 0",
    "mov rdx, rsp",
    "mov edi, r12d",
    "mov esi, {set_region}",
    "call 9b",
    "mov edi, r12d",
    "mov esi, {create_vcpu}",
    "xor edx, edx",
    "call 9b",
    "mov r12d, eax",
    "mov ebx, {before}",
    "call 4b",
    "call 5b",
    "mov r13, rax",
    "mov rbx, [rip + 7b]",
    "call 4b",
    "call 5b",
    "sub rax, r13",
    "push rax",
    "mov edi, 1",
    "mov rsi, rsp",
    "mov edx, 8",
    "mov eax, {write}",
    "syscall",
    "xor edi, edi",
    "mov eax, {exit}",
    "syscall",
    "slat_bench_loaded_end:",
    ".popsection",
    exit = const libc::SYS_exit_group,
    ioctl = const libc::SYS_ioctl,
    open = const libc::SYS_open,
    mmap = const libc::SYS_mmap,
    write = const libc::SYS_write,
    gettime = const libc::SYS_clock_gettime,
    clock = const libc::CLOCK_MONOTONIC,
    read_write = const libc::O_RDWR,
    access = const libc::PROT_READ | libc::PROT_WRITE,
    private = const libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
    run = const KVM_RUN,
    create_vm = const KVM_CREATE_VM,
    create_vcpu = const KVM_CREATE_VCPU,
    set_region = const KVM_SET_USER_MEMORY_REGION,
    before = const BEFORE,
);

unsafe extern "C" {
    #[link_name = "slat_bench_loaded"]
    static START: u8;
    #[link_name = "slat_bench_loaded_end"]
    static END: u8;
}

/// Returns the program as an ELF file with a header, one segment and the text. The program enters the guest `times`
/// times.
fn program(times: u32) -> Vec<u8> {
    /// The offset of the text in the file. It is after the headers (64 and 56 bytes), and has the alignment of
    /// functions.
    const TEXT: usize = 128;
    // SAFETY: the two labels are at the beginning and at the end of the text.
    let text = unsafe {
        let (start, end) = (&raw const START, &raw const END);
        std::slice::from_raw_parts(start, end.addr() - start.addr())
    };
    let mut text = text.to_vec();
    text[TIMES..TIMES + 8].copy_from_slice(&u64::from(times).to_le_bytes());
    // The ELF header (System V ABI, chapter 4): 64 bits, little endian, an executable for x86-64.
    let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    let word = |file: &mut Vec<u8>, value: u64| file.extend(value.to_le_bytes());
    // The rest of the ELF header: entry point, offset of the program headers, no sections, no flags, the sizes of
    // headers. There is one program header and no section header.
    for value in [BASE + TEXT as u64, 64, 0] {
        word(&mut file, value);
    }
    for half in [0u16, 0, 64, 56, 1, 64, 0, 0] {
        file.extend(half.to_le_bytes());
    }
    // The program header: PT_LOAD, readable and executable, then offset, addresses, sizes, alignment.
    let size = (TEXT + text.len()) as u64;
    file.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for value in [0, BASE, BASE, size, size, 0x1000] {
        word(&mut file, value);
    }
    file.resize(TEXT, 0);
    file.extend(text);
    file
}

/// Runs the program under `slat run`. Returns the nanoseconds of one exit.
///
/// # Errors
/// If the program cannot be written or run, or fails.
pub fn exits(slat: &Path, times: u32) -> Result<f64, Failure> {
    let mut file = MemoryFile::new()?;
    file.0.write_all(&program(times))?;
    let path = file.path();
    let output = Command::new(slat).args(["run", "--", &path]).output()?;
    let nanoseconds = output.stdout.try_into().map(u64::from_le_bytes);
    match nanoseconds {
        Ok(nanoseconds) if output.status.success() => Ok(nanoseconds as f64 / f64::from(times)),
        _ => Err(format!(
            "a statically linked program under slat run: {}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
        .into()),
    }
}
