//! Reports the state of a VM to a VMM: its readers, its memslots, and the contents of its tables.

use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::slots::{Region, SlotSet};
use crate::sync::quiesce::Attention;
use crate::table::{At, Next, Show, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Calls `visit` with the attention word of every vCPU of this VM. Also calls it for readers that operations use;
    /// bits in these words have no effect. Takes no lock, so the caller may hold any lock.
    pub fn visit_attention(&self, visit: &mut dyn FnMut(&Attention)) {
        for reader in self.readers.iter() {
            visit(reader.attention());
        }
    }

    /// Waits until every vCPU has passed a quiescent point ([`Vcpu::quiesce`](crate::Vcpu::quiesce)) or is outside its
    /// reader section: KVM's `synchronize_srcu`. So if the caller has replaced a value, and vCPUs keep copies of it
    /// only until their next quiescent point, no vCPU uses the old value when this returns.
    ///
    /// The caller is in no reader section, and holds no lock for which a vCPU in a reader section waits.
    pub fn synchronize(&self) {
        self.readers.synchronize(self.reader_wait());
    }

    /// Like [`Self::synchronize`], but waits only for vCPUs for whose attention word `wanted` returns `true`, and only
    /// as long as it does. For a client that raises its own bit in the words of some vCPUs: each of these vCPUs clears
    /// the bit before it drops its translations.
    pub fn synchronize_those(&self, wanted: &dyn Fn(&Attention) -> bool) {
        self.readers.synchronize_those(wanted, self.reader_wait());
    }

    /// Returns the memslot of address space `space` that contains `gfn`, or else the first memslot after `gfn`, as a
    /// [`Region`]. `None`: there is no such memslot, or no such address space.
    ///
    /// Takes no lock: uses the memslots that are published at this moment. To list all memslots, call this again with
    /// the end of the returned memslot. If memslots change between the calls, the list may lack a memslot that is
    /// created at lower frames, and may contain a memslot that moves twice. The caller is in no reader section.
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

    /// Returns whether `gfn` is private ([`Vm::set_memory_attributes`]), and the largest range of frames around it that
    /// are all private, or all shared, like `gfn`.
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

    /// Calls `visit` for every leaf and every MMIO entry that covers a frame of `range`. Passes the first frame that
    /// the entry covers (for a huge leaf, it may be before `range`), the entry's level, and its meaning. Visits entries
    /// in the order of gfn, except those in shadow pages of nested tables. Does nothing if the address space `space`
    /// does not exist.
    ///
    /// Changes nothing. Entries in different tables are read at different times, and vCPUs may change them in between.
    /// `visit` is called under the lock of a table and must not call the VM.
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
                // On formats with break-before-make an empty entry may have bits set, so decode it.
                match at.decode::<F>() {
                    Entry::Empty => {}
                    entry => visit(at.gfn, at.level, entry),
                }
                Next::Pass
            });
        });
    }
}
