//! `slat run` without PROGRAM: a small KVM program, and an account of what the memory system did.

mod guest;
mod machine;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use slat_bench::Failure;
use slat_kvm::Kvm;

use crate::output;
use guest::{CODE_SIZE, DATA_SIZE, PAGE, SPARE_SIZE, VCPUS};
use machine::Report;

/// Runs the built-in program and prints the account, in which `format` names the tables.
pub fn run(format: &str) -> ExitCode {
    match account(format) {
        Ok(text) => output::print(&text),
        Err(e) => {
            output::complain(&format!("the built-in KVM program: {e}"));
            ExitCode::FAILURE
        }
    }
}

fn account(format: &str) -> Result<String, Failure> {
    let began = Instant::now();
    slat_kvm::publish::enable();
    let kvm = Kvm::new()?;
    let (report, mut totals) = machine::run(&kvm, slat_kvm::report::totals)?;
    if !slat_kvm::policy::current()?.stats {
        // The account is one of the memory system.
        totals.cpu = Default::default();
    }
    slat_kvm::publish::end();
    slat_kvm::profile::end();
    slat_kvm::perf::end();
    let steps = describe(&report, format, began.elapsed());
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
