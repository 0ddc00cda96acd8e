// The code from the loader, or from PSCI, to Rust. Every CPU starts at EL2 with its MMU off.

    .section .boot, "ax"
    .global _start
_start:
    mov     x0, #0
// The entry of every other CPU. x0 is the CPU's number.
    .global secondary_start
secondary_start:
    msr     spsel, #1
    adrp    x1, stacks
    add     x2, x0, #1
    add     x1, x1, x2, lsl #16
    mov     sp, x1

    adrp    x1, vectors
    add     x1, x1, :lo12:vectors
    msr     vbar_el2, x1

    // Stage 1 at EL2 is on, because written memory must be cached, and must have a memory type on which exclusive
    // accesses work.
    ldr     x1, ={mair}
    msr     mair_el2, x1
    ldr     x1, ={tcr}
    msr     tcr_el2, x1
    adrp    x1, {identity}
    msr     ttbr0_el2, x1
    // E2H is off, so the registers above are EL2's own registers. The guest's bits are set later.
    ldr     x1, ={hcr_rw}
    msr     hcr_el2, x1
    isb
    tlbi    alle2
    tlbi    alle1
    ic      iallu
    dsb     nsh
    isb
    ldr     x1, ={sctlr}
    msr     sctlr_el2, x1
    isb
    b       main
    .ltorg
