//! Memory of a machine that is the host's own, so that compiled code accesses it directly.

use slat_a64::{Hypervisor, Order, Page, Right};
use slat_guard::Gone;
use std::cell::Cell;
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Once};

const PAGE: u64 = 4096;

/// Pages of the host, which processors on several threads may share. They are zero at first.
pub struct Shared {
    pages: usize,
    host: *mut u8,
}

// SAFETY: the pointer is the address of a mapping. Only guarded accesses and raw pointers reach the mapping.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}

impl Shared {
    pub fn new(pages: usize) -> Self {
        // SAFETY: a new mapping at an address of the host's choice.
        let host = unsafe {
            libc::mmap(
                ptr::null_mut(),
                pages * PAGE as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(host, libc::MAP_FAILED);
        Self {
            pages,
            host: host.cast(),
        }
    }

    pub fn get(&self, at: usize) -> u64 {
        assert!(at + 8 <= self.pages * PAGE as usize);
        // SAFETY: the address is in the mapping.
        unsafe { self.host.add(at).cast::<u64>().read_unaligned() }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: a mapping of our own.
        unsafe { libc::munmap(self.host.cast(), self.pages * PAGE as usize) };
    }
}

/// A part of the guest's memory.
struct Mapping {
    ipa: u64,
    shared: Arc<Shared>,
    /// Whether the memory may be read, and whether it may be written.
    rights: [bool; 2],
}

#[derive(Default)]
pub struct Memory {
    mappings: Vec<Mapping>,
    pub attention: Arc<AtomicBool>,
    /// Accesses that have failed because the host's page was taken away.
    pub gone: Cell<u32>,
}

/// The reason why an access is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// There is no such page, or the page does not have the right.
    Page,
    /// The host's page was taken away.
    Gone,
}

impl Memory {
    pub fn new() -> Self {
        static INSTALLED: Once = Once::new();
        INSTALLED.call_once(|| assert!(slat_guard::install().is_ok()));
        Self::default()
    }

    /// Adds pages with these rights to read and to write. They are zero.
    pub fn add(&mut self, ipa: u64, pages: usize, rights: [bool; 2]) {
        self.mappings.push(Mapping {
            ipa,
            shared: Arc::new(Shared::new(pages)),
            rights,
        });
    }

    /// Adds pages that are also those of other processors.
    pub fn share(&mut self, ipa: u64, shared: Arc<Shared>) {
        self.mappings.push(Mapping {
            ipa,
            shared,
            rights: [true; 2],
        });
    }

    fn find(&self, ipa: u64) -> Option<(&Mapping, *mut u8)> {
        let bytes = |mapping: &Mapping| mapping.shared.pages as u64 * PAGE;
        let mapping = (self.mappings.iter())
            .find(|mapping| ipa.wrapping_sub(mapping.ipa) < bytes(mapping))?;
        let offset = (ipa - mapping.ipa) as usize;
        Some((mapping, mapping.shared.host.wrapping_add(offset)))
    }

    fn host(&self, ipa: u64) -> *mut u64 {
        self.find(ipa).unwrap().1.cast()
    }

    pub fn put(&mut self, ipa: u64, word: u64) {
        // SAFETY: the address is in a mapping that only the guest and the tests use, on one thread.
        unsafe { self.host(ipa).write_unaligned(word) };
    }

    pub fn get(&self, ipa: u64) -> u64 {
        // SAFETY: as in `put`.
        unsafe { self.host(ipa).read_unaligned() }
    }

    /// Takes the host's page at an address away, or gives it back.
    pub fn protect(&self, ipa: u64, is_gone: bool) {
        let rights = match is_gone {
            true => libc::PROT_NONE,
            false => libc::PROT_READ | libc::PROT_WRITE,
        };
        let page = self.host(ipa & !(PAGE - 1));
        // SAFETY: the page belongs to this mapping, and the CPU makes only guarded accesses to it.
        let done = unsafe { libc::mprotect(page.cast(), PAGE as usize, rights) };
        assert_eq!(done, 0);
    }

    fn guarded<R>(
        &self,
        order: Order,
        access: impl FnOnce() -> Result<R, Gone>,
    ) -> Result<R, Refusal> {
        let is_ordered = order != Order::default();
        if is_ordered {
            fence(Ordering::SeqCst);
        }
        let result = access();
        if is_ordered {
            fence(Ordering::SeqCst);
        }
        result.map_err(|Gone| {
            self.gone.set(self.gone.get() + 1);
            Refusal::Gone
        })
    }
}

impl Hypervisor for Memory {
    type Fault = Refusal;

    fn page(&mut self, ipa: u64, right: Right) -> Result<Page, Refusal> {
        let (mapping, host) = self.find(ipa & !(PAGE - 1)).ok_or(Refusal::Page)?;
        let [read, write] = mapping.rights;
        let has = match right {
            Right::Read | Right::Execute => read,
            Right::Write => write,
        };
        match has {
            true => Ok(Page {
                base: host as u64,
                write,
                execute: true,
            }),
            false => Err(Refusal::Page),
        }
    }

    fn load(&mut self, at: u64, size: u8, order: Order) -> Result<u64, Refusal> {
        // SAFETY: the access is guarded, and the memory is the guest's.
        self.guarded(order, || unsafe {
            slat_guard::load_sized(at as *const u8, size)
        })
    }

    fn store(&mut self, at: u64, size: u8, value: u64, order: Order) -> Result<(), Refusal> {
        // SAFETY: as in `load`.
        self.guarded(order, || unsafe {
            slat_guard::store_sized(at as *mut u8, size, value)
        })
    }

    fn compare_exchange(
        &mut self,
        at: u64,
        size: u8,
        values: [u128; 2],
        order: Order,
    ) -> Result<u128, Refusal> {
        // SAFETY: as in `load`.
        self.guarded(order, || unsafe {
            slat_guard::compare_exchange_sized(at as *mut u8, size, values)
        })
    }

    fn attention(&self) -> bool {
        self.attention.load(Ordering::Relaxed)
    }
}
