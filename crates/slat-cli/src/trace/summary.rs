//! Summarizes a trace.

use std::collections::{BTreeMap, HashMap, HashSet};

use slat_trace::read::{Event, Trace};
use slat_trace::{arm_exit, exit};

use super::in_order;

/// The bit in a page fault's error code that says that the access was a write.
const PFERR_WRITE: u64 = 1 << 1;
/// The result in a record of `fast_page_fault` which says that the entry was changed.
const RET_PF_FIXED: u64 = 3;

/// The exits for one reason: their number and times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exits {
    /// The number of these exits.
    pub samples: u64,
    /// The number of these exits after which the vCPU entered the guest again. Only such an exit has a time: the
    /// nanoseconds from the exit to the next entry.
    pub timed: u64,
    /// The sum of the times of these exits.
    pub total_ns: u64,
    /// The shortest of the exits' times, in nanoseconds.
    pub min_ns: u64,
    /// The longest of the exits' times, in nanoseconds.
    pub max_ns: u64,
}

impl Exits {
    fn took(&mut self, ns: u64) {
        self.min_ns = if self.timed == 0 {
            ns
        } else {
            self.min_ns.min(ns)
        };
        self.max_ns = self.max_ns.max(ns);
        self.total_ns += ns;
        self.timed += 1;
    }

    /// Returns the mean of the times, in nanoseconds.
    pub fn mean_ns(&self) -> u64 {
        self.total_ns.checked_div(self.timed).unwrap_or(0)
    }
}

/// A memslot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot {
    /// The number of the memslot's VM.
    pub vm: u64,
    /// The memslot's address space.
    pub space: u64,
    /// The memslot's id.
    pub id: u64,
}

/// The number of times that each address occurs in the trace.
pub type Seen = HashMap<u64, u64>;

/// The summary of a trace. All fields except `counts` are computed from the records that were not overwritten.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    /// The nanoseconds from the first record to the last one.
    pub ns: u64,
    /// The number of records that were not overwritten.
    pub records: u64,
    /// The number of records that were overwritten by later records of their thread.
    pub dropped: u64,
    /// The vCPUs that ran: the number of the VM and the vCPU's id.
    pub vcpus: HashSet<(u16, u32)>,
    /// For each recorded tracepoint, its name and the number of its records, including records that were overwritten.
    pub counts: Vec<(String, u64)>,
    /// Exits by reason.
    pub exits: BTreeMap<String, Exits>,
    /// The number of entries by vCPUs that were already in the guest, plus the number of exits by vCPUs that were not
    /// in the guest. If no record was overwritten, the sum is 0.
    pub unpaired: u64,
    /// The number of faults of each guest page frame.
    pub gfns: Seen,
    /// For each page frame, the number of writes that faulted only because dirty logging had write-protected the frame
    /// ([`super::written`]).
    pub written: BTreeMap<u64, u64>,
    /// The number of accesses to each MMIO address.
    pub gpas: Seen,
    /// The number of accesses to each port.
    pub ports: Seen,
    /// The number of exits at each address of the guest's code.
    pub rips: Seen,
    /// The number of faults in each memslot. `None` stands for faults outside all memslots that the trace knows.
    pub faults: BTreeMap<Option<Slot>, u64>,
}

/// Returns the most frequent addresses, at most `top`.
pub fn hottest(seen: &Seen, top: usize) -> Vec<(u64, u64)> {
    let mut all: Vec<_> = seen
        .iter()
        .map(|(address, times)| (*address, *times))
        .collect();
    all.sort_by_key(|(address, times)| (std::cmp::Reverse(*times), *address));
    all.truncate(top);
    all
}

/// The state that is needed while records are read in the order of their times.
#[derive(Default)]
struct State {
    /// For each vCPU that was seen, the reason and the time of its current exit. `None`: the vCPU is in the guest.
    exits: HashMap<(u16, u32), Option<(String, u64)>>,
    /// The page frames of each existing memslot.
    slots: BTreeMap<Slot, std::ops::Range<u64>>,
}

