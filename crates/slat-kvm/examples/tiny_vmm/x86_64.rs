//! The guest is real-mode code: it reads a byte from port 0x10, adds the value of a device register, writes the sum to
//! port 0x11 and to the device register, and halts.

/// ```text
/// mov dx, 0x10
/// in al, dx
/// mov bx, 0x8000        ; the address of a device: no memory
/// add al, [bx]
/// inc dx
/// out dx, al
/// mov [bx], al
/// hlt
/// ```
pub const CODE_BYTES: &[u8] = &[
    0xba, 0x10, 0x00, 0xec, 0xbb, 0x00, 0x80, 0x02, 0x07, 0x42, 0xee, 0x88, 0x07, 0xf4,
];
/// The address of the code.
pub const CODE: u64 = 0x1000;

/// The message of the VMM about this guest.
#[cfg(test)]
pub const LOG: &[&str] = &[
    "in  port 0x10",
    "read  0x8000",
    "out port 0x11: 42",
    "write 0x8000: 42",
    "halted",
];

/// Creates the vCPU, which begins at the guest's code.
macro_rules! create_vcpu {
    ($vm:ident) => {{
        let vcpu = $vm.create_vcpu(0)?;
        let mut sregs = vcpu.get_sregs()?;
        for segment in [&mut sregs.cs, &mut sregs.ds, &mut sregs.ss] {
            segment.base = 0;
            segment.selector = 0;
        }
        vcpu.set_sregs(&sregs)?;
        let mut regs = vcpu.get_regs()?;
        regs.rip = crate::guest::CODE;
        regs.rflags = 2;
        vcpu.set_regs(&regs)?;
        vcpu
    }};
}
