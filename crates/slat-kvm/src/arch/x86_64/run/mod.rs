//! x86's part of `KVM_RUN`: prepares each entry into the guest, and handles the CPU's exits.
//!
//! | file | idea |
//! |---|---|
//! | `interrupts` | delivery of INIT, SIPI, NMIs and interrupts, and the halts that these events end |
//! | `accesses` | port accesses, and accesses to the local APIC, that do not exit to the client |
//! | `hyperv` | exits of Hyper-V's interface |
//! | `smm` | entry to system management mode, and RSM |

mod accesses;
mod hyperv;
mod interrupts;
mod smm;
mod unknown;

use crate::arch::x86_64::exit::{self, ClientCall};
use crate::arch::x86_64::machine::hypercall::store_result;
use crate::arch::x86_64::port_data::PIO_OFFSET;
use crate::arch::x86_64::trace::port as trace_port;
use crate::arch::x86_64::vcpu_state::Unfinished;
use crate::arch::x86_64::{guest_debug, msr, regs};
use crate::errno::{Result, fail};
use crate::exit::memory_fault;
use crate::fields::{field, set_field};
use crate::run::{LONGEST_SLEEP, Next};
use crate::signals::Masked;
use crate::thread::bits;
use crate::vcpu::{Inner, VcpuObject};
use crate::{ticker, trace};
use kvm_bindings::*;
use slat::Attention;
use slat_x86::state::flags;
use slat_x86::{Exit, PORT_BYTES, vector};
use std::time::Duration;

/// The time that is added to the client's notify window, as processors do. No ordinary guest works this long without a
/// chance for an interrupt.
const NOTIFY_THRESHOLD: Duration = Duration::from_millis(1);

impl VcpuObject {
    /// Drops all translations, because another vCPU has invalidated some of them. Call after clearing
    /// [`bits::GUEST_FLUSH`].
    pub(crate) fn drop_invalidated(&self, inner: &mut Inner) {
        inner.flush_translations();
        inner.machine.flush_shadowed();
    }

