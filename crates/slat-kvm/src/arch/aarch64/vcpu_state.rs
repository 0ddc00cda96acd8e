//! arm64's state of a vCPU, besides its CPU and its machine.

/// arm64's state of a vCPU that only one thread at a time uses.
pub(crate) enum VcpuState {}
