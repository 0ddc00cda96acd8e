//! KVM's own hypercalls, which the guest makes by VMCALL or VMMCALL (KVM's
//! `Documentation/virt/kvm/x86/hypercalls.rst`).

use crate::arch::x86_64::cpuid;
use crate::arch::x86_64::exit::ClientCall;
use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::options::MAP_GPA_RANGE;
use slat::Gpa;
use slat_irqchip::message::{DeliveryMode, Destination, Message};
use slat_x86::{HypercallOutcome, State};

/// KVM_HC_VAPIC_POLL_IRQ: does nothing.
const POLL: u64 = 1;
/// KVM_HC_KICK_CPU: wakes a vCPU that is halted because it waits for a lock.
const KICK_CPU: u64 = 5;
/// KVM_HC_SEND_IPI: sends an interrupt to up to 128 vCPUs.
const SEND_IPI: u64 = 10;
/// KVM_HC_SCHED_YIELD: the guest waits for another vCPU, and asks the host to run that vCPU.
const SCHED_YIELD: u64 = 11;

/// The result of an unknown hypercall (-KVM_ENOSYS).
const UNKNOWN: u64 = 1000u64.wrapping_neg();
/// The result for bad arguments (-KVM_EINVAL).
const INVALID: u64 = 22u64.wrapping_neg();
/// The result for a caller outside the guest's kernel (-KVM_EPERM).
const NOT_PERMITTED: u64 = 1u64.wrapping_neg();
/// The result without an interrupt controller (-KVM_EOPNOTSUPP).
const NOT_SUPPORTED: u64 = 95u64.wrapping_neg();

/// The ICR's bits for logical destinations and shorthands. KVM_HC_SEND_IPI does not support these destinations.
const ICR_DESTINATION: u64 = 1 << 11 | 3 << 18;
const ICR_ASSERT: u64 = 1 << 14;
const ICR_LEVEL: u64 = 1 << 15;

/// Stores the result of one of KVM's hypercalls.
pub(crate) fn store_result(state: &mut State, long_mode: bool, result: u64) {
    state.gpr[0] = match long_mode {
        true => result,
        false => result & 0xffff_ffff,
    };
}

impl VcpuMachine {
    /// Executes one of KVM's hypercalls.
    pub(super) fn kvm_call(
        &mut self,
        state: &mut State,
        cpl: u8,
        long_mode: bool,
    ) -> HypercallOutcome {
        let get = |register: usize| match long_mode {
            true => state.gpr[register],
            false => state.gpr[register] & 0xffff_ffff,
        };
        let (nr, args) = (get(0), [3, 1, 2, 6].map(get));
        let result = match cpl {
            0 => self.answer_hypercall(nr, args, long_mode),
            _ => Some(NOT_PERMITTED),
        };
        match result {
            Some(result) => {
                store_result(state, long_mode, result);
                HypercallOutcome::Done
            }
            None => {
                self.client_call = Some(ClientCall::Kvm {
                    nr,
                    args,
                    long_mode,
                });
                HypercallOutcome::Outside
            }
        }
    }

    /// Carries out a hypercall. Returns the hypercall's result; `None`: the client completes the hypercall.
    fn answer_hypercall(&mut self, nr: u64, args: [u64; 4], long_mode: bool) -> Option<u64> {
        let map_gpa_range =
            nr == MAP_GPA_RANGE.into() && self.vm.arch.options.answers_hypercall(MAP_GPA_RANGE);
        match nr {
            POLL => Some(0),
            KICK_CPU if self.has_pv_feature(cpuid::KVM_FEATURE_PV_UNHALT) => {
                self.vm.interrupts.vcpus.end_halt(args[1] as u32);
                Some(0)
            }
            SEND_IPI if self.has_pv_feature(cpuid::KVM_FEATURE_PV_SEND_IPI) => {
                Some(self.send_ipi(args, long_mode))
            }
            // Has no effect, because the host's scheduler decides which vCPU runs next.
            SCHED_YIELD if self.has_pv_feature(cpuid::KVM_FEATURE_PV_SCHED_YIELD) => {
                slat_process::wait::yield_now();
                Some(0)
            }
            _ if map_gpa_range => check_range(args),
            _ => Some(UNKNOWN),
        }
    }

    /// Carries out KVM_HC_SEND_IPI. `low` and `high` have a bit for each APIC id from `first` on. Returns the number of
    /// vCPUs that accepted the interrupt.
    fn send_ipi(&self, [low, high, first, icr]: [u64; 4], long_mode: bool) -> u64 {
        if icr & ICR_DESTINATION != 0 {
            return INVALID;
        }
        if !self.vm.has_irqchip() {
            return NOT_SUPPORTED;
        }
        let word = if long_mode { 64 } else { 32 };
        let mut taken = 0;
        for (bits, first) in [(low, first), (high, first.wrapping_add(word))] {
            for bit in (0..word).filter(|bit| bits >> bit & 1 != 0) {
                let Ok(id) = u32::try_from(first.wrapping_add(bit)) else {
                    continue;
                };
                let message = Message {
                    vector: icr as u8,
                    mode: DeliveryMode::of(icr as u32),
                    level: icr & ICR_LEVEL != 0,
                    assert: icr & ICR_ASSERT != 0,
                    destination: Destination::Physical(id),
                };
                taken += self.vm.interrupts.vcpus.send(None, &message).taken as u64;
            }
        }
        taken
    }
}

/// Checks the range of KVM_HC_MAP_GPA_RANGE. `None`: the range is valid, and the client completes the hypercall.
/// `Some`: the result for bad arguments.
fn check_range([gpa, pages, ..]: [u64; 4]) -> Option<u64> {
    let end = Gpa(gpa).gfn().0.checked_add(pages);
    (Gpa(gpa).offset() != 0 || pages == 0 || end.is_none()).then_some(INVALID)
}
