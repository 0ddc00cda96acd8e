//! vCPUs that execute small guests.

use super::memory::Memory;
use kvm_bindings::*;
use slat_kvm::{Kvm, VcpuExit, VcpuFd, VmFd};
use std::arch::global_asm;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// The guest-physical address of the guests' code, and that of a device.
pub const CODE: u64 = 0x4000_0000;
pub const SIZE: usize = 0x20_0000;
pub const DEVICE: u64 = 0x0900_0000;

pub const X0: u64 = KVM_REG_ARM64 | KVM_REG_SIZE_U64 | KVM_REG_ARM_CORE as u64;
pub const PC: u64 = X0 | 64;

pub fn system(op0: u64, op1: u64, crn: u64, crm: u64, op2: u64) -> u64 {
    let name = op0 << 14 | op1 << 11 | crn << 7 | crm << 3 | op2;
    KVM_REG_ARM64 | KVM_REG_SIZE_U64 | u64::from(KVM_REG_ARM64_SYSREG) | name
}

pub fn get(vcpu: &VcpuFd, register: u64) -> u64 {
    let mut value = [0; 8];
    assert_eq!(vcpu.get_one_reg(register, &mut value).unwrap(), 8);
    u64::from_le_bytes(value)
}

pub fn set(vcpu: &VcpuFd, register: u64, value: u64) {
    vcpu.set_one_reg(register, &value.to_le_bytes()).unwrap();
}

/// A VM with memory, which begins with a guest's code.
pub struct Guest {
    pub vm: VmFd,
    pub memory: Memory,
}

impl Guest {
    pub fn new(code: &[u8]) -> Self {
        let vm = Kvm::new().unwrap().create_vm_with_ipa_size(0).unwrap();
        let memory = Memory::new(SIZE);
        memory.write(0, code);
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: KVM_MEM_LOG_DIRTY_PAGES,
            guest_phys_addr: CODE,
            memory_size: SIZE as u64,
            userspace_addr: memory.address(),
        };
        // SAFETY: the memory lives as long as the VM.
        unsafe { vm.set_user_memory_region(region) }.unwrap();
        Guest { vm, memory }
    }

    pub fn vcpu(&self, id: u64, features: u32) -> VcpuFd {
        let vcpu = self.vm.create_vcpu(id).unwrap();
        let mut init = kvm_vcpu_init::default();
        self.vm.get_preferred_target(&mut init).unwrap();
        init.features[0] = features | 1 << KVM_ARM_VCPU_PSCI_0_2;
        vcpu.vcpu_init(&init).unwrap();
        set(&vcpu, PC, CODE);
        vcpu
    }
}

/// Returns the code between two symbols of this program.
macro_rules! code {
    ($start:ident, $end:ident) => {{
        unsafe extern "C" {
            static $start: u8;
            static $end: u8;
        }
        // SAFETY: both symbols are of one piece of code in this program.
        unsafe {
            let start = &raw const $start;
            let len = (&raw const $end).offset_from(start) as usize;
            std::slice::from_raw_parts(start, len)
        }
    }};
}
pub(crate) use code;

