//! Measures the benefit of each mechanism of KVM's guest-memory system. One run measures with each mechanism switched
//! on and switched off. Real guests run on slat's software CPU and, if `/dev/kvm` can be opened, on a real KVM. The
//! tables show published numbers next to the measured ones, and how far the measured value is from the best possible
//! value.
//!
//! A part of slat: there is no promise about this crate's API, and any version may change it.
//!
//! | file | idea |
//! |---|---|
//! | `arch` | the experiments with guests of the host's architecture |
//! | `experiments` | the experiments of every host; one file each: set-up, timed operations, rows |
//! | [`rounds`] | variants of a case measured in turns |
//! | [`report`] | samples, medians, paired ratios, JSON |
//! | [`maps`] | how guest memory is mapped, between the phases |
//! | [`published`] | the published numbers |
//! | [`compared`] | comparisons and their goals |
//! | [`show`] | tables for people |
//! | [`html`] | the tables as a page with charts |
//! | [`bare`], [`mod@array`] | the engine without guests; its rival, whose memslots are in an array |
//! | `experiment`, `others` | the description of an experiment; the other programs that some experiments start |
//! | `memory_file` | files in memory that these programs open |
#![cfg(target_os = "linux")]

mod arch;
// The module is public so that its documentation can refer to the private experiment that uses it.
#[allow(rustdoc::private_intra_doc_links)]
pub mod array;
pub mod bare;
pub mod compared;
mod experiment;
mod experiments;
pub mod html;
pub mod maps;
mod memory_file;
mod others;
pub mod published;
pub mod report;
pub mod rounds;
pub mod show;

pub use arch::{EXPERIMENTS, as_client};
pub(crate) use experiment::Settable;
pub use experiment::{Elsewhere, Experiment};
pub use others::{Linux, Others};
pub use report::{Report, Row};
pub use rounds::Size;
pub use slat_demo::Failure;

use rounds::Bench;

/// Returns the names of the experiments that this build lacks, because they need a guest and slat runs no guests of
/// this architecture yet.
pub fn missing() -> Vec<&'static str> {
    let names = experiments::WITH_GUESTS.iter().copied();
    names
        .filter(|name| EXPERIMENTS.iter().all(|known| known.name != *name))
        .collect()
}

/// Runs experiments, except the parts that need other programs.
///
/// # Errors
/// If a guest has not done its work, or the set-up has failed.
pub fn run(selection: &[&Experiment], size: Size) -> Result<Report, Failure> {
    run_with(selection, size, Others::default())
}

/// Runs experiments like [`run`], and also runs the parts that need other programs. If the files for such a part are
/// missing, a note in the report says so.
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
        let elsewhere = EXPERIMENTS
            .iter()
            .filter_map(|known| match known.elsewhere() {
                Elsewhere::Guests(other) => Some(other),
                Elsewhere::Nothing | Elsewhere::Tables => None,
            });
        for experiment in EXPERIMENTS.iter().chain(elsewhere) {
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
        let missing = missing();
        for published in published::PUBLISHED {
            let is_known = |name| published.experiment == name;
            let mut names = EXPERIMENTS
                .iter()
                .map(|known| known.name)
                .chain(missing.iter().copied());
            assert!(names.any(is_known), "{}", published.experiment);
        }
    }

    #[test]
    fn an_experiment_needs_a_guest_or_every_architecture_has_it() {
        let everywhere = ["memslots", "split", "waits", "snapshot", "faults"];
        let mut names: Vec<_> = everywhere
            .into_iter()
            .chain(experiments::WITH_GUESTS.iter().copied())
            .collect();
        let mut known: Vec<_> = EXPERIMENTS
            .iter()
            .map(|known| known.name)
            .chain(missing())
            .collect();
        names.sort_unstable();
        known.sort_unstable();
        assert_eq!(known, names);
    }
}
