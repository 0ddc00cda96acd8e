//! Hypercalls by Hyper-V's conventions: flushes of translations, interrupts, events, and calls that the client carries
//! out.

use crate::arch::x86_64::exit::ClientCall;
use crate::arch::x86_64::limits::MAX_VCPUS;
use crate::arch::x86_64::machine::VcpuMachine;
use crate::thread::bits;
use crate::ticker;
use slat_hyperv::hypercall::{
    Caller, Fast, Flush, Input, Ipi, Refusal, Request, Status, client_event, connection,
};
use slat_hyperv::vp_set::VpSet;
use slat_x86::state::control;
use slat_x86::{HypercallOutcome, State};
use std::sync::atomic::Ordering;

const RAX: usize = 0;
const RCX: usize = 1;
const RDX: usize = 2;
const RBX: usize = 3;
const RSI: usize = 6;
const RDI: usize = 7;
const R8: usize = 8;

/// The reason why the parameters of a call cannot be read.
enum Failure {
    Status(Status),
    /// A signal or a full dirty ring has interrupted the access to guest memory.
    Interrupted,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Failure::Status(status)
    }
}

/// A hypercall that this vCPU makes.
struct Call {
    input: Input,
    /// The registers that hold a fast call's parameters, or any other call's addresses of input and output.
    registers: Fast,
}

impl Call {
    fn new(state: &State, long_mode: bool) -> Self {
        let pair = |high: usize, low: usize| state.gpr[high] << 32 | state.gpr[low] & 0xffff_ffff;
        let (input, registers) = match long_mode {
            true => (state.gpr[RCX], [state.gpr[RDX], state.gpr[R8]]),
            false => (pair(RDX, RAX), [pair(RBX, RCX), pair(RDI, RSI)]),
        };
        let mut xmm = [0; 6];
        xmm.copy_from_slice(&state.xmm[..6]);
        Call {
            input: Input(input),
            registers: Fast { registers, xmm },
        }
    }
}

/// The next step in carrying out a hypercall.
enum Next {
    /// The hypercall ends with this output value.
    Output(u64),
    /// The client carries out the call. The value is the call's first parameter.
    Client(u64),
}

/// Stores the output of a call.
pub(crate) fn store_output(state: &mut State, long_mode: bool, output: u64) {
    if long_mode {
        state.gpr[RAX] = output;
    } else {
        state.gpr[RAX] = output & 0xffff_ffff;
        state.gpr[RDX] = output >> 32;
    }
}

impl VcpuMachine {
    /// Whether the guest makes hypercalls by Hyper-V's conventions.
    pub(in crate::arch::x86_64::machine) fn uses_hyperv_calls(&self) -> bool {
        self.hyperv.privileges.is_some()
            && (self.vm.arch.hyperv).with_partition(|partition| partition.is_identified())
    }

    /// Executes one of Hyper-V's hypercalls.
    pub(in crate::arch::x86_64::machine) fn hyperv_call(
        &mut self,
        state: &mut State,
        cpl: u8,
        long_mode: bool,
    ) -> HypercallOutcome {
        if cpl != 0 || state.cr0 & control::CR0_PE == 0 {
            return HypercallOutcome::Undefined;
        }
        let call = Call::new(state, long_mode);
        let caller = self.caller();
        let request = match Request::decode(call.input, &caller) {
            Ok(request) => request,
            Err(Refusal::Undefined) => return HypercallOutcome::Undefined,
            Err(Refusal::Status(status)) => {
                store_output(state, long_mode, status.output(0));
                return HypercallOutcome::Done;
            }
        };
        let next = match self.carry_out_call(&call, request, &caller) {
            Ok(next) => next,
            Err(Failure::Status(status)) => Next::Output(status.output(0)),
            Err(Failure::Interrupted) => return HypercallOutcome::Retry,
        };
        match next {
            Next::Output(output) => {
                store_output(state, long_mode, output);
                HypercallOutcome::Done
            }
            Next::Client(first) => {
                let [_, second] = call.registers.registers;
                self.client_call = Some(ClientCall::Hyperv {
                    input: call.input.0,
                    parameters: [first, second],
                });
                HypercallOutcome::Outside
            }
        }
    }

    fn caller(&self) -> Caller {
        let hyperv = &self.hyperv;
        Caller {
            enforced: hyperv.privileges.filter(|_| hyperv.enforces_cpuid),
            has_synic: self.common.arch.vp.has_synic(),
            has_debugger: self.has_debugger(),
            debugs_by_hypercalls: (self.vm.arch.hyperv)
                .with_partition(|partition| partition.debugs_by_hypercalls()),
        }
    }

