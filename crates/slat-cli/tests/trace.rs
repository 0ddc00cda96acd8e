//! `slat run --trace` and `slat trace` as a user sees them.
#![cfg(target_arch = "x86_64")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;
use slat_trace::read::{Event, Trace};

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
    for (mmu, own) in [
        ("tdp", "handle_mmio_page_fault"),
        ("direct", "kvm_mmu_get_page"),
        ("shadow", "kvm_mmu_unsync_page"),
    ] {
        let file = File::new(&format!("totals-{mmu}"));
        let said = file.demo(&["--stats", "--mmu", mmu, "--trace-buffer", "8"]);
        let report = file.report();
        let count = |name: &str| report["counts"][name].as_u64().unwrap();
        assert_eq!((&report["lost"], &report["vcpus"]), (&0.into(), &2.into()));
        assert!(count(own) > 0 || mmu == "shadow", "{own}");
        for (point, counted) in [
            ("kvm_page_fault", "pf_taken"),
            ("mark_mmio_spte", "pf_mmio_spte_created"),
            ("handle_mmio_page_fault", "mmio_cached"),
            ("kvm_mmu_split_huge_page", "splits"),
            ("flush_begin", "remote_tlb_flush"),
            ("flush_end", "remote_tlb_flush"),
            ("memslot", "slot_changes"),
        ] {
            assert_eq!(
                count(point),
                counter(&said, counted),
                "{mmu}: {point}, {counted}"
            );
        }
        assert_eq!(count("kvm_entry"), count("kvm_exit"));
        let trace = Trace::read(&file.0).unwrap();
        let made = |event: &&Event| trace.value(event, "created") == Some(1);
        let events = trace.threads.iter().flat_map(|thread| &thread.events);
        let made = events.filter(made).count() as u64;
        assert_eq!(made, counter(&said, "mmu_cache_miss"));
        let faults = report["faults_by_slot"].as_array().unwrap().iter();
        let faults: u64 = faults.map(|slot| slot["faults"].as_u64().unwrap()).sum();
        assert_eq!(faults, count("kvm_page_fault"));
        let exits = report["exits"].as_object().unwrap().values();
        let exits: u64 = exits.map(|exits| exits["samples"].as_u64().unwrap()).sum();
        assert_eq!(exits, count("kvm_exit"));
    }
}

#[test]
fn a_killed_process_leaves_a_file_that_can_be_read() {
    let file = File::new("killed");
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command
        .args(["run", "--trace", file.path()])
        .stdout(Stdio::null());
    let mut child = command.spawn().unwrap();
    let began = Instant::now();
    while Trace::read(&file.0).map_or(0, |trace| trace.count("kvm_exit")) < 100 {
        assert!(began.elapsed() < Duration::from_secs(60) && child.try_wait().unwrap().is_none());
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(
        file.report()["exits"]["EPT_MISCONFIG"]["samples"]
            .as_u64()
            .unwrap()
            > 50
    );
}

#[test]
fn a_trace_becomes_one_of_perfettos() {
    let (file, converted) = (File::new("perfetto"), File::new("perfetto.pftrace"));
    file.demo(&[]);
    let output = slat(&["trace", "convert", file.path(), converted.path()]);
    assert!(output.status.success(), "{output:?}");
    let bytes = fs::read(&converted.0).unwrap();
    // A file is packets, each with the tag of field 1 of `Trace` (length-delimited), and its length.
    let (mut rest, mut packets) = (&bytes[..], 0);
    while let [0x0a, after @ ..] = rest {
        let end = after.iter().position(|byte| byte & 0x80 == 0).unwrap();
        let digits = after[..=end].iter().rev();
        let len = digits.fold(0, |len, byte| len << 7 | usize::from(byte & 0x7f));
        rest = &after[end + 1 + len..];
        packets += 1;
    }
    assert!(rest.is_empty() && packets > 20_000, "{packets}");
    let has = |text: &str| {
        bytes
            .windows(text.len())
            .any(|part| part == text.as_bytes())
    };
    for text in [
        "VM 0 vCPU 1",
        "EPT_MISCONFIG",
        "guest",
        "client",
        "kvm_mmio",
        "gpa",
    ] {
        assert!(has(text), "{text}");
    }
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
