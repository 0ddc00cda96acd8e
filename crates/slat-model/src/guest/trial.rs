//! Runs a guest on an MMU with operations that a seed determines.

use std::fmt;
use std::ops::Range;

use slat::{Format, MmuKind};

use super::caching::CachingMmu;
use super::defects::Defect;
use super::engine::EngineMmu;
use super::generator::Generator;
use super::layout::HOST_PAGES;
use super::mmu::GuestMmu;
use super::ops::GuestOp;
use super::ram::GuestMachine;
use super::runner::Runner;
use super::shadow::ShadowMmu;
use crate::rng::Rng;
use crate::shrink::{Failure, panics, run_or_shrink, silent};
use crate::tally::Tally;

/// The function that makes the MMU of a run.
type Make = dyn Fn(&GuestMachine) -> Box<dyn GuestMmu>;

/// A subject of the test: a kind of MMU, and the way in which it is tested.
pub struct GuestSubject {
    name: String,
    make: Box<Make>,
    nested_tables: bool,
}

impl fmt::Debug for GuestSubject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("GuestSubject").field(&self.name).finish()
    }
}

/// A failed run: the MMU has broken a rule. [`fmt::Display`] writes all data that is needed to repeat the run.
#[derive(Debug)]
pub struct GuestFailure(Failure<GuestOp>);

impl GuestFailure {
    /// Returns the message of the check that failed.
    pub fn why(&self) -> &str {
        &self.0.why
    }

    /// Returns the number of operations in the shortened run.
    pub fn ops(&self) -> usize {
        self.0.ops.len()
    }
}

impl fmt::Display for GuestFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.write(f, |op| format!("{op:x?}"))
    }
}

impl GuestSubject {
    /// Makes a subject that tests the MMUs that `make` returns. Each MMU is for a VM without memslots on its own
    /// machine.
    pub fn new<M: GuestMmu + 'static>(
        name: impl Into<String>,
        make: impl Fn(&GuestMachine) -> M + 'static,
    ) -> Self {
        GuestSubject {
            name: name.into(),
            make: Box::new(move |machine| Box::new(make(machine))),
            nested_tables: false,
        }
    }

    /// Makes the second vCPU's tables the nested tables of an AMD hypervisor, which runs on the first vCPU. These
    /// tables translate the physical addresses of the hypervisor's guest. Both vCPUs use the same tables; some entries
    /// have different meanings for the two ([`GuestPaging::reserves_table_global`](slat::guest_walk::GuestPaging)).
    #[must_use]
    pub fn with_nested_tables(self) -> Self {
        GuestSubject {
            nested_tables: true,
            name: format!("{}, nested tables", self.name),
            ..self
        }
    }

    /// Makes a subject that tests the engine with second-level tables that `mmu` makes. Each access walks the guest's
    /// tables.
    pub fn engine(mmu: MmuKind) -> Self {
        GuestSubject::new(format!("engine, {mmu:?}"), move |machine| {
            EngineMmu::with_mmu(machine, mmu)
        })
    }

    /// Makes a subject that tests the engine with its shadow MMU.
    pub fn shadow() -> Self {
        GuestSubject::new("shadow", ShadowMmu::new)
    }

    /// Makes a subject that tests the engine with second-level tables of format `F` that `mmu` makes. The engine
    /// shadows the hypervisor's nested tables ([`GuestSubject::with_nested_tables`]).
    pub fn nested<F: Format>(mmu: MmuKind) -> Self {
        let name = format!("nested, {mmu:?}, {}", F::NAME);
        let make = move |machine: &GuestMachine| ShadowMmu::<F>::nested(machine, mmu);
        GuestSubject::new(name, make).with_nested_tables()
    }

    /// Makes a subject that tests the engine with a TLB, paging-structure caches and copies of tables.
    pub fn caching() -> Self {
        GuestSubject::new("caching", |machine| CachingMmu::new(machine, None))
    }

    /// Makes a subject like [`GuestSubject::caching`], but with the given defect, which the test must find.
    pub fn with_defect(defect: Defect) -> Self {
        GuestSubject::new(format!("{defect:?}"), move |machine| {
            CachingMmu::new(machine, Some(defect))
        })
    }

    /// Runs a guest for `accesses` accesses, which the seed determines. In every fourth run, the VMM writes guest
    /// memory, too.
    ///
    /// # Panics
    /// If the MMU breaks a rule, with a [`GuestFailure`] as the message.
    pub fn run_seed(&self, seed: u64, accesses: u64) -> Tally {
        let result = self.try_seed(seed, accesses);
        result.unwrap_or_else(|failure| panic!("{failure}"))
    }

    /// Runs the test for each of `seeds`, as [`GuestSubject::run_seed`] does for one.
    ///
    /// # Panics
    /// The panics of [`GuestSubject::run_seed`].
    pub fn run_seeds(&self, seeds: Range<u64>, accesses: u64) -> Tally {
        let mut tally = Tally::default();
        for seed in seeds {
            tally.add(&self.run_seed(seed, accesses));
        }
        tally
    }

    /// Runs the test for one seed like [`GuestSubject::run_seed`], but returns a failure instead of panicking.
    /// Shortening a failing run takes up to 20 seconds.
    ///
    /// # Errors
    /// [`GuestFailure`]: the MMU broke a rule.
    pub fn try_seed(&self, seed: u64, accesses: u64) -> Result<Tally, GuestFailure> {
        run_or_shrink(
            || self.generate(seed, accesses, |_| ()),
            || format!("{}, seed {seed}, {accesses} accesses", self.name),
            || self.record(seed, accesses),
            |ops| {
                let mut runner = self.runner();
                ops.iter().for_each(|op| runner.run(op));
            },
        )
        .map_err(GuestFailure)
    }

    /// Returns whether the run of a seed fails. Does not shorten the run, and prints no message.
    pub fn fails(&self, seed: u64, accesses: u64) -> bool {
        silent(|| panics(|| drop(self.generate(seed, accesses, |_| ()))))
    }

    fn runner(&self) -> Runner {
        let machine = GuestMachine::new(HOST_PAGES);
        let mmu = (self.make)(&machine);
        Runner::new(machine, mmu, self.nested_tables)
    }

    /// Generates and runs operations. Calls `each` with every operation before running it.
    fn generate(&self, seed: u64, accesses: u64, mut each: impl FnMut(&GuestOp)) -> Tally {
        let mut runner = self.runner();
        let mut generator = Generator::new(Rng::new(seed), seed % 4 == 3);
        while runner.accesses() < accesses {
            let op = generator.next_op(&runner);
            each(&op);
            runner.run(&op);
        }
        runner.run(&GuestOp::Audit);
        runner.tally()
    }

    /// Returns the operations of a failing run, up to the operation that fails.
    fn record(&self, seed: u64, accesses: u64) -> Vec<GuestOp> {
        let mut ops = Vec::new();
        panics(|| drop(self.generate(seed, accesses, |op| ops.push(op.clone()))));
        ops
    }
}
