//! The engine's platform, made of a C program's callbacks.

use super::message::blame;
use slat::{
    Entries, Gfn, Granule, HostPage, HostRun, Hva, Level, MetaMap, Pfn, Platform, Request,
    ResolveError, Stale, TableMeta, VmId, WaitFor,
};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr::NonNull;

/// A page of the host's.
#[repr(C)]
#[derive(Debug)]
pub struct slat_page {
    /// The number of the frame that backs the page.
    pub frame: u64,
    /// Size in bytes of the aligned block around the page that is contiguous on the host: 4 KiB, 2 MiB or 1 GiB, or
    /// another size that leaves of the format have. The leaf is no larger.
    pub size: u64,
    /// Whether the guest may write.
    pub writable: bool,
    /// Whether the guest may execute.
    pub executable: bool,
}

/// What the machine provides. Each callback gets `context`, may be called by any thread, by several at once, and calls
/// no function of this library, but for `drain`. Only `drain` may be `NULL`. Frames are 4 KiB, or with
/// `SLAT_STAGE2_16K` and `SLAT_STAGE2_64K` what these say; a frame's number is its physical address divided by that, a
/// guest frame's likewise.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct slat_platform {
    /// Passed to each callback.
    pub context: *mut c_void,
    /// Allocates `count` contiguous frames for tables, aligned to their whole size; `count` is a power of two. Returns
    /// the number of the first frame, or 0 without memory. Must not wait for a vCPU.
    pub allocate: Option<unsafe extern "C" fn(context: *mut c_void, count: usize) -> u64>,
    /// Frees one of the frames that `allocate` has returned. No CPU walks it any more.
    pub free: Option<unsafe extern "C" fn(context: *mut c_void, frame: u64)>,
    /// Returns the address in this program of a frame that `allocate` has returned, always the same until the frame is
    /// freed. Called at each step of a walk.
    pub address: Option<unsafe extern "C" fn(context: *mut c_void, frame: u64) -> *mut c_void>,
    /// Finds the page that backs the memory at `backing`, and describes the page in `*page`. The page backs that memory
    /// until `slat_vm_invalidate`. May sleep. Returns 0; `-EFAULT` if there is no page, or none that `access`
    /// (`SLAT_READ`, …) may use; `-ENOMEM`; `-EINTR`; `-EAGAIN` if the page is not there yet.
    pub resolve: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            backing: u64,
            access: u32,
            page: *mut slat_page,
        ) -> c_int,
    >,
    /// Flushes what CPUs have cached of the `pages` guest frames from `first` on: their translations, and the entries
    /// of tables that lead to them. Returns when no CPU uses an old translation.
    pub flush: Option<unsafe extern "C" fn(context: *mut c_void, first: u64, pages: u64)>,
    /// Passes time while the engine waits; `round` counts up from 0. Spin first, then yield the processor.
    pub wait: Option<unsafe extern "C" fn(context: *mut c_void, round: u32)>,
    /// Interrupts the CPUs that are in the guest. Returns when everything in the buffers of their page walkers was
    /// passed to `slat_vm_drain`. Called before a dirty log is got with the policy `dirty_log=buffer`. `NULL` where no
    /// hardware fills a buffer.
    pub drain: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

/// A platform that lacks no callback that it must have.
pub(super) struct Callbacks {
    granule: Granule,
    context: *mut c_void,
    allocate: unsafe extern "C" fn(*mut c_void, usize) -> u64,
    free: unsafe extern "C" fn(*mut c_void, u64),
    address: unsafe extern "C" fn(*mut c_void, u64) -> *mut c_void,
    resolve: unsafe extern "C" fn(*mut c_void, u64, u32, *mut slat_page) -> c_int,
    flush: unsafe extern "C" fn(*mut c_void, u64, u64),
    wait: unsafe extern "C" fn(*mut c_void, u32),
    drain: Option<unsafe extern "C" fn(*mut c_void)>,
    metas: MetaMap,
}

