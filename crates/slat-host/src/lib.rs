//! slat's platform in Linux userspace.
//!
//! In this port the physical address **is** the host-virtual address: a leaf for the page at an hva contains this hva
//! divided by the page size, not the number of the kernel's frame. So the host may swap, migrate or share pages; only
//! changes of mappings matter. The program reports these ([`mappings`]).
#![cfg(target_os = "linux")]

pub mod mappings;
mod resident;
mod trace;

// Internal modules. They are public only for slat's own crates, and any version may change them.
#[doc(hidden)]
pub mod frames;
#[doc(hidden)]
pub mod procfs;
#[doc(hidden)]
pub mod registered;
#[doc(hidden)]
pub mod userfault;

pub use resident::is_resident;
#[doc(hidden)]
pub use slat_process::forks as process;
pub use slat_process::page_size;

/// Returns the granule of tables whose pages are as large as those of this process.
#[inline(always)]
pub fn granule() -> Granule {
    match page_size() {
        0x4000 => Granule::Kib16,
        0x1_0000 => Granule::Kib64,
        _ => Granule::Kib4,
    }
}

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::time::Duration;

use slat::{
    Access, Entries, Event, Gfn, Granule, HostPage, HostRun, Hpa, Hva, Level, Pfn, Platform,
    Request, ResolveError, Stale, TableMeta, VmId, WaitFor,
};

use frames::Frames;
use slat_process::wait;
use userfault::Userfaults;

/// Linux userspace as a [`Platform`] whose pages have `1 << PAGE_SHIFT` bytes: 4 KiB, or as many as the pages of this
/// process ([`page_size`]).
#[derive(Default)]
pub struct HostPlatform<const PAGE_SHIFT: u32 = 12> {
    frames: Frames<PAGE_SHIFT>,
    contiguous: AtomicBool,
    /// The bitmaps that tell which pages are not present yet.
    #[doc(hidden)]
    pub userfaults: Userfaults,
}

impl HostPlatform {
    /// Creates a platform whose pages have 4 KiB. Installs the signal handlers of `slat_guard`.
    ///
    /// # Errors
    /// If a handler cannot be installed.
    pub fn new() -> std::io::Result<Arc<Self>> {
        Self::with_pages()
    }
}

impl<const PAGE_SHIFT: u32> HostPlatform<PAGE_SHIFT> {
    const GRANULE: Granule = Frames::<PAGE_SHIFT>::GRANULE;

    /// Makes a platform like [`HostPlatform::new`], but for guests with pages of `1 << PAGE_SHIFT` bytes.
    ///
    /// # Errors
    /// If a handler cannot be installed. `InvalidInput` if the pages of this process are smaller than that, because a
    /// guest's page is resolved as a whole.
    pub fn with_pages() -> std::io::Result<Arc<Self>> {
        if Self::GRANULE.bytes() > page_size() as u64 {
            return Err(std::io::ErrorKind::InvalidInput.into());
        }
        slat_guard::install()?;
        Ok(Arc::default())
    }

    /// Sets whether every aligned region within one mapping counts as a huge page of the host (policy
    /// `host_level=contiguous`). This is correct in this port, because physical addresses are virtual addresses.
    /// Affects leaves that are installed later.
    pub fn set_contiguous(&self, on: bool) {
        self.contiguous.store(on, Relaxed);
    }

    /// Returns the largest level at which a leaf may map `address`: the aligned region is within the mapping, and is
    /// one page of the host.
    fn level(&self, mapping: &mappings::Mapping, address: usize) -> Level {
        let bytes_of = |level| (Self::GRANULE.pages(level) << PAGE_SHIFT) as usize;
        let limit = match self.contiguous.load(Relaxed) {
            true => usize::MAX,
            false => mapping.page_bytes,
        };
        let fits = |level| {
            let bytes = bytes_of(level);
            let start = address & !(bytes - 1);
            bytes <= limit && mapping.range.start <= start && start + bytes <= mapping.range.end
        };
        match () {
            // Fast path: most mappings have only small pages.
            () if limit < bytes_of(Level::MEGA) => Level::PAGE,
            () if fits(Level::GIGA) => Level::GIGA,
            () if fits(Level::MEGA) => Level::MEGA,
            () => Level::PAGE,
        }
    }

    /// Makes the page at `backing` present by an access. `mapping` should contain it.
    fn try_page(
        &self,
        mapping: &mappings::Mapping,
        backing: Hva,
        access: Access,
    ) -> Result<HostPage, ResolveError> {
        let allowed = match access {
            Access::Write => mapping.writable,
            Access::Read | Access::Execute => mapping.readable,
        };
        if !allowed {
            return Err(ResolveError::BadAddress);
        }
        touch(backing.0 as usize, access)?;
        Ok(self.page(mapping, backing))
    }

    /// Makes the page at `backing` present by an access, if the kernel does not tell its mapping. After a read the page
    /// counts as read-only, because it is unknown whether it is writable. So the guest's first write faults, and the
    /// fault tries to write.
    fn try_untold(backing: Hva, access: Access) -> Result<HostPage, ResolveError> {
        touch(backing.0 as usize, access)?;
        let page = HostPage::new(Self::GRANULE.pfn(Hpa(backing.0)), Level::PAGE);
        Ok(page.with_writable(access == Access::Write))
    }

