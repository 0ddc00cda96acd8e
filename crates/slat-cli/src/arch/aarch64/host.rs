//! The lines of `slat info`, and words of the help.

use slat_kvm::engine::TableFormat;

/// The help for `--mmu`.
pub const MMU: &str = "What makes the tables: tdp (a tree)";

/// The help for `--format`.
pub const FORMAT: &str = "Format of the tables; usually the one for pages as large as the host's";

/// Returns the line about guests.
pub fn guests() -> (&'static str, String) {
    let text = "arm64, executed by an interpreter";
    ("guests", text.to_owned())
}

/// Returns the line about the host's pages.
pub fn fact() -> (&'static str, String) {
    let kib = slat_process::page_size() >> 10;
    let format = TableFormat::default().name();
    (
        "pages",
        format!("{kib} KiB, so VMs usually have {format} tables"),
    )
}

/// Describes whether system calls arrive at slat that a program makes without the C library.
pub fn dispatch() -> &'static str {
    "yes: the instructions by which a program makes system calls of its own are rewritten when it begins"
}

/// Returns what the host lacks for loading programs: nothing.
pub fn missing_for_loading() -> Option<&'static str> {
    None
}