// SAFETY: the client lets any thread call the callbacks with the context.
unsafe impl Send for Callbacks {}
// SAFETY: as above, several threads at once.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// Takes over the callbacks of `client`.
    ///
    /// # Errors
    /// The name of a callback that is missing.
    ///
    /// # Safety
    /// - The callbacks keep what [`slat_platform`] says.
    pub(super) unsafe fn new(client: &slat_platform) -> Result<Self, &'static str> {
        Ok(Callbacks {
            granule: Granule::Kib4,
            context: client.context,
            allocate: client.allocate.ok_or("allocate")?,
            free: client.free.ok_or("free")?,
            address: client.address.ok_or("address")?,
            resolve: client.resolve.ok_or("resolve")?,
            flush: client.flush.ok_or("flush")?,
            wait: client.wait.ok_or("wait")?,
            drain: client.drain,
            metas: MetaMap::new(),
        })
    }

    /// Sets the size of frames to that of `granule`.
    pub(super) fn with_granule(self, granule: Granule) -> Self {
        Callbacks { granule, ..self }
    }

    /// Returns the largest level whose leaves are not larger than `size`. `None`: there is no page of that size.
    fn level(&self, size: u64) -> Option<Level> {
        if !size.is_power_of_two() {
            return None;
        }
        let levels = [Level::GIGA, Level::MEGA, Level::PAGE];
        let fits = |level: &Level| self.granule.pages(*level) <= size >> self.granule.shift();
        levels.into_iter().find(fits)
    }

    /// Returns the page that `resolve` has described.
    ///
    /// # Errors
    /// A bad address, for a description that no page can have. The text of the error says what is wrong.
    fn page(&self, backing: u64, page: &slat_page) -> Result<HostPage, ResolveError> {
        let Some(level) = self.level(page.size) else {
            blame(format!(
                "resolve: {:#x} bytes are no size of a page, for the memory at {backing:#x}; give {:#x}, or what more is next to it",
                page.size,
                self.granule.bytes()
            ));
            return Err(ResolveError::BadAddress);
        };
        Ok(HostPage::new(Pfn(page.frame), level)
            .with_writable(page.writable)
            .with_execute(page.executable))
    }
}

// SAFETY: the client keeps the contract, by the promise of `Callbacks::new`; metadata stays at its address.
unsafe impl Platform for Callbacks {
    fn granule(&self) -> Granule {
        self.granule
    }

    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        self.alloc_root(vm, 1)
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        // SAFETY: the client's callback.
        let first = match unsafe { (self.allocate)(self.context, tables) } {
            0 => return None,
            first => Pfn(first),
        };
        let frames = || (0..tables as u64).map(|i| first.add(i));
        if frames().any(|frame| self.metas.prepare(frame).is_err()) {
            // SAFETY: allocated above, and nobody knows of them.
            frames().for_each(|frame| unsafe { self.free_table(vm, frame) });
            return None;
        }
        Some(first)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        // SAFETY: the client's callback.
        unsafe { (self.free)(self.context, frame.0) }
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        // SAFETY: the client's callback.
        let address = unsafe { (self.address)(self.context, frame.0) };
        NonNull::new(address.cast()).expect("an allocated frame has an address")
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        (self.metas.get(frame)).expect("`alloc_root` has prepared it")
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let mut page = slat_page {
            frame: 0,
            size: self.granule.bytes(),
            writable: true,
            executable: true,
        };
        let (backing, access) = (request.backing.0, request.access as u32);
        // SAFETY: the client's callback, which gets a live struct.
        match -unsafe { (self.resolve)(self.context, backing, access, &mut page) } {
            0 => self.page(backing, &page),
            libc::ENOMEM => Err(ResolveError::OutOfMemory),
            libc::EINTR => Err(ResolveError::Interrupted),
            libc::EAGAIN => Err(ResolveError::Absent),
            _ => Err(ResolveError::BadAddress),
        }
    }

    /// Maps nothing ahead.
    fn resolve_resident(&self, _: VmId, _: Range<Hva>, _: &mut dyn FnMut(HostRun)) {}

    fn flush(&self, _: VmId, range: Range<Gfn>, _: Stale) {
        let pages = range.end.0 - range.start.0;
        // SAFETY: the client's callback.
        unsafe { (self.flush)(self.context, range.start.0, pages) }
    }

    fn drain(&self, _: VmId, _: &mut dyn FnMut(usize, Gfn)) {
        if let Some(drain) = self.drain {
            // SAFETY: the client's callback.
            unsafe { drain(self.context) }
        }
    }

    fn wait(&self, round: u32, _: WaitFor) {
        // SAFETY: the client's callback.
        unsafe { (self.wait)(self.context, round) }
    }
}
