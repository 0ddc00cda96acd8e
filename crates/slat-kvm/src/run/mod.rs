//! `KVM_RUN`: runs the guest until an exit, and stores the exit for the client.
//!
//! | file | idea |
//! |---|---|
//! | `interrupts` | delivery of INIT, SIPI, NMIs and interrupts, and halts, which end by them |
//! | `accesses` | port and MMIO accesses that do not exit to the client |
//! | `hyperv` | exits of Hyper-V's interface |
//! | `smm` | entry to system management mode, and RSM |

mod accesses;
mod hyperv;
mod interrupts;
mod smm;

use crate::arch;
use crate::arch::exit::ClientCall;
use crate::arch::machine::hypercall::store_result;
use crate::arch::machine::{VcpuMachine, frames};
use crate::arch::{guest_debug, msr};
use crate::entered::Entered;
use crate::errno::{Result, fail};
use crate::profile::{self, Origin};
use crate::run_page::{PIO_OFFSET, field, set_field};
use crate::signals::Masked;
use crate::thread::{self, bits};
use crate::ticker;
use crate::vcpu::{Inner, Unfinished, VcpuObject};
use crate::{exit, messages, trace};
use kvm_bindings::*;
use slat::Attention;
use slat_trace::{DirtyRingExit, point};
use slat_x86::state::flags;
use slat_x86::{Executor, Exit, PORT_BYTES, vector};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

/// Whether every signal handler of the client calls [`crate::signal_arrived`]. If not, `KVM_RUN` polls
/// `immediate_exit`, because a handler that sets `immediate_exit` wakes no vCPU.
static SIGNALS_ARE_WATCHED: AtomicBool = AtomicBool::new(false);

/// Promises that every signal handler of this process calls [`crate::signal_arrived`].
pub fn watch_signals() {
    SIGNALS_ARE_WATCHED.store(true, Ordering::Relaxed);
}

/// The time limit of sleeps. Without a time limit, the kernel restarts a wait after a signal handler.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

/// The time by which the notify window is extended, as in processors. A guest does nothing by accident that takes as
/// long.
const NOTIFY_THRESHOLD: Duration = Duration::from_millis(1);

/// The next step of the run loop after an exit of the CPU.
enum Next {
    /// Run the guest again.
    Again,
    /// Return to the client: the exit is in `kvm_run`.
    Return,
}

impl VcpuObject {
    /// `KVM_RUN`.
    ///
    /// # Errors
    /// `EINTR` for a signal or `immediate_exit`. `EFAULT` if the client's memory that backs guest memory is unmapped,
    /// or if there is no private memory for a private page (then with `KVM_EXIT_MEMORY_FAULT`). `ENOMEM` if there is no
    /// memory for a second-level table; the next run continues where this run ended. `EINVAL` for bad values in
    /// `kvm_run`. `EAGAIN` after waiting for INIT and SIPI. `EIO` in a forked child and after a call that panicked.
    pub fn run(&self) -> Result<()> {
        let mut inner = self.lock()?;
        let inner = &mut *inner;
        let attention = self.common().attention.clone();
        let _guards = thread::begin(&attention);
        let _traced = slat_trace::run_vcpu(self.vm.number, self.common().id);
        // SAFETY: a plain call.
        let thread = unsafe { libc::pthread_self() } as usize;
        self.common().runner.store(thread, Ordering::SeqCst);
        let masked = inner.signal_mask.map(Masked::enter);
        let _polling = (masked.is_some() || !SIGNALS_ARE_WATCHED.load(Ordering::Relaxed))
            .then(|| self.common().client.poll());
        set_field!(self.page, 0, flags);
        if self.is_called_to_port() {
            self.visit_port(inner, masked.as_ref());
        }
        let result = self.prepare(inner, masked.as_ref()).and_then(|ready| {
            if !ready {
                return Ok(());
            }
            if self.page.immediate_exit() && !inner.is_unfinished() {
                return fail(libc::EINTR);
            }
            inner.has_run = true;
            inner.machine.begin_to_run();
            let mut entered = Entered::enter(inner);
            let result = self.complete_and_run(&mut entered, masked.as_ref());
            entered.machine.stop_running();
            result
        });
        self.common().runner.store(0, Ordering::SeqCst);
        self.publish(inner);
        trace::returns(self.page.exit_reason(), &result);
        result
    }

