//! The interrupt controllers: guests that take interrupts, and device attributes.

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

const V2: u32 = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V2;
const V3: u32 = kvm_device_type_KVM_DEV_TYPE_ARM_VGIC_V3;

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

#[test]
fn all_vcpus_see_whether_the_gic_has_system_registers() {
    for (model, expected) in [(Some(V3), 1), (Some(V2), 0), (None, 0)] {
        let code = code!(slat_test_gic_field, slat_test_gic_field_end);
        let guest = Guest::new(code);
        let device = model.map(|model| create(&guest.vm, model).unwrap());
        let mut first = guest.vcpu(0, 0);
        let mut second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
        if let (Some(model), Some(device)) = (model, &device) {
            place(model, device);
        }
        std::thread::scope(|scope| {
            let second = scope.spawn(|| acknowledged(&mut second));
            assert_eq!(acknowledged(&mut first), expected, "{model:?}");
            assert_eq!(second.join().unwrap(), expected, "{model:?}");
        });
    }
}

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

fn create(vm: &VmFd, type_: u32) -> Result<DeviceFd, i32> {
    let mut device = kvm_create_device {
        type_,
        ..Default::default()
    };
    vm.create_device(&mut device).map_err(|error| error.errno())
}

/// Sets the addresses of a GIC, and initialises it.
fn place(model: u32, device: &DeviceFd) {
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

#[test]
fn a_vcpu_sends_sgis_to_itself_and_to_another() {
    // INTID 5 to both vCPUs: ICC_SGI1R_EL1, and GICD_SGIR. GICv2 shows the source, which is vCPU 0.
    for (model, sgi) in [(V3, 5 << 24 | 0b11), (V2, 5 | 0b11 << 16)] {
        let mut gic = Gic::new(model, 2);
        gic.set(0, 22, sgi);
        let [first, second] = &mut gic.vcpus[..] else {
            unreachable!();
        };
        std::thread::scope(|scope| {
            let second = scope.spawn(|| acknowledged(second));
            assert_eq!(acknowledged(first), 5);
            assert_eq!(second.join().unwrap(), 5);
        });
    }
}

#[test]
fn a_line_wakes_a_waiting_vcpu() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 23, 1 << 1);
        let mut vcpu = gic.vcpus.pop().unwrap();
        std::thread::scope(|scope| {
            let taken = scope.spawn(move || [acknowledged(&mut vcpu), acknowledged(&mut vcpu)]);
            for _ in 0..2 {
                std::thread::sleep(Duration::from_millis(100));
                gic.line(33, true);
                gic.line(33, false);
            }
            assert_eq!(taken.join().unwrap(), [33, 33]);
        });
    }
}

#[test]
fn an_acknowledged_interrupt_is_not_taken_again() {
    let code = code!(slat_test_gic_nested, slat_test_gic_nested_end);
    let mut gic = Gic::with_code(V3, 1, code, |_| ());
    gic.set(0, 23, 1 << 1);
    gic.line(33, true);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
}

#[test]
fn the_virtual_timer_ends_a_wfi() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 24, 1 << 27);
        gic.set(0, 25, 10_000);
        assert_eq!(acknowledged(&mut gic.vcpus[0]), 27);
        let run = gic.vcpus[0].get_kvm_run();
        // SAFETY: the registers are integers.
        assert_eq!(unsafe { run.s.regs.device_irq_level }, 0);
    }
}

#[test]
fn the_client_chooses_the_timers_ppis_until_a_vcpu_runs() {
    let mut gic = Gic::new(V3, 1);
    let mut ppi = 20u64;
    let timer = |attr: u32, value: &mut u64| attribute(KVM_ARM_VCPU_TIMER_CTRL, attr.into(), value);
    let change = |vcpu: &VcpuFd, attr, value: &mut u64| {
        vcpu.set_device_attr(&timer(attr, value))
            .map_err(|error| error.errno())
    };
    let vcpu = &gic.vcpus[0];
    vcpu.has_device_attr(&timer(KVM_ARM_VCPU_TIMER_IRQ_PTIMER, &mut ppi))
        .unwrap();
    let virtual_timer = KVM_ARM_VCPU_TIMER_IRQ_VTIMER;
    assert_eq!(change(vcpu, virtual_timer, &mut 15), Err(libc::EINVAL));
    assert_eq!(change(vcpu, 7, &mut ppi), Err(libc::ENXIO));
    change(vcpu, virtual_timer, &mut ppi).unwrap();
    gic.set(0, 24, 1 << 20);
    gic.set(0, 25, 1000);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 20);
    assert_eq!(
        change(&gic.vcpus[0], virtual_timer, &mut ppi),
        Err(libc::EBUSY)
    );
}

