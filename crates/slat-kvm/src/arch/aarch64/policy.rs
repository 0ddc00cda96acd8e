//! The policies of arm64's software CPU.

use crate::words::{policies, words};

/// The name of the policy [`Jit`], which says what guest code is compiled.
pub const JIT: &str = "jit";

/// The policy that says which of the guests' code is compiled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Jit {
    /// No code: all code is interpreted.
    Off,
    /// Code that runs often is compiled, on one of slat's threads.
    #[default]
    On,
    /// All code that can be compiled is compiled before it runs for the first time, on the vCPU's thread. This value is
    /// slow, and is only for testing the compiler.
    AtOnce,
}

words! { Jit, "on, off, at-once":
    "on" => Jit::On,
    "off" => Jit::Off,
    "at-once" => Jit::AtOnce,
}

policies! {
    /// Which of the guests' code is compiled.
    JIT Jit(Jit) = Jit::On;
}

/// The values of the policies of the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuPolicies {
    /// Which of the guests' code is compiled.
    pub jit: Jit,
}

impl CpuPolicies {
    /// Replaces the value of one policy.
    pub(crate) fn set(&mut self, policy: CpuPolicy) {
        match policy {
            CpuPolicy::Jit(value) => self.jit = value,
        }
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
