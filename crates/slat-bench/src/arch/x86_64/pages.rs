//! Tests of the HTML pages of the experiments with guests.

use crate::html::page;
use crate::report::{Report, Sample, Unit};
use crate::{EXPERIMENTS, Experiment, Size};

fn report() -> Report {
    let mut report = Report::default();
    for (variant, faults) in [("off", 262_144), ("window-8", 32_768), ("adaptive", 513)] {
        let sample = Sample::count("pf_fixed", faults);
        report.add("prefetch", "sequential", variant, sample);
    }
    for (variant, seconds) in [("uncached", 1.25), ("cached", 2.5), ("kvm", 3.125)] {
        let sample = Sample::new("seconds", Unit::Seconds, seconds);
        report.add("mmio", "ordinary", variant, sample);
    }
    report.note("a < b & \"c\"".to_owned());
    report
}

fn known(names: &[&str]) -> Vec<&'static Experiment> {
    let known = EXPERIMENTS.iter();
    known.filter(|known| names.contains(&known.name)).collect()
}

fn of(names: &[&str]) -> String {
    page(&known(names), &report(), Size::Tiny)
}

#[test]
fn the_page_needs_nothing_else() {
    let page = of(&["prefetch", "mmio"]);
    for outside in ["http://", "https://", "<script", "<link", "src=", "@import"] {
        assert!(!page.contains(outside), "{outside}");
    }
    // Every reference in the page must refer to the page itself.
    assert_eq!(page.matches("url(").count(), page.matches("url(#").count());
}

#[test]
fn what_the_table_shows_stands_in_chart_and_table() {
    let page = of(&["prefetch", "mmio"]);
    for value in [
        "262,144", "32,768", "513", "1.25 s", "2.50 s", "3.12 s", "-87.5 %",
    ] {
        assert!(page.matches(&format!(">{value}<")).count() >= 2, "{value}");
    }
    // The page shows the published change, and the number to which this change reduces 262,144.
    assert!(page.contains(">-84.6 %<"));
    assert!(page.contains(">40,445<"));
}

#[test]
fn a_missed_mark_is_seen_above_all_in_the_chart_and_in_the_table() {
    let page = of(&["mmio"]);
    assert!(page.contains("0 of 1 reached"));
    assert_eq!(page.matches(">\u{2717} \u{b1} 1.0 %<").count(), 2);
    assert!(page.contains("<li>mmio ordinary seconds: \u{b1} 1.0 %</li>"));
}

#[test]
fn what_is_measured_with_cannot_break_the_page() {
    let page = of(&["mmio"]);
    assert!(page.contains("a &lt; b &amp; &quot;c&quot;"));
    assert!(!page.contains("a < b"));
}

#[test]
fn a_bar_is_drawn_for_each_variant_once_and_hatched_if_published() {
    let page = of(&["prefetch"]);
    let bars = |class: &str| page.matches(&format!("<rect class=\"{class}\" x=")).count();
    assert_eq!(bars("before"), 1);
    assert_eq!(bars("after-0"), 1);
    assert_eq!(bars("after-1"), 1);
    assert_eq!(bars("published"), 1);
    assert!(page.contains("logarithmic"));
    assert!(page.contains("limit: tables"));
}

#[test]
fn maps_show_what_maps_the_memory_before_and_after() {
    let report = crate::run(&known(&["execute"]), Size::Tiny).unwrap();
    let page = page(&known(&["execute"]), &report, Size::Tiny);
    // There are two squares of 2 MiB for each of three variants: one written, one executed.
    assert_eq!(page.matches("<svg class=\"map\"").count(), 6);
    for seen in [
        "pages: 1,024 in 2 MiB leaves \u{b7} 1,024 not executable \u{b7} 1,024 dirty",
        "1,024 in 4 KiB leaves",
    ] {
        assert!(page.contains(seen), "{seen}");
    }
    assert!(!page.contains("nothing is mapped"));
}
