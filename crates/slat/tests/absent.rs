//! Pages that are not there yet: an access to such a page ends with an exit that tells the client so, and nothing else
//! maps the page.

#[path = "common/access.rs"]
mod access;

use std::sync::Arc;

use access::touch;
use slat::format::{Npt, Stage2, Sv48x4, X86};
use slat::{
    Access::{self, *},
    Config, Ept, Format, Gfn, Gpa, Level, MmuKind, Region, SlotFlags, Stop, Translation, Vm,
};
use slat_model::{HostChange, HostMemory, PageKind, SimPlatform};

const PAGES: u64 = 2048;
/// A page of the second huge page, which the host does not have at first.
const LATE: u64 = 700;

fn vm<F: Format>(mmu: MmuKind) -> (Arc<SimPlatform>, Arc<Vm<SimPlatform, F>>) {
    let platform = SimPlatform::at_level(PAGES, Level::MEGA);
    platform.host.change(&(LATE..LATE + 1), HostChange::Await);
    let vm = Vm::new(platform.clone(), Config::default().with_mmu(mmu)).unwrap();
    let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0));
    vm.set_memory_region(0, &region).unwrap();
    (platform, vm)
}

/// Makes the page `LATE` resident.
fn bring(platform: &SimPlatform) {
    let change = HostChange::Remap {
        level: Level::PAGE,
        writable: true,
        kind: PageKind::Ordinary,
    };
    platform.host.change(&(LATE..LATE + 1), change);
}

fn not_there_yet(access: Access) -> Result<Translation, Stop> {
    Err(Stop::MemoryFault {
        gpa: Gpa(LATE << 12),
        access,
        private: false,
        absent: true,
    })
}

fn each_is_told_of<F: Format>(mmu: MmuKind) {
    let (platform, vm) = vm::<F>(mmu);
    let mut vcpu = vm.create_vcpu().unwrap();
    for access in [Read, Write, Execute] {
        assert_eq!(touch(&mut vcpu, LATE, access), not_there_yet(access));
    }
    // No other access maps the absent page: neither by a huge leaf nor by prefetch.
    for gfn in (512..1024).filter(|gfn| *gfn != LATE).rev() {
        let found = touch(&mut vcpu, gfn, Write).unwrap();
        assert_eq!(HostMemory::identify(found.host.pfn()).0, gfn);
        assert_eq!(vm.lookup(0, Gfn(LATE)), None, "after frame {gfn}");
    }
    assert_eq!(touch(&mut vcpu, 3, Write).unwrap().level, Level::MEGA);
    assert_eq!(touch(&mut vcpu, LATE, Read), not_there_yet(Read));
    vm.audit().unwrap();

    bring(&platform);
    let found = touch(&mut vcpu, LATE, Read).unwrap();
    assert_eq!(HostMemory::identify(found.host.pfn()).0, LATE);

    // The page becomes absent again.
    let invalidation = vm.invalidate(HostMemory::hvas(&(LATE..LATE + 1)));
    platform.host.change(&(LATE..LATE + 1), HostChange::Await);
    drop(invalidation);
    assert_eq!(touch(&mut vcpu, LATE, Write), not_there_yet(Write));
    vm.audit().unwrap();
    platform.check();
}

#[test]
fn each_is_told_of_on_every_format_and_mmu() {
    each_is_told_of::<Ept>(MmuKind::Tdp);
    each_is_told_of::<Ept>(MmuKind::Direct);
    each_is_told_of::<Npt>(MmuKind::Tdp);
    each_is_told_of::<Npt>(MmuKind::Direct);
    each_is_told_of::<Stage2<48>>(MmuKind::Tdp);
    each_is_told_of::<Stage2<40, true>>(MmuKind::Tdp);
    each_is_told_of::<Sv48x4>(MmuKind::Tdp);
    each_is_told_of::<X86<5>>(MmuKind::Tdp);
    each_is_told_of::<X86<5>>(MmuKind::Shadow);
}

#[test]
fn a_write_that_is_logged_stops_and_is_not_logged() {
    let (platform, vm) = vm::<Ept>(MmuKind::Tdp);
    let logged = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0))
        .with_flags(SlotFlags::LOG_DIRTY_PAGES);
    vm.set_memory_region(0, &logged).unwrap();
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(touch(&mut vcpu, LATE, Write), not_there_yet(Write));
    let mut log = vec![0; PAGES as usize / 64];
    vm.get_dirty_log(0, 0, &mut log).unwrap();
    assert!(log.iter().all(|word| *word == 0));
    bring(&platform);
    touch(&mut vcpu, LATE, Write).unwrap();
    vm.get_dirty_log(0, 0, &mut log).unwrap();
    assert_eq!(log[LATE as usize / 64], 1 << (LATE % 64));
}

#[test]
fn a_prefault_ends_before_it() {
    let (_, vm) = vm::<Ept>(MmuKind::Tdp);
    let mut vcpu = vm.create_vcpu().unwrap();
    let mut entered = vcpu.enter(1);
    let late = LATE << 12;
    assert_eq!(entered.prefault(Gpa(0)..Gpa(PAGES << 12)), Ok(late));
    let stop = not_there_yet(Read).map(|_| 0);
    assert_eq!(entered.prefault(Gpa(late)..Gpa(PAGES << 12)), stop);
}