#[test]
fn irqfds_are_interrupts() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 23, 1 << 1);
        let fd = EventFd::new(0).unwrap();
        gic.guest.vm.register_irqfd(&fd, 1).unwrap();
        fd.write(1).unwrap();
        assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
    }
}

#[test]
fn resampled_irqfds_learn_of_the_ends_of_their_interrupts() {
    for model in [V3, V2] {
        let mut gic = Gic::new(model, 1);
        gic.set(0, 23, 1 << 1);
        // INTID 33 is level-triggered.
        let group = KVM_DEV_ARM_VGIC_GRP_DIST_REGS;
        set_attribute(&gic.device, group, 0xc08, 0).unwrap();
        let (fd, resample) = (EventFd::new(0).unwrap(), EventFd::new(0).unwrap());
        let vm = &gic.guest.vm;
        vm.register_irqfd_with_resample(&fd, &resample, 1).unwrap();
        fd.write(1).unwrap();
        let vcpu = &mut gic.vcpus[0];
        assert_eq!(acknowledged(vcpu), 33);
        // The guest writes EOI, and waits. The client's device wants the line again.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                assert_eq!(resample.read().unwrap(), 1);
                fd.write(1).unwrap();
            });
            assert_eq!(acknowledged(vcpu), 33);
        });
    }
}

#[test]
fn messages_become_lpis() {
    let mut gic = Gic::new(V3, 1);
    let _its = gic.add_its();
    let message = |flags, address: u64, data| kvm_msi {
        address_lo: address as u32,
        address_hi: (address >> 32) as u32,
        data,
        flags,
        devid: 1,
        ..Default::default()
    };
    let vm = &gic.guest.vm;
    let send = |message| vm.signal_msi(message).map_err(|error| error.errno());
    let valid = KVM_MSI_VALID_DEVID;
    let early = send(message(valid, TRANSLATER, 3));
    assert_eq!(early, Err(libc::EBUSY), "ITS disabled");
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 0, "the guest is ready");
    assert_eq!(send(message(0, TRANSLATER, 3)), Err(libc::EINVAL));
    assert_eq!(send(message(valid, DEVICE, 3)), Err(libc::EINVAL));
    assert_eq!(send(message(valid, TRANSLATER, 4)), Ok(0), "not mapped");
    assert_eq!(send(message(valid, TRANSLATER, 3)), Ok(1));
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 8193);
    // The same message by a route.
    let mut route = kvm_irq_routing_entry {
        gsi: 9,
        type_: KVM_IRQ_ROUTING_MSI,
        flags: KVM_MSI_VALID_DEVID,
        ..Default::default()
    };
    route.u.msi.address_lo = TRANSLATER as u32;
    route.u.msi.data = 3;
    route.u.msi.__bindgen_anon_1.devid = 1;
    let routes = KvmIrqRouting::from_entries(&[route]).unwrap();
    vm.set_gsi_routing(&routes).unwrap();
    let fd = EventFd::new(0).unwrap();
    vm.register_irqfd(&fd, 9).unwrap();
    fd.write(1).unwrap();
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 8193);
}

