//! Translates guest-virtual addresses to host pages, with the shadow MMU. In the same way it translates a nested
//! guest's physical addresses: the guest's nested tables translate these, and this module calls them "virtual"
//! addresses, too. There are three steps, each used if the previous one does not suffice:
//!
//! 1. A walk of the shadow tables, which needs no slot and reads no entry of the guest ([`Vcpu::translate_virtual`]).
//!    The walk takes no lock. But if the vCPU does not know the walk's root yet, it first looks for the root under the
//!    MMU's lock ([`Vcpu::guest_root`]).
//! 2. A walk of the guest's tables ([`crate::guest_walk`]), which decides whether the access is allowed, and sets
//!    flags. The walk reaches the tables by guest-physical addresses, which the MMU translates, too
//!    ([`Vcpu::translate`]).
//! 3. A fault ([`super::fault`]), whose [`Trail`](crate::shadow::trail::Trail) consists of the guest's entries on that
//!    walk ([`walk`]).
//!
//! A shadow leaf cannot grant everything that the guest's tables grant: a supervisor with CR0.WP clear may write to a
//! read-only page. Such an access gets its translation without a shadow leaf, by a walk of the guest's tables (step 2)
//! and the translation of the guest-physical address.
//!
//! [`follow`] updates the shadow pages when the guest changes its tables.

mod follow;
mod roots;
mod walk;

use core::fmt;

use super::Vcpu;
use super::paging_structure_cache::TableRegion;
use super::translate::Stop;
use crate::addr::{Access, Gpa, Gva, Hpa, Level, PAGE_SIZE, PageIndex, Pfn};
use crate::format::{Entry, Format};
use crate::guest_walk::{GuestPaging, PageRights};
use crate::platform::Platform;
use crate::shadow::trail::of_mmio_note;
use crate::table::{Found, Key, Reached, Root};
use crate::trace::Event;

pub(super) use roots::Roots;
pub(super) use walk::FlagsIn;
use walk::VirtualAccess;

/// Access to the host memory that contains the guest's tables, by the host-physical addresses that the platform gave to
/// the engine.
pub trait HostWords {
    /// The reason why host memory cannot be accessed now.
    type Error;

    /// Atomically reads the table entry of `size` (4 or 8) bytes at `host`, which is a multiple of `size`.
    ///
    /// # Errors
    /// The implementor's error; it ends the translation.
    fn read(&mut self, host: Hpa, size: usize) -> Result<u64, Self::Error>;

    /// Atomically replaces the table entry of `size` bytes at `host` by `new`, if the entry is still `old`. Returns
    /// whether the entry was replaced.
    ///
    /// # Errors
    /// The implementor's error; it ends the translation.
    fn compare_exchange(
        &mut self,
        host: Hpa,
        size: usize,
        old: u64,
        new: u64,
    ) -> Result<bool, Self::Error>;
}

/// The translation of a page of guest-virtual memory, for accesses at the privilege level for which it was translated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VirtualPage {
    /// The address of the 4 KiB host page.
    pub host: Hpa,
    /// The guest's page that contains the 4 KiB page has at most 2^`bits` bytes. INVLPG of any of its addresses must
    /// drop the translations of all these bytes.
    pub bits: u32,
    /// Whether further reads of the page need no new translation.
    pub read: bool,
    /// Whether further writes to the page need no new translation.
    pub write: bool,
    /// Further fetches need no new translation.
    pub execute: bool,
    /// For a write, if the page contains a guest table that is shadowed: the page's guest-physical address. Then call
    /// [`Vcpu::stored`] after the store.
    pub tracked: Option<Gpa>,
}

/// The reason why a guest-virtual address has no translation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VirtualStop<E> {
    /// The guest gets #PF with this error code ([`crate::guest_walk::error_code`]).
    PageFault {
        /// The error code of the page fault.
        code: u32,
    },
    /// The reason concerns the guest-physical address, not the guest's tables.
    Stop(Stop),
    /// The guest's tables could not be accessed.
    Memory(E),
}

impl<E> From<Stop> for VirtualStop<E> {
    fn from(stop: Stop) -> Self {
        VirtualStop::Stop(stop)
    }
}

impl<E: fmt::Display> fmt::Display for VirtualStop<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            VirtualStop::PageFault { code } => {
                write!(f, "guest access: #PF with error code {code:#x}")
            }
            VirtualStop::Stop(stop) => stop.fmt(f),
            VirtualStop::Memory(error) => write!(f, "guest access: its tables: {error}"),
        }
    }
}

impl<E: fmt::Display + fmt::Debug> core::error::Error for VirtualStop<E> {}

