//! `slat info`: what this slat supports, and what this host allows.

use std::fs;
use std::io;
use std::path::Path;
use std::process::ExitCode;

use crate::arch::host;
use crate::arch::program::LINKER;
use crate::args;
use crate::output;
use slat_kvm::policy::Assignment;

/// Prints all facts. A fact that slat cannot determine is printed as unknown.
pub fn print() -> ExitCode {
    let mut text = format!("slat {}\n", env!("VERSION_AND_COMMIT"));
    let parts = [
        ("Supported", supported()),
        ("This host", this_host()),
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
        host::guests(),
    ]
}

fn mmus() -> String {
    let names: Vec<_> = args::mmus().map(|mmu| mmu.name()).collect();
    names.join(", ")
}

/// Returns all policies, each with its default and the values that it takes.
fn policies() -> Vec<(&'static str, String)> {
    let all = Assignment::defaults();
    let describe = |policy: &Assignment| format!("{:<15} {}", policy.value(), policy.expected());
    let lines = all.iter().map(|policy| (policy.name(), describe(policy)));
    lines.collect()
}

fn this_host() -> Vec<(&'static str, String)> {
    vec![
        ("/dev/kvm", dev_kvm()),
        ("userfaultfd", userfaultfd()),
        ("huge pages (THP)", thp_mode()),
        ("processors", processors()),
        host::fact(),
        ("dispatch", host::dispatch().to_owned()),
        ("loading", loading()),
    ]
}

/// Describes the host's own `/dev/kvm`, which slat does not need.
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

/// Describes userfaultfd. Programs that fill guest memory on demand need this system call, and permission to handle
/// page faults that occur in the kernel.
fn userfaultfd() -> String {
    // SAFETY: the call opens a new descriptor, or fails.
    let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
    if fd < 0 {
        return format!("no: {} (slat serves it)", io::Error::last_os_error());
    }
    // SAFETY: the descriptor was opened above, and no other code knows it.
    unsafe { libc::close(fd as libc::c_int) };
    "yes".to_owned()
}

/// Returns the host's mode of transparent huge pages: "always", "madvise" or "never". The mode decides whether guest
/// memory gets 2 MiB leaves.
fn thp_mode() -> String {
    let Ok(modes) = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled") else {
        return "not supported by this kernel".to_owned();
    };
    // In the file, the active mode is in brackets.
    modes
        .split_once('[')
        .and_then(|(_, rest)| rest.split_once(']'))
        .map_or("unknown", |(mode, _)| mode)
        .to_owned()
}

fn loading() -> String {
    if !Path::new(LINKER).exists() {
        return format!("no: slat's library needs glibc, and {LINKER} is not there");
    }
    match host::missing_for_loading() {
        None => "yes: static programs and those for musl run".to_owned(),
        Some(needs) => format!("no: static programs and those for musl need {needs}"),
    }
}

fn processors() -> String {
    std::thread::available_parallelism().map_or_else(|e| e.to_string(), |n| n.to_string())
}
