//! Private memory. Each of the first tests checks one rule. Then random conversions are compared with a model, and
//! threads run against each other.

#[path = "common/access.rs"]
mod access;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};

use access::touch;
use slat::format::{Npt, Stage2, Sv48x4};
use slat::{
    Access::{self, *},
    AttributesError, Config, Ept, Format, Gfn, Gpa, Level, MemoryAttributes, Region, RegionError,
    SlotFlags, Stop, Translation, Vcpu, Vm,
};
use slat::{Prefetch, Setting};
use slat_model::{Event, HostChange, HostMemory, PageKind, Rng, SimPlatform, set_region};

type TestVm<F = Ept> = Vm<SimPlatform, F>;

const MIB2: u64 = 512;
const GIB1: u64 = 1 << 18;
/// The frames of the slot. Host page n backs frame n where the frame is shared, and host page `PRIVATE + n` where it is
/// private.
const FRAMES: u64 = 2 * GIB1;
const PRIVATE: u64 = FRAMES;

fn vm<F: Format>(level: Level) -> (Arc<SimPlatform>, Arc<TestVm<F>>) {
    let platform = SimPlatform::new(2 * FRAMES);
    platform.host.change(&(0..2 * FRAMES), remap(level));
    let vm = Vm::new(platform.clone(), Config::default()).unwrap();
    vm.set_memory_region(0, &region()).unwrap();
    (platform, vm)
}

fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        kind: PageKind::Ordinary,
    }
}

fn region() -> Region {
    Region::new(0, Gpa(0), FRAMES << 12, HostMemory::hva(0))
        .with_private(Some(HostMemory::hva(PRIVATE)))
}

fn convert<F: Format>(vm: &TestVm<F>, gfns: Range<u64>, private: bool) {
    let attributes = match private {
        true => MemoryAttributes::PRIVATE,
        false => MemoryAttributes::NONE,
    };
    vm.set_memory_attributes(Gfn(gfns.start)..Gfn(gfns.end), attributes)
        .unwrap();
}

/// Returns the host page that backs a frame, and the level of the frame's leaf.
fn page<F: Format>(vcpu: &mut Vcpu<SimPlatform, F>, gfn: u64, access: Access) -> (u64, u8) {
    let found = touch(vcpu, gfn, access).unwrap();
    (HostMemory::identify(found.host.pfn()).0, found.level.0)
}

fn memory_fault(gfn: u64, access: Access) -> Result<Translation, Stop> {
    let gpa = Gpa(gfn << 12);
    let private = true;
    Err(Stop::MemoryFault {
        gpa,
        access,
        private,
        absent: false,
    })
}

#[test]
fn private_frames_are_the_private_backing_and_shared_ones_the_other() {
    let (platform, vm) = vm::<Ept>(Level::PAGE);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(page(&mut vcpu, 7, Write), (7, 1));
    convert(&vm, 5..10, true);
    assert_eq!(page(&mut vcpu, 7, Write), (PRIVATE + 7, 1));
    assert_eq!(page(&mut vcpu, 4, Read).0, 4);
    assert_eq!(page(&mut vcpu, 10, Execute).0, 10);
    convert(&vm, 7..8, false);
    assert_eq!(page(&mut vcpu, 7, Read).0, 7);
    assert_eq!(page(&mut vcpu, 6, Read).0, PRIVATE + 6);
    assert_eq!(page(&mut vcpu, 8, Read).0, PRIVATE + 8);
    vm.audit().unwrap();
    platform.check();
}

#[test]
fn private_frames_are_listed() {
    let (_, vm) = vm::<Ept>(Level::PAGE);
    let everything = (false, Gfn(0)..Gfn(u64::MAX));
    assert_eq!(vm.private_around(Gfn(9)), everything);
    convert(&vm, 8..24, true);
    convert(&vm, 12..16, false);
    let around = |gfn| {
        let (private, gfns) = vm.private_around(Gfn(gfn));
        (private, gfns.start.0..gfns.end.0)
    };
    assert_eq!(around(0), (false, 0..8));
    assert_eq!(around(11), (true, 8..12));
    assert_eq!(around(12), (false, 12..16));
    assert_eq!(around(23), (true, 16..24));
    assert_eq!(around(24), (false, 24..u64::MAX));
}

