# Takes the CPU from QEMU's PVH entry (32 bits, no paging) to `main` in long mode, with the lowest 4 GiB mapped one to one.
# Interrupts stay off, and there is no IDT: an exception ends QEMU.

    .section .note.Xen, "a", @note
    .balign 4
    .long 4, 4, 18 # XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .long start

    .section .data
    .balign 4096
level4:
    .quad level3 + 3
    .fill 511, 8
level3:
    .quad level2 + 0x0003, level2 + 0x1003, level2 + 0x2003, level2 + 0x3003
    .fill 508, 8
level2:
    .set page, 0
    .rept 2048
    .quad page << 21 | 0x83 # present, writable, 2 MiB
    .set page, page + 1
    .endr
gdt:
    .quad 0, 0x00af9a000000ffff, 0x00cf92000000ffff
gdtr:
    .word . - gdt - 1
    .long gdt

    .section .text
    .code32
    .global start
start:
    mov $level4, %eax
    mov %eax, %cr3
    mov $0x220, %eax # PAE, OSFXSR
    mov %eax, %cr4
    mov $0xc0000080, %ecx # EFER
    rdmsr
    or $0x100, %eax # LME
    wrmsr
    mov $0x80000013, %eax # PG, ET, MP, PE
    mov %eax, %cr0
    lgdt gdtr
    ljmp $8, $long_mode

    .code64
long_mode:
    mov $16, %eax
    mov %eax, %ds
    mov %eax, %es
    mov %eax, %ss
# Calls `main` anew.
    .global restart
restart:
    mov $stack, %esp
    cld
    call main

    .section .bss
    .balign 16
    .skip 16384
stack:

    .section .note.GNU-stack, "", @progbits