    /// Reads the client's input in `kvm_run` and finishes the access that the client completed. Returns `false` if
    /// `KVM_RUN` has to return at once, with success.
    fn prepare(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<bool> {
        self.accept_init_sipi(inner);
        if inner.mp_state == KVM_MP_STATE_UNINITIALIZED
            || inner.mp_state == KVM_MP_STATE_INIT_RECEIVED
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
        match std::mem::take(&mut inner.unfinished) {
            Unfinished::Nothing => {}
            Unfinished::PortOut => inner.cpu.complete_io(&[]),
            Unfinished::PortIn(len) => {
                let mut data = [0; PORT_BYTES];
                self.page.read_pio(&mut data[..len]);
                let (port, size) = (
                    field!(self.page, __bindgen_anon_1.io.port),
                    field!(self.page, __bindgen_anon_1.io.size),
                );
                arch::trace::port(false, port, size.into(), &data[..len]);
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
        if inner.mp_state == KVM_MP_STATE_INIT_RECEIVED && inner.cpu.state.events.smm {
            // In system management mode no SIPI is accepted.
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
            if inner.mp_state == KVM_MP_STATE_RUNNABLE {
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
            // A flush request is dropped here. So the translations that the request should flush must be dropped, too.
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

    /// Finishes the instruction that the last run began, then executes the guest until an exit.
    fn complete_and_run(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        inner.machine.follow_client();
        inner.cpu.set_bus_locks(self.vm.arch.options.bus_locks());
        let window = self.vm.arch.options.notify_window();
        inner.cpu.requests.notify_window =
            window.map(|cycles| NOTIFY_THRESHOLD + inner.machine.tsc.duration(cycles));
        if let Next::Return = self.complete(inner, masked)? {
            return Ok(());
        }
        if self.page.immediate_exit() {
            return fail(libc::EINTR);
        }
        if masked.is_some_and(Masked::signal_waits) {
            self.common().attention.raise(bits::SIGNAL);
        }
        self.loop_until_exit(inner, masked)
    }

    fn loop_until_exit(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        self.page.set_exit_reason(KVM_EXIT_UNKNOWN);
        inner.machine.write_clocks();
        inner.requested.begin_exception(&mut inner.cpu);
        loop {
            // The attention word is read before the completion. A bit that is raised during the completion must not end
            // this run with an instruction that is not done.
            let is_called = self.common().attention.flag().load(Ordering::SeqCst) != 0;
            if let Next::Return = self.complete(inner, masked)? {
                return Ok(());
            }
            if is_called {
                self.attend(inner, masked)?;
            }
            inner.machine.write_steal_time();
            inner.machine.deliver_page_ready();
            inner.machine.collect_pv_eoi();
            if std::mem::take(&mut inner.requested.triple_fault) && !inner.cpu.exit_on_shutdown() {
                self.page.set_exit_reason(KVM_EXIT_SHUTDOWN);
                return Ok(());
            }
            if self.ring_is_full() || !self.deliver_events(inner, masked)? {
                return Ok(());
            }
            inner.vapic_to_guest();
            let exit = self.execute(inner, |cpu, machine, attention| {
                Some(cpu.run(machine, attention))
            });
            inner.vapic_from_guest();
            inner.machine.collect_pv_eoi();
            if let Next::Return = self.follow(inner, exit, masked)? {
                return Ok(());
            }
        }
    }

    /// Finishes the instruction of the last exit with the data that the client has provided. `Next::Return`: the
    /// instruction has another exit for the client, which is set.
    ///
    /// KVM promises (api.rst, 5) that after a run with `immediate_exit` no instruction is half done. So this method is
    /// called before signals, requests and interrupts are handled, and executes no other instruction. [`Executor::run`]
    /// also finishes the instruction before it executes another one. So if `Executor::run` follows at once, this method
    /// does nothing.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run), if the instruction has to wait for memory that the host does not have yet.
    /// Then the rest of the instruction stays for the next run.
    fn complete(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<Next> {
        while inner.cpu.is_unfinished() && self.is_called_away(masked) {
            if self.ring_is_full() {
                return Ok(Next::Return);
            }
            // Flushes did not wait for this vCPU while it was outside, so its translations may be invalid.
            self.serve_requests(inner)?;
            let exit = self.execute(inner, |cpu, machine, attention| {
                cpu.complete(machine, attention)
            });
            if let Next::Return = self.follow(inner, exit, masked)? {
                return Ok(Next::Return);
            }
        }
        match self.has_ended_for_client(inner) || self.has_hyperv_exit(inner) {
            true => Ok(Next::Return),
            false => Ok(Next::Again),
        }
    }

    /// Handles the exit, if there is one, after instructions were executed.
    ///
    /// # Errors
    /// The errors of [`run`](Self::run).
    fn follow(
        &self,
        inner: &mut Inner,
        exit: Option<Exit>,
        masked: Option<&Masked>,
    ) -> Result<Next> {
        match exit {
            None => Ok(Next::Again),
            // A second try of the interrupted instruction would sleep again, and no kick would end that sleep.
            Some(Exit::Attention) if inner.machine.is_interrupted => {
                self.attend(inner, masked).map(|()| Next::Again)
            }
            Some(exit) => self.handle(inner, exit),
        }
    }

    /// Whether an event may end this run, or has to be handled, before the guest's next instruction.
    fn is_called_away(&self, masked: Option<&Masked>) -> bool {
        self.page.immediate_exit()
            || masked.is_some()
            || self.common().attention.flag().load(Ordering::SeqCst) != 0
    }

    /// Executes instructions of the guest by `f`, and counts the exit that ends them.
    fn execute(
        &self,
        inner: &mut Inner,
        f: impl FnOnce(&mut Executor, &mut VcpuMachine, &AtomicU32) -> Option<Exit>,
    ) -> Option<Exit> {
        let Inner {
            cpu,
            machine,
            stopwatch,
            ..
        } = inner;
        (machine.memory_fault, machine.is_interrupted) = (None, false);
        slat_guard::forget_kick();
        let common = self.common();
        stopwatch.enters(&common.times);
        common.client.executes();
        arch::trace::enters(common.id, &cpu.state);
        let exit = f(cpu, machine, common.attention.flag());
        common.client.rests();
        common.cpu.publish(cpu.counters());
        // A trace has an exit for each entry, so a missing exit is recorded as `Attention`.
        let left = exit.as_ref().unwrap_or(&Exit::Attention);
        arch::trace::left(common.id, &cpu.state, left);
        if let Some(exit) = &exit {
            common.exits.count(exit);
            stopwatch.exits(common.exits.exits.get(), || arch::counters::reason(exit));
        }
        exit
    }

    /// Whether the guest has ended an interrupt of the client's I/O APIC. If so, sets the exit `KVM_EXIT_IOAPIC_EOI`.
    fn has_ended_for_client(&self, inner: &mut Inner) -> bool {
        let ended = inner.machine.ioapic_eoi.take();
        if let Some(vector) = ended {
            self.page.set_exit_reason(KVM_EXIT_IOAPIC_EOI);
            set_field!(self.page, vector, __bindgen_anon_1.eoi.vector);
        }
        ended.is_some()
    }

    /// Whether the client has to collect from the dirty ring before the guest continues. If so, sets the exit
    /// `KVM_EXIT_DIRTY_RING_FULL`.
    fn ring_is_full(&self) -> bool {
        let full = self.ring.as_ref().is_some_and(|ring| ring.is_soft_full());
        if full {
            self.page.set_exit_reason(KVM_EXIT_DIRTY_RING_FULL);
            point(|| DirtyRingExit {
                vcpu_id: self.common().id,
            });
        }
        full
    }

    /// Handles all raised attention bits. Waits while a debugger holds the vCPU. An error ends the run.
    fn attend(&self, inner: &mut Inner, masked: Option<&Masked>) -> Result<()> {
        if self.is_called_to_port() {
            inner.machine.stop_running();
            inner.outside(|inner| {
                self.visit_port(inner, masked);
                inner.machine.begin_to_run();
            });
        }
        self.serve_requests(inner)?;
        let raised = self.common().attention.take(bits::SIGNAL | bits::POLL);
        let polled = raised & bits::POLL != 0
            && (self.must_leave() || masked.is_some_and(Masked::signal_waits));
        if raised & bits::SIGNAL != 0 || polled {
            self.common().exits.signal_exits.add(1);
            self.page.set_exit_reason(KVM_EXIT_INTR);
            return fail(libc::EINTR);
        }
        Ok(())
    }

    /// Handles the raised attention bits, except bits that make the run return to the client.
    ///
    /// # Errors
    /// `EIO` if the VM is dead.
    fn serve_requests(&self, inner: &mut Inner) -> Result<()> {
        let attention = &self.common().attention;
        let raised = attention.take(
            bits::IRQ
                | bits::TIMER
                | bits::RETRY
                | bits::RING_FULL
                | bits::GUEST_FLUSH
                | bits::SAMPLE,
        );
        self.vm.still_alive()?;
        if raised & bits::SAMPLE != 0 {
            self.sample(inner);
        }
        if raised == bits::SAMPLE {
            inner.cpu.forget_interrupted();
        }
        // The acknowledgement (`quiesce`) clears FLUSH.
        let by_host = raised & bits::RETRY != 0
            || attention.flag().load(Ordering::SeqCst) & Attention::FLUSH != 0;
        let by_guest = raised & bits::GUEST_FLUSH != 0;
        if by_host || by_guest {
            self.common().exits.tlb_flush.add(1);
            inner.flush_translations();
        }
        if by_guest {
            inner.machine.flush_shadowed();
        }
        if by_host {
            inner.machine.engine.quiesce();
        }
        if by_host || raised & bits::POLL != 0 {
            inner.machine.write_clocks();
        }
        if raised & bits::TIMER != 0 {
            if let Some(mut lapic) = self.common().lapic() {
                lapic.tick(self.vm.arch.clock.now());
            }
            inner.machine.run_timers();
            inner.machine.arm_timer();
        }
        Ok(())
    }

    /// Stores the guest's stack for a profile.
    #[cold]
    fn sample(&self, inner: &Inner) {
        let mut stack = [0; frames::MOST];
        let count = inner.machine.stack(&inner.cpu, &mut stack);
        let origin = Origin {
            vm: self.vm.number,
            vcpu: self.common().id,
            is_nested: inner.cpu.is_in_guest_mode(),
        };
        profile::count(origin, &stack[..count]);
    }

    /// Whether the run has to end for a reason that raises no bit: a handler may set `immediate_exit` and call nothing.
    fn must_leave(&self) -> bool {
        !SIGNALS_ARE_WATCHED.load(Ordering::Relaxed) && self.page.immediate_exit()
    }

    fn handle(&self, inner: &mut Inner, exit: Exit) -> Result<Next> {
        let page = &self.page;
        match exit {
            Exit::Attention | Exit::InterruptWindow => return Ok(Next::Again),
            Exit::Io {
                port,
                size,
                write,
                count,
            } => {
                let len = usize::from(size) * count as usize;
                if write {
                    arch::trace::port(true, port, size.into(), inner.cpu.output());
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
                inner.unfinished = if !write {
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
                    inner.unfinished = Unfinished::MmioRead(len.into());
                }
            }
            Exit::Hlt => {
                if self.vm.has_irqchip() || self.vm.arch.options.halts_inside() {
                    inner.mp_state = KVM_MP_STATE_HALTED;
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
            } => arch::exit::delivery(page, vector, software, gpa),
            Exit::Shutdown => page.set_exit_reason(KVM_EXIT_SHUTDOWN),
            Exit::Emulation { bytes, len, reason } => {
                messages::cannot_execute(
                    self.common().id,
                    inner.cpu.state.rip,
                    &bytes[..len.into()],
                    reason,
                );
                if inner.cpu.cpl() != 0 && !self.vm.arch.options.exit_on_emulation_failure() {
                    // The guest's kernel handles the instructions of its user programs.
                    inner.cpu.inject_exception(vector::UD, None);
                    return Ok(Next::Again);
                }
                arch::exit::emulation_failure(page, bytes, len);
            }
            Exit::Msr { index, value, why } => {
                arch::exit::msr(page, index, value, msr::exit_reason(why));
                inner.unfinished = Unfinished::Msr;
            }
            Exit::Hypercall => match inner.machine.client_call.take() {
                Some(ClientCall::Kvm {
                    nr,
                    args,
                    long_mode,
                }) => {
                    arch::exit::hypercall(page, nr, args, long_mode);
                    inner.unfinished = Unfinished::Hypercall;
                }
                Some(ClientCall::Hyperv { input, parameters }) => {
                    self.exit_for_hyperv_call(input, parameters);
                    inner.unfinished = Unfinished::HypervCall;
                }
                None => unreachable!("the machine has named the call"),
            },
            Exit::BadAddress => {
                match inner.machine.memory_fault.take() {
                    Some(fault) => exit::memory_fault(page, fault),
                    // The reason of an earlier exit would describe another fault.
                    None => page.set_exit_reason(KVM_EXIT_UNKNOWN),
                }
                return fail(libc::EFAULT);
            }
            Exit::OutOfMemory => return fail(libc::ENOMEM),
            Exit::Notify => {
                if !self.vm.arch.options.notifies_client() {
                    return Ok(Next::Again);
                }
                // No flag is set, because the state of the vCPU is valid.
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
    fn publish(&self, inner: &mut Inner) {
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
            set_field!(page, crate::arch::regs::get_regs(state), s.regs.regs);
        }
        if wanted & u64::from(KVM_SYNC_X86_SREGS) != 0 {
            set_field!(
                page,
                crate::arch::regs::get_sregs(state, inner.machine.apic_base()),
                s.regs.sregs
            );
        }
        if wanted & u64::from(KVM_SYNC_X86_EVENTS) != 0 {
            let events = self.events(inner);
            set_field!(page, events, s.regs.events);
        }
    }

    /// Sets the registers that the client changed in `kvm_run`.
    fn take_synced(&self, inner: &mut Inner, dirty: u64) -> Result<()> {
        if dirty & u64::from(KVM_SYNC_X86_REGS) != 0 {
            crate::arch::regs::set_regs(&mut inner.cpu.state, &field!(self.page, s.regs.regs));
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
