//! Guest-virtual loads and stores.
//!
//! The fast paths are a look-up in the software TLB and one guarded access. Everything else takes the slow paths: misses, pages
//! without memory, accesses that cross into another page, MMIO, inaccessible host memory. All paths are precise: a load or
//! store that fails has changed nothing, and an access that crosses a page has translated both pages before it touches either.
//!
//! A store to a page that the machine tracks misses in the TLB, as the TLB holds the page for reads only; so does one to a page that
//! holds decoded code. Such stores are made in [`Cpu::write_to`] and `Cpu::write_places` alone, which tell the machine, and the
//! CPUs that share the code.

use crate::cpu::ANY_PAGE;
use crate::int::Int;
use crate::machine::{Access, Exit, Fault, HostPage};
use crate::op::{Break, Op, form};
use crate::tlb::SUPERVISOR;
use crate::{Cpu, vector};
use slat_guard::{Gone, Word};

/// Where the bytes of one page are stored.
#[derive(Clone, Copy)]
enum Place {
    Host {
        host: *mut u8,
        /// The guest-physical address, if the machine wants to know of stores.
        tracked: Option<u64>,
        /// A store has to be noted: the TLB does not have the page for writes without a look.
        needs_look: bool,
    },
    Mmio(u64),
}

/// A [`Place`] for each page of an access, with the number of bytes in the first one.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    first: Place,
    second: Option<Place>,
    split: usize,
}

/// Memory within one page that a store goes to. Only [`Cpu::write_to`] has access to it.
#[must_use]
pub(crate) struct Destination {
    lin: u64,
    host: *mut u8,
    bytes: usize,
    tracked: Option<u64>,
    needs_look: bool,
}

impl Destination {
    /// Returns how many bytes after `host` the memory begins, wrapped around if it begins before.
    pub(crate) fn distance_from(&self, host: *mut u8) -> usize {
        (self.host as usize).wrapping_sub(host as usize)
    }
}

/// Reads, changes and writes a word; atomically with `lock`. Returns the old and the new value.
///
/// # Safety
/// As for [`slat_guard::store`].
#[inline(always)]
unsafe fn exchange<T: Int>(
    word: *mut T,
    lock: bool,
    mut f: impl FnMut(T) -> T,
) -> Result<(T, T), Gone> {
    loop {
        // SAFETY: the caller's promise.
        let old = unsafe { slat_guard::load(word) }?;
        let new = f(old);
        // SAFETY: the caller's promise.
        let done = unsafe {
            if lock {
                slat_guard::compare_exchange(word, old, new)?.is_ok()
            } else {
                slat_guard::store(word, new)?;
                true
            }
        };
        if done {
            return Ok((old, new));
        }
    }
}

impl Place {
    /// Returns the guest-physical address, if the machine wants to know of stores.
    fn tracked(self) -> Option<u64> {
        match self {
            Place::Host { tracked, .. } => tracked,
            Place::Mmio(_) => None,
        }
    }
}

impl Places {
    /// Whether all pages are memory, none of them MMIO.
    fn are_memory(&self) -> bool {
        let is_mmio = |place| matches!(place, Place::Mmio(_));
        !is_mmio(self.first) && !self.second.is_some_and(is_mmio)
    }

