//! Finds out where a guest's access goes, to host memory or to MMIO, and accesses the memory.

use crate::code::ANY_PAGE;
use crate::machine::{Access, Exit, Fault, HostPage};
use crate::op::Break;
use crate::{Cpu, vector};

/// Where the bytes of an access are, within one guest page: in host memory, or in a device.
#[derive(Clone, Copy)]
pub(super) enum Place {
    Host {
        host: *mut u8,
        /// `Some` if stores to the page must be reported to the machine: the guest-physical address.
        tracked: Option<u64>,
        /// Whether a store must be recorded: stores to this page are not in the TLB.
        needs_look: bool,
    },
    Mmio(u64),
}

/// The one or two [`Place`]s of an access, and the number of bytes in the first page.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    pub(super) first: Place,
    pub(super) second: Option<Place>,
    split: usize,
}

/// Memory in one page, to which a store will write. Only [`Cpu::write_to`] may make this store.
#[must_use]
pub(crate) struct Destination {
    pub(super) lin: u64,
    pub(super) host: *mut u8,
    pub(super) bytes: usize,
    pub(super) tracked: Option<u64>,
    pub(super) needs_look: bool,
}

impl Destination {
    /// Returns the distance in bytes from `host` to this memory. It wraps around if the memory is before `host`.
    pub(crate) fn distance_from(&self, host: *mut u8) -> usize {
        (self.host as usize).wrapping_sub(host as usize)
    }
}

impl Place {
    /// Returns the guest-physical address if stores to the page must be reported to the machine.
    fn tracked(self) -> Option<u64> {
        match self {
            Place::Host { tracked, .. } => tracked,
            Place::Mmio(_) => None,
        }
    }
}

impl Places {
    /// Whether all pages of the access are in memory, not MMIO.
    pub(super) fn are_memory(&self) -> bool {
        let is_mmio = |place| matches!(place, Place::Mmio(_));
        !is_mmio(self.first) && !self.second.is_some_and(is_mmio)
    }

    /// Returns the device's guest-physical address if the whole access is to one device.
    #[cfg(feature = "jit")]
    pub(super) fn device(&self) -> Option<u64> {
        match *self {
            Places {
                first: Place::Mmio(gpa),
                second: None,
                ..
            } => Some(gpa),
            _ => None,
        }
    }

    /// Returns the host address if the access is to memory in one page.
    pub(super) fn source(&self) -> Option<*mut u8> {
        match *self {
            Places {
                first: Place::Host { host, .. },
                second: None,
                ..
            } => Some(host),
            _ => None,
        }
    }

    /// Returns the destination of a store at `lin` if the access is to memory in one page.
    pub(super) fn destination(&self, lin: u64) -> Option<Destination> {
        match *self {
            Places {
                first:
                    Place::Host {
                        host,
                        tracked,
                        needs_look,
                    },
                second: None,
                split: bytes,
            } => Some(Destination {
                lin,
                host,
                bytes,
                tracked,
                needs_look,
            }),
            _ => None,
        }
    }
}

impl Cpu {
    /// Translates the one or two pages of an access to at most 4096 bytes.
    pub(crate) fn places(&mut self, lin: u64, len: usize, access: Access) -> Result<Places, Break> {
        let split = len.min(0x1000 - (lin & 0xfff) as usize);
        let first = self.place(lin, access)?;
        let second = match len > split {
            true => Some(self.place(self.next_page(lin), access)?),
            false => None,
        };
        if self.watch.data {
            self.watch(lin, len, access)?;
        }
        Ok(Places {
            first,
            second,
            split,
        })
    }

