//! The loop of a hypervisor: it runs the guest, and handles the guest's exits. The engine counts faults, and the loop
//! counts the CPU's reports, so that tests can compare the two counts.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use slat::guest_walk::GuestPaging;
use slat::{Access, Format, Gpa, Hpa, Stop, Vcpu, Vm};

use crate::guest_tables;
use crate::{Cause, Command, Cpu, Exit, Host, Machine, Op};
use slat_model::Lock;

pub(crate) type Tables<M> = <<M as Machine>::Cpu as Cpu>::Format;
pub(crate) type GuestVm<M> = Arc<Vm<Host<M>, Tables<M>>>;

/// The address of the guest's program.
pub(crate) const CODE: Gpa = Gpa(0x1000_0000);
/// The value that a load from an address without memory returns.
pub(crate) const DEVICE: u32 = 0x0d0d;

/// The counts of one CPU's reports.
#[derive(Default)]
pub(crate) struct Seen {
    /// The number of second-level faults, except faults of MMIO entries.
    pub(crate) faults: AtomicU64,
    /// The number of faults that the walker itself reported as faults of an MMIO entry.
    pub(crate) mmio_faults: AtomicU64,
    /// The number of accesses to addresses without memory.
    pub(crate) mmio: AtomicU64,
    /// The number of interrupts that made the CPU leave the guest.
    pub(crate) kicks: AtomicU64,
}

/// A virtual CPU, which any CPU of the machine can run.
pub(crate) struct Guest<M: Machine> {
    pub(crate) vcpu: Vcpu<Host<M>, Tables<M>>,
    /// The root of the second level.
    pub(crate) second_level: Hpa,
    /// The state of the guest's own paging, for shadow tables.
    pub(crate) paging: GuestPaging,
    pub(crate) seen: Arc<Seen>,
}

impl<M: Machine> Guest<M> {
    /// If one access faults this number of times without an interruption, it counts as making no progress.
    const STUCK: u32 = 1000;

    pub(crate) fn new(vm: &GuestVm<M>) -> Result<Self, String> {
        Ok(Guest {
            vcpu: vm.create_vcpu().map_err(|error| error.to_string())?,
            second_level: Tables::<M>::GRANULE.hpa(vm.root(0).ok_or("no root table")?),
            paging: guest_tables::paging(guest_tables::root(0).0, M::physical_bits()),
            seen: Arc::default(),
        })
    }

    /// Runs the guest on `cpu` until it has done `command`. Returns the guest's result.
    pub(crate) fn run(&mut self, cpu: &mut M::Cpu, command: &Command) -> Result<u32, String> {
        cpu.begin(CODE, command);
        let mut last = (Gpa(0), Access::Read, 0);
        let mut alone = None;
        loop {
            let root = self.root()?;
            alone = self.turn(last.2, alone);
            let vm = self.vcpu.vm();
            let exit = cpu.run(vm.id(), root);
            cpu.drain(&mut |gpa| vm.drain(0, [gpa.gfn()]));
            match exit {
                Exit::Fault { gpa, access, cause } => {
                    last = match last {
                        (page, how, n) if (page.gfn(), how) == (gpa.gfn(), access) => {
                            (gpa, access, n + 1)
                        }
                        _ => (gpa, access, 0),
                    };
                    if last.2 == Self::STUCK {
                        return Err(format!("{access:?} of {gpa} faults for ever ({cause:?})"));
                    }
                    if !self.fault(gpa, access, cause)? {
                        cpu.complete_mmio(DEVICE);
                        last.2 = 0;
                    }
                }
                Exit::Done { result } => return Ok(result),
                Exit::Invalidate { gva } => self.invalidate(gva),
                Exit::Root { cr3 } => self.load_root(cr3),
                Exit::Kicked => {
                    self.seen.kicks.fetch_add(1, SeqCst);
                }
                Exit::BufferFull => {}
                Exit::Other { code, info } => {
                    return Err(format!("unexpected exit {code:#x}, {info:#x}"));
                }
            }
        }
    }

