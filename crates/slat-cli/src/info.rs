//! `slat info`: what this slat supports, and what this host allows.

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use crate::output;
use crate::preload::LINKER;
use slat_kvm::cpuid::{host_leaf, is_amd};
use slat_kvm::policy::Assignment;
use slat_process::pointers::can_be_separate;

/// Prints everything. Facts that cannot be determined are printed as unknown.
pub fn print() -> ExitCode {
    let mut text = format!("slat {}\n", env!("VERSION_AND_COMMIT"));
    let parts = [
        ("Supported", supported()),
        ("This host", host()),
        (
            "Policies (slat run --set POLICY=VALUE): default, values",
            policies(),
        ),
    ];
    for (title, lines) in parts {
        let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        text += &format!("\n{title}\n");
        for (name, value) in lines {
            text += &format!("  {name:<width$}  {value}\n");
        }
    }
    output::print(&text)
}

fn supported() -> Vec<(&'static str, String)> {
    vec![
        ("mmu", mmus()),
        ("formats", slat_kvm::policy::FORMATS.join(", ")),
        ("nested guests", nested_guests()),
    ]
}

fn mmus() -> String {
    let names: Vec<_> = slat::MmuKind::ALL.iter().map(|mmu| mmu.name()).collect();
    names.join(", ")
}

/// Returns all policies, each with its default and the values that it takes.
fn policies() -> Vec<(&'static str, String)> {
    let all = Assignment::defaults();
    let describe = |policy: &Assignment| format!("{:<15} {}", policy.value(), policy.expected());
    let lines = all.iter().map(|policy| (policy.name(), describe(policy)));
    lines.collect()
}

/// Describes what a guest needs to be a hypervisor. Guests check the vendor before they check for SVM.
fn nested_guests() -> String {
    let model = match is_amd() {
        true => "host, or EPYC,+svm",
        false => "EPYC,+svm; no Intel model",
    };
    format!("SVM with nested paging (QEMU: -cpu {model})")
}

fn host() -> Vec<(&'static str, String)> {
    vec![
        ("/dev/kvm", dev_kvm()),
        ("userfaultfd", userfaultfd()),
        ("huge pages (THP)", thp_mode()),
        ("processors", processors()),
        ("VMX or SVM", virtualization()),
        ("dispatch", dispatch()),
        ("loading", loading()),
    ]
}

/// Describes the host's `/dev/kvm`, for comparison only: slat serves /dev/kvm itself.
fn dev_kvm() -> String {
    let opened = fs::OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm");
    match opened {
        Ok(_) => "usable (slat does not need it)".to_owned(),
        Err(e) if e.kind() == io::ErrorKind::NotFound => {
            "missing (slat does not need it)".to_owned()
        }
        Err(e) => format!("not usable: {e} (slat does not need it)"),
    }
}

/// Describes userfaultfd. Programs that fill guest memory on demand need the system call, including the right to handle
/// faults of the kernel.
fn userfaultfd() -> String {
    // SAFETY: the call opens a new descriptor, or fails.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if fd < 0 {
        return format!("no: {}", io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened above, and no other code knows it.
    unsafe { libc::close(fd as libc::c_int) };
    "yes".to_owned()
}

/// Returns "always", "madvise" or "never", which decides whether guest memory gets 2 MiB leaves.
fn thp_mode() -> String {
    let Ok(modes) = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled") else {
        return "not supported by this kernel".to_owned();
    };
    // The active mode is in brackets.
    modes
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("unknown", |(mode, _)| mode)
        .to_owned()
}

/// Returns the processor's own report about virtualization. slat cannot change this report for a program that executes
/// CPUID.
fn virtualization() -> String {
    // Intel SDM, volume 2, CPUID: leaf 1, ECX bit 5. AMD APM, volume 3, appendix E: leaf 8000_0001h, ECX bit 2.
    let vmx = host_leaf(1, 0).ecx & 1 << 5 != 0;
    let svm = host_leaf(0x8000_0001, 0).ecx & 1 << 2 != 0;
    match vmx || svm {
        true => "yes (slat does not need it)".to_owned(),
        false => "no (slat does not need it; a program that asks the processor for it by CPUID, as kvmtool does, may refuse to run)".to_owned(),
    }
}

/// Whether the kernel redirects to slat the system calls that a program makes without the C library.
fn is_dispatched() -> bool {
    const SET_DISPATCH: libc::c_int = 59;
    const OFF: libc::c_ulong = 0;
    // SAFETY: the call turns off dispatch, which this thread does not use, or fails.
    unsafe { libc::prctl(SET_DISPATCH, OFF, 0, 0, 0) == 0 }
}

fn dispatch() -> String {
    match is_dispatched() {
        true => "yes: programs may make system calls of their own (Go with cgo, rustix)",
        false => {
            "no: system calls that programs make without the C library are not seen (Linux 5.11)"
        }
    }
    .to_owned()
}

fn loading() -> String {
    if !Path::new(LINKER).exists() {
        return format!("no: slat's library needs glibc, and {LINKER} is not there");
    }
    match is_dispatched() && can_be_separate() {
        true => "yes: static programs and those for musl run",
        false => "no: static programs and those for musl need dispatch, and FSGSBASE (Linux 5.9)",
    }
    .to_owned()
}

fn processors() -> String {
    std::thread::available_parallelism().map_or_else(|e| e.to_string(), |n| n.to_string())
}
