//! A VM's calls for memslots and private memory.

use super::userfault::{self, KVM_MEM_USERFAULT};
use crate::arch::MEMORY_ATTRIBUTES;
use crate::errno::{Error, Result, fail};
use crate::guest_memfd::{GuestMemfd, Part};
use crate::vm::VmObject;
use crate::{guest_memfd, messages, user};
use kvm_bindings::*;
use slat::{Gpa, Hva, MemoryAttributes, Region, RegionError, SlotFlags};
use slat_host::{granule, page_size};
use slat_trace::{MemslotChange, point};
use std::os::fd::OwnedFd;
use std::sync::Arc;

impl VmObject {
    /// Carries out `KVM_SET_USER_MEMORY_REGION`.
    ///
    /// # Errors
    /// KVM's: `EINVAL` for bad arguments, `EEXIST` for an overlap, `ENOMEM`.
    pub fn set_user_memory_region(&self, region: &kvm_userspace_memory_region) -> Result<()> {
        if region.flags & (KVM_MEM_GUEST_MEMFD | KVM_MEM_USERFAULT) != 0 {
            return fail(libc::EINVAL);
        }
        self.set_user_memory_region2(&kvm_userspace_memory_region2 {
            slot: region.slot,
            flags: region.flags,
            guest_phys_addr: region.guest_phys_addr,
            memory_size: region.memory_size,
            userspace_addr: region.userspace_addr,
            ..Default::default()
        })
    }

    /// Carries out `KVM_SET_USER_MEMORY_REGION2`.
    ///
    /// # Errors
    /// The errors of [`set_user_memory_region`](Self::set_user_memory_region). For `KVM_MEM_GUEST_MEMFD`, `EINVAL` with
    /// any other flag, for a slot that exists already, and for a descriptor that is no guest_memfd of this VM; `EEXIST`
    /// for a part of a guest_memfd that another slot uses; `EBADF` for a closed descriptor. With the policy
    /// `userfault`, `EINVAL` for `KVM_MEM_USERFAULT` with a bitmap outside user space.
    pub fn set_user_memory_region2(&self, region: &kvm_userspace_memory_region2) -> Result<()> {
        let _call = self.begin()?;
        let wants_file = region.flags & KVM_MEM_GUEST_MEMFD != 0;
        let flags = region.flags & !KVM_MEM_GUEST_MEMFD;
        let known = match wants_file {
            true => 0,
            false => KVM_MEM_LOG_DIRTY_PAGES | KVM_MEM_READONLY,
        };
        let known = known | userfault::flags();
        let space = (region.slot >> 16) as usize;
        if flags & !known != 0 || space >= self.address_spaces() {
            return fail(libc::EINVAL);
        }
        let size = region.memory_size;
        let len = usize::try_from(size).map_err(|_| Error::new(libc::EINVAL))?;
        if !user::in_user_space(region.userspace_addr, len) {
            return fail(libc::EINVAL);
        }
        let bitmap = userfault::bitmap(region)?;
        let asked = Region::new(
            region.slot & 0xffff,
            Gpa(region.guest_phys_addr),
            size,
            Hva(region.userspace_addr),
        )
        .with_flags(SlotFlags(flags & !KVM_MEM_USERFAULT));
        let part = match wants_file {
            true => self.part_for(region, space, &asked)?,
            false => None,
        };
        if size != 0
            && let has_private = part.as_ref().is_some_and(|part| !part.only)
            && let Err(refusal) = self.arch.check_slot(region, has_private)
        {
            // As in KVM, the architecture's checks have the lowest priority: if another check also fails, its error is
            // returned.
            return match self.engine.check_memory_region(space, &asked) {
                Ok(()) | Err(RegionError::BeyondTables(_)) => Err(refusal),
                Err(error) => Err(refused(error)),
            };
        }
        let asked = match &part {
            Some(part) if part.only => asked.with_backing(part.start),
            _ => asked,
        }
        .with_private(part.as_ref().map(|part| part.start));
        // Bindings change only when a slot is created or deleted.
        let bindings = (part.is_some() || size == 0).then(|| self.private.bindings());
        // `learn` reads the host's mappings now, because the seccomp filter of a vCPU's thread may forbid the system
        // calls later.
        let start = asked.backing.0 as usize;
        slat_host::mappings::learn(start..start + len);
        self.set_slot(space, &asked, bitmap).map_err(refused)?;
        point(|| MemslotChange {
            vm: self.number as u32,
            as_id: space as u32,
            slot: region.slot & 0xffff,
            base_gfn: region.guest_phys_addr / page_size() as u64,
            npages: size / page_size() as u64,
            userspace_addr: region.userspace_addr,
            flags: region.flags,
        });
        if let Some(mut bindings) = bindings {
            bindings.set(region.slot, part.map(|part| part.memory));
        }
        Ok(())
    }

