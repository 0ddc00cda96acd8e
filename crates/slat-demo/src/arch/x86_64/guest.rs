//! The guest of the built-in program: a few instructions of 64-bit code, and the tables with which the guest begins.
//!
//! The first 4 GiB are mapped one to one, by guest pages of 2 MiB. The code's only input is its registers
//! ([`registers`]). It ends each of its phases by writing the phase's number to [`PORT`]. It uses no stack outside its
//! own page.

use std::sync::atomic::{AtomicU64, Ordering};

use kvm_bindings::{kvm_regs, kvm_sregs};

use crate::arch::x86_64::long_mode::{self, PRESENT_WRITABLE, identity_map};

/// The guest writes the number of a phase to this port at the end of the phase, or [`WRONG`] if it read a wrong value.
pub const PORT: u16 = 0x51;
/// The value that the guest writes to [`PORT`] after it has read a wrong value.
pub const WRONG: u8 = 0xff;
/// The address of a device's register, which is in no memslot. A read of the register must return [`DEVICE_VALUE`].
pub const DEVICE: u64 = 0xd000_0000;
/// The device register's value.
pub const DEVICE_VALUE: u32 = 0x51a7;

/// The address of page tables, code and stacks.
pub const SYSTEM: u64 = 0;
pub const SYSTEM_SIZE: usize = 64 << 10;
/// The address of the memory that the guest writes and reads. It is large enough for huge pages.
pub const DATA: u64 = 1 << 30;
pub const DATA_SIZE: usize = 64 << 20;
/// The address of the memory in which the guest writes functions and calls them. It has no huge pages.
pub const CODE: u64 = 2 << 30;
pub const CODE_SIZE: usize = 8 << 20;
/// The address of the memslot that is deleted and created again while the guest uses it.
pub const SPARE: u64 = 3 << 30;
pub const SPARE_SIZE: usize = 2 << 20;

pub const PAGE: usize = 4096;
pub const VCPUS: usize = 2;
/// The number of times that each vCPU reads and writes the device's register.
pub const DEVICE_ACCESSES: u64 = 2000;

const PML4: u64 = 0x1000;
const PDPT: u64 = 0x2000;
const PAGE_DIRECTORIES: u64 = 0x3000; // four of them: 4 GiB
const PROGRAM: u64 = 0x8000;
const STACKS: u64 = 0xa000; // one page per vCPU, growing down to it
/// The address of a word that ends the guest's last phase if it is not zero.
const STOP: u64 = 0xf000;

// The guest's instructions. In this process they are constant bytes, which are never executed.
//
// The registers at the beginning: rdi is the address of the data, rsi its number of pages, r8 the address of the code,
// r9 its number of pages, r10 the device, r11 the number of accesses, r12 the spare slot, and r13 the stop word.
std::arch::global_asm!(
    ".pushsection .rodata.slat_demo_guest, \"a\", @progbits",
    ".balign 16",
    "slat_demo_guest:",
    // Phase 1: write the address of each page into the page.
    "mov rbx, rdi",
    "mov rcx, rsi",
    "2:",
    "mov [rbx], rbx",
    "add rbx, 4096",
    "dec rcx",
    "jnz 2b",
    "mov al, 1",
    "out {port}, al",
    // Phase 2: read the addresses back.
    "mov rbx, rdi",
    "mov rcx, rsi",
    "2:",
    "cmp [rbx], rbx",
    "jne 9f",
    "add rbx, 4096",
    "dec rcx",
    "jnz 2b",
    "mov al, 2",
    "out {port}, al",
    // Phase 3: write a function to each page (mov eax, <remaining pages>; ret), and call it.
    "mov rbx, r8",
    "mov rcx, r9",
    "2:",
    "mov byte ptr [rbx], 0xb8",
    "mov [rbx + 1], ecx",
    "mov byte ptr [rbx + 5], 0xc3",
    "call rbx",
    "cmp eax, ecx",
    "jne 9f",
    "add rbx, 4096",
    "dec rcx",
    "jnz 2b",
    "mov al, 3",
    "out {port}, al",
    // Phase 4: write and read the device's register alternately.
    "mov rcx, r11",
    "2:",
    "mov [r10], ecx",
    "mov eax, [r10]",
    "cmp eax, {device_value}",
    "jne 9f",
    "dec rcx",
    "jnz 2b",
    "mov al, 4",
    "out {port}, al",
    // Phase 5: write to the slot that the host deletes and creates again, until the stop word is not zero.
    "xor eax, eax",
    "2:",
    "inc rax",
    "mov [r12], rax",
    "cmp qword ptr [r13], 0",
    "je 2b",
    "mov al, 5",
    "out {port}, al",
    "hlt",
    "9:",
    "mov al, {wrong}",
    "out {port}, al",
    "hlt",
    "slat_demo_guest_end:",
    ".popsection",
    port = const PORT,
    wrong = const WRONG,
    device_value = const DEVICE_VALUE,
);

unsafe extern "C" {
    static slat_demo_guest: u8;
    static slat_demo_guest_end: u8;
}

fn program() -> &'static [u8] {
    let begin = &raw const slat_demo_guest;
    let end = &raw const slat_demo_guest_end;
    // SAFETY: both labels are in the same section. The second follows the first, with only initialised constants
    // between them.
    unsafe { std::slice::from_raw_parts(begin, end.offset_from(begin) as usize) }
}

/// Writes the page tables and the program into the system slot's memory.
pub fn load(system: &mut [u8]) {
    identity_map(system, PRESENT_WRITABLE, PML4, PDPT, PAGE_DIRECTORIES, 4);
    system[PROGRAM as usize..][..program().len()].copy_from_slice(program());
}

/// Makes the guest leave its last phase.
pub fn stop(system: &[AtomicU64]) {
    system[STOP as usize / 8].store(1, Ordering::SeqCst);
}

/// Returns the special registers for long mode with these tables.
pub fn special_registers(from_reset: kvm_sregs) -> kvm_sregs {
    long_mode::registers(from_reset, PML4)
}

/// Returns the initial registers of vCPU number `index`, which select its share of each kind of memory.
pub fn registers(index: usize) -> kvm_regs {
    let share = |base: u64, size: usize| base + (index * size / VCPUS) as u64;
    kvm_regs {
        rip: PROGRAM,
        rsp: STACKS + (index as u64 + 1) * PAGE as u64,
        rflags: 1 << 1,
        rdi: share(DATA, DATA_SIZE),
        rsi: (DATA_SIZE / PAGE / VCPUS) as u64,
        r8: share(CODE, CODE_SIZE),
        r9: (CODE_SIZE / PAGE / VCPUS) as u64,
        r10: DEVICE,
        r11: DEVICE_ACCESSES,
        r12: share(SPARE, SPARE_SIZE),
        r13: STOP,
        ..Default::default()
    }
}