#[test]
fn a_dirty_ring_has_the_pages_that_an_its_writes() {
    const DIRTY: u32 = 1;
    let page_size = slat_host::page_size();
    let mut gic = Gic::with(V3, 1, |guest| {
        let mut ring = kvm_enable_cap {
            cap: KVM_CAP_DIRTY_LOG_RING_ACQ_REL,
            ..Default::default()
        };
        ring.args[0] = page_size as u64;
        guest.vm.enable_cap(&ring).unwrap();
        // The memslot has a bitmap. Its next log is in the rings.
        for flags in [0, KVM_MEM_LOG_DIRTY_PAGES] {
            let slot = kvm_userspace_memory_region {
                slot: 0,
                flags,
                guest_phys_addr: CODE,
                memory_size: SIZE as u64,
                userspace_addr: guest.memory.address(),
            };
            // SAFETY: the memory lives as long as the VM.
            unsafe { guest.vm.set_user_memory_region(slot) }.unwrap();
        }
    });
    let _its = gic.add_its();
    // The LPI is pending in the table of vCPU 0. MAPTI takes the bit from the table.
    let pending = 0x5_0000 + 8193 / 8;
    gic.guest.memory.write(pending, &[1 << 1]);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 0, "the guest is ready");
    assert_eq!(gic.guest.memory.load(pending), 0);
    // SAFETY: the call makes a new mapping of the vCPU's descriptor, which has the ring at this offset.
    let ring = unsafe {
        let fd = gic.vcpus[0].as_raw_fd();
        let rights = libc::PROT_READ | libc::PROT_WRITE;
        let offset = 64 * page_size as i64;
        let mapped = libc::mmap(
            std::ptr::null_mut(),
            page_size,
            rights,
            libc::MAP_SHARED,
            fd,
            offset,
        );
        assert_ne!(mapped, libc::MAP_FAILED);
        std::slice::from_raw_parts(mapped.cast::<kvm_dirty_gfn>(), page_size / 16)
    };
    let page = (pending / page_size) as u64;
    let noted = ring.iter().filter(|entry| entry.flags == DIRTY);
    let noted: Vec<_> = noted.map(|entry| entry.offset).collect();
    assert!(noted.contains(&page), "{noted:x?}");
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 8193);
}

#[test]
fn a_client_does_not_drive_the_ppis_of_the_timers() {
    let mut gic = Gic::new(V3, 1);
    gic.set(0, 24, 1 << 27 | 1 << 20);
    gic.set(0, 23, 1 << 1);
    gic.line(33, true);
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
    let ppi = KVM_ARM_IRQ_TYPE_PPI << KVM_ARM_IRQ_TYPE_SHIFT;
    gic.guest.vm.set_irq_line(ppi | 27, true).unwrap();
    gic.guest.vm.set_irq_line(ppi | 20, true).unwrap();
    let group = KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO;
    assert_eq!(get_attribute(&gic.device, group, 0), Ok(1 << 20));
}

#[test]
fn a_client_repairs_timers_with_the_same_ppi() {
    let mut gic = Gic::new(V3, 1);
    gic.set(0, 23, 1 << 1);
    gic.line(33, true);
    let change = |vcpu: &VcpuFd, mut ppi: u64| {
        let virtual_timer = KVM_ARM_VCPU_TIMER_IRQ_VTIMER.into();
        let attribute = attribute(KVM_ARM_VCPU_TIMER_CTRL, virtual_timer, &mut ppi);
        vcpu.set_device_attr(&attribute)
            .map_err(|error| error.errno())
    };
    change(&gic.vcpus[0], 30).unwrap();
    assert_eq!(gic.vcpus[0].run().unwrap_err().errno(), libc::EINVAL);
    change(&gic.vcpus[0], 27).unwrap();
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
}

#[test]
fn a_gicv3_names_vcpus_by_all_fields_of_their_affinity() {
    let vm = Kvm::new().unwrap().create_vm_with_ipa_size(40).unwrap();
    let device = create(&vm, V3).unwrap();
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init).unwrap();
    let vcpus = [0, 1].map(|id| vm.create_vcpu(id).unwrap());
    for vcpu in &vcpus {
        vcpu.vcpu_init(&init).unwrap();
    }
    // vCPU 1 differs from vCPU 0 in Aff3 only.
    set(&vcpus[1], system(3, 0, 0, 0, 5), 1 << 32 | 1 << 31);
    place(V3, &device);
    let group = KVM_DEV_ARM_VGIC_GRP_REDIST_REGS;
    let number = |affinity: u64| {
        let typer = get_attribute(&device, group, affinity << 32 | 8);
        typer.map(|typer| typer >> 8 & 0xffff)
    };
    assert_eq!(number(0), Ok(0));
    assert_eq!(number(1 << 24), Ok(1));
    assert_eq!(number(1), Err(libc::EINVAL));
}

