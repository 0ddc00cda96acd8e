//! The structures that a guest needs to take interrupts: a GDT with the segments in which the interrupt handler runs
//! and to which it returns, an IDT with the handler's address, and a local APIC in x2APIC mode, so that its registers
//! are MSRs.

use kvm_bindings::{kvm_dtable, kvm_irq_routing_entry, kvm_irq_routing_msi, kvm_sregs};

use super::layout::{GDT, IDT};

/// The interrupt vector. The IDT of [`load`] has no other vector.
const VECTOR: u64 = 0x40;
/// The segments in the GDT, as in `slat_demo::long_mode`: null, code at selector 8, data at selector 0x10.
const SEGMENTS: [u64; 3] = [0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff];

/// Writes the GDT and the IDT into the memory of the system slot. `handler` is the address of the handler of
/// [`VECTOR`].
pub(super) fn load(system: &mut [u8], handler: u64) {
    const CODE: u64 = 8 << 16;
    const PRESENT_INTERRUPT_GATE: u64 = 0x8e << 40;
    let mut put = |at: u64, value: u64| {
        system[at as usize..][..8].copy_from_slice(&value.to_le_bytes());
    };
    for (index, segment) in (0..).zip(SEGMENTS) {
        put(GDT + index * 8, segment);
    }
    // The gate stores the handler's address in three parts (Intel SDM volume 3, 6.14.1).
    let gate = IDT + VECTOR * 16;
    let low = handler & 0xffff | (handler >> 16 & 0xffff) << 48;
    put(gate, low | CODE | PRESENT_INTERRUPT_GATE);
    put(gate + 8, handler >> 32);
}

/// Returns `sregs` changed to use the GDT and the IDT of [`load`], and to have the local APIC in x2APIC mode.
pub(super) fn special_registers(sregs: kvm_sregs) -> kvm_sregs {
    const ENABLED: u64 = 1 << 11;
    const X2APIC: u64 = 1 << 10;
    let table = |base, size| kvm_dtable {
        base,
        limit: size - 1,
        ..Default::default()
    };
    kvm_sregs {
        gdt: table(GDT, size_of_val(&SEGMENTS) as u16),
        idt: table(IDT, 0x1000),
        apic_base: sregs.apic_base | ENABLED | X2APIC,
        ..sregs
    }
}

/// Returns a route that sends `gsi` as a message (MSI) with [`VECTOR`] to vCPU 0.
pub fn message(gsi: u32) -> kvm_irq_routing_entry {
    let mut route = kvm_irq_routing_entry {
        gsi,
        type_: kvm_bindings::KVM_IRQ_ROUTING_MSI,
        ..Default::default()
    };
    route.u.msi = kvm_irq_routing_msi {
        address_lo: 0xfee0_0000,
        data: VECTOR as u32,
        ..Default::default()
    };
    route
}