    fn carry_out_call(
        &mut self,
        call: &Call,
        request: Request,
        caller: &Caller,
    ) -> Result<Next, Failure> {
        let input = call.input;
        let success = Next::Output(Status::Success.output(input.reps()));
        match request {
            Request::SpinWait => slat_process::wait::yield_now(),
            Request::SignalEvent => return self.signal_event(call, caller),
            Request::Client => return Ok(Next::Client(call.registers.registers[0])),
            Request::Flush => {
                let flush = Flush::read(input, MAX_VCPUS, |index| self.parameter(call, index))?;
                if let Some(targets) = flush.targets {
                    self.flush_translations(&targets);
                }
            }
            Request::SendIpi => {
                if !self.common.has_lapic() {
                    return Err(Status::InvalidInput.into());
                }
                let ipi = Ipi::read(input, MAX_VCPUS, |index| self.parameter(call, index))?;
                if let Some(ipi) = ipi {
                    for vcpu in self.vm.vcpus().iter() {
                        if ipi.targets.contains(vcpu.arch.vp.index()) {
                            vcpu.request(ipi.vector);
                        }
                    }
                }
            }
        }
        Ok(success)
    }

    /// Signals the eventfd of a connection. If the connection has no eventfd, the client sees the call.
    fn signal_event(&mut self, call: &Call, caller: &Caller) -> Result<Next, Failure> {
        let [mut parameter, _] = call.registers.registers;
        if !call.input.is_fast() {
            if !parameter.is_multiple_of(8) {
                return Err(Status::InvalidAlignment.into());
            }
            let word = self.read_guest_word(parameter);
            parameter = word.ok_or_else(|| self.failure(Status::InvalidAlignment))?;
        }
        match connection(parameter) {
            Ok(id) if self.vm.arch.hyperv.connections.signal(id) => {
                return Ok(Next::Output(Status::Success.output(0)));
            }
            Ok(_) | Err(Status::InvalidPortId) => {}
            Err(status) => return Err(status.into()),
        }
        client_event(caller)?;
        Ok(Next::Client(parameter))
    }

    /// Reads the parameter word number `index` of a call.
    fn parameter(&mut self, call: &Call, index: usize) -> Result<u64, Failure> {
        if call.input.is_fast() {
            return (call.registers.word(index)).ok_or(Status::InvalidInput.into());
        }
        let [address, _] = call.registers.registers;
        let at = address.wrapping_add(8 * index as u64);
        let mut aligned = |at: u64| {
            let word = self.read_guest_word(at);
            word.ok_or_else(|| self.failure(Status::InvalidInput))
        };
        // As in KVM, the parameter need not be aligned. So read the two aligned words that contain the parameter.
        let (low, shift) = (at & !7, 8 * (at % 8) as u32);
        match shift {
            0 => aligned(low),
            _ => Ok(aligned(low)? >> shift | aligned(low.wrapping_add(8))? << (64 - shift)),
        }
    }

    /// Returns the reason why guest memory cannot be read: an interruption of the access, or, if the access was not
    /// interrupted, `status`.
    fn failure(&self, status: Status) -> Failure {
        match self.is_called_out() {
            true => Failure::Interrupted,
            false => Failure::Status(status),
        }
    }

    /// Flushes the guest's translations of some vCPUs. When this returns, none of these vCPUs uses an old translation.
    ///
    /// If a target vCPU runs guest code, this function waits until that vCPU has passed a quiescent point of the
    /// engine, where it drops its translations. If a target vCPU does not run guest code, it drops its translations
    /// before it runs guest code again. vCPUs that are not targets keep their translations.
    fn flush_translations(&mut self, targets: &VpSet) {
        let is_meant = |index| targets.contains(index);
        for vcpu in self.vm.vcpus().iter() {
            if is_meant(vcpu.arch.vp.index()) {
                ticker::raise(&vcpu.attention, bits::GUEST_FLUSH);
            }
        }
        // If the calling vCPU is a target, it finds its attention bit set after the hypercall's instruction.
        self.outside(|machine| {
            machine.vm.engine.synchronize_those(&|attention| {
                attention.flag().load(Ordering::SeqCst) & bits::GUEST_FLUSH != 0
            });
        });
    }
}
