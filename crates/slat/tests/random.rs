//! Makes random operations on one thread, on every format, and compares each result of the engine with that of the
//! plain model.

use std::collections::BTreeSet;

use slat::Policy;
use slat_model::{Mix, POLICIES, Rng, Setup, Subject, Tally, streams};

/// Makes 16 runs of 8,000 steps: each setup, on each format. If these have not covered everything, makes up to 64 more.
fn agree_on(format: usize) {
    let subject = &Subject::ALL[format];
    let seed = 1000 * format as u64;
    let mut tally = subject.run_seeds(seed..seed + 16, 8_000);
    let is_tdp = !subject.name.contains("direct");
    let of_tdp = Tally::OF_TDP.into_iter().filter(|_| is_tdp);
    let usual = Tally::USUAL
        .into_iter()
        .chain(Tally::OF_RINGS)
        .chain(of_tdp);
    let never = |tally: &Tally| -> Vec<_> {
        let unmet = usual.clone().filter(|what| tally.of(what) == 0);
        unmet.collect()
    };
    for seed in seed + 16..seed + 80 {
        if never(&tally).is_empty() {
            return;
        }
        tally.add(&subject.run_seeds(seed..seed + 1, 8_000));
    }
    let never = never(&tally);
    assert!(never.is_empty(), "{} never met: {never:?}", subject.name);
}

/// Makes 13 runs of 8,000 steps on a VM and its clones.
fn clones_agree_on(format: usize) {
    let is_tdp = !Subject::ALL[format].name.contains("direct");
    let wanted = &Tally::OF_CLONES[..if is_tdp { 4 } else { 3 }];
    mix_agrees_on(format, Mix::CLONES, 13, 8_000, wanted);
}

/// Makes 5 runs of 3,000 steps on VMs that are saved while they run.
fn snapshots_agree_on(format: usize) {
    mix_agrees_on(format, Mix::SNAPSHOTS, 5, 3_000, &Tally::OF_SNAPSHOTS);
}

/// Makes `runs` runs of `steps` steps with the frequencies of `mix`. They must cover everything in `wanted`.
fn mix_agrees_on(format: usize, mix: Mix, runs: u64, steps: usize, wanted: &[&str]) {
    let subject = &Subject::ALL[format];
    let seed = 1000 * format as u64;
    let mut tally = Tally::default();
    for seed in seed..seed + runs {
        let setup = Setup {
            mix,
            ..Setup::of_seed(seed)
        };
        tally.add(&subject.run_seed(seed, setup, steps));
    }
    let never: Vec<_> = wanted.iter().filter(|what| tally.of(what) == 0).collect();
    assert!(never.is_empty(), "{} never met: {never:?}", subject.name);
}

/// The first word tells whether other formats take the same paths; then running the test in `.ci/full` suffices.
macro_rules! formats {
    ($agree:ident, $repeats:tt: $($name:ident: $format:expr,)*) => {$(
        #[test]
        #[cfg_attr($repeats, ignore = "takes the paths of another format; .ci/full")]
        fn $name() { $agree($format); }
    )*};
}

mod engine_and_model_agree_on {
    use super::agree_on;
    formats! { agree_on, false:
        ept: 0,
        x86_with_5_levels: 2,
        stage_2_with_break_before_make: 3,
        stage_2_with_a_concatenated_root: 4,
        sv39x4: 5,
        stage_2_with_hardware_dirty_state: 7,
        ept_made_of_shadow_pages: 8,
        sv57x4: 12,
        ept_with_5_levels_made_of_shadow_pages: 13,
        stage_2_with_52_bits: 14,
        stage_2_of_16k_with_a_concatenated_root: 15,
        npt_beside_shadow_pages: 19,
    }

    formats! { agree_on, true:
        npt: 1,
        sv48x4: 6,
        npt_made_of_shadow_pages: 9,
        ept_with_5_levels: 10,
        npt_with_5_levels: 11,
        stage_2_of_16k_with_52_bits: 16,
        stage_2_of_64k: 17,
        stage_2_of_64k_with_52_bits: 18,
    }

