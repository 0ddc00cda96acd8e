//! A table in its frame: the entries that page walkers read, and the engine's metadata of the frame.

use crate::addr::Granule;
use crate::sync::atomic::{AtomicBool, AtomicU16, AtomicU64, Ordering::*, const_fn};
use crate::sync::spin::RawSpinLock;

/// Entries in a table of 4 KiB.
pub const ENTRIES: usize = Granule::Kib4.entries();

/// The entries of a table of 4 KiB, in the frame that page walkers read. A larger table ([`Granule`]) begins with
/// these entries, and has more after them.
#[repr(C, align(4096))]
pub struct Entries(pub(crate) [AtomicU64; ENTRIES]);

impl Default for Entries {
    fn default() -> Self {
        Entries(core::array::from_fn(|_| AtomicU64::new(0)))
    }
}

/// The engine's metadata of a table frame, like `struct page` in Linux.
///
/// The platform stores the metadata for each frame (see [`Platform::meta`](crate::Platform::meta)). Only the engine
/// uses its contents.
pub struct TableMeta {
    pub(crate) lock: RawSpinLock,
    /// Whether a huge leaf could replace the table if the policy `nx_huge_pages` were off. Written under the lock of
    /// the table above, or before publication.
    pub(crate) nx_split: AtomicBool,
    /// Whether the table maps parts of a larger page of the guest. Written before publication.
    pub(crate) maps_parts: AtomicBool,
    /// The number of leaves in the table. By this number, the engine can free or skip the table without reading its
    /// entries. Written under the table's lock, or before publication.
    pub(crate) leaves: AtomicU16,
    /// The number of the flush after which the table's broken leaves (made invalid by break-before-make) may be mended
    /// (replaced by valid entries); 0: none was broken. Written like `leaves`.
    pub(crate) broken: AtomicU64,
    /// While the table is detached: the next table of the list, in the list's encoding. While the table belongs to a
    /// shadow page: the number of that page ([`crate::shadow`]).
    pub(crate) next: AtomicU64,
}

impl TableMeta {
    const_fn! {
        /// Makes metadata for a frame that has just been allocated.
        pub fn new() -> Self {
            TableMeta {
                lock: RawSpinLock::new(),
                nx_split: AtomicBool::new(false),
                maps_parts: AtomicBool::new(false),
                leaves: AtomicU16::new(0),
                broken: AtomicU64::new(0),
                next: AtomicU64::new(0),
            }
        }
    }
}

impl TableMeta {
    /// Resets the metadata. Call for a table that is not published yet.
    pub(crate) fn begin(&self, leaves: u16) {
        self.leaves.store(leaves, Relaxed);
        self.nx_split.store(false, Relaxed);
        self.broken.store(0, Relaxed);
    }

    /// Adds `change` to the number of leaves. Call under the table's lock.
    #[inline]
    pub(crate) fn count_leaves(&self, change: i16) {
        let count = self.leaves.load(Relaxed).wrapping_add_signed(change);
        self.leaves.store(count, Relaxed);
    }
}

impl Default for TableMeta {
    fn default() -> Self {
        Self::new()
    }
}
