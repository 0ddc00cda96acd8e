//! Computes which results the memory models of the processors allow, by trying every execution of a small program.
//!
//! An execution says from which write each read has read, and in which order the writes of each place take effect. The
//! model allows an execution if certain relations between its events have no cycle. Programs have no dependencies and
//! no branches, so the models do not contain the order that these give.

use std::collections::BTreeSet;
use std::vec;
use std::vec::Vec;

/// An instruction of a program's thread. A place is a memory location, and has a number. Every write has a value of its
/// own: the writes are numbered from 1, thread by thread. All places begin with 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) enum Op {
    Read {
        at: u8,
        acquires: bool,
    },
    Write {
        at: u8,
        releases: bool,
    },
    /// A read and a write, as one atomic operation.
    Update {
        at: u8,
        acquires: bool,
        releases: bool,
    },
    /// A barrier for all accesses: DMB, MFENCE.
    Fence,
}

/// The memory model of an architecture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Model {
    /// Arm's (DDI 0487, B2.3).
    Arm,
    /// x86's (Intel SDM volume 3, 9.2; AMD APM volume 2, 7.2). This model ignores `acquires` and `releases`.
    X86,
}

/// A result of a program: the values of its reads, thread by thread, and then the final value of each place.
pub(super) type Outcome = Vec<u8>;

/// An access or a barrier. An update becomes two events: a read, and the write that follows it.
#[derive(Clone, Copy)]
struct Event {
    thread: usize,
    op: Op,
    /// The number of the write. 0: the event is not a write.
    written: u8,
    is_read: bool,
    /// The event is the read or the write of an update.
    is_half: bool,
}

impl Event {
    fn at(&self) -> Option<u8> {
        match self.op {
            Op::Read { at, .. } | Op::Write { at, .. } | Op::Update { at, .. } => Some(at),
            Op::Fence => None,
        }
    }

    fn is_fence(&self) -> bool {
        self.op == Op::Fence
    }

    fn is_write(&self) -> bool {
        self.written != 0
    }

    fn acquires(&self) -> bool {
        self.is_read
            && matches!(self.op, Op::Read { acquires, .. } | Op::Update { acquires, .. } if acquires)
    }

    fn releases(&self) -> bool {
        self.is_write()
            && matches!(self.op, Op::Write { releases, .. } | Op::Update { releases, .. } if releases)
    }
}

/// A relation between events: bit `b` of word `a` says that `a` comes before `b`.
#[derive(Clone)]
struct Relation(Vec<u32>);

impl Relation {
    fn new(events: usize) -> Self {
        Self(vec![0; events])
    }

    /// Makes the relation of all pairs of events for which `holds` returns `true`.
    fn of(events: usize, mut holds: impl FnMut(usize, usize) -> bool) -> Self {
        let mut relation = Self::new(events);
        for a in 0..events {
            for b in (0..events).filter(|b| *b != a) {
                if holds(a, b) {
                    relation.add(a, b);
                }
            }
        }
        relation
    }

    fn add(&mut self, a: usize, b: usize) {
        self.0[a] |= 1 << b;
    }

    fn has(&self, a: usize, b: usize) -> bool {
        self.0[a] >> b & 1 != 0
    }

    fn has_cycle(mut self) -> bool {
        for middle in 0..self.0.len() {
            for a in 0..self.0.len() {
                if self.has(a, middle) {
                    self.0[a] |= self.0[middle];
                }
            }
        }
        (0..self.0.len()).any(|a| self.has(a, a))
    }
}

/// A program's events, and those of their orders that are the same in every execution.
struct Program {
    model: Model,
    events: Vec<Event>,
    preserved: Relation,
}

impl Program {
    fn new(model: Model, threads: &[Vec<Op>]) -> Self {
        let mut events = Vec::new();
        let mut writes = 0;
        for (thread, ops) in threads.iter().enumerate() {
            for op in ops {
                let half = |written, is_read| Event {
                    thread,
                    op: *op,
                    written,
                    is_read,
                    is_half: matches!(op, Op::Update { .. }),
                };
                if matches!(op, Op::Read { .. } | Op::Update { .. }) {
                    events.push(half(0, true));
                }
                if matches!(op, Op::Write { .. } | Op::Update { .. }) {
                    writes += 1;
                    events.push(half(writes, false));
                }
                if *op == Op::Fence {
                    events.push(half(0, false));
                }
            }
        }
        let mut program = Self {
            model,
            preserved: Relation::new(events.len()),
            events,
        };
        program.preserved = Relation::of(program.events.len(), |a, b| program.preserves(a, b));
        program
    }

    /// Whether events `a` and `b` are of the same thread, and `a` comes before `b` in this thread.
    fn precedes(&self, a: usize, b: usize) -> bool {
        a < b && self.events[a].thread == self.events[b].thread
    }

