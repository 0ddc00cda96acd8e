//! The scenarios. Each scenario makes its own VM, makes the guest run commands, and compares three accounts: the CPU's
//! reports, the engine's counts, and the writes to memory.

mod age;
mod cached;
mod cpus;
mod dirty;
mod faults;
mod guest_tables;
mod migrate;
mod mmio;
mod nx;
mod slots;
mod split;
mod stale;
mod vmids;

use alloc::string::String;

use slat::{Format, Granule};

use crate::Machine;
use crate::bench::Bench;
use crate::guest::Tables;

/// Some numbers of a scenario that has passed, or the unexpected result.
type Verdict = Result<String, String>;
type Scenario<M> = fn(&mut Bench<'_, M>) -> Verdict;

/// Returns all scenarios for the machine's tables, in the order in which they run.
pub(crate) fn all<M: Machine>() -> impl Iterator<Item = (&'static str, Scenario<M>)> {
    let all: [(&'static str, Scenario<M>); 18] = [
        ("demand_faults_4k", faults::of_4k),
        ("demand_faults_2m", faults::of_2m),
        ("prefetch_window", faults::prefetch_window),
        ("mmio", mmio::cached),
        (
            "mmio_becomes_memory_and_back",
            mmio::becomes_memory_and_back,
        ),
        ("read_only_slot", mmio::read_only_slot),
        ("dirty_log_by_write_protection", dirty::by_write_protection),
        ("dirty_log_by_dirty_bit", dirty::by_dirty_bit),
        ("dirty_log_by_buffer", dirty::by_buffer),
        ("eager_split", dirty::eager_split),
        ("accessed_bits", age::of_pages),
        (
            "two_cpus_fault_in_the_same_tables",
            cpus::fault_in_the_same_tables,
        ),
        ("a_kick_takes_a_cpu_out_of_the_guest", cpus::a_kick),
        ("slot_deleted_under_a_running_guest", slots::deleted),
        ("slot_moved_under_a_running_guest", slots::moved),
        ("stale_translation", stale::on_one_cpu),
        ("stale_translation_on_another_cpu", stale::on_another_cpu),
        ("more_vms_than_vmids", vmids::more_vms_than_vmids),
    ];
    // These scenarios count pages of 4 KiB and huge pages of 2 MiB, of which the GiB of data has many.
    let small_pages: [(&'static str, Scenario<M>); 10] = [
        ("demand_faults_1g", faults::of_1g),
        ("nx_huge_page_2m", nx::huge_page_2m),
        ("nx_huge_page_1g", nx::huge_page_1g),
        ("splits_under_a_running_guest", split::under_a_running_guest),
        ("dirty_log_cleared_by_hand", dirty::cleared_by_hand),
        (
            "migration_by_write_protection",
            migrate::by_write_protection,
        ),
        ("migration_by_dirty_bit", migrate::by_dirty_bit),
        (
            "migration_of_one_page_by_write_protection",
            migrate::of_one_page_by_write_protection,
        ),
        (
            "migration_of_one_page_by_dirty_bit",
            migrate::of_one_page_by_dirty_bit,
        ),
        ("accessed_bits_2m", age::of_huge_pages),
    ];
    // The record of cached entries begins at fixed roots, but the roots of shadow tables are made and zapped.
    let second_level: [(&'static str, Scenario<M>); 1] = [(
        "what_walkers_may_have_cached",
        cached::under_a_running_guest,
    )];
    let shadow: [(&'static str, Scenario<M>); 6] = [
        ("stores_to_an_upper_table", guest_tables::upper),
        ("stores_to_a_last_table", guest_tables::last),
        ("two_address_spaces", guest_tables::roots),
        ("faults_of_the_guest", guest_tables::faults),
        (
            "stores_to_an_upper_table_of_another_cpu",
            guest_tables::upper_beside,
        ),
        (
            "stores_to_the_root_of_another_cpu",
            guest_tables::root_beside,
        ),
    ];
    let is_small = Tables::<M>::GRANULE == Granule::Kib4;
    let (second_level, shadow) = match Tables::<M>::SHADOWS {
        true => (None, Some(shadow)),
        false => (Some(second_level).filter(|_| is_small), None),
    };
    let small_pages = Some(small_pages).filter(|_| is_small);
    (all.into_iter())
        .chain(small_pages.into_iter().flatten())
        .chain(second_level.into_iter().flatten())
        .chain(shadow.into_iter().flatten())
}
