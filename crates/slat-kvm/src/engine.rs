//! Which engine this port runs on: the one place that names the platform and the table format.

/// The engine's VM.
pub type EngineVm = slat::Vm<slat_host::HostPlatform, slat::Ept>;
/// The engine's vCPU.
pub type EngineVcpu = slat::Vcpu<slat_host::HostPlatform, slat::Ept>;
