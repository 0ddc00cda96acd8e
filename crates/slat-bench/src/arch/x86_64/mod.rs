//! x86-64: experiments with guests, on slat's software CPU and on a real `/dev/kvm`.
//!
//! | file | idea |
//! |---|---|
//! | [`machine`] | a KVM program whose guest executes a few loops, on slat or on a real KVM |
//! | `experiments` | one file for each experiment |
//! | `qemu` | QEMU, for comparison and as a program to run |

mod experiments;
pub mod machine;
#[cfg(test)]
mod pages;
mod qemu;

use slat::MmuKind;

use crate::compared::REAL_KVM;
use crate::experiments::{faults, snapshot, split, waits};
use crate::rounds::Size;
use crate::{Experiment, Failure};
use experiments::exit;
use machine::{Api, RealKvm, Slat};

/// All experiments, in the order in which they run.
pub const EXPERIMENTS: &[Experiment] = &[
    experiments::memslots::EXPERIMENT,
    experiments::prefetch::EXPERIMENT,
    experiments::mmio::EXPERIMENT,
    exit::EXPERIMENT,
    experiments::execute::EXPERIMENT,
    split::EXPERIMENT,
    experiments::dirty::EXPERIMENT,
    waits::EXPERIMENT,
    snapshot::EXPERIMENT,
    faults::EXPERIMENT,
    experiments::nested::EXPERIMENT,
    experiments::clone::EXPERIMENT,
    experiments::cpu::EXPERIMENT,
    experiments::vmm::EXPERIMENT,
];

/// The KVMs on which guests run.
pub struct Guests {
    /// slat.
    pub slat: Slat,
    /// slat, with VMs whose tables the direct MMU makes.
    pub direct: Slat,
    /// slat, with VMs that shadow the guest's page tables.
    pub shadow: Slat,
    /// A real KVM, if `/dev/kvm` can be opened. `None` at [`Size::Tiny`], because the tests at this size check slat's
    /// counters.
    pub kvm: Option<RealKvm>,
}

impl Guests {
    /// Opens the KVMs.
    ///
    /// # Errors
    /// If slat does not open.
    pub fn open(size: Size) -> Result<Self, Failure> {
        Ok(Guests {
            slat: Slat::open()?,
            direct: Slat::open()?.with_mmu(MmuKind::Direct),
            shadow: Slat::open()?.with_mmu(MmuKind::Shadow),
            kvm: match size {
                Size::Tiny => None,
                Size::Usual | Size::Full => RealKvm::open().ok(),
            },
        })
    }

    /// Returns `variants`, with [`REAL_KVM`] added if a real KVM is open.
    pub fn with_kvm(&self, variants: &[&'static str]) -> Vec<&'static str> {
        let mut variants = variants.to_vec();
        if self.kvm.is_some() {
            variants.push(REAL_KVM);
        }
        variants
    }
}

/// Returns a sentence that says whether a real KVM is measured.
pub(crate) fn real_kvm() -> String {
    match RealKvm::open() {
        Ok(_) => "opens: measured, too".to_owned(),
        Err(e) => format!("not measured: {e}"),
    }
}

/// If an experiment has started this process as a KVM program, does that program's work, and returns the text that the
/// process must print for the experiment. `None`: no experiment has started this process.
pub fn as_client() -> Option<Result<String, Failure>> {
    std::env::var_os(exit::CLIENT).map(|_| exit::client())
}
