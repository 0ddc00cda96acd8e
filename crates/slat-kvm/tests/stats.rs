//! Tests statistics in KVM's binary format.
#![cfg(target_arch = "x86_64")]

mod common;

use common::*;
use slat_kvm::StatsFd;
use slat_kvm::VcpuExit;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

/// Reads a file of statistics like a client that knows only the format.
fn parse(stats: &StatsFd) -> (String, BTreeMap<String, Vec<u64>>) {
    let at = |offset: usize, len: usize| {
        let mut bytes = vec![0; len];
        assert_eq!(stats.read_at(&mut bytes, offset as u64).unwrap(), len);
        bytes
    };
    let word = |offset| u32::from_le_bytes(at(offset, 4).try_into().unwrap()) as usize;
    let [flags, name_size, count, id, descriptors, data] = [0, 4, 8, 12, 16, 20].map(word);
    assert_eq!(flags, 0);
    let text = |offset| {
        let bytes = at(offset, name_size);
        let end = bytes.iter().position(|byte| *byte == 0).unwrap();
        String::from_utf8(bytes[..end].to_vec()).unwrap()
    };
    let values = (0..count).map(|index| {
        let start = descriptors + index * (16 + name_size);
        let size = word(start + 4) >> 16;
        let offset = data + word(start + 8);
        let values = at(offset, size * 8);
        let values = values
            .chunks(8)
            .map(|value| u64::from_le_bytes(value.try_into().unwrap()));
        (text(start + 16), values.collect())
    });
    (text(id), values.collect())
}

/// Returns the value of a statistic that has one value.
fn value(stats: &StatsFd, name: &str) -> u64 {
    let (_, values) = parse(stats);
    assert_eq!(values[name].len(), 1, "{name}");
    values[name][0]
}

#[test]
fn faults_and_exits_are_counted() {
    // out 0x10,al; mov [0x3000],al; mov [0x8000],al; hlt
    let mut guest = Guest::new(&[0xe6, 0x10, 0xa2, 0, 0x30, 0xa2, 0, 0x80, 0xf4]);
    let vm = guest.vm.get_stats_fd().unwrap();
    let vcpu = guest.vcpu.get_stats_fd().unwrap();
    assert!(parse(&vm).0.starts_with("kvm-"));
    assert!(parse(&vcpu).0.ends_with("/vcpu-0"));
    assert_eq!(value(&vcpu, "exits"), 0);
    assert_eq!(value(&vm, "pages_4k"), 0);
    while !matches!(guest.vcpu.run().unwrap(), VcpuExit::Hlt) {}
    for (name, expected) in [
        ("io_exits", 1),
        ("mmio_exits", 1),
        ("halt_exits", 1),
        ("pf_mmio_spte_created", 1),
        ("pf_guest", 0),
    ] {
        assert_eq!(value(&vcpu, name), expected, "{name}");
    }
    assert!(value(&vcpu, "exits") >= 3);
    // Prefetch may have mapped the second page together with the first.
    assert!((1..=2).contains(&value(&vcpu, "pf_fixed")));
    assert!(value(&vm, "pages_4k") >= 2);
    assert_eq!(parse(&vcpu).1["halt_wait_hist"].len(), 32);
    let named: BTreeMap<_, _> = vcpu.values().unwrap().into_iter().collect();
    assert_eq!(named["io_exits"], [1]);
    set_slot(&guest.vm, &guest.memory, 0, 0);
    assert_eq!(value(&vm, "pages_4k"), 0, "a gauge goes down");
}

/// KVM's `mmio_exits` are exits to the client; `insn_emulation` counts every access that is emulated.
#[test]
fn an_access_that_the_client_does_not_see_is_no_mmio_exit() {
    // mov es:[0x8000],al; mov es:[0x8100],al; mov eax,[0x30] (the APIC's version); hlt
    let code = [
        0x26, 0xa2, 0x00, 0x80, 0x26, 0xa2, 0x00, 0x81, 0x66, 0xa1, 0x30, 0x00, 0xf4,
    ];
    let mut guest = Guest::with(&code, |vm| {
        vm.create_irq_chip().unwrap();
        let zone = slat_kvm::IoEventAddress::Mmio(0x8000);
        vm.register_coalesced_mmio(zone, 4).unwrap();
    });
    let mut sregs = guest.vcpu.get_sregs().unwrap();
    sregs.ds.base = 0xfee0_0000;
    guest.vcpu.set_sregs(&sregs).unwrap();
    let stats = guest.vcpu.get_stats_fd().unwrap();
    assert!(matches!(
        guest.vcpu.run().unwrap(),
        VcpuExit::MmioWrite(0x8100, _)
    ));
    // SAFETY: the call takes no pointer.
    let id = unsafe { libc::pthread_self() } as usize;
    // The vCPU halts, so a second thread ends its run.
    let caller = std::thread::spawn(move || {
        std::thread::sleep(std::time::Duration::from_millis(50));
        slat_kvm::interrupt_thread(id);
    });
    assert_eq!(guest.vcpu.run().unwrap_err().errno(), libc::EINTR);
    caller.join().unwrap();
    assert_eq!(guest.vcpu.get_regs().unwrap().rax as u8, 0x14);
    assert_eq!(value(&stats, "mmio_exits"), 1);
    assert_eq!(value(&stats, "insn_emulation"), 3);
    assert_eq!(value(&stats, "insn_emulation_fail"), 0);
}

#[test]
fn statistics_of_a_running_vcpu_can_be_read() {
    let mut guest = Guest::new(SPIN);
    let stats = guest.vcpu.get_stats_fd().unwrap();
    let reads_are_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let reads_are_done = &reads_are_done;
        let vcpu = &mut guest.vcpu;
        let page = vcpu.get_kvm_run() as *mut kvm_bindings::kvm_run as usize;
        scope.spawn(move || {
            let ended = vcpu.run().unwrap_err();
            assert_eq!(ended.errno(), libc::EINTR);
            assert!(reads_are_done.load(Ordering::SeqCst));
        });
        while value(&stats, "pf_fixed") == 0 {
            std::thread::yield_now();
        }
        reads_are_done.store(true, Ordering::SeqCst);
        let page = page as *mut kvm_bindings::kvm_run;
        // SAFETY: the pointer is to the vCPU's `kvm_run`, to which a client may write at any time.
        unsafe { (&raw mut (*page).immediate_exit).write_volatile(1) };
    });
}

#[test]
fn statistics_outlive_their_vm() {
    let Guest { vm, vcpu, .. } = Guest::new(SPIN);
    let stats = [vm.get_stats_fd().unwrap(), vcpu.get_stats_fd().unwrap()];
    drop((vm, vcpu));
    for stats in stats {
        assert!(!parse(&stats).1.is_empty());
    }
}
