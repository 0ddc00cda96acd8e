//! Tests the output of `slat`, and its errors when the output cannot be written.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// All commands that print something, except measurements.
const PRINTING: &[&[&str]] = &[
    &["info"],
    &["--help"],
    &["--version"],
    &["run", "--help"],
    &["bench", "--help"],
    &["bench", "--explain"],
    &["completions", "bash"],
    &["man"],
    &["run"],
];
/// The shortest experiment.
const SHORT: &str = match cfg!(target_arch = "x86_64") {
    true => "dirty",
    false => "faults",
};

fn slat(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_slat"));
    command.args(arguments).env_remove("LD_PRELOAD");
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Creates an empty directory for one test.
fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&path);
    fs::create_dir_all(&path).unwrap();
    path
}

/// Checks that the command failed with one line on standard error. Returns that line.
fn failed_in_one_line(output: &Output, what: &str) -> String {
    let message = text(&output.stderr);
    assert!(!output.status.success(), "{what} succeeded: {message}");
    assert_eq!(message.lines().count(), 1, "{what}: {message}");
    assert!(message.starts_with("slat: "), "{what}: {message}");
    message
}

#[test]
fn a_full_device_is_an_error() {
    for arguments in PRINTING {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = slat(arguments).stdout(full).output().unwrap();
        let message = failed_in_one_line(&output, &format!("{arguments:?}"));
        assert!(message.contains("No space left on device"), "{message}");
        assert!(message.contains("standard output"), "{message}");
    }
}

#[test]
fn a_reader_that_has_read_enough_is_no_error() {
    for arguments in PRINTING {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let output = slat(arguments).stdout(writer).output().unwrap();
        assert_eq!(text(&output.stderr), "", "{arguments:?}");
        assert_eq!(output.status.code(), Some(0), "{arguments:?}");
    }
}

#[test]
fn a_report_that_cannot_be_written_is_refused_before_anything_is_measured() {
    let scratch = scratch("refused");
    let directory = scratch.to_str().unwrap();
    let missing = scratch.join("missing").join("report");
    let missing = missing.to_str().unwrap();
    for (option, path, remedy) in [
        ("--json", missing, "create the directory"),
        ("--html", missing, "create the directory"),
        ("--json", directory, "not of a directory"),
        ("--html", directory, "not of a directory"),
        ("--html", "/proc/self/status/report", "another FILE"),
    ] {
        let output = slat(&["bench", SHORT, option, path]).output().unwrap();
        assert!(output.stdout.is_empty(), "it measured, then refused {path}");
        let message = failed_in_one_line(&output, path);
        for part in [path, remedy] {
            assert!(message.contains(part), "no '{part}' in: {message}");
        }
    }
}

#[test]
fn a_run_that_fails_leaves_reports_as_they_were() {
    let scratch = scratch("kept");
    let (kept, new) = (scratch.join("kept.json"), scratch.join("new.html"));
    fs::write(&kept, "yesterday's").unwrap();
    let output = slat(&["bench", SHORT, "--json"])
        .arg(&kept)
        .arg("--html")
        .arg(&new)
        // With this setting, slat itself refuses to start.
        .env("SLAT_SET", "no_such_policy=1")
        .output()
        .unwrap();
    assert!(!output.status.success());
    assert_eq!(fs::read_to_string(&kept).unwrap(), "yesterday's");
    assert!(!new.exists(), "an empty report was left behind");
}

#[test]
fn reports_replace_what_was_in_their_files() {
    let scratch = scratch("replaced");
    let (json, html) = (scratch.join("a.json"), scratch.join("a.html"));
    fs::write(&json, "x".repeat(1 << 20)).unwrap();
    let output = slat(&["bench", SHORT, "--json"])
        .arg(&json)
        .arg("--html")
        .arg(&html)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).starts_with(SHORT));
    let json = fs::read_to_string(json).unwrap();
    assert!(json.starts_with('{') && json.trim_end().ends_with('}'));
    assert!(!json.contains('x'.to_string().repeat(9).as_str()));
    assert!(fs::read_to_string(html).unwrap().contains("</html>"));
}

#[test]
fn tables_that_cannot_be_printed_are_an_error() {
    for arguments in [&["bench", SHORT][..], &["bench", SHORT, "--json"]] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let output = slat(arguments)
            .stdout(full)
            .stderr(Stdio::piped())
            .output()
            .unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        let message = text(&output.stderr);
        let last = message.lines().last().unwrap();
        assert!(last.contains("No space left on device"), "{message}");
    }
}
