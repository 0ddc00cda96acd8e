//! The demonstration that `slat run` shows without a program: a small KVM program, and a report of the memory system's
//! work for it.
//!
//! | file | idea |
//! |---|---|
//! | `memory`, `long_mode` | host memory for memslots; long mode without firmware: `slat bench` uses both, too |
//! | `guest` | the guest's code, its memory, and its phases |
//! | `machine` | the KVM program: memslots, vCPUs, threads |
//! | `failure` | why the program failed |
//! | `progress` | messages about what the guest is doing, when the program takes long |
#![cfg(target_arch = "x86_64")]

mod failure;
mod guest;
pub mod long_mode;
mod machine;
pub mod memory;
mod progress;

use std::time::{Duration, Instant};

pub use failure::Failure;
use guest::{CODE_SIZE, DATA_SIZE, PAGE, SPARE_SIZE, VCPUS};
use machine::Report;
use slat_kvm::{Kvm, policy};

/// Runs the program by the policies of the environment. Returns the account.
///
/// # Errors
/// The error of the program, or of a policy's value.
pub fn run() -> Result<String, Failure> {
    let began = Instant::now();
    let policies = policy::current()?;
    slat_kvm::publish::enable();
    let kvm = Kvm::new()?;
    let (report, mut totals) = machine::run(&kvm, slat_kvm::report::totals)?;
    if !policies.stats {
        // Only the counters of the memory system are printed, so drop those of the CPUs.
        totals.cpu = Default::default();
    }
    slat_kvm::publish::end();
    slat_kvm::profile::end();
    slat_kvm::perf::end();
    let steps = describe(&report, policies.format.name(), began.elapsed());
    Ok(steps + &slat_kvm::report::render(&totals))
}

fn describe(report: &Report, format: &str, total: Duration) -> String {
    let [write, read, call, device] = report.phases;
    let pages = DATA_SIZE / PAGE;
    let mut lines = vec![
        format!(
            "A KVM program ran on slat: {VCPUS} vCPUs, {VCPUS} threads, 4 memslots, {format} tables. No /dev/kvm."
        ),
        String::new(),
        "What the guest did".to_owned(),
    ];
    let mut step = |what: String, time: Duration| {
        lines.push(format!("  {what:<64} {:>9}", milliseconds(time)));
    };
    step(
        format!("wrote {pages} pages ({} MiB)", DATA_SIZE >> 20),
        write,
    );
    step("read them back".to_owned(), read);
    step(
        format!("wrote {} functions and called them", CODE_SIZE / PAGE),
        call,
    );
    step(
        format!("used a device register {} times", report.device_exits),
        device,
    );
    step(
        format!(
            "lost a memslot ({} MiB) while writing to it",
            SPARE_SIZE >> 20
        ),
        report.taking_away,
    );
    step(
        format!(
            "got it back, after {} writes to nowhere",
            report.exits_while_away
        ),
        report.giving_back,
    );
    step("all together".to_owned(), total);
    lines.extend(["".to_owned(), String::new()]);
    lines.join("\n")
}

fn milliseconds(time: Duration) -> String {
    format!("{:.2} ms", time.as_secs_f64() * 1e3)
}
