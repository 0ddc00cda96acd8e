//! The names of guest code: in perf's map, and in slat's own profiles.

use std::collections::BTreeMap;
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

/// Returns the samples of a profile by stack.
fn samples(profile: &str) -> BTreeMap<&str, u64> {
    let lines = profile.lines().map(|line| line.rsplit_once(' ').unwrap());
    lines
        .map(|(stack, count)| (stack, count.parse().unwrap()))
        .collect()
}

/// Returns the samples of both functions if there are enough to compare them.
fn compared(profile: &str) -> Option<(u64, u64)> {
    let samples = samples(profile);
    let of = |stack| samples.get(stack).copied().unwrap_or_default();
    let both = (
        of("guest_main;slow_function"),
        of("guest_main;fast_function"),
    );
    (both.0 + both.1 > 400).then_some(both)
}

fn assert_three_to_one((slow, fast): (u64, u64)) {
    let ratio = slow as f64 / fast as f64;
    assert!((2.2..4.5).contains(&ratio), "{slow} to {fast}");
}

#[test]
fn a_profile_is_there_while_the_process_runs_and_after_it_was_killed() {
    let scratch = Scratch::new("profile");
    let (symbols, file) = (symbols(&scratch), scratch.0.join("profile"));
    let file = file.to_str().unwrap();
    fs::write(file, "old").unwrap();
    let options = [
        "--profile",
        file,
        "--guest-symbols",
        symbols.to_str().unwrap(),
    ];
    let mut client = scratch.start(&options, "calls_functions");
    assert_three_to_one(wait_for(file, compared));
    client.kill();
    assert_three_to_one(compared(&fs::read_to_string(file).unwrap()).unwrap());
}

#[test]
fn a_confined_process_writes_its_last_samples() {
    let scratch = Scratch::new("profile-confined");
    let file = scratch.0.join("profile");
    let file = file.to_str().unwrap();
    let mut client = scratch.start(&["--profile", file], "calls_functions_confined");
    let first = wait_for(file, |profile| {
        Some(total(profile)).filter(|total| *total > 0)
    });
    std::thread::sleep(Duration::from_millis(700));
    client.proceed();
    assert!(client.process.wait().unwrap().success());
    let profile = fs::read_to_string(file).unwrap();
    assert!(total(&profile) > first + 100, "{first}, then {profile}");
    // The addresses of the loops, called from the last byte of a call.
    let slow = samples(&profile)
        .into_iter()
        .find(|(stack, _)| *stack == "0x20000b;0x201008");
    assert!(slow.is_some_and(|(_, count)| count > 100), "{profile}");
    assert_eq!(
        fs::read_dir(&scratch.0)
            .unwrap()
            .filter(|entry| is_profile(entry))
            .count(),
        1
    );
}

fn total(profile: &str) -> u64 {
    samples(profile).values().sum()
}

fn is_profile(entry: &std::io::Result<fs::DirEntry>) -> bool {
    let name = entry.as_ref().unwrap().file_name();
    name.to_str().unwrap().starts_with("profile")
}

#[test]
fn a_further_process_has_a_file_of_its_own_and_vms_are_told_apart() {
    let scratch = Scratch::new("profile-fork");
    let (symbols, file) = (symbols(&scratch), scratch.0.join("profile"));
    let file = file.to_str().unwrap();
    let options = [
        "--profile",
        file,
        "--guest-symbols",
        symbols.to_str().unwrap(),
    ];
    let client = scratch.start(&options, "forks_and_calls_functions");
    let files = || {
        let entries = fs::read_dir(&scratch.0).unwrap().filter(is_profile);
        entries.map(|entry| fs::read_to_string(entry.unwrap().path()).unwrap())
    };
    // The process that comes first has the name.
    let (of_one, of_two) = (
        "\nguest_main;slow_function ",
        "\nVM 1;guest_main;slow_function ",
    );
    let have = |stack| files().any(|profile| format!("\n{profile}").contains(stack));
    let begin = Instant::now();
    while !have(of_one) || !have(of_two) {
        let profiles: Vec<_> = files().collect();
        assert!(begin.elapsed() < Duration::from_secs(30), "{profiles:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(client);
}

#[test]
fn a_profile_that_cannot_be_written_is_an_error_at_once() {
    let scratch = Scratch::new("no-profile");
    for (file, message) in [("/", "is no file"), ("/nowhere/profile", "No such file")] {
        let mut run = scratch.slat(&["run", "--profile", file, "--", "true"]);
        let output = run.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        let error = text(&output.stderr);
        assert!(
            error.contains(message) && error.lines().count() == 1,
            "{error}"
        );
    }
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
