//! Tests NX huge pages, which a module parameter controls, and their recovery. (This is a test program of its own,
//! because parameters belong to the process.)

use crate::common::*;
use kvm_bindings::*;
use slat_kvm::{Kvm, VcpuExit, parameters};
use std::time::{Duration, Instant};

#[test]
fn execution_splits_a_huge_page_and_recovery_brings_it_back() {
    let memory = Memory::new(2 * HUGE);
    let Some(start) = huge_memory(&memory) else {
        return;
    };
    let set = |name, value| parameters::write(name, value).unwrap();
    set("nx_huge_pages_recovery_ratio", "1");
    set("nx_huge_pages_recovery_period_ms", "20");
    set("nx_huge_pages", "Y");
    for without_nx in [false, true] {
        let vm = Kvm::new().unwrap().create_vm().unwrap();
        let mut cap = kvm_enable_cap {
            cap: KVM_CAP_VM_DISABLE_NX_HUGE_PAGES,
            ..Default::default()
        };
        cap.args[0] = 1;
        assert_eq!(vm.enable_cap(&cap).unwrap_err().errno(), libc::EINVAL);
        cap.args[0] = 0;
        if without_nx {
            match vm.enable_cap(&cap) {
                Ok(()) => {}
                Err(error) => {
                    assert_eq!(error.errno(), libc::EPERM, "may not restart the machine");
                    return;
                }
            }
        }
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: HUGE as u64,
            userspace_addr: start as u64,
        };
        // SAFETY: the tests access this memory only by raw pointers, so a write of the guest breaks nothing.
        unsafe { vm.set_user_memory_region(region).unwrap() };
        let mut vcpu = vm.create_vcpu(0).unwrap();
        let stats = vm.get_stats_fd().unwrap();
        let counts = || {
            (
                statistic(&stats, "pages_2m"),
                statistic(&stats, "nx_lpage_splits"),
            )
        };
        let mut execute = |code: &[u8]| {
            // SAFETY: the address is within the memory, and no vCPU runs.
            unsafe {
                let to = start.add(CODE as usize);
                std::ptr::copy_nonoverlapping(code.as_ptr(), to, code.len());
            }
            start_at_code(&vcpu);
            assert!(matches!(vcpu.run().unwrap(), VcpuExit::Hlt));
        };
        execute(&[0xf4]);
        if without_nx {
            assert_eq!(counts(), (1, 0));
            // A write to the parameter does not change this VM.
            set("nx_huge_pages", "1");
            execute(&[0xf4]);
            assert_eq!(counts(), (1, 0));
            continue;
        }
        // Waits for recovery, which may already be done.
        let deadline = Instant::now() + Duration::from_secs(10);
        while counts() != (0, 0) {
            assert!(Instant::now() < deadline, "{:?}", counts());
            std::thread::sleep(Duration::from_millis(5));
        }
        set("nx_huge_pages_recovery_period_ms", "3600000");
        execute(&[0xf4]);
        assert_eq!(counts(), (0, 1));
        // With the policy off, execution maps the huge page.
        set("nx_huge_pages", "off");
        execute(&[0xf4]);
        assert_eq!(counts(), (1, 0));
        set("nx_huge_pages", "force");
        assert_eq!(counts(), (0, 0), "what was executable is mapped anew");
        set("nx_huge_pages_recovery_period_ms", "20");
    }
}
