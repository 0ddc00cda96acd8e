//! Cranelift, set up for the host.

use crate::arch;
use cranelift_codegen::isa::{self, CallConv, OwnedTargetIsa};
use cranelift_codegen::settings::{self, Configurable};

/// The convention by which compiled code calls functions of slat's, which [`helper`](crate::helper) defines: the one of
/// the host's that preserves the most registers. Such calls are rare, and the code around them keeps its registers.
pub const HELPERS: CallConv = arch::HELPERS;

/// Whether Cranelift's `fma` is an instruction of the host. If not, it would be a call of a library.
pub fn has_fused_multiply_add() -> bool {
    arch::has_fused_multiply_add()
}

/// Returns the host's instruction set, with the features that the host's processor has. `settings` are Cranelift's, in
/// addition to those that all compilers of guest code have: a pinned register, and no unwinding.
///
/// # Panics
/// Panics if Cranelift does not know a setting.
pub fn isa(settings: &[(&str, &str)]) -> OwnedTargetIsa {
    let verifies = if cfg!(debug_assertions) {
        "true"
    } else {
        "false"
    };
    let common = [
        ("enable_pinned_reg", "true"),
        ("enable_probestack", "false"),
        ("unwind_info", "false"),
        ("enable_verifier", verifies),
    ];
    let mut flags = settings::builder();
    for (name, value) in common.iter().chain(settings) {
        flags.set(name, value).expect("a setting of Cranelift's");
    }
    let mut isa = isa::lookup_by_name(arch::TARGET).expect("Cranelift was built for this machine");
    for name in arch::features() {
        isa.enable(name).expect("a setting of Cranelift's");
    }
    isa.finish(settings::Flags::new(flags))
        .expect("settings that fit together")
}
