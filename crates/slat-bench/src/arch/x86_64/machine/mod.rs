//! A KVM program: it has guest memory, memslots, vCPU threads, and a guest that executes a few loops.
//!
//! The same program runs on slat and on a real KVM ([`api`]). The guest really executes: each run checks its results.

pub mod api;
pub mod guest;
pub mod hypervisor;
mod interrupts;
mod layout;
mod loops;
mod modes;
pub mod program;

use slat::Setting;
use std::sync::Barrier;
use std::thread;
use std::time::Duration;

use kvm_bindings::{kvm_regs, kvm_userspace_memory_region};
use kvm_ioctls::VcpuExit;
use slat_kvm::engine::EngineVm;

pub use crate::rounds::thread_time;
pub use api::{Api, Failure, RealKvm, Slat, VcpuApi, VmApi};
pub use interrupts::message;
pub use modes::{Mode, Task};
pub use program::Program;
pub use slat_demo::memory::{Memory, Pages};

/// A VM whose slot 0 holds the guest's tables, code and stacks.
///
/// The machine borrows the memory of its other slots. So several machines can use that memory one after the other.
pub struct Machine<'m, A: Api> {
    // These fields are dropped before the memory, because the memory must outlive the VM.
    vcpus: Vec<<A::Vm as VmApi>::Vcpu>,
    vm: A::Vm,
    system: Memory,
    borrowed: std::marker::PhantomData<&'m Memory>,
}

/// A memslot at guest address `gpa`. It is backed by `size` bytes of `memory`, from `offset` on.
#[derive(Clone, Copy)]
pub struct Slot<'m> {
    /// The slot's number. The machine itself uses slot 0.
    pub id: u32,
    /// The slot's flags (`KVM_MEM_*`).
    pub flags: u32,
    /// The guest-physical address of the slot.
    pub gpa: u64,
    /// The memory that backs the slot.
    pub memory: &'m Memory,
    /// The offset in `memory` of the slot's first byte.
    pub offset: u64,
    /// The size of the slot in bytes; 0 deletes the slot.
    pub size: u64,
}

impl<'m> Slot<'m> {
    /// Makes a slot of all of `memory`, at `gpa`.
    pub fn whole(id: u32, gpa: u64, memory: &'m Memory) -> Self {
        Slot {
            id,
            flags: 0,
            gpa,
            memory,
            offset: 0,
            size: memory.size() as u64,
        }
    }
}

/// The result of a run of the machine.
pub struct Ran {
    /// The processor time of all vCPU threads together. It does not include time in which other programs ran.
    pub cpu: Duration,
    /// Each vCPU's registers at the end.
    pub registers: Vec<kvm_regs>,
}

impl Ran {
    /// Returns the time that the run would take on an otherwise idle machine. This time is the vCPUs' processor time
    /// divided by the number of processors that they can use at the same time.
    pub fn spread(&self) -> Duration {
        let processors = thread::available_parallelism().map_or(1, |n| n.get());
        self.cpu / processors.min(self.registers.len()) as u32
    }
}

impl<'m, A: Api> Machine<'m, A> {
    /// Makes a VM with `vcpus` vCPUs. Its guest can use the addresses up to `end`.
    ///
    /// # Errors
    /// The errors of the host and of KVM.
    ///
    /// # Panics
    /// If `vcpus` is more than [`guest::MAX_VCPUS`].
    pub fn new(api: &A, vcpus: usize, end: u64) -> Result<Self, Failure> {
        Self::prepared(api, vcpus, end, |_| Ok(()))
    }

    /// Makes a machine like [`Machine::new`], but calls `prepare` on the VM before the VM gets memory and vCPUs.
    ///
    /// # Errors
    /// The errors of [`Machine::new`], and those of `prepare`.
    ///
    /// # Panics
    /// In the cases of [`Machine::new`].
    pub fn prepared(
        api: &A,
        vcpus: usize,
        end: u64,
        prepare: impl FnOnce(&A::Vm) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        let mut system = Memory::new(guest::SYSTEM_SIZE, 2 << 20, Pages::Small)?;
        guest::load(system.bytes(), end);
        Self::on(api, vcpus, system, prepare)
    }