    /// Reads the client's input in `kvm_run` and finishes the access that the client completed. Returns `false` if
    /// `KVM_RUN` has to return at once, with success.
    pub(crate) fn prepare(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<bool> {
        self.accept_init_sipi(inner);
        if inner.arch.mp_state == KVM_MP_STATE_UNINITIALIZED
            || inner.arch.mp_state == KVM_MP_STATE_INIT_RECEIVED
        {
            return self.wait_for_sipi(inner, masked);
        }
        let unknown = !u64::from(KVM_SYNC_X86_VALID_FIELDS);
        let dirty = field!(self.page, kvm_dirty_regs);
        if field!(self.page, kvm_valid_regs) & unknown != 0 || dirty & unknown != 0 {
            return fail(libc::EINVAL);
        }
        if dirty != 0 {
            self.take_synced(inner, dirty)?;
        }
        if !self.vm.has_irqchip() {
            let cr8 = field!(self.page, cr8);
            if cr8 & !15 != 0 {
                return fail(libc::EINVAL);
            }
            inner.cpu.state.cr8 = cr8;
        }
        match std::mem::take(&mut inner.arch.unfinished) {
            Unfinished::Nothing => {}
            Unfinished::PortOut => inner.cpu.complete_io(&[]),
            Unfinished::PortIn(len) => {
                let mut data = [0; PORT_BYTES];
                self.page.read_pio(&mut data[..len]);
                let (port, size) = (
                    field!(self.page, __bindgen_anon_1.io.port),
                    field!(self.page, __bindgen_anon_1.io.size),
                );
                trace_port(false, port, size.into(), &data[..len]);
                inner.cpu.complete_io(&data[..len]);
            }
            Unfinished::Hypercall => {
                let result = field!(self.page, __bindgen_anon_1.hypercall.ret);
                (inner.cpu).complete_hypercall(|state, wide| store_result(state, wide, result));
            }
            Unfinished::HypervCall => self.complete_hyperv_call(inner),
            Unfinished::HypervDebugger => self.complete_hyperv_debugger(),
            Unfinished::Msr => {
                let error = field!(self.page, __bindgen_anon_1.msr.error);
                let data = field!(self.page, __bindgen_anon_1.msr.data);
                inner.cpu.complete_msr((error == 0).then_some(data));
            }
            Unfinished::MmioRead(len) => {
                let data = field!(self.page, __bindgen_anon_1.mmio.data);
                let gpa = field!(self.page, __bindgen_anon_1.mmio.phys_addr);
                trace::mmio_read(gpa, &data[..len]);
                inner.cpu.complete_mmio_read(&data[..len]);
            }
        }
        Ok(true)
    }

    /// Waits for the SIPI that starts this processor. Then fails with `EAGAIN`, as KVM does.
    fn wait_for_sipi(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<bool> {
        if inner.arch.mp_state == KVM_MP_STATE_INIT_RECEIVED && inner.cpu.state.events.smm {
            // In system management mode the vCPU accepts no SIPI.
            return fail(libc::EINVAL);
        }
        if self.page.immediate_exit() {
            return fail(libc::EINTR);
        }
        let attention = &self.common().attention;
        loop {
            if self.is_called_to_port() {
                self.visit_port(inner, masked);
            }
            self.accept_init_sipi(inner);
            if inner.arch.mp_state == KVM_MP_STATE_RUNNABLE {
                return fail(libc::EAGAIN);
            }
            let interrupted = ticker::sleep(attention, LONGEST_SLEEP);
            let raised = attention.take(
                bits::IRQ
                    | bits::SIGNAL
                    | bits::POLL
                    | bits::TIMER
                    | bits::RETRY
                    | bits::RING_FULL
                    | bits::GUEST_FLUSH
                    | bits::SAMPLE
                    | Attention::FLUSH,
            );
            self.vm.still_alive()?;
            // `take` has cleared the attention bits, including those that request flushes. So the run loop drops all
            // translations now.
            inner.flush_translations();
            if interrupted
                || raised & bits::SIGNAL != 0
                || raised & bits::POLL != 0 && self.must_leave()
            {
                self.page.set_exit_reason(KVM_EXIT_INTR);
                return fail(libc::EINTR);
            }
        }
    }

    /// Copies the VM's settings to the CPU. Call when a run begins.
    pub(crate) fn begin_run(&self, inner: &mut Inner) {
        inner.machine.follow_client();
        inner.cpu.set_bus_locks(self.vm.arch.options.bus_locks());
        let window = self.vm.arch.options.notify_window();
        inner.cpu.requests.notify_window =
            window.map(|cycles| NOTIFY_THRESHOLD + inner.machine.tsc.duration(cycles));
    }

    /// Updates the structures that the guest shares with the host (steal time, asynchronous page faults, PV EOI). Call
    /// before guest code runs. Returns `false` if the run returns to the client, because the guest has ended.
    pub(crate) fn update_guest(&self, inner: &mut Inner) -> bool {
        inner.machine.write_steal_time();
        inner.machine.deliver_page_ready();
        inner.machine.collect_pv_eoi();
        if std::mem::take(&mut inner.arch.requested.triple_fault) && !inner.cpu.exit_on_shutdown() {
            self.page.set_exit_reason(KVM_EXIT_SHUTDOWN);
            return false;
        }
        true
    }

    /// Whether an effect of the completed instruction has to exit to the client. If so, stores the exit in `kvm_run`.
    pub(crate) fn has_late_exit(&self, inner: &mut Inner) -> bool {
        self.has_ended_for_client(inner) || self.has_hyperv_exit(inner)
    }

    /// Whether the guest has ended an interrupt of the client's I/O APIC. If so, stores the exit `KVM_EXIT_IOAPIC_EOI`.
    fn has_ended_for_client(&self, inner: &mut Inner) -> bool {
        let ended = inner.machine.ioapic_eoi.take();
        if let Some(vector) = ended {
            self.page.set_exit_reason(KVM_EXIT_IOAPIC_EOI);
            set_field!(self.page, vector, __bindgen_anon_1.eoi.vector);
        }
        ended.is_some()
    }

    /// Handles an exit of the CPU.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    pub(crate) fn handle(
        &self,
        inner: &mut Inner,
        exit: Exit,
        masked: Option<&Masked>,
    ) -> Result<Next> {
        let page = &self.page;
        match exit {
            // The interruption is handled before the instruction is tried again. Otherwise the access would sleep
            // again, and no kick would end that sleep.
            Exit::Attention if inner.machine.memory.is_interrupted => {
                return self.attend(inner, masked).map(|()| Next::Again);
            }
            Exit::Attention | Exit::InterruptWindow => return Ok(Next::Again),
            Exit::Io {
                port,
                size,
                write,
                count,
            } => {
                let len = usize::from(size) * count as usize;
                if write {
                    trace_port(true, port, size.into(), inner.cpu.output());
                }
                if self.port_access(inner, port, size.into(), write, len) {
                    return Ok(Next::Again);
                }
                page.set_exit_reason(KVM_EXIT_IO);
                set_field!(
                    page,
                    if write {
                        KVM_EXIT_IO_OUT
                    } else {
                        KVM_EXIT_IO_IN
                    } as u8,
                    __bindgen_anon_1.io.direction
                );
                set_field!(page, size, __bindgen_anon_1.io.size);
                set_field!(page, port, __bindgen_anon_1.io.port);
                set_field!(page, count, __bindgen_anon_1.io.count);
                set_field!(page, PIO_OFFSET as u64, __bindgen_anon_1.io.data_offset);
                if write {
                    page.write_pio(inner.cpu.output());
                }
                let quirk = KVM_X86_QUIRK_OUT_7E_INC_RIP;
                inner.arch.unfinished = if !write {
                    Unfinished::PortIn(len)
                } else if port == 0x7e && self.vm.arch.quirks.has(quirk) {
                    inner.cpu.complete_io(&[]);
                    Unfinished::Nothing
                } else {
                    Unfinished::PortOut
                };
            }
            Exit::Mmio {
                gpa,
                len,
                write,
                data,
            } => {
                if write {
                    trace::mmio_write(gpa, &data[..len.into()]);
                }
                if self.apic_access(inner, gpa, len, write, data)
                    || self.memory_access(inner, gpa, write, &data[..len.into()])
                {
                    return Ok(Next::Again);
                }
                self.common().exits.mmio_exits.add(1);
                page.set_exit_reason(KVM_EXIT_MMIO);
                set_field!(page, gpa, __bindgen_anon_1.mmio.phys_addr);
                set_field!(page, u32::from(len), __bindgen_anon_1.mmio.len);
                set_field!(page, u8::from(write), __bindgen_anon_1.mmio.is_write);
                if write {
                    set_field!(page, data, __bindgen_anon_1.mmio.data);
                } else {
                    trace::mmio_asked(gpa, len);
                    inner.arch.unfinished = Unfinished::MmioRead(len.into());
                }
            }
            Exit::Hlt => {
                if self.vm.has_irqchip() || self.vm.arch.options.halts_inside() {
                    inner.arch.mp_state = KVM_MP_STATE_HALTED;
                    return Ok(Next::Again);
                }
                page.set_exit_reason(KVM_EXIT_HLT);
            }
            Exit::Smi => return self.enter_smm(inner),
            Exit::Rsm => return Ok(self.leave_smm(inner)),
            Exit::Delivery {
                vector,
                software,
                gpa,
            } => exit::delivery(page, vector, software, gpa),
            Exit::Shutdown => page.set_exit_reason(KVM_EXIT_SHUTDOWN),
            Exit::Emulation { bytes, len, reason } => {
                unknown::cannot_execute(
                    self.common().id,
                    inner.cpu.state.rip,
                    &bytes[..len.into()],
                    reason,
                );
                if inner.cpu.cpl() != 0 && !self.vm.arch.options.exit_on_emulation_failure() {
                    // The unknown instruction is in the guest's user code, so the guest's kernel gets #UD and handles
                    // it.
                    inner.cpu.inject_exception(vector::UD, None);
                    return Ok(Next::Again);
                }
                exit::emulation_failure(page, bytes, len);
            }
            Exit::Msr { index, value, why } => {
                exit::msr(page, index, value, msr::exit_reason(why));
                inner.arch.unfinished = Unfinished::Msr;
            }
            Exit::Hypercall => match inner.machine.client_call.take() {
                Some(ClientCall::Kvm {
                    nr,
                    args,
                    long_mode,
                }) => {
                    exit::hypercall(page, nr, args, long_mode);
                    inner.arch.unfinished = Unfinished::Hypercall;
                }
                Some(ClientCall::Hyperv { input, parameters }) => {
                    self.exit_for_hyperv_call(input, parameters);
                    inner.arch.unfinished = Unfinished::HypervCall;
                }
                None => unreachable!("the machine has named the call"),
            },
            Exit::BadAddress => {
                match inner.machine.memory.memory_fault.take() {
                    Some(fault) => memory_fault(page, fault),
                    // No exit describes this failure, so the reason of an earlier exit is cleared.
                    None => page.set_exit_reason(KVM_EXIT_UNKNOWN),
                }
                return fail(libc::EFAULT);
            }
            Exit::OutOfMemory => return fail(libc::ENOMEM),
            Exit::Notify => {
                if !self.vm.arch.options.notifies_client() {
                    return Ok(Next::Again);
                }
                // KVM_NOTIFY_CONTEXT_INVALID is not set, because the vCPU's state is valid.
                page.set_exit_reason(KVM_EXIT_NOTIFY);
                set_field!(page, 0, __bindgen_anon_1.notify.flags);
            }
            Exit::BusLock => {
                page.set_exit_reason(KVM_EXIT_X86_BUS_LOCK);
                set_field!(page, KVM_RUN_X86_BUS_LOCK as u16, flags);
            }
            Exit::Debug { vector, dr6 } => guest_debug::exit(page, &inner.cpu, vector, dr6),
            Exit::Probe(hit) => {
                self.probe_hit(hit);
                return Ok(Next::Again);
            }
        }
        Ok(Next::Return)
    }

    /// Stores the fields that the client reads in `kvm_run` after every run, even after a failed run.
    pub(crate) fn publish(&self, inner: &mut Inner) {
        let page = &self.page;
        let state = &inner.cpu.state;
        set_field!(page, u8::from(state.rflags & flags::IF != 0), if_flag);
        set_field!(page, state.cr8, cr8);
        set_field!(page, inner.machine.apic_base(), apic_base);
        if state.events.smm {
            let others = field!(page, flags);
            set_field!(page, others | KVM_RUN_X86_SMM as u16, flags);
        }
        if inner.cpu.is_in_guest_mode() {
            let others = field!(page, flags);
            set_field!(page, others | KVM_RUN_X86_GUEST_MODE as u16, flags);
        }
        let ready = self.vm.interrupts.chips().is_some()
            || inner.cpu.can_take_interrupt()
                && match self.vm.interrupts.is_split() {
                    true => self.accepts_from_client(inner),
                    false => state.events.interrupt.is_none(),
                };
        set_field!(page, u8::from(ready), ready_for_interrupt_injection);
        let wanted = field!(page, kvm_valid_regs);
        if wanted & u64::from(KVM_SYNC_X86_REGS) != 0 {
            set_field!(page, regs::get_regs(state), s.regs.regs);
        }
        if wanted & u64::from(KVM_SYNC_X86_SREGS) != 0 {
            set_field!(
                page,
                regs::get_sregs(state, inner.machine.apic_base()),
                s.regs.sregs
            );
        }
        if wanted & u64::from(KVM_SYNC_X86_EVENTS) != 0 {
            let events = self.events(inner);
            set_field!(page, events, s.regs.events);
        }
    }

    /// Sets those registers that the client has changed in `kvm_run`.
    fn take_synced(&self, inner: &mut Inner, dirty: u64) -> Result<()> {
        if dirty & u64::from(KVM_SYNC_X86_REGS) != 0 {
            regs::set_regs(&mut inner.cpu.state, &field!(self.page, s.regs.regs));
        }
        if dirty & u64::from(KVM_SYNC_X86_SREGS) != 0 {
            self.put_sregs(inner, &field!(self.page, s.regs.sregs), None)?;
        }
        if dirty & u64::from(KVM_SYNC_X86_EVENTS) != 0 {
            self.put_events(inner, &field!(self.page, s.regs.events))?;
        }
        set_field!(
            self.page,
            dirty & !u64::from(KVM_SYNC_X86_VALID_FIELDS),
            kvm_dirty_regs
        );
        Ok(())
    }
}

impl Inner {
    /// Begins the exception that the client has requested. Call when a run begins.
    pub(crate) fn begin_requested(&mut self) {
        self.arch.requested.begin_exception(&mut self.cpu);
    }

    /// Copies the task priority to the guest's word in memory. Call before guest code runs.
    pub(crate) fn enters_guest(&mut self) {
        self.vapic_to_guest();
    }

    /// Reads back the task priority and the PV EOI bit from guest memory. Call after guest code has run.
    pub(crate) fn left_guest(&mut self) {
        self.vapic_from_guest();
        self.machine.collect_pv_eoi();
    }
}
