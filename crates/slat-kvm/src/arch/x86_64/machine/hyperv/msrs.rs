//! Hyper-V's synthetic MSRs.

use crate::arch::x86_64::cpuid;
use crate::arch::x86_64::hyperv::HypervExit;
use crate::arch::x86_64::limits::MAX_VCPUS;
use crate::arch::x86_64::machine::VcpuMachine;
use crate::arch::x86_64::msr::KVM_ENABLED;
use crate::entered::{Entered, thread_id};
use crate::thread::bits;
use slat_hyperv::msr::*;
use slat_hyperv::stimer::Rights;
use slat_hyperv::{Refused, Writer, partition, synic};
use slat_irqchip::lapic::reg;
use slat_process::calls::{self, Call};
use slat_x86::MsrFault;

/// The bit of VP_ASSIST_PAGE: the page is enabled.
const ASSIST_ENABLED: u64 = 1;
/// The bits of VP_ASSIST_PAGE that hold the address of the page.
const ASSIST_PAGE: u64 = !0xfff;
/// The frequency of the APIC timer, in Hz.
const APIC_HZ: u64 = 1_000_000_000;
const PAGE: usize = 4096;

/// Returns how long the calling thread has run on CPUs of the host, in units of 100 ns.
fn thread_runtime() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // The kernel's id of the clock of one thread (CPUCLOCK_PERTHREAD, CPUCLOCK_SCHED). Any thread of the process may
    // read this clock.
    let clock = !(thread_id() as i32) << 3 | 4 | 2;
    let arguments = [clock as usize, &raw mut time as usize, 0, 0, 0, 0];
    // SAFETY: the call fills in the struct. If the call fails, the time is 0.
    let _ = unsafe { calls::make(Call::ThreadTime, arguments) };
    time.tv_sec as u64 * 10_000_000 + time.tv_nsec as u64 / 100
}

/// Returns the APIC register to which a synthetic MSR gives access.
fn apic_register(index: u32) -> u32 {
    match index {
        EOI => reg::EOI,
        ICR => reg::ICR,
        _ => reg::TPR,
    }
}

fn invalid(_: Refused) -> MsrFault {
    MsrFault::Invalid
}

impl VcpuMachine {
    /// Checks a guest's access to an MSR. Refuses the access if, by the guest's CPUID, the MSR does not exist or the
    /// guest has no right to access it.
    fn check_access(&self, index: u32, by: Writer) -> Result<(), MsrFault> {
        if by == Writer::Host {
            return Ok(());
        }
        let privileges = self.hyperv.privileges.as_ref().ok_or(MsrFault::Invalid)?;
        match self.hyperv.enforces_cpuid && !privileges.allows_msr(index) {
            true => Err(MsrFault::Invalid),
            false => Ok(()),
        }
    }

    /// Refuses a guest's access to an MSR of the synthetic debugger if the guest has no such debugger.
    fn check_debugger(&self, index: u32, by: Writer) -> Result<(), MsrFault> {
        let is_debugger = matches!(
            index,
            SYNDBG_CONTROL..=SYNDBG_PENDING_BUFFER | SYNDBG_OPTIONS
        );
        match is_debugger && by == Writer::Guest && !self.has_debugger() {
            true => Err(MsrFault::Invalid),
            false => Ok(()),
        }
    }

    /// Whether the guest may use the synthetic debugger.
    pub(super) fn has_debugger(&self) -> bool {
        (self.hyperv.privileges).is_some_and(|privileges| privileges.has_debugger())
    }

    /// Reads a synthetic MSR.
    pub(in crate::arch::x86_64::machine) fn read_synthetic(
        &mut self,
        index: u32,
        by: Writer,
    ) -> Result<u64, MsrFault> {
        self.check_access(index, by)?;
        self.check_debugger(index, by)?;
        if is_of_partition(index) {
            let read = (self.vm.arch.hyperv)
                .with_partition(|partition| partition.read(index, |it| self.time_of(it)));
            return read.map_err(invalid);
        }
        match index {
            VP_INDEX => Ok(self.common.arch.vp.index().into()),
            EOI | ICR | TPR => {
                self.collect_pv_eoi();
                let lapic = self.common.lapic().ok_or(MsrFault::Invalid)?;
                let now = self.vm.arch.clock.now();
                (lapic.read_synthetic(apic_register(index), now)).map_err(|_| MsrFault::Invalid)
            }
            VP_ASSIST_PAGE => Ok(self.hyperv.assist_page),
            VP_RUNTIME => Ok(thread_runtime().wrapping_add(self.hyperv.runtime_offset)),
            SCONTROL..=EOM | SINT0..=SINT15 => {
                self.common.arch.vp.synic().read(index, by).map_err(invalid)
            }
            STIMER0_CONFIG..=STIMER3_COUNT => Ok(self.hyperv.timers.read(index)),
            TSC_FREQUENCY => Ok(u64::from(self.tsc.khz()) * 1000),
            APIC_FREQUENCY => Ok(APIC_HZ),
            _ => Err(MsrFault::Invalid),
        }
    }