global_asm!(
    r"
    .pushsection .rodata
    .balign 4
    .globl slat_test_devices
slat_test_devices:
    mov x1, #0x09000000
    mov w0, #42
    str w0, [x1]
    ldr w2, [x1, #4]
    add w0, w0, w2
    strh w0, [x1, #8]
    ldrsb x5, [x1, #12]
    adr x3, slat_test_devices
    str x0, [x3, #0x100]
    mov x0, #0x84000000
    add x0, x0, #8
    hvc #0
    .globl slat_test_devices_end
slat_test_devices_end:
    .popsection
    "
);

#[test]
fn a_guest_uses_devices_and_memory_and_switches_itself_off() {
    let guest = Guest::new(code!(slat_test_devices, slat_test_devices_end));
    let mut vcpu = guest.vcpu(0, 0);
    assert!(matches!(
        vcpu.run(),
        Ok(VcpuExit::MmioWrite(DEVICE, [42, 0, 0, 0]))
    ));
    match vcpu.run() {
        Ok(VcpuExit::MmioRead(address, data)) => {
            assert_eq!((address, data.len()), (DEVICE + 4, 4));
            data.copy_from_slice(&[7, 1, 0, 0]);
        }
        other => panic!("{other:?}"),
    }
    // The sum 42 + 0x107.
    match vcpu.run() {
        Ok(VcpuExit::MmioWrite(address, data)) => {
            assert_eq!((address, data), (DEVICE + 8, &[0x31, 1][..]));
        }
        other => panic!("{other:?}"),
    }
    match vcpu.run() {
        Ok(VcpuExit::MmioRead(address, data)) => {
            assert_eq!((address, data.len()), (DEVICE + 12, 1));
            data[0] = 0x80;
        }
        other => panic!("{other:?}"),
    }
    match vcpu.run() {
        Ok(VcpuExit::SystemEvent(KVM_SYSTEM_EVENT_SHUTDOWN, [0])) => {}
        other => panic!("{other:?}"),
    }
    assert_eq!(get(&vcpu, X0 | (2 * 5)), -128i64 as u64);
    assert_eq!(guest.memory.load(0x100), 0x131);
    let dirty = guest.vm.get_dirty_log(0, SIZE).unwrap();
    assert_eq!(dirty[0], 1);
    assert!(dirty[1..].iter().all(|word| *word == 0));
}

global_asm!(
    r"
    .pushsection .rodata
    .balign 4
    .globl slat_test_two
slat_test_two:
    // Starts vCPU 1 by CPU_ON, at the label `1:` with 5 as its argument. Then waits until vCPU 1 has stored its word.
    movz x0, #0xc400, lsl #16
    add x0, x0, #3
    mov x1, #1
    adr x2, 1f
    mov x3, #5
    hvc #0
    adr x4, slat_test_two
    add x4, x4, #0x1000
2:  yield
    ldar w5, [x4]
    cbz w5, 2b
    mov x6, #0x09000000
    stp w0, w5, [x4, #8]
    str w5, [x6]
    // Adds the number of the vCPU to its argument X0, and waits for the test. Then SYSTEM_OFF.
1:  adr x4, slat_test_two
    add x4, x4, #0x1000
    mrs x7, mpidr_el1
    add w0, w0, w7
    stlr w0, [x4]
3:  yield
    ldar w5, [x4]
    cbnz w5, 3b
    movz x0, #0x8400, lsl #16
    add x0, x0, #8
    hvc #0
    .globl slat_test_two_end
slat_test_two_end:
    .popsection
    "
);

#[test]
fn a_guest_starts_its_second_processor() {
    let guest = Guest::new(code!(slat_test_two, slat_test_two_end));
    let mut first = guest.vcpu(0, 0);
    let mut second = guest.vcpu(1, 1 << KVM_ARM_VCPU_POWER_OFF);
    assert_eq!(
        second.get_mp_state().unwrap().mp_state,
        KVM_MP_STATE_STOPPED
    );
    std::thread::scope(|scope| {
        let second = scope.spawn(move || match second.run() {
            Ok(VcpuExit::SystemEvent(kind, _)) => kind,
            other => panic!("{other:?}"),
        });
        match first.run() {
            Ok(VcpuExit::MmioWrite(DEVICE, data)) => assert_eq!(data, [6, 0, 0, 0x80]),
            other => panic!("{other:?}"),
        }
        assert_eq!(guest.memory.load(0x1008), 0, "CPU_ON succeeds");
        guest.memory.word(0x1000).store(0, Ordering::SeqCst);
        assert_eq!(second.join().unwrap(), KVM_SYSTEM_EVENT_SHUTDOWN);
    });
    // SYSTEM_OFF has switched off both vCPUs.
    assert_eq!(first.get_mp_state().unwrap().mp_state, KVM_MP_STATE_STOPPED);
}

global_asm!(
    r"
    .pushsection .rodata
    .balign 64
    .globl slat_test_code
slat_test_code:
    cbnz x20, 2f
    // The first vCPU makes the function return 3, and tells the test.
    adr x1, 9f
    movz w0, #0x5280, lsl #16
    movk w0, #0x0060
    str w0, [x1]
    dsb ish
    ic ivau, x1
    dsb ish
    isb
    str w0, [x21]
    // The second vCPU calls the function before and after it waits.
2:  bl 9f
    str w0, [x21]
    wfi
    bl 9f
    str w0, [x21]
9:  mov w0, #2
    ret
    .globl slat_test_code_end
slat_test_code_end:
    .popsection
    "
);

#[test]
fn a_sleeping_vcpu_drops_code_that_another_has_invalidated() {
    let guest = Guest::new(code!(slat_test_code, slat_test_code_end));
    let [mut first, mut second] = [0, 1].map(|id| {
        let vcpu = guest.vcpu(id, 0);
        set(&vcpu, X0 + 2 * 20, id);
        set(&vcpu, X0 + 2 * 21, DEVICE);
        vcpu
    });
    let written = |vcpu: &mut VcpuFd| match vcpu.run() {
        Ok(VcpuExit::MmioWrite(DEVICE, data)) => u32::from_le_bytes(data.try_into().unwrap()),
        other => panic!("{other:?}"),
    };
    assert_eq!(written(&mut second), 2);
    std::thread::scope(|scope| {
        let second = scope.spawn(move || written(&mut second));
        std::thread::sleep(Duration::from_millis(100));
        written(&mut first);
        let line = KVM_ARM_IRQ_TYPE_CPU << KVM_ARM_IRQ_TYPE_SHIFT
            | 1 << KVM_ARM_IRQ_VCPU_SHIFT
            | KVM_ARM_IRQ_CPU_IRQ;
        guest.vm.set_irq_line(line, true).unwrap();
        assert_eq!(second.join().unwrap(), 3);
    });
}

#[test]
fn registers_are_listed_and_can_be_saved_and_restored() {
    let guest = Guest::new(&[]);
    let vcpu = guest.vm.create_vcpu(0).unwrap();
    let mut list = RegList::new(500).unwrap();
    assert_eq!(
        vcpu.get_reg_list(&mut list).unwrap_err().errno(),
        libc::ENOEXEC
    );
    drop(vcpu);
    let vcpu = guest.vcpu(1, 0);
    vcpu.get_reg_list(&mut list).unwrap();
    let saved: Vec<_> = list
        .as_slice()
        .iter()
        .map(|id| {
            let mut value = [0; 16];
            let len = vcpu.get_one_reg(*id, &mut value).unwrap();
            (*id, value, len)
        })
        .collect();
    assert!(saved.len() > 100, "{}", saved.len());
    for (id, value, len) in saved {
        let set = vcpu.set_one_reg(id, &value[..len]);
        assert_eq!(set.map_err(|error| error.errno()), Ok(len), "{id:#x}");
    }
    let mut few = RegList::new(3).unwrap();
    assert_eq!(
        vcpu.get_reg_list(&mut few).unwrap_err().errno(),
        libc::E2BIG
    );
    let ttbr0 = system(3, 0, 2, 0, 0);
    set(&vcpu, ttbr0, 0x1234_5000);
    assert_eq!(get(&vcpu, ttbr0), 0x1234_5000);
    // MPIDR_EL1: the affinity of vCPU 1.
    assert_eq!(get(&vcpu, system(3, 0, 0, 0, 5)), 0x8000_0001);
    let unknown = vcpu.get_one_reg(system(3, 7, 15, 15, 7), &mut [0; 8]);
    assert_eq!(unknown.unwrap_err().errno(), libc::ENOENT);
}

#[test]
fn the_os_lock_that_a_guest_has_opened_is_restored_and_nothing_else_of_its_register_changes() {
    const EXISTS: u64 = 1 << 3;
    const LOCKED: u64 = 1 << 1;
    let oslsr = system(2, 0, 1, 1, 4);
    let guest = Guest::new(&[]);
    let vcpu = guest.vcpu(0, 0);
    assert_eq!(get(&vcpu, oslsr), EXISTS | LOCKED);
    set(&vcpu, oslsr, EXISTS);
    assert_eq!(get(&vcpu, oslsr), EXISTS);
    for value in [0, EXISTS | 1] {
        let set = vcpu.set_one_reg(oslsr, &u64::to_le_bytes(value));
        assert_eq!(set.unwrap_err().errno(), libc::EINVAL, "{value:#x}");
    }
    set(&vcpu, oslsr, EXISTS | LOCKED);
    assert_eq!(get(&vcpu, oslsr), EXISTS | LOCKED);
}

#[test]
fn a_client_sets_the_virtual_and_the_physical_counter_of_a_vm() {
    let guest = Guest::new(&[]);
    let vcpus = [0, 1].map(|id| guest.vcpu(id, 0));
    // KVM_REG_ARM_TIMER_CNT and KVM_REG_ARM_PTIMER_CNT.
    let counters = [system(3, 3, 14, 3, 2), system(3, 3, 14, 0, 1)];
    set(&vcpus[0], counters[0], 1 << 60);
    set(&vcpus[0], counters[1], 1 << 61);
    for vcpu in &vcpus {
        assert_eq!(counters.map(|counter| get(vcpu, counter) >> 60), [1, 2]);
    }
}

#[test]
fn a_system_error_without_a_syndrome_can_be_saved_and_restored() {
    let guest = Guest::new(&[]);
    let vcpu = guest.vcpu(0, 0);
    let mut events = kvm_vcpu_events::default();
    events.exception.serror_pending = 1;
    vcpu.set_vcpu_events(&events).unwrap();
    let saved = vcpu.get_vcpu_events().unwrap();
    // IDS says that the syndrome has no meaning.
    assert_eq!(saved.exception.serror_esr, 1 << 24);
    vcpu.set_vcpu_events(&saved).unwrap();
    let mut bad = saved;
    bad.exception.serror_esr = 1 << 25;
    assert_eq!(
        vcpu.set_vcpu_events(&bad).unwrap_err().errno(),
        libc::EINVAL
    );
}

// A kernel that looks for a debugger's console: writes a character, and asks whether it was taken. Writes the answer,
// or the syndrome of an exception, to the device.
global_asm!(
    r"
    .pushsection .rodata
    .balign 2048
    .globl slat_test_console
slat_test_console:
    mov x1, #0x09000000
    adr x0, slat_test_console
    msr vbar_el1, x0
    mov x0, #10
    msr dbgdtrtx_el0, x0
    mrs x0, mdccsr_el0
    str w0, [x1]
    .org slat_test_console + 0x200
    mrs x0, esr_el1
    str w0, [x1]
    .globl slat_test_console_end
slat_test_console_end:
    .popsection
    "
);

#[test]
fn a_guest_finds_no_console_of_a_debugger() {
    let guest = Guest::new(code!(slat_test_console, slat_test_console_end));
    let mut vcpu = guest.vcpu(0, 0);
    let exit = vcpu.run();
    assert!(
        matches!(exit, Ok(VcpuExit::MmioWrite(DEVICE, [0, 0, 0, 0]))),
        "{exit:?}"
    );
}
