//! What the tables say, for whoever wants to show it.

use core::ops::Range;

use super::{RangeOp, Vm};
use crate::addr::{Gfn, Level};
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::sync::quiesce::Attention;
use crate::table::{At, Next, Show, Walk};

impl<P: Platform, F: Format> Vm<P, F> {
    /// Calls `visit` with the attention word of every CPU of this VM. Takes no lock: it may be called by a
    /// thread that holds any. Operations that are no CPU have such a word, too; nobody looks at it.
    pub fn visit_attention(&self, visit: &mut dyn FnMut(&Attention)) {
        for reader in self.readers.iter() {
            visit(reader.attention());
        }
    }

    /// Waits until every CPU has passed a quiescent point ([`Vcpu::quiesce`](crate::Vcpu::quiesce)) or is outside. What a CPU found out
    /// between two quiescent points, and the caller has since replaced, is used by no CPU afterwards: KVM's `synchronize_srcu`.
    ///
    /// The caller is no CPU that is inside, and holds nothing that a CPU waits for there.
    pub fn synchronize(&self) {
        self.readers.synchronize(self.reader_wait());
    }

    /// Calls `visit` at every leaf and every MMIO entry that covers a frame of `range`, in the order of
    /// gfn, with the first frame that the entry covers (a huge leaf may begin before `range`), its level,
    /// and what it says. Changes nothing. CPUs may go on: what `visit` sees of one table holds at one
    /// time, but not of two.
    ///
    /// `visit` is called under the lock of a table and must not call the VM.
    ///
    /// An address space that does not exist has no leaves.
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
        op.walk(&mut Walk::new(range), |tree, walk, _, _| {
            tree.walk(walk, show, &mut |at: &At<'_>| {
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