    /// Returns the part of a guest_memfd that `region` names. `asked` is the slot that `region` describes. `None`:
    /// `region` deletes a slot.
    ///
    /// # Errors
    /// The errors of [`set_user_memory_region2`](Self::set_user_memory_region2). KVM makes some checks before it looks
    /// at the descriptor. So the errors of these checks have priority over the error of a bad descriptor.
    fn part_for(
        &self,
        region: &kvm_userspace_memory_region2,
        space: usize,
        asked: &Region,
    ) -> Result<Option<Part>> {
        let (offset, size) = (region.guest_memfd_offset, region.memory_size);
        let pages = is_page(offset) && is_page(region.userspace_addr);
        if !pages || offset.checked_add(size).is_none() {
            return fail(libc::EINVAL);
        }
        if size == 0 {
            return Ok(None);
        }
        let part = self.private.part(region.guest_memfd, offset, size);
        if part.is_err() {
            let asked = asked.with_private(Hva(0));
            match self.engine.check_memory_region(space, &asked) {
                // KVM checks last whether its tables can hold the frames.
                Ok(()) | Err(RegionError::BeyondTables(_)) => {}
                Err(error) => return Err(refused(error)),
            }
        }
        part.map(Some)
    }

    /// Carries out `KVM_CREATE_GUEST_MEMFD`. Returns guest memory, and the descriptor that refers to it.
    ///
    /// # Errors
    /// `EINVAL` for flags that the VM does not have ([`guest_memfd::flags`]), and for a size that is 0 or not of whole
    /// pages; the host's error for making a file.
    pub fn create_guest_memfd(
        &self,
        args: &kvm_create_guest_memfd,
    ) -> Result<(Arc<GuestMemfd>, OwnedFd)> {
        let _call = self.begin()?;
        self.private
            .create(args, guest_memfd::flags(self.protected))
    }

    /// Returns the attributes that memory of this VM can have: `KVM_CAP_MEMORY_ATTRIBUTES`.
    pub(crate) fn known_attributes(&self) -> u64 {
        match self.protected {
            true => MEMORY_ATTRIBUTES.into(),
            false => 0,
        }
    }

    /// Carries out `KVM_SET_MEMORY_ATTRIBUTES`.
    ///
    /// # Errors
    /// `ENOTTY` on an architecture whose VMs have no attributes. `EINVAL` for flags, attributes that this VM does not
    /// have, and a range that is empty, not of whole pages, or wraps around; `ENOMEM`.
    pub fn set_memory_attributes(&self, attributes: &kvm_memory_attributes) -> Result<()> {
        let _call = self.begin()?;
        if MEMORY_ATTRIBUTES == 0 {
            return fail(libc::ENOTTY);
        }
        let kvm_memory_attributes {
            address,
            size,
            attributes,
            flags,
        } = *attributes;
        let unknown = attributes & !self.known_attributes() != 0;
        let pages = is_page(address) && is_page(size);
        let end = address.checked_add(size);
        if flags != 0 || unknown || !pages || size == 0 {
            return fail(libc::EINVAL);
        }
        let end = end.ok_or(Error::new(libc::EINVAL))?;
        let gfns = granule().gfn(Gpa(address))..granule().gfn(Gpa(end));
        self.engine
            .set_memory_attributes(gfns, MemoryAttributes(attributes))
            .map_err(|error| Error::new(error.errno()))
    }
}

/// Whether `bytes`, an address or a size, is a multiple of the page size.
fn is_page(bytes: u64) -> bool {
    bytes.is_multiple_of(page_size() as u64)
}

/// Reports a refused region to the user, and returns KVM's error.
fn refused(error: RegionError) -> Error {
    messages::explain(&error);
    Error::new(error.errno())
}
