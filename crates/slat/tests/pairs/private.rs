//! Tests private memory, and pages that are absent, together with each mechanism that makes or keeps leaves.

use crate::world::*;
use slat::format::Stage2;
use slat::{Access::*, Ept, Format, Gpa, Level, Promotion};
use slat_model::{Event, HostChange};

macro_rules! with_and_without_break_before_make {
    ($($test:ident,)*) => {$(
        mod $test {
            #[test]
            fn ept() { super::$test::<super::Ept>() }
            #[test]
            fn stage_2() { super::$test::<super::Stage2<48>>() }
        }
    )*};
}

with_and_without_break_before_make! {
    no_huge_leaf_covers_private_frames_when_a_log_ends,
    a_promotion_leaves_private_frames_as_they_are,
    a_log_names_no_private_frame,
    an_absent_private_page_is_both,
    no_prefault_and_no_prefetch_maps_an_absent_private_page,
    a_zap_by_the_client_makes_a_fault_ask_again,
    a_private_page_is_aged_and_executed_in_parts,
}

/// A slot that logs has no private backing, so its private frames cannot be accessed.
fn no_huge_leaf_covers_private_frames_when_a_log_ends<F: Format>() {
    let mut world = World::<F>::shared(Level::MEGA, NONE);
    for block in 0..4 {
        assert_eq!(world.page(block * MIB2 + 9, Write).1, 2);
    }
    // The private frames: a part of one huge page, and all of another.
    let part = MIB2 + 5..MIB2 + 7;
    let whole = 2 * MIB2..3 * MIB2;
    world.convert(part.clone(), true);
    world.convert(whole.clone(), true);
    world.set(LOGGED);
    world.page(MIB2 + 9, Write);
    let before = world.vm.stats();
    world.set(NONE);
    assert_eq!(world.vm.stats().since(&before).collapses, 2);
    for gfns in [part, whole] {
        for gfn in [gfns.start, gfns.end - 1] {
            assert_eq!(world.touch(gfn, Read), memory_fault(gfn, Read, true, false));
        }
        world.assert_unmapped(gfns);
    }
    assert_eq!(world.page(MIB2 + 9, Write), (MIB2 + 9, 1));
    for block in [0, 3] {
        assert_eq!(world.page(block * MIB2 + 7, Write).1, 2);
    }
    world.check();
}

fn a_promotion_leaves_private_frames_as_they_are<F: Format>() {
    let mut world = World::<F>::with_private(Level::MEGA);
    world.policy("huge_pages", "off");
    let (part, whole) = (MIB2 + 5..MIB2 + 7, 2 * MIB2..3 * MIB2);
    world.convert(part.clone(), true);
    world.convert(whole.clone(), true);
    for block in 0..4 {
        (0..20).for_each(|page| _ = world.page(block * MIB2 + page, Write));
    }
    world.policy("huge_pages", "on");
    let leaves = world.vm.promote(&mut Promotion::default(), usize::MAX);
    assert_eq!(leaves, 2);
    for gfn in 0..4 * MIB2 {
        let is_private = part.contains(&gfn) || whole.contains(&gfn);
        let host = gfn + if is_private { PRIVATE } else { 0 };
        if gfn % 37 == 0 || gfn % MIB2 < 12 {
            assert_eq!(world.page(gfn, Read).0, host, "frame {gfn:#x}");
        }
    }
    world.check();
}

fn a_log_names_no_private_frame<F: Format>() {
    for method in ["write-protect", "dirty-bit"] {
        let mut world = World::<F>::empty(Level::PAGE);
        world.policy("dirty_log", method);
        world.policy("dirty_log_reads", "off");
        world.set(LOGGED);
        (0..8).for_each(|gfn| _ = world.page(gfn, Write));
        assert_eq!(world.log(), Vec::from_iter(0..8));
        (0..8).for_each(|gfn| _ = world.page(gfn, Write));
        // Writes to a frame before it became private are in the log. Later writes are not.
        world.convert(2..4, true);
        assert_eq!(world.log(), Vec::from_iter(0..8));
        for gfn in 2..4 {
            let fault = memory_fault(gfn, Write, true, false);
            assert_eq!(world.touch(gfn, Write), fault);
        }
        assert_eq!(world.log(), []);
        world.convert(2..4, false);
        world.page(3, Write);
        assert_eq!(world.log(), [3]);
        world.check();
    }
}