#[test]
fn bad_attributes_are_refused_with_kvms_errno() {
    let (_, vm) = vm::<Ept>(Level::PAGE);
    let set = |gfns: Range<u64>, attributes| {
        vm.set_memory_attributes(Gfn(gfns.start)..Gfn(gfns.end), MemoryAttributes(attributes))
    };
    const EINVAL: i32 = 22;
    for (gfns, attributes, error) in [
        (1..2, 1, AttributesError::Unknown(MemoryAttributes(1))),
        (1..2, 15, AttributesError::Unknown(MemoryAttributes(15))),
        (2..2, 8, AttributesError::BadRange),
        (0..(1 << 52) + 1, 8, AttributesError::BadRange),
    ] {
        assert_eq!(set(gfns, attributes), Err(error));
        assert_eq!(error.errno(), EINVAL);
    }
    // Frames in no memslot, and frames beyond those that the tables translate, have attributes, too.
    assert_eq!(set(0..1 << 52, 8), Ok(()));
    assert_eq!(set(0..1 << 52, 0), Ok(()));
}

#[test]
fn private_frames_without_private_memory_are_memory_faults_and_never_mmio() {
    let (platform, vm) = vm::<Ept>(Level::PAGE);
    let mut vcpu = vm.create_vcpu().unwrap();
    let nowhere = FRAMES + 3;
    let mmio = Err(Stop::Mmio {
        gpa: Gpa(nowhere << 12),
    });
    // The second access finds an MMIO entry.
    for _ in 0..2 {
        assert_eq!(touch(&mut vcpu, nowhere, Read), mmio);
    }
    assert_eq!(vm.stats().mmio_cached, 1);
    convert(&vm, FRAMES..FRAMES + 100, true);
    assert_eq!(touch(&mut vcpu, nowhere, Read), memory_fault(nowhere, Read));
    // A slot that has only shared memory may even be read-only.
    for flags in [SlotFlags(0), SlotFlags::READONLY] {
        let region =
            Region::new(1, Gpa(FRAMES << 12), 200 << 12, HostMemory::hva(0)).with_flags(flags);
        vm.set_memory_region(0, &region).unwrap();
        for access in [Write, Execute] {
            assert_eq!(
                touch(&mut vcpu, nowhere, access),
                memory_fault(nowhere, access)
            );
        }
        assert_eq!(page(&mut vcpu, FRAMES + 100, Read).0, 100);
        vm.remove_memory_region(0, 1).unwrap();
    }
    convert(&vm, FRAMES..FRAMES + 100, false);
    assert_eq!(touch(&mut vcpu, nowhere, Read), mmio);
    // The host takes the private memory away.
    convert(&vm, 0..10, true);
    assert_eq!(page(&mut vcpu, 3, Read).0, PRIVATE + 3);
    let gone = PRIVATE..PRIVATE + 10;
    let invalidation = vm.invalidate(HostMemory::hvas(&gone));
    platform.host.change(&gone, HostChange::Punch);
    drop(invalidation);
    assert_eq!(touch(&mut vcpu, 3, Read), memory_fault(3, Read));
    vm.audit().unwrap();
    platform.check();
}

#[test]
fn a_slot_with_private_backing_takes_no_flags_and_no_change() {
    let (_, vm) = vm::<Ept>(Level::PAGE);
    let refused = |change: &dyn Fn(&mut Region)| {
        let mut region = region();
        change(&mut region);
        let error = vm.set_memory_region(0, &region).unwrap_err();
        // `check_memory_region` returns the same error as the change, and changes nothing.
        assert_eq!(vm.check_memory_region(0, &region), Err(error));
        let taken = matches!(error, RegionError::PrivateTaken { .. });
        assert_eq!(error.errno(), if taken { 17 } else { 22 });
        error
    };
    for flags in [SlotFlags::LOG_DIRTY_PAGES, SlotFlags::READONLY] {
        let error = refused(&|r| (r.slot, r.flags) = (1, flags));
        assert_eq!(error, RegionError::PrivateWithFlags(flags));
    }
    let elsewhere = Some(HostMemory::hva(PRIVATE + 1));
    let changes: [&dyn Fn(&mut Region); 5] = [
        &|_| (),
        &|r| r.gpa.0 += 1 << 30,
        &|r| r.private = None,
        &|r| r.private = elsewhere,
        &|r| (r.private, r.flags) = (None, SlotFlags::LOG_DIRTY_PAGES),
    ];
    for change in changes {
        assert_eq!(refused(change), RegionError::PrivateChanged(0));
    }
    let odd = refused(&|r| {
        r.slot = 1;
        r.private = r.private.map(|hva| slat::Hva(hva.0 + 1));
    });
    assert!(matches!(odd, RegionError::Misaligned(..)));
    let high = refused(&|r| (r.slot, r.private) = (1, Some(slat::Hva(u64::MAX - 0xfff))));
    assert!(matches!(high, RegionError::TooHigh(_)));
    // No other slot can use the same private memory, not even one page of it.
    let taken = refused(&|r| {
        (r.slot, r.gpa, r.size) = (1, Gpa(FRAMES << 12), 2 << 12);
        r.private = Some(HostMemory::hva(PRIVATE + FRAMES - 1));
    });
    assert!(matches!(taken, RegionError::PrivateTaken { by: 0, .. }));
    vm.remove_memory_region(0, 0).unwrap();
    vm.audit().unwrap();
}

