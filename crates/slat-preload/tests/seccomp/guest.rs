//! The guest: 32-bit code without paging. The guest uses every feature for which a vCPU thread may make a system call.

use std::arch::global_asm;

/// Address of the code in guest memory.
pub const CODE: u64 = 0x1000;
/// Address of the interrupt descriptor table.
pub const IDT: u64 = 0x2000;
/// Address where the guest counts the client's interrupts.
pub const CLIENTS: u64 = 0x800;
/// The memory to which the guest writes.
pub const DATA: std::ops::Range<u64> = 0x10_0000..0x90_0000;
/// A write to this guest address signals an eventfd.
pub const DOORBELL: u64 = 0xd000_1000;
/// A write to this port signals an eventfd.
pub const DOORBELL_PORT: u64 = 0x510;
/// The vector of the client's interrupts.
pub const VECTOR: u32 = 0x30;

/// The values that the guest writes to port 0x10. Each tells the client which phase of its code the guest has reached.
pub mod phase {
    /// The guest has used the devices and the timer, and waits for five interrupts of the client.
    pub const WAITS: u8 = 2;
    /// The guest has written all pages once more, and reads port 0x10. If it reads 0, it repeats this phase.
    pub const ROUND: u8 = 3;
    /// The guest is done, and halts.
    pub const HALTS: u8 = 4;
}

global_asm!(
    ".pushsection .rodata.seccomp_guest",
    ".code32",
    "seccomp_guest:",
    "mov esp, 0xf000",
    // Writes every page, by faults.
    "mov esi, 0x100000",
    "2: mov dword ptr [esi], esi",
    "add esi, 0x1000",
    "cmp esi, 0x900000",
    "jb 2b",
    // Exits by port and by memory.
    "mov al, 1",
    "out 0x10, al",
    "in al, 0x10",
    "mov dword ptr ds:[0xd0000000], 0x11223344",
    "mov eax, dword ptr ds:[0xd0000004]",
    // Signals two eventfds, by memory and by a port.
    "mov dword ptr ds:[0xd0001000], 7",
    "mov dx, 0x510",
    "out dx, al",
    // Reads random numbers by RDRAND.
    "mov esi, 200",
    "3: .byte 0x0f, 0xc7, 0xf0", // rdrand eax
    "dec esi",
    "jnz 3b",
    // Starts the local APIC's timer in periodic mode, and waits in HLT for five interrupts.
    "mov dword ptr ds:[0xfee000f0], 0x1ff",
    "mov dword ptr ds:[0xfee003e0], 0xb",
    "mov dword ptr ds:[0xfee00320], 0x20031",
    "mov dword ptr ds:[0xfee00380], 1000000",
    "sti",
    "5: hlt",
    "cmp dword ptr ds:[0x804], 5",
    "jb 5b",
    "mov dword ptr ds:[0xfee00320], 0x10031",
    // Waits for five interrupts that the client sends.
    "mov al, 2",
    "out 0x10, al",
    "6: cli",
    "cmp dword ptr ds:[0x800], 5",
    "jae 7f",
    "sti",
    "hlt",
    "jmp 6b",
    "7: sti",
    // Writes all pages again, until the client ends the guest.
    "8: mov esi, 0x100000",
    "9: add dword ptr [esi + 8], 1",
    "add esi, 0x1000",
    "cmp esi, 0x900000",
    "jb 9b",
    "mov al, 3",
    "out 0x10, al",
    "in al, 0x10",
    "test al, al",
    "jz 8b",
    "mov al, 4",
    "out 0x10, al",
    "20: hlt",
    "jmp 20b",
    "seccomp_guest_client:",
    "lock inc dword ptr ds:[0x800]",
    "mov dword ptr ds:[0xfee000b0], 0",
    "iretd",
    "seccomp_guest_timer:",
    "lock inc dword ptr ds:[0x804]",
    "mov dword ptr ds:[0xfee000b0], 0",
    "iretd",
    "seccomp_guest_end:",
    ".code64",
    ".popsection",
);

unsafe extern "C" {
    static seccomp_guest: u8;
    static seccomp_guest_client: u8;
    static seccomp_guest_timer: u8;
    static seccomp_guest_end: u8;
}

/// Writes the guest's code and its interrupt descriptors to memory that begins at guest address 0.
pub fn load(memory: &mut [u8]) {
    let start = &raw const seccomp_guest;
    let offset = |label: *const u8| label as usize - start as usize;
    // SAFETY: both labels are in one section, and the bytes between them are constants.
    let code = unsafe { std::slice::from_raw_parts(start, offset(&raw const seccomp_guest_end)) };
    memory[CODE as usize..][..code.len()].copy_from_slice(code);
    let handlers = [
        &raw const seccomp_guest_client,
        &raw const seccomp_guest_timer,
    ];
    for (index, handler) in handlers.into_iter().enumerate() {
        // An interrupt gate of 32 bits into segment 8: Intel SDM, volume 3, section 7.11.
        let address = CODE + offset(handler) as u64;
        let gate = address & 0xffff | 8 << 16 | 0x8e00 << 32 | address >> 16 << 48;
        let at = IDT as usize + 8 * (VECTOR as usize + index);
        memory[at..at + 8].copy_from_slice(&gate.to_le_bytes());
    }
}
