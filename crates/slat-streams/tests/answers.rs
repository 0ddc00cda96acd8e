//! Tests that slat's results agree with the lists of KVM's results, and that the host kernel's results do, except for
//! the differences that the lists name.
//!
//! The test runs on any kernel and processor. The test prints a difference that no list names, and fails for that
//! difference only with `SLAT_TEST_KERNEL=strict`, which `.ci/full` sets. `--nocapture` also shows the differences that
//! the lists name.

use slat_streams::answers::api::Who;
use slat_streams::answers::edges::Difference;
use slat_streams::answers::{fresh, rules};
use std::io::Write;

fn both(check: impl Fn(Who) -> Vec<Difference>) {
    let wrong = check(Who::Slat);
    assert!(wrong.is_empty(), "{wrong:#?}");
    let mut unknown = Vec::new();
    for Difference { what, why } in check(Who::Kernel) {
        match why {
            Some(why) => println!("the host's kernel: {what}: {why}"),
            None => unknown.push(what),
        }
    }
    if !unknown.is_empty() {
        // A macro would print to the test harness, which would hide the text.
        let _ = writeln!(
            std::io::stderr(),
            "the host's kernel, unknown: {unknown:#?}"
        );
    }
    let strict = std::env::var("SLAT_TEST_KERNEL").is_ok_and(|value| value == "strict");
    assert!(!strict || unknown.is_empty(), "{unknown:#?}");
}

#[test]
fn set_requests_refuse_what_kvm_refuses() {
    both(|who| rules::all().flat_map(|rule| rule.check(who)).collect());
}

#[test]
fn new_objects_are_in_kvms_state() {
    both(|who| {
        let all = fresh::all();
        let mut wrong: Vec<_> = all.iter().filter_map(|one| one.check(who)).collect();
        wrong.extend(fresh::check_msrs(who));
        wrong
    });
}
