//! Metadata of table frames, for platforms that have no array with an element for each frame.
//!
//! The map is a radix tree indexed by frame number. Nodes are added when frames need them, and are kept until the map
//! is dropped. So a look-up needs neither a lock nor a reader section: it follows pointers that never change once they
//! are set. A release store publishes each pointer after the memory to which the pointer refers was initialized.

use alloc::boxed::Box;
use core::fmt;
use core::ptr::NonNull;

use crate::addr::Pfn;
use crate::frame::TableMeta;
use crate::heap::{Large, OutOfMemory};
use crate::sync::OnceBox;
use crate::sync::atomic::const_fn;

/// log2 of the number of frames whose metadata are in one leaf. Leaf: the metadata, 512 bytes, of 64 KiB of host
/// memory.
const LEAF_BITS: u32 = if cfg!(loom) { 1 } else { 4 };
/// log2 of the number of links in one node, which has 8 KiB.
const NODE_BITS: u32 = if cfg!(loom) { 1 } else { 10 };

/// A subtree of the map, with the metadata of an aligned range of frames: a leaf, or a node with links to smaller
/// regions.
trait Region: Send + Sync + Sized {
    /// log2 of the number of frames in the region.
    const BITS: u32;

    /// Makes a region that has no metadata yet.
    fn make() -> Result<Box<Self>, OutOfMemory>;

    /// Makes sure that there is metadata for `frame`.
    fn prepare(&self, frame: Pfn) -> Result<(), OutOfMemory>;

    /// Returns the metadata of `frame`.
    fn get(&self, frame: Pfn) -> Option<&TableMeta>;
}

type Leaf = Large<(), TableMeta, { 1 << LEAF_BITS }>;
/// A node: an array of links to smaller regions.
type Node<T> = Large<(), OnceBox<T>, { 1 << NODE_BITS }>;
#[cfg(not(loom))]
type Root = Node<Node<Node<Node<Leaf>>>>;
#[cfg(loom)]
type Root = Node<Node<Leaf>>;

/// All frame numbers are below this limit. RISC-V has the largest frame numbers, with 44 bits.
const FRAMES: u64 = 1 << Root::BITS;

impl Region for Leaf {
    const BITS: u32 = LEAF_BITS;

    fn make() -> Result<Box<Self>, OutOfMemory> {
        Large::new((), TableMeta::new)
    }

    fn prepare(&self, _: Pfn) -> Result<(), OutOfMemory> {
        Ok(())
    }

    #[inline(always)]
    fn get(&self, frame: Pfn) -> Option<&TableMeta> {
        Some(&self.array[frame.0 as usize % (1 << LEAF_BITS)])
    }
}

/// Returns the link in `node` to the smaller region that contains `frame`.
#[inline(always)]
fn link<T: Region>(node: &Node<T>, frame: Pfn) -> &OnceBox<T> {
    &node.array[(frame.0 >> T::BITS) as usize % (1 << NODE_BITS)]
}

impl<T: Region> Region for Node<T> {
    const BITS: u32 = T::BITS + NODE_BITS;

    fn make() -> Result<Box<Self>, OutOfMemory> {
        Large::new((), OnceBox::new)
    }

    fn prepare(&self, frame: Pfn) -> Result<(), OutOfMemory> {
        link(self, frame).get_or_make(T::make)?.prepare(frame)
    }

    #[inline(always)]
    fn get(&self, frame: Pfn) -> Option<&TableMeta> {
        link(self, frame).get()?.get(frame)
    }
}