    fn page(&self, mapping: &mappings::Mapping, backing: Hva) -> HostPage {
        HostPage::new(
            Self::GRANULE.pfn(Hpa(backing.0)),
            self.level(mapping, backing.0 as usize),
        )
        .with_writable(mapping.writable)
    }
}

/// Accesses the page at `address` in the way in which the guest is about to access it, so that the kernel makes a
/// missing page present. This may take any time.
fn touch(address: usize, access: Access) -> Result<(), ResolveError> {
    let pointer = address as *mut u8;
    // SAFETY: a guarded access may be made at any address. The write, an atomic addition of 0, changes no bit and loses
    // no concurrent write. (Operations other than an addition begin with a load. For a load of a new page the kernel
    // maps its page of zeroes, which it would then have to flush from all TLBs to replace it by a real page.)
    let touched = unsafe {
        match access {
            Access::Write => slat_guard::fetch_add(pointer, 0).map(drop),
            Access::Read | Access::Execute => slat_guard::load(pointer).map(drop),
        }
    };
    touched.map_err(|_| match slat_guard::was_kicked() {
        // The vCPU must stop: its thread got a signal, or a flush has waited too long for it.
        true => ResolveError::Interrupted,
        false => ResolveError::BadAddress,
    })
}

// SAFETY:
// - frames and their metadata are valid (see `frames`), and chunks exist as long as the platform;
// - `resolve` returns addresses of existing mappings with the rights that it found; a program that ends a mapping must
//   announce this (see `mappings`), and guest accesses are also guarded;
// - no hardware walks these tables, so there is nothing to flush.
unsafe impl<const PAGE_SHIFT: u32> Platform for HostPlatform<PAGE_SHIFT> {
    fn granule(&self) -> Granule {
        Self::GRANULE
    }

    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        self.frames.alloc()
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        self.frames.alloc_run(tables)
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        // SAFETY: the frame is from this platform and is freed once, as `Platform::free_table` asks of its caller.
        unsafe { self.frames.free(&[frame]) }
    }

    fn alloc_tables(&self, _: VmId, frames: usize, take: &mut dyn FnMut(Pfn)) {
        self.frames.alloc_many(frames, take);
    }

    unsafe fn free_tables(&self, _: VmId, frames: &[Pfn]) {
        // SAFETY: the frames are from this platform and each is freed once, as `Platform::free_tables` asks of its
        // caller.
        unsafe { self.frames.free(frames) }
    }

    #[inline]
    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        Frames::<PAGE_SHIFT>::entries(frame)
    }

    #[inline]
    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        Frames::<PAGE_SHIFT>::meta(frame)
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let (backing, access) = (request.backing, request.access);
        let address = backing.0 as usize;
        let has_userfault = self.userfaults.check(request, Self::GRANULE)?;
        if let Some(resolved) = registered::resolve(address, access, || touch(address, access)) {
            let page = HostPage::new(Self::GRANULE.pfn(Hpa(backing.0)), Level::PAGE);
            return resolved.map(|is_writable| page.with_writable(is_writable));
        }
        loop {
            let Ok(found) = mappings::find(address) else {
                return Self::try_untold(backing, access);
            };
            let found = found.ok_or(ResolveError::BadAddress)?;
            match self.try_page(&found.mapping, backing, access) {
                // The remembered mapping may be out of date, because a change was not reported: ask the kernel.
                Err(ResolveError::BadAddress) if !found.fresh => mappings::forget(address),
                Ok(page) if has_userfault => return Ok(page.with_level(Level::PAGE)),
                page => return page,
            }
        }
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        let (mut at, end) = (backing.start.0 as usize, backing.end.0 as usize);
        while at < end {
            if registered::is_registered(at) {
                // A handler decides when these pages come.
                return;
            }
            let Ok(Some(mappings::Found { mapping, .. })) = mappings::find(at) else {
                // Stop at the end of the mapping: ranges rarely extend beyond it, and pages after it need not be
                // reported.
                return;
            };
            let stop = mapping.range.end.min(end);
            if mapping.readable {
                let mut run = |stretch: Range<usize>, has_userfault| {
                    let backing = Hva(stretch.start as u64);
                    let page = self.page(&mapping, backing);
                    found(HostRun {
                        backing,
                        pages: (stretch.len() >> PAGE_SHIFT) as u64,
                        first: match has_userfault {
                            true => page.with_level(Level::PAGE),
                            false => page,
                        },
                    });
                };
                resident::stretches(at..stop, &mut |stretch| {
                    self.userfaults.present(stretch, Self::GRANULE, &mut run);
                });
            }
            at = stop;
        }
    }

    fn flush(&self, _vm: VmId, _range: Range<Gfn>, _stale: Stale) {}

    #[inline(always)]
    fn trace(&self, event: Event) {
        trace::record(event);
    }

    fn wait(&self, round: u32, what: WaitFor) {
        const SPINS: u32 = 128;
        const YIELDS: u32 = 1024;
        /// The number of rounds of waiting between two kicks.
        const PATIENCE: u32 = 20;
        if round < SPINS {
            std::hint::spin_loop();
        } else if round < SPINS + YIELDS {
            slat_process::wait::yield_now();
        } else {
            let slept = round - SPINS - YIELDS;
            if let WaitFor::Reader(thread) = what
                && thread != 0
                && slept % PATIENCE == PATIENCE - 1
            {
                slat_guard::kick(thread as libc::pid_t);
            }
            wait::pause(Duration::from_micros(50));
        }
    }
}

#[cfg(test)]
mod tests;
