//! Layers: the memory of many VMs that were cloned from few images.
//!
//! A [`Stack`] is a part for a [`Platform`](crate::Platform). It records which frame backs each page of one VM's memory.
//! The VM's *own* pages are on top, and the VM may write to them. Below are *layers*, which any number of stacks share,
//! and which nobody changes any more. A page is found in the highest layer that has it. For a write to a page of a
//! layer, the VM gets an own copy of this page, 4 KiB, and nothing else.
//!
//! ```text
//!   VM 1: own pages    VM 2: own pages    VM 3: own pages
//!         │                  │                  │
//!         └──── delta 1 ─────┘               delta 2
//!                  └───────────── base ─────────┘
//! ```
//!
//! [`Stack::share`] makes a layer: the own pages become a layer that the stack and a new stack have in common.
//! [`Vm::fork_from`](crate::Vm::fork_from) calls it by [`Platform::share`](crate::Platform::share). So each clone adds
//! one layer, which is the *delta* from the layer below, and a base image is the layer of the first VM. A stack that
//! belongs to no VM keeps its layers for VMs to come.
//!
//! A *stretch* is the memory that one leaf of level 2 maps (2 MiB, with pages of 4 KiB). A stretch of memory that a
//! layer has in consecutive frames, and of which no higher layer has a page, is a page of level 2 for each VM
//! ([`HostPage::level`]). So all VMs map it by one leaf that is not writable, until the VM writes to one of its pages.
//!
//! # What a platform does with it
//! The platform keeps a stack for each VM, with a lock of the platform's own, and calls it like this:
//!
//! ```
//! # use slat::layers::{PageFrames, Stack};
//! # use slat::*;
//! # use std::sync::{Arc, Mutex};
//! # struct Memory;
//! # impl PageFrames for Memory {
//! #     fn copy(&self, _: Option<Pfn>) -> Option<Pfn> { Some(Pfn(1)) }
//! #     fn free(&self, _: Pfn, _: u64) {}
//! # }
//! fn resolve<P: Platform, F: Format>(
//!     vm: &Vm<P, F>,
//!     stack: &Mutex<Stack<Memory>>,
//!     request: &Request,
//! ) -> Result<HostPage, ResolveError> {
//!     loop {
//!         let mut locked = stack.lock().unwrap();
//!         match locked.find(request.backing) {
//!             Some(page) if page.writable || request.access != Access::Write => return Ok(page),
//!             _ => {}
//!         }
//!         let copy = locked.copy(request.backing)?;
//!         // An invalidation waits for readers, which call `resolve_resident`: no lock is held here.
//!         drop(locked);
//!         let end = F::GRANULE.add_pages(request.backing, 1);
//!         let guard = copy.is_replacement().then(|| vm.invalidate_exact(request.backing..end));
//!         stack.lock().unwrap().insert(copy);
//!         drop(guard);
//!     }
//! }
//! ```
//!
//! The copy is made before the invalidation, because the engine ignores an error of a page that was invalidated
//! meanwhile, and calls `resolve` again. If `copy` were to fail after the invalidation, it would do so without end.
//!
//! [`Stack::resident`] answers `resolve_resident`, and [`Stack::share`] answers `share`.
//!
//! # Why no VM sees another VM's writes
//! * *A layer's frame is never written to.* A leaf that allows a write maps an own page, because `find` returns pages of
//!   layers as not writable. When own pages become a layer, no leaf of the VM is writable, and no fault in progress
//!   installs a page that was found before: [`vm/fork.rs`](crate::Vm::fork_from) calls `share` at such a moment. From
//!   then on, each VM finds these pages as not writable.
//! * *A VM that has an own copy uses no other one.* The platform invalidates the page before it inserts the copy: all
//!   leaves of this VM that map the page are zapped and flushed, and no fault installs the old page later. The leaves of
//!   the other pages of the stretch stay, because the old frame of each of them is still the right one.
//! * *A copy has the contents of the layer*, because nobody writes to the frame. If two VMs write to the same page at
//!   once, each makes its own copy of it, under its own lock. If two vCPUs of a VM do, the second copy is dropped. It is
//!   also dropped if the VM was cloned since it was made: another vCPU may have written to the page before that.
//!
//! # When a frame is freed
//! A stack frees its own pages when it is dropped, and a layer frees its pages when the last stack that has it is
//! dropped. A stack may be dropped when its VM has been dropped: then no CPU walks the VM's tables and no flush of
//! this VM is in progress, so no leaf and no TLB entry of this VM leads to a frame of the stack or of its layers. A
//! frame of a layer is not freed as long as a stack has the layer.
//!
//! There is one more case. A stack may be the only one that has its highest layer, for example because the clone has
//! ended. Then the next [`Stack::share`] joins this layer with the own pages. So the number of layers does not grow with
//! each clone. [`Stack::share`] frees those pages of the layer of which the stack has own copies. Only this stack's VM could map
//! them, and when it made its copies, their leaves were zapped and flushed.
//!
//! # Cost
//! A stack without own pages allocates nothing: it is a reference to a layer. Otherwise it takes 4 bytes for each
//! stretch of its memory (2 KiB for 1 GiB), and for each stretch that it has own pages in, 112 bytes and 8 for each
//! page (at most 16, because the list of frames doubles). [`Stack::find`] looks once into each layer.

