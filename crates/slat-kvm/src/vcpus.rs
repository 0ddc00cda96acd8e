//! The vCPUs of a VM, and how interrupt messages find them.

use crate::arch::VcpuMap;
use crate::errno::Result;
use crate::heap;
use crate::vcpu_common::VcpuCommon;
use slat::Shared;
use std::ops::Deref;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// The vCPUs of a VM, by id.
///
/// One lock protects the vCPUs and the map of their addresses. Delivering a message acquires that lock for reading, and
/// then only the locks of the target vCPUs.
#[derive(Default)]
pub(crate) struct Vcpus {
    by_id: Vec<Shared<VcpuCommon>>,
    /// Maps the addresses by which interrupts name vCPUs to indices in `by_id`. The map's memory is allocated for all
    /// vCPUs in advance.
    pub(crate) map: VcpuMap,
}

impl Deref for Vcpus {
    type Target = [Shared<VcpuCommon>];

    fn deref(&self) -> &Self::Target {
        &self.by_id
    }
}

impl Vcpus {
    /// Allocates memory for one more vCPU, so that [`insert`](Self::insert) cannot fail.
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(crate) fn reserve(&mut self) -> Result<()> {
        heap::reserve(&mut self.by_id, 1)?;
        self.map.reserve(self.by_id.len() + 1)
    }

    /// Looks up the vCPU with this id. Returns `Ok` with the vCPU's index, or `Err` with the index at which such a vCPU
    /// has to be inserted.
    pub(crate) fn place(&self, id: u32) -> std::result::Result<usize, usize> {
        self.by_id.binary_search_by_key(&id, |vcpu| vcpu.id)
    }

    pub(crate) fn insert(&mut self, place: usize, vcpu: Shared<VcpuCommon>) {
        self.by_id.insert(place, vcpu);
        self.map_again();
    }

    /// Rebuilds the map from addresses to vCPUs. Call after a change that may give a vCPU another address.
    pub(crate) fn map_again(&mut self) {
        self.map.rebuild(&self.by_id);
    }
}

/// The vCPUs of a VM as the targets of its interrupts, under their lock.
#[derive(Default)]
pub(crate) struct Targets(RwLock<Vcpus>);

impl Targets {
    pub(crate) fn read(&self) -> RwLockReadGuard<'_, Vcpus> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self) -> RwLockWriteGuard<'_, Vcpus> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}
