//! Clones of VMs, on a machine that gives a VM a frame of its own when the VM first writes to a page: no VM sees
//! another VM's writes.

#[macro_use]
#[path = "../common/mod.rs"]
mod common;
#[macro_use]
#[path = "../common/passing.rs"]
mod passing;
mod machine;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::*};
use std::thread;

use common::config;
use machine::{Cow, PAGES, memory};
use slat::format::X86;
use slat::{
    Access::{self, *},
    ForkError, Format, Gpa, Level, MmuKind, Prefetch, Region, Setting, SlotFlags, Stop,
    Translation, Vcpu, Vm,
};
use slat_model::Rng;

on_every_format! {
    a_clone_reads_without_a_fault_and_writes_for_itself,
    a_write_to_a_shared_huge_page_leaves_its_other_pages_mapped,
    nobody_sees_what_another_one_writes,
    a_fork_survives_every_lack_of_memory,
    a_clone_has_the_slots_and_logs_for_itself,
    a_parent_that_runs_is_copied_at_one_moment,
}

type CowVm<F> = Vm<Cow<F>, F>;

/// The first frame of slot 1, which maps the same pages as slot 0.
const ALIAS: u64 = 4 * PAGES;

fn region(slot: u32, gfn: u64) -> Region {
    Region::new(slot, Gpa(gfn << 12), PAGES << 12, memory(0))
}

fn first<F: Format>(machine: &Arc<Cow<F>>) -> Arc<CowVm<F>> {
    let vm = Arc::new(Vm::unshared(machine.clone(), config()).unwrap());
    machine.add(&vm);
    machine.watch(&vm);
    vm.set_memory_region(0, &region(0, 0)).unwrap();
    vm.set_memory_region(0, &region(1, ALIAS)).unwrap();
    vm
}

fn fork<F: Format>(parent: &Arc<CowVm<F>>) -> Result<Arc<CowVm<F>>, ForkError> {
    let vm = Arc::new(Vm::fork_from(parent)?);
    parent.platform().add(&vm);
    Ok(vm)
}

fn end<F: Format>(vm: Arc<CowVm<F>>) {
    let (id, machine) = (vm.id(), vm.platform().clone());
    machine.forget();
    drop(Arc::into_inner(vm).expect("the last user"));
    machine.remove(id);
}

/// Makes the vCPU access `gfn`, and runs `then` while the vCPU may use the translation.
fn touch<F: Format, R>(
    vcpu: &mut Vcpu<Cow<F>, F>,
    gfn: u64,
    access: Access,
    then: impl FnOnce(Translation) -> R,
) -> Result<R, Stop> {
    let mut vcpu = vcpu.enter(1);
    loop {
        vcpu.quiesce();
        match vcpu.translate(Gpa(gfn << 12), access) {
            Err(Stop::Retry) => {}
            answer => break answer.map(then),
        }
    }
}

fn read<F: Format>(vcpu: &mut Vcpu<Cow<F>, F>, gfn: u64) -> u64 {
    let machine = vcpu.vm().platform().clone();
    touch(vcpu, gfn, Read, |page| machine.word(page.host).load(SeqCst)).unwrap()
}

fn write<F: Format>(vcpu: &mut Vcpu<Cow<F>, F>, gfn: u64, value: u64) {
    let machine = vcpu.vm().platform().clone();
    let store = |page: Translation| machine.word(page.host).store(value, SeqCst);
    touch(vcpu, gfn, Write, store).unwrap();
}

fn is_tdp() -> bool {
    config().mmu == MmuKind::Tdp
}

