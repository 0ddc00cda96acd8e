//! Guest-virtual loads and stores.
//!
//! The fast path is a look-up in the software TLB and one guarded access. All other cases take a slow path: TLB misses,
//! pages without memory, accesses that cross into another page, MMIO, and inaccessible host memory. All paths are
//! precise: a load or store that fails has had no effect, and an access that crosses into another page translates both
//! pages before it accesses either.
//!
//! If the machine tracks a page, or the page holds decoded code, the TLB may have an entry for reads of the page, but
//! none for writes. So a store to such a page misses the TLB. [`Cpu::write_to`] and `Cpu::write_places` (in `places`)
//! make these stores. They report the store to the machine if it tracks the page, and to all CPUs if the page holds
//! decoded code.

mod address;
mod alignment;
mod pdptes;
mod physical;
mod places;
mod stack;

#[cfg(feature = "jit")]
use crate::devices::Met;
use crate::int::Int;
use crate::machine::{Access, Exit};
use crate::op::{Break, MEM, Op};
use crate::state::MXCSR_MM;
use crate::tlb::SUPERVISOR;
use crate::{Cpu, vector};
use places::Place;
pub(crate) use places::{Destination, Places};
use slat_guard::{Gone, Word};

/// The size of a cache line in bytes.
pub(crate) const CACHE_LINE: u64 = 64;

