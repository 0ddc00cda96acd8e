# Entry to the guest and exit from it. The guest uses no FP registers, and neither does the monitor
# (its target has none), so only the general registers are switched.

    .text
# extern "C" fn enter_guest(&mut Context): runs the guest until it leaves.
    .global enter_guest
enter_guest:
    addi    sp, sp, -112
    sd      ra, 0(sp)
    sd      s0, 8(sp)
    sd      s1, 16(sp)
    sd      s2, 24(sp)
    sd      s3, 32(sp)
    sd      s4, 40(sp)
    sd      s5, 48(sp)
    sd      s6, 56(sp)
    sd      s7, 64(sp)
    sd      s8, 72(sp)
    sd      s9, 80(sp)
    sd      s10, 88(sp)
    sd      s11, 96(sp)
    sd      sp, 264(a0)
    sd      gp, 272(a0)
    sd      tp, 280(a0)
    csrw    sscratch, a0

    ld      t0, 256(a0)
    csrw    sepc, t0
    # sret goes to VS mode (hstatus.SPV, sstatus.SPP). The monitor's interrupts make the hart leave
    # the guest whatever sstatus.SIE is.
    li      t0, 1 << 7
    csrs    hstatus, t0
    li      t0, 1 << 8
    csrs    sstatus, t0
    .irp    n, 1, 2, 3, 4, 5, 6, 7, 8, 9
    ld      x\n, \n*8(a0)
    .endr
    .irp    n, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
    ld      x\n, \n*8(a0)
    .endr
    ld      a0, 80(a0)
    sret

# Exit from the guest; or, if sscratch was 0, a trap of the monitor itself, which is not expected.
    .balign 4
    .global trap
trap:
    csrrw   a0, sscratch, a0
    bnez    a0, leave_guest
    tail    own_exception
leave_guest:
    .irp    n, 1, 2, 3, 4, 5, 6, 7, 8, 9
    sd      x\n, \n*8(a0)
    .endr
    .irp    n, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
    sd      x\n, \n*8(a0)
    .endr
    csrrw   t0, sscratch, zero
    sd      t0, 80(a0)
    csrr    t0, sepc
    sd      t0, 256(a0)

    ld      sp, 264(a0)
    ld      gp, 272(a0)
    ld      tp, 280(a0)
    ld      ra, 0(sp)
    ld      s0, 8(sp)
    ld      s1, 16(sp)
    ld      s2, 24(sp)
    ld      s3, 32(sp)
    ld      s4, 40(sp)
    ld      s5, 48(sp)
    ld      s6, 56(sp)
    ld      s7, 64(sp)
    ld      s8, 72(sp)
    ld      s9, 80(sp)
    ld      s10, 88(sp)
    ld      s11, 96(sp)
    addi    sp, sp, 112
    ret
