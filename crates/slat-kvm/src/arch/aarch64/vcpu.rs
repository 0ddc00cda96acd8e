//! The calls of a vCPU that every architecture has. There is no vCPU yet.

use crate::arch::aarch64::cpu::Executor;
use crate::arch::aarch64::machine::VcpuMachine;
use crate::arch::aarch64::state::VcpuShared;
use crate::arch::aarch64::vcpu_state::VcpuState;
use crate::engine::EngineVcpu;
use crate::errno::{Result, fail};
use crate::messages;
use crate::vcpu::{Inner, VcpuObject};
use crate::vcpu_common::VcpuCommon;
use crate::vm::VmObject;
use kvm_bindings::*;
use slat::Shared;
use std::sync::Arc;

impl VmObject {
    /// Creates arm64's state of a new vCPU that other threads use.
    pub(crate) fn shared_of_vcpu(&self, _id: u32, _index: u32) -> VcpuShared {
        VcpuShared
    }

    /// Refuses to create a vCPU, and says why.
    ///
    /// # Errors
    /// `EOPNOTSUPP`, which `KVM_CREATE_VCPU` never returns in KVM.
    pub(crate) fn parts_of_vcpu(
        self: &Arc<Self>,
        _: EngineVcpu,
        common: Shared<VcpuCommon>,
    ) -> Result<(Executor, VcpuMachine, VcpuState)> {
        messages::say(format_args!(
            "creating vCPU {}: slat has no processor for arm64 guests yet, so its VMs on this machine have memory only",
            common.id
        ));
        fail(libc::EOPNOTSUPP)
    }
}

impl VcpuObject {
    /// Carries out `KVM_GET_MP_STATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_mp_state(&self) -> Result<kvm_mp_state> {
        match self.lock()?.cpu.state {}
    }

    /// Carries out `KVM_SET_MP_STATE`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_mp_state(&self, _: kvm_mp_state) -> Result<()> {
        match self.lock()?.cpu.state {}
    }

    /// Carries out `KVM_GET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn get_vcpu_events(&self) -> Result<kvm_vcpu_events> {
        match self.lock()?.cpu.state {}
    }

    /// Carries out `KVM_SET_VCPU_EVENTS`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_vcpu_events(&self, _: &kvm_vcpu_events) -> Result<()> {
        match self.lock()?.cpu.state {}
    }

    /// Carries out `KVM_SET_GUEST_DEBUG`.
    ///
    /// # Errors
    /// `EIO`.
    pub fn set_guest_debug(&self, _: &kvm_guest_debug) -> Result<()> {
        match self.lock()?.cpu.state {}
    }
}

impl Inner {
    /// Call when the vCPU exists.
    pub(crate) fn begin_life(&mut self) {
        match self.cpu.state {}
    }

    /// Whether the last run has begun an access that the next run has to complete.
    pub(crate) fn is_unfinished(&self) -> bool {
        match self.cpu.state {}
    }

    /// Drops all cached translations.
    pub(crate) fn flush_translations(&mut self) {
        match self.cpu.state {}
    }
}
