// The guest's program. w0: operation (Op), x1: first address, x2: bytes to the next address, x3: number of addresses,
// w4: first value to write.

    .section .rodata
    .balign 4
    .global guest_program, guest_program_end
guest_program:
    mov     w5, wzr
next:
    cmp     w0, #1
    b.eq    read
    b.hi    execute
    str     w4, [x1]
    add     w4, w4, #1
    b       done
read:
    ldr     w6, [x1]
    add     w5, w5, w6
    b       done
execute:
    blr     x1
done:
    add     x1, x1, x2
    subs    x3, x3, #1
    b.ne    next
    mov     w0, w5
    hvc     #0
guest_program_end:
