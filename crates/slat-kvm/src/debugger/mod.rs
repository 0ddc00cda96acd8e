//! A debugger of the guest for `slat gdb`: it stops the vCPUs of a VM, and the client, which runs the
//! VM, does not notice.
//!
//! | file | idea |
//! |---|---|
//! | `port` | where the thread of a vCPU waits, and lends the vCPU meanwhile |
//! | `list` | the vCPUs that a debugger can find, and which VM has one |
//! | `session` | what a debugger does with all vCPUs of a VM |
//! | `registers` | the registers, as GDB numbers them |
//!
//! # Who holds what
//! A vCPU's registers belong to the thread that has locked it: one in `KVM_RUN`, or in another call of the client. A
//! debugger marks the vCPU as *held*, and raises [`bits::HOLD`](crate::thread::bits::HOLD). Then one of two things
//! is true before long:
//!
//! * Its thread is in `KVM_RUN`, sees the bit where it looks for signals and interrupts, leaves the engine, and waits
//!   in its port. It keeps the vCPU locked, so that calls of the client that need the lock wait for the debugger, as
//!   they wait for a vCPU that runs. The debugger's thread uses the vCPU under the port's lock, which the waiting
//!   thread needs to go on.
//! * No call has locked it. The debugger's thread locks it for each request, as a call would. If the client calls
//!   `KVM_RUN` afterwards, the thread waits in its port before anything else, and the registers stay as the
//!   debugger has seen them.
//!
//! A signal for the thread of a held vCPU ends `KVM_RUN` as always, with `EINTR` and without an instruction of
//! the guest, and so does `immediate_exit`: a client can pause, save and end its VM while a debugger holds it.
//! The vCPU stays held.
//!
//! A vCPU's port holds the probes (breakpoints, watchpoints, steps) that the debugger has set. The vCPU's own thread
//! reads them from the port before the guest executes again. So a debugger can leave at any moment, also when a vCPU
//! does not respond.
//!
//! A vCPU without a debugger pays a look at its attention word for each `KVM_RUN`. The thread that waits
//! needs `futex` alone.

mod list;
mod port;
mod registers;
mod session;

pub(crate) use list::{begin, end};
pub(crate) use port::{Held, Port, Quiet};
pub use registers::{BLOCK, REGISTERS, Register};
pub(crate) use registers::{get, set};
pub(crate) use session::{Go, Session, Stopped};

/// The most probes of a VM.
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
    /// Nothing: finds out whether it runs.
    Nothing,
    /// The values of all registers.
    Get(&'a mut [u8; BLOCK]),
    /// A new value of a register, by its index. Fails for a register that cannot be set.
    Set(usize, &'a [u8]),
    /// Memory. Fails if a byte of it is none.
    Read(Space, u64, &'a mut [u8]),
    /// Memory. Fails at the first page that cannot be written.
    Write(Space, u64, &'a [u8]),
}

/// A vCPU, for a debugger.
pub(crate) trait Debuggee: Sync {
    /// Returns the id that the client gave to the vCPU.
    fn id(&self) -> u32;

    /// Returns its port.
    fn port(&self) -> &dyn Held;

    /// Carries out a request. Returns whether that succeeded; `None` if the vCPU runs, or another call has locked it.
    fn request(&self, request: &mut Request<'_>) -> Option<bool>;
}
