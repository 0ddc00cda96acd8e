//! The engine's objects, for all table formats.

use super::Done;
use super::message::refused;
use super::platform::Callbacks;
use slat::{
    Access, Config, CreateVmError, Format, Gpa, Hva, Mapping, Pfn, Region, Setting, Stop, Vcpu, Vm,
};
use std::ffi::c_int;
use std::ops::Range;
use std::sync::Arc;

pub(super) trait AnyVm: Send + Sync {
    fn set_policy(&self, setting: Setting);
    fn set_region(&self, region: &Region) -> Done;
    fn remove_region(&self, slot: u32) -> Done;
    fn root(&self) -> Option<Pfn>;
    fn lookup(&self, gpa: Gpa) -> Option<Mapping>;
    fn dirty_log(&self, slot: u32, bitmap: &mut [u64]) -> Done;
    fn drain(&self, gpas: &[u64]);
    fn invalidate(&self, range: Range<Hva>, change: &mut dyn FnMut() -> c_int) -> c_int;
    fn create_vcpu(&self) -> Result<Box<dyn AnyVcpu>, c_int>;
}

pub(super) trait AnyVcpu {
    fn fault(&mut self, gpa: Gpa, access: Access) -> Done;
}

pub(super) fn create<F: Format>(
    platform: Callbacks,
    config: Config,
) -> Result<Box<dyn AnyVm>, c_int> {
    match Vm::<_, F>::new(Arc::new(platform.with_granule(F::GRANULE)), config) {
        Ok(vm) => Ok(Box::new(vm)),
        Err(error @ CreateVmError::OutOfMemory) => Err(refused(libc::ENOMEM, &error)),
        Err(error) => Err(refused(libc::EINVAL, &error)),
    }
}

/// The number of the only address space of a VM.
const SPACE: usize = 0;

impl<F: Format> AnyVm for Arc<Vm<Callbacks, F>> {
    fn set_policy(&self, setting: Setting) {
        Vm::set_policy(self, setting);
    }

    fn set_region(&self, region: &Region) -> Done {
        let set = self.set_memory_region(SPACE, region);
        set.map(|()| 0)
            .map_err(|error| refused(error.errno(), &error))
    }

    fn remove_region(&self, slot: u32) -> Done {
        let removed = self.remove_memory_region(SPACE, slot);
        removed
            .map(|()| 0)
            .map_err(|error| refused(error.errno(), &error))
    }

    fn root(&self) -> Option<Pfn> {
        Vm::root(self, SPACE)
    }

    fn lookup(&self, gpa: Gpa) -> Option<Mapping> {
        Vm::lookup(self, SPACE, F::GRANULE.gfn(gpa))
    }

    fn dirty_log(&self, slot: u32, bitmap: &mut [u64]) -> Done {
        let got = self.get_dirty_log(SPACE, slot, bitmap);
        got.map(|()| 0)
            .map_err(|error| refused(error.errno(), &error))
    }

    fn drain(&self, gpas: &[u64]) {
        let gfns = gpas.iter().map(|gpa| F::GRANULE.gfn(Gpa(*gpa)));
        Vm::drain(self, SPACE, gfns);
    }

    fn invalidate(&self, range: Range<Hva>, change: &mut dyn FnMut() -> c_int) -> c_int {
        let _invalidation = Vm::invalidate(self, range);
        change()
    }

    fn create_vcpu(&self) -> Result<Box<dyn AnyVcpu>, c_int> {
        match Vm::create_vcpu(self) {
            Ok(vcpu) => Ok(Box::new(vcpu)),
            Err(error) => Err(refused(libc::ENOMEM, &error)),
        }
    }
}

impl<F: Format> AnyVcpu for Vcpu<Callbacks, F> {
    fn fault(&mut self, gpa: Gpa, access: Access) -> Done {
        let Err(stop) = self.hardware_fault(gpa, access) else {
            return Ok(0);
        };
        let errno = match stop {
            Stop::Mmio { .. } => return Ok(super::SLAT_MMIO),
            Stop::NoExecute { .. } => libc::EACCES,
            Stop::OutOfMemory { .. } => libc::ENOMEM,
            Stop::MemoryFault { absent: true, .. } => libc::EAGAIN,
            _ => libc::EFAULT,
        };
        Err(refused(errno, &stop))
    }
}
