//! The IDT. Exceptions of the monitor itself are reported. The only interrupt is the kick, which makes a CPU leave the
//! guest. The interrupt's arrival has this effect, so its handler only acknowledges it.

use core::arch::{asm, global_asm};
use core::sync::atomic::{AtomicU64, Ordering::*};

use crate::apic;

const EXCEPTIONS: usize = 32;
/// The selector of the code segment in the GDT (`boot`).
const CODE: u64 = 0x08;
/// The number of bytes from one exception's entry to the next.
const STRIDE: u64 = 16;

global_asm!(
    r#"
.section .text.interrupts, "ax", @progbits
.balign 16
.globl exceptions, kicked
exceptions:
.set vector, 0
.rept 32
    .balign 16
    push vector
    jmp exception
    .set vector, vector + 1
.endr
exception:
    mov rdi, rsp
    and rsp, -16
    call report_exception

kicked:
    push rax
    mov eax, {eoi}
    mov dword ptr [rax], 0
    pop rax
    iretq
"#,
    eoi = const apic::END_OF_INTERRUPT,
);

unsafe extern "C" {
    static exceptions: u8;
    static kicked: u8;
}

/// The IDT. Each vector has two words. Each CPU writes the same contents.
static IDT: [AtomicU64; 2 * (apic::KICK as usize + 1)] =
    [const { AtomicU64::new(0) }; 2 * (apic::KICK as usize + 1)];

/// The operand of LIDT.
#[repr(C, packed)]
struct Descriptor {
    limit: u16,
    base: u64,
}

/// Gives this CPU the IDT.
pub(crate) fn load() {
    let gate = |vector: usize, handler: u64| {
        // AMD64 APM 2, "Interrupt-Gate and Trap-Gate Descriptors": type 14, present.
        let low = handler & 0xffff | CODE << 16 | 0x8e << 40 | (handler >> 16 & 0xffff) << 48;
        IDT[2 * vector].store(low, Relaxed);
        IDT[2 * vector + 1].store(handler >> 32, Relaxed);
    };
    let first = &raw const exceptions as u64;
    for vector in 0..EXCEPTIONS {
        gate(vector, first + vector as u64 * STRIDE);
    }
    gate(usize::from(apic::KICK), &raw const kicked as u64);
    let descriptor = Descriptor {
        limit: size_of_val(&IDT) as u16 - 1,
        base: IDT.as_ptr() as u64,
    };
    // SAFETY: the table is static, and its handlers keep the registers of the code that they interrupt.
    unsafe { asm!("lidt [{}]", in(reg) &descriptor, options(nostack)) };
}

/// Masks all interrupts of the legacy controllers.
pub(crate) fn mask_legacy() {
    // SAFETY: the ports are the mask registers of the two 8259s.
    unsafe {
        asm!("out 0x21, al", "out 0xa1, al", in("al") 0xffu8, options(nomem, nostack));
    }
}

/// # Safety
/// - `stack` points to the vector, which is followed by the words that the CPU has pushed.
#[unsafe(no_mangle)]
unsafe extern "C" fn report_exception(stack: *const u64) -> ! {
    // SAFETY: the vector is at `stack`, and the CPU has pushed more than four words after it, as this function's
    // `# Safety` asks of its caller.
    let [vector, pushed @ ..] = unsafe { stack.cast::<[u64; 5]>().read() };
    panic!("exception {vector} of the monitor; on its stack: {pushed:#x?}")
}
