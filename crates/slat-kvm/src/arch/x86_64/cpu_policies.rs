//! The policies of this process's CPUs.

use crate::arch::x86_64::policy::CpuPolicies;
use crate::policy;

/// Returns the policies of this process's CPUs; the defaults if the environment is invalid.
pub(crate) fn current() -> CpuPolicies {
    policy::current().map_or_else(|_| CpuPolicies::default(), |policies| policies.cpu)
}
