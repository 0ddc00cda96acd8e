//! The policies of the CPU: none.

use std::fmt;

/// A policy of the CPU, with its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CpuPolicy {}

impl CpuPolicy {
    /// All policies, each with its default.
    pub(crate) const DEFAULTS: &[Self] = &[];

    /// Returns the name of the policy.
    pub(crate) fn name(&self) -> &'static str {
        match *self {}
    }

    /// Returns the values that the policy can have, as a list for a message.
    pub(crate) fn expected(&self) -> &'static str {
        match *self {}
    }

    /// Returns the value of the policy.
    pub(crate) fn value(&self) -> &dyn fmt::Display {
        match *self {}
    }

    /// Parses a value of the policy `name`. `None`: there is no such policy.
    pub(crate) fn parse(_name: &str, _value: &str) -> Option<Self> {
        None
    }
}

/// The values of the policies of the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuPolicies {}

impl CpuPolicies {
    /// Replaces the value of one policy.
    pub(crate) fn set(&mut self, policy: CpuPolicy) {
        match policy {}
    }
}

/// The policies that a client of the Rust API sets for the CPUs of its VMs.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuChoice {}

/// Whether the policies let VMs shadow the tables that guests make for nested guests. Such guests need an EL2, which
/// slat does not have.
pub(crate) fn nests(_: &CpuPolicies) -> bool {
    false
}
