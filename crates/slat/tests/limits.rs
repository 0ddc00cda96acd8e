//! Memslots with limited rights and a memory type: no leaf has more rights, or caches more, than its slot allows,
//! whichever mechanism has made or changed the leaf.

#[macro_use]
mod common;

use std::sync::Arc;

use slat::format::{Entry, Leaf};
use slat::{
    Access::{self, *},
    Format, Gfn, Gpa, Level, MemoryType, Region, RegionError, Rights, Setting, SlotFlags, Stop,
    Translation, Vcpu, Vm,
};
use slat_model::{HostMemory, SimPlatform};

const MIB2: u64 = 512;
/// The number of pages of the slot: two huge leaves and some more pages.
const PAGES: u64 = 2 * MIB2 + 9;
const LOGGED: SlotFlags = SlotFlags::LOG_DIRTY_PAGES;
const MEMORY: [MemoryType; 3] = [
    MemoryType::WriteBack,
    MemoryType::WriteCombining,
    MemoryType::Device,
];

on_every_format! {
    no_leaf_exceeds_the_limits_of_its_slot,
    a_slot_with_less_memory_or_rights_takes_the_place_of_another_at_once,
    an_access_beyond_the_rights_installs_nothing,
}

fn all_rights() -> [Rights; 4] {
    let no_execute = Rights::ALL.with_execute(false);
    [
        Rights::ALL,
        no_execute,
        Rights::READ.with_execute(true),
        Rights::READ,
    ]
}

struct World<F: Format> {
    vm: Arc<Vm<SimPlatform, F>>,
    vcpu: Vcpu<SimPlatform, F>,
    region: Region,
}

impl<F: Format> World<F> {
    /// Makes a VM with slot 0, which has `rights` and `memory`, on a host with pages of `level`.
    fn new(level: Level, rights: Rights, memory: MemoryType) -> Self {
        let platform = SimPlatform::at_level(PAGES, level);
        let vm = Vm::new(platform, common::config()).unwrap();
        let region = Region::new(0, Gpa(0), PAGES << 12, HostMemory::hva(0))
            .with_rights(rights)
            .with_memory(memory);
        vm.set_memory_region(0, &region).unwrap();
        let vcpu = vm.create_vcpu().unwrap();
        World { vm, vcpu, region }
    }

    fn policy(&self, name: &str, value: &str) {
        self.vm.set_policy(Setting::parse(name, value).unwrap());
    }

    fn flags(&mut self, flags: SlotFlags) {
        self.region = self.region.with_flags(flags);
        self.vm.set_memory_region(0, &self.region).unwrap();
    }

    /// Returns the rights that the guest has. Memory that is not write-back is never executable.
    fn rights(&self) -> Rights {
        let executable = self.region.memory == MemoryType::WriteBack;
        (self.region.rights).with_execute(self.region.rights.execute && executable)
    }

    fn access(&mut self, gfn: u64, access: Access) -> Result<Translation, Stop> {
        let mut vcpu = self.vcpu.enter(1);
        loop {
            vcpu.quiesce();
            match vcpu.translate(Gpa(gfn << 12), access) {
                Err(Stop::Retry) => {}
                answer => break answer,
            }
        }
    }

    /// Accesses a page in each way. Checks that an access that the slot does not allow ends with the right exit.
    fn touch(&mut self, gfn: u64) {
        let (rights, gpa) = (self.rights(), Gpa(gfn << 12));
        for access in [Read, Execute, Write, Execute, Read] {
            let answer = self.access(gfn, access);
            let at = || format!("{access:?} at {gpa}, {:?}: {answer:?}", self.region);
            match (rights.allow(access), access) {
                (true, Read) => assert!(answer.is_ok(), "{}", at()),
                (true, Write) => assert!(answer.is_ok_and(|page| page.write), "{}", at()),
                (true, Execute) => assert!(answer.is_ok_and(|page| page.execute), "{}", at()),
                (false, Write) => assert_eq!(answer, Err(Stop::Mmio { gpa }), "{}", at()),
                (false, _) => assert_eq!(answer, Err(Stop::NoExecute { gpa }), "{}", at()),
            }
        }
        self.check();
    }

    fn leaves(&self) -> Vec<(Gfn, Level, Leaf)> {
        let mut leaves = Vec::new();
        let mut note = |gfn, level, entry| match entry {
            Entry::Leaf(leaf) => leaves.push((gfn, level, leaf)),
            entry => panic!("{entry:?} at {gfn:?}"),
        };
        self.vm.visit_leaves(0, Gfn(0)..Gfn(PAGES), &mut note);
        leaves
    }