#[test]
fn an_invalidation_of_the_private_backing_takes_the_private_leaves() {
    let (platform, vm) = vm::<Ept>(Level::PAGE);
    let mut vcpu = vm.create_vcpu().unwrap();
    convert(&vm, 0..64, true);
    for gfn in 0..80 {
        page(&mut vcpu, gfn, Write);
    }
    let part = PRIVATE + 8..PRIVATE + 24;
    assert_eq!(vm.age(HostMemory::hvas(&part), true), 16);
    let before = vm.stats();
    let invalidation = vm.invalidate(HostMemory::hvas(&part));
    platform.host.change(&part, remap(Level::PAGE));
    drop(invalidation);
    assert_eq!(vm.stats().since(&before).zapped, 16);
    vm.audit().unwrap();
    let old = touch(&mut vcpu, 9, Read).unwrap().host.pfn();
    assert_eq!(HostMemory::identify(old).0, PRIVATE + 9);
    platform.check();
}

/// Checks the leaves after the conversion of a part of a huge leaf of `level`.
fn splits_in_place<F: Format>(level: Level) {
    let (platform, vm) = vm::<F>(level);
    let mut vcpu = vm.create_vcpu().unwrap();
    let base = GIB1;
    assert_eq!(page(&mut vcpu, base + 3, Write), (base + 3, level.0));
    let before = vm.stats();
    convert(&vm, base + 3 * MIB2 / 2..base + 3 * MIB2 / 2 + 7, true);
    let did = vm.stats().since(&before);
    // A leaf of 1 GiB is split twice: into pieces of 2 MiB, one of which is split again. The mapped leaf of 2 MiB does
    // not contain the range.
    let (splits, zapped) = match level {
        Level::GIGA => (2, 7),
        _ => (0, 0),
    };
    assert_eq!((did.splits, did.zapped), (splits, zapped));
    vm.audit().unwrap();
    convert(&vm, base + 5..base + 9, true);
    vm.audit().unwrap();
    // The frames that were not converted are still mapped: an access takes no fault.
    let before = vm.stats();
    for gfn in [0, 4, 9, 511] {
        assert_eq!(page(&mut vcpu, base + gfn, Write), (base + gfn, 1));
    }
    if level == Level::GIGA {
        assert_eq!(page(&mut vcpu, base + 40 * MIB2, Read).1, 2);
        assert_eq!(page(&mut vcpu, base + 3 * MIB2 / 2 + 7, Read).1, 1);
    }
    assert_eq!(vm.stats().since(&before).pf_taken, 0);
    // The converted frames have their new backing, by leaves of the largest level at which all frames have the same
    // attribute.
    for gfn in 5..9 {
        assert_eq!(
            page(&mut vcpu, base + gfn, Write),
            (PRIVATE + base + gfn, 1)
        );
    }
    // If the range ends where a piece of 2 MiB ends, that piece is not split.
    if level == Level::GIGA {
        let before = vm.stats();
        convert(&vm, base + 100 * MIB2..base + 102 * MIB2, true);
        assert_eq!(vm.stats().since(&before).splits, 0);
        assert_eq!(
            page(&mut vcpu, base + 100 * MIB2 + 1, Read),
            (PRIVATE + base + 100 * MIB2 + 1, 2)
        );
    }
    vm.audit().unwrap();
    // All frames have the same attribute again, so the next fault installs a huge leaf.
    convert(&vm, 0..FRAMES, true);
    assert_eq!(
        page(&mut vcpu, base + 3, Read),
        (PRIVATE + base + 3, level.0)
    );
    convert(&vm, 0..FRAMES, false);
    assert_eq!(page(&mut vcpu, base + 3, Read), (base + 3, level.0));
    vm.audit().unwrap();
    platform.check();
}

