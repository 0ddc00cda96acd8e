//! Write-protects one frame that contains a tracked guest table, in a tree that has shadow pages beside it
//! ([`crate::shadow`]).

use super::Tree;
use super::lookup::root_table;
use crate::addr::Gfn;
use crate::format::{Entry, Format};
use crate::platform::Platform;
use crate::sync::atomic::Ordering::*;

impl<P: Platform, F: Format> Tree<P, F> {
    /// Removes the right to write, and [`may_write`](crate::format::Leaf::may_write), from the leaf that maps `gfn`, if
    /// there is one. Returns whether the leaf was writable. The caller is in a reader section, and must flush.
    ///
    /// Takes the lock of every table on the path, even if the path ends without a leaf. If a fault that installs a leaf
    /// for `gfn` takes the lock of its table first, this call finds the leaf. Otherwise everything that the caller did
    /// before this call happens before the fault calls `valid` ([`Tree::map`]).
    ///
    /// Removes the leaf's right even if an entry above is write-protected ([`super::protect`]), because that entry may
    /// get its right back at any time.
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
                    // Use a read-modify-write: page walkers may set the accessed and dirty bits at the same time.
                    entry.fetch_and(!(F::WRITE | F::MAY_WRITE), Relaxed);
                    return F::is_writable(bits);
                }
                _ => return false,
            }
        }
    }
}
