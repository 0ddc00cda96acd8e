//! A debugger of the guest for `slat gdb`. The debugger stops the vCPUs of a VM, and the client, which runs the VM,
//! does not notice the debugger.
//!
//! | file | idea |
//! |---|---|
//! | `port` | the place where a vCPU's thread waits, and lends the vCPU to the debugger meanwhile |
//! | `list` | the vCPUs that a debugger can find, and the VM that has a debugger |
//! | `session` | the operations of a debugger on all vCPUs of a VM |
//!
//! # Which thread uses a vCPU
//! A vCPU's registers belong to the thread that has locked the vCPU, in `KVM_RUN` or in another call of the client. A
//! debugger marks the vCPU as *held*, and raises [`bits::HOLD`](crate::thread::bits::HOLD). After a short time, one of
//! two conditions holds:
//!
//! * The vCPU's thread is in `KVM_RUN`. The thread checks for this bit where it checks for signals and interrupts. When
//!   it finds the bit set, it leaves the engine and waits in the vCPU's port. The waiting thread keeps the vCPU locked.
//!   So calls of the client that need the vCPU's lock wait for the debugger, as they wait for a vCPU that runs. The
//!   debugger's thread uses the vCPU under the port's lock, which the waiting thread needs to continue.
//! * No call has locked the vCPU. The debugger's thread locks the vCPU for each request, as a call would. If the client
//!   calls `KVM_RUN` afterwards, the vCPU's thread first waits in the port, and the registers do not change.
//!
//! A signal for the thread of a held vCPU ends `KVM_RUN` as always, with `EINTR` and without an instruction of the
//! guest. `immediate_exit` also ends `KVM_RUN`. So a client can pause, save and end its VM while a debugger holds the
//! vCPU. The vCPU stays held.
//!
//! A vCPU's port holds the probes (breakpoints, watchpoints, steps) that the debugger has set. The vCPU's own thread
//! reads the probes from the port before the guest executes again. So a debugger can leave at any moment, even when a
//! vCPU does not respond.
//!
//! Without a debugger, the only cost is one read of the attention word for each `KVM_RUN`. A thread that waits in a
//! port makes only the system call `futex`, which the client's seccomp filter has to allow.

mod list;
mod port;
mod session;

pub use crate::arch::{BLOCK, REGISTERS};
pub use crate::gdb::Register;
pub(crate) use list::{begin, end};
pub(crate) use port::{Held, Port, Quiet};
pub(crate) use session::{Go, Session, Stopped};

/// The greatest number of probes (breakpoints and watchpoints) of a VM.
pub const MOST_PROBES: usize = 128;

/// The memory to which an address of a request belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// Guest-physical memory.
    Physical,
    /// The linear addresses of the vCPU.
    Linear,
}

/// A debugger's request to a vCPU that does not run.
pub(crate) enum Request<'a> {
    /// Does nothing. Its result shows whether the vCPU runs.
    Nothing,
    /// Reads the values of all registers.
    Get(&'a mut [u8; BLOCK]),
    /// Sets the register with this index to a new value. Fails for a register that cannot be set.
    Set(usize, &'a [u8]),
    /// Reads memory. Fails if a byte of the range is not memory.
    Read(Space, u64, &'a mut [u8]),
    /// Writes memory. Fails at the first page that cannot be written.
    Write(Space, u64, &'a [u8]),
}

/// The interface of a vCPU for a debugger.
pub(crate) trait Debuggee: Sync {
    /// Returns the id that the client gave to the vCPU.
    fn id(&self) -> u32;

    /// Returns the vCPU's port, where its thread waits while a debugger holds the vCPU.
    fn port(&self) -> &dyn Held;

    /// Carries out a request. Returns whether the request succeeded; `None` if the vCPU runs, or another call has
    /// locked the vCPU.
    fn request(&self, request: &mut Request<'_>) -> Option<bool>;
}