    /// Handles a fault. Returns whether the guest may try the access again. `false`: there is no memory.
    pub(crate) fn fault(&mut self, gpa: Gpa, access: Access, cause: Cause) -> Result<bool, String> {
        match cause {
            Cause::Mmio => &self.seen.mmio_faults,
            Cause::NotPresent | Cause::Protection => &self.seen.faults,
        }
        .fetch_add(1, SeqCst);
        let answer = match Tables::<M>::SHADOWS {
            true => self.shadow_fault(gpa, access)?,
            false => self.vcpu.hardware_fault(gpa, access),
        };
        match answer {
            Ok(()) => Ok(true),
            Err(Stop::Mmio { .. }) => {
                self.seen.mmio.fetch_add(1, SeqCst);
                Ok(false)
            }
            Err(stop) => Err(stop.to_string()),
        }
    }
}

/// A guest that runs one command again and again on the second CPU, beside the first CPU's guest.
pub(crate) struct Beside<M: Machine> {
    state: Arc<State<M>>,
    pub(crate) seen: Arc<Seen>,
}

struct State<M: Machine> {
    stop: AtomicBool,
    ended: AtomicBool,
    passes: AtomicU64,
    result: AtomicU32,
    /// The largest result so far.
    largest: AtomicU32,
    /// The result, which is set when the guest has ended.
    outcome: Lock<Option<Result<Guest<M>, String>>>,
}

impl<M: Machine> Beside<M> {
    /// Starts the guest. A guest that writes continues to count from pass to pass, so that every value that it writes
    /// to an address is larger than the one before.
    pub(crate) fn start(mut guest: Guest<M>, mut command: Command) -> Self {
        let state = Arc::new(State {
            stop: AtomicBool::new(false),
            ended: AtomicBool::new(false),
            passes: AtomicU64::new(0),
            result: AtomicU32::new(0),
            largest: AtomicU32::new(0),
            outcome: Lock::new(None),
        });
        let beside = Beside {
            state: state.clone(),
            seen: guest.seen.clone(),
        };
        M::second().start(move |cpu| {
            let mut outcome = Ok(());
            while outcome.is_ok() && !state.stop.load(SeqCst) {
                outcome = guest.run(cpu, &command).map(|result| {
                    state.result.store(result, SeqCst);
                    state.largest.fetch_max(result, SeqCst);
                    state.passes.fetch_add(1, SeqCst);
                });
                if command.op == Op::Write {
                    command.value += command.count as u32;
                }
            }
            *state.outcome.lock() = Some(outcome.map(|()| guest));
            state.ended.store(true, SeqCst);
        });
        beside
    }

    /// Returns the number of passes through the command so far.
    pub(crate) fn passes(&self) -> u64 {
        self.state.passes.load(SeqCst)
    }

    /// Waits until the guest has made a whole pass that began after this call. Returns the result of that pass, or of a
    /// later one.
    pub(crate) fn pass(&self) -> u32 {
        // The current pass may have begun before this call.
        let enough = self.passes() + 2;
        while self.passes() < enough && !self.has_ended() {
            spin_loop();
        }
        self.state.result.load(SeqCst)
    }

    /// Whether the guest has ended by itself. If so, it has failed, and [`Beside::stop`] returns the error.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.ended.load(SeqCst)
    }

    /// Returns the largest result of all passes so far.
    pub(crate) fn largest(&self) -> u32 {
        self.state.largest.load(SeqCst)
    }

    /// Stops the guest after its current pass.
    pub(crate) fn stop(self) -> Result<Guest<M>, String> {
        self.state.stop.store(true, SeqCst);
        M::second().wait();
        let outcome = self.state.outcome.lock().take();
        outcome.ok_or("the second CPU never began")?
    }
}

impl<M: Machine> Drop for Beside<M> {
    /// Frees the second CPU for the next scenario, after a failed scenario.
    fn drop(&mut self) {
        self.state.stop.store(true, SeqCst);
        M::second().wait();
    }
}
