//! Layered memory: what each VM maps and costs, what is freed when, and random operations on VMs and their clones.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../common/passing.rs"]
mod passing;
mod machine;
mod stacks;

use std::sync::Arc;

use common::config;
use machine::{Layered, MEMORY, Rig};
use slat::format::{Stage2, Stage2Kib16, Sv48x4, X86};
use slat::{
    Access::{self, *},
    Ept, Format, Gfn, Gpa, Granule, Level, MmuKind, Pfn, Promotion, Region, Setting, Stop, Vcpu,
    Vm,
};
use slat_model::{FailingHeap, Mix, Setup, Subject, Tally};

#[global_allocator]
static HEAP: FailingHeap = FailingHeap;

on_every_format! {
    a_clone_of_a_huge_base_maps_it_huge_until_it_writes,
    a_base_mapped_by_small_leaves_is_promoted_for_its_clones,
    a_write_survives_every_lack_of_memory,
}

type LayeredVm<F> = Vm<Layered, F>;

/// The pages of a leaf of level 2.
const HUGE: u64 = Level::MEGA.pages();

/// Makes a machine with a VM that has a base of `pages` pages in consecutive frames. Also returns the first frame.
fn first<F: Format>(pages: u64) -> (Arc<LayeredVm<F>>, Pfn) {
    let mut base = Pfn(0);
    let platform = Layered::new(Granule::Kib4, pages, |memory, stack| {
        base = memory.block(pages, HUGE);
        stack.put(MEMORY, base, pages).unwrap();
    });
    let vm = known(Vm::unshared(platform, config()).unwrap());
    let region = Region::new(0, Gpa(0), pages << 12, MEMORY);
    vm.set_memory_region(0, &region).unwrap();
    (vm, base)
}

/// Tells the platform of a new VM.
fn known<F: Format>(vm: LayeredVm<F>) -> Arc<LayeredVm<F>> {
    let vm = Arc::new(vm);
    let weak = Arc::downgrade(&vm);
    let invalidate = move |page: slat::Hva, _, change: &mut dyn FnMut()| {
        let vm = weak.upgrade().expect("one of its vCPUs asks");
        let guard = vm.invalidate_exact(page..page.add_pages(1));
        change();
        drop(guard);
    };
    vm.platform().add(vm.id(), Arc::new(invalidate));
    vm
}

fn fork<F: Format>(vm: &Arc<LayeredVm<F>>) -> Arc<LayeredVm<F>> {
    known(Vm::fork_from(vm).unwrap())
}

fn end<F: Format>(vm: Arc<LayeredVm<F>>) {
    let (id, platform) = (vm.id(), vm.platform().clone());
    drop(Arc::into_inner(vm).expect("the last user"));
    platform.remove(id);
}

/// Makes the vCPU access frame `gfn`.
fn touch<F: Format>(vcpu: &mut Vcpu<Layered, F>, gfn: u64, access: Access) -> Result<Pfn, Stop> {
    let mut vcpu = vcpu.enter(1);
    loop {
        vcpu.quiesce();
        match vcpu.translate(Gpa(gfn << 12), access) {
            Err(Stop::Retry) => {}
            answer => break answer.map(|page| page.host.pfn()),
        }
    }
}