fn an_absent_private_page_is_both<F: Format>() {
    let mut world = World::<F>::with_private(Level::MEGA);
    let gfn = MIB2 + 7;
    let late = PRIVATE + gfn..PRIVATE + gfn + 1;
    world.platform.host.change(&late, HostChange::Await);
    world.convert(gfn - 2..gfn + 2, true);
    for access in [Read, Write, Execute] {
        let fault = memory_fault(gfn, access, true, true);
        assert_eq!(world.touch(gfn, access), fault);
    }
    // The frames beside the absent frame have memory, private or shared.
    assert_eq!(world.page(gfn - 1, Write), (PRIVATE + gfn - 1, 1));
    assert_eq!(world.page(gfn + 2, Write), (gfn + 2, 1));
    world.assert_unmapped(gfn..gfn + 1);
    // If the host removes the private backing, the fault reports that the page is private, and not that it is absent.
    world.replace(late.clone(), HostChange::Punch);
    let fault = memory_fault(gfn, Read, true, false);
    assert_eq!(world.touch(gfn, Read), fault);
    world.replace(late, remap(Level::PAGE));
    assert_eq!(world.page(gfn, Write), (PRIVATE + gfn, 1));
    // The shared page of the frame may be absent at the same time.
    world.replace(gfn..gfn + 1, HostChange::Await);
    assert_eq!(world.page(gfn, Read), (PRIVATE + gfn, 1));
    world.convert(gfn..gfn + 1, false);
    let fault = memory_fault(gfn, Read, false, true);
    assert_eq!(world.touch(gfn, Read), fault);
    world.check();
}

fn no_prefault_and_no_prefetch_maps_an_absent_private_page<F: Format>() {
    let mut world = World::<F>::with_private(Level::PAGE);
    world.policy("prefetch", "64");
    let late = PRIVATE + 20..PRIVATE + 21;
    world.platform.host.change(&late, HostChange::Await);
    world.convert(16..32, true);
    assert_eq!(world.page(17, Read).0, PRIVATE + 17);
    world.assert_unmapped(20..21);
    world.vcpu.enter_unguarded(1);
    world.vcpu.quiesce();
    let range = Gpa(16 << 12)..Gpa(32 << 12);
    assert_eq!(world.vcpu.prefault(range), Ok(4 << 12));
    let rest = Gpa(20 << 12)..Gpa(32 << 12);
    let stop = world.vcpu.prefault(rest);
    world.vcpu.leave();
    assert_eq!(stop, memory_fault(20, Read, true, true));
    world.check();
}

/// The client changes the host's mapping without an invalidation. It only zaps the frames, so that the next access asks
/// the host again.
fn a_zap_by_the_client_makes_a_fault_ask_again<F: Format>() {
    for private in [false, true] {
        let mut world = World::<F>::with_private(Level::PAGE);
        world.convert(7..8, private);
        let host = 7 + if private { PRIVATE } else { 0 };
        let before = world.platform.host.get(host).unwrap().pfn;
        let (vm, platform) = (world.vm.clone(), world.platform.clone());
        let is_resolved = |event| matches!(event, Event::Resolved(_));
        once_at(&world.platform, is_resolved, move || {
            platform.host.change(&(host..host + 1), remap(Level::PAGE));
            vm.zap(0, slat::Gfn(7)..slat::Gfn(8));
        });
        let found = world.touch(7, Write).unwrap().host.pfn();
        world.platform.clear_hook();
        let now = world.platform.host.get(host).unwrap().pfn;
        assert_ne!(now, before);
        assert_eq!(found, now, "what was resolved before the zap is mapped");
        world.check();
    }
}

fn a_private_page_is_aged_and_executed_in_parts<F: Format>() {
    let mut world = World::<F>::with_private(Level::MEGA);
    world.policy("nx_huge_pages", "on");
    world.convert(0..MIB2, true);
    assert_eq!(world.page(3, Write), (PRIVATE + 3, 2));
    assert_eq!(world.page(4, Execute), (PRIVATE + 4, 1));
    assert_eq!(world.vm.stats().nx_lpage_splits, 1);
    let of = |pages: std::ops::Range<u64>| slat_model::HostMemory::hvas(&pages);
    world.vm.age(of(0..2 * FRAMES), true);
    world.page(4, Read);
    assert_eq!(world.vm.age(of(0..FRAMES), true), 0);
    assert_eq!(world.vm.age(of(PRIVATE..PRIVATE + MIB2), true), 1);
    world.policy("nx_huge_pages_recovery_ratio", "1");
    assert_eq!(world.vm.recover_nx_huge_pages(), 1);
    assert_eq!(world.page(3, Write), (PRIVATE + 3, 2));
    world.check();
}