#[test]
fn a_huge_leaf_is_split_in_place_where_a_part_is_converted() {
    for level in [Level::MEGA, Level::GIGA] {
        splits_in_place::<Ept>(level);
        splits_in_place::<Npt>(level);
        splits_in_place::<Stage2<48>>(level);
        splits_in_place::<Sv48x4>(level);
    }
}

#[test]
fn a_huge_leaf_spans_no_boundary_of_attributes() {
    let (platform, vm) = vm::<Ept>(Level::GIGA);
    let mut vcpu = vm.create_vcpu().unwrap();
    convert(&vm, MIB2 - 1..MIB2 + 1, true);
    convert(&vm, GIB1..GIB1 + 4 * MIB2, true);
    for (gfn, at, level) in [
        (0, 0, 1),
        (MIB2 - 1, PRIVATE + MIB2 - 1, 1),
        (MIB2, PRIVATE + MIB2, 1),
        (2 * MIB2, 2 * MIB2, 2),
        (GIB1 + 7, PRIVATE + GIB1 + 7, 2),
        (GIB1 + 4 * MIB2, GIB1 + 4 * MIB2, 2),
    ] {
        assert_eq!(page(&mut vcpu, gfn, Write), (at, level), "frame {gfn:#x}");
    }
    vm.audit().unwrap();
    platform.check();
}

#[test]
fn prefetch_and_prefault_stay_within_the_attributes() {
    let (platform, vm) = vm::<Ept>(Level::PAGE);
    vm.set_policy(Setting::Prefetch(Prefetch::Window(64)));
    let mut vcpu = vm.create_vcpu().unwrap();
    convert(&vm, 16..32, true);
    assert_eq!(page(&mut vcpu, 20, Read).0, PRIVATE + 20);
    assert_eq!(vm.stats().pages_4k, 16);
    assert_eq!(page(&mut vcpu, 0, Read).0, 0);
    assert_eq!(vm.stats().pages_4k, 32);
    vm.audit().unwrap();
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let bytes = vcpu.prefault(Gpa(24 << 12)..Gpa(600 << 12)).unwrap();
    vcpu.leave();
    assert_eq!(bytes, 576 << 12);
    assert_eq!(vm.stats().pages_4k, 600);
    vm.audit().unwrap();
    convert(&vm, FRAMES..FRAMES + 1, true);
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let gpa = Gpa(FRAMES << 12);
    let stop = vcpu.prefault(gpa..Gpa(gpa.0 + 4096)).unwrap_err();
    vcpu.leave();
    assert_eq!(Err(stop), memory_fault(FRAMES, Read));
    platform.check();
}

#[test]
fn setting_what_is_set_takes_nothing_away() {
    let (_, vm) = vm::<Ept>(Level::MEGA);
    let mut vcpu = vm.create_vcpu().unwrap();
    convert(&vm, MIB2..4 * MIB2, true);
    page(&mut vcpu, 5, Write);
    page(&mut vcpu, MIB2, Write);
    let before = vm.stats();
    convert(&vm, 2..9, false);
    convert(&vm, MIB2 + 3..2 * MIB2, true);
    let did = vm.stats().since(&before);
    assert_eq!((did.zapped, did.splits, did.remote_tlb_flush), (0, 0, 0));
}

#[test]
fn all_address_spaces_are_converted() {
    let platform = SimPlatform::new(64);
    let config = Config::default().with_spaces(2);
    let vm: Arc<TestVm> = Vm::new(platform.clone(), config).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    for space in 0..2 {
        let region = region()
            .with_size(32 << 12)
            .with_private(Some(HostMemory::hva(32)));
        vm.set_memory_region(space, &region).unwrap();
    }
    page(&mut vcpu, 1, Write);
    convert(&vm, 0..2, true);
    assert_eq!(page(&mut vcpu, 1, Write).0, 33);
    vm.audit().unwrap();
    // A slot that is created after the conversion uses the attributes that its frames already have.
    vm.remove_memory_region(1, 0).unwrap();
    vm.remove_memory_region(0, 0).unwrap();
    assert_eq!(touch(&mut vcpu, 1, Read), memory_fault(1, Read));
    platform.check();
}

