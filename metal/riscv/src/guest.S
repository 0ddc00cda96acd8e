# The guest. a0: operation (Op), a1: first address, a2: bytes to the next, a3: number of
# addresses, a4: first value to write.

    .section .rodata
    .balign 4
    .option push
    .option norvc
    .global guest_program, guest_program_end
guest_program:
    li      s0, 0
    li      s1, 1
next:
    beq     a0, s1, read
    bgtu    a0, s1, execute
    sw      a4, 0(a1)
    addi    a4, a4, 1
    j       done
read:
    lw      t0, 0(a1)
    add     s0, s0, t0
    j       done
execute:
    jalr    a1
done:
    add     a1, a1, a2
    addi    a3, a3, -1
    bnez    a3, next
    mv      a0, s0
    ecall
guest_program_end:
    .option pop
