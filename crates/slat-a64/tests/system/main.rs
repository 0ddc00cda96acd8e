//! EL1 and stage 1 beside QEMU: a payload without an operating system runs in qemu-system-aarch64 and on the
//! processor, and must write the same.
//!
//! The payload executes random accesses, AT instructions and fetches through random tables, and instructions that EL1
//! takes exceptions of, and writes ESR, FAR, ELR, SPSR, PAR and registers after each of them. Without the tools
//! (gcc-aarch64-linux-gnu, qemu-system-arm) the tests say so, and pass. `SLAT_SYSTEM_ROUNDS=100` compares that number
//! of images, and `SLAT_SYSTEM_FIRST=6` begins with the seventh; `SLAT_SYSTEM_COMMANDS=16000` makes an image as
//! large as it can be. `SLAT_TEST_COMPILED=1` runs them on compiled code.
//!
//! QEMU does not do everything that the architecture says. These are not compared: alignment of accesses to Device
//! memory and of the stack pointer, traps of WFE, WnR of LSE's faults, permissions of cache maintenance, the effect of
//! dirty state on the right to execute. `tests/stage1` has cases of them.

mod commands;
#[allow(dead_code)]
#[path = "../common/compiled.rs"]
mod compiled;
mod debugging;
mod exceptions;
#[allow(dead_code)]
#[path = "../common/host.rs"]
mod host;
mod image;
#[allow(dead_code)]
#[path = "../stage1/numbers.rs"]
mod numbers;
mod ours;
mod tables;

use commands::Script;
use image::Image;
use std::path::PathBuf;

/// Returns a directory for a test's files, which is removed at the end.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Self {
        let directory =
            std::env::temp_dir().join(format!("slat-a64-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&directory).unwrap();
        Self(directory)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Names of a record's words.
const NAMES: [&str; 8] = ["x0", "x1", "esr", "far", "elr", "spsr", "vector", "par"];

/// Returns PAR_EL1 without the shareability that QEMU has wrong: Device memory, and memory that is not cached, is Outer
/// Shareable.
fn without_shareability(par: u64) -> u64 {
    match par >> 56 {
        0..16 | 0x44 if par & 1 == 0 => par & !(3 << 7),
        _ => par,
    }
}

/// Whether the record at an offset has a synchronous External abort.
fn is_external(all: &[u8], at: usize) -> bool {
    all[at + 16] & 0x3f == 0x10
}

/// Executes a script on both machines, and returns the number of records compared and descriptions of differences.
/// `None`: the tools are absent.
fn compare(
    name: &str,
    script: &Script,
    descriptor: impl FnMut(u64, u64) -> u64,
) -> Option<(usize, Vec<String>)> {
    let files = Files::new(name);
    let Some(code) = image::assemble(&files.0) else {
        println!("skipped: aarch64-linux-gnu-as is absent");
        return None;
    };
    let image = Image::new(&code, &script.commands, descriptor);
    let Some(theirs) = image::qemu(&files.0, &image) else {
        println!("skipped: qemu-system-aarch64 is absent");
        return None;
    };
    let ours = ours::execute(&image);
    let bytes: usize = script.records.iter().map(|record| 8 * record.0).sum();
    assert_eq!((ours.len(), theirs.len()), (bytes, bytes), "{name}");
    let (mut at, mut wrong) = (0, vec![]);
    for (words, what) in &script.records {
        let word = |all: &[u8], n: usize| {
            let word = u64::from_le_bytes(all[at + 8 * n..][..8].try_into().unwrap());
            match NAMES[n] {
                "par" => without_shareability(word),
                // QEMU reports the aligned part of a misaligned access that is aborted externally, and DC ZVA's block.
                "far" if is_external(all, at) => word & !63,
                _ => word,
            }
        };
        let differences: Vec<String> = (0..*words)
            .filter(|n| word(&ours, *n) != word(&theirs, *n))
            .map(|n| {
                format!(
                    "{} {:x} for {:x}",
                    NAMES[n],
                    word(&ours, n),
                    word(&theirs, n)
                )
            })
            .collect();
        if !differences.is_empty() {
            wrong.push(format!("{}: {what}", differences.join(", ")));
        }
        at += 8 * words;
    }
    Some((script.records.len(), wrong))
}

fn setting(name: &str, default: u64) -> u64 {
    let value = std::env::var(name).ok();
    value
        .and_then(|value| value.parse().ok())
        .unwrap_or(default)
}

fn rounds() -> u64 {
    setting("SLAT_SYSTEM_ROUNDS", 4)
}

fn first_round() -> u64 {
    setting("SLAT_SYSTEM_FIRST", 0)
}

fn check(records: usize, wrong: &[String]) {
    for wrong in wrong.iter().take(12) {
        println!("{wrong}");
    }
    assert!(
        wrong.is_empty(),
        "{} of {records} records differ from QEMU's",
        wrong.len()
    );
    println!("{records} records are the same");
}