mod delta;

use alloc::sync::Arc;
use core::ops::Range;

use crate::addr::{Granule, Hva, Level, Pfn};
use crate::heap::{OutOfMemory, Shared};
use crate::platform::{HostPage, HostRun, ResolveError};
use delta::{Delta, Stretch};

/// Allocates and frees the frames of pages in layers. The platform implements it for its memory.
///
/// Stacks and layers have references to the memory. So do not implement it for the platform that has the stacks, but
/// for a part of the platform: otherwise neither is ever dropped.
pub trait PageFrames: Send + Sync + 'static {
    /// Allocates a frame for a page, and fills it with a copy of the page `from`, or with zeros. `None`: there is no
    /// memory. Called under the platform's lock of the stack.
    fn copy(&self, from: Option<Pfn>) -> Option<Pfn>;

    /// Frees `pages` consecutive frames. They are frames from [`copy`](Self::copy) or [`Stack::put`], perhaps not all
    /// frames of one call of `put`. No guest can access them any more. May be called under the platform's lock of any
    /// stack.
    fn free(&self, first: Pfn, pages: u64);
}

/// The frames that back the memory of one VM: own pages, and the layers below.
pub struct Stack<M: PageFrames> {
    granule: Granule,
    backing: Range<Hva>,
    own: Owned<M>,
    below: Option<Shared<Layer<M>>>,
    /// How often own pages have become a layer.
    shares: u64,
}

/// A copy of a page, to be inserted into the stack that has made it. If it is dropped, its frame is freed.
pub struct PageCopy<M: PageFrames> {
    memory: Arc<M>,
    page: u64,
    /// `None`: the frame was inserted.
    frame: Option<Pfn>,
    is_replacement: bool,
    /// The stack's number of shares when the copy was made.
    shares: u64,
}

/// A layer. It never changes.
struct Layer<M: PageFrames> {
    pages: Owned<M>,
    below: Option<Shared<Layer<M>>>,
}

/// Pages whose frames are freed when this is dropped.
struct Owned<M: PageFrames> {
    memory: Arc<M>,
    delta: Delta,
}

impl<M: PageFrames> Stack<M> {
    /// Makes a stack without pages for the memory of one VM, which has the backing addresses `backing` and pages of
    /// `granule`. A page that is neither put into the stack nor in a layer is full of zeros at first.
    pub fn new(memory: Arc<M>, granule: Granule, backing: Range<Hva>) -> Self {
        let origin = Self::origin(granule, &backing);
        let pages = granule.pages_between(origin, backing.end);
        Stack {
            granule,
            own: Owned {
                memory,
                delta: Delta::new(granule.pages(Level::MEGA), pages),
            },
            backing,
            below: None,
            shares: 0,
        }
    }

