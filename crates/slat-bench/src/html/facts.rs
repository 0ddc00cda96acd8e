//! Facts about the machine on which the measurements were made.

use std::fs;

use crate::arch::real_kvm;
use crate::rounds::Size;

/// Returns the facts about the machine and the run that a reader needs, as names and values.
pub fn facts(size: Size) -> Vec<(&'static str, String)> {
    let processors = std::thread::available_parallelism().map_or(1, usize::from);
    let unknown = || "unknown".to_owned();
    vec![
        (
            "processor",
            format!(
                "{processors} \u{d7} {}",
                field("/proc/cpuinfo", "model name").unwrap_or_else(unknown)
            ),
        ),
        ("memory", memory().unwrap_or_else(unknown)),
        (
            "kernel",
            fs::read_to_string("/proc/sys/kernel/osrelease")
                .map_or_else(|_| unknown(), |release| release.trim().to_owned()),
        ),
        ("/dev/kvm", real_kvm()),
        (
            "sizes",
            match size {
                Size::Tiny => "of tests: counts hold, times say nothing",
                Size::Usual => "the usual ones",
                Size::Full => "those that were published (--full)",
            }
            .to_owned(),
        ),
        ("slat", env!("CARGO_PKG_VERSION").to_owned()),
    ]
}

/// Returns the value in the first line `name : value` of a file in /proc.
fn field(path: &str, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let (_, value) = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)?;
    Some(value.trim().to_owned())
}

fn memory() -> Option<String> {
    let kib: u64 = field("/proc/meminfo", "MemTotal")?
        .trim_end_matches("kB")
        .trim()
        .parse()
        .ok()?;
    Some(format!("{:.1} GiB", kib as f64 / f64::from(1 << 20)))
}