    /// Writes a synthetic MSR.
    pub(in crate::arch::x86_64::machine) fn write_synthetic(
        &mut self,
        index: u32,
        value: u64,
        by: Writer,
    ) -> Result<(), MsrFault> {
        self.check_access(index, by)?;
        self.check_debugger(index, by)?;
        if is_of_partition(index) {
            return self.write_partition(index, value, by);
        }
        let by_guest = by == Writer::Guest;
        match index {
            VP_INDEX if by_guest || value as u32 >= MAX_VCPUS => return Err(MsrFault::Invalid),
            VP_INDEX => self.common.arch.vp.set_index(value as u32),
            EOI | ICR | TPR => {
                self.collect_pv_eoi();
                let now = self.vm.arch.clock.now();
                let mut lapic = self.common.lapic().ok_or(MsrFault::Invalid)?;
                let effect = lapic.write_synthetic(apic_register(index), value, now);
                drop(lapic);
                self.carry_out(effect.map_err(|_| MsrFault::Invalid)?);
                if index == TPR {
                    self.task_priority_changed();
                }
            }
            VP_ASSIST_PAGE => self.set_assist_page(value, by)?,
            VP_RUNTIME if by_guest => return Err(MsrFault::Invalid),
            VP_RUNTIME => self.hyperv.runtime_offset = value.wrapping_sub(thread_runtime()),
            SCONTROL..=EOM | SINT0..=SINT15 => self.write_synic(index, value, by)?,
            STIMER0_CONFIG..=STIMER3_COUNT => {
                let privileges = self.hyperv.privileges;
                let direct_mode = !self.hyperv.enforces_cpuid
                    || privileges.is_some_and(|privileges| privileges.has_direct_timers());
                let rights = Rights {
                    has_synic: self.common.arch.vp.has_synic(),
                    direct_mode,
                };
                (self.hyperv.timers.write(index, value, by, rights)).map_err(invalid)?;
                self.look_at_timers();
            }
            TSC_FREQUENCY | APIC_FREQUENCY if !by_guest => {}
            _ => return Err(MsrFault::Invalid),
        }
        Ok(())
    }

    fn write_partition(&mut self, index: u32, value: u64, by: Writer) -> Result<(), MsrFault> {
        use partition::Effect;
        if index == HYPERCALL
            && let Some(page) =
                (self.vm.arch.hyperv).with_partition(|partition| partition.hypercall_page(value))
        {
            self.store_for(by, page, &hypercall_code())?;
        }
        let effect = (self.vm.arch.hyperv)
            .with_partition(|partition| partition.write(index, value, by))
            .map_err(invalid)?;
        match effect {
            Effect::None => {}
            // RETRY makes the run loop write the page before the guest continues.
            Effect::TscPage => self.common.attention.raise(bits::RETRY),
            Effect::Crash => self.exit_for_hyperv(HypervExit::Crash),
            Effect::Reset => self.exit_for_hyperv(HypervExit::Reset),
            Effect::Debugger(index) => self.exit_for_hyperv(HypervExit::Debugger(index)),
        }
        Ok(())
    }

    fn write_synic(&mut self, index: u32, value: u64, by: Writer) -> Result<(), MsrFault> {
        use synic::Effect;
        if by == Writer::Guest {
            let page = self.common.arch.vp.synic().page_to_clear(index, value);
            if let Some(page) = page {
                self.store_for(by, page, &[0; PAGE])?;
            }
        }
        let effect = self.common.arch.vp.synic().write(index, value, by);
        match effect.map_err(invalid)? {
            Effect::None | Effect::Vectors => {}
            Effect::Exit(index) => self.exit_for_hyperv(HypervExit::Synic(index)),
            Effect::EndOfMessage => {
                (0..synic::SINTS as u32).for_each(|sint| self.acknowledge_source(sint));
            }
        }
        Ok(())
    }

    /// Writes VP_ASSIST_PAGE. The page has a bit by which the guest ends interrupts, as with KVM's own MSR for PV EOI.
    fn set_assist_page(&mut self, value: u64, by: Writer) -> Result<(), MsrFault> {
        let page = value & ASSIST_PAGE;
        let eoi = match value & ASSIST_ENABLED {
            0 => 0,
            _ => {
                // Only the first word is cleared: after a migration the rest of the page is already in use.
                self.store_for(by, page, &0u32.to_le_bytes())?;
                page | KVM_ENABLED
            }
        };
        self.set_pv_eoi(eoi)?;
        self.hyperv.assist_page = value;
        Ok(())
    }

    /// Writes to guest memory as an effect of a write to an MSR. For a guest's write, call inside the engine's reader
    /// section. For the host's write, call outside the section.
    fn store_for(&mut self, by: Writer, gpa: u64, bytes: &[u8]) -> Result<(), MsrFault> {
        let stored = match by {
            Writer::Guest => self.write_guest(gpa, bytes),
            Writer::Host => {
                // Clears the SIGNAL bit, because a signal in an earlier run may have left it set.
                self.common.attention.take(bits::SIGNAL);
                let mut entered = Entered::enter(self);
                // The pages that were cached in the last run may be stale.
                entered.forget_pages();
                entered.write_guest(gpa, bytes)
            }
        };
        match stored {
            true => Ok(()),
            false if by == Writer::Guest && self.is_called_out() => Err(MsrFault::Retry),
            false => Err(MsrFault::Invalid),
        }
    }
}

/// Returns the code of the hypercall page: the processor's hypercall instruction and RET.
fn hypercall_code() -> [u8; 4] {
    let [a, b, c] = cpuid::native_hypercall().bytes();
    [a, b, c, 0xc3]
}
