//! Cranelift, set up for the host.

use crate::arch;
use cranelift_codegen::isa::{self, CallConv, OwnedTargetIsa};
use cranelift_codegen::settings::{self, Configurable};

/// The calling convention by which compiled code calls slat's functions that [`helper`](crate::helper) defines. Of the
/// host's conventions, it preserves the most registers: such calls are rare, and the code around them keeps its values
/// in registers.
pub const HELPERS: CallConv = arch::HELPERS;

/// Whether Cranelift's `fma` becomes an instruction of the host. Otherwise it would become a call of a library.
pub fn has_fused_multiply_add() -> bool {
    arch::has_fused_multiply_add()
}

/// Returns Cranelift's instruction set for the host, with the features of the host's processor. `settings` are settings
/// of Cranelift's, in addition to those of all compilers of guest code: a pinned register, and no unwinding.
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
