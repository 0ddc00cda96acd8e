//! Implements the engine's platform by the callbacks of a C program.

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
    /// another size that leaves of the format have. The leaf for the page is not larger than this.
    pub size: u64,
    /// Whether the guest may write.
    pub writable: bool,
    /// Whether the guest may execute.
    pub executable: bool,
}

/// The services of the machine. Each callback gets `context`, and may be called by any thread, and by several threads
/// at once. No callback except `drain` may call functions of this library. Only `drain` may be `NULL`. Frames have 4
/// KiB; with `SLAT_STAGE2_16K` and `SLAT_STAGE2_64K` they have 16 or 64 KiB. A frame's number is its physical address
/// divided by that size; the same holds for guest frames.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct slat_platform {
    /// Passed to each callback.
    pub context: *mut c_void,
    /// Allocates `count` contiguous frames for tables, aligned to their whole size; `count` is a power of two. Returns
    /// the number of the first frame, or 0 if there is no memory. Must not wait for a vCPU.
    pub allocate: Option<unsafe extern "C" fn(context: *mut c_void, count: usize) -> u64>,
    /// Frees one of the frames that `allocate` has returned. No CPU walks it any more.
    pub free: Option<unsafe extern "C" fn(context: *mut c_void, frame: u64)>,
    /// Returns the address in this program of a frame that `allocate` has returned, which must not change until the
    /// frame is freed. Called at each step of a walk.
    pub address: Option<unsafe extern "C" fn(context: *mut c_void, frame: u64) -> *mut c_void>,
    /// Finds the page that backs the memory at `backing`, and describes the page in `*page`. The page backs that memory
    /// until `slat_vm_invalidate`. May sleep. Returns 0; `-EFAULT` if there is no page, or if the page does not allow
    /// `access` (`SLAT_READ`, …); `-ENOMEM`; `-EINTR`; `-EAGAIN` if the page is not there yet.
    pub resolve: Option<
        unsafe extern "C" fn(
            context: *mut c_void,
            backing: u64,
            access: u32,
            page: *mut slat_page,
        ) -> c_int,
    >,
    /// Makes CPUs drop everything that they have cached of the `pages` guest frames from `first` on: the translations
    /// of these frames, and the entries of tables on the paths to them. Returns when no CPU uses an old translation.
    pub flush: Option<unsafe extern "C" fn(context: *mut c_void, first: u64, pages: u64)>,
    /// Passes time while the engine waits; `round` counts up from 0. Spin first, then yield the processor.
    pub wait: Option<unsafe extern "C" fn(context: *mut c_void, round: u32)>,
    /// Interrupts the CPUs that are in the guest. Returns when everything in the buffers of their page walkers was
    /// passed to `slat_vm_drain`. Called before a dirty log is read, with the policy `dirty_log=buffer`. `NULL` if no
    /// hardware fills a buffer.
    pub drain: Option<unsafe extern "C" fn(context: *mut c_void)>,
}

/// The callbacks of a platform. All required callbacks exist.
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

// SAFETY: the client allows any thread to call the callbacks with the context.
unsafe impl Send for Callbacks {}
// SAFETY: the client allows several threads at once to call the callbacks with the context.
unsafe impl Sync for Callbacks {}

impl Callbacks {
    /// Copies the callbacks of `client`, and checks that the required callbacks exist.
    ///
    /// # Errors
    /// The name of a callback that is missing.
    ///
    /// # Safety
    /// - The callbacks do what [`slat_platform`] says.
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

    /// Returns the largest level whose leaves are not larger than `size` bytes. `None`: `size` is not a valid size of a
    /// page.
    fn level(&self, size: u64) -> Option<Level> {
        if !size.is_power_of_two() {
            return None;
        }
        let levels = [Level::GIGA, Level::MEGA, Level::PAGE];
        let fits = |level: &Level| self.granule.pages(*level) <= size >> self.granule.shift();
        levels.into_iter().find(fits)
    }

    /// Converts the description of a page by the callback `resolve`.
    ///
    /// # Errors
    /// [`ResolveError::BadAddress`] if the description is not valid. The text of the call's error gives the reason.
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

// SAFETY: the client's callbacks do what `slat_platform` says, as `Callbacks::new` asks of its caller, and this
// includes what `Platform` requires. `metas` keeps metadata at constant addresses.
unsafe impl Platform for Callbacks {
    fn granule(&self) -> Granule {
        self.granule
    }

    fn alloc_table(&self, vm: VmId) -> Option<Pfn> {
        self.alloc_root(vm, 1)
    }

    fn alloc_root(&self, vm: VmId, tables: usize) -> Option<Pfn> {
        // SAFETY: the callback is the client's, and does what `slat_platform` says.
        let first = match unsafe { (self.allocate)(self.context, tables) } {
            0 => return None,
            first => Pfn(first),
        };
        let frames = || (0..tables as u64).map(|i| first.add(i));
        if frames().any(|frame| self.metas.prepare(frame).is_err()) {
            // SAFETY: the frames were allocated above, and no other code knows them.
            frames().for_each(|frame| unsafe { self.free_table(vm, frame) });
            return None;
        }
        Some(first)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        // SAFETY: the callback is the client's, and does what `slat_platform` says.
        unsafe { (self.free)(self.context, frame.0) }
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        // SAFETY: the callback is the client's, and does what `slat_platform` says.
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
        // SAFETY: the callback is the client's, and gets a live struct.
        match -unsafe { (self.resolve)(self.context, backing, access, &mut page) } {
            0 => self.page(backing, &page),
            libc::ENOMEM => Err(ResolveError::OutOfMemory),
            libc::EINTR => Err(ResolveError::Interrupted),
            libc::EAGAIN => Err(ResolveError::Absent),
            _ => Err(ResolveError::BadAddress),
        }
    }

    /// Reports no pages, because there is no callback that tells which pages are resident. So the engine maps nothing
    /// ahead of its use.
    fn resolve_resident(&self, _: VmId, _: Range<Hva>, _: &mut dyn FnMut(HostRun)) {}

    fn flush(&self, _: VmId, range: Range<Gfn>, _: Stale) {
        let pages = range.end.0 - range.start.0;
        // SAFETY: the callback is the client's, and does what `slat_platform` says.
        unsafe { (self.flush)(self.context, range.start.0, pages) }
    }

    fn drain(&self, _: VmId, _: &mut dyn FnMut(usize, Gfn)) {
        if let Some(drain) = self.drain {
            // SAFETY: the callback is the client's, and does what `slat_platform` says.
            unsafe { drain(self.context) }
        }
    }

    fn wait(&self, round: u32, _: WaitFor) {
        // SAFETY: the callback is the client's, and does what `slat_platform` says.
        unsafe { (self.wait)(self.context, round) }
    }
}