fn a_clone_reads_without_a_fault_and_writes_for_itself<F: Format>() {
    for level in [Level::PAGE, Level::MEGA] {
        let machine = Cow::<F>::new(level);
        let parent = first(&machine);
        let mut old = parent.create_vcpu().unwrap();
        (0..PAGES).for_each(|gfn| write(&mut old, gfn, gfn + 1));
        let mapped = parent.memory_usage().mapped_bytes();
        let child = fork(&parent).unwrap();
        parent.audit().unwrap();
        child.audit().unwrap();
        let mut new = child.create_vcpu().unwrap();
        if is_tdp() {
            assert_eq!(child.memory_usage().mapped_bytes(), mapped);
            let table_bytes = |vm: &CowVm<F>| vm.memory_usage().table_bytes;
            assert!(table_bytes(&child) <= table_bytes(&parent));
        }
        (0..PAGES).for_each(|gfn| assert_eq!(read(&mut new, gfn), gfn + 1));
        (0..PAGES).for_each(|gfn| assert_eq!(read(&mut old, gfn), gfn + 1));
        if is_tdp() {
            assert_eq!(child.stats().pf_taken, 0);
        }
        assert_eq!(machine.copies(), 0);
        write(&mut new, 7, 1000);
        write(&mut old, 8, 2000);
        assert_eq!(machine.copies(), 2);
        assert_eq!([read(&mut new, 7), read(&mut old, 7)], [1000, 8]);
        assert_eq!([read(&mut new, 8), read(&mut old, 8)], [9, 2000]);
        // Reads the same pages through slot 1.
        assert_eq!(read(&mut new, ALIAS + 7), 1000);
        assert_eq!(read(&mut old, ALIAS + 8), 2000);
        // Page 7 has no other user any more, so it is not copied.
        write(&mut old, 7, 3000);
        assert_eq!([read(&mut new, 7), read(&mut old, 7)], [1000, 3000]);
        assert_eq!(machine.copies(), 2);
        parent.audit().unwrap();
        child.audit().unwrap();
        drop((old, new));
        end(child);
        end(parent);
        machine.check();
    }
}

/// A VM that writes to one page of a shared huge leaf gets a copy of this page. The huge leaf is split: its other pages
/// stay mapped, and the other huge leaf stays huge.
fn a_write_to_a_shared_huge_page_leaves_its_other_pages_mapped<F: Format>() {
    let huge = Level::MEGA.pages();
    for written in [0, 7, huge - 1] {
        let machine = Cow::<F>::new(Level::MEGA);
        let parent = first(&machine);
        parent.set_policy(Setting::Prefetch(Prefetch::Off));
        let mut old = parent.create_vcpu().unwrap();
        (0..PAGES).for_each(|gfn| write(&mut old, gfn, gfn + 1));
        let child = fork(&parent).unwrap();
        let mut new = child.create_vcpu().unwrap();
        (0..PAGES).for_each(|gfn| assert_eq!(read(&mut new, gfn), gfn + 1));
        let before = child.stats();
        assert_eq!(before.pages_2m, PAGES / huge);
        machine.watch(&child);
        write(&mut new, written, 1000);
        machine.check_tlb();
        let after = child.stats();
        assert_eq!(after.pf_fixed - before.pf_fixed, 1, "faults of a write");
        assert_eq!(
            (after.pages_4k, after.pages_2m),
            (huge, PAGES / huge - 1),
            "leaves after a write to page {written}"
        );
        for gfn in (0..PAGES).filter(|gfn| *gfn != written) {
            assert_eq!(read(&mut new, gfn), gfn + 1);
        }
        assert_eq!(read(&mut new, written), 1000);
        assert_eq!(child.stats().pf_taken, after.pf_taken, "faults of reads");
        assert_eq!(machine.copies(), 1);
        child.audit().unwrap();
        drop((old, new));
        end(child);
        end(parent);
        machine.check();
    }
}

/// A VM, and the expected contents of its memory.
struct Known<F: Format> {
    vm: Arc<CowVm<F>>,
    vcpu: Vcpu<Cow<F>, F>,
    memory: Vec<u64>,
}

impl<F: Format> Known<F> {
    fn of(vm: Arc<CowVm<F>>, memory: Vec<u64>) -> Self {
        let vcpu = vm.create_vcpu().unwrap();
        Known { vm, vcpu, memory }
    }
}