impl<P: Platform, F: Format> Vcpu<P, F> {
    /// Returns the host page to which `gva` translates for `access`, in the state `paging`. First walks the shadow
    /// tables. If these do not allow the access, walks the guest's tables by means of `words`, and handles a fault. The
    /// caller may use the translation until [`Vcpu::quiesce`] or [`Vcpu::leave`], or until the guest flushes it.
    ///
    /// # Errors
    /// [`VirtualStop`]. After [`Stop::Retry`] all earlier translations are void.
    ///
    /// # Panics
    /// If the vCPU is not entered ([`Vcpu::enter`]), or the VM shadows no tables: it was made neither with
    /// [`MmuKind::Shadow`](crate::MmuKind) nor with [`Config::nested`](crate::Config).
    pub fn translate_virtual<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
    ) -> Result<VirtualPage, VirtualStop<W::Error>> {
        let root = self.guest_root(gva, paging);
        if let Some(answer) = self.translate_shadowed(gva, access, paging, root) {
            return answer.map_err(VirtualStop::Stop);
        }
        self.translate_by_guest(gva, access, paging, words)
    }

    /// Continues [`Vcpu::translate_virtual`] if the shadow tables do not allow the access.
    #[cold]
    fn translate_by_guest<W: HostWords>(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        words: &mut W,
    ) -> Result<VirtualPage, VirtualStop<W::Error>> {
        self.presence.tables.forget(TableRegion::of_gva(Gva(gva)));
        self.counters().pf_taken.add(1);
        self.vm().platform.trace(Event::PageFault {
            fault_address: gva,
            access,
        });
        self.for_owner(
            |vcpu| {
                vcpu.virtual_fault(VirtualAccess {
                    gva,
                    access,
                    paging,
                    words,
                })
            },
            |answer| matches!(answer, Err(VirtualStop::Stop(Stop::Retry))),
        )
    }

    /// Translates `gva` by the shadow tables below `root`. `None`: they do not allow the access.
    fn translate_shadowed(
        &mut self,
        gva: u64,
        access: Access,
        paging: &GuestPaging,
        root: Option<Root>,
    ) -> Option<Result<VirtualPage, Stop>> {
        let key = Key {
            context: root?,
            index: PageIndex::of_gva(gva),
        };
        let strict = paging.of_leaf();
        let region = TableRegion::of_gva(Gva(gva));
        loop {
            let found = match self.find_cached(region, key.index) {
                Some(found) => found,
                None => self.look(&mut self.pause(Reached::nothing::<F>(key))),
            };
            let rights = |write, user, execute, key| PageRights {
                write,
                user,
                execute,
                key,
            };
            return match found.entry::<F>() {
                Entry::Leaf(leaf) => {
                    let (user, key) = (leaf.privilege.is_user(), leaf.privilege.key());
                    let granted = rights(leaf.write, user, leaf.execute, key);
                    if !granted.allow(&strict, access) {
                        return None;
                    }
                    let write = access == Access::Write;
                    if !found.mark::<F>(write) {
                        continue;
                    }
                    let dirty = leaf.dirty || write;
                    let pfn = leaf.pfn.add(gva >> 12 & (found.level.pages() - 1));
                    let page = VirtualPage {
                        host: pfn.hpa(),
                        bits: self.guest_bits(&found, paging),
                        read: granted.allow(&strict, Access::Read),
                        write: dirty && granted.allow(&strict, Access::Write),
                        execute: granted.allow(&strict, Access::Execute),
                        tracked: None,
                    };
                    if found.level == Level::PAGE {
                        let table = found.table;
                        self.presence.tables.put(region, table);
                    }
                    Some(Ok(page))
                }
                Entry::Mmio { generation, note } if self.is_current(generation) => {
                    let (gfn, rights) = of_mmio_note(note);
                    rights.allow(&strict, access).then(|| {
                        self.counters().mmio_cached.add(1);
                        let addr = gva;
                        (self.vm().platform).trace(Event::HandleMmioPageFault { addr, gfn });
                        let gpa = Gpa(gfn.gpa().0 + gva % PAGE_SIZE);
                        Err(Stop::Mmio { gpa })
                    })
                }
                _ => None,
            };
        }
    }

    /// Returns log2 of the size in bytes of the guest's page that contains the memory of the leaf `found`, or an upper
    /// bound of this value.
    fn guest_bits(&self, found: &Found<'_>, paging: &GuestPaging) -> u32 {
        match found.level {
            Level::PAGE if !self.maps_parts(found.table) => 12,
            Level::MEGA if !self.maps_parts(found.table) && paging.has_long_entries() => 21,
            Level::MEGA if !self.maps_parts(found.table) => 22,
            _ => 30,
        }
    }

    fn maps_parts(&self, table: Pfn) -> bool {
        self.tables().shadow().is_some_and(|mmu| {
            // SAFETY: a walk in this reader section has reached the table.
            unsafe { mmu.maps_parts(table) }
        })
    }
}
