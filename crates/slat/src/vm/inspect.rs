//! What a client can see of a VM: its readers, and the contents of its tables.

use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::sync::quiesce::Attention;
use crate::table::{At, Next, Show, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Calls `visit` with the attention word of every vCPU of this VM, and of every reader that operations use, which
    /// nothing reads. Takes no lock, so the caller may hold any.
    pub fn visit_attention(&self, visit: &mut dyn FnMut(&Attention)) {
        for reader in self.readers.iter() {
            visit(reader.attention());
        }
    }

    /// Waits until every vCPU has passed a quiescent point ([`Vcpu::quiesce`](crate::Vcpu::quiesce)) or is outside its
    /// reader section: KVM's `synchronize_srcu`. When this returns, no vCPU uses a value that it read before the caller
    /// replaced it, if it keeps such values only until its next quiescent point.
    ///
    /// The caller is not in a reader section, and holds nothing that a vCPU in one waits for.
    pub fn synchronize(&self) {
        self.readers.synchronize(self.reader_wait());
    }

    /// Like [`Self::synchronize`], but waits only for those vCPUs whose attention word `wanted` accepts, while it does. For a
    /// client that raises a bit of its own in the words of some vCPUs, which they take before they drop what they have read.
    pub fn synchronize_those(&self, wanted: &dyn Fn(&Attention) -> bool) {
        self.readers.synchronize_those(wanted, self.reader_wait());
    }

    /// Calls `visit` for every leaf and every MMIO entry that covers a frame of `range`, in the order of gfn, with the
    /// first frame that the entry covers (a huge leaf may begin before `range`), its level, and its meaning. Does
    /// nothing if the address space `space` does not exist.
    ///
    /// Changes nothing. CPUs may run meanwhile, so entries in different tables are seen at different times. `visit` is
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
                // On formats with break-before-make an empty entry may have bits.
                match at.decode::<F>() {
                    Entry::Empty => {}
                    entry => visit(at.gfn, at.level, entry),
                }
                Next::Pass
            });
        });
    }
}
