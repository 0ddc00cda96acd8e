//! A fault, step by step: what changes between two of its steps, and what the platform answers.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::*;
use crate::addr::{Hva, Pfn};
use crate::format::{Npt, Stage2};
use crate::heap::Shared;
use crate::platform::ResolveError;
use crate::policy::Setting;
use crate::slots::{Edit, MemoryAttributes, OwnedSlot, Region, SlotFlags};
use crate::sync::quiesce::Attention;
use crate::table::heap_platform::{Heap, Resolve};
use crate::vm::{Config, DirtyGfn, DirtyLog, DirtyRing, Vm};

const PAGES: u64 = 512;
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;
const GPA: Gpa = Gpa(7 << 12);
/// No memslot is there.
const BEYOND: Gpa = Gpa(PAGES << 13);

fn region(flags: SlotFlags) -> Region {
    Region::new(0, Gpa(0), PAGES << 12, Hva(0)).with_flags(flags)
}

fn vm<F: Format>(region: &Region) -> Arc<Vm<Heap, F>> {
    let vm = Vm::new(Arc::new(Heap::default()), Config::default()).unwrap();
    vm.set_memory_region(0, region).unwrap();
    vm
}

/// Has a CPU write to `GPA`, and calls `meanwhile` after the fault has chosen its leaf. Returns why it installed none,
/// and how often it was found out of date.
fn write_while<F: Format>(
    vm: &Arc<Vm<Heap, F>>,
    attention: u32,
    meanwhile: impl FnOnce(),
) -> (Option<Next>, u64) {
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.enter_unguarded(0);
    vcpu.make_room(GPA).unwrap();
    let walk = vcpu.pause(crate::table::Reached::nothing(
        vcpu.key(F::GRANULE.gfn(GPA)),
    ));
    let mut fault = Fault::new(&mut vcpu, walk, None, GPA, Access::Write, true);
    assert!(fault.find_slot().is_ok());
    fault.page = Some(HostPage::new(Pfn(7), Level::PAGE));
    let leaf = fault.choose_leaf();
    meanwhile();
    fault.vcpu.attention().raise(attention);
    let why = fault.install(leaf).err();
    vcpu.leave();
    (why, vcpu.stats().pf_retried)
}

fn is_mapped<F: Format>(vm: &Vm<Heap, F>) -> bool {
    vm.lookup(0, F::GRANULE.gfn(GPA)).is_some()
}

#[test]
fn a_write_is_noted_in_the_log_of_its_slot_or_installed_nowhere() {
    let bitmap = || DirtyLog::bitmap(LogKind::Bitmap, PAGES, false).unwrap();
    let new_log = || Shared::try_new(bitmap()).unwrap();
    for (flags, other) in [(LOGGED, Some(new_log())), (SlotFlags(0), None)] {
        let vm = vm::<Npt>(&region(LOGGED));
        let mut change = vm.spaces[0].slots.change(|_| ());
        change.catch_up(&vm.readers, |_, _| ());
        let new = OwnedSlot::new(&region(flags), Npt::GRANULE, other.clone());
        let edit = Edit {
            id: 0,
            new: Some(new),
        };
        // The moment at which the new set is published, and the sequence not raised yet.
        let (why, retried) = write_while(&vm, 0, || {
            change.replace(&mut [edit], &vm.readers).unwrap();
        });
        assert!(matches!(why, Some(Next::Again)));
        assert_eq!((is_mapped(&vm), retried), (false, 1));
        let is_marked = |log: &Shared<DirtyLog>| (0..PAGES).any(|page| log.is_marked(page));
        assert!(!other.as_ref().is_some_and(is_marked));
    }
    // Otherwise it is.
    let vm = vm::<Npt>(&region(LOGGED));
    assert!(write_while(&vm, 0, || ()).0.is_none());
    let change = vm.spaces[0].slots.change(|_| ());
    let log = change.by_id(0).unwrap().share_log().unwrap();
    assert!((0..PAGES).all(|page| log.is_marked(page) == (page == 7)));
}

#[test]
fn a_fault_waits_for_a_move_only_if_the_log_is_in_the_leaves() {
    for (method, waits) in [("dirty-bit", true), ("write-protect", false)] {
        let vm = vm::<Npt>(&region(SlotFlags(0)));
        vm.set_policy(Setting::parse("dirty_log", method).unwrap());
        vm.set_memory_region(0, &region(LOGGED)).unwrap();
        let moving = vm.in_progress.slot_moves();
        // A CPU that is wanted elsewhere does not wait on.
        let (why, retried) = write_while(&vm, Attention::FLUSH << 1, || ());
        assert_eq!(matches!(why, Some(Next::Stop(Stop::Retry))), waits);
        assert_eq!((is_mapped(&vm), retried), (!waits, u64::from(waits)));
        drop(moving);
        assert!(write_while(&vm, 0, || ()).0.is_none());
    }
}

#[test]
fn what_was_looked_up_before_the_sequence_was_raised_is_not_installed() {
    let vm = vm::<Stage2<48>>(&region(SlotFlags(0)));
    let (why, retried) = write_while(&vm, 0, || vm.in_progress.raise());
    assert!(matches!(why, Some(Next::Again)));
    assert_eq!((is_mapped(&vm), retried), (false, 1));
    assert!(write_while(&vm, 0, || ()).0.is_none());
    assert!(is_mapped(&vm));
}

