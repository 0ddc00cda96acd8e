//! Write protection of one frame that has a tracked table, for the MMU beside a tree.

use super::Tree;
use super::lookup::root_table;
use crate::addr::Gfn;
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;

impl<P: Platform, F: Format> Tree<P, F> {
    /// Takes the right to write, and [`may_write`](crate::format::Leaf::may_write), from the leaf that maps `gfn`, if
    /// there is one. Returns whether it allowed stores. The caller is in a reader section, and flushes.
    ///
    /// Takes the lock of every table on the path, even where that ends without a leaf. So a fault that installs a leaf
    /// there either has the lock of its table first, and this finds the leaf; or what the caller did before this has
    /// happened before the fault calls `valid` ([`Tree::map`]).
    ///
    /// It takes the leaf's own rights also where an entry above is write-protected ([`super::protect`]): that one may
    /// have its right given back at any time.
    pub(crate) fn protect_frame(&self, gfn: Gfn) -> bool {
        let (mut frame, mut level) = (root_table::<F>(self.context(), gfn), F::TOP);
        loop {
            let table = self.table(frame);
            let entry = table.entry(F::GRANULE.index(gfn, level));
            let _guard = table.lock();
            let bits = entry.load(Acquire);
            match F::decode(bits, level) {
                Entry::Table(lower) => (frame, level) = (lower, level.below()),
                Entry::Leaf(_) if bits & (F::WRITE | F::MAY_WRITE) != 0 => {
                    // Walkers may set accessed and dirty meanwhile.
                    entry.fetch_and(!(F::WRITE | F::MAY_WRITE), Relaxed);
                    return F::is_writable(bits);
                }
                _ => return false,
            }
        }
    }
}
