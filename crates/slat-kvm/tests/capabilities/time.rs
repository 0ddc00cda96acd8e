//! Capabilities of clocks.

use crate::Use;
use crate::common::*;
use kvm_bindings::*;
use slat_kvm::ioctl::{Answer, Object};
use slat_kvm::{VcpuExit, abi};

/// Code that enables the guest's clock page at DATA: mov ecx, 0x4b564d01; mov eax, DATA | 1; xor edx, edx; wrmsr; hlt
const USE_CLOCK: &[u8] = &[
    0x66, 0xb9, 0x01, 0x4d, 0x56, 0x4b, 0x66, 0xb8, 0x01, 0x30, 0x00, 0x00, 0x66, 0x31, 0xd2, 0x0f,
    0x30, 0xf4,
];

pub const USES: &[Use] = &[
    (KVM_CAP_CLOCKSOURCE, |_| {
        let guest = halts(USE_CLOCK);
        let mut page = [0; 32];
        guest.memory.read(DATA, &mut page);
        assert_ne!(page, [0; 32]);
    }),
    (KVM_CAP_ADJUST_CLOCK, |flags| {
        let vm = vm();
        let mut clock = vm.get_clock().unwrap();
        assert_eq!(clock.flags, flags as u32);
        clock.clock += 1 << 50;
        vm.set_clock(&clock).unwrap();
        assert!(vm.get_clock().unwrap().clock >= clock.clock);
    }),
    (KVM_CAP_KVMCLOCK_CTRL, |_| {
        let guest = halts(USE_CLOCK);
        guest.vcpu.kvmclock_ctrl().unwrap();
        assert!(Guest::new(SPIN).vcpu.kvmclock_ctrl().is_err());
    }),
    (KVM_CAP_ENFORCE_PV_FEATURE_CPUID, |_| {
        let mut guest = Guest::new(USE_CLOCK);
        // The guest's CPUID offers no feature of KVM.
        forget_features(&guest.vcpu);
        let cap = |on| {
            let mut cap = kvm_enable_cap {
                cap: KVM_CAP_ENFORCE_PV_FEATURE_CPUID,
                ..Default::default()
            };
            cap.args[0] = on;
            cap
        };
        guest.vcpu.enable_cap(&cap(1)).unwrap();
        // The guest's handler of #GP halts.
        guest.memory.write(13 * 4, &[0x00, 0x20, 0, 0]);
        guest.memory.write(0x2000, &[0xf4]);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(guest.vcpu.get_regs().unwrap().rip, 0x2001);
        guest.vcpu.enable_cap(&cap(0)).unwrap();
        start_at_code(&guest.vcpu);
        assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
        assert_eq!(
            guest.vcpu.get_regs().unwrap().rip,
            CODE + USE_CLOCK.len() as u64
        );
    }),
    (KVM_CAP_STEAL_TIME, |_| {
        let mut guest = Guest::new(&[0xf4]);
        assert!(set_msr(&guest.vcpu, 0x4b56_4d03, DATA | 1));
        run_until_told_of_steal_time(&mut guest);
    }),
    (KVM_CAP_X86_APIC_BUS_CYCLES_NS, |default| {
        const CAP: u32 = KVM_CAP_X86_APIC_BUS_CYCLES_NS;
        const MILLISECOND: u64 = 1_000_000;
        assert_eq!(default, 1);
        assert_eq!(enable(&vm(), CAP, MILLISECOND), Err(libc::ENXIO));
        let guest = Guest::with(SPIN, |vm| {
            vm.create_irq_chip().unwrap();
            for bad in [0, u64::MAX] {
                assert_eq!(enable(vm, CAP, bad), Err(libc::EINVAL));
            }
            assert_eq!(enable(vm, CAP, MILLISECOND), Ok(()));
            assert_eq!(vm.check_extension_raw(CAP.into()), MILLISECOND as i32);
        });
        assert_eq!(enable(&guest.vm, CAP, 1), Err(libc::EINVAL));
        // Starts the APIC's timer, with its interrupt masked, for a minute. It counts once in each millisecond.
        let mut lapic = guest.vcpu.get_lapic().unwrap();
        let mut set = |register: usize, value: u32| {
            for (to, byte) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
                *to = byte as _;
            }
        };
        set(0x320, 1 << 16);
        set(0x3e0, 0xb);
        set(0x380, 60_000);
        set(0x390, 60_000);
        guest.vcpu.set_lapic(&lapic).unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        let lapic = guest.vcpu.get_lapic().unwrap();
        let current = [0x390, 0x391].map(|at| lapic.regs[at] as u8);
        let current = u16::from_le_bytes(current);
        assert!((1..=59_980).contains(&current), "{current}");
    }),
    (KVM_CAP_GET_TSC_KHZ, |_| {
        assert!(Guest::new(SPIN).vcpu.get_tsc_khz().unwrap() > 1000);
    }),
    (KVM_CAP_TSC_CONTROL, |_| {
        let (_, vcpu) = objects();
        vcpu.ioctl(abi::KVM_SET_TSC_KHZ, 1_000_000).unwrap();
        let khz = vcpu.ioctl(abi::KVM_GET_TSC_KHZ, 0);
        assert!(matches!(khz, Ok(Answer::Value(1_000_000))));
    }),
    (KVM_CAP_VM_TSC_CONTROL, |_| {
        let vm = create(&Object::system(), abi::KVM_CREATE_VM, 0).0;
        vm.ioctl(abi::KVM_SET_TSC_KHZ, 1_000_000).unwrap();
        let (vcpu, _) = create(&vm, abi::KVM_CREATE_VCPU, 1);
        let khz = vcpu.ioctl(abi::KVM_GET_TSC_KHZ, 0);
        assert!(matches!(khz, Ok(Answer::Value(1_000_000))));
        let late = vm.ioctl(abi::KVM_SET_TSC_KHZ, 1_000_000).unwrap_err();
        assert_eq!(late.errno(), libc::EINVAL);
    }),
    (KVM_CAP_VCPU_ATTRIBUTES, |_| {
        let (_, vcpu) = objects();
        let mut offset = 0u64;
        let mut attribute = kvm_device_attr {
            group: KVM_VCPU_TSC_CTRL,
            attr: KVM_VCPU_TSC_OFFSET.into(),
            addr: &raw mut offset as u64,
            ..Default::default()
        };
        let address = &raw mut attribute as u64;
        for request in [
            abi::KVM_HAS_DEVICE_ATTR,
            abi::KVM_GET_DEVICE_ATTR,
            abi::KVM_SET_DEVICE_ATTR,
        ] {
            vcpu.ioctl(request, address).unwrap();
        }
        assert_ne!(offset, 0);
    }),
    (KVM_CAP_TSC_DEADLINE_TIMER, |_| {
        let guest = Guest::with(SPIN, |vm| vm.create_irq_chip().unwrap());
        let mut lapic = guest.vcpu.get_lapic().unwrap();
        lapic.regs[0x322] = 4;
        guest.vcpu.set_lapic(&lapic).unwrap();
        let deadline = kvm_msr_entry {
            index: 0x6e0,
            data: u64::MAX >> 1,
            ..Default::default()
        };
        let mut msrs = Msrs::from_entries(&[deadline]).unwrap();
        assert_eq!(guest.vcpu.set_msrs(&msrs).unwrap(), 1);
        msrs.as_mut_slice()[0].data = 0;
        assert_eq!(guest.vcpu.get_msrs(&mut msrs).unwrap(), 1);
        assert_eq!(msrs.as_slice()[0].data, deadline.data);
    }),
];

