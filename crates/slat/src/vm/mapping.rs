//! Looks up how a guest frame is mapped now. Installs nothing.
//!
//! With the MMUs whose tables are indexed by gfn (tdp, direct), the look-up is a walk like a vCPU's, without a lock,
//! and finds the leaf at which a page walker would end. The shadow MMU indexes its tables by the guest's virtual pages:
//! many leaves may map one frame. They are found by the reverse map, under the MMU's lock. All leaves of a frame map
//! the same host frame, because a slot change or an invalidation zaps all of them before another host frame can be
//! mapped. They may differ in level, and in the rights that the guest's own tables grant. The result has the largest of
//! their levels, and each right that any of them has.

use super::{Space, Vm};
use crate::addr::{Gfn, Level, Pfn, Rights};
use crate::format::{Entry, Format, Leaf, MemoryType, all_gfns};
use crate::platform::{Platform, WaitFor};
use crate::sync::InSection;
use crate::table::{At, ByGfn, Key, Next, Show, Walk, lookup_page};

/// The mapping of a guest frame ([`Vm::lookup`]).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Mapping {
    /// The host frame to which the guest frame is mapped. If the leaf is huge, this is not the leaf's first frame but
    /// the frame of the page.
    pub pfn: Pfn,
    /// The level of the leaf.
    pub level: Level,
    /// The rights that the leaf grants. The right to write is missing while the dirty log write-protects the leaf.
    pub rights: Rights,
    /// The cache type of the page.
    pub memory: MemoryType,
}

impl Mapping {
    /// Returns the mapping of `gfn` by `leaf`, which is of `level`.
    #[inline]
    fn of<F: Format>(leaf: Leaf, level: Level, gfn: Gfn) -> Self {
        Mapping {
            pfn: leaf.pfn.add(F::GRANULE.page_in(gfn, level)),
            level,
            rights: Rights {
                write: leaf.write,
                execute: leaf.execute,
            },
            memory: leaf.memory,
        }
    }
}

impl<P: Platform, F: Format> Vm<P, F> {
    /// Returns how `gfn` of address space `space` is mapped now. `None`: there is no such address space, or the tables
    /// have no leaf for the frame, so that the next access faults, even if a memslot contains the frame.
    ///
    /// Changes nothing: installs no leaf, sets no accessed bit, asks the platform for no page. For device models and
    /// debuggers, which have no vCPU. A thread that has a vCPU in a reader section uses
    /// [`Vcpu::lookup`](crate::Vcpu::lookup), which costs only the walk.
    ///
    /// Any thread may call it, also in a reader section. No flush waits for the caller. So the result may be out of
    /// date when the caller uses it, and the host may have reclaimed the frame.
    ///
    /// With the tdp and direct MMU, takes no lock. The cost is a walk and one atomic read-modify-write of a word that
    /// all callers share: 5 to 9 ns if the tables are in the cache, of which 3 to 6 ns are the walk (slat-peers,
    /// `lookup-near`). If another caller uses that word at the same time, this caller borrows a reader of the VM
    /// instead, by three read-modify-writes. With the shadow MMU, takes the lock of the MMU for the leaves of this one
    /// frame, and returns the largest level of these leaves, with each right that one of them has.
    ///
    /// ```
    /// # use slat_model::{HostMemory, SimPlatform};
    /// # let (platform, backing) = (SimPlatform::new(512), HostMemory::hva(0));
    /// # use slat::{Access, Config, Ept, Gfn, Gpa, Region, Vm};
    /// # let vm = Vm::<_, Ept>::new(platform, Config::default())?;
    /// vm.set_memory_region(0, &Region::new(0, Gpa(0), 0x20_0000, backing))?;
    /// assert_eq!(vm.lookup(0, Gfn(3)), None);
    ///
    /// let page = vm.create_vcpu()?.enter(0).translate(Gpa(0x3000), Access::Write)?;
    /// let mapping = vm.lookup(0, Gfn(3)).ok_or("it is mapped")?;
    /// assert_eq!((mapping.pfn.hpa(), mapping.rights.write), (page.host, true));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[inline]
    pub fn lookup(&self, space: usize, gfn: Gfn) -> Option<Mapping> {
        let space = self.spaces.get(space)?;
        let mut round = 0;
        loop {
            if let Some(section) = self.readers.brief() {
                return space.mapping(section.inside(), &*self.platform, gfn);
            }
            // Another thread uses the shared word (the brief section), and there is no memory for one more reader:
            // wait.
            self.wait(round, WaitFor::Lock);
            round += 1;
        }
    }
}

impl<P: Platform, F: Format> Space<P, F> {
    /// Returns how `gfn` is mapped in this address space.
    #[inline]
    pub(crate) fn mapping(&self, inside: InSection<'_>, platform: &P, gfn: Gfn) -> Option<Mapping> {
        if gfn >= all_gfns::<F>().end {
            return None;
        }
        if F::SHADOWS && self.mmu.get(inside).shadow_of_all().is_some() {
            return self.reverse_mapping(inside, gfn);
        }
        let key = Key {
            context: self.root(),
            index: gfn.into(),
        };
        // SAFETY: the root belongs to this address space and is not freed before it, and the caller is in a reader
        // section as long as `inside` exists.
        let found = unsafe { lookup_page::<P, F>(platform, key) };
        match found {
            Ok(found) => found
                .page::<F>()
                .map(|leaf| Mapping::of::<F>(leaf, Level::PAGE, gfn)),
            Err(found) => match found.entry::<F>() {
                Entry::Leaf(leaf) => Some(Mapping::of::<F>(leaf, found.level, gfn)),
                _ => None,
            },
        }
    }

    /// Returns how `gfn` is mapped in shadow pages, found by the reverse map.
    #[cold]
    fn reverse_mapping(&self, inside: InSection<'_>, gfn: Gfn) -> Option<Mapping> {
        let mut found = None;
        let mut walk = Walk::new(gfn..gfn.add(1));
        self.mmu
            .get(inside)
            .walk(&mut walk, Show::default(), &mut |at: &At<'_>| {
                if let Entry::Leaf(leaf) = at.decode::<F>() {
                    let this = Mapping::of::<F>(leaf, at.level, gfn);
                    // Leaves of higher levels are visited first, so `found` keeps the largest level.
                    let all: &mut Mapping = found.get_or_insert(this);
                    all.rights.write |= this.rights.write;
                    all.rights.execute |= this.rights.execute;
                }
                Next::Pass
            });
        found
    }
}