    #[test]
    fn no_fewer_formats_than_there_are() {
        assert_eq!(super::Subject::ALL.len(), 20);
    }
}

mod clones_agree_with_the_model_on {
    use super::clones_agree_on;
    formats! { clones_agree_on, false:
        ept: 0,
        stage_2_with_break_before_make: 3,
    }

    formats! { clones_agree_on, true:
        npt: 1,
        x86_with_5_levels: 2,
        stage_2_with_a_concatenated_root: 4,
        sv39x4: 5,
        sv48x4: 6,
        stage_2_with_hardware_dirty_state: 7,
        ept_made_of_shadow_pages: 8,
        npt_made_of_shadow_pages: 9,
        ept_with_5_levels: 10,
        npt_with_5_levels: 11,
        sv57x4: 12,
        ept_with_5_levels_made_of_shadow_pages: 13,
        stage_2_with_52_bits: 14,
        npt_beside_shadow_pages: 19,
    }
}

mod snapshots_agree_with_the_model_on {
    use super::snapshots_agree_on;
    formats! { snapshots_agree_on, false:
        ept: 0,
        npt: 1,
        x86_with_5_levels: 2,
        stage_2_with_break_before_make: 3,
        stage_2_with_a_concatenated_root: 4,
        sv39x4: 5,
        stage_2_with_hardware_dirty_state: 7,
        ept_made_of_shadow_pages: 8,
        npt_beside_shadow_pages: 19,
    }

    formats! { snapshots_agree_on, true:
        sv48x4: 6,
        npt_made_of_shadow_pages: 9,
        ept_with_5_levels: 10,
        npt_with_5_levels: 11,
        sv57x4: 12,
        ept_with_5_levels_made_of_shadow_pages: 13,
        stage_2_with_52_bits: 14,
        stage_2_of_16k_with_a_concatenated_root: 15,
        stage_2_of_16k_with_52_bits: 16,
        stage_2_of_64k: 17,
        stage_2_of_64k_with_52_bits: 18,
    }
}

#[test]
fn the_generator_knows_every_policy() {
    let known: BTreeSet<_> = POLICIES.iter().map(|(name, _)| *name).collect();
    let all: BTreeSet<_> = Policy::default()
        .iter()
        .map(|policy| policy.name())
        .collect();
    assert_eq!(known, all);
}

/// The fuzz targets are built separately. This test makes their runs.
#[test]
fn whatever_bytes_say_the_engine_and_the_model_agree() {
    for seed in 0..100 {
        let mut rng = Rng::new(seed);
        let length = rng.below(4096);
        let bytes: Vec<u8> = (0..length).map(|_| rng.word() as u8).collect();
        streams::slot_operations(&bytes);
        streams::operation_streams(&bytes);
    }
}

/// `cargo test -p slat --release --test random -- --ignored --nocapture`. SLAT_STEPS=… and SLAT_SEED=… set the length
/// and the first seed. SLAT_FORMATS=… selects the formats whose name contains that text.
#[test]
#[ignore = "takes minutes"]
fn a_campaign_over_all_formats() {
    let number = |name: &str, default: u64| {
        std::env::var(name).map_or(default, |text| text.parse().expect("a number"))
    };
    let (steps, first) = (
        number("SLAT_STEPS", 10_000_000),
        number("SLAT_SEED", 1 << 32),
    );
    const RUN: u64 = 20_000;
    let named = std::env::var("SLAT_FORMATS").unwrap_or_default();
    let is_named = |subject: &&Subject| subject.name.contains(&named);
    let subjects: Vec<_> = Subject::ALL.iter().filter(is_named).collect();
    assert!(!subjects.is_empty(), "no format is called {named}");
    let runs = steps.div_ceil(RUN * subjects.len() as u64);
    for subject in subjects {
        let begin = std::time::Instant::now();
        let tally = subject.run_seeds(first..first + runs, RUN as usize);
        let (steps, time) = (runs * RUN, begin.elapsed());
        println!(
            "{}: {steps} steps, {runs} seeds from {first}, {time:.1?}",
            subject.name
        );
        tally
            .iter()
            .for_each(|(what, n)| println!("    {n:>10} {what}"));
    }
}
