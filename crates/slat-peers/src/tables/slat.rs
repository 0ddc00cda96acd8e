//! slat's tables, through the public API of a VM.

use super::{BASE, Order, PAGES, wanted};
use crate::machine::{Machine, region, vm};
use crate::report::{Metric, Samples, time};
use slat::{Access, Format, Gpa, Level, Mapping, SlotFlags, Vcpu, Vm};

const SLOT: u32 = 0;
const NONE: SlotFlags = SlotFlags(0);

fn set<F: Format>(vm: &Vm<Machine, F>, flags: SlotFlags) {
    vm.set_memory_region(0, &region(SLOT, flags, BASE, PAGES))
        .expect("a valid memslot");
}

fn prefault<F: Format>(vcpu: &mut Vcpu<Machine, F>) {
    let range = Gpa(BASE)..Gpa(BASE + (PAGES << 12));
    let mapped = vcpu.prefault(range).expect("all memory is there");
    assert_eq!(mapped, PAGES << 12);
}

fn translate<F: Format, const WRITE: bool>(vcpu: &mut Vcpu<Machine, F>, order: &Order) -> u64 {
    let access = if WRITE { Access::Write } else { Access::Read };
    order.translate(|gpa| match vcpu.translate(Gpa(gpa), access) {
        Ok(translation) => translation.host.0,
        Err(stop) => panic!("{stop}"),
    })
}

pub fn round<F: Format>(name: &str, order: &Order, samples: &mut Samples) {
    let (life, split) = wanted(samples);
    let mut add = |case: &str, ns: f64| {
        let per_page = ns / PAGES as f64;
        samples.add("tables", case, name, Metric::NsPerPage, per_page);
    };
    if life {
        let vm = vm::<F>(Level::PAGE);
        let mut vcpu = vm.create_vcpu().expect("memory for a vCPU");
        set(&vm, NONE);
        vcpu.enter_unguarded(0);
        add("map", time(|| prefault(&mut vcpu)).0);
        let first = time(|| translate::<F, true>(&mut vcpu, order));
        add("translate-first", first.0);
        let (ns, sum) = time(|| translate::<F, false>(&mut vcpu, order));
        assert_eq!(sum, order.expected(), "{name} translates wrongly");
        assert_eq!(first.1, sum);
        add("translate", ns);
        let frame = |mapping: Option<Mapping>| mapping.expect("it is mapped").pfn.hpa().0;
        let by_vcpu = |gpa| frame(vcpu.lookup(Gpa(gpa).gfn()));
        let (ns, sum) = time(|| order.translate(by_vcpu));
        assert_eq!(sum, order.expected());
        add("lookup-vcpu", ns);
        add("lookup-near-vcpu", time(|| order.translate_near(by_vcpu)).0);
        vcpu.leave();
        let by_vm = |gpa| frame(vm.lookup(0, Gpa(gpa).gfn()));
        let (ns, sum) = time(|| order.translate(by_vm));
        assert_eq!(sum, order.expected());
        add("lookup", ns);
        add("lookup-near", time(|| order.translate_near(by_vm)).0);
        add("protect", time(|| set(&vm, SlotFlags::LOG_DIRTY_PAGES)).0);
        add(
            "unmap",
            time(|| vm.remove_memory_region(0, SLOT).expect("a memslot")).0,
        );
        assert_eq!(vm.stats().pages_4k, 0);

        set(&vm, NONE);
        vcpu.enter_unguarded(0);
        prefault(&mut vcpu);
        vcpu.leave();
        add(
            "protect-live",
            time(|| set(&vm, SlotFlags::LOG_DIRTY_PAGES)).0,
        );
    }
    if split {
        split_huge::<F>(&mut add);
    }
}

/// Measures the split. `clear_dirty_log` first splits the huge leaves, because the slot logs and all bits of its log
/// are set.
fn split_huge<F: Format>(add: &mut impl FnMut(&str, f64)) {
    let vm = vm::<F>(Level::MEGA);
    vm.set_manual_dirty_log(true, true);
    let mut vcpu = vm.create_vcpu().expect("memory for a vCPU");
    set(&vm, NONE);
    vcpu.enter_unguarded(0);
    prefault(&mut vcpu);
    vcpu.leave();
    set(&vm, SlotFlags::LOG_DIRTY_PAGES);
    let nothing = vec![0; PAGES as usize / 64];
    let (ns, cleared) = time(|| vm.clear_dirty_log(0, SLOT, 0, PAGES, &nothing));
    cleared.expect("the slot logs");
    assert_eq!(vm.stats().pages_4k, PAGES);
    add("split", ns);
}