    /// Returns the memory at `lin`, if it is memory and in one page.
    fn destination(&self, lin: u64) -> Option<Destination> {
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
    /// Does [`load`](Self::load) if the fast path can. Handlers that leave the rest to another function need no stack frame for
    /// the call.
    #[inline(always)]
    pub(crate) fn try_load<T: Word>(&mut self, lin: u64) -> Option<T> {
        let table = self.table;
        let host = self.tlb().read(table, lin, size_of::<T>() as u64)?;
        // SAFETY: the software TLB holds guest memory only, to which every access is guarded.
        unsafe { slat_guard::load(host.cast::<T>()) }.ok()
    }

    /// Does [`store`](Self::store) if the fast path can.
    #[inline(always)]
    pub(crate) fn try_store<T: Word>(&mut self, lin: u64, v: T) -> bool {
        let table = self.table;
        let Some(host) = self.tlb().write(table, lin, size_of::<T>() as u64) else {
            return false;
        };
        // SAFETY: as in `try_load`.
        unsafe { slat_guard::store(host.cast::<T>(), v) }.is_ok()
    }

    /// Reads a word of 1 to 16 bytes at a linear address.
    #[inline(always)]
    pub(crate) fn load<T: Word>(&mut self, lin: u64) -> Result<T, Break> {
        match self.try_load(lin) {
            Some(v) => Ok(v),
            None => self.load_slow(lin),
        }
    }

    /// Writes a word of 1 to 16 bytes at a linear address.
    #[inline(always)]
    pub(crate) fn store<T: Word>(&mut self, lin: u64, v: T) -> Result<(), Break> {
        if self.try_store(lin, v) {
            return Ok(());
        }
        self.store_slow(lin, v)
    }

    /// Call after each store that missed in the TLB's entries for writes, made to `host`, the address of `lin`. (Those that hit are to
    /// pages that no CPU trusts to hold code: see `code_pages`.) If the page holds decoded code, all CPUs see that it is not good any
    /// more, this one before its next instruction.
    fn note_store(&mut self, lin: u64, host: *mut u8) {
        let host = host as usize;
        if self.code.stored(host) {
            self.counters.code_stores += 1;
            self.outdate_stamps();
            self.stop = true;
        } else {
            // Another CPU's stores have removed the mark while a block of the page runs.
            self.stop |= self.code_page == host & !0xfff || self.code_page == ANY_PAGE;
        }
        if self.code.pages().version_of(host) == 0 {
            let table = self.table;
            self.tlb().forget_code(table, lin);
        }
    }

    /// Returns the result of a handler that has stored: the block may have to end after it.
    #[inline(always)]
    pub(crate) fn stored(&mut self) -> Result<(), Break> {
        if self.stop { Err(Break::End) } else { Ok(()) }
    }

    /// Reads, changes and writes a word. Returns the old and the new value. Atomic with `lock` if the word lies in one page.
    #[inline(always)]
    pub(crate) fn update<T: Int>(
        &mut self,
        lin: u64,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<(T, T), Break> {
        let table = self.table;
        if let Some(host) = self.tlb().write(table, lin, T::BYTES) {
            // SAFETY: the software TLB holds guest memory only, to which every access is guarded.
            match unsafe { exchange(host.cast::<T>(), lock, &mut f) } {
                Ok(both) => return Ok(both),
                Err(_) => self.gone(lin, host, Access::Write)?,
            }
        }
        self.update_slow(lin, lock, f)
    }

    /// Does [`update`](Self::update) after a miss in the TLB. Out of line, so that the fast path does not ask what is tracked.
    #[cold]
    #[inline(never)]
    fn update_slow<T: Int>(
        &mut self,
        lin: u64,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<(T, T), Break> {
        loop {
            let Some(to) = self.write_place(lin, T::BYTES as usize)? else {
                // Across pages or to MMIO: not atomic, as slat has no bus locks.
                let old = self.load::<T>(lin)?;
                let new = f(old);
                self.store(lin, new)?;
                return Ok((old, new));
            };
            // SAFETY: a translation of guest memory, to which every access is guarded.
            let both = |host: *mut u8| unsafe { exchange(host.cast::<T>(), lock, &mut f) };
            if let Some(both) = self.write_to(to, both)? {
                return Ok(both);
            }
        }
    }

    /// Returns `len` bytes that may be written, if they are memory and in one page.
    pub(crate) fn write_place(
        &mut self,
        lin: u64,
        len: usize,
    ) -> Result<Option<Destination>, Break> {
        let places = self.places(lin, len, Access::Write)?;
        Ok(places.destination(lin))
    }

    /// Runs `write`, which writes all of `to` by guarded accesses to the address that it is passed, then tells the machine if the
    /// page is tracked. Returns the result of `write`. `None`: the host page is not accessible; translate again.
    #[inline]
    pub(crate) fn write_to<T, E>(
        &mut self,
        to: Destination,
        write: impl FnOnce(*mut u8) -> Result<T, E>,
    ) -> Result<Option<T>, Break> {
        let result = write(to.host).ok();
        // Even a write that failed may have changed some bytes.
        if to.needs_look {
            self.note_store(to.lin, to.host);
        }
        self.tell_stored(to.tracked, to.bytes);
        if result.is_none() {
            self.gone(to.lin, to.host, Access::Write)?;
        }
        Ok(result)
    }

    /// Call after a store of `bytes` bytes within one page: tells the machine if the page is tracked.
    #[inline]
    fn tell_stored(&mut self, tracked: Option<u64>, bytes: usize) {
        if let Some(gpa) = tracked
            && self.machine().stored(gpa, bytes)
        {
            self.flush_tlb();
        }
    }

    /// Returns the host address of `len` bytes that may be read, if they are memory and in one page.
    pub(crate) fn read_place(&mut self, lin: u64, len: usize) -> Result<Option<*mut u8>, Break> {
        let places = self.places(lin, len, Access::Read)?;
        Ok(match places {
            Places {
                first: Place::Host { host, .. },
                second: None,
                ..
            } => Some(host),
            _ => None,
        })
    }

    /// Returns the linear address of the memory operand of `bytes` bytes.
    #[inline(always)]
    pub(crate) fn lin(&mut self, op: &Op, bytes: u32) -> Result<u64, Break> {
        match op.form {
            form::BASE => Ok(self.ea::<{ form::BASE }>(op)),
            form::INDEX => Ok(self.ea::<{ form::INDEX }>(op)),
            form::DISP => Ok(op.disp),
            _ => self.lin_full(op, bytes),
        }
    }

    /// Returns the address of an operand in one of the 64-bit forms.
    #[inline(always)]
    pub(crate) fn ea<const FORM: u8>(&self, op: &Op) -> u64 {
        let reg = |r: u8| self.state.gpr[usize::from(r & 15)];
        match FORM {
            form::BASE => reg(op.base).wrapping_add(op.disp),
            form::INDEX => reg(op.base)
                .wrapping_add(reg(op.index) << (op.scale & 3))
                .wrapping_add(op.disp),
            _ => op.disp,
        }
    }

    /// Returns the offset of an operand in its segment, in any form.
    pub(crate) fn offset(&self, op: &Op) -> u64 {
        let reg = |r: u8| {
            if r < 16 {
                self.state.gpr[usize::from(r)]
            } else {
                0
            }
        };
        let offset = reg(op.base)
            .wrapping_add(reg(op.index) << (op.scale & 3))
            .wrapping_add(op.disp);
        match op.address_size {
            2 => offset & 0xffff,
            4 => offset & 0xffff_ffff,
            _ => offset,
        }
    }

    #[inline(never)]
    fn lin_full(&mut self, op: &Op, bytes: u32) -> Result<u64, Break> {
        let offset = self.offset(op);
        self.segmented(op.seg, offset, bytes)
    }

    /// Returns the linear address of `offset` in a segment, after the checks of the current mode.
    pub(crate) fn segmented(&mut self, seg: u8, offset: u64, bytes: u32) -> Result<u64, Break> {
        let segment = *self.segment(seg);
        if self.is_64() {
            return Ok(if seg >= 4 {
                segment.base.wrapping_add(offset)
            } else {
                offset
            });
        }
        let last = offset + u64::from(bytes) - 1;
        let limit = u64::from(segment.limit);
        let expand_down = segment.rights & 0x1c == 0x14;
        let inside = match expand_down {
            false => last <= limit,
            true => offset > limit && last <= if segment.big() { 0xffff_ffff } else { 0xffff },
        };
        if !inside || self.state.cr0 & 1 != 0 && segment.rights & crate::Segment::UNUSABLE != 0 {
            let vector = if seg == 2 { vector::SS } else { vector::GP };
            return Err(self.raise(vector, Some(0)));
        }
        Ok(segment.base.wrapping_add(offset) & 0xffff_ffff)
    }

    /// Reads the memory operand.
    #[inline(always)]
    pub(crate) fn load_mem<T: Word>(&mut self, op: &Op) -> Result<T, Break> {
        let lin = self.lin(op, size_of::<T>() as u32)?;
        self.load(lin)
    }

    /// Writes the memory operand.
    #[inline(always)]
    pub(crate) fn store_mem<T: Word>(&mut self, op: &Op, v: T) -> Result<(), Break> {
        let lin = self.lin(op, size_of::<T>() as u32)?;
        self.store(lin, v)
    }

    /// Raises #GP(0) unless the address is aligned to 16 bytes.
    #[inline(always)]
    pub(crate) fn aligned16(&mut self, lin: u64) -> Result<(), Break> {
        if lin & 15 == 0 {
            Ok(())
        } else {
            Err(self.raise(vector::GP, Some(0)))
        }
    }

    /// Makes sure that `len` bytes (at most a page) can be written; nothing is written.
    pub(crate) fn probe_write(&mut self, lin: u64, len: usize) -> Result<(), Break> {
        self.places(lin, len, Access::Write).map(|_| ())
    }

    /// Reads up to a page of bytes.
    pub(crate) fn load_bytes(&mut self, lin: u64, buffer: &mut [u8]) -> Result<(), Break> {
        loop {
            let places = self.places(lin, buffer.len(), Access::Read)?;
            if self.read_places(lin, &places, buffer)? {
                return Ok(());
            }
        }
    }

    /// Like [`Self::load_bytes`], for an instruction that does not read MMIO: such a read is an emulation failure for `reason`.
    pub(crate) fn load_memory(
        &mut self,
        lin: u64,
        buffer: &mut [u8],
        reason: &'static str,
    ) -> Result<(), Break> {
        loop {
            let places = self.places(lin, buffer.len(), Access::Read)?;
            if !places.are_memory() {
                return Err(self.unimplemented(reason));
            }
            if self.read_places(lin, &places, buffer)? {
                return Ok(());
            }
        }
    }

    /// Writes up to a page of bytes.
    pub(crate) fn store_bytes(&mut self, lin: u64, bytes: &[u8]) -> Result<(), Break> {
        loop {
            let places = self.places(lin, bytes.len(), Access::Write)?;
            if self.write_places(lin, &places, bytes)? {
                return Ok(());
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn load_slow<T: Word>(&mut self, lin: u64) -> Result<T, Break> {
        loop {
            let places = self.places(lin, size_of::<T>(), Access::Read)?;
            if let Some(v) = self.load_at(lin, &places)? {
                return Ok(v);
            }
        }
    }

    /// Does [`load`](Self::load) after a miss in the TLB. `None`, with nothing read: it is MMIO, at least in part.
    #[cfg(feature = "jit")]
    pub(crate) fn load_unless_mmio<T: Word>(&mut self, lin: u64) -> Result<Option<T>, Break> {
        loop {
            let places = self.places(lin, size_of::<T>(), Access::Read)?;
            if !places.are_memory() {
                return Ok(None);
            }
            if let Some(v) = self.load_at(lin, &places)? {
                return Ok(Some(v));
            }
        }
    }

    /// Reads the translated word. `None`: a part's host page is not accessible; translate again.
    #[inline(always)]
    fn load_at<T: Word>(&mut self, lin: u64, places: &Places) -> Result<Option<T>, Break> {
        // The common miss: one page of memory. One access, so that it stays atomic.
        if let Places {
            first: Place::Host { host, .. },
            second: None,
            ..
        } = *places
        {
            // SAFETY: a translation of guest memory, to which every access is guarded.
            return match unsafe { slat_guard::load(host.cast::<T>()) } {
                Ok(v) => Ok(Some(v)),
                Err(_) => self.gone(lin, host, Access::Read).map(|()| None),
            };
        }
        let mut bytes = [0; 16];
        let done = self.read_places(lin, places, &mut bytes[..size_of::<T>()])?;
        // SAFETY: `bytes` holds at least the 16 bytes of the largest word, and words have no invalid values.
        Ok(done.then(|| unsafe { bytes.as_ptr().cast::<T>().read_unaligned() }))
    }

    #[cold]
    #[inline(never)]
    fn store_slow<T: Word>(&mut self, lin: u64, v: T) -> Result<(), Break> {
        let size = size_of::<T>();
        loop {
            let places = self.places(lin, size, Access::Write)?;
            if let Some(to) = places.destination(lin) {
                // SAFETY: a translation of guest memory, to which every access is guarded.
                let write = |host: *mut u8| unsafe { slat_guard::store(host.cast::<T>(), v) };
                match self.write_to(to, write)? {
                    Some(()) => return Ok(()),
                    None => continue,
                }
            }
            let mut bytes = [0; 16];
            // SAFETY: as in `load_slow`.
            unsafe { bytes.as_mut_ptr().cast::<T>().write_unaligned(v) };
            if self.write_places(lin, &places, &bytes[..size])? {
                return Ok(());
            }
        }
    }

    /// Translates all pages of an access of at most a page.
    pub(crate) fn places(&mut self, lin: u64, len: usize, access: Access) -> Result<Places, Break> {
        let in_first = 0x1000 - (lin & 0xfff) as usize;
        let first = self.place(lin, access)?;
        if len <= in_first {
            if self.watch.data {
                self.watch(lin, len, access)?;
            }
            return Ok(Places {
                first,
                second: None,
                split: len,
            });
        }
        let next = (lin | 0xfff).wrapping_add(1);
        let next = if self.is_64() {
            next
        } else {
            next & 0xffff_ffff
        };
        let second = self.place(next, access)?;
        if self.watch.data {
            self.watch(lin, len, access)?;
        }
        Ok(Places {
            first,
            second: Some(second),
            split: in_first,
        })
    }

    /// Translates one address. Inlined: returned through memory, the result costs a fifth of a miss.
    #[inline(always)]
    fn place(&mut self, lin: u64, access: Access) -> Result<Place, Break> {
        let table = self.table;
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
                // The TLB holds no tracked page for writes, and reads are not told.
                tracked: None,
                needs_look,
            });
        }
        if !self.canonical(lin) {
            self.fault_noncanonical = true;
            return Err(self.raise(vector::GP, Some(0)));
        }
        self.counters.tlb_misses += 1;
        match self.translate(table, lin, access) {
            Ok(page) => {
                debug_assert!(page.tracked.is_none() || !page.write);
                if !self.is_watched_page(lin) {
                    let code = self.code.pages().version_of(page.base.as_ptr() as usize) != 0;
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

    /// Translates an address, which is canonical, for an access through `table`: by the TLB's second level, or else by the machine.
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
            // SDM volume 3, "Operations that Invalidate TLBs": a page fault invalidates the page's translations.
            Err(Fault::Page { .. }) => self.drop_page(lin),
            Err(_) => {}
        }
        result
    }

    /// Converts a machine's fault to the instruction's exception or exit.
    #[cold]
    pub(crate) fn fault(&mut self, lin: u64, fault: Fault) -> Break {
        match fault {
            Fault::Page { error_code } => {
                self.fault_address = lin;
                self.raise(vector::PF, Some(error_code))
            }
            Fault::GeneralProtection => self.raise(vector::GP, Some(0)),
            Fault::Retry => Break::Retry,
            Fault::BadAddress => self.leave(Exit::BadAddress),
            Fault::OutOfMemory => self.leave(Exit::OutOfMemory),
            Fault::Mmio { .. } => self.unimplemented("a CPU structure or code in MMIO"),
        }
    }

    /// Call after a guarded access failed: asks the machine whether to continue, and drops the translation.
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

    /// Reads the translated bytes. False if a part's host page is not accessible: translate again.
    fn read_places(&mut self, lin: u64, places: &Places, buffer: &mut [u8]) -> Result<bool, Break> {
        let (head, tail) = buffer.split_at_mut(places.split);
        Ok(self.read_at(lin, places.first, head)?
            && match places.second {
                Some(second) => {
                    self.read_at(lin.wrapping_add(places.split as u64), second, tail)?
                }
                None => true,
            })
    }

    /// Writes the translated bytes, then tells the machine of the parts in tracked pages. False as in [`Self::read_places`].
    fn write_places(&mut self, lin: u64, places: &Places, bytes: &[u8]) -> Result<bool, Break> {
        let done = self.write_parts(lin, places, bytes);
        // Even a write that failed may have changed some bytes.
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
                // SAFETY: a translation of guest memory, to which every access is guarded.
                let done = unsafe { slat_guard::copy_in(buffer, host) };
                if done.is_err() {
                    self.gone(lin, host, Access::Read)?;
                }
                Ok(done.is_ok())
            }
            Place::Mmio(gpa) => {
                for (i, part) in buffer.chunks_mut(8).enumerate() {
                    self.mmio_read(gpa + 8 * i as u64, part)?;
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
                // SAFETY: a translation of guest memory, to which every access is guarded.
                let done = unsafe { slat_guard::copy_out(host, bytes) };
                // Even a write that failed may have changed some bytes.
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

    /// Runs `f` with the accesses that the CPU itself makes to its tables: as supervisor, with SMAP applying.
    pub(crate) fn as_system<T>(
        &mut self,
        f: impl FnOnce(&mut Self) -> Result<T, Break>,
    ) -> Result<T, Break> {
        let table = std::mem::replace(&mut self.table, SUPERVISOR);
        let result = f(self);
        self.table = table;
        result
    }
}