    /// Returns the address of the page with number 0: page numbers are counted from the beginning of a stretch.
    fn origin(granule: Granule, backing: &Range<Hva>) -> Hva {
        let stretch = granule.pages(Level::MEGA) << granule.shift();
        Hva(backing.start.0 / stretch * stretch)
    }

    /// Returns the number of the page at `backing`. `None`: the address is not in this memory.
    fn page(&self, backing: Hva) -> Option<u64> {
        let origin = Self::origin(self.granule, &self.backing);
        let is_here = self.backing.contains(&backing);
        is_here.then(|| self.granule.pages_between(origin, backing))
    }

    /// Gives the VM `pages` own pages from the address `backing` on, in consecutive frames from `first` on. From now on
    /// the frames belong to the stack. Whole stretches, whose first frame is aligned to the size of a stretch, become
    /// pages of level 2.
    ///
    /// # Errors
    /// [`OutOfMemory`]; nothing was changed.
    ///
    /// # Panics
    /// If not all pages are in this memory, or the VM has one of them already.
    pub fn put(&mut self, backing: Hva, first: Pfn, pages: u64) -> Result<(), OutOfMemory> {
        let last = self.granule.add_pages(backing, pages.saturating_sub(1));
        assert!(
            self.page(last).is_some(),
            "pages outside the stack's memory"
        );
        let page = self
            .page(backing)
            .expect("pages outside the stack's memory");
        self.own.delta.put(page, first, pages)
    }

    /// Returns all pages: those of the VM, and then those of the layers, from the highest down.
    fn deltas(&self) -> impl Iterator<Item = &Delta> {
        let layers = core::iter::successors(self.below.as_deref(), |layer| layer.below.as_deref());
        core::iter::once(&self.own.delta).chain(layers.map(|layer| &layer.pages.delta))
    }

    /// Returns the page at `backing`, from the highest layer that has it. It is writable if it is an own page. `None`:
    /// no layer has it, or the address is not in this memory.
    pub fn find(&self, backing: Hva) -> Option<HostPage> {
        let page = self.page(backing)?;
        let mut level = Level::MEGA;
        for (depth, delta) in self.deltas().enumerate() {
            if let Some(Stretch::Pages(_)) = delta.stretch(page) {
                level = Level::PAGE;
            }
            if let Some(frame) = delta.find(page) {
                return Some(HostPage::new(frame, level).with_writable(depth == 0));
            }
        }
        None
    }

    /// Returns the first run of pages of `backing` that a layer has. `None`: no layer has a page of `backing`. The next
    /// run begins after this run.
    pub fn resident(&self, backing: Range<Hva>) -> Option<HostRun> {
        let end = backing.end.min(self.backing.end);
        let mut at = backing.start.max(self.backing.start);
        let mut run: Option<HostRun> = None;
        while at < end {
            match (&mut run, self.find(at)) {
                (None, None) => {}
                (None, Some(first)) => {
                    run = Some(HostRun {
                        backing: at,
                        pages: 1,
                        first,
                    });
                }
                (Some(run), Some(page))
                    if page == run.first.with_pfn(run.first.pfn.add(run.pages)) =>
                {
                    run.pages += 1;
                }
                (Some(_), _) => break,
            }
            at = self.granule.add_pages(at, 1);
        }
        run
    }

    /// Makes a copy of the page at `backing`, which the VM does not have as an own page. If no layer has the page, the
    /// copy is full of zeros.
    ///
    /// # Errors
    /// [`ResolveError::OutOfMemory`]; [`ResolveError::BadAddress`]: the address is not in this memory.
    pub fn copy(&mut self, backing: Hva) -> Result<PageCopy<M>, ResolveError> {
        let page = self.page(backing).ok_or(ResolveError::BadAddress)?;
        let from = self.find(backing).map(|page| page.pfn);
        let prepared = self.own.delta.prepare(page);
        prepared.map_err(|OutOfMemory| ResolveError::OutOfMemory)?;
        let frame = (self.own.memory.copy(from)).ok_or(ResolveError::OutOfMemory)?;
        Ok(PageCopy {
            memory: self.own.memory.clone(),
            page,
            frame: Some(frame),
            is_replacement: from.is_some(),
            shares: self.shares,
        })
    }

