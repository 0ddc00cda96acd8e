//! The vCPUs that a debugger can find, and the VM that has a debugger.

use super::Debuggee;
use super::port::Orders;
use crate::arch::Probe;
use crate::errno::Result;
use crate::process::PerProcess;
use crate::{heap, messages};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The number of the only VM that can wait for a debugger: the process's first VM, if the user sets `SLAT_GDB_WAIT`.
const WAITS: u64 = 0;

/// A debugger's orders for all vCPUs of its VM.
pub(super) struct Debugged {
    pub(super) vm: u64,
    /// Whether the debugger lets the VM run.
    pub(super) runs: bool,
    pub(super) probes: Vec<Probe>,
}

impl Debugged {
    /// Returns a debugger's orders for one vCPU of the VM: the probes, whether the vCPU executes only one instruction
    /// (`steps`), and whether the vCPU ignores a probe at its next instruction (`passes`).
    ///
    /// # Errors
    /// `ENOMEM`.
    pub(super) fn orders(&self, steps: bool, passes: bool) -> Result<Orders> {
        Ok(Orders {
            probes: heap::copy_of(&self.probes)?,
            steps,
            passes,
        })
    }
}

struct Listed {
    /// The number of the vCPU's VM.
    vm: u64,
    vcpu: NonNull<dyn Debuggee>,
}

// SAFETY: the vCPU may be used from any thread, and `end` removes the vCPU from the list before the vCPU is freed.
unsafe impl Send for Listed {}

/// The vCPUs of a process, in the order in which they were created.
#[derive(Default)]
pub(super) struct List {
    vcpus: Vec<Listed>,
    pub(super) debugged: Option<Debugged>,
    /// Whether a debugger was ever attached. If so, VMs that are created later do not wait for a debugger.
    pub(super) came: bool,
    /// Whether the message was printed that the first VM waits for a debugger.
    told: bool,
}

static LIST: PerProcess<Mutex<List>> = PerProcess::new();

pub(super) fn list() -> MutexGuard<'static, List> {
    LIST.get().lock().unwrap_or_else(PoisonError::into_inner)
}

impl List {
    /// Returns the vCPUs of a VM. The vCPUs live as long as the list is locked.
    pub(super) fn of(&self, vm: u64) -> impl Iterator<Item = &dyn Debuggee> {
        let listed = self.vcpus.iter().filter(move |listed| listed.vm == vm);
        // SAFETY: `end` removes a vCPU from the list before the vCPU is freed, and `end` needs the lock of this list.
        listed.map(|listed| unsafe { listed.vcpu.as_ref() })
    }

    /// Returns the lowest number of a VM that has vCPUs.
    pub(super) fn first_vm(&self) -> Option<u64> {
        self.vcpus.iter().map(|listed| listed.vm).min()
    }
}

/// Adds a new vCPU to the list. If the VM waits for a debugger, or its debugger has stopped the VM, the vCPU is held.
/// If a debugger lets the VM run, the vCPU gets the debugger's probes.
///
/// # Errors
/// `ENOMEM`.
pub(crate) fn begin(vm: u64, vcpu: &(impl Debuggee + 'static)) -> Result<()> {
    let list = &mut *list();
    heap::reserve(&mut list.vcpus, 1)?;
    match &list.debugged {
        Some(debugged) if debugged.vm == vm && debugged.runs => {
            vcpu.port().release(debugged.orders(false, false)?);
        }
        Some(debugged) if debugged.vm == vm => vcpu.port().hold(),
        _ if vm == WAITS && !list.came && std::env::var_os("SLAT_GDB_WAIT").is_some() => {
            vcpu.port().hold();
            if !std::mem::replace(&mut list.told, true) {
                let process = std::process::id();
                messages::say(format_args!(
                    "VM {vm} of process {process} waits for a debugger: slat gdb {process}"
                ));
            }
        }
        _ => {}
    }
    let vcpu: &(dyn Debuggee + 'static) = vcpu;
    let vcpu = NonNull::from(vcpu);
    list.vcpus.push(Listed { vm, vcpu });
    Ok(())
}

/// Removes a vCPU, if it is listed. Call before the vCPU is freed.
pub(crate) fn end(vcpu: &dyn Debuggee) {
    let at = std::ptr::from_ref(vcpu).cast::<()>();
    list()
        .vcpus
        .retain(|listed| listed.vcpu.as_ptr().cast::<()>().cast_const() != at);
}
