//! `KVM_IRQFD`: eventfds whose signals are interrupts.
//!
//! One thread of the process waits for all irqfds. For every signal that the thread finds, the thread injects an edge
//! or a message. For a resampled irqfd (`KVM_IRQFD_FLAG_RESAMPLE`) the thread raises the line. The guest's end of
//! interrupt lowers that line and signals the second eventfd to the client. If the client's device still needs the line
//! high, the client signals the first eventfd again.
//!
//! # Concurrency
//! The thread finds an irqfd by its number in the process's list, under that list's lock. The thread injects under the
//! irqfd's own lock. An irqfd is removed in three steps: it is removed from the VM's list and the process's list; a
//! signal that arrived earlier is injected; and the irqfd is ended under its own lock. So after `KVM_IRQFD` has
//! returned, the irqfd injects nothing. Locks are acquired in two orders: the VM's list before the process's list; an
//! irqfd's lock before the controllers' locks. The thread holds the lock of no list while it injects.

use crate::background::{self, Background};
use crate::errno::{Error, Result, fail, no_memory};
use crate::eventfd::{self, EventFd};
use crate::heap;
use crate::messages;
use crate::process::PerProcess;
use kvm_bindings::*;
use slat::Shared;
use slat_process::calls::{self, Call};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};

/// The irq source id (KVM's word) of the client: `KVM_IRQ_LINE`, or an irqfd that is not resampled. A line is high as
/// long as any source holds it high.
pub(crate) const USERSPACE: u8 = 0;
/// The irq source id of resampled irqfds.
pub(crate) const RESAMPLE: u8 = 1;

/// The greatest number of events that one `epoll_wait` returns.
const AT_A_TIME: usize = 64;

/// The interrupt lines of a VM.
pub(crate) trait Lines: Send + Sync {
    /// Sets the level that `source` gives the line of a GSI.
    fn set(&self, gsi: u32, source: u8, level: bool);

    /// Raises and lowers the line of a GSI, without a moment at which another thread can find the line high.
    fn pulse(&self, gsi: u32, source: u8);
}

/// An irqfd: an eventfd, and the interrupt that its signal raises.
#[derive(Debug)]
struct IrqFd {
    lines: Weak<dyn Lines>,
    gsi: u32,
    eventfd: EventFd,
    /// The eventfd that is signalled at the guest's EOI.
    resample: Option<EventFd>,
    /// Whether the irqfd still exists. This lock is held while the irqfd's interrupt is injected.
    live: Mutex<bool>,
}

impl IrqFd {
    /// Injects an interrupt if the eventfd is signalled, unless the irqfd was removed.
    fn fire(&self) {
        let live = lock(&self.live);
        if *live {
            self.inject();
        }
    }

    /// Ends the irqfd. If the eventfd was signalled before, injects that interrupt first. Later signals inject nothing.
    fn end(&self) {
        let mut live = lock(&self.live);
        self.inject();
        *live = false;
    }

    /// Injects an interrupt if the eventfd is signalled. Call with `live` locked.
    fn inject(&self) {
        if !self.eventfd.drain() {
            return;
        }
        let Some(lines) = self.lines.upgrade() else {
            return;
        };
        match self.resample {
            Some(_) => lines.set(self.gsi, RESAMPLE, true),
            None => lines.pulse(self.gsi, USERSPACE),
        }
    }
}

/// The irqfds of a VM.
#[derive(Debug, Default)]
pub(crate) struct IrqFds {
    list: Mutex<Vec<Shared<IrqFd>>>,
    /// Whether the VM has ever had resampled irqfds. If not, EOIs do not look at the list. The flag never changes back
    /// to `false`. Relaxed accesses are enough: before a thread can see an interrupt of a resampled irqfd, the thread
    /// has acquired the lock of the service, or the client has begun the thread's call after `KVM_IRQFD`.
    resampled: AtomicBool,
}

impl Drop for IrqFds {
    fn drop(&mut self) {
        if let Some(service) = SERVICE.peek() {
            for irqfd in &*lock(&self.list) {
                service.remove(irqfd);
            }
        }
    }
}

