//! Compares the memory for tables that a VM reports with the memory that its platform has given it.

#[macro_use]
mod common;

use std::sync::Arc;
use std::thread;

use common::config;
use slat::{Access, Config, Ept, Format, Gpa, Level, Region, SlotFlags, Stop, TableMeta, Vm};
use slat_model::{HostMemory, SimPlatform};

on_every_format! {
    tables_count_from_their_allocation_to_their_end,
    the_peak_is_exact_with_several_threads,
}

const MIB2: u64 = 512;

fn touch<F: Format>(vm: &Arc<Vm<SimPlatform, F>>, gfns: impl Iterator<Item = u64>) {
    let mut vcpu = vm.create_vcpu().unwrap();
    for gfn in gfns {
        while vcpu.hardware_fault(Gpa(gfn << 12), Access::Write) == Err(Stop::Retry) {}
    }
}

fn tables_count_from_their_allocation_to_their_end<F: Format>() {
    let platform = SimPlatform::at_level(20 * MIB2, Level::PAGE);
    let vm = Vm::<_, F>::new(platform.clone(), config().with_spaces(2)).unwrap();
    let bytes = || platform.live_frames() as u64 * 4096;
    let empty = vm.memory_usage();
    assert_eq!(empty.table_bytes, bytes());
    assert_eq!(
        (empty.table_bytes, empty.mapped_bytes()),
        (empty.peak_table_bytes, 0)
    );
    let region = Region::new(0, Gpa(0), (20 * MIB2) << 12, HostMemory::hva(0));
    vm.set_memory_region(0, &region).unwrap();
    touch(&vm, (0..20 * MIB2).step_by(256));
    let full = vm.memory_usage();
    assert_eq!(
        (full.table_bytes, full.peak_table_bytes >= bytes()),
        (bytes(), true)
    );
    assert!(full.table_bytes >= empty.table_bytes + 20 * 4096);
    assert!(full.pages_4k >= 40 && full.mapped_bytes() == full.pages_4k * 4096);
    vm.remove_memory_region(0, 0).unwrap();
    let after = vm.memory_usage();
    assert_eq!((after.table_bytes, after.mapped_bytes()), (bytes(), 0));
    assert!(after.table_bytes <= full.table_bytes - 20 * 4096);
    assert_eq!(after.peak_table_bytes, full.peak_table_bytes);
}

/// The threads only make tables, so the peak is the current number.
fn the_peak_is_exact_with_several_threads<F: Format>() {
    let platform = SimPlatform::at_level(64 * MIB2, Level::PAGE);
    let vm = Vm::<_, F>::new(platform.clone(), config()).unwrap();
    let region = Region::new(0, Gpa(0), (64 * MIB2) << 12, HostMemory::hva(0));
    vm.set_memory_region(0, &region).unwrap();
    let vcpus = thread::scope(|scope| {
        let run = |first: u64| {
            let mut vcpu = vm.create_vcpu().unwrap();
            for gfn in (first * MIB2..64 * MIB2).step_by(4 * MIB2 as usize) {
                while vcpu.hardware_fault(Gpa(gfn << 12), Access::Write) == Err(Stop::Retry) {}
            }
            vcpu
        };
        let threads: Vec<_> = (0..4)
            .map(|first| scope.spawn(move || run(first)))
            .collect();
        let joined = threads.into_iter().map(|thread| thread.join().unwrap());
        joined.collect::<Vec<_>>()
    });
    let usage = vm.memory_usage();
    assert_eq!(usage.table_bytes, platform.live_frames() as u64 * 4096);
    assert_eq!(usage.peak_table_bytes, usage.table_bytes);
    drop(vcpus);
    let left = vm.memory_usage();
    assert!(left.table_bytes <= usage.table_bytes);
    assert_eq!(left.table_bytes, platform.live_frames() as u64 * 4096);
}

/// Measures all memory that grows with the mapped memory: tables, their metadata, and the bitmap of a log.
#[test]
fn a_gib_of_small_pages_takes_2_1_mib_at_most() {
    const GIB1: u64 = 1 << 30;
    let platform = SimPlatform::at_level(GIB1 >> 12, Level::PAGE);
    let vm = Vm::<_, Ept>::new(platform, Config::default()).unwrap();
    let region = Region::new(0, Gpa(0), GIB1, HostMemory::hva(0));
    vm.set_memory_region(0, &region.with_flags(SlotFlags::LOG_DIRTY_PAGES))
        .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(vcpu.hardware_prefault(Gpa(0)..Gpa(GIB1)), Ok(GIB1));
    let usage = vm.memory_usage();
    assert_eq!(usage.mapped_bytes(), GIB1);
    let beside = usage.table_bytes / 4096 * size_of::<TableMeta>() as u64;
    let bitmap = vm.dirty_log_words(0, 0).unwrap() as u64 * 8;
    let all = usage.table_bytes + beside + bitmap;
    assert!(all * 10 <= 21 << 20, "{all} bytes");
}