#[test]
fn a_conversion_without_memory_for_tables_changes_nothing() {
    for n in 0.. {
        let (platform, vm) = vm::<Ept>(Level::GIGA);
        let mut vcpu = vm.create_vcpu().unwrap();
        assert_eq!(page(&mut vcpu, 1, Write).1, 3);
        let live = platform.live_frames();
        platform.fail_allocation(n, true);
        let range = Gfn(5)..Gfn(GIB1 - 5);
        let converted = vm.set_memory_attributes(range.clone(), MemoryAttributes::PRIVATE);
        let failed = platform.stop_failing();
        vm.audit().unwrap();
        let before = vm.stats();
        if converted.is_ok() {
            // The conversion may succeed although an allocation has failed, because it requests more frames than it
            // needs. Then the other pages are still mapped: they take no fault.
            assert_eq!(page(&mut vcpu, 4, Write), (4, 1));
            assert_eq!(page(&mut vcpu, GIB1 - 1, Write), (GIB1 - 1, 1));
            assert_eq!(vm.stats().since(&before).pf_taken, 0);
            assert_eq!(page(&mut vcpu, 5, Write).0, PRIVATE + 5);
        } else {
            assert_eq!(converted, Err(AttributesError::OutOfMemory));
            assert_eq!(platform.live_frames(), live, "allocation {n}");
            assert_eq!(page(&mut vcpu, 5, Write), (5, 3));
            assert_eq!(vm.stats().since(&before).pf_taken, 0);
            vm.set_memory_attributes(range, MemoryAttributes::PRIVATE)
                .unwrap();
        }
        vm.audit().unwrap();
        drop((vcpu, vm));
        platform.check();
        assert_eq!(platform.live_frames(), 0, "frames were lost");
        if !failed {
            assert!(n >= 4, "a conversion asks for the tables of two splits");
            break;
        }
    }
}

/// A conversion takes place after a fault has resolved its page and before the fault installs its leaf.
#[test]
fn a_fault_that_went_by_the_old_attributes_installs_nothing() {
    for private in [false, true] {
        let (platform, vm) = vm::<Ept>(Level::PAGE);
        let mut vcpu = vm.create_vcpu().unwrap();
        convert(&vm, 7..8, private);
        let (hooked, once) = (vm.clone(), AtomicBool::new(false));
        platform.set_hook(move |event| {
            if matches!(event, Event::Resolved(_)) && !once.swap(true, SeqCst) {
                convert(&hooked, 7..8, !private);
            }
        });
        let at = if private { 7 } else { PRIVATE + 7 };
        assert_eq!(page(&mut vcpu, 7, Write).0, at);
        assert_eq!(vm.stats().pf_retried, 1);
        platform.clear_hook();
        vm.audit().unwrap();
        platform.check();
    }
}

