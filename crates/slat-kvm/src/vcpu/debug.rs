//! The interface through which [`crate::debugger`] debugs a vCPU. The client does not notice the debugger.

use crate::arch::{self, ProbeHit, VcpuMachine};
use crate::debugger::{Debuggee, Held, Quiet, Request, Space};
use crate::entered::Entered;
use crate::signals::Masked;
use crate::thread::bits;
use crate::vcpu::{Inner, VcpuObject};
use slat_host::page_size;
use std::ops::Range;
use std::sync::TryLockError;

impl VcpuObject {
    /// Whether a debugger asks the thread that runs this vCPU to wait in the vCPU's port.
    pub(crate) fn is_called_to_port(&self) -> bool {
        self.port.calls()
    }

    /// Waits while a debugger holds the vCPU, or until the run has to end. Then carries out the debugger's orders. Call
    /// outside the engine's reader section.
    pub(crate) fn visit_port(&self, inner: &mut Inner, masked: Option<&Masked>) {
        self.port.wait(inner, |raised, interrupted| {
            interrupted
                || raised & bits::SIGNAL != 0
                || self.page.immediate_exit()
                || raised & bits::POLL != 0 && masked.is_some_and(Masked::signal_waits)
        });
        if let Some(orders) = self.port.orders() {
            inner.cpu.set_probes(orders.probes, orders.steps);
            if orders.passes {
                inner.cpu.pass_probe();
            }
        }
    }

    /// Reports to the debugger that the CPU has stopped at a probe.
    pub(crate) fn probe_hit(&self, hit: ProbeHit) {
        self.port.stopped(hit);
    }

    /// Calls `work` with the vCPU's state, if no other thread uses it. `None`: a thread runs the vCPU, or has locked it
    /// for another call.
    fn with_state<R>(&self, work: impl FnOnce(&mut Inner) -> R) -> Option<R> {
        let work = match self.port.with_lent(work) {
            Ok(result) => return Some(result),
            Err(work) => work,
        };
        let mut inner = match self.inner.try_lock() {
            Ok(inner) => inner,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(work(&mut inner))
    }

    /// Calls `access` for each page's part of the `len` bytes at `address`, with the guest-physical address and the
    /// part's range among the bytes. `access` runs inside the engine's reader section. Returns `false` if an address is
    /// not mapped, or `access` returns `false`.
    fn by_pages(
        &self,
        inner: &mut Inner,
        (space, address, len): (Space, u64, usize),
        mut access: impl FnMut(&mut VcpuMachine, u64, Range<usize>) -> bool,
    ) -> bool {
        let _quiet = Quiet::begin(&self.common().attention);
        let mut done = 0;
        while done < len {
            let at = address.wrapping_add(done as u64);
            let end = len.min(done + page_size() - at as usize % page_size());
            let gpa = match space {
                Space::Physical => Some(at),
                Space::Linear => inner.machine.translate_for_client(&inner.cpu, at),
            };
            let mut entered = Entered::enter(&mut inner.machine);
            entered.forget_pages();
            if !gpa.is_some_and(|gpa| access(&mut entered, gpa, done..end)) {
                return false;
            }
            done = end;
        }
        true
    }
}

impl Debuggee for VcpuObject {
    fn id(&self) -> u32 {
        self.common().id
    }

    fn port(&self) -> &dyn Held {
        &self.port
    }

    fn request(&self, request: &mut Request<'_>) -> Option<bool> {
        if self.vm.still_alive().is_err() {
            return Some(false);
        }
        match request {
            Request::Nothing => self.with_state(|_| true),
            Request::Get(block) => {
                let state = self.with_state(|inner| inner.cpu.state.clone())?;
                arch::get_registers(&state, block);
                Some(true)
            }
            Request::Set(register, value) => {
                self.with_state(|inner| arch::set_register(&mut inner.cpu.state, *register, value))
            }
            Request::Read(space, address, bytes) => {
                let what = (*space, *address, bytes.len());
                self.with_state(|inner| {
                    self.by_pages(inner, what, |machine, gpa, part| {
                        machine.read_here(gpa, &mut bytes[part])
                    })
                })
            }
            Request::Write(space, address, bytes) => self.with_state(|inner| {
                let what = (*space, *address, bytes.len());
                let written = self.by_pages(inner, what, |machine, gpa, part| {
                    machine.write_here(gpa, &bytes[part])
                });
                // Cached translations and code are dropped, because the written bytes may be page tables or code.
                inner.flush_translations();
                written
            }),
        }
    }
}
