//! The interrupt controllers: two guests that take interrupts, and the client that creates the controllers.

mod client;
mod delivery;

use super::guests::{CODE, DEVICE, Guest, SIZE, X0, code, get, set, system};
use kvm_bindings::*;
use slat_kvm::{Cap, DeviceFd, Kvm, VcpuExit, VcpuFd, VmFd};
use std::arch::global_asm;
use std::os::fd::AsRawFd;
use std::time::Duration;
use vmm_sys_util::eventfd::EventFd;

const DISTRIBUTOR: u64 = 0x0800_0000;

/// GICv2's CPU interface, or GICv3's redistributors.
const INTERFACES: u64 = 0x080a_0000;

const REDISTRIBUTOR_SIZE: u64 = 0x2_0000;

const ITS: u64 = 0x0808_0000;

const TRANSLATER: u64 = ITS + 0x1_0040;

pub const V2: u32 = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2;

pub const V3: u32 = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3;

// Both guests enable interrupts and wait. Their handlers write each acknowledged INTID to the device at X21, and then
// end the interrupt. X19: the distributor. X20: the CPU interface, or the redistributor. X22: an SGI to generate, or 0.
// X23: the SPIs to enable. X24: the PPIs to enable. X25: the ticks until the virtual timer, or 0. X26: the ITS, or 0.
global_asm!(
    r"
    .pushsection .rodata
    .balign 2048
    .globl slat_test_gic3
slat_test_gic3:
    adr x0, 9f
    msr vbar_el1, x0
    mov w0, #2
    str w0, [x19]
    str w23, [x19, #0x104]
    add x1, x20, #0x10000
    str w24, [x1, #0x100]
    mov x0, #0xf0
    msr S3_0_C4_C6_0, x0
    mov x0, #1
    msr S3_0_C12_C12_7, x0
    isb
    cbz x26, 1f
    // The tables of LPIs, and those of the ITS, whose commands the test has written.
    ldr x0, =0x4004000f
    str x0, [x20, #0x70]
    ldr x0, =0x40050000
    str x0, [x20, #0x78]
    mov w0, #1
    str w0, [x20]
    ldr x0, =0x8000000040020200
    str x0, [x26, #0x100]
    ldr x0, =0x8000000040030200
    str x0, [x26, #0x108]
    ldr x0, =0x8000000040010000
    str x0, [x26, #0x80]
    mov w0, #1
    str w0, [x26]
    mov x0, #128
    str x0, [x26, #0x88]
    str wzr, [x21]
1:  cbz x22, 2f
    msr S3_0_C12_C11_5, x22
2:  cbz x25, 3f
    msr cntv_tval_el0, x25
    mov x0, #1
    msr cntv_ctl_el0, x0
3:  msr daifclr, #2
4:  wfi
    b 4b
    .ltorg
    .balign 2048
9:  .skip 0x280
    mrs x0, S3_0_C12_C12_0
    str w0, [x21]
    mov x1, #2
    msr cntv_ctl_el0, x1
    msr S3_0_C12_C12_1, x0
    eret
    .globl slat_test_gic3_end
slat_test_gic3_end:

    .balign 2048
    .globl slat_test_gic2
slat_test_gic2:
    adr x0, 9f
    msr vbar_el1, x0
    mov w0, #1
    str w0, [x19]
    str w23, [x19, #0x104]
    str w24, [x19, #0x100]
    add x1, x19, #0x800
    strb w0, [x1, #33]
    mov w2, #0xf0
    str w2, [x20, #4]
    str w0, [x20]
    cbz x22, 2f
    str w22, [x19, #0xf00]
2:  cbz x25, 3f
    msr cntv_tval_el0, x25
    mov x0, #1
    msr cntv_ctl_el0, x0
3:  msr daifclr, #2
4:  wfi
    b 4b
    .balign 2048
9:  .skip 0x280
    ldr w0, [x20, #0xc]
    str w0, [x21]
    mov x1, #2
    msr cntv_ctl_el0, x1
    str w0, [x20, #0x10]
    eret
    .globl slat_test_gic2_end
slat_test_gic2_end:
    .popsection
    "
);

// Enables and waits as above. The handler lets other interrupts in as soon as it has acknowledged one, and then writes
// its INTID to the device.
global_asm!(
    r"
    .pushsection .rodata
    .balign 2048
    .globl slat_test_gic_nested
slat_test_gic_nested:
    adr x0, 9f
    msr vbar_el1, x0
    mov w0, #2
    str w0, [x19]
    str w23, [x19, #0x104]
    mov x0, #0xf0
    msr S3_0_C4_C6_0, x0
    mov x0, #1
    msr S3_0_C12_C12_7, x0
    isb
    msr daifclr, #2
4:  wfi
    b 4b
    .balign 2048
9:  .skip 0x280
    mrs x0, S3_0_C12_C12_0
    msr daifclr, #2
    str w0, [x21]
    b .
    .globl slat_test_gic_nested_end
slat_test_gic_nested_end:
    .popsection
    "
);

// Starts vCPU 1. Each vCPU writes ID_AA64PFR0_EL1.GIC to the device at 0x0900_0000.
global_asm!(
    r"
    .pushsection .rodata
    .balign 4
    .globl slat_test_gic_field
slat_test_gic_field:
    movz x0, #0xc400, lsl #16
    add x0, x0, #3
    mov x1, #1
    adr x2, 1f
    hvc #0
1:  mrs x0, id_aa64pfr0_el1
    ubfx x0, x0, #24, #4
    mov x1, #0x09000000
    str w0, [x1]
    .globl slat_test_gic_field_end
slat_test_gic_field_end:
    .popsection
    "
);

fn attribute(group: u32, attr: u64, value: &mut u64) -> kvm_device_attr {
    kvm_device_attr {
        group,
        attr,
        addr: &raw mut *value as u64,
        ..Default::default()
    }
}

fn set_attribute(device: &DeviceFd, group: u32, attr: u64, mut value: u64) -> Result<(), i32> {
    let set = device.set_device_attr(&attribute(group, attr, &mut value));
    set.map_err(|error| error.errno())
}

fn get_attribute(device: &DeviceFd, group: u32, attr: u64) -> Result<u64, i32> {
    let mut value = 0;
    let mut attribute = attribute(group, attr, &mut value);
    // SAFETY: the address is that of `value`, which has room for every attribute.
    unsafe { device.get_device_attr(&mut attribute) }.map_err(|error| error.errno())?;
    Ok(value)
}

pub fn create(vm: &VmFd, type_: u32) -> Result<DeviceFd, i32> {
    let mut device = kvm_create_device {
        type_,
        ..Default::default()
    };
    vm.create_device(&mut device).map_err(|error| error.errno())
}

/// Sets the addresses of a GIC, and initialises it.
pub fn place(model: u32, device: &DeviceFd) {
    let addresses = match model {
        V2 => [KVM_VGIC_V2_ADDR_TYPE_DIST, KVM_VGIC_V2_ADDR_TYPE_CPU],
        _ => [KVM_VGIC_V3_ADDR_TYPE_DIST, KVM_VGIC_V3_ADDR_TYPE_REDIST],
    };
    for (kind, address) in addresses.into_iter().zip([DISTRIBUTOR, INTERFACES]) {
        set_attribute(device, KVM_DEV_ARM_VGIC_GRP_ADDR, kind.into(), address).unwrap();
    }
    let init = KVM_DEV_ARM_VGIC_CTRL_INIT.into();
    set_attribute(device, KVM_DEV_ARM_VGIC_GRP_CTRL, init, 0).unwrap();
}

/// A guest with a GIC and initialised vCPUs.
struct Gic {
    guest: Guest,
    vcpus: Vec<VcpuFd>,
    device: DeviceFd,
}

impl Gic {
    fn new(model: u32, vcpus: u64) -> Self {
        Self::with(model, vcpus, |_| ())
    }

    /// Calls `prepare` before there are vCPUs.
    fn with(model: u32, vcpus: u64, prepare: impl FnOnce(&Guest)) -> Self {
        let code = match model {
            V2 => code!(slat_test_gic2, slat_test_gic2_end),
            _ => code!(slat_test_gic3, slat_test_gic3_end),
        };
        Self::with_code(model, vcpus, code, prepare)
    }

    fn with_code(model: u32, vcpus: u64, code: &[u8], prepare: impl FnOnce(&Guest)) -> Self {
        let guest = Guest::new(code);
        prepare(&guest);
        let device = create(&guest.vm, model).unwrap();
        let vcpus: Vec<_> = (0..vcpus).map(|id| guest.vcpu(id, 0)).collect();
        place(model, &device);
        for (vcpu, n) in vcpus.iter().zip(0..) {
            let interface = match model {
                V2 => INTERFACES,
                _ => INTERFACES + n * REDISTRIBUTOR_SIZE,
            };
            for (register, value) in [(19, DISTRIBUTOR), (20, interface), (21, DEVICE)] {
                set(vcpu, X0 + 2 * register, value);
            }
        }
        Gic {
            guest,
            vcpus,
            device,
        }
    }

    fn set(&self, vcpu: usize, register: u64, value: u64) {
        set(&self.vcpus[vcpu], X0 + 2 * register, value);
    }

    /// Creates an ITS, and makes the guest of vCPU 0 map event 3 of device 1 to LPI 8193, which is enabled.
    fn add_its(&self) -> DeviceFd {
        let its = create(&self.guest.vm, kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_ITS).unwrap();
        let kind = KVM_VGIC_ITS_ADDR_TYPE.into();
        set_attribute(&its, KVM_DEV_ARM_VGIC_GRP_ADDR, kind, ITS).unwrap();
        let init = KVM_DEV_ARM_VGIC_CTRL_INIT.into();
        set_attribute(&its, KVM_DEV_ARM_VGIC_GRP_CTRL, init, 0).unwrap();
        // MAPD, MAPC, MAPTI and INV of the event. The LPI is of collection 2 of vCPU 0.
        let (valid, device) = (1 << 63, 1u64 << 32);
        let commands = [
            [0x08 | device, 4, valid | (CODE + 0x6_0000), 0],
            [0x09, 0, valid | 2, 0],
            [0x0a | device, 3 | 8193 << 32, 2, 0],
            [0x0c | device, 3, 0, 0],
        ];
        let memory = &self.guest.memory;
        for (n, word) in commands.as_flattened().iter().enumerate() {
            memory.write(0x1_0000 + 8 * n, &word.to_le_bytes());
        }
        // The configuration of the LPI: its priority, and that it is enabled.
        memory.write(0x4_0001, &[0xa1]);
        self.set(0, 26, ITS);
        its
    }

    fn line(&self, intid: u32, level: bool) {
        let line = KVM_ARM_IRQ_TYPE_SPI << KVM_ARM_IRQ_TYPE_SHIFT | intid;
        self.guest.vm.set_irq_line(line, level).unwrap();
    }
}

/// Runs a vCPU until its guest has acknowledged an interrupt. Returns what the guest has read.
fn acknowledged(vcpu: &mut VcpuFd) -> u32 {
    match vcpu.run() {
        Ok(VcpuExit::MmioWrite(DEVICE, data)) => u32::from_le_bytes(data.try_into().unwrap()),
        other => panic!("{other:?}"),
    }
}
