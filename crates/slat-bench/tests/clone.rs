//! Tests the experiment about clones in a process of its own, because the experiment measures the memory of the
//! process.

use slat_bench::{EXPERIMENTS, Size};

#[test]
fn a_clone_shares_what_it_does_not_write() {
    let known = EXPERIMENTS.iter().find(|known| known.name == "clone");
    let Some(experiment) = known else {
        // The clones are guests, and slat runs no guests of this architecture yet.
        assert!(slat_bench::missing().contains(&"clone"));
        return;
    };
    let report = slat_bench::run(&[experiment], Size::Tiny).unwrap();
    assert_eq!(
        report.cases("clone"),
        ["together/1", "together/2", "together/3"]
    );
    let bytes = |variant| report.value("clone", "together/2", variant, "private_bytes");
    let (clone, anew) = (bytes("clone").unwrap(), bytes("anew").unwrap());
    // A VM has 1 MiB of its own, and a clone shares all of it except 16 pages.
    assert!(clone + 512e3 < anew, "{clone} {anew}");
}
