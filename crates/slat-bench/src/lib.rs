//! What each mechanism of KVM's guest-memory system is worth, measured: every one on and off within
//! one run, with a real guest on slat's software CPU (and on a real `/dev/kvm`, where it opens), the
//! published numbers beside ours, and how far the limit is.
//!
//! | file | idea |
//! |---|---|
//! | [`machine`] | a KVM program with a guest of a few loops, over either KVM |
//! | [`rounds`] | variants of a case measured in turns |
//! | [`report`] | samples, medians, paired ratios, JSON |
//! | [`maps`] | by what guest memory is mapped, between the phases |
//! | [`published`] | the references' numbers |
//! | [`show`] | tables for people, with what is asked for |
//! | [`html`] | the same as a page with charts |
//! | [`bare`], [`mod@array`] | the engine alone, and the rival whose memslots are an array |
//! | `experiments` | one file each: what is set up, what is timed, which rows |
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

// The rival speaks of the experiment that it runs in, which is private.
#[allow(rustdoc::private_intra_doc_links)]
pub mod array;
pub mod bare;
mod experiments;
pub mod html;
pub mod machine;
pub mod maps;
pub mod published;
pub mod report;
pub mod rounds;
pub mod show;

pub use machine::Failure;
pub use report::{Report, Row};
pub use rounds::Size;

use std::path::PathBuf;

use rounds::Bench;
use show::{Line, Rows};

/// One experiment.
pub struct Experiment {
    /// Its name on the command line and in the report.
    pub name: &'static str,
    /// What it is about, in one line.
    pub title: &'static str,
    /// What is measured and why, in ten lines.
    pub explain: &'static str,
    /// Measures.
    pub(crate) run: fn(&mut Bench) -> Result<(), Failure>,
    /// What is to be compared with what, and what is asked for.
    pub compare: fn(&Report) -> Vec<Line>,
    /// What the rows of its table are.
    pub(crate) rows: Rows,
}

/// All experiments, in the order in which they run.
pub const EXPERIMENTS: &[Experiment] = &[
    experiments::memslots::EXPERIMENT,
    experiments::prefetch::EXPERIMENT,
    experiments::mmio::EXPERIMENT,
    experiments::execute::EXPERIMENT,
    experiments::split::EXPERIMENT,
    experiments::dirty::EXPERIMENT,
    experiments::waits::EXPERIMENT,
    experiments::faults::EXPERIMENT,
    experiments::cpu::EXPERIMENT,
    experiments::vmm::EXPERIMENT,
];

/// What it takes to boot Linux under QEMU on slat.
#[derive(Clone, Debug)]
pub struct Linux {
    /// The `slat` command.
    pub slat: PathBuf,
    /// Where `conformance/vmm/materials` has put a kernel and an initrd.
    pub materials: PathBuf,
}

/// Runs experiments, without those parts that need other programs.
///
/// # Errors
/// If a guest did not do what it was to do, or something could not be set up.
pub fn run(selection: &[&Experiment], size: Size) -> Result<Report, Failure> {
    run_with(selection, size, None)
}

/// Like [`run`], but boots `linux`, too. Where that is not there, a note of the report says so.
///
/// # Errors
/// As [`run`].
pub fn run_with(
    selection: &[&Experiment],
    size: Size,
    linux: Option<Linux>,
) -> Result<Report, Failure> {
    let mut bench = Bench::new(size)?;
    bench.linux = linux;
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
