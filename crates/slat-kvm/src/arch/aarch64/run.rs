//! arm64's part of `KVM_RUN`. No vCPU runs yet.

use crate::arch::aarch64::cpu::Exit;
use crate::errno::Result;
use crate::run::Next;
use crate::signals::Masked;
use crate::vcpu::{Inner, VcpuObject};

impl VcpuObject {
    /// Reads the client's input in `kvm_run`.
    pub(crate) fn prepare(&self, inner: &mut Inner, _: Option<&Masked>) -> Result<bool> {
        match inner.cpu.state {}
    }

    /// Gives the CPU the settings of the VM.
    pub(crate) fn begin_run(&self, inner: &mut Inner) {
        match inner.cpu.state {}
    }

    /// Updates the structures that the guest shares with its host.
    pub(crate) fn update_guest(&self, inner: &mut Inner) -> bool {
        match inner.cpu.state {}
    }

    /// Delivers pending events to the guest.
    pub(crate) fn deliver_events(&self, inner: &mut Inner, _: Option<&Masked>) -> Result<bool> {
        match inner.cpu.state {}
    }

    /// Handles an exit of the CPU.
    pub(crate) fn handle(&self, _: &mut Inner, exit: Exit, _: Option<&Masked>) -> Result<Next> {
        match exit {}
    }

    /// Whether the client has to see what the completed instruction has done.
    pub(crate) fn has_late_exit(&self, inner: &mut Inner) -> bool {
        match inner.cpu.state {}
    }

    /// Stores the fields that the client reads in `kvm_run` after every run.
    pub(crate) fn publish(&self, inner: &mut Inner) {
        match inner.cpu.state {}
    }
}

impl Inner {
    /// Begins the exception that the client has requested.
    pub(crate) fn begin_requested(&mut self) {
        match self.cpu.state {}
    }

    /// Call before guest code runs.
    pub(crate) fn enters_guest(&mut self) {
        match self.cpu.state {}
    }

    /// Call after guest code has run.
    pub(crate) fn left_guest(&mut self) {
        match self.cpu.state {}
    }
}
