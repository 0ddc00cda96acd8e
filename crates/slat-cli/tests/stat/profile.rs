//! The names of guest code: in perf's map, and in slat's own profiles.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use super::harness::{Scratch, text};

/// The names of the client's code, as in System.map.
const SYMBOLS: &str = "0000000000200000 T guest_main\n0000000000201000 T slow_function\n0000000000202000 t fast_function\n";

fn symbols(scratch: &Scratch) -> PathBuf {
    let file = scratch.0.join("System.map");
    fs::write(&file, SYMBOLS).unwrap();
    file
}

/// Waits until `found` returns something of the file.
fn wait_for<T>(file: &str, found: impl Fn(&str) -> Option<T>) -> T {
    let begin = Instant::now();
    loop {
        let content = fs::read_to_string(file).unwrap_or_default();
        if let Some(found) = found(&content) {
            return found;
        }
        assert!(
            begin.elapsed() < Duration::from_secs(30),
            "{file}: {content}"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn perf_names_guest_functions() {
    let scratch = Scratch::new("perf-map");
    let symbols = symbols(&scratch);
    let options = [
        "--set",
        "jit_map=on",
        "--guest-symbols",
        symbols.to_str().unwrap(),
    ];
    let client = scratch.start(&options, "calls_functions");
    let map = format!("/tmp/perf-{}.map", client.pid());
    // The hot loop is compiled by both tiers.
    wait_for(&map, |map| {
        let lines = map
            .lines()
            .filter(|line| line.contains(" guest:slow_function"));
        (lines.count() >= 2).then_some(())
    });
    let data = scratch.0.join("perf.data");
    let record = Command::new("perf")
        .args(["record", "-q", "-e", "cpu-clock", "-F", "500", "-o"])
        .arg(&data)
        .args(["-p", &client.pid().to_string(), "--", "sleep", "1"])
        .output();
    let reported = record.map(|record| {
        if !record.status.success() {
            return Err(text(&record.stderr));
        }
        let mut report = Command::new("perf");
        let report = report.args(["report", "--stdio", "-i"]).arg(&data).output();
        Ok(text(&report.unwrap().stdout))
    });
    match reported {
        Ok(Ok(report)) => assert!(report.contains("guest:slow_function"), "{report}"),
        Ok(Err(why)) => eprintln!("skipped: perf does not record here: {why}"),
        Err(error) => eprintln!("skipped: there is no perf: {error}"),
    }
    drop(client);
    fs::remove_file(map).unwrap();
}

#[test]
fn without_symbols_code_is_named_by_its_address() {
    let scratch = Scratch::new("perf-map-addresses");
    let client = scratch.start(&["--set", "jit_map=on"], "calls_functions");
    let map = format!("/tmp/perf-{}.map", client.pid());
    wait_for(&map, |map| map.contains(" guest:0x201008\n").then_some(()));
    drop(client);
    fs::remove_file(map).unwrap();
}

#[test]
fn symbols_that_cannot_be_read_are_an_error_at_once() {
    let scratch = Scratch::new("no-symbols");
    for file in ["/dev/null", "/nowhere"] {
        let mut run = scratch.slat(&["run", "--guest-symbols", file, "--", "true"]);
        let output = run.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let error = text(&output.stderr);
        assert!(
            error.contains(file) && error.lines().count() == 1,
            "{error}"
        );
    }
}
