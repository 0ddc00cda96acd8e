//! Metadata of table frames, for platforms that have no array of frames.
//!
//! A radix tree by frame number. Nodes are added as frames come, and stay until the map is dropped. So a look-up needs
//! neither a lock nor a reader section: it follows pointers that never change once they are set, each published by a
//! release store after what it refers to was written.

use alloc::boxed::Box;
use core::fmt;
use core::ptr::{self, NonNull};

use crate::addr::Pfn;
use crate::frame::TableMeta;
use crate::heap::{Large, OutOfMemory};
use crate::sync::atomic::{AtomicPtr, Ordering::*, const_fn};

/// Frames of one leaf: 64 KiB of host memory have 512 bytes of metadata.
const LEAF_BITS: u32 = if cfg!(loom) { 1 } else { 4 };
/// Links of one node: 8 KiB.
const NODE_BITS: u32 = if cfg!(loom) { 1 } else { 10 };
/// Nodes on the path to a leaf.
const DEPTH: u32 = if cfg!(loom) { 2 } else { 4 };
/// Frame numbers are below this: those of RISC-V, which are the largest, have 44 bits.
const FRAMES: u64 = 1 << (LEAF_BITS + DEPTH * NODE_BITS);

/// Links to the nodes of the next level, or to leaves; null where there is none.
type Node = Large<(), AtomicPtr<()>, { 1 << NODE_BITS }>;
type Leaf = Large<(), TableMeta, { 1 << LEAF_BITS }>;

/// Finds the [`TableMeta`] of a table frame, for a [`Platform`](crate::Platform) whose frames come from anywhere: of an
/// allocator of pages, without an array like Linux's `struct page`.
///
/// All methods may be called by several CPUs at once, and in an interrupt handler if the global allocator may. A
/// look-up takes no lock: it loads five pointers and changes nothing.
///
/// It takes 512 bytes of the global allocator for each aligned 64 KiB of host memory that has ever held a table, and
/// 8 KiB for each 64 MiB, and keeps them until it is dropped. Of a frame that is freed and allocated again, the
/// metadata are the same.
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
    root: AtomicPtr<()>,
}

impl MetaMap {
    const_fn! {
        /// Makes a map without frames.
        pub fn new() -> Self {
            MetaMap {
                root: AtomicPtr::new(ptr::null_mut()),
            }
        }
    }
}

impl MetaMap {
    /// Makes sure that there is metadata for `frame` from now on. Call for each frame that the platform allocates for a
    /// table, before the engine gets it.
    ///
    /// # Errors
    /// [`OutOfMemory`]: no heap memory, or a frame number of more than 44 bits, which no table's entry can hold. The
    /// call can be repeated.
    pub fn prepare(&self, frame: Pfn) -> Result<(), OutOfMemory> {
        if frame.0 >= FRAMES {
            return Err(OutOfMemory);
        }
        let mut link = &self.root;
        for level in (0..DEPTH).rev() {
            let make = || Node::new((), || AtomicPtr::new(ptr::null_mut()));
            // SAFETY: at this depth links refer to nodes.
            let node: &Node = unsafe { get_or_add(link, make)? };
            link = &node.array[index(frame, level)];
        }
        // SAFETY: below the last level of nodes links refer to leaves.
        unsafe { get_or_add(link, || Leaf::new((), TableMeta::new)) }.map(|_: &Leaf| ())
    }

    /// Returns the metadata of `frame`, always the same. `None`: [`Self::prepare`] was not called for it, nor for a
    /// neighbour that it shares metadata memory with.
    #[inline]
    pub fn get(&self, frame: Pfn) -> Option<NonNull<TableMeta>> {
        if frame.0 >= FRAMES {
            return None;
        }
        let mut at = self.root.load(Acquire);
        for level in (0..DEPTH).rev() {
            // SAFETY: at this depth links refer to nodes, which live as long as `self`.
            let node = unsafe { at.cast::<Node>().as_ref() }?;
            at = node.array[index(frame, level)].load(Acquire);
        }
        // SAFETY: as above, to leaves.
        let leaf = unsafe { at.cast::<Leaf>().as_ref() }?;
        Some(NonNull::from(
            &leaf.array[frame.0 as usize % (1 << LEAF_BITS)],
        ))
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

/// Returns the index of `frame` in a node of `level`, 0 for those above leaves.
fn index(frame: Pfn, level: u32) -> usize {
    (frame.0 >> (LEAF_BITS + level * NODE_BITS)) as usize % (1 << NODE_BITS)
}

/// Returns what `link` refers to, which `make` makes if there is nothing yet. Threads that do so at
/// once get one of them.
///
/// # Safety
/// - `link` refers to a `T`, or is null, and only this function writes it.
unsafe fn get_or_add<T>(
    link: &AtomicPtr<()>,
    make: impl FnOnce() -> Result<Box<T>, OutOfMemory>,
) -> Result<&T, OutOfMemory> {
    let mut at = link.load(Acquire).cast::<T>();
    if at.is_null() {
        at = Box::into_raw(make()?);
        if let Err(other) = link.compare_exchange(ptr::null_mut(), at.cast(), AcqRel, Acquire) {
            // SAFETY: made above, and not published.
            drop(unsafe { Box::from_raw(at) });
            at = other.cast();
        }
    }
    // SAFETY: a `T` (caller's promise), which is freed when the map is dropped; `link` is part of that.
    Ok(unsafe { &*at })
}

/// Frees what is at `at`, unless that is null: a node of `level`, 0 for those above leaves, with all below
/// it; a leaf for `None`.
///
/// # Safety
/// - it was made for a map that is being dropped, and is freed once.
unsafe fn free(at: *mut (), level: Option<u32>) {
    if at.is_null() {
        return;
    }
    let Some(level) = level else {
        // SAFETY: the caller's promise.
        return drop(unsafe { Box::from_raw(at.cast::<Leaf>()) });
    };
    // SAFETY: the caller's promise.
    let node = unsafe { Box::from_raw(at.cast::<Node>()) };
    for link in &node.array {
        // SAFETY: only this node refers to it.
        unsafe { free(link.load(Acquire), level.checked_sub(1)) };
    }
}

impl Drop for MetaMap {
    fn drop(&mut self) {
        // SAFETY: `&mut self`: no one else has a reference.
        unsafe { free(self.root.load(Acquire), Some(DEPTH - 1)) };
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
