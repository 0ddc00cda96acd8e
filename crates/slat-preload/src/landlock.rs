//! Landlock: rules that a program adds for `/dev/kvm`, and slat's preparations before the program restricts itself.
//!
//! The kernel accepts rules only for files that have a path. slat's descriptor of `/dev/kvm` has no path. So slat
//! changes a rule for this descriptor to a rule for the machine's own `/dev/kvm`, or for `/dev/null` if the machine has
//! no such device. The changed rule suffices, because slat opens `/dev/kvm` without the kernel.

use slat_kvm::filters;
use std::ffi::{c_int, c_uint};

use crate::guarded::guarded;
use crate::real::{Opened, call};
use crate::table;

/// The rule type `LANDLOCK_RULE_PATH_BENEATH`.
const PATH_BENEATH: usize = 1;

/// The kernel's `struct landlock_path_beneath_attr`.
#[repr(C, packed)]
struct PathBeneath {
    allowed_access: u64,
    parent_fd: c_int,
}

/// Replaces landlock_add_rule(2).
///
/// # Safety
/// The conditions are those of landlock_add_rule(2).
pub unsafe fn add_rule(ruleset: c_int, kind: usize, attributes: usize, flags: c_uint) -> isize {
    let pass_on = |attributes: usize| {
        // SAFETY: the arguments are valid for landlock_add_rule(2), as this function's contract requires.
        unsafe {
            call!(
                libc::SYS_landlock_add_rule,
                ruleset,
                kind,
                attributes,
                flags
            )
        }
    };
    // Before the program's first use of KVM, no descriptor is slat's, and memory accesses are not guarded.
    if kind != PATH_BENEATH || !crate::is_prepared() {
        return pass_on(attributes);
    }
    let at = attributes as *const u8;
    // SAFETY: a guarded load may be made at any address. The kernel will read the same struct of the program.
    let rule = unsafe {
        let rights = slat_guard::load(at.cast::<u64>());
        rights.and_then(|rights| Ok((rights, slat_guard::load(at.wrapping_add(8).cast::<u32>())?)))
    };
    let Ok((allowed_access, parent)) = rule else {
        return pass_on(attributes);
    };
    let mut rule = PathBeneath {
        allowed_access,
        parent_fd: parent as c_int,
    };
    if !table::is_ours(rule.parent_fd) {
        return pass_on(attributes);
    }
    let device = [c"/dev/kvm", c"/dev/null"]
        .into_iter()
        .find_map(|path| Opened::new(path, libc::O_PATH));
    let Some(device) = device else {
        return pass_on(attributes);
    };
    rule.parent_fd = device.fd();
    pass_on(&raw const rule as usize)
}

/// Replaces landlock_restrict_self(2).
///
/// # Safety
/// The conditions are those of landlock_restrict_self(2).
pub unsafe fn restrict_self(ruleset: c_int, flags: c_uint) -> isize {
    // slat serves no KVM calls in a child of `vfork`, and must not start threads in the parent's memory.
    if !crate::is_borrowed() {
        guarded(|| {
            filters::before_landlock();
            Ok(0)
        });
    }
    // SAFETY: the arguments are valid for landlock_restrict_self(2), as this function's contract requires.
    unsafe { call!(libc::SYS_landlock_restrict_self, ruleset, flags) }
}