/// Makes random accesses, conversions, pre-faults and slot changes. Compares the results with a plain list of private
/// frames.
fn random<F: Format>(seed: u64, steps: u32) {
    /// The frames around the boundary of two huge pages of 1 GiB, where errors are most likely.
    const FIRST: u64 = GIB1 - 3 * MIB2;
    const LEN: u64 = 6 * MIB2;
    let mut rng = Rng::new(seed);
    let (platform, vm) = vm::<F>(Level::GIGA);
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut private = vec![false; LEN as usize];
    let mut is_there = true;
    for step in 0..steps {
        let gfn = FIRST + rng.below(LEN);
        match rng.below(16) {
            0..3 => {
                let align = [1, 1, MIB2][rng.below(3) as usize];
                let start = (gfn - FIRST) / align * align;
                let len = (1 + rng.below(20)) * align;
                let end = (start + len).min(LEN);
                let now = rng.below(2) == 1;
                private[start as usize..end as usize].fill(now);
                convert(&vm, FIRST + start..FIRST + end, now);
            }
            3 if rng.below(20) == 0 => {
                let size = if is_there { 0 } else { FRAMES << 12 };
                is_there = !is_there;
                set_region(&vm, 0, &region().with_size(size)).unwrap();
            }
            4 if is_there => {
                vcpu.enter_unguarded(1);
                vcpu.quiesce();
                let end = (gfn + 1 + rng.below(3 * MIB2)).min(FIRST + LEN);
                let _ = vcpu.prefault(Gpa(gfn << 12)..Gpa(end << 12));
                vcpu.leave();
            }
            5 => {
                let host = if rng.below(2) == 1 { PRIVATE } else { 0 };
                let pages = host + gfn..host + gfn + 1;
                drop(vm.invalidate(HostMemory::hvas(&pages)));
            }
            6 => {
                let size = ["off", "8", "adaptive"][rng.below(3) as usize];
                vm.set_policy(Setting::parse("prefetch", size).unwrap());
            }
            7 => {
                let on = ["off", "on"][rng.below(2) as usize];
                vm.set_policy(Setting::parse("nx_huge_pages", on).unwrap());
            }
            _ => {
                let access = [Read, Write, Execute][rng.below(3) as usize];
                let is_private = private[(gfn - FIRST) as usize];
                let expected = match (is_there, is_private) {
                    (true, true) => Ok(PRIVATE + gfn),
                    (true, false) => Ok(gfn),
                    (false, true) => memory_fault(gfn, access).map(|_| 0),
                    (false, false) => Err(Stop::Mmio {
                        gpa: Gpa(gfn << 12),
                    }),
                };
                let found = touch(&mut vcpu, gfn, access);
                let found = found.map(|found| HostMemory::identify(found.host.pfn()).0);
                assert_eq!(found, expected, "seed {seed} step {step} {gfn:#x}");
            }
        }
        if step % 64 == 0 {
            vm.audit()
                .unwrap_or_else(|error| panic!("seed {seed} step {step}: {error}"));
        }
    }
    vm.audit().unwrap();
    drop((vcpu, vm));
    platform.check();
    assert_eq!(platform.live_frames(), 0);
}

#[test]
fn random_conversions_agree_with_a_list() {
    for seed in 0..4 {
        random::<Ept>(seed, 4000);
        random::<Npt>(seed, 4000);
        random::<Stage2<48>>(seed, 4000);
        random::<Sv48x4>(seed, 4000);
    }
}

/// vCPUs use frames while another thread converts them again and again. After a conversion has returned, no vCPU gets
/// the other backing until the next conversion has begun.
#[test]
fn nobody_uses_the_old_backing_after_a_conversion() {
    use std::sync::atomic::AtomicU64;
    const ROUNDS: u64 = 600;
    /// Frames on both sides of the middle of a huge page.
    const PART: Range<u64> = MIB2 / 2 - 4..MIB2 / 2 + 4;
    let (platform, vm) = vm::<Ept>(Level::MEGA);
    // The number of begun and ended conversions: odd while a conversion is in progress. The number of conversions is
    // even, so the part is shared at the end.
    let state = AtomicU64::new(0);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for n in 0..2u64 {
            let (vm, state, done) = (&vm, &state, &done);
            scope.spawn(move || {
                let mut vcpu = vm.create_vcpu().unwrap();
                let mut rng = Rng::new(n);
                while !done.load(SeqCst) {
                    let gfn = PART.start - 4 + rng.below(16);
                    let access = [Read, Write][rng.below(2) as usize];
                    let before = state.load(SeqCst);
                    vcpu.enter_unguarded(1 + n as usize);
                    vcpu.quiesce();
                    // The translation stays in use while `state` is read again, as if it were in a CPU's TLB.
                    let found = vcpu.translate(Gpa(gfn << 12), access);
                    let after = state.load(SeqCst);
                    vcpu.leave();
                    let Ok(found) = found else { continue };
                    let at = HostMemory::identify(found.host.pfn()).0;
                    assert!(at == gfn || at == PRIVATE + gfn);
                    if !PART.contains(&gfn) {
                        assert_eq!(at, gfn);
                    } else if before == after && before % 2 == 0 {
                        let private = before / 2 % 2 == 1;
                        assert_eq!(at >= PRIVATE, private, "frame {gfn:#x} in state {before}");
                    }
                }
            });
        }
        for round in 1..=ROUNDS {
            state.fetch_add(1, SeqCst);
            convert(&vm, PART, round % 2 == 1);
            state.fetch_add(1, SeqCst);
        }
        done.store(true, SeqCst);
    });
    vm.audit().unwrap();
    platform.check();
}
