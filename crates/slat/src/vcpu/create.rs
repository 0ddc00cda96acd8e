//! The creation of vCPUs, and its errors.

use alloc::sync::Arc;
use core::fmt;
use core::ptr::NonNull;

use super::paging_structure_cache::PagingStructureCache;
use super::presence::Presence;
use super::recent_slots::RecentSlots;
use super::streams::Streams;
use super::{Vcpu, guest};
use crate::addr::Gpa;
use crate::format::Format;
use crate::heap::OutOfMemory;
use crate::platform::Platform;
use crate::table::{Flushed, FrameCache};
use crate::vm::Vm;

/// The reason why a vCPU was not created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum CreateVcpuError {
    /// The VM has no address space with this number ([`Config::spaces`](crate::Config)).
    NoSuchSpace(usize),
    /// There was no heap memory.
    OutOfMemory,
}

impl From<OutOfMemory> for CreateVcpuError {
    fn from(_: OutOfMemory) -> Self {
        CreateVcpuError::OutOfMemory
    }
}

impl fmt::Display for CreateVcpuError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CreateVcpuError::NoSuchSpace(space) => write!(
                f,
                "creating a vCPU: the VM has no address space {space}; set Config::spaces"
            ),
            CreateVcpuError::OutOfMemory => f.write_str("creating a vCPU: no memory"),
        }
    }
}

impl core::error::Error for CreateVcpuError {}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Creates a vCPU of this VM that uses the first address space. The vCPU is not [entered](Vcpu::enter). A VM may
    /// have any number of vCPUs.
    ///
    /// # Errors
    /// [`OutOfMemory`].
    pub fn create_vcpu(self: &Arc<Self>) -> Result<Vcpu<P, F>, OutOfMemory> {
        // The first address space exists, so the only possible error is missing memory.
        self.create_vcpu_in(0).map_err(|_| OutOfMemory)
    }

    /// Creates a vCPU that uses address space `space`. For a processor that changes between two address spaces, as x86
    /// does for SMM, see [`Vcpu::use_space`].
    ///
    /// # Errors
    /// [`CreateVcpuError`].
    pub fn create_vcpu_in(self: &Arc<Self>, space: usize) -> Result<Vcpu<P, F>, CreateVcpuError> {
        let no_space = CreateVcpuError::NoSuchSpace(space);
        let context = self.spaces.get(space).ok_or(no_space)?.root();
        let recent = RecentSlots::new()?;
        let tables = PagingStructureCache::new()?;
        let reader = self.readers.register()?;
        let vcpu = Vcpu {
            presence: Presence {
                reader: NonNull::from(reader),
                walkable: Gpa(0),
                tables,
                missed: 0,
            },
            counted_before: reader.counters.snapshot(),
            vm: self.clone(),
            space,
            context,
            token: 0,
            frames: FrameCache::new(self.frames.clone()),
            flushed: Flushed::default(),
            recent,
            streams: Streams::default(),
            roots: guest::Roots::default(),
            flags_in: None,
            ring: None,
        };
        vcpu.moves(None, Some(space));
        Ok(vcpu)
    }
}
