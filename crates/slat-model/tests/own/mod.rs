// A platform like that of an embedder. Table frames are elements of an array, and the guest's memory is a list of
// pages. Where a real platform would flush CPUs, this platform calls the test's `Tlb`.

use std::cell::UnsafeCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use slat::{
    Access, Entries, Gfn, HostPage, HostRun, Hva, Level, PAGE_SIZE, Pfn, Platform, Request,
    ResolveError, Stale, TableMeta, VmId, WaitFor,
};
use slat_model::{HostChange, Tlb};

/// The frames of tables.
const TABLES: Range<u64> = 0x1000..0x1800;
/// The frame of the first page of guest memory, and the backing address of that page.
const MEMORY: Pfn = Pfn(1 << 18);
pub const BACKING: Hva = Hva(7 << 30);

#[derive(Default)]
struct Table {
    entries: Entries,
    meta: UnsafeCell<TableMeta>,
}

pub struct Own {
    tables: Vec<Table>,
    free: Mutex<BTreeSet<u64>>,
    /// The host page that backs each page of guest memory, and the lowest frame that was not used yet.
    memory: Mutex<(Vec<Option<HostPage>>, Pfn)>,
    tlb: Arc<Tlb>,
}

// SAFETY: `meta` is written when its frame is allocated. Then `meta` belongs to the engine until the frame is freed.
unsafe impl Sync for Own {}

impl Own {
    fn table(&self, frame: u64) -> &Table {
        &self.tables[(frame - TABLES.start) as usize]
    }

    /// Resets the metadata of `frame`, which was taken from `free`. Returns the frame.
    fn given(&self, frame: u64) -> Pfn {
        // SAFETY: the frame was free, so the engine does not use its metadata.
        unsafe { *self.table(frame).meta.get() = TableMeta::new() };
        Pfn(frame)
    }

    /// Returns the number of the page at `backing`.
    pub fn number(backing: Hva) -> u64 {
        (backing.0 - BACKING.0) / PAGE_SIZE
    }
}

// SAFETY: frames are elements of `tables`, and no frame is allocated twice before it is freed. No code accesses the
// frames that `resolve` returns, and no CPU walks the tables.
unsafe impl Platform for Own {
    fn alloc_table(&self, _: VmId) -> Option<Pfn> {
        let frame = self.free.lock().unwrap().pop_first()?;
        Some(self.given(frame))
    }

    fn alloc_root(&self, _: VmId, tables: usize) -> Option<Pfn> {
        let mut free = self.free.lock().unwrap();
        let run = |first| first..first + tables as u64;
        let mut aligned = TABLES.step_by(tables);
        let root = aligned.find(|first| run(*first).all(|frame| free.contains(&frame)))?;
        for frame in run(root) {
            free.remove(&frame);
            self.given(frame);
        }
        Some(Pfn(root))
    }

    unsafe fn free_table(&self, _: VmId, frame: Pfn) {
        self.free.lock().unwrap().insert(frame.0);
    }

    fn entries(&self, frame: Pfn) -> NonNull<Entries> {
        NonNull::from(&self.table(frame.0).entries)
    }

    fn meta(&self, frame: Pfn) -> NonNull<TableMeta> {
        NonNull::new(self.table(frame.0).meta.get()).expect("an element has an address")
    }

    fn resolve(&self, request: &Request) -> Result<HostPage, ResolveError> {
        let page = self.page(Own::number(request.backing));
        page.filter(|page| page.writable || request.access != Access::Write)
            .ok_or(ResolveError::BadAddress)
    }

    fn resolve_resident(&self, _: VmId, backing: Range<Hva>, found: &mut dyn FnMut(HostRun)) {
        for number in Own::number(backing.start)..Own::number(backing.end) {
            if let Some(first) = self.page(number) {
                let backing = BACKING.add_pages(number);
                let pages = 1;
                found(HostRun {
                    backing,
                    pages,
                    first,
                });
            }
        }
    }

    fn flush(&self, vm: VmId, range: Range<Gfn>, stale: Stale) {
        // Here a machine executes INVEPT, TLBI or HFENCE.
        self.tlb.flushed(vm, &range, stale);
    }

    fn wait(&self, _: u32, _: WaitFor) {
        std::thread::yield_now();
    }
}

// Functions that the tests call.

impl Own {
    pub fn new(pages: u64, tlb: Arc<Tlb>) -> Self {
        let page = |number| HostPage::new(MEMORY.add(number), Level::MEGA);
        let pages = pages.min(1 << 14);
        Own {
            tables: TABLES.map(|_| Table::default()).collect(),
            free: Mutex::new(TABLES.collect()),
            memory: Mutex::new((
                (0..pages).map(|number| Some(page(number))).collect(),
                MEMORY.add(pages),
            )),
            tlb,
        }
    }

    pub fn pages(&self) -> u64 {
        self.memory.lock().unwrap().0.len() as u64
    }

    pub fn page(&self, number: u64) -> Option<HostPage> {
        self.memory.lock().unwrap().0[number as usize]
    }

    /// Maps new frames at `range`, or unmaps the range. This machine cannot make other changes.
    pub fn change(&self, range: &Range<u64>, change: HostChange) {
        let (pages, next) = &mut *self.memory.lock().unwrap();
        if !matches!(change, HostChange::Remap { .. } | HostChange::Punch) {
            return;
        }
        // A huge page that changes in part is no longer huge.
        let around = range.start / 512 * 512..range.end.next_multiple_of(512);
        for page in pages
            .iter_mut()
            .take(around.end as usize)
            .skip(around.start as usize)
        {
            *page = page.map(|page| page.with_level(Level::PAGE));
        }
        for number in range.clone() {
            let huge = number / 512 * 512..number / 512 * 512 + 512;
            let level = match range.start <= huge.start && huge.end <= range.end {
                true => Level::MEGA,
                false => Level::PAGE,
            };
            pages[number as usize] = match change {
                HostChange::Remap { writable, .. } => {
                    Some(HostPage::new(next.add(number), level).with_writable(writable))
                }
                _ => None,
            };
        }
        *next = next.add(pages.len() as u64);
    }
}
