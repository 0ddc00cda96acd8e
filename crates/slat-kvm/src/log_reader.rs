//! Readers of a VM's dirty logs ([`slat::LogReader`]), for clients that save a VM several times, or migrate it and save
//! it at the same time. KVM has one reader: the client of `KVM_GET_DIRTY_LOG`, or of the rings.
//!
//! A Rust program makes one by [`VmFd::log_reader`](crate::VmFd::log_reader). Other programs create a device of type
//! [`DEVICE`] by `KVM_CREATE_DEVICE`, whose attributes are the calls of a reader:
//!
//! | group | attribute | `KVM_SET_DEVICE_ATTR` | `KVM_GET_DEVICE_ATTR` |
//! |---|---|---|---|
//! | [`EPOCH`] | [`BEGIN`] | begins an epoch | |
//! | | [`COMMIT`] | ends it: its pages were saved | |
//! | | [`ABORT`] | ends it: its pages are in the next epoch, too | |
//! | [`RANGES`] | 0 | | fills the [`RangesRequest`] at `addr` |

use crate::engine::EngineLogReader;
use crate::errno::{Result, fail, no_memory};
use crate::heap;
use crate::user;
use crate::vm::VmObject;
use kvm_bindings::kvm_device_attr;
use slat::Gfn;
use std::mem::ManuallyDrop;
use std::sync::Arc;

/// The type of the device (`KVM_DEV_TYPE_SLAT_LOG_READER`). It is slat's own number; Linux's types are small numbers.
pub const DEVICE: u32 = 0x736c_0001;
/// The group of attributes that begin and end epochs.
pub const EPOCH: u32 = 0;
/// Begins an epoch.
pub const BEGIN: u64 = 0;
/// Ends the epoch, whose pages the client has saved.
pub const COMMIT: u64 = 1;
/// Ends the epoch, whose pages the client has not saved: the next epoch has them, too.
pub const ABORT: u64 = 2;
/// The group of the attribute that returns the pages of the epoch.
pub const RANGES: u32 = 1;

/// The argument of a get of [`RANGES`], which asks for the pages that are dirty in the current epoch. In C it is
/// `struct slat_dirty_ranges`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RangesRequest {
    /// The first frame to search. The request sets this field to the frame after the last range that it returns, so
    /// that the next request continues at that frame.
    gfn: u64,
    /// The address space of the frame `gfn`. The request changes this field together with `gfn`.
    address_space: u32,
    /// The number of elements at `ranges`. The request sets this field to the number of elements that it has written.
    /// If this number is smaller than before, there are no more dirty pages.
    count: u32,
    /// Runs with fewer clean pages between them are joined to one range.
    min_gap: u64,
    /// The greatest number of pages of a range; 0 means any number.
    max_pages: u64,
    /// The address of an array of [`DirtyRange`].
    ranges: u64,
}

/// Pages that were written, all of one memslot ([`LogReader::dirty_ranges`]); in C `struct slat_dirty_range`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DirtyRange {
    /// The memslot's number. The upper 16 bits are the address space, as in `struct kvm_userspace_memory_region`.
    pub slot: u32,
    padding: u32,
    /// The first guest frame.
    pub gfn: u64,
    /// The number of pages.
    pub pages: u64,
    /// The address of the first page in the client's memory.
    pub userspace_addr: u64,
}

user::plain!(RangesRequest, DirtyRange);

/// A reader of all dirty logs of a VM, with epochs of its own. It keeps the VM alive.
///
/// Every page that is written between two calls of [`begin`](Self::begin) is in the second epoch, by whatever means KVM
/// learns of the write: vCPUs, [`mark_dirty`](crate::VmFd::mark_dirty), and data that slat writes for the guest. While
/// there is a reader, all memslots log, whether they have `KVM_MEM_LOG_DIRTY_PAGES` or not; memslots with guest_memfd
/// do not. `KVM_GET_DIRTY_LOG`, the rings and all other readers find what they would find without this reader.
#[derive(Debug)]
pub struct LogReader {
    vm: Arc<VmObject>,
    /// Not dropped in a forked child, in which the engine's locks may be held forever.
    reader: ManuallyDrop<EngineLogReader>,
}

impl LogReader {
    /// Makes a reader. Its first epoch has the writes after this call.
    ///
    /// # Errors
    /// `ENOMEM`; `EIO` in a forked child.
    pub(crate) fn new(vm: &Arc<VmObject>) -> Result<Self> {
        let _call = vm.begin()?;
        Ok(LogReader {
            vm: vm.clone(),
            reader: ManuallyDrop::new(vm.engine.log_reader().map_err(no_memory)?),
        })
    }

    /// Begins an epoch: the pages that were written since this reader began its last epoch, or was made. If that epoch
    /// was not committed, its pages are in the new one, too. Returns the number of the epoch, which is 1 for the first
    /// one.
    ///
    /// # Errors
    /// `EIO` in a forked child.
    pub fn begin(&mut self) -> Result<u64> {
        let _call = self.vm.begin()?;
        Ok(self.reader.begin())
    }

