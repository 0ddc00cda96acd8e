//! See [`slat_model::streams::operation_streams`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slat_model::streams::operation_streams(bytes));
