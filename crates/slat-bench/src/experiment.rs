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
    /// The text that `--explain` prints. In about ten lines, the text says what is measured, and why.
    pub explain: &'static str,
    /// The policies that a user can set for the experiment's VMs.
    pub(crate) settable: Settable,
    /// The measurement that replaces this one if the user asks for another architecture than the host's.
    pub(crate) elsewhere: Elsewhere,
    /// Measures the experiment.
    pub(crate) run: fn(&mut Bench) -> Result<(), Failure>,
    /// Returns the lines of the table, with their goals.
    pub compare: fn(&Report) -> Vec<Line>,
    /// Whether a row of the table is a metric or a case.
    pub(crate) rows: Rows,
}

/// The policies that a user can set for an experiment's VMs.
pub(crate) enum Settable {
    /// None: the engine is measured without guests, with the experiment's own policies.
    None,
    /// All policies except those in the list, which the experiment itself sets.
    AllBut(&'static [&'static str]),
}

/// The measurement for another architecture than the host's.
#[derive(Clone, Copy)]
pub enum Elsewhere {
    /// Nothing.
    Nothing,
    /// The experiment itself, with the tables of that architecture: its VMs have no guests.
    Tables,
    /// Another experiment, with guests of that architecture.
    Guests(&'static Experiment),
}

impl Experiment {
    /// Returns what is measured instead for another architecture than the host's.
    pub fn elsewhere(&self) -> Elsewhere {
        self.elsewhere
    }

    /// Whether a user can set the policy called `name` for the VMs of this experiment.
    pub fn takes_policy(&self, name: &str) -> bool {
        match self.settable {
            Settable::None => false,
            Settable::AllBut(own) => !own.contains(&name),
        }
    }
}
