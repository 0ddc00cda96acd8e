//! Random operations on one thread: the engine against the plain model, every answer compared.

use slat::format::{Npt, Stage2};
use slat::{Ept, Format};
use slat_model::{Generator, Runner};

/// Enough for slots of 1 GiB and more.
const LARGE_HOST: u64 = 1 << 20;
/// 64 MiB: everything is shared with something.
const SMALL_HOST: u64 = 1 << 14;

fn run<F: Format>(seed: u64, host_pages: u64, steps: usize, failures: bool) {
    const VCPUS: usize = 3;
    let mut runner = Runner::<F>::new(host_pages, VCPUS);
    let mut generator = Generator::new(seed, host_pages, VCPUS, failures);
    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        for step in 0..steps {
            let op = generator.next_op(&runner.model);
            runner.run(&op);
            if step % 500 == 499 {
                runner.check();
            }
        }
        runner.finish();
    }));
    if let Err(panic) = result {
        eprintln!(
            "{}, seed {seed}, {host_pages} host pages, failures: {failures}",
            F::NAME
        );
        std::panic::resume_unwind(panic);
    }
}

#[test]
fn engine_and_model_agree_on_a_small_host() {
    for seed in 0..8 {
        run::<Ept>(seed, SMALL_HOST, 10_000, false);
    }
}

#[test]
fn engine_and_model_agree_on_a_host_with_room_for_1g_slots() {
    for seed in 100..104 {
        run::<Ept>(seed, LARGE_HOST, 8_000, false);
    }
}

#[test]
fn engine_and_model_agree_while_allocations_fail() {
    for seed in 200..206 {
        run::<Ept>(seed, SMALL_HOST, 10_000, true);
    }
}

#[test]
fn engine_and_model_agree_on_nested_pages_of_amd() {
    for seed in 300..303 {
        run::<Npt>(seed, SMALL_HOST, 10_000, false);
        run::<Npt>(seed, SMALL_HOST, 5_000, true);
    }
}

#[test]
fn engine_and_model_agree_on_stage_2_with_break_before_make() {
    for seed in 400..403 {
        run::<Stage2<48>>(seed, SMALL_HOST, 10_000, false);
        run::<Stage2<48>>(seed, SMALL_HOST, 5_000, true);
    }
}

#[test]
fn engine_and_model_agree_on_stage_2_with_hardware_dirty_state() {
    for seed in 450..452 {
        run::<Stage2<48, true>>(seed, SMALL_HOST, 10_000, false);
        run::<Stage2<48, true>>(seed, SMALL_HOST, 5_000, true);
    }
}
