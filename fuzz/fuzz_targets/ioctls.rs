//! See [`slat_streams::ioctls`].
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| slat_streams::ioctls(bytes));