impl IrqFds {
    /// Adds the irqfd that `asked` describes. The irqfd injects into `lines`, which belong to a VM with controllers.
    ///
    /// # Errors
    /// `EINVAL` for a descriptor that is no eventfd, `EBADF`, `EBUSY` if the eventfd is already an irqfd of any VM,
    /// `ENOMEM`, `EMFILE`.
    pub(crate) fn add(&self, lines: Weak<dyn Lines>, asked: &kvm_irqfd) -> Result<()> {
        let resampled = asked.flags & KVM_IRQFD_FLAG_RESAMPLE != 0;
        let irqfd = Shared::try_new(IrqFd {
            lines,
            gsi: asked.gsi,
            eventfd: EventFd::take(asked.fd as i32)?,
            resample: match resampled {
                true => Some(EventFd::take(asked.resamplefd as i32)?),
                false => None,
            },
            live: Mutex::new(true),
        })
        .map_err(no_memory)?;
        let mut list = lock(&self.list);
        heap::reserve(&mut list, 1)?;
        list.push(irqfd.clone());
        if resampled {
            self.resampled.store(true, Ordering::Relaxed);
        }
        let added = Service::get().and_then(|service| service.add(irqfd));
        if added.is_err() {
            list.pop();
        }
        added
    }

    /// Removes the irqfd of this eventfd and GSI. As in KVM, succeeds even if there is no such irqfd.
    ///
    /// # Errors
    /// `EINVAL` for a descriptor that is no eventfd, `EBADF`, `EMFILE`.
    pub(crate) fn remove(&self, lines: &dyn Lines, asked: &kvm_irqfd) -> Result<()> {
        let (eventfd, gsi) = (EventFd::take(asked.fd as i32)?, asked.gsi);
        let mut removed = None;
        let mut list = lock(&self.list);
        list.retain(|irqfd| {
            let is_it = irqfd.gsi == gsi && irqfd.eventfd.is(&eventfd);
            if is_it {
                removed = Some(irqfd.clone());
            }
            !is_it
        });
        let resampled = |irqfd: &Shared<IrqFd>| irqfd.gsi == gsi && irqfd.resample.is_some();
        let last_of_line = !list.iter().any(resampled);
        drop(list);
        if let Some(irqfd) = removed {
            if let Some(service) = SERVICE.peek() {
                service.remove(&irqfd);
            }
            irqfd.end();
            if irqfd.resample.is_some() && last_of_line {
                // The last resampled irqfd of this line was removed, so no irqfd would lower the line later.
                lines.set(gsi, RESAMPLE, false);
            }
        }
        Ok(())
    }

    /// Injects the interrupts of all eventfds that were signalled until now. Call before saving the state of
    /// controllers, because KVM's irqfds inject at once.
    pub(crate) fn inject_signalled(&self) {
        let irqfd = |at: usize| lock(&self.list).get(at).cloned();
        (0..).map_while(irqfd).for_each(|irqfd| irqfd.fire());
    }

    /// Whether the VM has ever had resampled irqfds.
    pub(crate) fn has_resampled(&self) -> bool {
        self.resampled.load(Ordering::Relaxed)
    }