/// Reads a word, changes it by `f`, and writes it; atomically if `lock`. Returns the old and the new value.
///
/// # Safety
/// The requirements of [`slat_guard::store`].
#[inline(always)]
unsafe fn exchange<T: Int>(
    word: *mut T,
    lock: bool,
    mut f: impl FnMut(T) -> T,
) -> Result<(T, T), Gone> {
    loop {
        // SAFETY: no Rust object is at `word`, as this function's `# Safety` demands.
        let old = unsafe { slat_guard::load(word) }?;
        let new = f(old);
        // SAFETY: no Rust object is at `word`, as this function's `# Safety` demands.
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

impl Cpu {
    /// Loads a word by the fast path of [`load`](Self::load) only. `None`: the software TLB has no page for the access,
    /// or the page is not accessible. If a handler calls a separate function for the slow path, the handler's fast path
    /// needs no stack frame.
    #[inline(always)]
    pub(crate) fn try_load<T: Word>(&mut self, lin: u64) -> Option<T> {
        let table = self.table;
        let host = self.tlb().read(table, lin, size_of::<T>() as u64)?;
        // SAFETY: the software TLB holds guest memory only, to which every access is guarded.
        unsafe { slat_guard::load(host.cast::<T>()) }.ok()
    }

    /// Stores a word by the fast path of [`store`](Self::store) only. Returns `false` if the software TLB has no page
    /// for the access, or the page is not accessible.
    #[inline(always)]
    pub(crate) fn try_store<T: Word>(&mut self, lin: u64, v: T) -> bool {
        let table = self.table;
        let Some(host) = self.tlb().write(table, lin, size_of::<T>() as u64) else {
            return false;
        };
        // SAFETY: the software TLB holds guest memory only, to which every access is guarded.
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

    /// Returns the result of a handler that has stored to memory: ends the block if the store makes that necessary.
    #[inline(always)]
    pub(crate) fn stored(&mut self) -> Result<(), Break> {
        if self.stop { Err(Break::End) } else { Ok(()) }
    }

    /// Reads a word, changes it by `f`, and writes it. Returns the old and the new value. If `lock`, the change is
    /// atomic, unless the word is in two pages, or not in memory (MMIO).
    #[inline(always)]
    pub(crate) fn update<T: Int>(
        &mut self,
        lin: u64,
        lock: bool,
        f: impl FnMut(T) -> T,
    ) -> Result<(T, T), Break> {
        let locks_bus = lock && lin % CACHE_LINE > CACHE_LINE - T::BYTES;
        if locks_bus {
            self.check_alignment(lin, size_of::<T>())?;
            self.before_bus_lock()?;
        }
        let both = self.exchange(lin, lock, f)?;
        if locks_bus {
            self.after_bus_lock();
        }
        Ok(both)
    }

    /// Call before a locked access that crosses a cache line, for which a processor locks the bus (SDM volume 3, "Bus
    /// Locking"). Ends the run if the caller wants to know of the bus lock before the access.
    #[cold]
    fn before_bus_lock(&mut self) -> Result<(), Break> {
        match self.bus_lock.ends_run() {
            true => Err(self.leave(Exit::BusLock)),
            false => Ok(()),
        }
    }

    /// Call after a locked access that crosses a cache line. Ends the run after the instruction if the caller wants to
    /// know of the bus lock afterwards.
    #[cold]
    fn after_bus_lock(&mut self) {
        if self.bus_lock.note() {
            (self.stop, self.slow) = (true, true);
        }
    }

    /// Does the work of [`update`](Self::update), except for bus locks.
    #[inline(always)]
    fn exchange<T: Int>(
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

    /// Does the work of [`update`](Self::update) after a TLB miss. A function of its own, so that the fast path need
    /// not check whether the page is tracked.
    #[cold]
    #[inline(never)]
    fn update_slow<T: Int>(
        &mut self,
        lin: u64,
        lock: bool,
        mut f: impl FnMut(T) -> T,
    ) -> Result<(T, T), Break> {
        self.check_alignment(lin, size_of::<T>())?;
        loop {
            let to = match self.has_answers() && self.answered_at(lin).is_some() {
                true => None,
                false => self.write_place(lin, T::BYTES as usize)?,
            };
            let Some(to) = to else {
                // Because slat does not lock the bus, an update across two pages, or of MMIO, is not atomic.
                let old = self.load::<T>(lin)?;
                let new = f(old);
                self.store(lin, new)?;
                return Ok((old, new));
            };
            // SAFETY: `host` is a translation of guest memory, to which every access is guarded.
            let both = |host: *mut u8| unsafe { exchange(host.cast::<T>(), lock, &mut f) };
            if let Some(both) = self.write_to(to, both)? {
                return Ok(both);
            }
        }
    }

    /// Returns the destination of a write of `len` bytes at `lin`. `None`: the bytes are in two pages, or not in
    /// memory.
    pub(crate) fn write_place(
        &mut self,
        lin: u64,
        len: usize,
    ) -> Result<Option<Destination>, Break> {
        let places = self.places(lin, len, Access::Write)?;
        Ok(places.destination(lin))
    }

    /// Calls `write` with the host address of `to`. `write` must write all of `to` by guarded accesses. If the page is
    /// tracked, reports the write to the machine. Returns the result of `write`. `None`: the host page is not
    /// accessible, and the caller must translate again.
    #[inline]
    pub(crate) fn write_to<T, E>(
        &mut self,
        to: Destination,
        write: impl FnOnce(*mut u8) -> Result<T, E>,
    ) -> Result<Option<T>, Break> {
        let result = write(to.host).ok();
        // Report the write even if it failed, because it may have changed some bytes.
        if to.needs_look {
            self.note_store(to.lin, to.host);
        }
        self.tell_stored(to.tracked, to.bytes);
        if result.is_none() {
            self.gone(to.lin, to.host, Access::Write)?;
        }
        Ok(result)
    }

    /// Returns the host address from which to read `len` bytes at `lin`. `None`: the bytes are in two pages, or not in
    /// memory.
    pub(crate) fn read_place(&mut self, lin: u64, len: usize) -> Result<Option<*mut u8>, Break> {
        let places = self.places(lin, len, Access::Read)?;
        Ok(places.source())
    }

    /// Reads the memory operand of `op`.
    #[inline(always)]
    pub(crate) fn load_mem<T: Word>(&mut self, op: &Op) -> Result<T, Break> {
        let lin = self.lin(op, size_of::<T>() as u32)?;
        self.load(lin)
    }

    /// Writes `v` to the memory operand of `op`.
    #[inline(always)]
    pub(crate) fn store_mem<T: Word>(&mut self, op: &Op, v: T) -> Result<(), Break> {
        let lin = self.lin(op, size_of::<T>() as u32)?;
        self.store(lin, v)
    }

    /// Reads operand `k`, a register or memory.
    #[inline(always)]
    pub(crate) fn operand<T: Int>(&mut self, op: &Op, k: usize) -> Result<T, Break> {
        match op.r[k] {
            MEM => self.load_mem(op),
            r => Ok(T::get(self, r)),
        }
    }

    /// Writes operand `k`. Call after all other steps of the instruction that can fail.
    #[inline(always)]
    pub(crate) fn set_operand<T: Int>(&mut self, op: &Op, k: usize, v: T) -> Result<(), Break> {
        match op.r[k] {
            MEM => self.store_mem(op, v),
            r => {
                T::set(self, r, v);
                Ok(())
            }
        }
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

    /// Raises #GP(0) unless the memory operand of an SSE instruction that computes is aligned to 16 bytes, or MXCSR.MM
    /// permits unaligned operands.
    #[inline(always)]
    pub(crate) fn aligned_operand(&mut self, lin: u64) -> Result<(), Break> {
        match lin & 15 != 0 && self.state.mxcsr & MXCSR_MM == 0 {
            true => Err(self.raise(vector::GP, Some(0))),
            false => Ok(()),
        }
    }

    /// Checks that `len` bytes, at most a page, can be written. Writes nothing.
    pub(crate) fn probe_write(&mut self, lin: u64, len: usize) -> Result<(), Break> {
        self.places(lin, len, Access::Write).map(|_| ())
    }

    /// Reads `buffer.len()` bytes at `lin`, at most a page.
    pub(crate) fn load_bytes(&mut self, lin: u64, buffer: &mut [u8]) -> Result<(), Break> {
        loop {
            let places = self.places(lin, buffer.len(), Access::Read)?;
            if self.read_places(lin, &places, buffer)? {
                return Ok(());
            }
        }
    }

    /// Reads bytes like [`Self::load_bytes`], but for an instruction that cannot read MMIO: a read of MMIO ends the run
    /// with [`Exit::Emulation`] and this `reason`.
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

    /// Writes `bytes` at `lin`, at most a page.
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
        self.check_alignment(lin, size_of::<T>())?;
        loop {
            let places = self.places(lin, size_of::<T>(), Access::Read)?;
            if let Some(v) = self.load_at(lin, &places)? {
                return Ok(v);
            }
        }
    }

    /// Reads a word whose pages were translated. `None`: a host page is not accessible, and the caller must translate
    /// again.
    #[inline(always)]
    fn load_at<T: Word>(&mut self, lin: u64, places: &Places) -> Result<Option<T>, Break> {
        // Usually the word is in one page of memory. Then one access reads all of it, so that the read is atomic.
        if let Places {
            first: Place::Host { host, .. },
            second: None,
            ..
        } = *places
        {
            // SAFETY: `host` is a translation of guest memory, to which every access is guarded.
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
        self.check_alignment(lin, size)?;
        loop {
            let places = self.places(lin, size, Access::Write)?;
            if let Some(to) = places.destination(lin) {
                // SAFETY: `host` is a translation of guest memory, to which every access is guarded.
                let write = |host: *mut u8| unsafe { slat_guard::store(host.cast::<T>(), v) };
                match self.write_to(to, write)? {
                    Some(()) => return Ok(()),
                    None => continue,
                }
            }
            let mut bytes = [0; 16];
            // SAFETY: `bytes` holds at least the 16 bytes of the largest word.
            unsafe { bytes.as_mut_ptr().cast::<T>().write_unaligned(v) };
            if self.write_places(lin, &places, &bytes[..size])? {
                return Ok(());
            }
        }
    }

    /// Runs `f` with the rights of the CPU's own accesses, for example to descriptor tables: supervisor rights, to
    /// which SMAP applies.
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

/// Accesses of compiled code that miss the TLB. The interpreter makes accesses to devices, and accesses that need an
/// alignment check.
#[cfg(feature = "jit")]
impl Cpu {
    /// Translates all pages of an access. If the access is to a device, records the device's guest-physical address, so
    /// that the interpreter need not translate again ([`Self::take_met`]).
    fn places_or_met(&mut self, lin: u64, len: usize, access: Access) -> Result<Places, Break> {
        let places = self.places(lin, len, access)?;
        self.devices.met = places.device().map(|gpa| Met { lin, access, gpa });
        Ok(places)
    }

    /// Returns the host address from which to read `len` bytes, at most 32. If the bytes are in two pages, it is the
    /// address of a copy. `None`: the interpreter must make the access, because some of the bytes are MMIO or in a
    /// watched page, or because alignment is checked.
    pub(crate) fn place_to_load(&mut self, lin: u64, len: usize) -> Result<Option<*mut u8>, Break> {
        if self.checks_alignment() {
            return Ok(None);
        }
        loop {
            let places = self.places_or_met(lin, len, Access::Read)?;
            if !places.are_memory() || self.is_watched_page(lin) {
                return Ok(None);
            }
            if let Some(host) = places.source() {
                return Ok(Some(host));
            }
            let mut copy = [0; 32];
            if self.read_places(lin, &places, &mut copy[..len])? {
                self.compiled.copy = copy;
                return Ok(Some((&raw mut self.compiled.copy).cast()));
            }
        }
    }

    /// Returns the host address to which compiled code may write `len` bytes. `None`: the bytes are not in one page of
    /// memory, the page has decoded code or is tracked or watched, or alignment is checked.
    pub(crate) fn place_to_store(
        &mut self,
        lin: u64,
        len: usize,
    ) -> Result<Option<*mut u8>, Break> {
        if self.checks_alignment() {
            return Ok(None);
        }
        let places = self.places_or_met(lin, len, Access::Write)?;
        let table = self.table;
        Ok(match places.destination(lin) {
            Some(_) => self.tlb().write(table, lin, len as u64),
            None => None,
        })
    }
}
