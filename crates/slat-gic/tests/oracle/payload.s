// Does a list of accesses, and sends what it has read to the serial port. Runs on QEMU's machine `virt` without
// translation, at EL1, on one CPU.
//
// An access has 32 bytes: a kind, an address or an index, and a value. The list is in memory at LIST, and ends with
// kind 0. Each access but writes gives 8 bytes.

        .set    LIST, 0x48000000
        .set    UART, 0x09000000

        // Two instructions for each system register, in the order of the test's list.
        .macro  registers do
        \do     S3_0_C4_C6_0
        \do     S3_0_C12_C8_0
        \do     S3_0_C12_C8_1
        \do     S3_0_C12_C8_2
        \do     S3_0_C12_C8_3
        \do     S3_0_C12_C8_4
        \do     S3_0_C12_C9_0
        \do     S3_0_C12_C11_1
        \do     S3_0_C12_C11_3
        \do     S3_0_C12_C11_5
        \do     S3_0_C12_C11_7
        \do     S3_0_C12_C12_0
        \do     S3_0_C12_C12_1
        \do     S3_0_C12_C12_2
        \do     S3_0_C12_C12_3
        \do     S3_0_C12_C12_4
        \do     S3_0_C12_C12_6
        \do     S3_0_C12_C12_7
        // ISR_EL1, CNTV_CTL_EL0, CNTV_CVAL_EL0, CNTP_CTL_EL0, CNTP_CVAL_EL0
        \do     S3_0_C12_C1_0
        \do     S3_3_C14_C3_1
        \do     S3_3_C14_C3_2
        \do     S3_3_C14_C2_1
        \do     S3_3_C14_C2_2
        .endm
        .macro  one_read name
        mrs     x0, \name
        ret
        .endm
        .macro  one_write name
        msr     \name, x0
        ret
        .endm

        .globl  _start
_start:
        movz    x20, #(LIST >> 16), lsl #16
        movz    x21, #(UART >> 16), lsl #16
        adr     x22, reads
        adr     x23, writes
next:
        ldp     x1, x2, [x20], #16
        ldr     x0, [x20], #16
        cbz     x1, finish
        cmp     x1, #1
        b.eq    read_byte
        cmp     x1, #2
        b.eq    read_word
        cmp     x1, #3
        b.eq    read_double
        cmp     x1, #4
        b.eq    write_byte
        cmp     x1, #5
        b.eq    write_word
        cmp     x1, #6
        b.eq    write_double
        cmp     x1, #7
        b.eq    read_register
        add     x3, x23, x2, lsl #3
        blr     x3
        isb
        b       next
read_register:
        add     x3, x22, x2, lsl #3
        isb
        blr     x3
        b       send
read_byte:
        ldrb    w0, [x2]
        b       send
read_word:
        ldr     w0, [x2]
        b       send
read_double:
        ldr     x0, [x2]
        b       send
write_byte:
        strb    w0, [x2]
        b       next
write_word:
        str     w0, [x2]
        b       next
write_double:
        str     x0, [x2]
        b       next
send:
        mov     x3, #8
1:      strb    w0, [x21]
        lsr     x0, x0, #8
        subs    x3, x3, #1
        b.ne    1b
        b       next

        // PSCI's SYSTEM_OFF ends QEMU.
finish:
        movz    w0, #0x8400, lsl #16
        movk    w0, #0x0008
        hvc     #0
2:      b       2b

        .balign 8
reads:
        registers one_read
writes:
        registers one_write
