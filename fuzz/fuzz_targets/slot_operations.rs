//! See [`slat_model::streams::slot_operations`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slat_model::streams::slot_operations(bytes));