impl State {
    fn slot_of(&self, vm: u64, gfn: u64) -> Option<Slot> {
        let mut slots = self.slots.iter();
        slots
            .find(|(slot, gfns)| slot.vm == vm && gfns.contains(&gfn))
            .map(|(slot, _)| *slot)
    }
}

impl Summary {
    /// Summarizes a trace.
    pub fn of(trace: &Trace) -> Self {
        let events = in_order(trace);
        let ends = events.first().zip(events.last());
        let recorded = (trace.points.iter().enumerate()).filter(|(point, _)| trace.records(*point));
        let mut summary = Summary {
            ns: ends.map_or(0, |(first, last)| last.ns - first.ns),
            records: events.len() as u64,
            dropped: (trace.threads.iter())
                .map(|thread| thread.dropped)
                .fold(0, u64::saturating_add),
            counts: recorded
                .map(|(_, point)| (point.name.clone(), trace.count(&point.name)))
                .collect(),
            ..Summary::default()
        };
        let mut state = State::default();
        for event in events {
            summary.add(trace, event, &mut state);
        }
        summary
    }

    fn add(&mut self, trace: &Trace, event: &Event, state: &mut State) {
        let value = |field| trace.value(event, field).unwrap_or(0);
        self.vcpus.extend(event.vcpu);
        match trace.points[event.point].name.as_str() {
            "kvm_exit" => {
                let reason = reason(trace, event);
                self.exits.entry(reason.clone()).or_default().samples += 1;
                let pc = value("guest_rip") | value("vcpu_pc");
                *self.rips.entry(pc).or_default() += 1;
                if let Some(vcpu) = event.vcpu {
                    let before = state.exits.insert(vcpu, Some((reason, event.ns)));
                    self.unpaired += u64::from(matches!(before, Some(Some(_))));
                }
            }
            "kvm_entry" => {
                let before = event.vcpu.and_then(|vcpu| state.exits.insert(vcpu, None));
                match before {
                    Some(Some((reason, since))) => {
                        (self.exits.entry(reason).or_default()).took(event.ns - since)
                    }
                    Some(None) => self.unpaired += 1,
                    None => {}
                }
            }
            "kvm_mmio" if value("type") != u64::from(slat_trace::mmio::READ_UNSATISFIED) => {
                *self.gpas.entry(value("gpa")).or_default() += 1;
            }
            "kvm_pio" => *self.ports.entry(value("port")).or_default() += 1,
            "kvm_page_fault" => {
                let gfn = value("fault_address") >> 12;
                *self.gfns.entry(gfn).or_default() += 1;
                let vm = event.vcpu.map_or(0, |(vm, _)| vm.into());
                *self.faults.entry(state.slot_of(vm, gfn)).or_default() += 1;
            }
            "fast_page_fault"
                if value("error_code") & PFERR_WRITE != 0 && value("ret") == RET_PF_FIXED =>
            {
                *self.written.entry(value("cr2_or_gpa") >> 12).or_default() += 1;
            }
            "memslot" => {
                let slot = Slot {
                    vm: value("vm"),
                    space: value("as_id"),
                    id: value("slot"),
                };
                let base = value("base_gfn");
                match value("npages") {
                    0 => drop(state.slots.remove(&slot)),
                    pages => drop(state.slots.insert(slot, base..base.saturating_add(pages))),
                }
            }
            _ => {}
        }
    }
}

/// Returns the name of the reason of a `kvm_exit` record. The record's fields may be those of x86-64 or of arm64.
pub fn reason(trace: &Trace, event: &Event) -> String {
    let value = |field| trace.value(event, field);
    let (name, number) = match (value("exit_reason"), value("ret"), value("esr_ec")) {
        (None, Some(ret), Some(class)) => (arm_exit::name(ret, class), class),
        (number, ..) => (exit::name(number.unwrap_or(0)), number.unwrap_or(0)),
    };
    name.map_or_else(|| number.to_string(), str::to_owned)
}