fn a_clone_of_a_huge_base_maps_it_huge_until_it_writes<F: Format>() {
    const LEAVES: u64 = 512;
    let (template, base) = first::<F>(LEAVES * HUGE);
    let mut vcpu = template.create_vcpu().unwrap();
    for stretch in 0..LEAVES {
        touch(&mut vcpu, stretch * HUGE, Write).unwrap();
    }
    drop(vcpu);
    let (clone, other) = (fork(&template), fork(&template));
    let is_tdp = config().mmu == MmuKind::Tdp;
    let faults = if is_tdp { 0 } else { LEAVES };
    let read_all = |vm: &Arc<LayeredVm<F>>| {
        let mut vcpu = vm.create_vcpu().unwrap();
        for stretch in 0..LEAVES {
            let gfn = stretch * HUGE + stretch;
            assert_eq!(touch(&mut vcpu, gfn, Read).unwrap(), base.add(gfn));
        }
        assert_eq!(vm.stats().pf_fixed, faults, "faults of reads");
        assert_eq!((vm.stats().pages_4k, vm.stats().pages_2m), (0, LEAVES));
        assert!(!vm.lookup(0, Gfn(7)).unwrap().rights.write);
        vcpu
    };
    let mut vcpu = read_all(&clone);
    drop(read_all(&other));
    assert_eq!(
        clone
            .platform()
            .view(clone.id())
            .stack
            .lock()
            .unwrap()
            .heap_bytes(),
        0
    );

    // One fault gives the VM a copy of the page.
    let (frames, written) = (clone.platform().memory.live(), 3 * HUGE + 5);
    match config().mmu {
        MmuKind::Shadow => drop(touch(&mut vcpu, written, Write).unwrap()),
        _ => vcpu.hardware_fault(Gpa(written << 12), Write).unwrap(),
    }
    assert_eq!(clone.stats().pf_fixed - faults, 1, "faults of a write");
    assert_eq!(clone.platform().memory.live(), frames + 1);
    let view = clone.platform().view(clone.id());
    assert_eq!(view.stack.lock().unwrap().own_pages(), 1);
    let own = touch(&mut vcpu, written, Read).unwrap();
    assert!(!(base.0..base.0 + LEAVES * HUGE).contains(&own.0));

    // The other pages of the stretch come from the base, without a fault. The other stretches are still huge.
    assert_eq!(
        (clone.stats().pages_4k, clone.stats().pages_2m),
        (HUGE, LEAVES - 1)
    );
    for gfn in (3 * HUGE..4 * HUGE).filter(|gfn| *gfn != written) {
        assert_eq!(touch(&mut vcpu, gfn, Read).unwrap(), base.add(gfn));
    }
    assert_eq!(clone.stats().pf_fixed - faults, 1);
    assert_eq!(
        (other.stats().pages_4k, other.stats().pages_2m),
        (0, LEAVES)
    );
    assert_eq!(
        touch(&mut other.create_vcpu().unwrap(), written, Read),
        Ok(base.add(written))
    );
    for vm in [&template, &clone, &other] {
        vm.audit().unwrap();
    }
    drop((vcpu, view));
    let platform = template.platform().clone();
    [clone, template, other].into_iter().for_each(end);
    assert_eq!(platform.memory.live(), 0);
}

/// A VM that has mapped its memory by small leaves becomes a base: then its memory is complete, and `promote` maps it
/// by huge leaves that are not writable, which its clones get.
fn a_base_mapped_by_small_leaves_is_promoted_for_its_clones<F: Format>() {
    const LEAVES: u64 = 4;
    let (template, base) = first::<F>(LEAVES * HUGE);
    template.set_policy(Setting::parse("huge_pages", "off").unwrap());
    let mut vcpu = template.create_vcpu().unwrap();
    for gfn in 0..LEAVES * HUGE {
        touch(&mut vcpu, gfn, Write).unwrap();
    }
    template.set_policy(Setting::parse("huge_pages", "on").unwrap());
    let before = fork(&template);
    let small = config().mmu == MmuKind::Tdp;
    assert_eq!(
        before.stats().pages_4k,
        if small { LEAVES * HUGE } else { 0 }
    );
    while template.promote(&mut Promotion::default(), 64) > 0 {}
    let after = fork(&template);
    if config().mmu == MmuKind::Tdp {
        assert_eq!(
            (template.stats().pages_4k, template.stats().pages_2m),
            (0, LEAVES)
        );
        assert_eq!(
            (after.stats().pages_4k, after.stats().pages_2m),
            (0, LEAVES)
        );
        assert!(after.memory_usage().table_bytes < before.memory_usage().table_bytes);
    }
    for vm in [&template, &after] {
        let mut vcpu = vm.create_vcpu().unwrap();
        for gfn in 0..LEAVES * HUGE {
            assert_eq!(touch(&mut vcpu, gfn, Read), Ok(base.add(gfn)));
            assert!(!vm.lookup(0, Gfn(gfn)).unwrap().rights.write);
        }
        vm.audit().unwrap();
        assert_eq!(vm.stats().pages_2m, LEAVES);
    }
    drop(vcpu);
    [before, after, template].into_iter().for_each(end);
}

