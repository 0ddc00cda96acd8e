//! The guest's program and its initial registers. The program is 32-bit code. The program runs with paging off, or in
//! compatibility mode with the guest's own tables.

use core::arch::global_asm;

use metal_core::{Command, guest_program};
use slat::Gpa;

global_asm!(
    r#"
.section .rodata.guest, "a", @progbits
.globl guest_program, guest_program_end
.code32
guest_program:                          // ebp: its address; ebx: what to do
    cmp ebx, 1
    je 3f
    cmp ebx, 2
    je 5f
    cmp ebx, 3
    je 7f
    cmp ebx, 4
    je 8f
2:  mov [edi], edx
    inc edx
    add edi, esi
    dec ecx
    jnz 2b
    hlt
3:  xor edx, edx
4:  mov eax, [edi]
    add edx, eax
    add edi, esi
    dec ecx
    jnz 4b
    hlt
5:  .byte 0x8d, 0x45, 6f - guest_program    // lea eax, [ebp + ...]
    jmp edi
6:  add edi, esi
    dec ecx
    jnz 5b
    hlt
7:  invlpg [edi]
    add edi, esi
    dec ecx
    jnz 7b
    hlt
8:  mov cr3, edi
    hlt
guest_program_end:
.code64
"#
);

/// Returns the program. The program ends each command with HLT.
pub fn program() -> &'static [u8] {
    guest_program!()
}

/// JMP EAX: returns to the program without a stack.
pub const RETURN: &[u8] = &[0xff, 0xe0];
/// The length in bytes of the program's load, and of its store.
pub const ACCESS_BYTES: u64 = 2;
/// The length in bytes of the program's INVLPG, and of its load of CR3. The operand of both is EDI.
pub const FLUSH_BYTES: u64 = 3;
/// The value of CR0 of the guest with paging off: PE and ET.
pub const CR0: u64 = 0x11;

/// The registers of the guest that no control structure contains, and EAX.
#[derive(Default)]
#[repr(C)]
#[expect(missing_docs)]
pub struct Registers {
    pub rax: u64,
    pub rbx: u64,
    pub rcx: u64,
    pub rdx: u64,
    pub rsi: u64,
    pub rdi: u64,
    pub rbp: u64,
}

impl Registers {
    /// Makes the registers with which the program at `entry` executes `command`.
    pub fn begin(entry: Gpa, command: &Command) -> Self {
        Registers {
            rax: 0,
            rbx: command.op as u64,
            rcx: command.count,
            rdx: command.value.into(),
            rsi: command.step,
            rdi: command.gpa.0,
            rbp: entry.0,
        }
    }

    /// Returns the program's result at its HLT.
    pub fn result(&self) -> u32 {
        self.rdx as u32
    }
}