    /// Makes `copy` an own page of the VM. Call it in an invalidation of the page
    /// ([`Vm::invalidate_exact`](crate::Vm::invalidate_exact)) if [`PageCopy::is_replacement`].
    ///
    /// Drops the copy if the VM has the page meanwhile, or was cloned since [`Self::copy`], or if there is no memory:
    /// then [`Self::find`] tells what to do next.
    pub fn insert(&mut self, mut copy: PageCopy<M>) {
        let delta = &mut self.own.delta;
        let is_current = copy.shares == self.shares && delta.find(copy.page).is_none();
        if is_current && delta.prepare(copy.page).is_ok() {
            let frame = copy.frame.take().expect("a copy is inserted once");
            delta.insert(copy.page, frame);
        }
    }

    /// Makes a layer of the VM's own pages, and returns a stack for another VM with this layer and all layers below.
    /// Afterwards neither of the two has own pages. Without own pages, makes no layer.
    ///
    /// Call it when no leaf of the VM is writable and no fault can install one, as in
    /// [`Platform::share`](crate::Platform::share), or while the stack belongs to no VM.
    ///
    /// # Errors
    /// [`OutOfMemory`]; the stack has the same pages as before.
    pub fn share(&mut self) -> Result<Self, OutOfMemory> {
        if self.own.delta.pages() > 0 {
            // Made empty, because what cannot be allocated is dropped, and a layer frees its pages then.
            let mut layer = Shared::try_new(Layer {
                pages: Owned {
                    memory: self.own.memory.clone(),
                    delta: self.own.delta.empty(),
                },
                below: None,
            })?;
            self.join_own_layers();
            let empty = layer.get_mut().expect("no other owner exists yet");
            core::mem::swap(&mut empty.pages.delta, &mut self.own.delta);
            empty.below = self.below.take();
            self.below = Some(layer);
            self.shares += 1;
        }
        Ok(Stack {
            granule: self.granule,
            backing: self.backing.clone(),
            own: Owned {
                memory: self.own.memory.clone(),
                delta: self.own.delta.empty(),
            },
            below: self.below.clone(),
            shares: 0,
        })
    }

    /// Adds the pages of the highest layer to the own pages, as long as no other stack has this layer and there is
    /// memory. Frees the pages of which the stack has own copies.
    fn join_own_layers(&mut self) {
        while let Some(layer) = self.below.as_mut().and_then(Shared::get_mut) {
            let Owned { memory, delta } = &mut self.own;
            if !delta.absorb(&mut layer.pages.delta, |frame, pages| {
                memory.free(frame, pages);
            }) {
                break;
            }
            self.below = layer.below.take();
        }
    }

    /// Returns the number of the VM's own pages.
    pub fn own_pages(&self) -> u64 {
        self.own.delta.pages()
    }

    /// Returns the number of layers below the own pages.
    pub fn layers(&self) -> usize {
        self.deltas().count() - 1
    }

    /// Returns the bytes of heap memory that the records of the own pages take. Those of layers are not counted.
    pub fn heap_bytes(&self) -> usize {
        self.own.delta.heap_bytes()
    }
}

impl<M: PageFrames> PageCopy<M> {
    /// Whether the copy replaces a page of a layer, which leaves of the VM may map.
    pub fn is_replacement(&self) -> bool {
        self.is_replacement
    }
}

impl<M: PageFrames> Drop for PageCopy<M> {
    fn drop(&mut self) {
        (self.frame.take()).inspect(|frame| self.memory.free(*frame, 1));
    }
}

impl<M: PageFrames> Drop for Owned<M> {
    fn drop(&mut self) {
        (self.delta).drain(|frame, pages| self.memory.free(frame, pages));
    }
}

impl<M: PageFrames> Drop for Layer<M> {
    /// Drops the layers below one after the other: a layer that dropped the next one would need stack for each.
    fn drop(&mut self) {
        let mut below = self.below.take();
        while let Some(mut layer) = below {
            below = layer.get_mut().and_then(|layer| layer.below.take());
        }
    }
}
