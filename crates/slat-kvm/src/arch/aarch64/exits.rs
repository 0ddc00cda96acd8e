//! The exits that only arm64 has, in the types of kvm-ioctls.

use kvm_bindings::kvm_run;
use kvm_ioctls::VcpuExit;

/// Returns an exit whose reason not every architecture has. kvm-ioctls has no names for arm64's.
pub(crate) fn exit(run: &mut kvm_run) -> VcpuExit<'_> {
    VcpuExit::Unsupported(run.exit_reason)
}
