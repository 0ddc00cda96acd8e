# From the firmware to Rust. Every hart starts in HS mode, untranslated, with interrupts masked.

    .section .boot, "ax"
    .global _start
# a0: the hart.
_start:
    mv      a1, a0
    li      a0, 0
    j       start
# Entry of every other hart. a0: the hart, a1: the number of the CPU.
    .global secondary_start
secondary_start:
    mv      t0, a0
    mv      a0, a1
    mv      a1, t0
start:
    la      sp, stacks
    addi    t0, a0, 1
    slli    t0, t0, 16
    add     sp, sp, t0
    # In the monitor sscratch is 0: see world.S.
    csrw    sscratch, zero
    la      t0, trap
    csrw    stvec, t0
    csrw    satp, zero
    csrw    sie, zero
    tail    main
