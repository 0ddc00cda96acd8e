//! Tests streams of requests from the seed corpus, and random streams.

mod common;

#[test]
fn streams_of_requests_break_nothing() {
    common::soak("ioctls", slat_streams::ioctls);
}
