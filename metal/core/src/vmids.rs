//! VMIDs, for a machine whose TLBs tell guests apart by them.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::sync::Arc;

use slat::{VmId, Vmid, VmidAllocator};
use slat_model::Lock;

/// The VMIDs of a machine with `CPUS` CPUs, whose VMIDs have `BITS` bits.
pub struct Vmids<const BITS: u32, const CPUS: usize> {
    /// The allocator, created when the first CPU enters a guest, because its creation needs the heap.
    allocator: Lock<Option<&'static VmidAllocator>>,
    /// The VMID of each VM that a CPU has entered, by [`VmId`].
    vms: Lock<BTreeMap<u64, Arc<Vmid>>>,
}

impl<const BITS: u32, const CPUS: usize> Vmids<BITS, CPUS> {
    /// Makes VMIDs. No VM has one yet.
    pub const fn new() -> Self {
        Vmids {
            allocator: Lock::new(None),
            vms: Lock::new(BTreeMap::new()),
        }
    }

    /// Calls `run` with the number under which `cpu` enters the guest of `vm`, after `flush` if the CPU must first drop
    /// all guests' translations. Call with interrupts masked; `run` returns after the guest's exit.
    pub fn enter<R>(
        &self,
        cpu: usize,
        vm: VmId,
        flush: impl FnOnce(),
        run: impl FnOnce(u16) -> R,
    ) -> R {
        let vmid = self.vms.lock().entry(vm.0).or_default().clone();
        let running = self.allocator().enter(cpu, &vmid);
        if running.must_flush() {
            flush();
        }
        let result = run(running.number());
        drop(running);
        result
    }

    /// Returns the number that the TLB entries of `vm` have. `None`: no CPU has entered the VM.
    pub fn number(&self, vm: VmId) -> Option<u16> {
        self.vms.lock().get(&vm.0)?.number()
    }

    /// Call when `vm` has ended. The VM's number can be given to another VM in the next generation, and each CPU
    /// flushes before it enters a guest of that generation.
    pub fn end(&self, vm: VmId) {
        self.vms.lock().remove(&vm.0);
    }

    fn allocator(&self) -> &'static VmidAllocator {
        let create = || {
            let allocator = VmidAllocator::new(BITS, CPUS).expect("memory, and few CPUs");
            &*Box::leak(Box::new(allocator))
        };
        self.allocator.lock().get_or_insert_with(create)
    }
}

impl<const BITS: u32, const CPUS: usize> Default for Vmids<BITS, CPUS> {
    fn default() -> Self {
        Self::new()
    }
}
