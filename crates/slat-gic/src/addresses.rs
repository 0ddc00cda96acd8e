//! The guest-physical addresses of the frames, which the VMM sets.
//!
//! GICv3's redistributors are in regions. A region has a place for each of its redistributors, one after the other. As
//! in KVM, each new vCPU gets the next free place in the oldest region that has a free place.

use crate::error::Error;
use crate::gic::Model;
use crate::registers::{
    Frame, REDISTRIBUTOR_SIZE, V2_CPU_INTERFACE_SIZE, V2_DISTRIBUTOR_SIZE, V3_DISTRIBUTOR_SIZE,
};
use alloc::vec::Vec;

/// The alignment of GICv2's frames (4 KiB), and of GICv3's and the ITS's frames (64 KiB).
pub(crate) const PAGE_4K: u64 = 0x1000;
pub(crate) const PAGE_64K: u64 = 0x1_0000;
/// The value that the VMM reads as the address of a frame whose address was not set.
pub(crate) const UNSET: u64 = u64::MAX;

/// A contiguous range of redistributors' frames: a redistributor region of KVM's API.
#[derive(Clone, Debug)]
struct Region {
    base: u64,
    /// The number of redistributors. `None`: the VMM has set the region without a number of redistributors
    /// (KVM_VGIC_V3_ADDR_TYPE_REDIST). Such a region is the only one, and has a place for each vCPU.
    capacity: Option<u32>,
    /// The vCPUs whose redistributors are in the region, in the order of their places.
    vcpus: Vec<usize>,
}

/// The place of a vCPU's redistributor: a region, and an index in the region.
#[derive(Clone, Copy, Debug)]
struct Place {
    region: usize,
    index: u32,
}

impl Region {
    fn used(&self) -> u32 {
        self.vcpus.len() as u32
    }
}

/// The addresses of a GIC's frames.
#[derive(Clone, Debug, Default)]
pub(crate) struct Addresses {
    distributor: Option<u64>,
    cpu_interface: Option<u64>,
    regions: Vec<Region>,
    /// The place of each vCPU's redistributor, by the vCPU's index.
    places: Vec<Place>,
}

/// Checks a new address of a frame.
///
/// # Errors
/// [`Error::Exists`]: the frame has an `old` address. [`Error::Invalid`]: the address or the size is not aligned, or
/// the end of the frame exceeds 64 bits. [`Error::TooBig`]: the end is beyond the guest's physical address space.
pub(crate) fn check_range(
    old: Option<u64>,
    new: u64,
    alignment: u64,
    size: u64,
    address_bits: u32,
) -> Result<(), Error> {
    if old.is_some() {
        return Err(Error::Exists);
    }
    let end = new.checked_add(size).ok_or(Error::Invalid)?;
    if !new.is_multiple_of(alignment) || !size.is_multiple_of(alignment) {
        return Err(Error::Invalid);
    }
    match end > 1 << address_bits {
        true => Err(Error::TooBig),
        false => Ok(()),
    }
}

fn overlap(one: u64, one_size: u64, other: u64, other_size: u64) -> bool {
    one < other.saturating_add(other_size) && other < one.saturating_add(one_size)
}

impl Addresses {
    pub(crate) fn distributor(&self) -> u64 {
        self.distributor.unwrap_or(UNSET)
    }

    pub(crate) fn cpu_interface(&self) -> u64 {
        self.cpu_interface.unwrap_or(UNSET)
    }

    /// Returns the base address of the first region of redistributors.
    pub(crate) fn redistributors(&self) -> u64 {
        self.regions.first().map_or(UNSET, |region| region.base)
    }

    /// Returns the base address and the capacity of the region `index`. The capacity is zero if the VMM has not set it.
    pub(crate) fn region(&self, index: usize) -> Option<(u64, u32)> {
        let region = self.regions.get(index)?;
        Some((region.base, region.capacity.unwrap_or(0)))
    }