/// Finds the [`TableMeta`] of a table frame, for a [`Platform`](crate::Platform) whose frames come from any page
/// allocator and that has no array of per-frame data like Linux's `struct page`.
///
/// All methods may be called by several CPUs at once, and in an interrupt handler if the global allocator may be called
/// there. A look-up takes no lock: it loads five pointers and changes nothing.
///
/// Each aligned 64 KiB of host memory that has ever contained a table costs 512 bytes from the global allocator, and
/// each 64 MiB costs 8 KiB. The map keeps these until it is dropped. A frame that is freed and allocated again keeps
/// its metadata.
///
/// ```
/// use slat::{MetaMap, Pfn};
/// # struct Pages;
/// # impl Pages { fn allocate(&self) -> Option<Pfn> { Some(Pfn(0x12_3456)) } fn free(&self, _: Pfn) {} }
/// # let pages = Pages;
/// let metas = MetaMap::new();
/// // In `Platform::alloc_table`:
/// let allocate = || {
///     let frame = pages.allocate()?;
///     if metas.prepare(frame).is_err() {
///         pages.free(frame);
///         return None;
///     }
///     Some(frame)
/// };
/// // In `Platform::meta`:
/// let meta = |frame| metas.get(frame).expect("the frame was allocated");
/// # let frame = allocate().ok_or("there is one")?;
/// # assert_eq!(meta(frame), meta(frame));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct MetaMap {
    root: OnceBox<Root>,
}

impl MetaMap {
    const_fn! {
        /// Makes an empty map.
        pub fn new() -> Self {
            MetaMap {
                root: OnceBox::new(),
            }
        }
    }
}

impl MetaMap {
    /// Makes sure that `frame` has metadata from now on. Call for each frame that the platform allocates for a table,
    /// before the engine gets the frame.
    ///
    /// # Errors
    /// [`OutOfMemory`]: there is no heap memory, or the frame number has more than 44 bits, which no format's entry can
    /// contain. The call can be repeated.
    pub fn prepare(&self, frame: Pfn) -> Result<(), OutOfMemory> {
        if frame.0 >= FRAMES {
            return Err(OutOfMemory);
        }
        self.root.get_or_make(Root::make)?.prepare(frame)
    }

    /// Returns the metadata of `frame`, always the same pointer. `None`: [`Self::prepare`] was called neither for
    /// `frame` nor for another frame in the same aligned 64 KiB.
    #[inline]
    pub fn get(&self, frame: Pfn) -> Option<NonNull<TableMeta>> {
        if frame.0 >= FRAMES {
            return None;
        }
        self.root.get()?.get(frame).map(NonNull::from)
    }
}

impl Default for MetaMap {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MetaMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MetaMap")
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::thread;
    use std::vec::Vec;

    #[test]
    fn each_frame_has_metadata_of_its_own_wherever_it_is() {
        let map = MetaMap::new();
        let frames = [
            0,
            1,
            15,
            16,
            17,
            (1 << 14) - 1,
            1 << 14,
            0x12_3456,
            1 << 34,
            FRAMES - 1,
        ];
        assert!(frames.iter().all(|frame| map.get(Pfn(*frame)).is_none()));
        for frame in frames {
            map.prepare(Pfn(frame)).unwrap();
            map.prepare(Pfn(frame)).unwrap();
        }
        let metas: BTreeSet<_> = frames.map(|frame| map.get(Pfn(frame)).unwrap()).into();
        assert_eq!(metas.len(), frames.len());
        assert_eq!(map.get(Pfn(32)), None);
        for beyond in [FRAMES, u64::MAX] {
            assert_eq!(map.get(Pfn(beyond)), None);
            assert_eq!(map.prepare(Pfn(beyond)), Err(OutOfMemory));
        }
    }

    #[test]
    fn threads_that_add_and_look_up_frames_at_once_find_the_same_metadata() {
        let map = MetaMap::new();
        let frames = || (0..2000).map(|n| Pfn(n * 37 % 4096 * 5));
        let seen: Vec<Vec<_>> = thread::scope(|scope| {
            let one = || {
                scope.spawn(|| {
                    let found = frames().map(|frame| {
                        map.prepare(frame).unwrap();
                        map.get(frame).unwrap().as_ptr() as usize
                    });
                    found.collect()
                })
            };
            let threads = [one(), one(), one()];
            threads.map(|thread| thread.join().unwrap()).into()
        });
        assert!(seen.iter().all(|other| *other == seen[0]));
    }
}
