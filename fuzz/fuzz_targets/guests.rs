//! See [`slat_streams::guests`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slat_streams::guests(bytes));