/// Of everything that a first write to a page allocates (tables, a frame, memory for the records), each one fails, and
/// also all after it. The write then ends with an error or succeeds, and succeeds when there is memory again.
fn a_write_survives_every_lack_of_memory<F: Format>() {
    for (stay, kind) in [false, true]
        .into_iter()
        .flat_map(|stay| [0, 1, 2].map(|kind| (stay, kind)))
    {
        for n in 0.. {
            let (template, base) = first::<F>(2 * HUGE);
            let platform = template.platform().clone();
            let mut old = template.create_vcpu().unwrap();
            touch(&mut old, 0, Write).unwrap();
            let clone = fork(&template);
            let mut vcpu = clone.create_vcpu().unwrap();
            touch(&mut vcpu, 0, Read).unwrap();
            let (answer, failed) = match kind {
                0 => {
                    platform.fail_allocation(n, stay);
                    let answer = touch(&mut vcpu, 9, Write).map(drop);
                    (
                        answer.map_err(|stop| stop.to_string()),
                        platform.stop_failing(),
                    )
                }
                1 => {
                    platform.memory.fail_after(n);
                    let answer = touch(&mut vcpu, 9, Write).map(drop);
                    platform.memory.fail_after(u64::MAX);
                    (answer.map_err(|stop| stop.to_string()), n == 0)
                }
                _ => {
                    let view = platform.view(clone.id());
                    let mut stack = view.stack.lock().unwrap();
                    let make = || stack.copy(MEMORY.add_pages(9)).map(drop);
                    let (made, failed) = FailingHeap::failing(n as u32, stay, make);
                    (made.map_err(|error| error.to_string()), failed)
                }
            };
            if let Err(stop) = answer {
                assert!(failed, "{stop}, though nothing failed");
                // There may be a copy already, and no memory for a table to map it.
                let view = platform.view(clone.id());
                let found = view
                    .stack
                    .lock()
                    .unwrap()
                    .find(MEMORY.add_pages(9))
                    .unwrap();
                assert_eq!(touch(&mut vcpu, 9, Read), Ok(found.pfn));
            }
            let own = touch(&mut vcpu, 9, Write).unwrap();
            assert_ne!(own, base.add(9));
            assert_eq!(touch(&mut vcpu, 10, Read), Ok(base.add(10)));
            assert_eq!(touch(&mut old, 9, Read), Ok(base.add(9)));
            clone.audit().unwrap();
            drop((vcpu, old));
            [clone, template].into_iter().for_each(end);
            assert_eq!(platform.memory.live(), 0);
            if !failed {
                assert!(n > 0, "a write allocates");
                break;
            }
        }
    }
}

/// Runs random operations on VMs and their clones, with layered memory.
fn clones_agree(subject: &Subject) {
    let is_tdp = !subject.name.contains("direct");
    let mut tally = Tally::default();
    for seed in 0..4 {
        let setup = Setup {
            mix: Mix::CLONES,
            ..Setup::of_seed(seed)
        };
        tally.add(&subject.run_seed(seed, setup, 4_000));
    }
    let wanted = &Tally::OF_CLONES[..if is_tdp { 4 } else { 3 }];
    for what in wanted.iter().chain(&["huge page"]) {
        assert!(tally.of(what) > 0, "{what} was never met");
    }
}

macro_rules! random_operations {
    ($($name:ident: $format:ty, $mmu:ident;)*) => {
        mod random_operations {
            use super::*;
            $(#[test]
            fn $name() {
                let subject = Subject::of::<Rig<$format>, $format>(stringify!($name));
                clones_agree(&subject.with_mmu(stringify!($name), MmuKind::$mmu));
            })*
        }
    };
}

random_operations! {
    ept: Ept, Tdp;
    ept_direct: Ept, Direct;
    x86_with_5_levels: X86<5>, Tdp;
    stage_2: Stage2<48>, Tdp;
    stage_2_16_kib: Stage2Kib16<48>, Tdp;
    sv48x4: Sv48x4, Tdp;
}

/// With the shadow MMU, the accesses use physical addresses, like those of a CPU without paging.
mod with_shadow_pages {
    use super::*;

    #[test]
    fn a_clone_maps_the_base_huge_until_it_writes() {
        common::shadow(a_clone_of_a_huge_base_maps_it_huge_until_it_writes::<X86<5>>);
    }

    #[test]
    fn a_write_survives_every_lack_of_memory() {
        common::shadow(super::a_write_survives_every_lack_of_memory::<X86<5>>);
    }
}
