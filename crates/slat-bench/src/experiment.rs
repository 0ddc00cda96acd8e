//! The description of an experiment.

use crate::Failure;
use crate::compared::{Line, Rows};
use crate::report::Report;
use crate::rounds::Bench;

/// One experiment.
pub struct Experiment {
    /// The name on the command line and in the report.
    pub name: &'static str,
    /// The subject of the experiment, in one line.
    pub title: &'static str,
    /// The text that `--explain` prints: what is measured and why, in ten lines.
    pub explain: &'static str,
    /// The policies that a user can set for the experiment's VMs.
    pub(crate) settable: Settable,
    /// Whether the VMs have no guests, so that their tables can be those of another architecture.
    pub(crate) any_tables: bool,
    /// Measures the experiment.
    pub(crate) run: fn(&mut Bench) -> Result<(), Failure>,
    /// Returns the lines of the table, with their goals.
    pub compare: fn(&Report) -> Vec<Line>,
    /// Whether a row of the table is a metric or a case.
    pub(crate) rows: Rows,
}

/// The policies of an experiment's VMs that a user can set.
pub(crate) enum Settable {
    /// The user can set no policy: the engine alone is measured, with the experiment's own policies.
    None,
    /// The user can set all policies except these, which the experiment sets itself.
    AllBut(&'static [&'static str]),
}

impl Experiment {
    /// Whether the experiment can be measured with the tables of another architecture.
    pub fn takes_other_tables(&self) -> bool {
        self.any_tables
    }

    /// Whether a user can set the policy called `name` for the VMs of this experiment.
    pub fn takes_policy(&self, name: &str) -> bool {
        match self.settable {
            Settable::None => false,
            Settable::AllBut(own) => !own.contains(&name),
        }
    }
}
