//! The statistics that a process prints on standard error when it ends: counters of the memory system and of the CPUs,
//! for all VMs of the process.

use crate::arch::{self, Counters};
use crate::compiler;
use crate::counters::CpuCounts;
use crate::engine::EngineVm;
use crate::messages;
use crate::policy;
use crate::process::PerProcess;
use crate::vcpu_common;
use slat::Stats;
use std::fmt::Write as _;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The statistics of several VMs of the process.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    /// The number of VMs whose statistics are summed.
    pub vms: u64,
    /// The sums of the statistics of the VMs' memory systems.
    pub memory: Stats,
    /// The sums of the counters of the VMs' CPUs, in the order of [`Counters::NAMES`]. A running CPU contributes the
    /// counters that it had at its last exit.
    pub cpu: [u64; Counters::COUNT],
    /// The reason why no code is compiled. `None`: code is compiled.
    pub interprets: Option<&'static str>,
}

/// The statistics of VMs and vCPUs that have ended.
static ENDED: PerProcess<Mutex<Totals>> = PerProcess::new();

fn lock() -> MutexGuard<'static, Totals> {
    ENDED.get().lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the statistics of VMs and vCPUs that have ended.
pub(crate) fn ended() -> Totals {
    *lock()
}

pub(crate) fn vm_ends(vm: &EngineVm) {
    let memory = vm.stats();
    let mut ended = lock();
    ended.vms += 1;
    ended.memory.add(&memory);
}

pub(crate) fn vcpu_ends(counts: &CpuCounts) {
    counts.add_to(&mut lock().cpu);
}

/// Returns the statistics of the process's VMs, live and ended.
pub fn totals() -> Totals {
    let mut sum = ended();
    for vm in crate::notify::live() {
        sum.vms += 1;
        sum.memory.add(&vm.stats());
    }
    vcpu_common::add_cpu_counters(&mut sum.cpu);
    sum.interprets = compiler::why_not();
    sum
}

/// Explains a counter to users who do not know KVM's names.
fn meaning(counter: &str) -> &'static str {
    match counter {
        "pf_taken" => "faults: no table entry allowed the access",
        "pf_fixed" => "  installed or widened a leaf",
        "pf_spurious" => "  found the leaf there: another vCPU was faster",
        "pf_fast" => "  of these two, without memslot and host look-up",
        "pf_retried" => "  repeated: memory changed meanwhile",
        "pf_emulate" => "  found no memslot",
        "pf_mmio_spte_created" => "MMIO SPTEs created",
        "mmio_cached" => "MMIO accesses answered by an entry, no look-up",
        "slot_lookups" => "memslot look-ups",
        "slot_lookups_saved" => "  saved, by a slot found before",
        "guest_pte_reads" => "entries of the guest's own tables read by the CPU",
        "pages_4k" => "leaves of 4 KiB, now",
        "pages_2m" => "leaves of 2 MiB, now",
        "pages_1g" => "leaves of 1 GiB, now",
        "splits" => "huge leaves split in place",
        "nx_lpage_splits" => "tables of small leaves only because of NX, now",
        "split_entries_visited" => "table entries that eager splits visited",
        "prefetched" => "pages mapped ahead of their use",
        "mmu_cache_miss" => "shadow pages made",
        "mmu_shadow_zapped" => "  zapped",
        "mmu_recycled" => "  of these, because there were too many",
        "mmu_pte_write" => "stores to the guest's tables that were noticed",
        "mmu_pde_zapped" => "  entries for tables zapped for that",
        "mmu_flooded" => "  shadow pages of tables that are none any more",
        "mmu_unsync" => "shadow pages that do not follow the guest's table, now",
        "pf_guest" => "page faults of the guest's own",
        "invlpg" => "INVLPG instructions",
        "zapped" => "leaves zapped",
        "remote_tlb_flush" => "flushes of all vCPUs",
        "remote_tlb_flush_requests" => "  requested",
        "invalidations" => "changes of host memory that a memslot uses",
        "slot_changes" => "memslots created, deleted, moved",
        "dirty_pages" => "pages marked in dirty logs",
        counter => arch::meaning(counter),
    }
}

/// Formats the statistics as a table for the user.
pub fn render(totals: &Totals) -> String {
    let vms = match totals.vms {
        1 => "1 VM".to_owned(),
        vms => format!("{vms} VMs"),
    };
    let mut text = format!("slat: memory system of {vms}\n");
    list(&mut text, totals.memory.iter());
    let cpu = Counters::NAMES.into_iter().zip(totals.cpu);
    if totals.cpu.iter().any(|count| *count != 0) {
        let _ = writeln!(text, "slat: software CPU of {vms}");
        list(&mut text, cpu);
        if let Some(why) = totals.interprets {
            let _ = writeln!(text, "  (no code is compiled: {why})");
        }
    }
    text
}

/// Adds a line for each counter that is not 0.
fn list(text: &mut String, counters: impl Iterator<Item = (&'static str, u64)>) {
    let before = text.len();
    for (name, value) in counters.filter(|(_, value)| *value != 0) {
        let line = format!("  {name:<26}{:>13}  {}", grouped(value), meaning(name));
        let _ = writeln!(text, "{}", line.trim_end());
    }
    if text.len() == before {
        text.push_str("  (nothing happened)\n");
    }
}

/// Prints the statistics if the environment asks for them and the process has created VMs. A shell that only starts the
/// KVM program has created none, and prints nothing. Call at the end of the process.
pub fn at_exit() {
    if !policy::current().is_ok_and(|policies| policies.stats) {
        return;
    }
    let totals = totals();
    if totals.vms != 0 {
        messages::print(&render(&totals));
    }
}

/// Formats a number with its digits in groups of three: `1,234,567`.
pub fn grouped(value: u64) -> String {
    let digits = value.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index != 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_readable() {
        assert_eq!(grouped(7), "7");
        assert_eq!(grouped(1234567), "1,234,567");
        let mut totals = Totals {
            vms: 2,
            ..Totals::default()
        };
        totals.memory.pf_fixed = 16384;
        let text = render(&totals);
        assert!(text.contains("2 VMs") && text.contains("16,384"), "{text}");
    }
}