    /// Translates one address. Inlined, because returning the result through memory would take a fifth of the time of a
    /// TLB miss.
    #[inline(always)]
    pub(super) fn place(&mut self, lin: u64, access: Access) -> Result<Place, Break> {
        let table = self.filled_table();
        let tlb = self.tlb();
        let (hit, needs_look) = match access {
            Access::Write => match tlb.write(table, lin, 1) {
                None => (tlb.write_code(table, lin), true),
                free => (free, false),
            },
            _ => (tlb.read(table, lin, 1), false),
        };
        if let Some(host) = hit {
            return Ok(Place::Host {
                host,
                // The page of a TLB hit is not tracked for this access: the TLB has no entry for writes to tracked
                // pages, and reads are not tracked.
                tracked: None,
                needs_look,
            });
        }
        // The caller has provided the data of this read. Do not translate the address again: another page may be mapped
        // at it now.
        if self.has_answers()
            && access == Access::Read
            && let Some(gpa) = self.answered_at(lin)
        {
            return Ok(Place::Mmio(gpa));
        }
        if !self.canonical(lin) {
            self.raised.noncanonical = true;
            return Err(self.raise(vector::GP, Some(0)));
        }
        if let Some(gpa) = self.take_met(lin, access) {
            return Ok(Place::Mmio(gpa));
        }
        self.counters.tlb_misses += 1;
        match self.translate(table, lin, access) {
            Ok(page) => {
                debug_assert!(page.tracked.is_none() || !page.write);
                if !self.is_watched_page(lin) {
                    let code = self
                        .code
                        .member
                        .pages()
                        .version_of(page.base.as_ptr() as usize)
                        != 0;
                    self.tlb().fill(table, lin, &page, code);
                }
                let at = lin & 0xfff;
                Ok(Place::Host {
                    host: page.base.as_ptr().wrapping_add(at as usize),
                    tracked: page.tracked.map(|gpa| gpa + at),
                    needs_look: true,
                })
            }
            Err(Fault::Mmio { gpa }) => Ok(Place::Mmio(gpa)),
            Err(fault) => Err(self.fault(lin, fault)),
        }
    }

    /// Translates a canonical address for an access that uses TLB table `table`. Takes the translation from the TLB's
    /// second level, or, if the second level does not have it, from the machine.
    #[inline(always)]
    pub(crate) fn translate(
        &mut self,
        table: usize,
        lin: u64,
        access: Access,
    ) -> Result<HostPage, Fault> {
        match self.tlb().second(table, lin, access) {
            Some(page) => {
                self.counters.stlb_hits += 1;
                Ok(page)
            }
            None => self.walk(table, lin, access),
        }
    }

    #[inline(never)]
    fn walk(&mut self, table: usize, lin: u64, access: Access) -> Result<HostPage, Fault> {
        let paging = self.paging_for(table);
        let result = self.machine().translate(lin, access, &paging);
        match &result {
            Ok(page) => self.tlb().enter(table, lin, page, access),
            // A page fault invalidates the page's translations (SDM volume 3, "Operations that Invalidate TLBs").
            Err(Fault::Page { .. }) => self.drop_page(lin),
            Err(_) => {}
        }
        result
    }

    /// Converts a fault of the machine to the exception or the exit of the current instruction.
    #[cold]
    pub(crate) fn fault(&mut self, lin: u64, fault: Fault) -> Break {
        match fault {
            Fault::Page { error_code } => {
                self.raised.address = lin;
                self.raise(vector::PF, Some(error_code))
            }
            Fault::NestedPage { error_code, gpa } => self.nested_page_fault(error_code, gpa),
            Fault::GeneralProtection => self.raise(vector::GP, Some(0)),
            Fault::Retry => Break::Retry,
            Fault::CodeChanged => {
                self.code.walk_changed = true;
                Break::Retry
            }
            Fault::BadAddress => self.leave(Exit::BadAddress),
            Fault::OutOfMemory => self.leave(Exit::OutOfMemory),
            Fault::Mmio { .. } => self.unimplemented("a CPU structure or code in MMIO"),
        }
    }

    /// Call after a guarded access has failed. Drops the translation, and asks the machine whether to continue: `Ok` if
    /// the caller should translate again.
    #[cold]
    #[inline(never)]
    pub(crate) fn gone(&mut self, lin: u64, host: *mut u8, access: Access) -> Result<(), Break> {
        self.counters.flushes_page += 1;
        self.drop_page(lin);
        match self.machine().recheck(host, access) {
            Ok(()) => Ok(()),
            Err(fault) => Err(self.fault(lin, fault)),
        }
    }

