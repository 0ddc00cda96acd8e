//! From an emulator's first instruction to `monitor`.
//!
//! QEMU enters at `start32`, in protected mode, because of the PVH note. Bochs enters at the reset vector of the ROM.
//! The second CPU enters in real mode, in a copy of `second16` below 1 MiB.

use core::arch::global_asm;

/// The number of the page with the second CPU's first instruction, which is the operand of its start-up interrupt.
pub(crate) const SECOND_PAGE: u8 = 8;

global_asm!(
    r#"
// Real mode to protected mode, at any address that is the start of a segment.
.macro protect here, target
    cli
    mov ax, cs
    mov ds, ax
    .byte 0x66, 0x0f, 0x01, 0x16        // lgdt, with a base of 32 bits
    .word 8f - \here
    mov eax, 1
    mov cr0, eax
    .byte 0x66, 0xea                    // a far jump with an offset of 32 bits
    .long \target
    .word 0x18
    .balign 4
8:  .word 39
    .long gdt
.endm

.macro flat
    mov ax, 0x10
    mov ds, ax
    mov es, ax
.endm

// This section is not part of the image: `run` makes a separate file of it.
.section .rom, "", @progbits
.code16
rom:
    protect rom, first32
    .org 0xfff0
    .byte 0xe9                          // back to `rom`, in a segment of 64 KiB
    .word 0x10000 - 0xfff3
    .org 0x10000

// ELFNOTE 18 (XEN_ELFNOTE_PHYS32_ENTRY): the 32-bit entry.
.section .note.pvh, "a", @note
.balign 4
    .long 4, 4, 18
    .asciz "Xen"
    .long start32

.section .boot, "ax", @progbits
.code16
.globl second16, second16_end
second16:
    protect second16, second32
second16_end:

.code32
first32:
    flat
.globl start32
start32:                                // segments are flat here; their selectors are unknown
    cld
    mov edi, offset __bss_start
    mov ecx, offset __bss_end
    sub ecx, edi
    shr ecx, 2
    xor eax, eax
    rep stosd
    xor ebx, ebx                        // the number of this CPU
    jmp 1f
second32:
    flat
    mov ebx, 1
1:  mov eax, offset pml4
    mov cr3, eax
    mov eax, 0x620                      // PAE, OSFXSR, OSXMMEXCPT: the compiler uses SSE
    mov cr4, eax
    mov ecx, 0xc0000080                 // EFER: LME, NXE
    rdmsr
    or eax, 0x900
    wrmsr
    mov eax, 0x80000033                 // PG, NE, ET, MP, PE
    mov cr0, eax
    lgdt [gdtr]
    ljmp 0x08, offset start64
.code64
start64:
    mov ax, 0x10
    mov ds, ax
    mov es, ax
    mov ss, ax
    xor eax, eax
    mov fs, ax
    mov gs, ax
    mov edi, ebx
    inc ebx
    shl ebx, 16
    lea rsp, [rbx + stacks]
    xor ebp, ebp
    call monitor
    ud2

.section .data
.balign 8
// The segments: null; 64-bit code, data, 32-bit code.
.globl gdt
gdt:
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cf9b000000ffff, 0
gdtr:
    .word 39
    .quad gdt
.balign 4096
.globl pml4
pml4:
    .quad pdpt + 3
    .skip 4088
pdpt:                                   // 4 GiB; the last one, with the APIC, uncached
    .quad 0x83, 0x40000083, 0x80000083, 0xc000009b
    .skip 4064

.section .bss
.balign 16
stacks:
    .skip 0x20000
"#
);

/// Copies the second CPU's first instructions to memory that it can reach.
pub(crate) fn prepare_second() {
    unsafe extern "C" {
        static second16: u8;
        static second16_end: u8;
    }
    let to = (usize::from(SECOND_PAGE) << 12) as *mut u8;
    let (start, end) = (&raw const second16, &raw const second16_end);
    // SAFETY: the symbols enclose the code; the page below 1 MiB is unused memory.
    unsafe { core::ptr::copy_nonoverlapping(start, to, end.offset_from_unsigned(start)) };
}