    pub(crate) fn set_distributor(
        &mut self,
        model: Model,
        address: u64,
        address_bits: u32,
    ) -> Result<(), Error> {
        let (alignment, size) = match model {
            Model::V2 => (PAGE_4K, V2_DISTRIBUTOR_SIZE),
            Model::V3 => (PAGE_64K, V3_DISTRIBUTOR_SIZE),
        };
        check_range(self.distributor, address, alignment, size, address_bits)?;
        self.distributor = Some(address);
        Ok(())
    }

    pub(crate) fn set_cpu_interface(
        &mut self,
        address: u64,
        address_bits: u32,
    ) -> Result<(), Error> {
        let (alignment, size) = (PAGE_4K, V2_CPU_INTERFACE_SIZE);
        check_range(self.cpu_interface, address, alignment, size, address_bits)?;
        self.cpu_interface = Some(address);
        Ok(())
    }

    /// Returns the size of a region in bytes. A region without a capacity has a place for each vCPU.
    fn size(capacity: Option<u32>, vcpus: usize) -> u64 {
        let places = capacity.map_or(vcpus as u64, u64::from);
        places * REDISTRIBUTOR_SIZE
    }

    /// Adds a region of redistributors, and gives places in it to the vCPUs whose redistributors have none yet.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `index` is not the next index, the region overlaps another frame or is not aligned, or it
    /// has no capacity although an earlier region has one. [`Error::Exists`]: the region has no capacity, and such a
    /// region exists already. [`Error::TooBig`]: the region's end is beyond the guest's physical address space.
    pub(crate) fn add_region(
        &mut self,
        index: usize,
        base: u64,
        capacity: Option<u32>,
        vcpus: usize,
        address_bits: u32,
    ) -> Result<(), Error> {
        let size = Self::size(capacity, vcpus);
        if base.checked_add(size).is_none() {
            return Err(Error::Invalid);
        }
        match (self.regions.last(), capacity) {
            (Some(last), None) if last.capacity.is_some() => return Err(Error::Invalid),
            (Some(_), None) => return Err(Error::Exists),
            _ if index != self.regions.len() => return Err(Error::Invalid),
            _ => (),
        }
        let distributor = self.distributor.filter(|_| capacity.is_none());
        let hits_distributor =
            distributor.is_some_and(|address| overlap(base, size, address, V3_DISTRIBUTOR_SIZE));
        if hits_distributor || self.hits_region(base, size, vcpus) {
            return Err(Error::Invalid);
        }
        check_range(None, base, PAGE_64K, size, address_bits)?;
        self.regions.push(Region {
            base,
            capacity,
            vcpus: Vec::new(),
        });
        let placed = self.place_vcpus(vcpus, vcpus);
        if placed.is_err() {
            self.regions.pop();
        }
        placed
    }

    fn hits_region(&self, base: u64, size: u64, vcpus: usize) -> bool {
        let mut regions = self.regions.iter();
        regions.any(|region| overlap(base, size, region.base, Self::size(region.capacity, vcpus)))
    }

    /// Gives places to the vCPUs that have none yet, as long as there are free places. Before it places a vCPU, it
    /// checks that no region overlaps the distributor. For this check, a region without a capacity has places for
    /// `counted` vCPUs.
    ///
    /// # Errors
    /// [`Error::Invalid`]: a region overlaps the distributor.
    pub(crate) fn place_vcpus(&mut self, vcpus: usize, counted: usize) -> Result<(), Error> {
        while self.places.len() < vcpus {
            let is_free = |region: &Region| region.capacity.is_none_or(|all| region.used() < all);
            let Some(region) = self.regions.iter().position(is_free) else {
                break;
            };
            self.check_distributor(counted)?;
            let index = self.regions[region].used();
            self.regions[region].vcpus.push(self.places.len());
            self.places.push(Place { region, index });
        }
        Ok(())
    }

    fn check_distributor(&self, vcpus: usize) -> Result<(), Error> {
        let hit = |address| self.hits_region(address, V3_DISTRIBUTOR_SIZE, vcpus);
        match self.distributor.is_some_and(hit) {
            true => Err(Error::Invalid),
            false => Ok(()),
        }
    }

