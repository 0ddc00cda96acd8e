//! The demonstration program, whose guest uses its memory in phases.

use slat_kvm::Kvm;

use crate::Failure;
use crate::account::Account;
use crate::arch::x86_64::guest::{CODE_SIZE, DATA_SIZE, PAGE, SPARE_SIZE, VCPUS};
use crate::arch::x86_64::machine::{self, Report};

/// Runs the program on `kvm`, whose VMs have tables of the format called `format`. At the end, calls `at_end` while the
/// VM still exists.
///
/// # Errors
/// An error if the guest has not done its work, and KVM's errors.
pub fn run<T>(
    kvm: &Kvm,
    format: &str,
    at_end: impl FnOnce() -> T,
) -> Result<(Account, T), Failure> {
    let (report, ended) = machine::run(kvm, at_end)?;
    Ok((describe(&report, format), ended))
}

fn describe(report: &Report, format: &str) -> Account {
    let [write, read, call, device] = report.phases;
    let pages = DATA_SIZE / PAGE;
    let title = format!(
        "A KVM program ran on slat: {VCPUS} vCPUs, {VCPUS} threads, 4 memslots, {format} tables. No /dev/kvm."
    );
    let mut account = Account::new(title, "What the guest did");
    account.step(
        format!("wrote {pages} pages ({} MiB)", DATA_SIZE >> 20),
        write,
    );
    account.step("read them back", read);
    account.step(
        format!("wrote {} functions and called them", CODE_SIZE / PAGE),
        call,
    );
    account.step(
        format!("used a device register {} times", report.device_exits),
        device,
    );
    account.step(
        format!(
            "lost a memslot ({} MiB) while writing to it",
            SPARE_SIZE >> 20
        ),
        report.taking_away,
    );
    account.step(
        format!(
            "got it back, after {} writes to nowhere",
            report.exits_while_away
        ),
        report.giving_back,
    );
    account
}