#[test]
fn each_answer_of_the_platform_stops_an_access_in_its_own_way() {
    let shared = region(SlotFlags(0));
    let both = shared.with_private(Some(Hva(1 << 30)));
    let private_alone = shared.with_private(Some(Hva(0)));
    for (region, is_private) in [
        (shared, false),
        (both, false),
        (both, true),
        (private_alone, false),
        (private_alone, true),
    ] {
        let vm = vm::<Npt>(&region);
        if is_private {
            let gfns = Gfn(0)..Gfn(PAGES);
            vm.set_memory_attributes(gfns, MemoryAttributes::PRIVATE)
                .unwrap();
        }
        let backing = if is_private {
            region.private.unwrap()
        } else {
            region.backing
        };
        let hva = Hva(backing.0 + GPA.0);
        let fault = |absent| Stop::MemoryFault {
            gpa: GPA,
            access: Access::Read,
            private: is_private,
            absent,
        };
        let error = ResolveError::BadAddress;
        let unresolved = match is_private || region == private_alone {
            true => fault(false),
            false => Stop::BadAddress {
                gpa: GPA,
                hva,
                error,
            },
        };
        let mut vcpu = vm.create_vcpu().unwrap();
        let mut vcpu = vcpu.enter(0);
        let interrupted: Resolve = |_| Err(ResolveError::Interrupted);
        for (answer, stop) in [
            (interrupted, Stop::Retry),
            (|_| Err(ResolveError::Absent), fault(true)),
            (|_| Err(ResolveError::BadAddress), unresolved),
        ] {
            *vm.platform.resolve.lock().unwrap() = answer;
            assert_eq!(vcpu.translate(GPA, Access::Read), Err(stop));
        }
        assert_eq!(vcpu.stats().pf_emulate, 0);
    }
}

#[test]
fn a_private_page_without_private_memory_is_no_device() {
    let vm = vm::<Npt>(&region(SlotFlags(0)));
    let all = Gfn(0)..Gfn(4 * PAGES);
    vm.set_memory_attributes(all, MemoryAttributes::PRIVATE)
        .unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    for gpa in [GPA, BEYOND] {
        let fault = Stop::MemoryFault {
            gpa,
            access: Access::Write,
            private: true,
            absent: false,
        };
        assert_eq!(vcpu.translate(gpa, Access::Write), Err(fault));
    }
    assert_eq!(vcpu.stats().pf_emulate, 0);
}

#[test]
fn each_access_that_the_client_emulates_is_counted_once() {
    let vm = vm::<Npt>(&region(SlotFlags::READONLY));
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut vcpu = vcpu.enter(0);
    let last = Gpa(!0xfff);
    for (count, gpa) in (1..).zip([GPA, GPA, BEYOND, last, last]) {
        assert_eq!(vcpu.translate(gpa, Access::Write), Err(Stop::Mmio { gpa }));
        let did = vcpu.stats();
        assert_eq!((did.pf_emulate, did.mmio_cached), (count, 0));
    }
    // By the MMIO entry that the fault has installed.
    let mmio = Stop::Mmio { gpa: BEYOND };
    assert_eq!(vcpu.translate(BEYOND, Access::Read), Err(mmio));
    let did = vcpu.stats();
    assert_eq!((did.pf_emulate, did.mmio_cached), (5, 1));
    assert_eq!(did.pf_mmio_spte_created, 1);
}

#[test]
fn a_bitmap_is_marked_also_by_a_cpu_that_has_a_ring() {
    let vm = vm::<Npt>(&region(LOGGED));
    *vm.platform.resolve.lock().unwrap() = |of| Ok(HostPage::new(Pfn(of.gfn.0), Level::PAGE));
    let entries: Vec<DirtyGfn> = (0..1024).map(|_| DirtyGfn::new()).collect();
    let ring = Arc::new(DirtyRing::new(entries).unwrap());
    let mut vcpu = vm.create_vcpu().unwrap();
    vcpu.set_dirty_ring(ring).unwrap();
    assert!(vcpu.enter(0).translate(GPA, Access::Write).unwrap().write);
    let mut bitmap = [0; PAGES as usize / 64];
    vm.get_dirty_log(0, 0, &mut bitmap).unwrap();
    assert_eq!(bitmap.map(u64::count_ones).iter().sum::<u32>(), 1);
}

#[test]
fn a_table_made_for_nx_is_replaced_when_that_is_off() {
    let vm = vm::<Npt>(&region(SlotFlags(0)));
    *vm.platform.resolve.lock().unwrap() = |of| Ok(HostPage::new(Pfn(of.gfn.0), Level::MEGA));
    let set = |value| vm.set_policy(Setting::parse("nx_huge_pages", value).unwrap());
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut level = |gpa, access| {
        let mut vcpu = vcpu.enter(0);
        loop {
            match vcpu.translate(gpa, access) {
                Err(Stop::Retry) => vcpu.quiesce(),
                found => return found.unwrap().level,
            }
        }
    };
    set("on");
    assert_eq!(level(GPA, Access::Execute), Level::PAGE);
    assert_eq!(level(Gpa(8 << 12), Access::Read), Level::PAGE);
    set("off");
    assert_eq!(level(Gpa(9 << 12), Access::Read), Level::MEGA);
}