    /// Whether the redistributor of a vCPU is the last of contiguous redistributors (GICR_TYPER.Last).
    pub(crate) fn is_last(&self, vcpu: usize) -> bool {
        let Some(place) = self.places.get(vcpu) else {
            return false;
        };
        let region = &self.regions[place.region];
        if place.index + 1 < region.used() {
            return false;
        }
        let is_full = region.capacity == Some(place.index + 1);
        let end = region.base + u64::from(place.index + 1) * REDISTRIBUTOR_SIZE;
        let mut regions = self.regions.iter();
        !is_full || !regions.any(|next| next.base == end && next.used() > 0)
    }

    /// Checks before the first run of a vCPU that all frames have addresses.
    ///
    /// # Errors
    /// [`Error::NoAttribute`]: a frame has no address. [`Error::Invalid`]: two frames overlap.
    pub(crate) fn check(&self, model: Model, vcpus: usize, address_bits: u32) -> Result<(), Error> {
        let distributor = self.distributor.ok_or(Error::NoAttribute)?;
        match model {
            Model::V2 => {
                let interface = self.cpu_interface.ok_or(Error::NoAttribute)?;
                let (one, other) = (V2_DISTRIBUTOR_SIZE, V2_CPU_INTERFACE_SIZE);
                match overlap(distributor, one, interface, other) {
                    true => Err(Error::Invalid),
                    false => Ok(()),
                }
            }
            Model::V3 if self.places.len() < vcpus => Err(Error::NoAttribute),
            Model::V3 => {
                let is_outside = |region: &Region| {
                    let size = Self::size(region.capacity, vcpus);
                    check_range(None, region.base, PAGE_64K, size, address_bits).is_err()
                };
                match self.regions.iter().any(is_outside) {
                    true => Err(Error::Invalid),
                    false => self.check_distributor(vcpus),
                }
            }
        }
    }

    /// Returns the first address and the size in bytes of each frame that has an address. A region counts as one frame,
    /// and only the redistributors that vCPUs have are included.
    pub(crate) fn ranges(&self, model: Model) -> Vec<(u64, u64)> {
        let size = match model {
            Model::V2 => V2_DISTRIBUTOR_SIZE,
            Model::V3 => V3_DISTRIBUTOR_SIZE,
        };
        let regions = (self.regions.iter())
            .map(|region| (region.base, u64::from(region.used()) * REDISTRIBUTOR_SIZE));
        let distributor = self.distributor.map(|base| (base, size));
        let interface = self.cpu_interface.map(|base| (base, V2_CPU_INTERFACE_SIZE));
        (distributor.into_iter().chain(interface).chain(regions)).collect()
    }

    /// Returns the frame that contains the guest-physical address `gpa`, and the offset of `gpa` in the frame. `None`:
    /// no frame contains `gpa`.
    pub(crate) fn find(&self, model: Model, gpa: u64) -> Option<(Frame, u64)> {
        let inside = |base: Option<u64>, size| {
            let offset = gpa.checked_sub(base?)?;
            (offset < size).then_some(offset)
        };
        let size = match model {
            Model::V2 => V2_DISTRIBUTOR_SIZE,
            Model::V3 => V3_DISTRIBUTOR_SIZE,
        };
        if let Some(offset) = inside(self.distributor, size) {
            return Some((Frame::Distributor, offset));
        }
        if let Some(offset) = inside(self.cpu_interface, V2_CPU_INTERFACE_SIZE) {
            return Some((Frame::CpuInterface, offset));
        }
        self.regions.iter().find_map(|region| {
            let size = u64::from(region.used()) * REDISTRIBUTOR_SIZE;
            let offset = inside(Some(region.base), size)?;
            let vcpu = region.vcpus[(offset / REDISTRIBUTOR_SIZE) as usize];
            Some((Frame::Redistributor(vcpu), offset % REDISTRIBUTOR_SIZE))
        })
    }
}
