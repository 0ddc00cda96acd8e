//! Tests guests from the seed corpus, and random guests.

mod common;

use slat_streams::guests::{COMPARED, compared};
use std::sync::atomic::Ordering;

#[test]
fn guests_break_nothing() {
    common::soak("guests", slat_streams::guests);
}

/// Runs guests with one vCPU that do not know the time.
#[test]
fn compiled_code_does_what_the_interpreter_does() {
    common::random("compared", |bytes| {
        let mut bytes = bytes.to_vec();
        bytes[0] = compared(bytes[0]);
        slat_streams::guests(&bytes);
    });
    eprintln!("{COMPARED:?}");
    assert!(COMPARED.exits.load(Ordering::Relaxed) > 0);
    assert!(COMPARED.guests.load(Ordering::Relaxed) > 0);
}
