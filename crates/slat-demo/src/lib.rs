//! The demonstration that `slat run` shows if no program is given: a small KVM program, and a report about the memory
//! system's work for it.
//!
//! | file | idea |
//! |---|---|
//! | `arch` | the program, which has guests of the host's architecture |
//! | `memory` | host memory for memslots; `slat bench` uses it, too |
//! | `account` | the report about what the program did |
//! | `failure` | the reason why the program has failed |

mod account;
mod arch;
mod failure;
pub mod memory;

use std::time::Instant;

pub use arch::for_other_crates;
pub use failure::Failure;
use slat_kvm::{Kvm, policy};

/// Runs the program with the policies that the environment sets. Returns the report.
///
/// # Errors
/// An error of the program, or of a policy's value.
pub fn run() -> Result<String, Failure> {
    let began = Instant::now();
    let policies = policy::current()?;
    slat_kvm::publish::enable();
    let kvm = Kvm::new()?;
    let (account, mut totals) = arch::run(&kvm, policies.format.name(), slat_kvm::report::totals)?;
    if !policies.stats {
        // Only the counters of the memory system are printed, so the CPUs' counters are dropped.
        totals.cpu = Default::default();
    }
    slat_kvm::publish::end();
    slat_kvm::profile::end();
    slat_kvm::perf::end();
    Ok(account.text(began.elapsed()) + &slat_kvm::report::render(&totals))
}