    /// Whether the model itself keeps the order of two events of one thread. Orders that follow by way of a third event
    /// are left out: the search for cycles finds them.
    fn preserves(&self, a: usize, b: usize) -> bool {
        if !self.precedes(a, b) {
            return false;
        }
        let [first, second] = [a, b].map(|n| self.events[n]);
        if first.is_fence() || second.is_fence() {
            return true;
        }
        match self.model {
            // x86 reorders one case only: a store may take effect after a later load. Locked instructions keep the
            // order.
            Model::X86 => first.is_half || second.is_half || !first.is_write() || second.is_write(),
            Model::Arm => {
                let releases_then_acquires = first.releases() && second.acquires();
                // A write of a place does not overtake an earlier access to that place.
                let overwrites = first.at() == second.at() && second.is_write();
                // An update that both acquires and releases orders the events on its two sides.
                let is_barrier = |n: usize| {
                    let event = self.events[n];
                    matches!(
                        event.op,
                        Op::Update {
                            acquires: true,
                            releases: true,
                            ..
                        }
                    )
                };
                let around = |n: usize| is_barrier(n) && n != a && n != b;
                let across = (a..b).any(|n| around(n) && self.events[n].is_read && around(n + 1));
                first.acquires()
                    || second.releases()
                    || releases_then_acquires
                    || overwrites
                    || across
            }
        }
    }

    /// Whether the model allows the execution in which read `r` reads from write `from[r]` (`None`: the initial value),
    /// and the writes of each place take effect in the order of `places`.
    fn allows(&self, from: &[Option<usize>], places: &[Vec<usize>]) -> bool {
        let n = self.events.len();
        // The position of each write in the order of its place, counted from 1.
        let mut rank = vec![0; n];
        for writes in places {
            for (before, write) in writes.iter().enumerate() {
                rank[*write] = before + 1;
            }
        }
        let read = |r: usize| from[r].map_or(0, |write| rank[write]);
        let is_same = |a: usize, b: usize| {
            self.events[a].at().is_some() && self.events[a].at() == self.events[b].at()
        };
        // The relations read-from, coherence order, and from-read.
        let communicates = |a: usize, b: usize| {
            let [first, second] = [a, b].map(|n| self.events[n]);
            is_same(a, b)
                && match (first.is_write(), second.is_write()) {
                    (true, true) => rank[a] < rank[b],
                    (true, false) => from[b] == Some(a),
                    (false, true) => read(a) < rank[b],
                    (false, false) => false,
                }
        };
        // Coherence: the accesses to each single place have a total order that agrees with each thread's.
        let coherent = Relation::of(n, |a, b| {
            communicates(a, b) || (is_same(a, b) && self.precedes(a, b))
        });
        if coherent.has_cycle() {
            return false;
        }
        // No other write of the place comes between the read and the write of an update.
        let is_torn = (0..n).any(|r| {
            let event = self.events[r];
            event.is_half && event.is_read && rank[r + 1] != read(r) + 1
        });
        if is_torn {
            return false;
        }
        let observed = Relation::of(n, |a, b| {
            let is_external = self.events[a].thread != self.events[b].thread;
            // A thread may read its own store before other threads see it, but an acquiring read waits for the store of
            // an update.
            let is_late = self.events[a].is_half && from[b] == Some(a) && self.events[b].acquires();
            self.preserved.has(a, b) || (communicates(a, b) && (is_external || is_late))
        });
        !observed.has_cycle()
    }
}

/// Returns the possible results of a program.
pub(super) fn outcomes(model: Model, threads: &[Vec<Op>]) -> BTreeSet<Outcome> {
    let program = Program::new(model, threads);
    let events = &program.events;
    let count = events
        .iter()
        .filter_map(Event::at)
        .max()
        .map_or(0, |at| usize::from(at) + 1);
    let writes_of = |at: usize| -> Vec<usize> {
        let of_place = |n: &usize| events[*n].is_write() && events[*n].at() == Some(at as u8);
        (0..events.len()).filter(of_place).collect()
    };
    let mut orders = vec![Vec::new()];
    for at in 0..count {
        let mut longer = Vec::new();
        for before in &orders {
            for order in permutations(&writes_of(at)) {
                let mut next: Vec<Vec<usize>> = before.clone();
                next.push(order);
                longer.push(next);
            }
        }
        orders = longer;
    }
    let reads: Vec<usize> = (0..events.len()).filter(|n| events[*n].is_read).collect();
    let mut found = BTreeSet::new();
    let mut from = vec![None; events.len()];
    try_reads(
        &reads,
        &mut from,
        &|r| writes_of(usize::from(events[r].at().unwrap_or(0))),
        &mut |from| {
            for places in orders.iter().filter(|places| program.allows(from, places)) {
                let written = |n: Option<&usize>| n.map_or(0, |n| events[*n].written);
                let values = reads.iter().map(|r| written(from[*r].as_ref()));
                let last = places.iter().map(|writes| written(writes.last()));
                found.insert(values.chain(last).collect());
            }
        },
    );
    found
}

