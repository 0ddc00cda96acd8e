//! The machine of these tests, and functions that most of the tests use.

use std::ops::Range;
use std::sync::Arc;

use slat::{Access, Config, Ept, Gpa, Level, Region, SlotFlags, Stop, Translation, Vcpu, Vm};
use slat_model::{HostChange, HostMemory, PageKind, SimPlatform, set_region};

pub type Machine = SimPlatform;
pub type TestVm = Vm<Machine, Ept>;

pub const MIB2: u64 = 512;
pub const GIB1: u64 = 1 << 18;
pub const BUSY: u32 = 1 << 8;

pub const REMAP_4K: HostChange = remap(Level::PAGE);
pub const REMAP_2M: HostChange = remap(Level::MEGA);
pub const REMAP_1G: HostChange = remap(Level::GIGA);

pub const fn remap(level: Level) -> HostChange {
    HostChange::Remap {
        level,
        writable: true,
        kind: PageKind::Ordinary,
    }
}

pub fn vm(host_pages: u64, change: HostChange) -> (Arc<Machine>, Arc<TestVm>) {
    let platform = SimPlatform::new(host_pages);
    platform.host.change(&(0..host_pages), change);
    let vm = Vm::new(platform.clone(), Config::default()).unwrap();
    (platform, vm)
}

pub fn region(slot: u32, gfns: Range<u64>, host_page: u64, flags: SlotFlags) -> Region {
    Region::new(
        slot,
        Gpa(gfns.start << 12),
        (gfns.end - gfns.start) << 12,
        HostMemory::hva(host_page),
    )
    .with_flags(flags)
}

pub const NONE: SlotFlags = SlotFlags(0);

pub fn set(vm: &TestVm, slot: u32, gfns: Range<u64>, host_page: u64, flags: SlotFlags) {
    set_region(vm, 0, &region(slot, gfns, host_page, flags)).unwrap();
}

/// Makes one access by a vCPU, which enters for it and quiesces whenever it is asked to.
pub fn touch(vcpu: &mut Vcpu<Machine, Ept>, gfn: u64, access: Access) -> Result<Translation, Stop> {
    vcpu.enter_unguarded(1);
    vcpu.quiesce();
    let mut answer = vcpu.translate(Gpa(gfn << 12), access);
    if answer == Err(Stop::Retry) {
        vcpu.quiesce();
        answer = vcpu.translate(Gpa(gfn << 12), access);
    }
    vcpu.leave();
    answer
}

pub fn level(vcpu: &mut Vcpu<Machine, Ept>, gfn: u64, access: Access) -> u8 {
    touch(vcpu, gfn, access).unwrap().level.0
}

pub fn log(vm: &TestVm, slot: u32) -> Vec<u64> {
    let mut words = vec![0; vm.dirty_log_words(0, slot).unwrap()];
    vm.get_dirty_log(0, slot, &mut words).unwrap();
    let bit = |page: &u64| words[*page as usize / 64] >> (page % 64) & 1 != 0;
    (0..words.len() as u64 * 64).filter(bit).collect()
}
