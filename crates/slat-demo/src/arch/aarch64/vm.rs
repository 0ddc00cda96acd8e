//! A VM with memory, and the threads that use it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use kvm_bindings::{KVM_MEM_LOG_DIRTY_PAGES, kvm_userspace_memory_region};
use slat_kvm::engine::EngineVm;
use slat_kvm::{Kvm, VmFd};

use crate::Failure;
use crate::arch::aarch64::access::Accessor;
use crate::memory::Memory;

/// The number of threads that use guest memory.
pub const THREADS: usize = 2;

/// A memslot that is backed by all of `memory`.
#[derive(Clone, Copy)]
pub struct Slot<'m> {
    /// The number of the memslot.
    pub id: u32,
    /// The guest-physical address of the memslot's first byte.
    pub gpa: u64,
    /// The memory that backs the memslot.
    pub memory: &'m Memory,
}

/// A VM. Its memory outlives it.
pub struct Vm<'m> {
    fd: VmFd,
    memory: std::marker::PhantomData<&'m Memory>,
}

impl<'m> Vm<'m> {
    /// Creates a VM without memory.
    ///
    /// # Errors
    /// KVM's errors.
    pub fn new(kvm: &Kvm) -> Result<Self, Failure> {
        Ok(Vm {
            fd: kvm.create_vm()?,
            memory: std::marker::PhantomData,
        })
    }

    /// Creates a memslot.
    ///
    /// # Errors
    /// KVM's errors.
    pub fn create(&self, slot: Slot<'m>) -> Result<Duration, Failure> {
        self.set(slot, slot.memory.size(), 0)
    }

    /// Starts dirty logging of a memslot.
    ///
    /// # Errors
    /// KVM's errors.
    pub fn begin_log(&self, slot: Slot<'m>) -> Result<Duration, Failure> {
        self.set(slot, slot.memory.size(), KVM_MEM_LOG_DIRTY_PAGES)
    }

    /// Deletes a memslot.
    ///
    /// # Errors
    /// KVM's errors.
    pub fn delete(&self, slot: Slot<'m>) -> Result<Duration, Failure> {
        self.set(slot, 0, 0)
    }

    fn set(&self, slot: Slot<'m>, size: usize, flags: u32) -> Result<Duration, Failure> {
        let region = kvm_userspace_memory_region {
            slot: slot.id,
            flags,
            guest_phys_addr: slot.gpa,
            memory_size: size as u64,
            userspace_addr: slot.memory.address(),
        };
        let began = Instant::now();
        // SAFETY: the memory outlives the VM, and this process accesses it as atomics only.
        unsafe { self.fd.set_user_memory_region(region) }
            .map_err(|e| format!("memslot {}: {e}", slot.id))?;
        Ok(began.elapsed())
    }

    /// Returns the numbers of those pages of a memslot that were written since the last call.
    ///
    /// # Errors
    /// KVM's errors.
    pub fn log(&self, slot: Slot<'m>) -> Result<Vec<u64>, Failure> {
        let words = self.fd.get_dirty_log(slot.id, slot.memory.size())?;
        let bit = |page: &u64| words[*page as usize / 64] >> (page % 64) & 1 != 0;
        Ok((0..words.len() as u64 * 64).filter(bit).collect())
    }

    /// Returns the engine, with its counters.
    pub fn engine(&self) -> &Arc<EngineVm> {
        self.fd.engine()
    }

    /// Runs `work` on all threads at the same time. `work` gets the number of the thread. Returns the time until the
    /// last thread has finished, and the results.
    ///
    /// # Errors
    /// The first error of `work`.
    pub fn on_threads<R: Send>(
        &self,
        work: impl Fn(u64, &mut Accessor) -> Result<R, Failure> + Sync,
    ) -> Result<(Duration, Vec<R>), Failure> {
        let accessors = (0..THREADS)
            .map(|_| self.engine().create_vcpu().map(Accessor::new))
            .collect::<Result<Vec<_>, _>>()?;
        let began = Instant::now();
        let results = thread::scope(|scope| {
            let work = &work;
            let threads: Vec<_> = accessors
                .into_iter()
                .zip(0..)
                .map(|(mut accessor, number)| scope.spawn(move || work(number, &mut accessor)))
                .collect();
            let results = threads.into_iter();
            results
                .map(|thread| thread.join().expect("no access panics"))
                .collect::<Result<Vec<_>, Failure>>()
        })?;
        Ok((began.elapsed(), results))
    }
}
