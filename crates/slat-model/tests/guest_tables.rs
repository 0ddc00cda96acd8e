//! Tests the judge of guest MMUs: a correct MMU passes, and each defect of a defective MMU is found.

use slat::format::{Ept5, Npt, Npt5};
use slat::{Ept, MmuKind};
use slat_model::Tally;
use slat_model::guest::{Defect, GuestSubject, OF_CACHES, SavedMmu, USUAL};

/// The number of accesses of one run.
const RUN: u64 = 2_000;

fn never_met<'a>(tally: &Tally, names: &[&'a str]) -> Vec<&'a str> {
    let never = names.iter().filter(|what| tally.of(what) == 0);
    never.copied().collect()
}

#[test]
fn the_engine_walks_as_the_manual_says() {
    for mmu in [MmuKind::Tdp, MmuKind::Direct] {
        let tally = GuestSubject::engine(mmu).run_seeds(0..48, RUN);
        assert_eq!(never_met(&tally, &USUAL), [""; 0]);
    }
}

#[test]
fn the_shadow_mmu_does_what_a_processor_may() {
    let tally = GuestSubject::shadow().run_seeds(0..56, RUN);
    assert_eq!(never_met(&tally, &USUAL), [""; 0]);
    // The shadow MMU caches leaves of the guest's tables. This MMU zaps entries of higher levels at once.
    assert!(tally.of("stale translation") > 0, "{tally:?}");
}

#[test]
fn a_hypervisor_and_its_guest_may_share_tables() {
    for subject in [GuestSubject::engine(MmuKind::Tdp), GuestSubject::shadow()] {
        let tally = subject.with_nested_tables().run_seeds(0..24, RUN);
        assert!(tally.of("access") >= 24 * RUN, "{tally:?}");
    }
}

#[test]
fn nested_tables_are_shadowed_beside_the_second_level() {
    let subjects = [
        GuestSubject::nested::<Npt>(MmuKind::Tdp),
        GuestSubject::nested::<Npt5>(MmuKind::Tdp),
        GuestSubject::nested::<Ept>(MmuKind::Tdp),
        GuestSubject::nested::<Npt>(MmuKind::Direct),
        GuestSubject::nested::<Ept5>(MmuKind::Direct),
    ];
    for subject in subjects {
        let tally = subject.run_seeds(0..16, RUN);
        assert!(tally.of("stale translation") > 0, "{subject:?}: {tally:?}");
    }
}

/// The guest's stores, its MMU's flags, slot changes and invalidations.
#[test]
fn a_snapshot_has_each_page_before_it_is_written_through_shadow_pages() {
    let nested = |mmu| {
        let make = move |machine: &_| SavedMmu::<Npt>::nested(machine, mmu);
        GuestSubject::new(format!("nested, {mmu:?}, saved"), make).with_nested_tables()
    };
    let subjects = [
        GuestSubject::new("shadow, saved", SavedMmu::new),
        nested(MmuKind::Tdp),
        nested(MmuKind::Direct),
    ];
    for subject in subjects {
        // In the other runs the client writes, too.
        for seed in (0..16).filter(|seed| seed % 4 != 3) {
            let tally = subject.run_seed(seed, RUN);
            assert!(tally.of("access") >= RUN, "{tally:?}");
        }
    }
}

#[test]
fn whatever_the_manual_allows_is_allowed() {
    let tally = GuestSubject::caching().run_seeds(0..48, RUN);
    assert_eq!(never_met(&tally, &USUAL), [""; 0]);
    assert_eq!(never_met(&tally, &OF_CACHES), [""; 0]);
}

/// The number of runs in which each defect must be found at least once.
const SEEDS: u64 = 8;

#[test]
fn each_defect_is_found() {
    for defect in Defect::ALL {
        let subject = GuestSubject::with_defect(defect);
        let found = (0..SEEDS).find(|seed| subject.fails(*seed, RUN));
        println!("{defect:?}: seed {found:?}");
        assert!(found.is_some(), "{defect:?} is not found");
    }
}

#[test]
fn a_failing_run_is_shortened() {
    let subject = GuestSubject::with_defect(Defect::ForgetsInvlpg);
    let failure = (0..SEEDS).find_map(|seed| subject.try_seed(seed, RUN).err());
    let failure = failure.expect("the defect is found");
    assert!(failure.ops() < 100, "{failure}");
    let text = failure.to_string();
    assert!(text.contains("ForgetsInvlpg, seed "), "{text}");
    assert!(text.contains("Invlpg {"), "{text}");
}

/// Run this test by `cargo test -p slat-model --release --test guest_tables -- --ignored --nocapture`. SLAT_STEPS sets
/// the number of accesses, and SLAT_SEED the first seed.
#[test]
#[ignore = "takes minutes"]
fn a_campaign() {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let (accesses, first) = (
        number("SLAT_STEPS", 10_000_000),
        number("SLAT_SEED", 1 << 32),
    );
    let subjects = [
        GuestSubject::engine(MmuKind::Tdp),
        GuestSubject::engine(MmuKind::Direct),
        GuestSubject::shadow(),
        GuestSubject::shadow().with_nested_tables(),
        GuestSubject::nested::<Npt>(MmuKind::Tdp),
        GuestSubject::nested::<Ept>(MmuKind::Tdp),
        GuestSubject::nested::<Npt>(MmuKind::Direct),
        GuestSubject::caching(),
    ];
    let runs = accesses.div_ceil(subjects.len() as u64 * RUN);
    for subject in subjects {
        let begin = std::time::Instant::now();
        let tally = subject.run_seeds(first..first + runs, RUN);
        println!(
            "{subject:?}: {runs} seeds from {first}, {:.1?}",
            begin.elapsed()
        );
        tally
            .iter()
            .for_each(|(what, n)| println!("    {n:>10} {what}"));
    }
}
