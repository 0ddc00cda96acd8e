//! Tests calls for which heap memory runs out, at every point of the call. The call returns ENOMEM or succeeds, and
//! can be repeated. It never ends the process.
#![cfg(target_arch = "x86_64")]

mod common;

use common::{Memory, create};
use kvm_bindings::*;
use slat_kvm::abi::*;
use slat_kvm::ioctl::Object;
use slat_model::FailingHeap;

#[global_allocator]
static HEAP: FailingHeap = FailingHeap;

/// Makes a call repeatedly. In call n, allocation n fails, alone or with all later ones. Stops when no allocation
/// fails any more. Returns the largest number of allocations that the call has made.
fn survives(name: &str, call: &mut dyn FnMut() -> Result<(), i32>) -> u32 {
    // If the call ends the process, this line tells which call it was.
    println!("{name}");
    let mut most = 0;
    for stay in [false, true] {
        for n in 0.. {
            let (answer, failed) = FailingHeap::failing(n, stay, &mut *call);
            if !failed {
                assert_eq!(answer, Ok(()), "{name} with enough memory");
                most = most.max(n);
                break;
            }
            let expected = [Ok(()), Err(libc::ENOMEM)];
            assert!(
                expected.contains(&answer),
                "{name}, allocation {n}: {answer:?}"
            );
        }
    }
    most
}

/// Returns the address of a struct, for an ioctl.
fn at<T>(value: &mut T) -> u64 {
    &raw mut *value as u64
}