/// With KVM_CLOCK_REALTIME, KVM_SET_CLOCK adds the time that has passed since the given wall-clock time. It never
/// subtracts.
#[test]
fn a_clock_goes_on_from_a_moment_of_the_wall_clock() {
    const SECOND: u64 = 1_000_000_000;
    let vm = vm();
    let now = vm.get_clock().unwrap();
    for (back, expected) in [
        (100 * SECOND, 100 * SECOND),
        (0u64.wrapping_sub(100 * SECOND), 0),
    ] {
        let data = kvm_clock_data {
            clock: 1 << 50,
            flags: KVM_CLOCK_REALTIME,
            realtime: now.realtime.wrapping_sub(back),
            ..Default::default()
        };
        vm.set_clock(&data).unwrap();
        let since = vm.get_clock().unwrap().clock - (1 << 50);
        assert!(
            (expected..expected + 30 * SECOND).contains(&since),
            "{back}: {since}"
        );
    }
    let unknown = kvm_clock_data {
        flags: 1 << 5,
        ..Default::default()
    };
    assert_eq!(vm.set_clock(&unknown).unwrap_err().errno(), libc::EINVAL);
}

/// The page of the guest's clock follows KVM_SET_CLOCK.
#[test]
fn a_guest_sees_the_clock_that_was_set() {
    let mut guest = halts(USE_CLOCK);
    let nanoseconds = |guest: &Guest| {
        let mut bytes = [0; 8];
        guest.memory.read(DATA + 16, &mut bytes);
        u64::from_le_bytes(bytes)
    };
    assert!(nanoseconds(&guest) < 1 << 50);
    let data = kvm_clock_data {
        clock: 1 << 50,
        ..Default::default()
    };
    guest.vm.set_clock(&data).unwrap();
    // Starts the guest's code again: there is no code after its HLT.
    let mut regs = guest.vcpu.get_regs().unwrap();
    regs.rip = CODE;
    guest.vcpu.set_regs(&regs).unwrap();
    assert!(matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt));
    assert!(nanoseconds(&guest) >= 1 << 50);
}