#[test]
fn a_vcpu_that_another_one_starts_has_quiet_timers() {
    let guest = Guest::new(code!(slat_test_gic_field, slat_test_gic_field_end));
    let device = create(&guest.vm, V3).unwrap();
    let mut first = guest.vcpu(0, 0);
    let second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
    place(V3, &device);
    // The virtual timer of vCPU 1 has expired.
    set(&second, system(3, 3, 14, 3, 1), 1);
    let lines = || get_attribute(&device, KVM_DEV_ARM_VGIC_GRP_LEVEL_INFO, 1 << 32);
    assert_eq!(lines(), Ok(1 << 27));
    assert_eq!(acknowledged(&mut first), 1);
    assert_eq!(get(&second, X0), 0);
    assert_eq!(lines(), Ok(0));
}

/// The registers of GICv3 that a client saves for one vCPU, in the order in which it restores them: group and
/// attribute.
fn saved_registers() -> Vec<(u32, u64)> {
    let sysreg = |crn: u64, crm: u64, op2: u64| 3 << 14 | crn << 7 | crm << 3 | op2;
    let redistributor = [0x10080, 0x10100, 0x10200, 0x10300, 0x10c04];
    let distributor = [0x84, 0x104, 0x204, 0x304, 0xc08, 0xc0c, 0];
    let interface = [
        sysreg(12, 12, 5),
        sysreg(12, 12, 4),
        sysreg(4, 6, 0),
        sysreg(12, 12, 3),
        sysreg(12, 9, 0),
        sysreg(12, 12, 7),
    ];
    let priorities = (0..8).map(|n| 0x420 + 4 * n);
    let all = |group, of: Vec<u64>| of.into_iter().map(move |attr| (group, attr));
    all(KVM_DEV_ARM_VGIC_GRP_REDIST_REGS, redistributor.to_vec())
        .chain(all(KVM_DEV_ARM_VGIC_GRP_DIST_REGS, priorities.collect()))
        .chain(all(KVM_DEV_ARM_VGIC_GRP_DIST_REGS, distributor.to_vec()))
        .chain(all(KVM_DEV_ARM_VGIC_GRP_CPU_SYSREGS, interface.to_vec()))
        .collect()
}

#[test]
fn pending_and_active_interrupts_continue_in_another_vm() {
    let mut gic = Gic::new(V3, 1);
    gic.set(0, 23, 1 << 1 | 1 << 2);
    gic.line(33, true);
    // The guest has acknowledged one interrupt, which is active, and another one is pending.
    assert_eq!(acknowledged(&mut gic.vcpus[0]), 33);
    gic.line(34, true);
    gic.vcpus[0].set_kvm_immediate_exit(1);
    assert_eq!(gic.vcpus[0].run().unwrap_err().errno(), libc::EINTR);
    let registers = saved_registers();
    let saved = registers.iter().map(|(group, attr)| {
        let value = get_attribute(&gic.device, *group, *attr);
        (*group, *attr, value.unwrap())
    });
    let saved: Vec<_> = saved.collect();
    let value = |of| saved.iter().find(|(_, attr, _)| *attr == of).unwrap().2;
    assert_eq!((value(0x204), value(0x304)), (1 << 2, 1 << 1));

    let mut other = Gic::new(V3, 1);
    let mut list = RegList::new(500).unwrap();
    gic.vcpus[0].get_reg_list(&mut list).unwrap();
    for id in list.as_slice() {
        let mut value = [0; 16];
        let len = gic.vcpus[0].get_one_reg(*id, &mut value).unwrap();
        other.vcpus[0].set_one_reg(*id, &value[..len]).unwrap();
    }
    for (group, attr, value) in saved {
        set_attribute(&other.device, group, attr, value).unwrap();
    }
    assert_eq!(acknowledged(&mut other.vcpus[0]), 34);
    assert_eq!(get(&other.vcpus[0], X0), 34);
}

