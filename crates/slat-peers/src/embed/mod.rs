//! Compares slat with axaddrspace, the crate for guest address spaces of ArceOS's hypervisors. Both are called by the
//! same methods.
//!
//! axaddrspace keeps a list of areas, and maps them in page tables that the hypervisor provides. Here the hypervisor's
//! tables are those of page_table_multiarch, a crate by the same authors. slat is called through an adapter.
//! `conformance/axaddrspace` uses the same adapter to run axaddrspace's own tests on slat. The adapter was written for
//! an earlier version of axaddrspace, whose methods are similar.
//!
//! * `linear/map`, `linear/unmap`: 64 MiB of host memory, offset by one page so that all leaves have 4 KiB.
//! * `linear/map-huge`, `linear/unmap-huge`: 1 GiB by leaves of 2 MiB; times are per page of 4 KiB.
//! * `alloc/map`, `alloc/unmap`: 64 MiB, with a frame allocated for each page.
//! * `translate`: each page of `alloc/map`, in one random order.
//! * `first-touch`: 64 MiB, of which each page is allocated and mapped when its fault is handled, in order.
//!
//! axaddrspace has no method that removes a right. page_table_multiarch has one, which `tables/protect` measures.

mod theirs;

// The adapter expects these modules at the root of its crate.
#[path = "../../../../conformance/axaddrspace/address_space.rs"]
#[expect(dead_code, reason = "the bench does not call all methods")]
mod adapter;
mod npt;

use memory_addr::{AddrRange, PhysAddr};
use page_table_entry::MappingFlags;

use crate::report::{Metric, Samples, time};
use crate::tables::multiarch::Source;

memory_addr::def_usize_addr! {
    /// A guest-physical address.
    pub type GuestPhysAddr;
}
memory_addr::def_usize_addr_formatter! {
    GuestPhysAddr = "GPA:{}";
}
/// A range of guest-physical addresses.
pub type GuestPhysAddrRange = AddrRange<GuestPhysAddr>;

const PAGE: usize = 4096;
/// The address at which areas of small leaves begin.
const BASE: usize = 1 << 30;
/// The address at which areas with 2 MiB leaves begin. At this address no leaf of 1 GiB fits. The address is far from
/// the other areas, because page_table_multiarch installs no huge leaf where there was a table before.
const HUGE_BASE: usize = (8 << 30) + (2 << 20);
const SIZE: usize = 64 << 20;
const HUGE: usize = 1 << 30;
/// The size of the address space, which contains all areas.
const SPACE: usize = 16 << 30;

/// A guest address space. All its areas are readable and writable.
trait AddressSpace {
    const NAME: &'static str;
    fn new() -> Self;
    fn map_linear(&mut self, at: usize, host: usize, size: usize);
    fn map_alloc(&mut self, at: usize, size: usize, populate: bool);
    fn unmap(&mut self, at: usize, size: usize);
    fn translate(&self, at: usize) -> Option<usize>;
    /// Handles the page fault of a write.
    fn fault(&mut self, at: usize) -> bool;
}

const FLAGS: MappingFlags = MappingFlags::READ.union(MappingFlags::WRITE);

impl AddressSpace for adapter::AddrSpace<Source> {
    const NAME: &'static str = "slat-ept";

    fn new() -> Self {
        Self::new_empty(4, 0.into(), SPACE).expect("frames for the root")
    }

    fn map_linear(&mut self, at: usize, host: usize, size: usize) {
        let mapped = self.map_linear(at.into(), PhysAddr::from(host), size, FLAGS);
        mapped.expect("a valid area");
    }

    fn map_alloc(&mut self, at: usize, size: usize, populate: bool) {
        let mapped = self.map_alloc(at.into(), size, FLAGS, populate);
        mapped.expect("a valid area");
    }

    fn unmap(&mut self, at: usize, size: usize) {
        self.unmap(at.into(), size).expect("an area");
    }

    fn translate(&self, at: usize) -> Option<usize> {
        self.translate(at.into()).map(PhysAddr::as_usize)
    }

    fn fault(&mut self, at: usize) -> bool {
        self.handle_page_fault(at.into(), MappingFlags::WRITE)
    }
}

/// Measures each contender once.
pub fn round(samples: &mut Samples) {
    if samples.wants("embed", "") {
        contender::<theirs::AddrSpace>(samples);
        contender::<adapter::AddrSpace<Source>>(samples);
    }
}

fn contender<A: AddressSpace>(samples: &mut Samples) {
    let mut add = |case: &str, size: usize, ns: f64| {
        let per_page = ns / (size / PAGE) as f64;
        samples.add("embed", case, A::NAME, Metric::NsPerPage, per_page);
    };
    let mut space = A::new();

    add(
        "linear/map",
        SIZE,
        time(|| space.map_linear(BASE, BASE + PAGE, SIZE)).0,
    );
    assert_eq!(
        space.translate(BASE + SIZE - 1),
        Some(BASE + PAGE + SIZE - 1)
    );
    add("linear/unmap", SIZE, time(|| space.unmap(BASE, SIZE)).0);
    assert_eq!(space.translate(BASE), None);

    add(
        "linear/map-huge",
        HUGE,
        time(|| space.map_linear(HUGE_BASE, HUGE_BASE, HUGE)).0,
    );
    assert_eq!(
        space.translate(HUGE_BASE + HUGE - 1),
        Some(HUGE_BASE + HUGE - 1)
    );
    add(
        "linear/unmap-huge",
        HUGE,
        time(|| space.unmap(HUGE_BASE, HUGE)).0,
    );

    add(
        "alloc/map",
        SIZE,
        time(|| space.map_alloc(BASE, SIZE, true)).0,
    );
    let (ns, sum) = time(|| {
        pages()
            .map(|at| space.translate(at))
            .fold(0, |sum, host| sum ^ host.expect("mapped"))
    });
    assert_ne!(sum, 0);
    add("translate", SIZE, ns);
    add("alloc/unmap", SIZE, time(|| space.unmap(BASE, SIZE)).0);

    space.map_alloc(BASE, SIZE, false);
    let touch = || (BASE..BASE + SIZE).step_by(PAGE).all(|at| space.fault(at));
    let (ns, all) = time(touch);
    assert!(all, "a fault was not handled");
    add("first-touch", SIZE, ns);
    space.unmap(BASE, SIZE);
}

/// Returns the pages in an order in which all tables are visited again and again.
fn pages() -> impl Iterator<Item = usize> {
    const PAGES: usize = SIZE / PAGE;
    // The step is odd, so that each page is visited exactly once.
    const STEP: usize = 5003;
    (0..PAGES).map(|i| BASE + i * STEP % PAGES * PAGE)
}
