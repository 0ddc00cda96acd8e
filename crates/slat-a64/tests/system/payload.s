// A payload without an operating system: executes commands from memory at EL1 and EL0, and writes what happened.
//
// The payload and its data are in a half of the address space with a table of its own; the commands are about the other
// half. Physical addresses: see main.rs. Registers: X19 the base of the own half, X20 the command, X21 the output, X22
// and X23 the stub, to execute and to write; a stub may change X0 to X3.

        .equ    TABLE, 0x40210000
        .equ    STUB, 0x40220000
        .equ    COMMANDS, 0x40300000
        .equ    OUTPUT, 0x41000000
        .equ    WRITABLE, 0x40000000    // An alias that can be written is so much higher.
        .equ    UART, 0x09000000

        .arch   armv8.4-a
        .text
start:
        msr     oslar_el1, xzr
        bl      neutral
        mov     x19, xzr
        adr     x0, vectors
        msr     vbar_el1, x0
        ldr     x22, =STUB
        ldr     x20, =COMMANDS + WRITABLE
        ldr     x21, =OUTPUT + WRITABLE
        ldr     x23, =STUB + WRITABLE
        ldr     x0, =0x30d00801         // SCTLR_EL1: RES1, SPAN, M.
        msr     sctlr_el1, x0
        isb
command:
        ldr     x0, [x20]
        cbz     x0, end
        cmp     x0, #1
        b.eq    configure
        cmp     x0, #2
        b.eq    execute
        cmp     x0, #3
        b.eq    read
        b       switch
next:
        add     x20, x20, #128
        b       command

// Sets TTBR0, TTBR1, TCR, MAIR and SCTLR.
configure:
        ldp     x0, x1, [x20, #8]
        msr     ttbr0_el1, x0
        msr     ttbr1_el1, x1
        ldp     x0, x1, [x20, #24]
        msr     tcr_el1, x0
        msr     mair_el1, x1
        ldr     x0, [x20, #40]
        msr     sctlr_el1, x0
        isb
        tlbi    vmalle1
        dsb     sy
        isb
        b       next

// Reads a word at a physical address.
read:
        bl      physical
        ldr     x0, [x0]
        str     x0, [x21], #8
        b       next
physical:
        ldr     x0, [x20, #8]
        add     x0, x0, x19
        ldr     x1, =WRITABLE
        add     x0, x0, x1
        ret

// Goes to the other half.
switch:
        bl      neutral
        mov     x1, #0xffffff8000000000
        eor     x19, x19, x1
        eor     x20, x20, x1
        eor     x21, x21, x1
        eor     x22, x22, x1
        eor     x23, x23, x1
        adr     x0, switched
        eor     x0, x0, x1
        br      x0
switched:
        adr     x0, vectors
        msr     vbar_el1, x0
        isb
        b       next

// Lets both halves have the own table.
neutral:
        ldr     x0, =TABLE
        msr     ttbr0_el1, x0
        msr     ttbr1_el1, x0
        ldr     x0, =0x0000000280190019 // 39 bits each, 4 KiB, 40 bits of output.
        msr     tcr_el1, x0
        ldr     x0, =0xff00000000000000
        msr     mair_el1, x0
        isb
        tlbi    vmalle1
        dsb     sy
        isb
        ret

// Executes four instructions: with SPSR, ELR (0: the stub), CPACR, MDSCR, SP_EL0, X0 to X3.
execute:
        ldp     x0, x1, [x20, #8]
        stp     x0, x1, [x23]
        dc      cvau, x23
        dsb     ish
        ic      ivau, x22
        dsb     ish
        ldp     x0, x1, [x20, #24]
        msr     spsr_el1, x0
        cmp     x1, #0
        csel    x1, x22, x1, eq
        msr     elr_el1, x1
        ldp     x0, x1, [x20, #40]
        msr     cpacr_el1, x0
        msr     mdscr_el1, x1
        ldr     x0, [x20, #56]
        msr     sp_el0, x0
        msr     esr_el1, xzr
        msr     far_el1, xzr
        msr     par_el1, xzr
        clrex
        isb
        ldp     x0, x1, [x20, #64]
        ldp     x2, x3, [x20, #80]
        eret

taken:
        msr     mdscr_el1, xzr
        isb
        stp     x0, x1, [x21], #16
        mrs     x28, esr_el1
        mrs     x29, far_el1
        stp     x28, x29, [x21], #16
        mrs     x28, elr_el1
        sub     x28, x28, x22
        mrs     x29, spsr_el1
        stp     x28, x29, [x21], #16
        mrs     x28, par_el1
        stp     x27, x28, [x21], #16
        msr     pan, #0
        b       next

// Writes the output to the UART, after its length, and switches the machine off.
end:
        bl      neutral
        ldr     x1, =OUTPUT + WRITABLE
        add     x1, x1, x19
        ldr     x2, =UART
        add     x2, x2, x19
1:      cmp     x1, x21
        b.eq    2f
        ldrb    w0, [x1], #1
        str     w0, [x2]
        b       1b
2:      ldr     x0, =0x84000008         // PSCI's SYSTEM_OFF.
        hvc     #0
        b       2b

        .ltorg
        .balign 2048
vectors:
        .set    n, 0
        .rept   16
        .balign 128
        mov     x27, #n
        b       taken
        .set    n, n + 1
        .endr
