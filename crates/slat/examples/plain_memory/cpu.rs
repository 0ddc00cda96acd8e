//! A software CPU that only loads and stores.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use slat::{Access, Ept, Format, Gpa, Hpa, OutOfMemory, Stats, Stop, Translation, Vcpu, Vm};

use crate::plain_memory::PlainMemory;

pub struct Cpu<F: Format = Ept> {
    vcpu: Vcpu<PlainMemory, F>,
    host: Arc<PlainMemory>,
}

impl<F: Format> Cpu<F> {
    pub fn new(vm: &Arc<Vm<PlainMemory, F>>) -> Result<Self, OutOfMemory> {
        Ok(Cpu {
            vcpu: vm.create_vcpu()?,
            host: vm.platform().clone(),
        })
    }

    /// Loads the word at `gpa`, a multiple of 8.
    pub fn load(&mut self, gpa: Gpa) -> Result<u64, Stop> {
        self.access(gpa, Access::Read, |word| word.load(Relaxed))
    }

    /// Stores a word at `gpa`, a multiple of 8.
    pub fn store(&mut self, gpa: Gpa, value: u64) -> Result<(), Stop> {
        self.access(gpa, Access::Write, |word| word.store(value, Relaxed))
    }

    /// Translates `gpa` and lets `then` access the word there.
    ///
    /// A translation may be used until the vCPU leaves. This CPU keeps none for later, so it has nothing to drop when
    /// the engine asks for a flush meanwhile.
    fn access<R>(
        &mut self,
        gpa: Gpa,
        access: Access,
        then: impl Fn(&AtomicU64) -> R,
    ) -> Result<R, Stop> {
        loop {
            self.vcpu.enter_unguarded(0);
            let page = self.vcpu.translate(gpa, access);
            let result = page.map(|Translation { host, .. }| {
                let address = Hpa(host.0 + gpa.offset());
                then(self.host.word(address))
            });
            self.vcpu.leave();
            if !matches!(result, Err(Stop::Retry)) {
                return result;
            }
        }
    }

    /// Returns the counters of the vCPU.
    pub fn stats(&self) -> Stats {
        self.vcpu.stats()
    }
}
