//! A vCPU's last translations that its CPU's TLB does not hold: translations of linear pages that belong to devices,
//! and of a nested guest's physical pages. They become invalid when [`GuestMemory`](crate::guest_memory::GuestMemory)
//! drops its translations. Each look-up passes the number of these flushes.

use slat::guest_walk::GuestPage;
use slat_x86::{Access, NestedPaging, Paging};

const PAGE: u64 = 4096;

/// The translation of a linear page of a device by the guest's tables, for one kind of access.
#[derive(Clone, Copy)]
pub(crate) struct DevicePage {
    /// The linear address of the page.
    pub(crate) gva: u64,
    pub(crate) access: Access,
    pub(crate) paging: Paging,
    pub(crate) page: GuestPage,
}

/// A translation of a nested guest's physical page, by the nested tables of the hypervisor that runs the nested guest.
#[derive(Clone, Copy)]
struct NestedPage {
    gpa: u64,
    page: GuestPage,
}

/// The last translations of this vCPU, indexed by page number.
pub(crate) struct TableCache {
    /// The value of [`GuestMemory::flushes`](crate::guest_memory::GuestMemory::flushes) when the translations were
    /// stored.
    flushes: u32,
    devices: [Option<DevicePage>; Self::DEVICES],
    nested: [Option<NestedPage>; Self::NESTED],
    /// The state of the nested tables to which the nested translations belong.
    nested_of: Option<NestedPaging>,
}

impl Default for TableCache {
    fn default() -> Self {
        TableCache {
            flushes: 0,
            devices: [None; Self::DEVICES],
            nested: [None; Self::NESTED],
            nested_of: None,
        }
    }
}

impl TableCache {
    const DEVICES: usize = 8;
    /// This number is small, because a new vCPU is built on the stack of the thread that creates it, and most vCPUs
    /// never have a nested guest.
    const NESTED: usize = 16;

    /// Forgets all translations if there was a flush since the last call.
    fn follow(&mut self, flushes: u32) {
        if self.flushes != flushes {
            self.flushes = flushes;
            self.flush_nested();
            self.flush_devices();
        }
    }

    /// Returns the cached translation of the linear page `gva`, if it is a page of a device.
    #[inline(always)]
    pub(crate) fn device(
        &self,
        flushes: u32,
        gva: u64,
        access: Access,
        paging: &Paging,
    ) -> Option<GuestPage> {
        let known = self.devices[Self::device_index(gva)]?;
        let is_valid = self.flushes == flushes && known.paging == *paging;
        let is_it = is_valid && (known.gva, known.access) == (gva, access);
        is_it.then_some(known.page)
    }

    pub(crate) fn keep_device(&mut self, flushes: u32, known: DevicePage) {
        self.follow(flushes);
        self.devices[Self::device_index(known.gva)] = Some(known);
    }

    fn device_index(gva: u64) -> usize {
        (gva / PAGE) as usize % Self::DEVICES
    }

    /// Returns the cached translation of the nested guest's physical address `gpa` by the nested tables `of`, if it
    /// allows `access`.
    pub(crate) fn nested(
        &mut self,
        flushes: u32,
        of: &NestedPaging,
        gpa: u64,
        access: slat::Access,
    ) -> Option<GuestPage> {
        self.follow(flushes);
        if self.nested_of.as_ref() != Some(of) {
            self.nested_of = Some(*of);
            self.flush_nested();
        }
        let known = self.nested[Self::nested_index(gpa)]?;
        let allows = match access {
            slat::Access::Read => known.page.read,
            slat::Access::Write => known.page.write,
            slat::Access::Execute => known.page.execute,
        };
        (known.gpa == gpa & !(PAGE - 1) && allows).then_some(known.page)
    }

    /// Keeps the translation of the page at `gpa`, by the same nested tables as in the last look-up.
    pub(crate) fn keep_nested(&mut self, flushes: u32, gpa: u64, page: GuestPage) {
        self.follow(flushes);
        self.nested[Self::nested_index(gpa)] = Some(NestedPage {
            gpa: gpa & !(PAGE - 1),
            page,
        });
    }

    fn nested_index(gpa: u64) -> usize {
        (gpa / PAGE) as usize % Self::NESTED
    }

    /// Forgets the translations by nested tables. Call when a hypervisor flushes the translations of its nested guest.
    pub(crate) fn flush_nested(&mut self) {
        self.nested.fill(None);
    }

    /// Forgets the translations by the guest's tables. Call when the guest invalidates a translation.
    pub(crate) fn flush_devices(&mut self) {
        self.devices.fill(None);
    }
}