    /// Makes a machine like [`Machine::prepared`], but with the given memory in the system slot: the system memory of
    /// another machine, or a copy of that memory.
    ///
    /// # Errors
    /// The errors of [`Machine::prepared`].
    ///
    /// # Panics
    /// In the cases of [`Machine::new`].
    pub fn on(
        api: &A,
        vcpus: usize,
        system: Memory,
        prepare: impl FnOnce(&A::Vm) -> Result<(), Failure>,
    ) -> Result<Self, Failure> {
        assert!(vcpus <= guest::MAX_VCPUS);
        let vm = api.create_vm()?;
        prepare(&vm)?;
        let mut machine = Machine {
            vcpus: Vec::new(),
            vm,
            system,
            borrowed: std::marker::PhantomData,
        };
        put_slot(&machine.vm, &Slot::whole(0, guest::SYSTEM, &machine.system))?;
        for id in 0..vcpus {
            let vcpu = api.create_vcpu(&machine.vm, id as u64)?;
            vcpu.set_sregs(&guest::special_registers(vcpu.sregs()?))?;
            machine.vcpus.push(vcpu);
        }
        Ok(machine)
    }

    /// Creates, moves, changes or deletes a slot.
    ///
    /// # Errors
    /// KVM's errors.
    ///
    /// # Panics
    /// If the slot exceeds its memory.
    pub fn set_slot(&self, slot: &Slot<'m>) -> Result<(), Failure> {
        put_slot(&self.vm, slot)
    }

    /// Returns the VM.
    pub fn vm(&self) -> &A::Vm {
        &self.vm
    }

    /// Returns a vCPU.
    ///
    /// # Panics
    /// If there is no vCPU `index`.
    pub fn vcpu(&self, index: usize) -> &<A::Vm as VmApi>::Vcpu {
        &self.vcpus[index]
    }

    /// Prepares a vCPU for [`Program::interruptible`], which takes interrupts. The VM must have interrupt controllers.
    ///
    /// # Errors
    /// KVM's errors.
    ///
    /// # Panics
    /// If there is no vCPU `index`.
    pub fn take_interrupts(&self, index: usize) -> Result<(), Failure> {
        let vcpu = self.vcpu(index);
        vcpu.set_sregs(&interrupts::special_registers(vcpu.sregs()?))
    }

    /// Returns slat's engine, with its counters and policies. `None`: the machine runs on a real KVM, not on slat.
    pub fn engine(&self) -> Option<&EngineVm> {
        self.vm.engine()
    }

