//! The lines of `slat info` and the words of the help that depend on the architecture.

use slat_kvm::cpuid::{host_leaf, is_amd};
use slat_process::pointers::can_be_separate;

/// The help for `--mmu`.
pub const MMU: &str = "What makes the tables: tdp (a tree), direct (shadow pages and a reverse map; ept and npt, also \
                       with 5 levels), shadow (tables that shadow the guest's own; x86)";

/// The help for `--format`.
pub const FORMAT: &str = "Format of the tables; usually ept, with the shadow MMU x86";

/// The architectures whose tables `slat bench` can measure, each with the format of its tables. `None`: the format that
/// slat usually uses.
pub const TABLES: &[(&str, Option<&str>)] = &[("x86-64", None), ("arm64", Some("aarch64"))];

/// Returns the line of `slat info` about guests: name and text.
pub fn guests() -> (&'static str, String) {
    ("nested guests", nested_guests())
}

/// Returns the line of `slat info` about the host's processors: name and text.
pub fn fact() -> (&'static str, String) {
    ("VMX or SVM", virtualization())
}

/// Returns the name of the missing host feature that slat needs for loading programs. `None`: no such feature is
/// missing.
pub fn missing_for_loading() -> Option<&'static str> {
    let has_all = is_dispatched() && can_be_separate();
    (!has_all).then_some("dispatch, and FSGSBASE (Linux 5.9)")
}

/// Says which CPUID results a guest must see to run guests of its own by SVM. Guests check the vendor before they check
/// for SVM.
fn nested_guests() -> String {
    let model = match is_amd() {
        true => "host, or EPYC,+svm",
        false => "EPYC,+svm; no Intel model",
    };
    format!("SVM with nested paging (QEMU: -cpu {model})")
}

/// Returns the virtualization feature (VMX or SVM) that the CPUID instruction reports on this processor. slat cannot
/// change the results of CPUID for a program.
fn virtualization() -> String {
    // Intel SDM, volume 2, CPUID: leaf 1, ECX bit 5. AMD APM, volume 3, appendix E: leaf 8000_0001h, ECX bit 2.
    let vmx = host_leaf(1, 0).ecx & 1 << 5 != 0;
    let svm = host_leaf(0x8000_0001, 0).ecx & 1 << 2 != 0;
    match vmx || svm {
        true => "yes (slat does not need it)".to_owned(),
        false => "no (slat does not need it; a program that asks the processor for it by CPUID, as kvmtool does, may refuse to run)".to_owned(),
    }
}

/// Whether the kernel can redirect a program's system calls to slat when the program makes them without the C
/// library.
fn is_dispatched() -> bool {
    const SET_DISPATCH: libc::c_int = 59;
    const OFF: libc::c_ulong = 0;
    // SAFETY: the call either fails, or turns off system call dispatch, which this thread does not use.
    unsafe { libc::prctl(SET_DISPATCH, OFF, 0, 0, 0) == 0 }
}

/// Says whether slat sees the system calls that a program makes without the C library.
pub fn dispatch() -> &'static str {
    match is_dispatched() {
        true => "yes: programs may make system calls of their own (Go with cgo, rustix)",
        false => {
            "no: system calls that programs make without the C library are not seen (Linux 5.11)"
        }
    }
}
