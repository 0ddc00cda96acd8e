//! Tests `slat run --trace` and `slat trace` as a user sees them.
#![cfg(target_arch = "x86_64")]

use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use prost::Message;
use serde_json::Value;
use slat_trace::read::{Event, Trace};

/// The checked parts of Perfetto's format, with the field numbers of its `trace_packet.proto` and
/// `track_event.proto`.
mod perfetto {
    use prost::Message;

    pub const SLICE_BEGIN: i32 = 1;
    pub const SLICE_END: i32 = 2;
    pub const INSTANT: i32 = 3;

    #[derive(Clone, PartialEq, Message)]
    pub struct Trace {
        #[prost(message, repeated, tag = "1")]
        pub packet: Vec<Packet>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Packet {
        #[prost(uint64, tag = "8")]
        pub timestamp: u64,
        #[prost(message, optional, tag = "11")]
        pub track_event: Option<Event>,
        #[prost(message, optional, tag = "60")]
        pub track_descriptor: Option<Track>,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Event {
        #[prost(int32, tag = "9")]
        pub r#type: i32,
        #[prost(uint64, tag = "11")]
        pub track_uuid: u64,
    }

    #[derive(Clone, PartialEq, Message)]
    pub struct Track {
        #[prost(uint64, tag = "1")]
        pub uuid: u64,
    }
}

/// The trace file of one test. Dropping this removes it.
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

    /// Runs the built-in program with a trace. Returns its output.
    fn demo(&self, options: &[&str]) -> String {
        let output = slat(&[&["run", "--trace", self.path()], options].concat());
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Like [`File::demo`], but with a buffer that holds all records. Such a buffer must be large, because a vCPU
    /// that waits for the other one polls a device all the time. Returns the program's output, and the report.
    fn whole_demo(&self, options: &[&str]) -> (String, Value) {
        for mib in ["8", "32", "128", "512"] {
            let said = self.demo(&[options, &["--trace-buffer", mib]].concat());
            let report = self.report();
            if report["dropped"] == 0 {
                return (said, report);
            }
        }
        panic!("no buffer holds the records");
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

/// Returns the value of a counter in the output of `slat run --stats`, or 0 if it is not there.
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
        let (said, report) = file.whole_demo(&["--stats", "--mmu", mmu]);
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
            ("fast_page_fault", "pf_fast"),
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
    let packets = perfetto::Trace::decode(&bytes[..]).unwrap().packet;
    assert!(packets.len() > 20_000, "{}", packets.len());
    // On each track, times never decrease, and each slice that begins also ends, except the last ones.
    let mut tracks = HashMap::<_, (u64, u64)>::new();
    for packet in &packets {
        let Some(event) = &packet.track_event else {
            continue;
        };
        let (since, open) = tracks.entry(event.track_uuid).or_default();
        assert!(*since <= packet.timestamp);
        *since = packet.timestamp;
        match event.r#type {
            perfetto::SLICE_BEGIN => *open += 1,
            perfetto::SLICE_END => *open = open.checked_sub(1).expect("a slice to end"),
            kind => assert_eq!(kind, perfetto::INSTANT),
        }
    }
    assert!(tracks.values().all(|(_, open)| *open <= 1), "{tracks:?}");
    let tracks_of = packets
        .iter()
        .filter_map(|packet| packet.track_descriptor.as_ref());
    let named: HashSet<_> = tracks_of.map(|track| track.uuid).collect();
    assert!(
        tracks.keys().all(|track| named.contains(track)),
        "{named:?}"
    );
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
    file.whole_demo(&["--trace-events", "kvm_entry,kvm_exit"]);
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

#[test]
fn code_has_the_names_of_a_symbol_table() {
    let (file, symbols) = (File::new("named"), File::new("named.map"));
    file.demo(&["--trace-events", "kvm_exit"]);
    // The guest's code begins at this address.
    fs::write(&symbols.0, "0000000000008000 T the_guest\n").unwrap();
    let named = ["--guest-symbols", symbols.path()];
    let text = slat(&[&["trace", "report", file.path()], &named[..]].concat());
    assert!(
        String::from_utf8(text.stdout)
            .unwrap()
            .contains("  the_guest+0x")
    );
    let json = slat(&[&["trace", "report", "--json", file.path()], &named[..]].concat());
    let report: Value = serde_json::from_slice(&json.stdout).unwrap();
    let hottest = &report["rips"][0];
    let offset = hottest["address"].as_u64().unwrap() - 0x8000;
    assert_eq!(hottest["name"], format!("the_guest+{offset:#x}"));
    assert_eq!(file.report()["rips"][0].get("name"), None);
    let refused = slat(&[
        "trace",
        "report",
        file.path(),
        "--guest-symbols",
        "/nowhere",
    ]);
    assert_eq!(refused.status.code(), Some(1));
}

/// Returns the next pseudo-random number.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn a_damaged_file_is_read_or_refused() {
    let (file, damaged) = (File::new("whole"), File::new("damaged"));
    let converted = File::new("damaged.pftrace");
    file.demo(&["--trace-buffer", "1"]);
    let whole = fs::read(&file.0).unwrap();
    // Damage only the header, its text, and the headers and first records of two rings: damage elsewhere has no
    // effect.
    let ring = |index: usize| (16 << 10) + (index << 20);
    let places = [
        0..512,
        512..4096,
        ring(0)..ring(0) + 8192,
        ring(1)..ring(1) + 8192,
    ];
    // The end of the rings of all threads.
    let end = ring(6).min(whole.len());
    let mut state = 0x9e37_79b9_7f4a_7c15;
    let (mut read, mut refused) = (0, 0);
    for round in 0..60 {
        let mut bytes = whole[..end].to_vec();
        for _ in 0..=round % 7 {
            let place = places[next(&mut state) as usize % places.len()].clone();
            let at = place.start + next(&mut state) as usize % (place.len() - 8);
            let wrong = [0, 1, u64::MAX, i64::MAX as u64, next(&mut state)];
            let wrong = wrong[next(&mut state) as usize % wrong.len()].to_le_bytes();
            // Damage a whole word, or one byte.
            let (at, len) = if round % 2 == 0 {
                (at & !7, 8)
            } else {
                (at, 1)
            };
            bytes[at..at + len].copy_from_slice(&wrong[..len]);
        }
        if round % 5 == 0 {
            bytes.truncate(next(&mut state) as usize % end);
        }
        fs::write(&damaged.0, &bytes).unwrap();
        for command in [
            &["trace", "report", damaged.path()][..],
            &["trace", "report", "--json", damaged.path()],
            &["trace", "convert", damaged.path(), converted.path()],
        ] {
            let output = slat(command);
            let said = String::from_utf8_lossy(&output.stderr);
            match output.status.code() {
                Some(0) => read += 1,
                Some(1) if said.starts_with("slat: trace: ") => refused += 1,
                _ => panic!("round {round}, {command:?}: {:?}, {said}", output.status),
            }
        }
    }
    assert!(read > 10 && refused > 10, "{read} read, {refused} refused");
}