    /// Ends the epoch: its pages were handled, and are in no later epoch unless they are written again.
    ///
    /// # Errors
    /// `EINVAL` without an epoch; `EIO` in a forked child.
    pub fn commit(&mut self) -> Result<()> {
        self.end(true)
    }

    /// Ends the epoch: its pages are in the next epoch, too.
    ///
    /// # Errors
    /// `EINVAL` without an epoch; `EIO` in a forked child.
    pub fn abort(&mut self) -> Result<()> {
        self.end(false)
    }

    fn end(&mut self, commits: bool) -> Result<()> {
        let _call = self.vm.begin()?;
        match self.reader.end(commits) {
            true => Ok(()),
            false => fail(libc::EINVAL),
        }
    }

    /// Returns the dirty pages of the epoch, in the order of address space and frame. Joins runs with fewer than
    /// `min_gap` clean pages between them, and returns no range of more than `max_pages` pages.
    ///
    /// # Errors
    /// `EINVAL` without an epoch; `ENOMEM`; `EIO` in a forked child.
    pub fn dirty_ranges(&mut self, min_gap: u64, max_pages: u64) -> Result<Vec<DirtyRange>> {
        let mut ranges = Vec::new();
        self.ranges_from((0, Gfn(0)), min_gap, max_pages, &mut |range| {
            heap::reserve(&mut ranges, 1)?;
            ranges.push(range);
            Ok(true)
        })?;
        Ok(ranges)
    }

    /// Calls `visit` for the dirty pages of the epoch, beginning with a frame of an address space, until `visit` returns
    /// `false` or an error.
    ///
    /// # Errors
    /// Those of `visit`; `EINVAL` without an epoch; `EIO` in a forked child.
    fn ranges_from(
        &mut self,
        from: (usize, Gfn),
        min_gap: u64,
        max_pages: u64,
        visit: &mut dyn FnMut(DirtyRange) -> Result<bool>,
    ) -> Result<()> {
        let _call = self.vm.begin()?;
        let visited = self
            .reader
            .each_range(from, min_gap, max_pages, &mut |range| {
                visit(DirtyRange {
                    slot: (range.space as u32) << 16 | range.slot,
                    padding: 0,
                    gfn: range.gfns.start.0,
                    pages: range.gfns.end.0 - range.gfns.start.0,
                    userspace_addr: range.backing.0,
                })
            });
        match visited {
            Some(visited) => visited,
            None => fail(libc::EINVAL),
        }
    }

    /// Checks that the device has an attribute.
    ///
    /// # Errors
    /// `ENXIO`.
    pub(crate) fn has(attribute: &kvm_device_attr) -> Result<()> {
        match (attribute.group, attribute.attr) {
            (EPOCH, BEGIN | COMMIT | ABORT) | (RANGES, 0) => Ok(()),
            _ => fail(libc::ENXIO),
        }
    }

    /// Begins or ends an epoch.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute, `EPERM` for an attribute that can only be read; those of [`Self::begin`],
    /// [`Self::commit`] and [`Self::abort`].
    pub(crate) fn set(&mut self, attribute: &kvm_device_attr) -> Result<()> {
        Self::has(attribute)?;
        match (attribute.group, attribute.attr) {
            (EPOCH, BEGIN) => self.begin().map(drop),
            (EPOCH, COMMIT) => self.commit(),
            (EPOCH, _) => self.abort(),
            _ => fail(libc::EPERM),
        }
    }

    /// Fills the [`RangesRequest`] to which the attribute refers.
    ///
    /// # Errors
    /// `ENXIO` for an unknown attribute, `EPERM` for an attribute that can only be set, `EFAULT` for memory that cannot
    /// be read or written, `EINVAL` without an epoch.
    pub(crate) fn get(&mut self, attribute: &kvm_device_attr) -> Result<()> {
        Self::has(attribute)?;
        if attribute.group != RANGES {
            return fail(libc::EPERM);
        }
        let mut asked: RangesRequest = user::read(attribute.addr)?;
        let room = std::mem::take(&mut asked.count);
        let max_pages = match asked.max_pages {
            0 => u64::MAX,
            some => some,
        };
        let from = (asked.address_space as usize, Gfn(asked.gfn));
        self.ranges_from(from, asked.min_gap, max_pages, &mut |range| {
            if asked.count == room {
                return Ok(false);
            }
            let at = u64::from(asked.count) * size_of::<DirtyRange>() as u64;
            user::write(asked.ranges.wrapping_add(at), &range)?;
            asked.count += 1;
            (asked.address_space, asked.gfn) = (range.slot >> 16, range.gfn + range.pages);
            Ok(true)
        })?;
        user::write(attribute.addr, &asked)
    }
}

impl Drop for LogReader {
    fn drop(&mut self) {
        if !self.vm.is_foreign() {
            // SAFETY: only this code drops the reader, which is not used afterwards.
            unsafe { ManuallyDrop::drop(&mut self.reader) };
        }
    }
}
