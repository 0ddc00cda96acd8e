//! A guard for a vCPU that is in the engine's reader section (an entered vCPU). Flushes and slot changes wait for this
//! vCPU, so it must leave, even when its thread panics.

use crate::engine::EngineVcpu;
use std::ops::{Deref, DerefMut};

/// Keeps the engine's vCPU that `T` holds in the engine's reader section, until this value is dropped.
pub(crate) struct Entered<'a, T: AsMut<EngineVcpu>>(&'a mut T);

impl<'a, T: AsMut<EngineVcpu>> Entered<'a, T> {
    pub(crate) fn enter(holder: &'a mut T) -> Self {
        holder.as_mut().enter_unguarded(thread_id());
        Entered(holder)
    }
}

impl<T: AsMut<EngineVcpu>> Drop for Entered<'_, T> {
    fn drop(&mut self) {
        self.0.as_mut().leave();
    }
}

impl<T: AsMut<EngineVcpu>> Deref for Entered<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.0
    }
}

impl<T: AsMut<EngineVcpu>> DerefMut for Entered<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.0
    }
}

/// Leaves the engine, runs `work`, which may wait, and enters again. Call only inside the engine's reader section. If
/// `work` panics, the vCPU stays outside.
pub(crate) fn outside<R>(vcpu: &mut EngineVcpu, work: impl FnOnce() -> R) -> R {
    vcpu.leave();
    let result = work();
    vcpu.enter_unguarded(thread_id());
    result
}

/// Returns this thread's id, to which a kick is sent.
pub(crate) fn thread_id() -> usize {
    slat_process::thread_id() as usize
}
