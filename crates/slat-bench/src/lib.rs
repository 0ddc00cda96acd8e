//! What each mechanism of KVM's guest-memory system is worth, measured: every one on and off within one run, with a
//! real guest on slat's software CPU (and on a real `/dev/kvm`, where it opens), the published numbers beside ours, and
//! the distance to the limit.
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
//! | [`show`] | tables for people, with the goals |
//! | [`html`] | the tables as a page with charts |
//! | [`bare`], [`mod@array`] | the engine alone, and the rival whose memslots are an array |
//! | `qemu` | QEMU, for comparison and as a program to run |
//! | `experiments` | one file each: its set-up, what is timed, its rows |
#![cfg(all(target_os = "linux", target_arch = "x86_64"))]

// The rival's documentation refers to the experiment that uses it, which is private.
#[allow(rustdoc::private_intra_doc_links)]
pub mod array;
pub mod bare;
mod experiments;
pub mod html;
pub mod machine;
pub mod maps;
pub mod published;
mod qemu;
pub mod report;
pub mod rounds;
pub mod show;

pub use experiments::exit::{CLIENT as EXIT_CLIENT, client as measure_exits};
pub use machine::Failure;
pub use report::{Report, Row};
pub use rounds::Size;

use std::path::PathBuf;

use rounds::Bench;
use show::{Line, Rows};

/// One experiment.
pub struct Experiment {
    /// The name on the command line and in the report.
    pub name: &'static str,
    /// The subject, in one line.
    pub title: &'static str,
    /// What is measured and why, in ten lines.
    pub explain: &'static str,
    /// The policies that a user can set for its VMs.
    pub(crate) settable: Settable,
    /// Measures the experiment.
    pub(crate) run: fn(&mut Bench) -> Result<(), Failure>,
    /// Returns the comparisons and their goals.
    pub compare: fn(&Report) -> Vec<Line>,
    /// What the rows of the table are.
    pub(crate) rows: Rows,
}

/// Which policies of an experiment's VMs a user can set.
pub(crate) enum Settable {
    /// None: the engine alone is measured, with policies of the experiment's.
    None,
    /// All but these, which the experiment sets itself.
    AllBut(&'static [&'static str]),
}

impl Experiment {
    /// Whether a user can set the policy called `name` for the VMs of this experiment.
    pub fn takes_policy(&self, name: &str) -> bool {
        match self.settable {
            Settable::None => false,
            Settable::AllBut(own) => !own.contains(&name),
        }
    }
}

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

/// Other programs that experiments start. Without them, parts are left out.
#[derive(Clone, Debug, Default)]
pub struct Others {
    /// The `slat` command.
    pub slat: Option<PathBuf>,
    /// What Linux is booted with.
    pub linux: Option<Linux>,
}

/// The files that booting Linux under QEMU on slat needs.
#[derive(Clone, Debug)]
pub struct Linux {
    /// The `slat` command.
    pub slat: PathBuf,
    /// Directory of the kernel and initrd made by `conformance/vmm/materials`.
    pub materials: PathBuf,
    /// The values of its `--set`.
    pub policies: Vec<String>,
}

/// Runs experiments, without the parts that need other programs.
///
/// # Errors
/// If a guest did not do its work, or the set-up failed.
pub fn run(selection: &[&Experiment], size: Size) -> Result<Report, Failure> {
    run_with(selection, size, Others::default())
}

/// Like [`run`], with the parts that need other programs. Where files of theirs are missing, a note
/// of the report says so.
///
/// # Errors
/// Those of [`run`].
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
