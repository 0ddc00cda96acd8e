//! `slat-counts` counts the instructions that the engine's operations take, with valgrind's callgrind.
//!
//! * `slat-counts` prints the counts.
//! * `slat-counts --compiler` prints which compiler has made this program.
//! * `slat-counts --write FILE` writes the counts to FILE.
//! * `slat-counts --compare FILE` compares the counts with those in FILE, and fails if one has risen by more than 3
//!   %.
//!
//! Unlike times, the counts of one binary are the same in every run on every machine of the same architecture. For
//! that, code that depends on the processor must not be counted. So only code in this binary is counted, and not the C
//! library, which chooses some functions (copies, fills) by the processor's features. Different compilers generate
//! different instructions. So `--write` records the compiler, and `--compare` refuses counts of another compiler. In
//! that case `.ci/counts` counts an earlier commit with the present compiler.
//!
//! The program runs itself under valgrind. In that run, [`slat_counts_measured`] runs each operation, and callgrind
//! writes a file at the end of each. The operations always run in the same order.

#[path = "../frames.rs"]
mod frames;
#[path = "../machine.rs"]
mod machine;

mod operations;
mod profile;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// The compiler that has compiled this program, and its target.
const COMPILER: &str = env!("COUNTS_COMPILER");
/// The argument that makes the program run the operations instead of counting them.
const OPERATIONS: &str = "--operations";
/// The largest increase of a count that is accepted, as a fraction of the count.
const TOLERANCE: f64 = 0.03;
/// The least increase, in instructions for each call, that counts. A smaller increase is ignored.
const LEAST: f64 = 0.01;

/// For each operation, the number of instructions for each page or call.
type Counts = BTreeMap<String, f64>;

/// Runs `operation`. Callgrind counts the instructions between the beginning and the end of this function, whose name
/// it gets as an argument.
// SAFETY: no other function of this program, or of a library, has this name.
#[unsafe(no_mangle)]
#[inline(never)]
fn slat_counts_measured(operation: &mut dyn FnMut()) {
    operation();
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let result = match words[..] {
        [OPERATIONS] => {
            operations::all(&mut slat_counts_measured);
            return ExitCode::SUCCESS;
        }
        [] => count().map(|counts| print!("{}", text(&counts))),
        ["--compiler"] => {
            println!("{COMPILER}");
            Ok(())
        }
        ["--write", file] => count().and_then(|counts| write(file, &counts)),
        ["--compare", file] => compare(file),
        _ => Err("usage: slat-counts [--compiler | --write FILE | --compare FILE]".to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("slat-counts: {message}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the operations under callgrind, and returns the counts.
fn count() -> Result<Counts, String> {
    let program = std::env::current_exe().map_err(|error| format!("finding itself: {error}"))?;
    let directory = PathBuf::from(format!("{}.profiles", program.display()));
    let io = |error| format!("{}: {error}", directory.display());
    if directory.exists() {
        std::fs::remove_dir_all(&directory).map_err(io)?;
    }
    std::fs::create_dir_all(&directory).map_err(io)?;
    let output = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet"])
        .args(["--toggle-collect=slat_counts_measured"])
        .args(["--dump-after=slat_counts_measured"])
        .args([
            "--compress-strings=no",
            "--compress-pos=no",
            "--dump-line=no",
        ])
        .arg(format!("--callgrind-out-file={}/of", directory.display()))
        .arg(&program)
        .arg(OPERATIONS)
        // The environment is empty, because its size would shift the addresses on the stack.
        .env_clear()
        .envs(std::env::var_os("PATH").map(|path| ("PATH", path)))
        .output()
        .map_err(|error| format!("running valgrind: {error}; install it"))?;
    let printed = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("valgrind failed, {}:\n{errors}", output.status));
    }
    let mut counts = Counts::new();
    for (line, number) in printed.lines().zip(1..) {
        let (name, times) = (line.split_once('\t'))
            .and_then(|(name, times)| Some((name, times.parse::<u64>().ok()?)))
            .ok_or_else(|| format!("an operation printed '{line}'"))?;
        let file = directory.join(format!("of.{number}"));
        let profile = std::fs::read_to_string(&file).map_err(|error| {
            format!(
                "{}: {error}: callgrind wrote no profile of {name}",
                file.display()
            )
        })?;
        let instructions = profile::instructions_in(&profile, &program);
        if instructions == 0 {
            return Err(format!("callgrind counted nothing of {name}"));
        }
        counts.insert(name.to_owned(), instructions as f64 / times as f64);
    }
    std::fs::remove_dir_all(&directory).map_err(io)?;
    Ok(counts)
}

fn text(counts: &Counts) -> String {
    let mut text = format!("# {}\n", COMPILER);
    for (name, count) in counts {
        writeln!(text, "{name:<28}{count:>12.2}").expect("a string takes all");
    }
    text
}

fn write(file: &str, counts: &Counts) -> Result<(), String> {
    std::fs::write(file, text(counts)).map_err(|error| format!("{file}: {error}"))
}

/// Reads the counts in a file.
fn read(file: &str) -> Result<Counts, String> {
    let text = std::fs::read_to_string(file).map_err(|error| format!("{file}: {error}"))?;
    let compiler = text
        .lines()
        .next()
        .unwrap_or_default()
        .trim_start_matches("# ");
    if compiler != COMPILER {
        return Err(format!(
            "{file} is of {compiler}, and this of {}: their counts cannot be compared; see .ci/counts",
            COMPILER
        ));
    }
    let row = |line: &str| {
        let (name, count) = line.split_once(' ')?;
        Some((name.to_owned(), count.trim().parse().ok()?))
    };
    (text.lines().skip(1))
        .map(|line| row(line).ok_or_else(|| format!("{file}: '{line}' is no count")))
        .collect()
}

fn compare(file: &str) -> Result<(), String> {
    let (before, now) = (read(file)?, count()?);
    let mut wrong = 0;
    println!("{:<28}{:>12}{:>12}", "instructions", "before", "now");
    for (name, &count) in &now {
        let Some(&old) = before.get(name) else {
            println!("{name:<28}{:>12}{count:>12.2}  it is not in the file", "");
            wrong += 1;
            continue;
        };
        let change = 100.0 * (count / old - 1.0);
        let risen = count > old * (1.0 + TOLERANCE) && count > old + LEAST;
        let note = if risen { "  too many" } else { "" };
        println!("{name:<28}{old:>12.2}{count:>12.2}{change:>+8.1} %{note}");
        wrong += usize::from(risen);
    }
    for name in before.keys().filter(|name| !now.contains_key(*name)) {
        println!("{name:<28}  it is in the file, and was not counted");
        wrong += 1;
    }
    match wrong {
        0 => Ok(()),
        _ => Err(format!(
            "{wrong} of {} operations are not as in {file}. If that is meant, write the file anew (.ci/counts --write), \
             and say in the commit why",
            now.len()
        )),
    }
}
