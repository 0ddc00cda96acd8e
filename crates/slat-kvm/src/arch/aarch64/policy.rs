//! The policies of arm64's software CPU.

use crate::arch::aarch64::cpu::Tier;
use crate::words::{JIT, Jit, policies, words};

words! { Jit, "on, off, at-once":
    "on" => Jit::On,
    "off" => Jit::Off,
    "at-once" => Jit::AtOnce(Tier::Full),
}

policies! {
    /// The policy that chooses which guest code is compiled.
    JIT Jit(Jit) = Jit::On;
}

/// The values of the policies of the CPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuPolicies {
    /// Chooses which guest code is compiled.
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

/// Whether the policies let VMs shadow the tables that guests make for nested guests. Always `false`, because such
/// guests need an EL2, which slat's processor does not have.
pub(crate) fn nests(_: &CpuPolicies) -> bool {
    false
}