#[test]
fn every_call_survives_that_there_is_no_memory() {
    let system = Object::system();
    let vm = create(&system, KVM_CREATE_VM, u64::from(KVM_X86_SW_PROTECTED_VM)).0;
    vm.ioctl(KVM_CREATE_IRQCHIP, 0).unwrap();
    let vcpu = create(&vm, KVM_CREATE_VCPU, 0).0;
    let memory = Memory::new(64 << 20);
    let call = |object: &Object, name: &str, request: u32, argument: u64| {
        survives(name, &mut || match object.ioctl(request, argument) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.errno()),
        })
    };

    let slot = |size: u64, flags: u32| kvm_userspace_memory_region {
        slot: 3,
        flags,
        guest_phys_addr: 0,
        memory_size: size,
        userspace_addr: memory.start as u64,
    };
    // Creates a slot, starts its dirty logging, and deletes it. Repeats each step until it succeeds.
    let mut steps = 0;
    for (size, flags) in [(memory.len, 0), (memory.len, KVM_MEM_LOG_DIRTY_PAGES)] {
        let mut region = slot(size as u64, flags);
        steps += call(
            &vm,
            "set a slot",
            KVM_SET_USER_MEMORY_REGION,
            at(&mut region),
        );
    }
    assert!(steps > 0, "a slot needs memory");

    let mut bitmap = vec![0u64; (64 << 20) / 4096 / 64];
    let mut log = kvm_dirty_log {
        slot: 3,
        ..Default::default()
    };
    log.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
    let n = call(&vm, "get the log", KVM_GET_DIRTY_LOG, at(&mut log));
    assert!(n > 0, "the log is gathered in memory");
    let mut clear = kvm_clear_dirty_log {
        slot: 3,
        num_pages: (64 << 20) / 4096,
        ..Default::default()
    };
    clear.__bindgen_anon_1.dirty_bitmap = bitmap.as_mut_ptr().cast();
    call(&vm, "clear the log", KVM_CLEAR_DIRTY_LOG, at(&mut clear));

    call(&vm, "statistics of the VM", KVM_GET_STATS_FD, 0);
    call(&vcpu, "statistics of the vCPU", KVM_GET_STATS_FD, 0);

    let mut cpuid = vec![0u64; 1 + 40 * 256];
    for (object, request) in [
        (&system, KVM_GET_SUPPORTED_CPUID),
        (&vcpu, KVM_SET_CPUID2),
        (&vcpu, KVM_GET_CPUID2),
        (&system, KVM_GET_EMULATED_CPUID),
    ] {
        if request != KVM_SET_CPUID2 {
            cpuid[0] = 256;
        }
        let name = slat_kvm::abi::name(request).unwrap();
        survives(name, &mut || {
            if request == KVM_GET_SUPPORTED_CPUID {
                cpuid[0] = 256;
            }
            match object.ioctl(request, cpuid.as_mut_ptr() as u64) {
                Ok(_) => Ok(()),
                Err(error) => Err(error.errno()),
            }
        });
    }

    let mut list = vec![0u32; 300];
    list[0] = 299;
    let list = list.as_mut_ptr() as u64;
    call(&system, "the list of MSRs", KVM_GET_MSR_INDEX_LIST, list);
    // A `kvm_msrs` with four entries: TSC_ADJUST, MISC_ENABLE, a memory type range, and the clock.
    let mut msrs = [4u64, 0x3b, 0, 0x1a0, 1, 0x200, 6, 0x4b56_4d01, 0];
    for request in [KVM_SET_MSRS, KVM_GET_MSRS] {
        call(&vcpu, "MSRs", request, at(&mut msrs));
    }
    for (get, set) in [
        (KVM_GET_REGS, KVM_SET_REGS),
        (KVM_GET_SREGS, KVM_SET_SREGS),
        (KVM_GET_LAPIC, KVM_SET_LAPIC),
        (KVM_GET_FPU, KVM_SET_FPU),
        (KVM_GET_XSAVE, KVM_SET_XSAVE),
        (KVM_GET_VCPU_EVENTS, KVM_SET_VCPU_EVENTS),
        (KVM_GET_MP_STATE, KVM_SET_MP_STATE),
    ] {
        let mut area = [0u64; 512];
        call(&vcpu, "get state", get, at(&mut area));
        call(&vcpu, "set state", set, at(&mut area));
    }

    let mut init = kvm_msi {
        address_lo: 0xfee0_0000,
        data: 0x500,
        ..Default::default()
    };
    call(&vm, "an interrupt", KVM_SIGNAL_MSI, at(&mut init));
    call(&vcpu, "an NMI", KVM_NMI, 0);
    let mut clock = kvm_clock_data::default();
    call(&vm, "the clock", KVM_GET_CLOCK, at(&mut clock));
    call(&vm, "the clock", KVM_SET_CLOCK, at(&mut clock));

    let mut zone = kvm_coalesced_mmio_zone {
        addr: 1 << 40,
        size: 8,
        ..Default::default()
    };
    call(&vm, "a zone", KVM_REGISTER_COALESCED_MMIO, at(&mut zone));
    call(&vm, "a zone", KVM_UNREGISTER_COALESCED_MMIO, at(&mut zone));

    for attributes in [
        KVM_MEMORY_ATTRIBUTE_PRIVATE,
        0,
        KVM_MEMORY_ATTRIBUTE_PRIVATE,
    ] {
        let mut attributes = kvm_memory_attributes {
            address: 1 << 21,
            size: 1 << 20,
            attributes: attributes.into(),
            flags: 0,
        };
        call(
            &vm,
            "attributes",
            KVM_SET_MEMORY_ATTRIBUTES,
            at(&mut attributes),
        );
    }

    let mut range = kvm_pre_fault_memory {
        size: 1 << 20,
        ..Default::default()
    };
    survives("prefault", &mut || {
        (range.gpa, range.size) = (0, 1 << 20);
        match vcpu.ioctl(KVM_PRE_FAULT_MEMORY, at(&mut range)) {
            Ok(_) => Ok(()),
            Err(error) => Err(error.errno()),
        }
    });
    for cap in [KVM_CAP_DISABLE_QUIRKS2, KVM_CAP_MANUAL_DIRTY_LOG_PROTECT2] {
        let mut cap = kvm_enable_cap {
            cap,
            ..Default::default()
        };
        call(&vm, "a capability", KVM_ENABLE_CAP, at(&mut cap));
    }
}
