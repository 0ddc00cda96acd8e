//! Compares page tables that map 1 GiB by 4 KiB pages.
//!
//! * `map`: maps the whole range, by an operation on ranges if the crate has one, else page by page.
//! * `translate`: translates every page once, in a random order that is the same for all crates. slat's pages were used
//!   before, so their accessed and dirty bits are set. `translate-first` is the first use of the pages, which sets
//!   these bits; no other crate sets them.
//! * `lookup` and `lookup-vcpu`: looks up the same pages, by `Vm::lookup` (each call in its own reader section) and by
//!   `Vcpu::lookup` (in the reader section of a vCPU). Only slat has these operations, which set no bits and may be
//!   called while other threads change the tables. `lookup-near` and `lookup-near-vcpu` do the same number of look-ups
//!   in 2 MiB, where a walk causes no cache miss.
//! * `protect`: removes the right to write from every page. slat begins to log the slot's dirty pages, which includes
//!   the bitmap and the flush. In `protect`, every page was written before, so a hardware walker has no more bits to
//!   set. In `protect-live`, no page was used, so a walker may set bits at any moment, and slat must not lose these
//!   bits. For the other crates the two cases are the same, so they are measured only once.
//! * `unmap`: unmaps the range. slat deletes the memslot. The time ends when every table except the root was given back
//!   to the source of frames.
//! * `split`: splits 512 leaves of 2 MiB into 4 KiB leaves. slat calls `clear_dirty_log` with an empty bitmap for a
//!   slot that logs and is mapped by huge leaves; this splits the leaves, and write-protects no page. x86_64 and
//!   page_table_multiarch have no split. aarch64-paging splits a leaf when a part of the leaf changes, so for this
//!   crate one page of each leaf loses the right to write.
//! * `limit`: writes the same number of entries in the same frames by plain stores. No crate can be faster.

mod aarch64;
mod generic;
pub mod multiarch;
mod slat;
mod x86;

use ::slat::Ept;
use ::slat::format::{Npt, Stage2, Sv48x4};

use crate::frames;
use crate::report::{Metric, Samples, time};

/// The guest-physical address at which the mapped range begins.
pub const BASE: u64 = 1 << 30;
/// The number of 4 KiB pages in the range.
pub const PAGES: u64 = 1 << 18;
/// The number of 4 KiB pages in a leaf of 2 MiB.
pub const HUGE: u64 = 512;

/// The pages of the range in a random order, which is the same for all crates.
pub struct Order(Vec<u32>);

impl Order {
    fn new() -> Self {
        let mut order: Vec<u32> = (0..PAGES as u32).collect();
        let mut seed = 0x9e37_79b9_7f4a_7c15u64;
        for i in (1..order.len()).rev() {
            seed ^= seed << 13;
            seed ^= seed >> 7;
            seed ^= seed << 17;
            order.swap(i, (seed % (i as u64 + 1)) as usize);
        }
        Order(order)
    }

    /// Calls `translate` for every page's address. Returns the exclusive or of the results.
    #[inline(always)]
    pub fn translate(&self, mut translate: impl FnMut(u64) -> u64) -> u64 {
        let mut sum = 0;
        for page in &self.0 {
            sum ^= translate(BASE + (u64::from(*page) << 12));
        }
        sum
    }

    /// Translates addresses like [`Self::translate`], but all of them are in the first 2 MiB, so that the tables are in
    /// the CPU's first-level cache.
    #[inline(always)]
    fn translate_near(&self, mut translate: impl FnMut(u64) -> u64) -> u64 {
        let mut sum = 0;
        for page in &self.0 {
            sum ^= translate(BASE + ((u64::from(*page) % HUGE) << 12));
        }
        sum
    }

    /// Returns the result of [`Self::translate`] for an identical mapping.
    fn expected(&self) -> u64 {
        self.translate(|address| address)
    }
}

/// The tables of another crate. Each operation works on the whole range.
trait Peer: Sized {
    const NAME: &'static str;
    fn new() -> Self;
    fn map(&mut self);
    fn translate(&self, order: &Order) -> u64;
    fn protect(&mut self);
    /// Unmaps the range. All tables except the root are freed.
    fn unmap(self);
    /// Makes tables that map the range by 2 MiB leaves. `None`: the crate cannot split leaves.
    fn huge() -> Option<Self>;
    fn split(&mut self);
}

fn peer<T: Peer>(order: &Order, samples: &mut Samples) {
    let (life, split) = wanted(samples);
    let mut add = |case: &str, ns: f64| {
        let per_page = ns / PAGES as f64;
        samples.add("tables", case, T::NAME, Metric::NsPerPage, per_page);
    };
    if life {
        let mut tables = T::new();
        add("map", time(|| tables.map()).0);
        // The tables are translated once before the measurement, as slat's pages are used once before their
        // measurement.
        let sum = tables.translate(order);
        assert_eq!(sum, order.expected(), "{} translates wrongly", T::NAME);
        let (ns, sum) = time(|| tables.translate(order));
        assert_eq!(sum, order.expected());
        add("translate", ns);
        add("protect", time(|| tables.protect()).0);
        add("unmap", time(|| tables.unmap()).0);
    }
    if let Some(mut huge) = T::huge().filter(|_| split) {
        add("split", time(|| huge.split()).0);
    }
}

/// Returns whether to measure the life of a mapping (from `map` to `unmap`), and whether to measure the split.
fn wanted(samples: &Samples) -> (bool, bool) {
    let wants = |case: &&str| samples.wants("tables", case);
    let life = ["map", "translate", "lookup", "protect", "unmap"]
        .iter()
        .any(wants);
    (life, wants(&"split"))
}

/// Measures plain stores to all entries of as many frames as the range has tables of level 1.
fn limit(samples: &mut Samples) {
    let tables: Vec<_> = (0..PAGES / HUGE).map(|_| frames::alloc_frame()).collect();
    let (ns, ()) = time(|| {
        for table in &tables {
            let entries = table.cast::<u64>();
            for i in 0..HUGE {
                // SAFETY: the entry is in the frame, which this code owns.
                unsafe { entries.add(i as usize).write(BASE | i << 12) };
            }
        }
    });
    tables.into_iter().rev().for_each(frames::free_frame);
    for case in ["map", "protect", "protect-live", "unmap", "split"] {
        let per_page = ns / PAGES as f64;
        samples.add("tables", case, "limit", Metric::NsPerPage, per_page);
    }
}

/// The measurements of slat's tables and of other crates' tables.
pub struct Tables {
    order: Order,
}

impl Tables {
    pub fn new() -> Self {
        Tables {
            order: Order::new(),
        }
    }

    pub fn round(&mut self, samples: &mut Samples) {
        if !samples.wants("tables", "") {
            return;
        }
        let order = &self.order;
        peer::<x86::Tables>(order, samples);
        peer::<aarch64::Tables>(order, samples);
        peer::<multiarch::Tables>(order, samples);
        peer::<generic::Tables>(order, samples);
        slat::round::<Ept>("slat-ept", order, samples);
        slat::round::<Npt>("slat-npt", order, samples);
        slat::round::<Stage2<48>>("slat-aarch64", order, samples);
        slat::round::<Sv48x4>("slat-riscv", order, samples);
        limit(samples);
    }
}
