//! Compares slat's memslots with the regions of the crate vm-memory.
//!
//! * `lookup/N`: finds the slot of a random address among N slots, in a space of twice their size. slat calls
//!   `Vcpu::slot_at` inside a reader section, as a fault does. Many look-ups are made in one reader section. The case
//!   `section` measures the cost of the section itself; for vm-memory, the cost of the guard of `GuestMemoryAtomic`.
//! * `update`: creates and deletes one slot among 32764; the time is per change. For slat, a change ends when it is
//!   complete (zapped and flushed). For vm-memory, a change ends when the old collection is dropped; the time does not
//!   include the region's mmap and munmap.

use std::sync::Arc;

use slat::{Ept, Gpa, SlotFlags, Vcpu, Vm};
use vm_memory::{
    GuestAddress, GuestAddressSpace, GuestMemoryAtomic, GuestMemoryBackend, GuestMemoryMmap,
    GuestMemoryRegion, GuestRegionMmap, MmapRegion,
};

use crate::machine::{Machine, region, vm};
use crate::report::{Metric, Samples, time};

const SIZES: [u64; 4] = [8, 64, 512, 32764];
const MANY: u64 = 32764;
const LOOKUPS: usize = 1 << 16;
const SECTIONS: usize = 1 << 16;
const UPDATES: usize = 64;
const VM_MEMORY_UPDATES: usize = 4;
const PAGE: u64 = 4096;

/// Returns the address at which slot `i` begins. There is a gap after every slot.
fn base(i: u64) -> u64 {
    (1 << 30) + i * 2 * PAGE
}

struct Contenders {
    slots: u64,
    addresses: Vec<u64>,
    vm: Arc<Vm<Machine, Ept>>,
    vcpu: Vcpu<Machine, Ept>,
    memory: GuestMemoryMmap<()>,
}

impl Contenders {
    fn new(slots: u64) -> Self {
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        let addresses = (0..LOOKUPS)
            .map(|_| {
                seed ^= seed << 13;
                seed ^= seed >> 7;
                seed ^= seed << 17;
                base(seed % slots) + (seed >> 32) % PAGE
            })
            .collect();
        let vm = vm::<Ept>(slat::Level::PAGE);
        for i in 0..slots {
            vm.set_memory_region(0, &region(i as u32, SlotFlags(0), base(i), 1))
                .expect("a valid memslot");
        }
        let vcpu = vm.create_vcpu().expect("memory for a vCPU");
        let ranges: Vec<_> = (0..slots)
            .map(|i| (GuestAddress(base(i)), PAGE as usize))
            .collect();
        let memory = GuestMemoryMmap::from_ranges(&ranges).expect("few enough mappings");
        Contenders {
            slots,
            addresses,
            vm,
            vcpu,
            memory,
        }
    }

    fn expected(&self) -> u64 {
        let page = |sum, address: &u64| sum ^ (address & !(PAGE - 1));
        self.addresses.iter().fold(0, page)
    }

    fn lookup(&mut self, samples: &mut Samples) {
        let case = format!("lookup/{}", self.slots);
        if !samples.wants("slots", &case) {
            return;
        }
        let mut add = |variant, ns: f64| {
            let per_op = ns / LOOKUPS as f64;
            samples.add("slots", &case, variant, Metric::NsPerOp, per_op);
        };
        let (ns, sum) = time(|| {
            self.addresses.iter().fold(0, |sum, address| {
                let region = self.memory.find_region(GuestAddress(*address));
                sum ^ region.expect("in a region").start_addr().0
            })
        });
        assert_eq!(sum, self.expected());
        add("vm-memory", ns);
        self.vcpu.enter_unguarded(0);
        let (ns, sum) = time(|| {
            self.addresses.iter().fold(0, |sum, address| {
                let region = self.vcpu.slot_at(Gpa(*address));
                sum ^ region.expect("in a slot").gpa.0
            })
        });
        self.vcpu.leave();
        assert_eq!(sum, self.expected());
        add("slat-ept", ns);
    }

    fn section(&mut self, samples: &mut Samples) {
        let mut add = |variant, ns: f64| {
            let per_op = ns / SECTIONS as f64;
            samples.add("slots", "section", variant, Metric::NsPerOp, per_op);
        };
        let atomic = GuestMemoryAtomic::new(self.memory.clone());
        let (ns, _) = time(|| {
            (0..SECTIONS).fold(0, |sum, _| {
                sum ^ std::ptr::from_ref::<GuestMemoryMmap<()>>(&atomic.memory()) as usize
            })
        });
        add("vm-memory", ns);
        let (ns, ()) = time(|| {
            for _ in 0..SECTIONS {
                self.vcpu.enter_unguarded(0);
                self.vcpu.leave();
            }
        });
        add("slat-ept", ns);
    }

    fn update(&mut self, samples: &mut Samples) {
        let mut add = |variant, ns: f64| {
            samples.add("slots", "update", variant, Metric::NsPerOp, ns);
        };
        // The slot is in the middle of the address space. Its addresses are free, because this slot was not created
        // before.
        let at = base(self.slots / 2) + PAGE;
        let mapping = MmapRegion::new(PAGE as usize).expect("one more mapping");
        let new = GuestRegionMmap::new(mapping, GuestAddress(at)).expect("a valid region");
        let new = Arc::new(new);
        let mut memory = self.memory.clone();
        let (ns, ()) = time(|| {
            for _ in 0..VM_MEMORY_UPDATES {
                memory = memory.insert_region(new.clone()).expect("nothing there");
                let (without, _) = memory
                    .remove_region(GuestAddress(at), PAGE)
                    .expect("it is there");
                memory = without;
            }
        });
        add("vm-memory", ns / (2 * VM_MEMORY_UPDATES) as f64);
        let id = self.slots as u32 - 1;
        let (ns, ()) = time(|| {
            for _ in 0..UPDATES {
                self.vm.remove_memory_region(0, id).expect("a memslot");
                self.vm
                    .set_memory_region(0, &region(id, SlotFlags(0), base(self.slots - 1), 1))
                    .expect("a valid memslot");
            }
        });
        add("slat-ept", ns / (2 * UPDATES) as f64);
    }
}

/// The contenders for each number of slots.
pub struct Slots(Vec<Contenders>);

impl Slots {
    pub fn new(samples: &Samples) -> Self {
        if !samples.wants("slots", "") {
            return Slots(Vec::new());
        }
        Slots(SIZES.map(Contenders::new).into())
    }

    pub fn round(&mut self, samples: &mut Samples) {
        for contenders in &mut self.0 {
            contenders.lookup(samples);
            if contenders.slots == MANY {
                contenders.section(samples);
                contenders.update(samples);
            }
        }
    }
}
