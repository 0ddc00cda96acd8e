//! Operations of the host and faults, interleaved at every step of one of them. A step is a table that was reached, a
//! page that was resolved, resident pages that were found, a frame that was allocated, or a wait ([`interleave`]). The
//! holder uses translations that it got before, and checks each use.

mod break_before_make;
mod cases;
mod changes;
#[path = "../common/mod.rs"]
mod common;
mod harness;
#[path = "../common/interleave.rs"]
mod interleave;
mod several;

use common::{direct, tdp};
use slat::Ept;
use slat::format::{
    Ept5, Npt, Npt5, Stage2, Stage2Kib16, Stage2Kib64, Sv39x4, Sv48x4, Sv57x4, X86,
};

macro_rules! tests {
    ($repeats:tt, $mmu:path, $format:ty: $($test:ident,)*) => {$(
        #[test]
        #[cfg_attr($repeats, ignore = "takes the paths of another format; .ci/full")]
        fn $test() {
            $mmu(harness::World::<$format>::$test);
        }
    )*};
}

/// Runs the cases on formats. The first word tells whether other formats take the same paths; then running the case in
/// `.ci/full` suffices.
macro_rules! on_formats {
    ($repeats:tt: $($name:ident: $mmu:path, $format:ty,)*) => {$(
        mod $name {
            use super::*;
            tests! { $repeats, $mmu, $format:
                a_fault_and_an_invalidation_of_its_page,
                a_fault_and_an_invalidation_of_another_page_of_its_leaf,
                a_fault_that_begins_during_an_invalidation,
                a_fault_and_the_replacement_of_its_slot,
                a_slot_that_leaves_while_its_backing_is_invalidated,
                a_fault_and_a_slot_that_moves_over_itself,
                a_write_and_a_harvest_of_its_log,
                an_invalidation_that_finds_nothing_waits_for_whoever_is_zapping,
                a_log_taken_while_its_pages_are_zapped_loses_no_write,
                the_begin_and_the_end_of_logging_beside_faults_and_invalidations,
                a_write_after_logging_began_is_in_the_log_whatever_is_zapped_meanwhile,
                a_log_that_begins_while_initially_set_is_switched_names_every_write,
                a_slot_that_moves_over_itself_takes_its_dirty_bits_along,
                two_faults_on_one_page,
                an_mmio_access_and_a_slot_that_appears_there,
                a_fault_that_sees_old_leaves_of_a_slot_that_moves_over_itself,
                the_end_of_logging_and_a_fault,
                the_end_of_logging_and_what_makes_its_leaves_wrong,
                nx_recovery_and_a_fault,
                a_zap_and_a_fault_that_maps_a_larger_leaf,
                nx_huge_pages_switched_on_and_an_execution_fault,
                a_fault_that_clears_a_table_and_another_fault,
                an_execution_fault_that_zaps_a_huge_leaf_and_another,
                a_conversion_and_a_fault,
                a_slot_that_moves_over_itself_and_a_fault,
                an_invalidated_page_of_a_huge_leaf_and_a_fault_on_another,
                a_log_taken_while_its_slot_moves_loses_no_write,
                logging_that_begins_beside_a_move_misses_no_write,
                a_slot_that_appears_where_another_leaves_is_all_that_is_seen_there,
                a_slot_that_moves_to_where_another_leaves_is_all_that_is_seen_there,
                a_conversion_to_what_is_being_converted_to,
                a_zap_that_knows_the_old_place_of_a_slot_notes_no_other_page,
                a_fault_and_a_slot_that_becomes_two,
                a_fault_and_two_slots_that_become_one,
                an_invalidation_and_slots_that_take_the_place_of_others,
                a_log_taken_while_its_slot_becomes_two_loses_no_write,
            }
        }
    )*};
}

on_formats! { false:
    ept: tdp, Ept,
    ept_direct: direct, Ept,
    x86_with_5_levels: tdp, X86<5>,
    stage_2: tdp, Stage2<48>,
    stage_2_with_hardware_dirty_state: tdp, Stage2<48, true>,
}

on_formats! { true:
    ept_with_5_levels: tdp, Ept5,
    ept_with_5_levels_direct: direct, Ept5,
    npt: tdp, Npt,
    npt_with_5_levels: tdp, Npt5,
    npt_direct: direct, Npt,
    stage_2_with_a_concatenated_root: tdp, Stage2<40>,
    stage_2_with_52_bits: tdp, Stage2<52>,
    stage_2_of_16k: tdp, Stage2Kib16<48>,
    stage_2_of_64k: tdp, Stage2Kib64<52>,
    sv39x4: tdp, Sv39x4,
    sv48x4: tdp, Sv48x4,
    sv57x4: tdp, Sv57x4,
}
