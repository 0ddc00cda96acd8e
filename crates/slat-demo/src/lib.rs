//! The demonstration that `slat run` shows without a program: a small KVM program, and a report of the memory system's
//! work for it.
//!
//! | file | idea |
//! |---|---|
//! | `arch` | the program, which has guests of the host's architecture |
//! | `memory` | host memory for memslots: `slat bench` uses it, too |
//! | `account` | the description of what the program did |
//! | `failure` | why the program failed |

mod account;
mod arch;
mod failure;
pub mod memory;

use std::time::Instant;

pub use arch::for_other_crates;
pub use failure::Failure;
use slat_kvm::{Kvm, policy};

/// Runs the program by the policies of the environment. Returns the account.
///
/// # Errors
/// The error of the program, or of a policy's value.
pub fn run() -> Result<String, Failure> {
    let began = Instant::now();
    let policies = policy::current()?;
    slat_kvm::publish::enable();
    let kvm = Kvm::new()?;
    let (account, mut totals) = arch::run(&kvm, policies.format.name(), slat_kvm::report::totals)?;
    if !policies.stats {
        // Only the counters of the memory system are printed, so drop those of the CPUs.
        totals.cpu = Default::default();
    }
    slat_kvm::publish::end();
    slat_kvm::profile::end();
    slat_kvm::perf::end();
    Ok(account.text(began.elapsed()) + &slat_kvm::report::render(&totals))
}
