//! Checks that each command that README.md shows is run: by this file, or by another suite that this file names.
#![cfg(target_arch = "x86_64")]

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// The test or script that runs a command of README.md.
enum RunBy {
    /// This test runs `slat` with these arguments, and compares the output with the output that README.md shows.
    ThisTest(&'static [&'static str]),
    /// The file with this path runs the command; it must contain this text.
    Suite(&'static str, &'static str),
    /// The command is itself a test suite, so nothing else has to run it.
    Itself,
}
use RunBy::*;

/// The commands of README.md, in its order, and for each the test or script that runs it. A `…` at the end of a command
/// means any further words.
const COMMANDS: &[(&str, RunBy)] = &[
    ("cargo run --release -- run", ThisTest(&["run"])),
    ("cargo test", Suite(".ci/run", "cargo test")),
    ("YOUR-COPY-OF/slat@main", Suite("action.yml", ".ci/install")),
    (
        "actions/checkout@v4",
        Suite(".github/workflows/ci.yml", "actions/checkout@v4"),
    ),
    (
        "slat run -- cargo test",
        Suite("conformance/programs/run", r#""$slat" run -- cargo test"#),
    ),
    (
        "cargo install --path crates/slat-cli",
        Suite(".ci/packages", "cargo install --path slat-cli"),
    ),
    (
        "slat run -- qemu-system-x86_64 …",
        Suite(
            "conformance/vmm/row.py",
            r#"[self.slat, "run", "--mmu", self.mmu, "--set", f"cpu={self.cpu}", "--"]"#,
        ),
    ),
    (
        "slat stat",
        Suite(
            "crates/slat-cli/tests/stat/screen.rs",
            "stat {pid} --interval",
        ),
    ),
    ("metal/run --arch npt", Suite(".ci/run", "metal/run")),
    ("slat bench --explain", ThisTest(&["bench", "--explain"])),
    (
        "slat bench dirty",
        Suite("crates/slat-cli/tests/output.rs", "true => \"dirty\","),
    ),
    (".ci/run", Itself),
    (".ci/run full", Suite(".ci/run", "quick | full)")),
];

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

fn is_script(path: &str) -> bool {
    fs::metadata(root().join(path))
        .is_ok_and(|file| file.is_file() && file.permissions().mode() & 0o111 != 0)
}

/// A command in README.md, and the part of its output that README.md shows.
struct Shown {
    command: String,
    output: Vec<String>,
}

/// Whether a code span in a sentence is a command.
fn is_command(code: &str) -> bool {
    match code.split_once(' ') {
        Some(("cargo" | "slat", _)) => true,
        Some((program, _)) => is_script(program),
        None => is_script(code),
    }
}

/// Returns the commands of a document. They are in sentences; in code blocks, where a command begins with `$` and its
/// output follows; and in workflows, where each step is a command.
fn commands(document: &str) -> Vec<Shown> {
    let mut found = Vec::new();
    for (i, part) in document.split("```").enumerate() {
        if i % 2 == 0 {
            let code = part.split('`').skip(1).step_by(2);
            let code = code.map(|code| code.split_whitespace().collect::<Vec<_>>().join(" "));
            found.extend(code.filter(|code| is_command(code)).map(|command| Shown {
                command,
                output: Vec::new(),
            }));
            continue;
        }
        let mut output = None;
        for line in part.replace("\\\n", "").lines().skip(1) {
            let step = line.trim_start().trim_start_matches("- ");
            let step = step.strip_prefix("run: ").or(step.strip_prefix("uses: "));
            if let Some(command) = line.strip_prefix("$ ").or(step) {
                found.push(Shown {
                    command: command.split_whitespace().collect::<Vec<_>>().join(" "),
                    output: Vec::new(),
                });
                output = Some(found.len() - 1);
            } else if let Some(last) = output {
                found[last].output.push(line.to_owned());
            }
        }
    }
    found
}

/// Whether `command` is the one that an entry of [`COMMANDS`] names.
fn is_named(command: &str, name: &str) -> bool {
    match name.strip_suffix('…') {
        Some(beginning) => command.starts_with(beginning),
        None => command == name,
    }
}

/// Returns a line without its numbers, which differ in each run.
fn without_numbers(line: &str) -> String {
    let is_number = |c: char| c.is_ascii_digit() || c == ',' || c == '.';
    let words = line
        .split_whitespace()
        .filter(|word| !word.chars().all(is_number));
    words.collect::<Vec<_>>().join(" ")
}

/// Returns the output of `slat ARGUMENTS`.
fn printed(arguments: &[&str]) -> String {
    let mut slat = Command::new(env!("CARGO_BIN_EXE_slat"));
    let output = slat
        .args(arguments)
        .env_remove("LD_PRELOAD")
        .output()
        .unwrap();
    assert!(output.status.success(), "slat {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// Runs `slat`, and checks that its output contains the lines of `shown` in this order. Numbers may differ, and there
/// may be other lines between them. A line `...` in `shown` is skipped.
fn prints(arguments: &[&str], shown: &[String]) {
    let printed = printed(arguments);
    let mut lines = printed.lines().map(without_numbers);
    for line in shown.iter().filter(|line| line.trim() != "...") {
        let wanted = without_numbers(line);
        assert!(
            lines.any(|line| line == wanted),
            "slat {arguments:?} does not print this line, or not here: {line}\nIt prints:\n{printed}"
        );
    }
}

#[test]
fn each_command_of_the_readme_is_run() {
    let shown = commands(&read("README.md"));
    for Shown { command, output } in &shown {
        let entry = COMMANDS.iter().find(|(name, _)| is_named(command, name));
        let Some((_, run_by)) = entry else {
            panic!("README.md shows `{command}`, and COMMANDS does not say what runs it");
        };
        match run_by {
            ThisTest(arguments) => prints(arguments, output),
            Suite(file, text) => assert!(
                read(file).contains(text),
                "{file} does not run `{command}`: no {text}"
            ),
            Itself => assert!(is_script(command), "{command} is no script"),
        }
    }
    for (name, _) in COMMANDS {
        assert!(
            shown.iter().any(|shown| is_named(&shown.command, name)),
            "README.md does not show `{name}`"
        );
    }
}

/// Returns all documents for users, one after the other.
fn documents() -> String {
    let docs = fs::read_dir(root().join("docs")).unwrap();
    let paths = docs.map(|entry| entry.unwrap().path());
    let documents = paths.filter(|path| path.extension().is_some_and(|end| end == "md"));
    let texts = documents.map(|path| fs::read_to_string(path).unwrap());
    texts.chain([read("README.md")]).collect()
}

/// Returns the longest words in `text` that begin with `start` and consist of characters for which `is_part` is true.
fn words<'a>(text: &'a str, start: &str, is_part: fn(char) -> bool) -> Vec<&'a str> {
    let found = text
        .match_indices(start)
        .map(|(at, _)| text[at..].split(|c| !is_part(c)));
    found.filter_map(|mut rest| rest.next()).collect()
}

#[test]
fn each_policy_is_in_a_document_with_its_default() {
    let document = read("docs/run.md");
    for policy in slat_kvm::policy::Assignment::defaults() {
        let row = format!("\n| `{policy}` | ");
        assert!(
            document.contains(&row),
            "docs/run.md has no row of the policy {policy}"
        );
    }
}

#[test]
fn each_option_is_in_a_document() {
    let documents = documents();
    let help = printed(&["help"]);
    let commands = help.split_once("Commands:\n").unwrap().1.lines();
    let commands = commands
        .take_while(|line| line.starts_with("  "))
        .filter_map(|line| line.split_whitespace().next());
    let commands: Vec<_> = commands.filter(|name| *name != "help").collect();
    assert!(commands.len() > 5, "{help}");
    for command in commands {
        let help = printed(&[command, "--help"]);
        let is_option = |c: char| c == '-' || c.is_ascii_lowercase();
        for option in words(&help, "--", is_option) {
            let is_known = ["--", "--help"].contains(&option);
            assert!(
                is_known || documents.contains(option),
                "no document has {option} of `slat {command}`"
            );
        }
    }
}

#[test]
fn each_variable_is_in_a_document() {
    let documents = documents();
    let mut found = 0;
    let mut directories = vec![root().join("crates")];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                directories.push(path);
                continue;
            }
            let name = path.to_str().unwrap();
            let is_test = name.contains("/tests") || name.contains("/target/");
            if is_test || path.extension().is_none_or(|end| end != "rs") {
                continue;
            }
            let source = fs::read_to_string(&path).unwrap();
            let is_part = |c: char| c == '"' || c == '_' || c.is_ascii_uppercase();
            for quoted in words(&source, "\"SLAT_", is_part) {
                let variable = quoted.trim_matches('"');
                assert!(
                    documents.contains(&format!("`{variable}")),
                    "no document has {variable}, of {name}"
                );
                found += 1;
            }
        }
    }
    assert!(found > 20, "{found}");
}

#[test]
fn commands_are_found_wherever_a_document_has_them() {
    let found = commands(
        "`cargo a\nb` and `slat` and [`metal/run`](metal/run)\n\
         ```text\n$ one \\\n   more\noutput\n...\n$ two\n```\n\
         ```yaml\nsteps:\n  - uses: x\n  - run: three\n  - name: x\n    run: four\n```\n`slat info`\n",
    );
    let names: Vec<_> = found.iter().map(|shown| &*shown.command).collect();
    let all = [
        "cargo a b",
        "metal/run",
        "one more",
        "two",
        "x",
        "three",
        "four",
        "slat info",
    ];
    assert_eq!(names, all);
    assert_eq!(found[2].output, ["output", "..."]);
}
