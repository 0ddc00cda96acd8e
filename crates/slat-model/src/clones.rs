//! The simulated machine as each of several VMs sees it. A clone of a VM shares its parent's memory frames until one of
//! the two writes to them.
//!
//! As on Linux, each mapping of a shared page is marked. A write to a marked page gives the VM its own frame, which is
//! a new *version* of the page. If no other VM still uses the old frame, the write only removes the mark.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

use slat::{Ept, Format, Granule, HostPage, Hva, Pfn, VmId};

use crate::host::{HostChange, HostMemory};
use crate::machine::{Invalidate, Machine};
use crate::platform::{SimMachine, SimPlatform};
use crate::sharing::Sharer;
use crate::tlb::Tlb;
use crate::watched::Watched;

/// The simulated machine as one VM sees it. If no VM was cloned, all VMs see the same memory. The pages have the
/// granule of format `F`.
pub struct Simulated<F = Ept> {
    machine: Arc<SimMachine>,
    memory: Arc<HostMemory>,
    vm: Option<VmId>,
    format: PhantomData<fn() -> F>,
}

impl<F> Simulated<F> {
    /// Makes a machine with `pages` pages of host memory, each the size of `granule`.
    pub(crate) fn with_granule(granule: Granule, pages: u64) -> Self {
        let machine = SimMachine::with_memory(granule, pages);
        Simulated {
            memory: machine.host.clone(),
            machine,
            vm: None,
            format: PhantomData,
        }
    }
}

impl SimPlatform {
    /// Makes a machine with `pages` pages of host memory, of 4 KiB each.
    pub fn new(pages: u64) -> Arc<Self> {
        Self::with_granule(Granule::Kib4, pages)
    }

    /// Makes a machine with `pages` pages of host memory, each the size of `granule`.
    pub fn with_granule(granule: Granule, pages: u64) -> Arc<Self> {
        let tlb = Arc::<Tlb>::default();
        let machine = <Simulated>::with_granule(granule, pages);
        Watched::of(&machine, tlb)
    }
}

impl SimMachine {
    /// Returns the memory of `vm`.
    pub(crate) fn memory_of(&self, vm: VmId) -> Arc<HostMemory> {
        let vms = self.sharing.vms.lock().unwrap();
        let own = vms.iter().find(|sharer| sharer.vm == vm);
        own.map_or(&self.host, |sharer| &sharer.memory).clone()
    }

    /// Gives `child` the memory of `parent`.
    pub(crate) fn share_memory(&self, parent: VmId, child: VmId) {
        let memory = Arc::new(self.memory_of(parent).share());
        self.sharing.vms.lock().unwrap().push(Sharer {
            vm: child,
            memory,
            invalidate: None,
        });
    }

    /// Gives `vm` its own copy of the shared `page`. Call before `vm` gets the right to write to the page.
    pub(crate) fn make_own(&self, vm: VmId, page: u64) {
        let memory = self.memory_of(vm);
        let Some(found) = memory.get(page) else {
            return;
        };
        let pages = memory.granule().pages(found.level);
        let first = page & !(pages - 1);
        let whole = first..first + pages;
        if !self.sharing.has_others(vm, &memory, whole.clone()) {
            return memory.end_sharing(whole);
        }
        let invalidate = {
            let vms = self.sharing.vms.lock().unwrap();
            let own = vms.iter().find(|sharer| sharer.vm == vm);
            let own = own.and_then(|sharer| sharer.invalidate.clone());
            own.expect("a VM that shares memory is known")
        };
        invalidate(
            memory.granule().add_pages(HostMemory::BASE, page),
            found.pfn,
            &mut || match self.sharing.has_others(vm, &memory, page..page + 1) {
                true => {
                    let copy = memory.replace(page);
                    self.sharing.set_word(copy, self.sharing.word(found.pfn));
                }
                false => memory.separate(page),
            },
        );
    }
}

impl<F: Format> Machine for Simulated<F> {
    type Platform = SimMachine;
    const REPORTS_FLUSHES: bool = false;

    fn new(pages: u64, _: Arc<Tlb>) -> Self {
        Self::with_granule(F::GRANULE, pages)
    }

    fn platform(&self) -> &Arc<SimMachine> {
        &self.machine
    }

    fn backing(&self) -> Hva {
        HostMemory::BASE
    }

    fn pages(&self) -> u64 {
        self.memory.len()
    }

    fn page(&self, page: u64) -> Option<HostPage> {
        self.memory.get(page)
    }

    fn is_absent(&self, page: u64) -> bool {
        self.memory.is_absent(page)
    }

    fn change(&self, pages: &Range<u64>, change: HostChange) {
        self.memory.change(pages, change);
    }

    fn as_seen_by(&self, vm: VmId, invalidate: Invalidate) -> Option<Self> {
        let memory = self.machine.memory_of(vm);
        let mut vms = self.machine.sharing.vms.lock().unwrap();
        vms.retain(|sharer| sharer.vm != vm);
        vms.push(Sharer {
            vm,
            memory: memory.clone(),
            invalidate: Some(invalidate),
        });
        Some(Simulated {
            machine: self.machine.clone(),
            memory,
            vm: Some(vm),
            format: PhantomData,
        })
    }

    fn is_shared(&self, page: u64) -> bool {
        self.memory.is_shared(page)
    }

    fn load(&self, frame: Pfn) -> Option<u64> {
        Some(self.machine.sharing.word(frame))
    }

    fn store(&self, frame: Pfn, value: u64) {
        self.machine.sharing.set_word(frame, value);
    }

    fn check(&self) -> Result<(), String> {
        self.machine.check_tables()
    }
}

impl<F> Drop for Simulated<F> {
    /// Records that the VM has ended, so that its frames belong only to the other VMs.
    fn drop(&mut self) {
        if let Some(vm) = self.vm {
            let mut vms = self.machine.sharing.vms.lock().unwrap();
            vms.retain(|sharer| sharer.vm != vm);
        }
    }
}
