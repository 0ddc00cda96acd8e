//! The loop of a hypervisor: run the guest, answer its exits. Beside the engine, it counts what the
//! CPU reported, so that the two can be compared.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};

use slat::{Access, Gpa, Hpa, Stop, Vcpu, Vm};

use crate::{Cause, Command, Cpu, Exit, Host, Machine, Op};
use slat_model::Lock;

pub(crate) type Tables<M> = <<M as Machine>::Cpu as Cpu>::Format;
pub(crate) type GuestVm<M> = Arc<Vm<Host<M>, Tables<M>>>;

/// Where the guest's program is.
pub(crate) const CODE: Gpa = Gpa(0x1000_0000);
/// What a load reads where no memory is.
pub(crate) const DEVICE: u32 = 0x0d0d;

/// What one CPU reported.
#[derive(Default)]
pub(crate) struct Seen {
    /// Second-level faults, those of MMIO entries not included.
    pub(crate) faults: AtomicU64,
    /// Faults that the walker itself reported as an MMIO entry's.
    pub(crate) mmio_faults: AtomicU64,
    /// Accesses that no memory answered.
    pub(crate) mmio: AtomicU64,
    /// Interrupts that took it out of the guest.
    pub(crate) kicks: AtomicU64,
}

/// A virtual CPU, to be run by any CPU of the machine.
pub(crate) struct Guest<M: Machine> {
    vcpu: Vcpu<Host<M>, Tables<M>>,
    root: Hpa,
    pub(crate) seen: Arc<Seen>,
}

impl<M: Machine> Guest<M> {
    /// Faults of one access, with nothing to stop it, after which nobody believes in progress.
    const STUCK: u32 = 1000;

    pub(crate) fn new(vm: &GuestVm<M>) -> Result<Self, String> {
        Ok(Guest {
            vcpu: vm.create_vcpu().map_err(|error| error.to_string())?,
            root: vm.root(0).ok_or("no root table")?.hpa(),
            seen: Arc::default(),
        })
    }

    /// Has the guest carry `command` out, on `cpu`. Returns the guest's result.
    pub(crate) fn run(&mut self, cpu: &mut M::Cpu, command: &Command) -> Result<u32, String> {
        cpu.begin(CODE, command);
        let mut last = (Gpa(0), Access::Read, 0);
        loop {
            match cpu.run(self.vcpu.vm().id(), self.root) {
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
                Exit::Kicked => {
                    self.seen.kicks.fetch_add(1, SeqCst);
                }
                Exit::Other { code, info } => {
                    return Err(format!("unexpected exit {code:#x}, {info:#x}"));
                }
            }
        }
    }

    /// Whether the guest may try again; otherwise there is no memory.
    fn fault(&mut self, gpa: Gpa, access: Access, cause: Cause) -> Result<bool, String> {
        match cause {
            Cause::Mmio => &self.seen.mmio_faults,
            Cause::NotPresent | Cause::Protection => &self.seen.faults,
        }
        .fetch_add(1, SeqCst);
        match self.vcpu.hardware_fault(gpa, access) {
            Ok(()) => Ok(true),
            Err(Stop::Mmio { .. }) => {
                self.seen.mmio.fetch_add(1, SeqCst);
                Ok(false)
            }
            Err(stop) => Err(stop.to_string()),
        }
    }
}

/// A guest that the second CPU runs, the same command again and again, beside what the first does.
pub(crate) struct Beside<M: Machine> {
    state: Arc<State<M>>,
    pub(crate) seen: Arc<Seen>,
}

struct State<M: Machine> {
    stop: AtomicBool,
    ended: AtomicBool,
    passes: AtomicU64,
    result: AtomicU32,
    /// Of all results.
    largest: AtomicU32,
    /// When it has ended.
    outcome: Lock<Option<Result<Guest<M>, String>>>,
}

impl<M: Machine> Beside<M> {
    /// Starts it. A writing guest goes on counting from pass to pass, so that every value it writes
    /// to one place is larger than the last.
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

    /// Passes through the command so far.
    pub(crate) fn passes(&self) -> u64 {
        self.state.passes.load(SeqCst)
    }

    /// Waits until it has made a whole pass from here, and returns that pass's result, or a later one's.
    pub(crate) fn pass(&self) -> u32 {
        // The pass that is being made now may have begun before.
        let enough = self.passes() + 2;
        while self.passes() < enough && !self.has_ended() {
            spin_loop();
        }
        self.state.result.load(SeqCst)
    }

    /// Whether it has ended by itself: it has failed, and [`Beside::stop`] tells how.
    pub(crate) fn has_ended(&self) -> bool {
        self.state.ended.load(SeqCst)
    }

    /// The largest result of all passes so far.
    pub(crate) fn largest(&self) -> u32 {
        self.state.largest.load(SeqCst)
    }

    /// Stops it after the pass that it is making.
    pub(crate) fn stop(self) -> Result<Guest<M>, String> {
        self.state.stop.store(true, SeqCst);
        M::second().wait();
        let outcome = self.state.outcome.lock().take();
        outcome.ok_or("the second CPU never began")?
    }
}

impl<M: Machine> Drop for Beside<M> {
    /// A scenario that has failed leaves the second CPU free for the next.
    fn drop(&mut self) {
        self.state.stop.store(true, SeqCst);
        M::second().wait();
    }
}
