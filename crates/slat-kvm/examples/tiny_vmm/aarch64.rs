//! The guest reads a byte of the device, adds 40, writes the sum to the device, and switches the machine off.

/// ```text
/// mov x1, #0x8000                 // the address of a device: no memory
/// ldrb w0, [x1]
/// add w0, w0, #40
/// strb w0, [x1]
/// mov w0, #8                      // PSCI's SYSTEM_OFF
/// movk w0, #0x8400, lsl #16
/// hvc #0
/// ```
pub const CODE_BYTES: &[u8] = &[
    0x01, 0x00, 0x90, 0xd2, 0x20, 0x00, 0x40, 0x39, 0x00, 0xa0, 0x00, 0x11, 0x20, 0x00, 0x00, 0x39,
    0x00, 0x01, 0x80, 0x52, 0x00, 0x80, 0xb0, 0x72, 0x02, 0x00, 0x00, 0xd4,
];
/// The address of the code.
pub const CODE: u64 = 0x1000;

/// The message of the VMM about this guest.
#[cfg(test)]
pub const LOG: &[&str] = &["read  0x8000", "write 0x8000: 42", "switched off"];

/// Creates the vCPU, which begins at the guest's code.
macro_rules! create_vcpu {
    ($vm:ident) => {{
        use kvm_bindings::*;
        const PC: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64 | 64;

        let vcpu = $vm.create_vcpu(0)?;
        let mut init = kvm_vcpu_init::default();
        $vm.get_preferred_target(&mut init)?;
        init.features[0] |= 1 << KVM_ARM_VCPU_PSCI_0_2;
        vcpu.vcpu_init(&init)?;
        vcpu.set_one_reg(PC, &crate::guest::CODE.to_le_bytes())?;
        vcpu
    }};
}