    /// Reads bytes whose pages were translated. Returns `false` if a host page is not accessible: the caller must
    /// translate again.
    pub(super) fn read_places(
        &mut self,
        lin: u64,
        places: &Places,
        buffer: &mut [u8],
    ) -> Result<bool, Break> {
        let (head, tail) = buffer.split_at_mut(places.split);
        Ok(self.read_at(lin, places.first, head)?
            && match places.second {
                Some(second) => {
                    self.read_at(lin.wrapping_add(places.split as u64), second, tail)?
                }
                None => true,
            })
    }

    /// Writes bytes whose pages were translated, and then reports the parts in tracked pages to the machine. Returns
    /// `false` if a host page is not accessible: the caller must translate again.
    pub(super) fn write_places(
        &mut self,
        lin: u64,
        places: &Places,
        bytes: &[u8],
    ) -> Result<bool, Break> {
        let done = self.write_parts(lin, places, bytes);
        // Report the write even if it failed, because it may have changed some bytes.
        self.tell_stored(places.first.tracked(), places.split);
        if let Some(second) = places.second {
            self.tell_stored(second.tracked(), bytes.len() - places.split);
        }
        done
    }

    fn write_parts(&mut self, lin: u64, places: &Places, bytes: &[u8]) -> Result<bool, Break> {
        let (head, tail) = bytes.split_at(places.split);
        Ok(self.write_at(lin, places.first, head)?
            && match places.second {
                Some(second) => {
                    self.write_at(lin.wrapping_add(places.split as u64), second, tail)?
                }
                None => true,
            })
    }

    fn read_at(&mut self, lin: u64, place: Place, buffer: &mut [u8]) -> Result<bool, Break> {
        match place {
            Place::Host { host, .. } => {
                // SAFETY: `host` is a translation of guest memory, to which every access is guarded.
                let done = unsafe { slat_guard::copy_in(buffer, host) };
                if done.is_err() {
                    self.gone(lin, host, Access::Read)?;
                }
                Ok(done.is_ok())
            }
            Place::Mmio(gpa) => {
                for (i, part) in buffer.chunks_mut(8).enumerate() {
                    let at = 8 * i as u64;
                    self.mmio_read(lin.wrapping_add(at), gpa + at, part)?;
                }
                Ok(true)
            }
        }
    }

    fn write_at(&mut self, lin: u64, place: Place, bytes: &[u8]) -> Result<bool, Break> {
        match place {
            Place::Host {
                host, needs_look, ..
            } => {
                // SAFETY: `host` is a translation of guest memory, to which every access is guarded.
                let done = unsafe { slat_guard::copy_out(host, bytes) };
                // Record the write even if it failed, because it may have changed some bytes.
                if needs_look {
                    self.note_store(lin, host);
                }
                if done.is_err() {
                    self.gone(lin, host, Access::Write)?;
                }
                Ok(done.is_ok())
            }
            Place::Mmio(gpa) => {
                for (i, part) in bytes.chunks(8).enumerate() {
                    self.mmio_write(gpa + 8 * i as u64, part)?;
                }
                Ok(true)
            }
        }
    }

    /// Call after each store that missed the TLB. `host` is the host address of `lin`. (A store that hits needs no
    /// call: it is made before this CPU has heeded a mark of the page, so no CPU trusts the page's code yet; see
    /// `code_pages`.) If the page holds decoded code, tells all CPUs that the code is stale. This CPU acts on that
    /// before its next instruction.
    pub(super) fn note_store(&mut self, lin: u64, host: *mut u8) {
        let host = host as usize;
        if self.code.member.stored(host) {
            self.counters.code_stores += 1;
            self.code.clock.change();
            self.stop = true;
        } else {
            // Also leave the block if the block is in this page although the page has no mark: stores of other CPUs may
            // have removed the mark while the block runs.
            self.stop |= self.code.page == host & !0xfff || self.code.page == ANY_PAGE;
        }
        if self.code.member.pages().version_of(host) == 0 {
            let table = self.filled_table();
            self.tlb().forget_code(table, lin);
        }
    }

    /// Call after a store of `bytes` bytes in one page. Reports the store to the machine if the page is tracked.
    #[inline]
    pub(super) fn tell_stored(&mut self, tracked: Option<u64>, bytes: usize) {
        if let Some(gpa) = tracked
            && self.machine().stored(gpa, bytes)
        {
            self.flush_tlb();
        }
    }
}
