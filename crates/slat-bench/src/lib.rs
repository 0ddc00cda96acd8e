//! Measures the benefit of each mechanism of KVM's guest-memory system. Within one run, each mechanism is on and off,
//! with a real guest on slat's software CPU (and on a real `/dev/kvm`, where it opens). The tables show the published
//! numbers beside ours, and the distance to the limit.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | [`machine`] | a KVM program with a guest of a few loops, over either KVM |
//! | [`rounds`] | variants of a case measured in turns |
//! | [`report`] | samples, medians, paired ratios, JSON |
//! | [`maps`] | how guest memory is mapped, between the phases |
//! | [`published`] | the references' numbers |
//! | [`compared`] | comparisons and their goals |
//! | [`show`] | tables for people |
//! | [`html`] | the tables as a page with charts |
//! | [`bare`], [`mod@array`] | the engine alone; the rival, whose memslots are an array |
//! | `qemu` | QEMU, for comparison and as a program to run |
//! | `memory_file` | files in memory that other programs open |
//! | `experiment`, `others` | the description of an experiment; the other programs that some experiments start |
//! | `experiments` | one file for each experiment: its set-up, the timed operations, its rows |
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

// This allows the rival's documentation to refer to the experiment that uses the rival, which is private.
#[allow(rustdoc::private_intra_doc_links)]
pub mod array;
pub mod bare;
pub mod compared;
mod experiment;
mod experiments;
pub mod html;
pub mod machine;
pub mod maps;
mod memory_file;
mod others;
pub mod published;
mod qemu;
pub mod report;
pub mod rounds;
pub mod show;

pub use experiment::Experiment;
pub(crate) use experiment::Settable;
pub use experiments::exit::{CLIENT as EXIT_CLIENT, client as measure_exits};
pub use machine::Failure;
pub use others::{Linux, Others};
pub use report::{Report, Row};
pub use rounds::Size;

use rounds::Bench;

/// All experiments, in the order in which they run.
pub const EXPERIMENTS: &[Experiment] = &[
    experiments::memslots::EXPERIMENT,
    experiments::prefetch::EXPERIMENT,
    experiments::mmio::EXPERIMENT,
    experiments::exit::EXPERIMENT,
    experiments::execute::EXPERIMENT,
    experiments::split::EXPERIMENT,
    experiments::dirty::EXPERIMENT,
    experiments::waits::EXPERIMENT,
    experiments::faults::EXPERIMENT,
    experiments::nested::EXPERIMENT,
    experiments::clone::EXPERIMENT,
    experiments::cpu::EXPERIMENT,
    experiments::vmm::EXPERIMENT,
];

/// Runs experiments, without the parts that need other programs.
///
/// # Errors
/// If a guest did not do its work, or the set-up failed.
pub fn run(selection: &[&Experiment], size: Size) -> Result<Report, Failure> {
    run_with(selection, size, Others::default())
}

/// Like [`run`], but with the parts that need other programs. If files of these are missing, a note of the report says
/// so.
///
/// # Errors
/// The errors of [`run`].
pub fn run_with(selection: &[&Experiment], size: Size, others: Others) -> Result<Report, Failure> {
    let mut bench = Bench::new(size)?;
    bench.others = others;
    for experiment in selection {
        bench.begin(experiment.name);
        (experiment.run)(&mut bench)?;
    }
    Ok(bench.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_experiment_is_explained_in_ten_lines_that_fit() {
        for experiment in EXPERIMENTS {
            let lines: Vec<_> = experiment.explain.lines().collect();
            assert_eq!(lines.len(), 10, "{}", experiment.name);
            assert!(lines.iter().all(|line| line.chars().count() <= 100));
        }
    }

    #[test]
    fn names_are_unique() {
        for (index, experiment) in EXPERIMENTS.iter().enumerate() {
            let before = &EXPERIMENTS[..index];
            assert!(before.iter().all(|other| other.name != experiment.name));
        }
    }

    #[test]
    fn what_was_published_belongs_to_an_experiment() {
        for published in published::PUBLISHED {
            assert!(EXPERIMENTS.iter().any(|e| e.name == published.experiment));
        }
    }
}
