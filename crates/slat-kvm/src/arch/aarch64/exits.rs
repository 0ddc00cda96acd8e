//! The exits that only arm64 has, in the types of kvm-ioctls.

use crate::run_page::RunPage;
use kvm_ioctls::VcpuExit;

/// Returns an exit that only arm64 has. kvm-ioctls has no names for such exits.
pub(crate) fn exit(page: &mut RunPage) -> VcpuExit<'_> {
    VcpuExit::Unsupported(page.exit_reason())
}
