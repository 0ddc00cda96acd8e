//! Guests from the seed corpus, and random ones.

mod common;

#[test]
fn guests_break_nothing() {
    common::soak("guests", slat_streams::guests);
}