    /// Lowers the line that the resampled irqfds of `gsi` hold, and signals the client, which may raise the line again.
    /// Call after the guest's EOI of an interrupt of `gsi`, with no controller locked.
    pub(crate) fn resample(&self, lines: &dyn Lines, gsi: u32) {
        if !self.has_resampled() {
            return;
        }
        let mut lowered = false;
        for irqfd in &*lock(&self.list) {
            if let Some(resample) = irqfd.resample.as_ref().filter(|_| irqfd.gsi == gsi) {
                if !std::mem::replace(&mut lowered, true) {
                    lines.set(gsi, RESAMPLE, false);
                }
                resample.signal();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The thread that waits for the irqfds of all VMs.
#[derive(Default)]
struct Service {
    epoll: Mutex<Option<Shared<OwnedFd>>>,
    /// The irqfds of the process. An epoll event names its irqfd by the irqfd's address. The list keeps the irqfds
    /// alive.
    irqfds: Mutex<Vec<Shared<IrqFd>>>,
    started: AtomicBool,
}

static SERVICE: PerProcess<Service> = PerProcess::new();

/// Creates the objects that the irqfds of a process share.
pub(crate) fn prepare() {
    SERVICE.get();
    eventfd::prepare();
}

/// Starts the thread if it does not run.
pub(crate) fn start() {
    // A failure is ignored here: the first `KVM_IRQFD` fails in the same way, and returns the reason.
    let _ = Service::get();
}

fn number(irqfd: &Shared<IrqFd>) -> u64 {
    &raw const **irqfd as u64
}

impl Service {
    /// Returns the service; starts its thread if it does not run.
    fn get() -> Result<&'static Self> {
        let service = SERVICE.get();
        let mut epoll = lock(&service.epoll);
        if epoll.is_none() {
            // SAFETY: `epoll_create1` takes no pointer.
            let fd = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
            if fd < 0 {
                return Err(Error::last());
            }
            // SAFETY: the descriptor is new, and nothing else owns it.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            *epoll = Some(Shared::try_new(fd).map_err(no_memory)?);
        }
        drop(epoll);
        if !service.started.swap(true, Ordering::Relaxed) {
            background::start(service);
        }
        Ok(service)
    }

    fn control(&self, operation: i32, irqfd: &Shared<IrqFd>) -> Result<()> {
        let Some(epoll) = lock(&self.epoll).clone() else {
            return Ok(());
        };
        let mut event = libc::epoll_event {
            events: libc::EPOLLIN as u32,
            u64: number(irqfd),
        };
        let (fd, event) = (irqfd.eventfd.as_raw_fd() as usize, &raw mut event as usize);
        let arguments = [
            epoll.as_raw_fd() as usize,
            operation as usize,
            fd,
            event,
            0,
            0,
        ];
        // SAFETY: `epoll_ctl` reads only the event, which is on the stack.
        let controlled = unsafe { calls::make(Call::Watch, arguments) };
        controlled.map(drop).map_err(Error::new)
    }

    fn add(&self, irqfd: Shared<IrqFd>) -> Result<()> {
        let mut irqfds = lock(&self.irqfds);
        // One eventfd can have only one irqfd, because each signal is read only once.
        if (irqfds.iter()).any(|other| other.eventfd.is(&irqfd.eventfd)) {
            return fail(libc::EBUSY);
        }
        heap::reserve(&mut irqfds, 1)?;
        self.control(libc::EPOLL_CTL_ADD, &irqfd)?;
        irqfds.push(irqfd);
        Ok(())
    }

    fn remove(&self, irqfd: &Shared<IrqFd>) {
        let mut irqfds = lock(&self.irqfds);
        if let Some(at) = irqfds
            .iter()
            .position(|other| number(other) == number(irqfd))
        {
            irqfds.swap_remove(at);
            // This fails only if the client has closed slat's descriptor of the eventfd. Then the kernel has already
            // removed the descriptor from the epoll set.
            let _ = self.control(libc::EPOLL_CTL_DEL, irqfd);
        }
    }
}

impl Background for Service {
    const NAME: &CStr = c"slat-irqfd";
    const WITHOUT: &str = "irqfds will not work";

    fn run(&'static self) {
        let Some(epoll) = lock(&self.epoll).clone() else {
            return;
        };
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; AT_A_TIME];
        loop {
            let (fd, buffer) = (epoll.as_raw_fd() as usize, events.as_mut_ptr() as usize);
            // The call waits without a time limit, and changes no signal mask. The call is `epoll_pwait`, because not
            // every architecture has `epoll_wait`.
            let arguments = [fd, buffer, AT_A_TIME, usize::MAX, 0, 0];
            // SAFETY: the kernel writes into a live buffer, whose length the call passes. This is a direct system call,
            // because a filter for all threads may forbid system calls that the C library makes.
            let answer = calls::result(unsafe { calls::raw(libc::SYS_epoll_pwait, arguments) });
            let count = match answer {
                Ok(count) => count as usize,
                Err(libc::EINTR) => 0,
                Err(errno) => {
                    messages::say(format_args!(
                        "waiting for irqfds failed ({}); irqfds will not work any more",
                        std::io::Error::from_raw_os_error(errno)
                    ));
                    return;
                }
            };
            for event in &events[..count] {
                let found = (lock(&self.irqfds).iter())
                    .find(|irqfd| number(irqfd) == event.u64)
                    .cloned();
                if let Some(irqfd) = found {
                    irqfd.fire();
                }
            }
        }
    }
}