    /// Checks that no leaf has more rights than the slot. Returns the number of leaves.
    fn check(&self) -> usize {
        let (leaves, rights) = (self.leaves(), self.rights());
        for (gfn, level, leaf) in &leaves {
            let at = || format!("{leaf:?} of {level:?} at {gfn:?} in {:?}", self.region);
            assert!(rights.write || !leaf.write && !leaf.may_write, "{}", at());
            let executable = leaf.execute || leaf.may_execute;
            assert_eq!(executable, rights.execute, "{}", at());
            assert_eq!(leaf.memory, self.region.memory, "{}", at());
            let found = self.vm.lookup(0, *gfn).unwrap();
            assert_eq!(
                (found.memory, found.pfn),
                (leaf.memory, leaf.pfn),
                "{}",
                at()
            );
        }
        self.vm.audit().unwrap();
        leaves.len()
    }
}

fn no_leaf_exceeds_the_limits_of_its_slot<F: Format>() {
    for (rights, memory) in all_rights()
        .into_iter()
        .flat_map(|r| MEMORY.map(|m| (r, m)))
    {
        // Checks leaves in several states: huge leaves; leaves that NX splits; leaves that the start of dirty logging
        // splits; leaves to which the log's faults give the right to write back; and the huge leaves that return when
        // logging ends.
        let mut world = World::<F>::new(Level::MEGA, rights, memory);
        world.policy("prefetch", "off");
        world.touch(MIB2 + 3);
        world.policy("nx_huge_pages", "on");
        world.touch(3);
        world.policy("nx_huge_pages", "off");
        world.flags(LOGGED);
        world.check();
        for gfn in [4, MIB2 + 3, 2 * MIB2 + 1] {
            world.touch(gfn);
        }
        let mut log = [0; PAGES.div_ceil(64) as usize];
        world.vm.get_dirty_log(0, 0, &mut log).unwrap();
        world.check();
        let marked = log[(MIB2 / 64) as usize] & 1 << 3 != 0;
        assert!(marked || !rights.write, "{:?}", world.region);
        world.touch(MIB2 + 3);
        world.flags(SlotFlags::default());
        world.check();
        world.touch(MIB2 + 3);

        // Checks leaves of pages around a fault, and of pages that are mapped ahead.
        let mut world = World::<F>::new(Level::PAGE, rights, memory);
        world.policy("prefetch", "8");
        world.access(3, Read).unwrap();
        assert_eq!(world.check(), 8);
        world.touch(4);
        let mut vcpu = world.vcpu.enter(1);
        vcpu.quiesce();
        assert_eq!(vcpu.prefault(Gpa(0)..Gpa(PAGES << 12)), Ok(PAGES << 12));
        drop(vcpu);
        assert_eq!(world.check(), PAGES as usize);
        world.touch(MIB2 + 7);
    }
}

/// The rights and the memory type of a slot cannot change, like the read-only flag. Another slot that replaces the slot
/// finds none of its leaves.
fn a_slot_with_less_memory_or_rights_takes_the_place_of_another_at_once<F: Format>() {
    let mut world = World::<F>::new(Level::MEGA, Rights::ALL, MemoryType::WriteBack);
    world.touch(3);
    for (rights, memory) in [
        (Rights::READ, MemoryType::WriteBack),
        (Rights::ALL.with_execute(false), MemoryType::WriteBack),
        (Rights::ALL, MemoryType::WriteCombining),
        (Rights::READ, MemoryType::Device),
    ] {
        let changed = world.region.with_rights(rights).with_memory(memory);
        let refused = world.vm.set_memory_region(0, &changed);
        assert_eq!(refused, Err(RegionError::Resized(0)));
        assert_eq!(world.vm.check_memory_region(0, &changed), refused);
        let moved = changed.with_gpa(Gpa(1 << 30));
        assert_eq!(world.vm.set_memory_region(0, &moved), refused);
        world.touch(3);

        world.vm.remove_memory_region(0, 0).unwrap();
        assert_eq!(world.leaves(), []);
        world.vm.set_memory_region(0, &changed).unwrap();
        world.region = changed;
        world.touch(3);
        let found = world.vcpu.enter(1).slot_at(Gpa(0x3000));
        assert_eq!(found, Some(changed));
        // A slot that moves keeps its rights.
        world.vm.set_memory_region(0, &moved).unwrap();
        world.vm.set_memory_region(0, &changed).unwrap();
        world.touch(3);
    }
}

fn an_access_beyond_the_rights_installs_nothing<F: Format>() {
    let mut world = World::<F>::new(Level::MEGA, Rights::READ, MemoryType::WriteBack);
    for access in [Write, Execute] {
        world.access(3, access).unwrap_err();
        assert_eq!(world.leaves(), []);
        let error = world.vcpu.hardware_fault(Gpa(0x3000), access).unwrap_err();
        assert!(!error.to_string().is_empty());
    }
    assert_eq!(world.leaves(), []);
    let before = world.vm.stats();
    world.access(3, Execute).unwrap_err();
    // The slot's rights refuse the access before the host is asked for the page.
    let did = world.vm.stats().since(&before);
    assert_eq!(
        (
            did.pf_fixed,
            did.pf_emulate,
            did.slot_lookups + did.slot_lookups_saved
        ),
        (0, 0, 1)
    );
}
