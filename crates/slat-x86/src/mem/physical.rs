//! The CPU's own accesses to guest-physical memory: to control blocks (VMCBs) and permission maps.

use crate::Cpu;
use crate::machine::{Access, Fault, HostPage, NestedPaging};
use crate::mem::Destination;
use crate::op::Break;
use std::ops::Range;

impl Cpu {
    /// Translates a guest-physical address. If there are `nested` tables, they translate it first. `None`: the guest
    /// has no memory at the address.
    fn physical(
        &mut self,
        nested: Option<&NestedPaging>,
        gpa: u64,
        access: Access,
    ) -> Result<Option<HostPage>, Break> {
        let translated = match nested {
            Some(nested) => (self.machine()).translate_nested_physical(gpa, access, nested),
            None => self.machine().translate_physical(gpa, access),
        };
        match translated {
            Ok(page) => Ok(Some(page)),
            Err(Fault::Mmio { .. } | Fault::Page { .. }) => Ok(None),
            Err(fault) => Err(self.fault(gpa, fault)),
        }
    }

    /// Reads bytes of one page. Returns `false` if there is no memory at `gpa`.
    pub(crate) fn read_physical(&mut self, gpa: u64, bytes: &mut [u8]) -> Result<bool, Break> {
        self.read_physical_of(None, gpa, bytes)
    }

    /// Reads memory like [`read_physical`](Self::read_physical), but if there are `nested` tables, they translate `gpa`
    /// first.
    pub(crate) fn read_physical_of(
        &mut self,
        nested: Option<&NestedPaging>,
        gpa: u64,
        bytes: &mut [u8],
    ) -> Result<bool, Break> {
        debug_assert!(bytes.len() <= 0x1000 - (gpa & 0xfff) as usize);
        loop {
            let Some(page) = self.physical(nested, gpa, Access::Read)? else {
                return Ok(false);
            };
            let host = page.base.as_ptr().wrapping_add((gpa & 0xfff) as usize);
            // SAFETY: `host` is a translation of guest memory, to which every access is guarded.
            match unsafe { slat_guard::copy_in(bytes, host) } {
                Ok(()) => return Ok(true),
                Err(_) => self.gone(gpa, host, Access::Read)?,
            }
        }
    }

    /// Writes parts of one page. Each part is a range and its bytes: they are written at `gpa` plus the start of the
    /// range. If there is no memory at `gpa`, writes nothing and returns `false`.
    pub(crate) fn write_physical(
        &mut self,
        gpa: u64,
        parts: &[(Range<usize>, &[u8])],
    ) -> Result<bool, Break> {
        self.write_physical_of(None, gpa, parts)
    }

    /// Writes memory like [`write_physical`](Self::write_physical), but if there are `nested` tables, they translate
    /// `gpa` first.
    pub(crate) fn write_physical_of(
        &mut self,
        nested: Option<&NestedPaging>,
        gpa: u64,
        parts: &[(Range<usize>, &[u8])],
    ) -> Result<bool, Break> {
        loop {
            let Some(page) = self.physical(nested, gpa, Access::Write)? else {
                return Ok(false);
            };
            let offset = gpa & 0xfff;
            let to = Destination {
                lin: gpa,
                host: page.base.as_ptr().wrapping_add(offset as usize),
                bytes: 0x1000 - offset as usize,
                tracked: page.tracked.map(|page| page + offset),
                needs_look: true,
            };
            let write = |host: *mut u8| {
                for (range, bytes) in parts {
                    let part = &bytes[range.clone()];
                    // SAFETY: the address is a translation of guest memory, and the access is guarded.
                    let copied =
                        unsafe { slat_guard::copy_out(host.wrapping_add(range.start), part) };
                    copied?;
                }
                Ok::<(), usize>(())
            };
            if self.write_to(to, write)?.is_some() {
                return Ok(true);
            }
        }
    }
}
