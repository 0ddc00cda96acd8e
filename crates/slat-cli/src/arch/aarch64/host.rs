//! The lines of `slat info` and the words of the help that depend on the architecture.

use slat_kvm::engine::TableFormat;

/// The help for `--mmu`.
pub const MMU: &str = "What makes the tables: tdp (a tree)";

/// The help for `--format`.
pub const FORMAT: &str = "Format of the tables; usually the one for pages as large as the host's";

/// The architectures whose tables `slat bench` can measure, each with the format of its tables. `None`: the format that
/// slat usually uses.
pub const TABLES: &[(&str, Option<&str>)] = &[("arm64", None)];

/// Returns the line of `slat info` about guests: name and text.
pub fn guests() -> (&'static str, String) {
    let text = "arm64, whose hot code is compiled";
    ("guests", text.to_owned())
}

/// Returns the line of `slat info` about the host's pages: name and text.
pub fn fact() -> (&'static str, String) {
    let kib = slat_process::page_size() >> 10;
    let format = TableFormat::default().name();
    (
        "pages",
        format!("{kib} KiB, so VMs usually have {format} tables"),
    )
}

/// Says whether slat sees the system calls that a program makes without the C library.
pub fn dispatch() -> &'static str {
    "yes: the instructions by which a program makes system calls of its own are rewritten when it begins"
}

/// Returns the name of the missing host feature that slat needs for loading programs. On arm64, none is missing:
/// returns `None`.
pub fn missing_for_loading() -> Option<&'static str> {
    None
}