#[test]
fn creating_and_addressing_controllers_fails_as_in_kvm() {
    let kvm = Kvm::new().unwrap();
    assert!(kvm.check_extension(Cap::Irqchip));
    let vm = kvm.create_vm_with_ipa_size(40).unwrap();
    let device = create(&vm, V3).unwrap();
    assert_eq!(create(&vm, V3).unwrap_err(), libc::EEXIST);
    assert_eq!(create(&vm, V2).unwrap_err(), libc::EEXIST);
    assert_eq!(vm.create_irq_chip().unwrap_err().errno(), libc::EEXIST);
    let group = KVM_DEV_ARM_VGIC_GRP_ADDR;
    let distributor = KVM_VGIC_V3_ADDR_TYPE_DIST.into();
    let set = |address| set_attribute(&device, group, distributor, address);
    assert_eq!(set(DISTRIBUTOR + 0x1000), Err(libc::EINVAL));
    assert_eq!(set(1 << 40), Err(libc::E2BIG));
    assert_eq!(set(DISTRIBUTOR), Ok(()));
    assert_eq!(set(DISTRIBUTOR), Err(libc::EEXIST));
    assert_eq!(get_attribute(&device, group, distributor), Ok(DISTRIBUTOR));
    let v2 = KVM_VGIC_V2_ADDR_TYPE_CPU.into();
    assert_eq!(set_attribute(&device, group, v2, 0), Err(libc::ENXIO));
    assert_eq!(set_attribute(&device, 77, 0, 0), Err(libc::ENXIO));
    let mut vcpu = vm.create_vcpu(0).unwrap();
    let mut init = kvm_vcpu_init::default();
    vm.get_preferred_target(&mut init).unwrap();
    vcpu.vcpu_init(&init).unwrap();
    assert_eq!(vcpu.run().unwrap_err().errno(), libc::ENXIO);
    let redistributors = KVM_VGIC_V3_ADDR_TYPE_REDIST.into();
    set_attribute(&device, group, redistributors, INTERFACES).unwrap();
    assert_eq!(vcpu.run().unwrap_err().errno(), libc::EBUSY);
    let fd = EventFd::new(0).unwrap();
    assert_eq!(vm.register_irqfd(&fd, 1).unwrap_err().errno(), libc::EAGAIN);
    let spi = KVM_ARM_IRQ_TYPE_SPI << KVM_ARM_IRQ_TYPE_SHIFT;
    let raise = |line| vm.set_irq_line(line, true).unwrap_err().errno();
    assert_eq!(raise(spi | 33), libc::EBUSY);
    let init = KVM_DEV_ARM_VGIC_CTRL_INIT.into();
    set_attribute(&device, KVM_DEV_ARM_VGIC_GRP_CTRL, init, 0).unwrap();
    assert_eq!(vm.create_vcpu(1).unwrap_err().errno(), libc::EBUSY);
    assert_eq!(raise(spi | 31), libc::EINVAL);
    assert_eq!(raise(spi | 1000), libc::EINVAL);
    let ppi = KVM_ARM_IRQ_TYPE_PPI << KVM_ARM_IRQ_TYPE_SHIFT;
    assert_eq!(raise(ppi | 15), libc::EINVAL);
    assert_eq!(raise(ppi | 1 << KVM_ARM_IRQ_VCPU_SHIFT | 20), libc::EINVAL);
    assert_eq!(raise(0), libc::ENXIO, "a processor's line");
}

#[test]
fn a_gicv2_has_eight_vcpus() {
    let vm = Kvm::new().unwrap().create_vm_with_ipa_size(40).unwrap();
    vm.create_irq_chip().unwrap();
    let vcpus: Vec<_> = (0..8).map(|id| vm.create_vcpu(id).unwrap()).collect();
    assert_eq!(vm.create_vcpu(8).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(vcpus.len(), 8);
    let more = Kvm::new().unwrap().create_vm_with_ipa_size(40).unwrap();
    let _vcpus: Vec<_> = (0..9).map(|id| more.create_vcpu(id).unwrap()).collect();
    assert_eq!(create(&more, V2).unwrap_err(), libc::E2BIG);
}
