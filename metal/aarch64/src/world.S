// Entry to the guest and exit from it. The guest uses no FP registers, and neither does the monitor
// (its target is soft-float), so only the general registers are switched.

    .text
// extern "C" fn enter_guest(&mut Context) -> u64: runs the guest until it leaves. Returns the number of the vector
// through which the guest left.
    .global enter_guest
enter_guest:
    stp     x29, x30, [sp, #-96]!
    stp     x19, x20, [sp, #16]
    stp     x21, x22, [sp, #32]
    stp     x23, x24, [sp, #48]
    stp     x25, x26, [sp, #64]
    stp     x27, x28, [sp, #80]
    msr     tpidr_el2, x0

    ldr     x1, [x0, #248]
    msr     elr_el2, x1
    // EL1h, with interrupts masked. Interrupts for the monitor are nevertheless taken to EL2 (HCR_EL2.IMO).
    mov     x1, #0x3c5
    msr     spsr_el2, x1
    ldp     x2, x3, [x0, #16]
    ldp     x4, x5, [x0, #32]
    ldp     x6, x7, [x0, #48]
    ldp     x8, x9, [x0, #64]
    ldp     x10, x11, [x0, #80]
    ldp     x12, x13, [x0, #96]
    ldp     x14, x15, [x0, #112]
    ldp     x16, x17, [x0, #128]
    ldp     x18, x19, [x0, #144]
    ldp     x20, x21, [x0, #160]
    ldp     x22, x23, [x0, #176]
    ldp     x24, x25, [x0, #192]
    ldp     x26, x27, [x0, #208]
    ldp     x28, x29, [x0, #224]
    ldr     x30, [x0, #240]
    ldp     x0, x1, [x0]
    eret
    // This prevents speculation after ERET.
    dsb     nsh
    isb

// The exit from the guest. The guest's x0 and x1 are on the stack. x1 is the number of the vector.
leave_guest:
    mrs     x0, tpidr_el2
    stp     x2, x3, [x0, #16]
    stp     x4, x5, [x0, #32]
    stp     x6, x7, [x0, #48]
    stp     x8, x9, [x0, #64]
    stp     x10, x11, [x0, #80]
    stp     x12, x13, [x0, #96]
    stp     x14, x15, [x0, #112]
    stp     x16, x17, [x0, #128]
    stp     x18, x19, [x0, #144]
    stp     x20, x21, [x0, #160]
    stp     x22, x23, [x0, #176]
    stp     x24, x25, [x0, #192]
    stp     x26, x27, [x0, #208]
    stp     x28, x29, [x0, #224]
    str     x30, [x0, #240]
    mrs     x2, elr_el2
    str     x2, [x0, #248]
    ldp     x2, x3, [sp], #16
    stp     x2, x3, [x0]
    mov     x0, x1

    ldp     x19, x20, [sp, #16]
    ldp     x21, x22, [sp, #32]
    ldp     x23, x24, [sp, #48]
    ldp     x25, x26, [sp, #64]
    ldp     x27, x28, [sp, #80]
    ldp     x29, x30, [sp], #96
    ret

    .macro own number
    .balign 128
    mov     x0, #\number
    b       own_exception
    .endm

    .macro guest number
    .balign 128
    stp     x0, x1, [sp, #-16]!
    mov     x1, #\number
    b       leave_guest
    .endm

// Exceptions of EL2 itself are not expected. Entries 8 to 11 are the synchronous exceptions, IRQ, FIQ and SError of an
// AArch64 guest.
    .balign 2048
vectors:
    .irp    number, 0, 1, 2, 3, 4, 5, 6, 7
    own     \number
    .endr
    .irp    number, 8, 9, 10, 11
    guest   \number
    .endr
    .irp    number, 12, 13, 14, 15
    own     \number
    .endr