/// Clones VMs and their clones, writes, reads, and drops VMs, in random order.
fn nobody_sees_what_another_one_writes<F: Format>() {
    for seed in 0..2 {
        let mut rng = Rng::new(seed);
        let level = [Level::PAGE, Level::MEGA][seed as usize % 2];
        let machine = Cow::<F>::new(level);
        let vm = first(&machine);
        if rng.below(2) == 0 {
            vm.set_policy(Setting::Prefetch(Prefetch::Off));
        }
        let mut vms = vec![Known::of(vm, vec![0; PAGES as usize])];
        let mut forks = 0;
        for step in 1..1500 {
            let at = rng.below(vms.len() as u64) as usize;
            let alive = vms.len();
            let this = &mut vms[at];
            let page = rng.below(PAGES);
            let gfn = page + [0, ALIAS][rng.below(2) as usize];
            match rng.below(64) {
                0 if alive < 6 => {
                    machine.watch(&this.vm);
                    let child = fork(&this.vm).unwrap();
                    machine.check_tlb();
                    if rng.below(2) == 0 {
                        machine.watch(&child);
                    }
                    let known = Known::of(child, this.memory.clone());
                    vms.push(known);
                    forks += 1;
                }
                1 if alive > 1 => {
                    let Known { vm, vcpu, .. } = vms.swap_remove(at);
                    drop(vcpu);
                    end(vm);
                }
                2 => {
                    let logged = [SlotFlags::default(), SlotFlags::LOG_DIRTY_PAGES];
                    let flags = logged[rng.below(2) as usize];
                    let set = this
                        .vm
                        .set_memory_region(0, &region(0, 0).with_flags(flags));
                    set.unwrap();
                }
                3 => drop(this.vm.invalidate(memory(page)..memory(page + 1))),
                4 => this.vm.audit().unwrap(),
                5..32 => {
                    write(&mut this.vcpu, gfn, step);
                    this.memory[page as usize] = step;
                }
                _ => assert_eq!(read(&mut this.vcpu, gfn), this.memory[page as usize]),
            }
            machine.check_tlb();
            machine.check();
        }
        assert!(forks > 3);
        for mut this in vms {
            for (gfn, expected) in this.memory.iter().enumerate() {
                assert_eq!(read(&mut this.vcpu, gfn as u64), *expected);
            }
            this.vm.audit().unwrap();
            drop(this.vcpu);
            end(this.vm);
        }
        machine.check();
        assert_eq!(machine.live_frames(), 0);
    }
}

fn a_fork_survives_every_lack_of_memory<F: Format>() {
    for stay in [false, true] {
        for n in 0.. {
            let machine = Cow::<F>::new(Level::PAGE);
            let parent = first(&machine);
            let mut old = parent.create_vcpu().unwrap();
            let gfns = (0..PAGES).step_by(100);
            gfns.clone().for_each(|gfn| write(&mut old, gfn, gfn + 1));
            let live = machine.live_frames();
            machine.fail_allocation(n, stay);
            let child = fork(&parent);
            let failed = machine.stop_failing();
            let child = child.or_else(|error| {
                assert!(failed);
                assert_eq!(
                    (error, machine.live_frames()),
                    (ForkError::OutOfMemory, live)
                );
                fork(&parent)
            });
            let child = child.unwrap();
            let mut new = child.create_vcpu().unwrap();
            for gfn in gfns {
                write(&mut old, gfn, 5000);
                assert_eq!(read(&mut new, gfn), gfn + 1);
            }
            child.audit().unwrap();
            parent.audit().unwrap();
            drop((old, new));
            end(parent);
            end(child);
            machine.check();
            assert_eq!(machine.live_frames(), 0);
            if !failed {
                assert!(n > 0, "a fork allocates");
                break;
            }
        }
    }
}

