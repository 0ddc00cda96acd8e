//! The parameters of a run, and constants of the VM that all runs have in common.

use crate::ops::Mix;

/// The number of address spaces of the VM.
pub const SPACES: usize = 2;
/// The number of vCPUs of the VM.
pub const VCPUS: usize = 3;

/// The maximum number of VMs that exist at one time: the first VM and its clones.
pub const MOST_VMS: usize = 3;

/// Returns the address space that a vCPU uses when it is created.
pub const fn first_space_of(vcpu: usize) -> usize {
    vcpu / 2
}

/// The parameters of a run of the model test.
#[derive(Clone, Copy, Debug)]
pub struct Setup {
    /// The maximum number of pages of host memory. A [`Machine`](crate::Machine) may have fewer.
    pub host_pages: u64,
    /// Whether dirty logs are rings.
    pub rings: bool,
    /// Whether allocations sometimes fail.
    pub failures: bool,
    /// Whether there are many small slots, so that an index of slots has several leaves.
    pub many_slots: bool,
    /// The kinds of operations.
    pub mix: Mix,
}

impl Setup {
    /// A setup with 64 MiB of host memory, so that slots have memory in common.
    pub const SMALL: Setup = Setup {
        host_pages: 1 << 14,
        rings: false,
        failures: false,
        many_slots: false,
        mix: Mix::ALL,
    };
    /// A setup with enough host memory for slots of 1 GiB and more.
    pub const LARGE: Setup = Setup {
        host_pages: 1 << 20,
        ..Setup::SMALL
    };

    /// Returns one of the setups that the runs of a campaign use in turn.
    pub fn of_seed(seed: u64) -> Setup {
        let host = if seed % 5 == 4 {
            Setup::LARGE
        } else {
            Setup::SMALL
        };
        Setup {
            rings: seed % 2 == 1,
            failures: seed % 3 == 2,
            many_slots: seed % 7 == 6,
            mix: if seed % 4 > 1 { Mix::LOGS } else { Mix::ALL },
            ..host
        }
    }
}
