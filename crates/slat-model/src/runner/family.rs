//! A VM and its clones, each with its model. The tests check that no VM reads data that another VM has written.

use slat::format::Entry;
use slat::{Config, ForkError, Format, Gfn, Level, MmuKind, Vm};
use std::collections::BTreeSet;
use std::sync::Arc;

use super::Runner;
use crate::machine::Machine;
use crate::model::{GuestModel, capacity};
use crate::ops::Op;
use crate::setup::{MOST_VMS, SPACES};
use crate::tally::Tally;

/// The VMs of a run.
pub struct Family<M: Machine, F: Format> {
    /// The VMs, oldest first.
    vms: Vec<Runner<M, F>>,
    /// The index of the current VM, on which operations are run.
    current: usize,
    /// The sum of the tallies of VMs that have ended.
    tally: Tally,
}

impl<M: Machine, F: Format> Family<M, F> {
    /// Makes a family with one VM, like [`Runner::new`].
    pub fn new(host_pages: u64, rings: bool, config: Config) -> Self {
        Family {
            vms: vec![Runner::new(host_pages, rings, config)],
            current: 0,
            tally: Tally::default(),
        }
    }

    fn vm(&self) -> &Runner<M, F> {
        &self.vms[self.current]
    }

    /// Returns the number of pages of host memory.
    pub fn host_pages(&self) -> u64 {
        self.vm().host_pages()
    }

    /// Returns the models of the current VM, by address space.
    pub fn models(&self) -> &[GuestModel] {
        self.vm().models()
    }

    /// Runs one operation. Panics if engine and model disagree.
    pub fn run(&mut self, op: &Op) {
        match op {
            Op::Fork => self.fork(),
            Op::Turn(to) => self.current = to % self.vms.len(),
            Op::End => self.end(),
            op => self.vms[self.current].run(op),
        }
    }

    fn fork(&mut self) {
        if self.vms.len() == MOST_VMS {
            return;
        }
        if let Some(clone) = self.vms[self.current].fork() {
            self.current = self.vms.len();
            self.vms.push(clone);
        }
        self.vms.iter().for_each(Runner::check_contents);
    }

    /// Ends the current VM, which is not the last one. Its frames then belong only to the other VMs.
    fn end(&mut self) {
        if self.vms.len() == 1 {
            return;
        }
        let ended = self.vms.remove(self.current).finish();
        self.tally.add(&ended);
        self.tally.count("VM ended beside a clone");
        self.current = 0;
    }

    /// Runs [`Runner::check`] on each VM.
    pub fn check(&mut self) {
        self.vms.iter_mut().for_each(Runner::check);
    }

    /// Ends the VMs, and checks that every table frame was freed. Returns the tally.
    pub fn finish(mut self) -> Tally {
        let platform = self.vm().platform.clone();
        for vm in self.vms {
            self.tally.add(&vm.finish());
        }
        assert_eq!(platform.live_frames(), 0, "table frames were leaked");
        self.tally
    }
}

impl<M: Machine, F: Format> Runner<M, F> {
    /// Clones the VM. `None`: the platform does not share pages, or there was no memory.
    fn fork(&mut self) -> Option<Self> {
        let written = self.written();
        let vm = match Vm::fork_from(&self.vm) {
            Ok(vm) => Arc::new(vm),
            Err(ForkError::OutOfMemory) => {
                self.allocation_failed();
                return None;
            }
            Err(ForkError::Unsupported) => {
                assert!(self.machine.load(slat::Pfn(0)).is_none(), "it shares pages");
                self.tally.count("fork refused");
                return None;
            }
            Err(error) => panic!("{error:?}"),
        };
        if let Some(why) = self.platform.stale() {
            panic!("after a fork: {why}");
        }
        for vm in [&*self.vm, &vm] {
            for space in 0..SPACES {
                let all = Gfn(0)..Gfn(capacity::<F>());
                vm.visit_leaves(space, all, &mut |gfn, level, entry| {
                    let writable =
                        matches!(entry, Entry::Leaf(leaf) if leaf.write || leaf.may_write);
                    assert!(!writable, "{entry:?} of {gfn:?}, {level:?}, after a fork");
                });
            }
        }
        let forgotten = &written - &self.written();
        assert!(
            forgotten.is_empty(),
            "after a fork the host is not told of writes: {forgotten:x?}"
        );
        let complete = vm.mmu() == MmuKind::Tdp && !self.platform.is_failing();
        for (space, gfn) in
            (0..SPACES).flat_map(|space| self.accessed.iter().map(move |gfn| (space, *gfn)))
        {
            let copy = vm.lookup(space, Gfn(gfn));
            let own = self
                .vm
                .lookup(space, Gfn(gfn))
                .filter(|_| complete || copy.is_some());
            assert_eq!(copy, own, "frame {gfn:#x} of a clone, and of its parent");
            if copy.is_some() {
                self.tally.count("mapping copied to a clone");
            }
        }
        self.tally.count("VM cloned");
        let tlb = self.platform.add_clone(vm.id());
        let mut clone = Self::of(
            self.machine.clone(),
            self.platform.clone(),
            vm,
            tlb,
            self.models.iter().map(GuestModel::fork).collect(),
        );
        clone.policies = self.policies.clone();
        clone.nx = self.nx;
        clone.accessed = self.accessed.clone();
        clone.memory = self.memory.clone();
        clone.check_slots();
        Some(clone)
    }

    /// Returns the leaves for which a zap tells the host that the page was written or may have been written
    /// ([`slat::ZappedLeaf::dirty`]).
    fn written(&self) -> BTreeSet<(usize, Gfn, Level)> {
        let mut written = BTreeSet::new();
        for space in 0..SPACES {
            let all = Gfn(0)..Gfn(capacity::<F>());
            self.vm.visit_leaves(space, all, &mut |gfn, level, entry| {
                if let Entry::Leaf(leaf) = entry
                    && (leaf.dirty || !F::SETS_DIRTY && (leaf.write || leaf.may_write))
                {
                    written.insert((space, gfn, level));
                }
            });
        }
        written
    }
}
