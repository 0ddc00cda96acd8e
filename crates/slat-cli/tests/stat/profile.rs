//! Tests the names of guest code in perf's map and in slat's own profiles.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use super::harness::{Client, Scratch, poll, text, unless};

/// The names of the client's functions, in the form of System.map.
const SYMBOLS: &str = "0000000000200000 T guest_main\n0000000000201000 T slow_function\n0000000000202000 t fast_function\n";

fn symbols(scratch: &Scratch) -> PathBuf {
    let file = scratch.0.join("System.map");
    fs::write(&file, SYMBOLS).unwrap();
    file
}

/// Waits until `found` returns something for the content of `file`.
fn wait_for<T>(file: &str, found: impl Fn(&str) -> Option<T>) -> T {
    poll(30, || {
        let content = fs::read_to_string(file).unwrap_or_default();
        found(&content).ok_or(format!("{file}: {content}"))
    })
}

/// Runs perf. Returns its output, or an error that says why it failed.
fn perf(arguments: &[&str]) -> Result<String, String> {
    let output = Command::new("perf").args(arguments).output();
    let output = output.map_err(|error| error.to_string())?;
    match output.status.success() {
        true => Ok(text(&output.stdout)),
        false => Err(text(&output.stderr)),
    }
}

/// Makes perf record a client for a second. Returns the path of perf's file, or `None` if perf cannot record here.
fn record(scratch: &Scratch, client: &Client, options: &[&str]) -> Option<String> {
    let data = scratch.0.join("perf.data").to_str().unwrap().to_owned();
    let pid = client.pid().to_string();
    let record = ["record", "-q", "-e", "cpu-clock", "-F", "500", "-o", &data];
    let what = ["-p", &pid, "--", "sleep", "1"];
    match perf(&[&record, options, &what].concat()) {
        Ok(_) => Some(data),
        Err(why) => {
            eprintln!("skipped: perf does not record here: {why}");
            None
        }
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
    // Both tiers compile the hot loop.
    wait_for(&map, |map| {
        let lines = map
            .lines()
            .filter(|line| line.contains(" guest:slow_function"));
        (lines.count() >= 2).then_some(())
    });
    if let Some(data) = record(&scratch, &client, &[]) {
        let report = perf(&["report", "--stdio", "-i", &data]).unwrap();
        assert!(report.contains("guest:slow_function"), "{report}");
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
fn perf_finds_the_code_of_guest_functions_in_a_jitdump() {
    let scratch = Scratch::new("jitdump");
    let symbols = symbols(&scratch);
    let options = [
        "--set",
        "jit_map=dump",
        "--guest-symbols",
        symbols.to_str().unwrap(),
    ];
    let mut client = scratch.start(&options, "calls_functions");
    let dump = scratch.0.join(format!("jit-{}.dump", client.pid()));
    let name = b"guest:slow_function";
    let regions = || {
        let bytes = fs::read(&dump).unwrap_or_default();
        bytes
            .windows(name.len())
            .filter(|bytes| bytes == name)
            .count()
    };
    // Both tiers compile the hot loop.
    poll(30, || unless(regions() >= 2, "it is not compiled"));
    let maps = fs::read_to_string(format!("/proc/{}/maps", client.pid())).unwrap();
    let marker = maps
        .lines()
        .find(|line| line.ends_with(dump.to_str().unwrap()));
    assert!(marker.is_some_and(|line| line.contains(" r-xp ")), "{maps}");
    if let Some(data) = record(&scratch, &client, &["-k", "1"]) {
        let injected = scratch.0.join("injected.data");
        let injected = injected.to_str().unwrap();
        perf(&["inject", "--jit", "-i", &data, "-o", injected]).unwrap();
        let report = perf(&["report", "--stdio", "-i", injected]).unwrap();
        let is_found =
            |line: &str| line.contains("jitted-") && line.contains("guest:slow_function");
        assert!(report.lines().any(is_found), "{report}");
    }
    client.proceed();
    assert!(client.process.wait().unwrap().success());
    let bytes = fs::read(&dump).unwrap();
    // The last record marks the end: its id, and its size.
    assert_eq!(bytes[bytes.len() - 16..][..8], [3, 0, 0, 0, 16, 0, 0, 0]);
}

/// Returns the number of samples of each stack in a profile.
fn samples(profile: &str) -> BTreeMap<&str, u64> {
    let lines = profile.lines().map(|line| line.rsplit_once(' ').unwrap());
    lines
        .map(|(stack, count)| (stack, count.parse().unwrap()))
        .collect()
}

/// Whether there are enough samples of both functions, and three times as many of the slow one. While the host runs
/// other programs, all samples are at the place where the guest was stopped; so a busy machine needs more samples.
fn is_three_to_one(profile: &str) -> bool {
    let samples = samples(profile);
    let of = |stack| samples.get(stack).copied().unwrap_or_default();
    let (slow, fast) = (
        of("guest_main;slow_function"),
        of("guest_main;fast_function"),
    );
    slow + fast > 400 && (2.2..4.5).contains(&(slow as f64 / fast as f64))
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
    let seen = wait_for(file, |profile| {
        is_three_to_one(profile).then(|| total(profile))
    });
    client.kill();
    assert!(total(&fs::read_to_string(file).unwrap()) >= seen);
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
    std::thread::sleep(Duration::from_millis(500));
    client.proceed();
    assert!(client.process.wait().unwrap().success());
    let profile = fs::read_to_string(file).unwrap();
    assert!(total(&profile) > first, "{first}, then {profile}");
    // The names are the addresses of the loops, and the address of the last byte of the call.
    assert!(
        samples(&profile).contains_key("0x20000b;0x201008"),
        "{profile}"
    );
    assert_eq!(
        fs::read_dir(&scratch.0).unwrap().filter(is_profile).count(),
        1
    );
}

#[test]
fn a_profile_without_samples_is_missing_and_the_user_is_told() {
    let scratch = Scratch::new("profile-empty");
    let file = scratch.0.join("profile");
    let file = file.to_str().unwrap();
    let mut client = scratch.start(&["--profile", file], "runs_nothing");
    client.proceed();
    assert!(client.process.wait().unwrap().success());
    let mut error = String::new();
    let mut stderr = client.process.stderr.take().unwrap();
    stderr.read_to_string(&mut error).unwrap();
    let told = format!("there is no profile {file}: no vCPU was found in guest code");
    assert!(error.contains(&told), "{error}");
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
    // The process that creates its file first gets the plain name.
    let (of_one, of_two) = (
        "\nguest_main;slow_function ",
        "\nVM 1;guest_main;slow_function ",
    );
    let have = |stack| files().any(|profile| format!("\n{profile}").contains(stack));
    poll(30, || {
        let profiles: Vec<_> = files().collect();
        unless(have(of_one) && have(of_two), &format!("{profiles:?}"))
    });
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
