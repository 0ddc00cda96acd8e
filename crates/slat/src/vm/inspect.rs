//! Reports the state of a VM to a client: its readers, its memslots, and the contents of its tables.

use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::slots::{Region, SlotSet};
use crate::sync::quiesce::Attention;
use crate::table::{At, Next, Show, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Calls `visit` with the attention word of every vCPU of this VM, and of every reader that operations use (bits in
    /// the words of such readers have no effect). Takes no lock, so the caller may hold any.
    pub fn visit_attention(&self, visit: &mut dyn FnMut(&Attention)) {
        for reader in self.readers.iter() {
            visit(reader.attention());
        }
    }

    /// Waits until every vCPU has passed a quiescent point ([`Vcpu::quiesce`](crate::Vcpu::quiesce)) or is outside its
    /// reader section: KVM's `synchronize_srcu`. When this returns, no vCPU uses a value that it read before the caller
    /// replaced the value, provided that vCPUs keep such values only until their next quiescent point.
    ///
    /// The caller is in no reader section, and holds nothing that a vCPU in a reader section waits for.
    pub fn synchronize(&self) {
        self.readers.synchronize(self.reader_wait());
    }

    /// Like [`Self::synchronize`], but waits only for vCPUs for whose attention word `wanted` is true, and only while
    /// it is true. For a client that raises a bit of its own in the words of some vCPUs: such a vCPU clears the bit
    /// before it drops its translations.
    pub fn synchronize_those(&self, wanted: &dyn Fn(&Attention) -> bool) {
        self.readers.synchronize_those(wanted, self.reader_wait());
    }

    /// Returns the memslot of address space `space` that contains `gfn`, or else the first memslot after `gfn`, as the
    /// [`Region`] that would create it. `None`: there is no such memslot, or no such address space.
    ///
    /// Takes no lock: sees the memslots that are published at this moment. To list all memslots, continue from the end
    /// of the returned memslot. Such a list may lack a memslot that is created meanwhile at lower frames, and may
    /// contain twice a memslot that moves meanwhile. The caller is in no reader section.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Config, Ept, Gfn, Gpa, Region, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// let region = Region::new(3, Gpa(0x4000), 0x2000, backing);
    /// vm.set_memory_region(0, &region)?;
    /// assert_eq!(vm.memslot_from(0, Gfn(0)), Some(region));
    /// assert_eq!(vm.memslot_from(0, Gfn(5)), Some(region));
    /// assert_eq!(vm.memslot_from(0, Gfn(6)), None);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn memslot_from(&self, space: usize, gfn: Gfn) -> Option<Region> {
        self.read_slots(space, |slots| {
            let mut first = None;
            slots.in_gfns(&(gfn..Gfn(u64::MAX)), |slot| {
                first = Some(slot.region());
                false
            });
            first
        })?
    }

    /// Returns whether `gfn` is private ([`Vm::set_memory_attributes`]), and the largest range of frames around it with
    /// the same attribute.
    ///
    /// Takes no lock, like [`Self::memslot_from`].
    pub fn private_around(&self, gfn: Gfn) -> (bool, Range<Gfn>) {
        // Attributes are equal in all address spaces, and address space 0 always exists.
        let around = self.read_slots(0, |slots| slots.private.around(gfn));
        around.unwrap_or((false, Gfn(0)..Gfn(u64::MAX)))
    }

    /// Calls `read` with the published memslots of address space `space`. `None`: the address space does not exist.
    fn read_slots<R>(&self, space: usize, read: impl FnOnce(&SlotSet) -> R) -> Option<R> {
        let space = self.spaces.get(space)?;
        let section = self.section();
        Some(read(space.slots.current(section.inside())))
    }

    /// Calls `visit` for every leaf and every MMIO entry that covers a frame of `range`, in the order of gfn. Passes
    /// the first frame that the entry covers (a huge leaf may begin before `range`), its level, and its meaning.
    /// Entries for nested tables are visited in another order. Does nothing if the address space `space` does not
    /// exist.
    ///
    /// Changes nothing. CPUs may run meanwhile, so entries in different tables are read at different times. `visit` is
    /// called under the lock of a table and must not call the VM.
    pub fn visit_leaves(
        &self,
        space: usize,
        range: Range<Gfn>,
        visit: &mut dyn FnMut(Gfn, Level, Entry),
    ) {
        let Some(space) = self.spaces.get(space) else {
            return;
        };
        let show = Show {
            mmio: true,
            ..Show::default()
        };
        let mut op = RangeOp::begin(self, space);
        op.walk(&mut Walk::new(range), |step, walk| {
            step.walk(walk, show, &mut |at: &At<'_>| {
                // On formats with break-before-make an empty entry may have bits set.
                match at.decode::<F>() {
                    Entry::Empty => {}
                    entry => visit(at.gfn, at.level, entry),
                }
                Next::Pass
            });
        });
    }
}