    /// Sets a policy of slat. Does nothing on a real KVM, whose policies only the host's administrator can change.
    ///
    /// # Errors
    /// If there is no policy of this name, or the policy rejects the value.
    pub fn set_policy(&self, name: &str, value: &str) -> Result<(), Failure> {
        match self.engine() {
            Some(engine) => {
                engine.set_policy(Setting::parse(name, value)?);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Makes the first vCPU read every page of the system slot, so that later programs take no faults on these pages.
    ///
    /// # Errors
    /// The errors of [`Machine::run`].
    pub fn touch_system(&mut self) -> Result<(), Failure> {
        let pages = guest::SYSTEM_SIZE as u64 / guest::PAGE;
        self.run(&[Program::read(guest::SYSTEM, pages)], &no_device)?;
        Ok(())
    }

    /// Runs the programs at the same time, each on a vCPU, from the first vCPU on. Returns when all programs have
    /// halted. `device` handles the exits.
    ///
    /// # Errors
    /// KVM's errors, or those of `device`.
    ///
    /// # Panics
    /// If there are more programs than vCPUs, or `device` panics.
    pub fn run(&mut self, programs: &[Program], device: &Device<'_>) -> Result<Ran, Failure> {
        Ok(self.run_beside(programs, device, |_| Ok(()))?.0)
    }

    /// Runs a program like [`Machine::run`], and the function `host` at the same time. `host` may change slots. If a
    /// program does not halt by itself, `host` must stop it, even when `host` fails.
    ///
    /// # Errors
    /// The errors of [`Machine::run`], and those of `host`.
    ///
    /// # Panics
    /// In the cases of [`Machine::run`].
    pub fn run_beside<R>(
        &mut self,
        programs: &[Program],
        device: &Device<'_>,
        host: impl FnOnce(&Slots<'_, 'm, A>) -> Result<R, Failure>,
    ) -> Result<(Ran, R), Failure> {
        assert!(programs.len() <= self.vcpus.len());
        let start = Barrier::new(programs.len());
        let Machine { vcpus, vm, .. } = self;
        let slots = Slots {
            vm: &*vm,
            borrowed: std::marker::PhantomData,
        };
        let (ended, result) = thread::scope(|scope| {
            let threads: Vec<_> = vcpus
                .iter_mut()
                .zip(programs)
                .enumerate()
                .map(|(index, (vcpu, program))| {
                    let start = &start;
                    scope.spawn(move || run_vcpu(vcpu, index, program, start, device))
                })
                .collect();
            let result = host(&slots);
            let ended = threads
                .into_iter()
                .map(|thread| thread.join().expect("a vCPU's thread does not panic"))
                .collect::<Result<Vec<_>, _>>();
            (ended, result)
        });
        let (ended, result) = (ended?, result?);
        let ran = Ran {
            cpu: ended.iter().map(|vcpu| vcpu.cpu).sum(),
            registers: ended.into_iter().map(|vcpu| vcpu.registers).collect(),
        };
        Ok((ran, result))
    }
}

fn put_slot(vm: &impl VmApi, slot: &Slot<'_>) -> Result<(), Failure> {
    assert!(slot.offset + slot.size <= slot.memory.size() as u64);
    let region = kvm_userspace_memory_region {
        slot: slot.id,
        flags: slot.flags,
        guest_phys_addr: slot.gpa,
        memory_size: slot.size,
        userspace_addr: slot.memory.address() + slot.offset,
    };
    // SAFETY: the memory outlives the VM: the order of a machine's fields ensures this for the system slot, and the
    // lifetime `'m` for all other memory. A shared `Memory` is accessed only by atomic operations.
    unsafe { vm.set_region(region) }
}

/// Access to the slots of a machine while its vCPUs run.
pub struct Slots<'a, 'm, A: Api> {
    vm: &'a A::Vm,
    /// Makes this type invariant in `'m`, like the machine.
    borrowed: std::marker::PhantomData<std::cell::Cell<&'m Memory>>,
}

impl<'m, A: Api> Slots<'_, 'm, A> {
    /// Changes a slot, like [`Machine::set_slot`].
    ///
    /// # Errors
    /// KVM's errors.
    pub fn set_slot(&self, slot: &Slot<'m>) -> Result<(), Failure> {
        put_slot(self.vm, slot)
    }
}

/// A function that handles a vCPU's exits. The first argument is the vCPU's number.
pub type Device<'a> = dyn Fn(usize, VcpuExit<'_>) -> Result<(), Failure> + Sync + 'a;

/// Handles the exits of guests that use only memory: reports every exit as an error.
pub fn no_device(index: usize, exit: VcpuExit<'_>) -> Result<(), Failure> {
    Err(format!("vCPU {index}: unexpected exit {exit:?}").into())
}

struct Ended {
    cpu: Duration,
    registers: kvm_regs,
}

fn run_vcpu<V: VcpuApi>(
    vcpu: &mut V,
    index: usize,
    program: &Program,
    start: &Barrier,
    device: &Device<'_>,
) -> Result<Ended, Failure> {
    let prepared = vcpu.set_regs(&program.registers(index));
    // The thread waits at the barrier even after an error, because the other threads wait for it.
    start.wait();
    prepared?;
    let began = thread_time();
    loop {
        match vcpu.run()? {
            VcpuExit::Hlt | VcpuExit::IoOut(guest::END, _) => break,
            exit => device(index, exit)?,
        }
    }
    Ok(Ended {
        cpu: thread_time() - began,
        registers: vcpu.regs()?,
    })
}
