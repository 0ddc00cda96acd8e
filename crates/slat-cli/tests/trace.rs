//! `slat run --trace` and `slat trace` as a user sees them.
#![cfg(target_arch = "x86_64")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use slat_trace::read::Trace;

/// The file of one test, removed at its end.
struct File(PathBuf);

impl File {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("trace-{name}"));
        let _ = fs::remove_file(&path);
        File(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().unwrap()
    }

    /// Runs the built-in program with a trace. Returns what it printed.
    fn demo(&self, options: &[&str]) -> String {
        let output = slat(&[&["run", "--trace", self.path()], options].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn report(&self) -> Value {
        let output = slat(&["trace", "report", "--json", self.path()]);
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }
}

impl Drop for File {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn slat(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command
        .args(arguments)
        .env_remove("SLAT_TRACE")
        .output()
        .unwrap()
}

/// Returns a counter of what `slat run --stats` has printed; 0 if it is not there.
fn counter(text: &str, name: &str) -> u64 {
    let mut lines = text.lines().map(str::split_whitespace);
    let line = lines.find_map(|mut words| (words.next() == Some(name)).then(|| words.next()));
    line.flatten()
        .map_or(0, |value| value.replace(',', "").parse().unwrap())
}

#[test]
fn the_totals_are_those_of_the_counters() {
    let file = File::new("totals");
    let said = file.demo(&["--stats"]);
    let report = file.report();
    let count = |name: &str| report["counts"][name].as_u64().unwrap();
    assert_eq!(report["lost"], 0);
    assert_eq!(count("kvm_entry"), count("kvm_exit"));
    assert!(count("kvm_exit") > 8000);
    // The built-in program creates four slots, deletes one, and creates it again.
    assert_eq!(count("memslot"), 6);
    assert_eq!(counter(&said, "slot_changes"), 6);
    assert_eq!(report["vcpus"], 2);
}

#[test]
fn each_vcpu_enters_and_leaves_in_turns() {
    let file = File::new("pairs");
    file.demo(&["--trace-events", "kvm_entry,kvm_exit"]);
    let trace = Trace::read(&file.0).unwrap();
    for thread in &trace.threads {
        assert_eq!(thread.dropped, 0);
        for pair in thread.events.chunks(2) {
            let names = pair
                .iter()
                .map(|event| trace.points[event.point].name.as_str());
            assert!(names.eq(["kvm_entry", "kvm_exit"]));
            assert_eq!(pair[0].vcpu, pair[1].vcpu);
            let id = trace.value(&pair[0], "vcpu_id").unwrap();
            assert_eq!(pair[0].vcpu, Some((0, id as u32)));
            assert!(pair[0].ns <= pair[1].ns);
        }
    }
}

#[test]
fn a_list_selects_tracepoints() {
    let file = File::new("selected");
    file.demo(&["--trace-events", "kvm_mmio,slat"]);
    let report = file.report();
    let counts = report["counts"].as_object().unwrap();
    assert!(counts["kvm_mmio"].as_u64().unwrap() > 8000 && counts.contains_key("memslot"));
    assert!(!counts.contains_key("kvm_exit"));
    let refused = slat(&["run", "--trace", file.path(), "--trace-events", "kvm_mmios"]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("kvm_userspace_exit"));
}

#[test]
fn a_small_buffer_keeps_the_latest_and_counts_the_rest() {
    let file = File::new("small");
    file.demo(&["--trace-buffer", "1"]);
    let report = file.report();
    let counts = report["counts"].as_object().unwrap();
    let written: u64 = counts.values().map(|count| count.as_u64().unwrap()).sum();
    let left = |name: &str| report[name].as_u64().unwrap();
    assert!(left("dropped") > 0);
    assert_eq!(left("records") + left("dropped"), written);
}

#[test]
fn an_old_file_makes_way_and_other_things_do_not() {
    let file = File::new("old");
    fs::write(&file.0, "old").unwrap();
    file.demo(&[]);
    assert!(file.report()["records"].as_u64().unwrap() > 0);
    for (path, message) in [("/", "is no file"), ("/nowhere/trace", "No such file")] {
        let output = slat(&["run", "--trace", path]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.contains(message), "{said}");
    }
    let output = slat(&["trace", "report", "/nowhere/trace"]);
    assert_eq!(output.status.code(), Some(1));
}
