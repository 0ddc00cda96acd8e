//! Paging with five levels in the monitor itself. AMD's nested walker reads as many levels as the host uses when
//! it executes VMRUN (AMD64 APM volume 2, "Nested Paging"), so a monitor whose nested tables have five levels
//! calls [`enter`] first.

use core::arch::{global_asm, x86_64::__cpuid_count};

global_asm!(
    r#"
// CR4.LA57 cannot change in long mode. So the code leaves long mode through compatibility mode. Code in compatibility
// mode has only registers of 32 bits, so all other registers are saved.
.section .text.la57, "ax", @progbits
.code64
la57:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    mov eax, offset pml4 + 3            // present, writable
    mov [pml5], eax
    push 0x18
    mov eax, offset without
    push rax
    retfq
.code32
without:
    mov edx, cr0
    and edx, 0x7fffffff                 // PG
    mov cr0, edx
    mov eax, offset pml5
    mov cr3, eax
    mov eax, cr4
    or eax, 0x1000                      // LA57
    mov cr4, eax
    or edx, 0x80000000
    mov cr0, edx
    ljmp 0x08, offset within
.code64
within:
    mov esp, esp
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret

.section .bss.la57, "aw", @nobits
.balign 4096
pml5:
    .skip 4096
"#
);

/// Makes the calling CPU use five levels. Call once on each CPU, before anything else.
///
/// # Panics
/// If the CPU has only four levels.
pub fn enter() {
    unsafe extern "C" {
        fn la57();
    }
    const LA57: u32 = 1 << 16;
    const FEATURES: u32 = 7;
    assert!(
        __cpuid_count(FEATURES, 0).ecx & LA57 != 0,
        "this CPU has no paging with five levels: run it with `-cpu max`"
    );
    // SAFETY: the table above the top-level table of `boot` maps the same addresses as that table, the stack and the
    // code are below 4 GiB, and the calling convention's registers are saved.
    unsafe { la57() };
}
