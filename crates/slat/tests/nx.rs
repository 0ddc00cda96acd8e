//! NX huge pages: how an execution fault changes the huge leaf that it finds, and how that is counted.

use std::sync::Arc;

use slat::Setting;
use slat::format::{Npt, Stage2, Sv48x4};
use slat::{
    Access::{self, *},
    Config, Ept, Format, Gpa, Level, Region, SlotFlags, Stats, Stop, Vcpu, Vm,
};
use slat_model::{HostMemory, SimPlatform};

const MIB2: u64 = 512;
const GIB1: u64 = 1 << 18;

/// Makes one access. Repeats it as often as the vCPU has to quiesce and retry.
fn touch<F: Format>(vcpu: &mut Vcpu<SimPlatform, F>, gfn: u64, access: Access) -> Level {
    vcpu.enter_unguarded(1);
    let level = loop {
        vcpu.quiesce();
        match vcpu.translate(Gpa(gfn << 12), access) {
            Ok(found) => break found.level,
            Err(Stop::Retry) => {}
            Err(stop) => panic!("{stop}"),
        }
    };
    vcpu.leave();
    level
}

/// Makes a VM with a slot of 1 GiB, which the host maps by one page, and sets `policies`.
fn vm<F: Format>(policies: &[(&str, &str)]) -> Arc<Vm<SimPlatform, F>> {
    let platform = SimPlatform::at_level(GIB1, Level::GIGA);
    let vm = Vm::<_, F>::new(platform, Config::default()).unwrap();
    for (policy, value) in [("nx_huge_pages", "on"), ("prefetch", "off")]
        .iter()
        .chain(policies)
    {
        vm.set_policy(Setting::parse(policy, value).unwrap());
    }
    vm.set_memory_region(0, &slot()).unwrap();
    vm
}

fn slot() -> Region {
    Region::new(0, Gpa(0), GIB1 << 12, HostMemory::hva(0))
}

/// Executes from the frames `at`, in this order, in a leaf of 1 GiB that is not executable. Returns the counts.
fn execute<F: Format>(splits: &str, at: &[u64]) -> Stats {
    let vm = vm::<F>(&[("nx_huge_pages_split", splits)]);
    let mut vcpu = vm.create_vcpu().unwrap();
    assert_eq!(touch(&mut vcpu, 0, Write), Level::GIGA);
    let before = vm.stats();
    for &gfn in at {
        assert_eq!(touch(&mut vcpu, gfn, Execute), Level::PAGE);
    }
    vm.audit().unwrap();
    vm.stats().since(&before)
}

/// Two pages of one region of 2 MiB, and two of another.
const PLACES: &[u64] = &[0, 7, MIB2 + 1, MIB2];

fn a_split_counts_as_the_fault_that_fixed_it<F: Format>() {
    let did = execute::<F>("on", PLACES);
    assert_eq!((did.pf_fixed, did.pf_spurious), (2, 0), "{did:?}");
    // The leaf of 1 GiB and two leaves of 2 MiB were split.
    assert_eq!((did.splits, did.zapped), (3, 0), "{did:?}");
    assert_eq!(did.nx_lpage_splits, 2, "{did:?}");
}

#[test]
fn an_execution_fault_splits_in_place_and_counts_as_fixed_on_every_format() {
    a_split_counts_as_the_fault_that_fixed_it::<Ept>();
    a_split_counts_as_the_fault_that_fixed_it::<Npt>();
    a_split_counts_as_the_fault_that_fixed_it::<Stage2<48>>();
    a_split_counts_as_the_fault_that_fixed_it::<Sv48x4>();
}

#[test]
fn without_the_split_every_page_faults_back_in() {
    let did = execute::<Ept>("off", PLACES);
    assert_eq!((did.pf_fixed, did.splits, did.zapped), (4, 0, 1), "{did:?}");
}

/// The pages of a table that exists because of NX have separate dirty bits. A huge leaf that replaced the table would
/// have only one.
#[test]
fn recovery_leaves_out_slots_that_log() {
    for by in ["write-protect", "dirty-bit", "buffer"] {
        let vm = vm::<Npt>(&[("dirty_log", by), ("nx_huge_pages_recovery_ratio", "1")]);
        let mut vcpu = vm.create_vcpu().unwrap();
        touch(&mut vcpu, 0, Write);
        touch(&mut vcpu, 3, Execute);
        assert_eq!(vm.stats().nx_lpage_splits, 1);

        let logged = slot().with_flags(SlotFlags::LOG_DIRTY_PAGES);
        vm.set_memory_region(0, &logged).unwrap();
        touch(&mut vcpu, 5, Write);
        let splits = vm.stats().nx_lpage_splits;
        assert!(splits > 0, "{by}");
        assert_eq!(vm.recover_nx_huge_pages(), 0, "{by}");
        assert_eq!(vm.stats().nx_lpage_splits, splits, "{by}");
        let mut words = vec![0; (GIB1 / 64) as usize];
        vm.get_dirty_log(0, 0, &mut words).unwrap();
        assert_eq!(
            (words[0], words[1..].iter().any(|&word| word != 0)),
            (1 << 5, false),
            "{by}"
        );
    }
}
