//! Each frame allocation of an operation fails once. Afterwards either nothing has changed, or the operation can be
//! repeated; no frame is lost.

#[path = "common/access.rs"]
mod access;
#[macro_use]
mod common;

use std::sync::Arc;

use common::config;
use slat::{
    Access::{self, *},
    Change, CreateVmError, Ept, Gpa, Level, Region, RegionError, SlotFlags, Stop, Vm,
};
use slat::{Setting, Switch};
use slat_model::{HostChange, HostMemory, PageKind, SimPlatform};

on_both_mmus! {
    a_vm_that_gets_no_root_is_not_made,
    a_first_fault_survives_it,
    an_mmio_access_survives_it,
    a_write_fault_that_splits_a_huge_leaf_survives_it,
    the_begin_of_logging_goes_as_far_as_there_is_memory,
    a_slot_that_becomes_two_survives_it,
}

type TestVm = Vm<SimPlatform, Ept>;

const GIB1: u64 = 1 << 18;
const NONE: SlotFlags = SlotFlags(0);
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;

fn set(vm: &TestVm, gfns: std::ops::Range<u64>, flags: SlotFlags) {
    let region = Region::new(
        0,
        Gpa(gfns.start << 12),
        (gfns.end - gfns.start) << 12,
        HostMemory::hva(0),
    )
    .with_flags(flags);
    vm.set_memory_region(0, &region).unwrap();
}

/// Makes one access by a new vCPU. When the vCPU is dropped, it frees the frames that it has allocated ahead.
fn touch(vm: &Arc<TestVm>, gfn: u64, access: Access) -> Result<Level, Stop> {
    let mut vcpu = vm.create_vcpu().unwrap();
    access::touch(&mut vcpu, gfn, access).map(|translation| translation.level)
}

/// Makes a VM by `prepare`, and runs `operate` while the VM's allocation number n fails. Then does the same while all
/// allocations from number n on fail. Repeats that for n = 0, 1, … until `operate` makes fewer allocations. `operate`
/// returns whether it succeeded. Afterwards it is repeated with enough memory.
fn fail_everywhere(
    prepare: impl Fn(&Arc<SimPlatform>) -> Arc<TestVm>,
    operate: impl Fn(&Arc<TestVm>) -> bool,
    check: impl Fn(&Arc<TestVm>),
) {
    for stay in [false, true] {
        for n in 0.. {
            let platform = SimPlatform::new(GIB1 + 512);
            let remap = HostChange::Remap {
                level: Level::GIGA,
                writable: true,
                kind: PageKind::Ordinary,
            };
            platform.host.change(&(0..GIB1 + 512), remap);
            let vm = prepare(&platform);
            let live = platform.live_frames();
            platform.fail_allocation(n, stay);
            let succeeded = operate(&vm);
            let failed = platform.stop_failing();
            assert!(succeeded || failed);
            vm.audit().unwrap_or_else(|e| panic!("allocation {n}: {e}"));
            if !succeeded {
                assert_eq!(platform.live_frames(), live, "allocation {n}");
                assert!(operate(&vm), "allocation {n}: it cannot be repeated");
                vm.audit().unwrap_or_else(|e| panic!("allocation {n}: {e}"));
            }
            check(&vm);
            drop(vm);
            platform.check();
            assert_eq!(
                platform.live_frames(),
                0,
                "allocation {n}: frames were lost"
            );
            if !failed {
                assert!(n > 0, "it allocates nothing");
                break;
            }
        }
    }
}

fn with_slot(platform: &Arc<SimPlatform>, flags: SlotFlags) -> Arc<TestVm> {
    let vm = Vm::new(platform.clone(), config()).unwrap();
    set(&vm, 0..GIB1 + 512, flags);
    vm
}

/// Returns `true` if the access is done, and `false` if there was no memory for it.
fn try_touch(vm: &Arc<TestVm>, gfn: u64, access: Access) -> bool {
    match touch(vm, gfn, access) {
        Ok(_) | Err(Stop::Mmio { .. }) => true,
        Err(Stop::OutOfMemory { gpa }) => {
            assert_eq!(gpa, Gpa(gfn << 12));
            false
        }
        Err(other) => panic!("{other}"),
    }
}

fn a_vm_that_gets_no_root_is_not_made() {
    for spaces in 1..4 {
        for n in 0..spaces {
            let platform = SimPlatform::new(1);
            platform.fail_allocation(n as u64, false);
            let config = config().with_spaces(spaces);
            let vm = Vm::<_, Ept>::new(platform.clone(), config);
            assert_eq!(vm.err(), Some(CreateVmError::OutOfMemory));
            assert_eq!(platform.live_frames(), 0);
            platform.check();
        }
    }
}

