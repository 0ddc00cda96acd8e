//! Capabilities of the system, VMs and vCPUs as objects.

use crate::Use;
use crate::common::*;
use kvm_bindings::*;
use slat_kvm::ioctl::Answer;
use slat_kvm::{Kvm, VmFd, abi};

pub const USES: &[Use] = &[
    (KVM_CAP_DEVICE_CTRL, |_| {
        let mut device = kvm_create_device {
            type_: kvm_device_type_KVM_DEV_TYPE_VFIO,
            ..Default::default()
        };
        let attribute = kvm_device_attr {
            group: KVM_DEV_VFIO_FILE,
            attr: KVM_DEV_VFIO_FILE_ADD.into(),
            ..Default::default()
        };
        let device = vm().create_device(&mut device).unwrap();
        device.has_device_attr(&attribute).unwrap();
    }),
    (KVM_CAP_NR_VCPUS, |recommended| {
        let vm = vm();
        for id in 0..recommended as u64 {
            vm.create_vcpu(id).unwrap();
        }
    }),
    (KVM_CAP_MAX_VCPUS, |most| {
        let vm = vm();
        let vcpus: Vec<_> = (0..most as u64)
            .map(|id| vm.create_vcpu(id).unwrap())
            .collect();
        assert!(vm.create_vcpu(most as u64).is_err());
        drop(vcpus);
    }),
    (KVM_CAP_MAX_VCPU_ID, |end| {
        let limit = |vm: &VmFd, limit: u64| enable(vm, KVM_CAP_MAX_VCPU_ID, limit);
        let one = vm();
        one.create_vcpu(end as u64 - 1).unwrap();
        assert!(one.create_vcpu(end as u64).is_err());
        // The creation of the first vCPU has fixed the limit.
        assert_eq!(limit(&one, end as u64), Ok(()));
        assert_eq!(limit(&one, 0), Err(libc::EINVAL));
        let other = vm();
        // The value 0 sets no limit. The first other value is kept.
        assert_eq!(limit(&other, 0), Ok(()));
        assert_eq!(limit(&other, end as u64 + 1), Err(libc::EINVAL));
        assert_eq!(limit(&other, 2), Ok(()));
        assert_eq!(limit(&other, 2), Ok(()));
        assert_eq!(limit(&other, 0), Err(libc::EINVAL));
        assert!(other.create_vcpu(2).is_err());
    }),
    (KVM_CAP_ENABLE_CAP, |_| {
        let (_, vcpu) = objects();
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_ENFORCE_PV_FEATURE_CPUID,
            ..Default::default()
        };
        vcpu.ioctl(abi::KVM_ENABLE_CAP, &raw const cap as u64)
            .unwrap();
        cap.cap = 10_000;
        let refused = vcpu.ioctl(abi::KVM_ENABLE_CAP, &raw const cap as u64);
        assert_eq!(refused.unwrap_err().errno(), libc::EINVAL);
    }),
    (KVM_CAP_ENABLE_CAP_VM, |_| {
        assert_eq!(enable(&vm(), KVM_CAP_MAX_VCPU_ID, 7), Ok(()));
    }),
    (KVM_CAP_CHECK_EXTENSION_VM, |_| {
        let (vm, _) = objects();
        let Ok(Answer::Value(slots)) =
            vm.ioctl(abi::KVM_CHECK_EXTENSION, KVM_CAP_NR_MEMSLOTS.into())
        else {
            panic!()
        };
        assert!(slots > 0);
    }),
    (KVM_CAP_DISABLE_QUIRKS, |_| {
        assert_eq!(enable(&vm(), KVM_CAP_DISABLE_QUIRKS, u64::MAX), Ok(()));
    }),
    (KVM_CAP_DISABLE_QUIRKS2, |quirks| {
        assert_eq!(
            enable(&vm(), KVM_CAP_DISABLE_QUIRKS2, quirks as u64),
            Ok(())
        );
    }),
    (KVM_CAP_BINARY_STATS_FD, |_| {
        assert!(!vm().get_stats_fd().unwrap().values().unwrap().is_empty());
    }),
    (KVM_CAP_VM_TYPES, |types| {
        for vm_type in (0..32).filter(|bit| types >> bit & 1 != 0) {
            Kvm::new().unwrap().create_vm_with_type(vm_type).unwrap();
        }
    }),
];