/// Calls `then` for each combination of writes from which the reads may have read.
fn try_reads(
    reads: &[usize],
    from: &mut Vec<Option<usize>>,
    writes: &impl Fn(usize) -> Vec<usize>,
    then: &mut impl FnMut(&[Option<usize>]),
) {
    let Some((read, rest)) = reads.split_first() else {
        return then(from);
    };
    let all = writes(*read).into_iter().map(Some);
    for choice in core::iter::once(None).chain(all) {
        from[*read] = choice;
        try_reads(rest, from, writes, then);
    }
}

fn permutations(items: &[usize]) -> Vec<Vec<usize>> {
    let Some((first, rest)) = items.split_first() else {
        return vec![Vec::new()];
    };
    let mut all = Vec::new();
    for shorter in permutations(rest) {
        for place in 0..=shorter.len() {
            let mut longer = shorter.clone();
            longer.insert(place, *first);
            all.push(longer);
        }
    }
    all
}

/// Programs whose results the manuals name.
mod tests {
    use super::*;

    const fn r(at: u8) -> Op {
        Op::Read {
            at,
            acquires: false,
        }
    }
    const fn a(at: u8) -> Op {
        Op::Read { at, acquires: true }
    }
    const fn w(at: u8) -> Op {
        Op::Write {
            at,
            releases: false,
        }
    }
    const fn l(at: u8) -> Op {
        Op::Write { at, releases: true }
    }
    const fn u(at: u8) -> Op {
        Op::Update {
            at,
            acquires: false,
            releases: false,
        }
    }
    const F: Op = Op::Fence;

    /// Whether Arm's model and x86's model allow an outcome.
    fn is_allowed(threads: &[&[Op]], outcome: &[u8]) -> [bool; 2] {
        let threads: Vec<Vec<Op>> = threads.iter().map(|ops| ops.to_vec()).collect();
        [Model::Arm, Model::X86].map(|model| outcomes(model, &threads).contains(outcome))
    }

    #[test]
    fn the_models_allow_what_the_manuals_allow() {
        // Two threads pass a message: a store of data, then of a flag (litmus test MP).
        assert_eq!(
            is_allowed(&[&[w(0), w(1)], &[r(1), r(0)]], &[2, 0, 1, 2]),
            [true, false]
        );
        assert_eq!(
            is_allowed(&[&[w(0), l(1)], &[r(1), r(0)]], &[2, 0, 1, 2]),
            [true, false]
        );
        assert_eq!(
            is_allowed(&[&[w(0), w(1)], &[a(1), r(0)]], &[2, 0, 1, 2]),
            [true, false]
        );
        assert_eq!(
            is_allowed(&[&[w(0), l(1)], &[a(1), r(0)]], &[2, 0, 1, 2]),
            [false, false]
        );
        assert_eq!(
            is_allowed(&[&[w(0), F, w(1)], &[r(1), F, r(0)]], &[2, 0, 1, 2]),
            [false, false]
        );
        // Store buffering. (x86's model ignores `acquires` and `releases`.)
        assert_eq!(
            is_allowed(&[&[w(0), r(1)], &[w(1), r(0)]], &[0, 0, 1, 2]),
            [true, true]
        );
        assert_eq!(
            is_allowed(&[&[l(0), a(1)], &[l(1), a(0)]], &[0, 0, 1, 2]),
            [false, true]
        );
        assert_eq!(
            is_allowed(&[&[w(0), F, r(1)], &[w(1), F, r(0)]], &[0, 0, 1, 2]),
            [false, false]
        );
        // Store buffering with updates instead of stores.
        assert_eq!(
            is_allowed(&[&[u(0), r(1)], &[u(1), r(0)]], &[0, 0, 0, 0, 1, 2]),
            [true, false]
        );
        // Two threads load, and then store to what the other thread has loaded (litmus test LB).
        assert_eq!(
            is_allowed(&[&[r(0), w(1)], &[r(1), w(0)]], &[2, 1, 2, 1]),
            [true, false]
        );
        assert_eq!(
            is_allowed(&[&[a(0), w(1)], &[a(1), w(0)]], &[2, 1, 2, 1]),
            [false, false]
        );
        // Independent reads of independent writes.
        let readers = |first: [Op; 2], second: [Op; 2]| {
            is_allowed(&[&[w(0)], &[w(1)], &first, &second], &[1, 0, 2, 0, 1, 2])
        };
        assert_eq!(readers([r(0), r(1)], [r(1), r(0)]), [true, false]);
        assert_eq!(readers([a(0), a(1)], [a(1), a(0)]), [false, false]);
        // Coherence of one place: no thread reads the old value after it has read the new one.
        assert_eq!(
            is_allowed(&[&[w(0)], &[r(0), r(0)]], &[1, 0, 1]),
            [false, false]
        );
        // Two updates do not both read the initial value.
        assert_eq!(is_allowed(&[&[u(0)], &[u(0)]], &[0, 0, 2]), [false, false]);
        assert_eq!(is_allowed(&[&[u(0)], &[u(0)]], &[0, 1, 2]), [true, true]);
    }
}