fn a_first_fault_survives_it() {
    for gfn in [7, GIB1 + 7] {
        fail_everywhere(
            |platform| with_slot(platform, NONE),
            |vm| try_touch(vm, gfn, Write),
            |vm| assert!(touch(vm, gfn, Read).is_ok()),
        );
    }
}

fn an_mmio_access_survives_it() {
    fail_everywhere(
        |platform| with_slot(platform, NONE),
        |vm| try_touch(vm, 5 * GIB1, Write),
        |vm| assert!(matches!(touch(vm, 5 * GIB1, Read), Err(Stop::Mmio { .. }))),
    );
}

fn a_write_fault_that_splits_a_huge_leaf_survives_it() {
    fail_everywhere(
        |platform| {
            let vm = with_slot(platform, NONE);
            vm.set_policy(Setting::EagerPageSplit(Switch::Off));
            assert_eq!(touch(&vm, 7, Write), Ok(Level::GIGA));
            set(&vm, 0..GIB1 + 512, LOGGED);
            vm
        },
        |vm| {
            let written = try_touch(vm, 7, Write);
            // Whether or not the split succeeded, the other pages stayed readable.
            let faults = vm.stats().pf_taken;
            assert!(touch(vm, 8, Read).is_ok() && touch(vm, GIB1 - 1, Read).is_ok());
            assert_eq!(vm.stats().pf_taken, faults);
            written
        },
        |vm| {
            let mut log = vec![0; vm.dirty_log_words(0, 0).unwrap()];
            vm.get_dirty_log(0, 0, &mut log).unwrap();
            assert_eq!(log[0], 1 << 7);
            assert!(log[1..].iter().all(|word| *word == 0));
        },
    );
}

fn the_begin_of_logging_goes_as_far_as_there_is_memory() {
    // For each leaf of 2 MiB, an eager split needs a frame. Without frames the split does not fail, but splits fewer
    // leaves.
    let prepare = |platform: &Arc<SimPlatform>| {
        let remap = HostChange::Remap {
            level: Level::MEGA,
            writable: true,
            kind: PageKind::Ordinary,
        };
        platform.host.change(&(0..GIB1 + 512), remap);
        let vm = Vm::new(platform.clone(), config()).unwrap();
        set(&vm, 0..10 * 512, NONE);
        (0..10).for_each(|i| assert!(touch(&vm, i * 512, Write).is_ok()));
        vm
    };
    let begin = |vm: &Arc<TestVm>| {
        set(vm, 0..10 * 512, LOGGED);
        true
    };
    let check = |vm: &Arc<TestVm>| {
        for i in 0..10 {
            assert!(touch(vm, i * 512 + 3, Read).is_ok());
            assert_eq!(touch(vm, i * 512 + 3, Write), Ok(Level::PAGE));
        }
        let mut log = [0; 80];
        vm.get_dirty_log(0, 0, &mut log).unwrap();
        let expected: Vec<u64> = (0..80)
            .map(|i| if i % 8 == 0 { 1 << 3 } else { 0 })
            .collect();
        assert_eq!(log[..], expected[..]);
        vm.audit().unwrap();
    };
    fail_everywhere(prepare, begin, check);
}

/// Two leaves of 1 GiB cross the edges of the new slots. Their splits need four tables.
fn a_slot_that_becomes_two_survives_it() {
    let part = |id, gfns: std::ops::Range<u64>| {
        let (gpa, size) = (Gpa(gfns.start << 12), (gfns.end - gfns.start) << 12);
        Change::Set(Region::new(id, gpa, size, HostMemory::hva(gfns.start)))
    };
    let far = GIB1 + 300;
    let changes = [part(0, 0..700), part(1, 900..far), part(2, far..GIB1 + 512)];
    fail_everywhere(
        |platform| {
            let vm = with_slot(platform, NONE);
            assert_eq!(touch(&vm, 7, Write), Ok(Level::GIGA));
            assert_eq!(touch(&vm, far, Write), Ok(Level::MEGA));
            vm
        },
        |vm| {
            let changed = vm.set_memory_regions(0, &changes);
            let faults = vm.stats().pf_taken;
            for gfn in [0, 699, 900, GIB1 - 1, far - 1, far] {
                assert!(touch(vm, gfn, Write).is_ok());
            }
            assert_eq!(vm.stats().pf_taken, faults, "{changed:?}");
            match changed {
                Ok(()) => true,
                Err(error) => {
                    assert_eq!(error, RegionError::OutOfMemory);
                    assert!(touch(vm, 800, Read).is_ok());
                    false
                }
            }
        },
        |vm| assert!(matches!(touch(vm, 800, Read), Err(Stop::Mmio { .. }))),
    );
}