fn a_clone_has_the_slots_and_logs_for_itself<F: Format>() {
    let machine = Cow::<F>::new(Level::PAGE);
    let parent = first(&machine);
    let logged = region(0, 0).with_flags(SlotFlags::LOG_DIRTY_PAGES);
    parent.set_memory_region(0, &logged).unwrap();
    let mut old = parent.create_vcpu().unwrap();
    write(&mut old, 3, 3);
    let child = fork(&parent).unwrap();
    let mut new = child.create_vcpu().unwrap();
    write(&mut new, 5, 5);
    write(&mut old, 4, 4);
    write(&mut old, 3, 33);
    let log = |vm: &CowVm<F>| {
        let mut log = [0; (PAGES / 64) as usize];
        vm.get_dirty_log(0, 0, &mut log).unwrap();
        log[0]
    };
    assert_eq!([log(&parent), log(&child)], [1 << 3 | 1 << 4, 1 << 5]);
    // A change of the clone's slots does not change the parent's.
    child.remove_memory_region(0, 1).unwrap();
    assert!(touch(&mut new, ALIAS, Read, drop).is_err());
    assert_eq!(read(&mut old, ALIAS + 3), 33);
    assert_eq!(read(&mut new, 3), 3);
    drop((old, new));
    end(parent);
    end(child);
    machine.check();
}

/// Ends threads when dropped, also if the test fails.
struct Stops<'s>(&'s AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, SeqCst);
    }
}

/// The parent counts in one page, and then in the next page, so the second count is never higher than the first. The
/// same must hold in a clone.
fn a_parent_that_runs_is_copied_at_one_moment<F: Format>() {
    let machine = Cow::<F>::new(Level::PAGE);
    let parent = first(&machine);
    let (stop, counted) = (AtomicBool::new(false), AtomicU64::new(0));
    let (cause, effect) = (PAGES - 1, 0);
    thread::scope(|scope| {
        let _stops = Stops(&stop);
        let mut first = parent.create_vcpu().unwrap();
        let mut second = parent.create_vcpu().unwrap();
        let (stop, counted) = (&stop, &counted);
        scope.spawn(move || {
            for n in 1.. {
                if stop.load(SeqCst) {
                    break;
                }
                write(&mut first, cause, n);
                counted.store(n, SeqCst);
                thread::yield_now();
            }
        });
        scope.spawn(move || {
            while !stop.load(SeqCst) {
                let n = counted.load(SeqCst);
                write(&mut second, effect, n);
                thread::yield_now();
            }
        });
        for _ in 0..6 {
            machine.watch(&parent);
            let before = counted.load(SeqCst);
            let child = fork(&parent).unwrap();
            let mut vcpu = child.create_vcpu().unwrap();
            let (seen, followed) = (read(&mut vcpu, cause), read(&mut vcpu, effect));
            assert!(followed <= seen, "{followed} follows from {seen}");
            assert!(
                before <= seen,
                "{before} was counted before, {seen} is there"
            );
            while counted.load(SeqCst) < before + 2 {
                thread::yield_now();
            }
            assert_eq!(read(&mut vcpu, cause), seen);
            write(&mut vcpu, effect, u64::MAX);
            drop(vcpu);
            end(child);
        }
    });
    parent.audit().unwrap();
    end(parent);
    machine.check();
}

/// With the shadow MMU, the accesses use physical addresses, like those of a CPU without paging.
mod with_shadow_pages {
    use super::*;

    #[test]
    fn a_clone_writes_for_itself() {
        common::shadow(a_clone_reads_without_a_fault_and_writes_for_itself::<X86<5>>);
    }

    #[test]
    fn nobody_sees_what_another_one_writes() {
        common::shadow(super::nobody_sees_what_another_one_writes::<X86<5>>);
    }

    #[test]
    fn a_parent_that_runs_is_copied_at_one_moment() {
        common::shadow(super::a_parent_that_runs_is_copied_at_one_moment::<X86<5>>);
    }
}
